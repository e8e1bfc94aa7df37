"""Checks on a GPU: every line of docs/gpu.md, and the findings of `rrfp doctor` there.

Only these tests compare figures with their goals.
"""

import json
from pathlib import Path

import pytest

from benchmarks.gpu.lines import LINES, Line
from rrfp.runtime.device.cuda_runtime import check_cuda
from tests.train.trained import rrfp

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="session", autouse=True)
def _gpu() -> None:
    problem = check_cuda().problem
    if problem is not None:
        pytest.skip(problem)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_a_line_holds(line: Line) -> None:
    lacks = line.lacks()
    if lacks is not None:
        pytest.skip(lacks)
    measured = line.measure()
    assert measured.holds, f"{measured.figure}, where the goal is {line.goal}"


def test_the_doctor_finds_the_gpu(tmp_path: Path) -> None:
    done = rrfp(tmp_path, "doctor", "--format", "json")
    assert done.returncode == 0, done.stderr
    states = {each["name"]: each["state"] for each in json.loads(done.stdout)["checks"]}
    assert {states["gpu"], states["gpu-clock"]} <= {"ok", "slow"}
    assert states["cuda-ipc"] != "fails"
