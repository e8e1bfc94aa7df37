"""The time of day may jump: nothing but a display may follow it."""

import ast
import os
from pathlib import Path

import pytest

import rrfp
from tests.trained import TINY
from tests.trained import rrfp as run_rrfp

JUMPING = """
import time
own, calls = time.time, [0]
def jumping():
    calls[0] += 1
    return own() + (-86400.0, 0.0, 86400.0)[calls[0] % 3]
time.time = jumping
time.time_ns = lambda: round(jumping() * 1e9)
"""

ALLOWED = {
    "cli/runs.py": "tells when runs began",
    "cli/trace.py": "tells when a job hung",
    "megatron/job": "names a run's directory",
    "runtime/net/tls.py": "certificates have dates",
    "train/launch/failure.py": "torchrun reads the second of an error file",
    "trace/run_dir.py": "names a run's directory",
    "watch/follow.py": "tells the hour, and compares with a file of another user's",
}


def test_only_displays_ask_for_the_time_of_day() -> None:
    root = Path(rrfp.__file__).parent
    asking = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and (
            (node.attr in ("time", "time_ns") and _is(node.value, "time"))
            or (node.attr in ("now", "utcnow", "today") and _is(node.value, "datetime"))
        )
    }
    strange = {path for path in asking if not path.startswith(tuple(ALLOWED))}
    assert strange == set()


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


@pytest.mark.slow
def test_a_run_goes_on_while_the_clock_jumps_by_days(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(JUMPING)
    with pytest.MonkeyPatch.context() as context:
        context.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
        flags = ("--pp", "2", "--steps", "4", "--out", "run", "--save", "ck", "--save-async")
        done = run_rrfp(tmp_path, "train", *TINY, *flags)
        checked = run_rrfp(tmp_path, "trace", "check", "run")
    assert done.returncode == 0, done.stderr
    assert (checked.returncode, checked.stderr) == (0, ""), checked.stdout
