"""The time of day may jump: nothing but a display may follow it."""

import ast
from pathlib import Path

import rrfp

ALLOWED = {
    "cli/runs.py": "tells when runs began",
    "cli/trace/hang.py": "tells when a job hung",
    "megatron/job": "names a run's directory",
    "runtime/transport/tls.py": "certificates have dates",
    "train/ranks/failure.py": "torchrun reads the second of an error file",
    "trace/rundir.py": "names a run's directory",
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
