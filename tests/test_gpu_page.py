"""The page of figures from GPUs and the kit that measures them list the same lines."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import figures
from benchmarks.gpu.__main__ import HEAD, NOT_BUILT, table
from benchmarks.gpu.lines import LINES, Line, Measured
from benchmarks.gpu.messages import one_way_us
from rrfp.errors import UsageError
from rrfp.runtime.device.cuda_presence import CudaPresence, Gpu, cuda_problem
from rrfp.runtime.probe import NoAnswerError, probe

ROOT = Path(__file__).parent.parent
GPU = CudaPresence((Gpu("NVIDIA H200", 150_000_000_000),), None)


def rows(text: str) -> list[list[str]]:
    """The cells of a Markdown table."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


ROWS = rows((ROOT / "docs" / "gpu.md").read_text())


def test_the_page_and_the_kit_have_the_same_lines() -> None:
    head, _, *lines = ROWS
    assert tuple(head) == HEAD
    assert [line[:2] for line in lines] == [[line.name, line.goal] for line in LINES]


@pytest.mark.parametrize("row", ROWS[2:], ids=lambda row: row[0])
def test_a_figure_says_when_where_and_on_what_commit(row: list[str]) -> None:
    line = next(line for line in LINES if line.name == row[0])
    figure, when, where, commit = row[2:]
    if line.measure is None:
        assert figure == f"{NOT_BUILT}: {line.lacks}"
    if figure == "not run yet" or line.measure is None:
        assert {when, where, commit} == {""}
    else:
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", when)
        assert where
        assert re.fullmatch(r"[0-9a-f]{7,40}\+?", commit)


def test_without_a_gpu_the_kit_says_so() -> None:
    problem = cuda_problem()
    if problem is None:
        pytest.skip("this machine has a GPU")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        f"Nothing is measured: {problem}\n",
        "",
    )


@pytest.mark.parametrize(
    ("name", "told", "figure", "holds"),
    [
        ("Copies within", 1900.2, "1900 GB/s", True),
        ("Launch of", {"spinning": 8.26, "blocking": 31.0}, "8.3 us spinning, 31.0 us", True),
        ("device, 64 MB", {"ipc": 1600.0, "own": 2000.0}, "1600 GB/s, 80%", True),
        ("device, 64 MB", {"ipc": 1500.0, "own": 2000.0}, "1500 GB/s, 75%", False),
        ("64 KB over CUDA IPC", 59.9, "59.9 us", True),
        ("64 KB over CUDA IPC", 60.0, "60.0 us", False),
        ("64 MB over CUDA IPC", 100.0, "100 us, 671 GB/s", True),
    ],
)
def test_a_line_holds_up_to_its_goal(
    monkeypatch: pytest.MonkeyPatch, name: str, told: object, figure: str, holds: bool
) -> None:
    monkeypatch.setattr("benchmarks.gpu.lines.probe", lambda *_, **__: told)
    *_, line = (line for line in LINES if name in line.name)
    assert line.measure is not None
    measured = line.measure()
    assert measured.figure.startswith(figure)
    assert measured.holds is holds


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("measure", [figures.copies, figures.large_ipc, figures.wake_ups])
def test_measuring_refuses_without_a_driver(measure: Callable[[], object]) -> None:
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        measure()


def test_messages_are_sent_over_the_transport_of_a_run() -> None:
    assert probe(one_way_us, "cpu", "shm", 1 << 20, 3, limit_s=60) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("measure", [figures.small_message, figures.large_message])
def test_sending_messages_refuses_without_a_driver(measure: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match="the model is on cuda"):
        measure()


def fails() -> Measured:
    raise NoAnswerError("it was killed: Bus error")


def test_the_table_has_the_form_of_the_page() -> None:
    lines = (
        Line("one", "fast", lambda: Measured("9 us")),
        Line("two", "fast", lambda: Measured("90 us", holds=False)),
        Line("three", "fast", fails),
        Line("four", "", lacks="there is nothing to measure"),
    )
    printed = [*table(lines, GPU)]
    head, _, *told = rows("\n".join(row for row, _ in printed))
    assert tuple(head) == HEAD
    assert [holds for _, holds in printed] == [True, True, True, False, False, True]
    figures = ["9 us", "90 us: missed", "failed: it was killed: Bus error"]
    assert [line[2] for line in told] == [*figures, f"{NOT_BUILT}: there is nothing to measure"]
    assert told[0][4].startswith("1 x NVIDIA H200, torch ")
    assert told[3][3:] == ["", "", ""]
