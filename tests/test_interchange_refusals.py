"""What `rrfp trace import` refuses, and leaves as it was, and which ranks it says are missing."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rrfp.errors import RrfpError
from rrfp.interchange.formats import import_run
from rrfp.interchange.range_names import ScheduleRange, schedule_range, task_range
from rrfp.schedule.tasks import Kind
from tests.made_profiles import FIXTURES, event, profile, put
from tests.trained import rrfp_here

__all__ = ["put"]


def test_missing_ranks_are_told(tmp_path: Path) -> None:
    files = [FIXTURES / f"megatron/rank-{rank}.json.gz" for rank in (0, 1, 3)]
    assert import_run(files).notes == (
        "1 of 4 ranks is missing (2): what is said of waits for them, and of the run as a whole, "
        "is said without them",
    )
    imported = rrfp_here(tmp_path, "trace", "import", *map(str, files), "-o", "run")
    assert imported.returncode == 0
    checked = rrfp_here(tmp_path, "trace", "check", "run")
    assert checked.returncode == 1
    assert "missing: 1 rank of the run" in checked.stdout


F0, B0 = event("PP:0F0", 0, 10), event("PP:0B0", 20, 10)
GOOD = profile([F0, B0])


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"a.json": profile([event("forward", 0, 1)])}, "no ranges of pipeline tasks, and no f"),
        ({"a.json": b""}, "is empty; the program"),
        ({"a.json": json.dumps(GOOD).encode()[:-40]}, "is empty, cut off or no profile"),
        ({"a.json": b"\x00\x01\x02"}, "is empty, cut off or no profile"),
        ({"a.json": b"[" * 100_000}, "is empty, cut off or no profile"),
        ({"a.json": b'{"traceEvents": [' + b"9" * 5000}, "is empty, cut off or no profile"),
        ({"a.json": b'{"traceEvents": ["\xff\xfe"]}'}, "is not UTF-8 text"),
        ({"a.json": 3}, "is empty, cut off or no profile"),
        ({"a.json": {"traceEvents": 3}}, "it has no traceEvents"),
        ({"a.json": {"name": "package"}}, "it has no traceEvents"),
        ({"a.json": []}, "no ranges of pipeline tasks"),
        ({"a.json.gz": b" " * 30_000_000}, "expands to more than 200 times its size"),
        ({"a.json": profile([{**F0, "dur": -1}])}, "whose dur is -1"),
        ({"a.json": profile([{**F0, "ts": float("nan")}])}, "whose ts is nan"),
        ({"a.json": profile([{**F0, "ts": 1e300}])}, "whose ts is 1e+300"),
        ({"a.json": profile([{**F0, "ts": "1"}])}, "whose ts is 1"),
        ({"a.json": profile([F0], 0, 10**9)}, "says that its run had 1000000000 ranks"),
        ({"a.json": {**GOOD, "baseTimeNanoseconds": 10**30}}, "says that its times count from"),
        ({"a.json": profile([{"ph": "X", "cat": "user_annotation", "name": "PP:0F0"}])}, "is None"),
        ({"a.json": profile([event("PP:(0F1;0B0)OVERLAP_F_B", 0, 1)])}, "nothing tells apart"),
        ({"a.json": GOOD, "b.json": GOOD}, "are both of rank 0"),
        ({"a.json": profile([F0], None), "b.json": GOOD}, "does not tell its rank"),
        (
            {"a.json": profile([F0], 0, 2), "b.json": profile([F0], 1, 3)},
            "is of a run of 2 ranks and ",
        ),
        (
            {"a.json": GOOD, "b.json": profile([event(task_range(Kind.F, 0, 0, 0, 0), 0, 1)], 1)},
            "they are not of one run",
        ),
        (
            {
                "a.json": profile(
                    [
                        event(task_range(Kind.F, 5, 0, 0, 0), 0, 1),
                        event(schedule_range(ScheduleRange(0, 0, 0, 0, 0, (1,))), 0, 1),
                    ]
                )
            },
            "rank 0 ran a task of stage 5 and says that it holds 1",
        ),
        (
            {
                f"{rank}.json": profile(
                    [
                        event(task_range(Kind.F, 0, 0, 0, 0), 0, 1),
                        event(schedule_range(ScheduleRange(0, rank, 0, 0, 0, (0,))), 0, 1),
                    ],
                    rank,
                    2,
                )
                for rank in range(2)
            },
            "ranks 0 and 1 both say that they are pp 0, tp 0, dp 0",
        ),
        ({"a.json": profile([{**F0, "ts": 10**400}])}, "whose ts is 1000"),
        ({"a.json": profile([{**F0, "ts": True}])}, "whose ts is True"),
        ({"a.json": profile([F0, B0], 4, 4)}, "is of rank 4, of a run of 4 ranks"),
        ({"a.json": profile([F0, B0], 10**30, 4)}, "as 1048576, so it is damaged"),
        ({"a.json": profile([event("PP:0F9999999", 0, 1)])}, "the number 9999999 for a rank"),
        ({"a.json": profile([F0, event("PP:0B0", 1e13, 1)])}, "to last more than 104 days"),
        ({}, "has no file whose name ends in"),
        ({"a.csv": b"", "b.csv": b""}, "import it alone"),
    ],
)
def test_what_is_no_run_is_refused_in_a_sentence(
    files: dict[str, Any],
    sentence: str,
    put: Callable[[str, Any], Path],
    tmp_path: Path,
) -> None:
    for name, content in files.items():
        put(name, content)
    out = tmp_path / "run"
    told = rrfp_here(tmp_path, "trace", "import", str(tmp_path), "-o", str(out))
    assert told.returncode == 1
    assert sentence in told.stderr
    assert told.stderr.count("\n") == 1
    assert told.stdout == ""
    assert not out.exists()


def test_a_gzip_that_is_cut_off_or_none_is_refused(tmp_path: Path) -> None:
    packed = (FIXTURES / "megatron/rank-0.json.gz").read_bytes()
    for name, data, sentence in (
        ("cut.json.gz", packed[:-100], "is cut off"),
        ("plain.json.gz", b"{}", "is no gzip file"),
        ("bits.json.gz", packed[:200] + b"\0\0\0\0" + packed[204:], "is no gzip file"),
        ("missing.json", None, "there is nothing at"),
    ):
        path = tmp_path / name
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(RrfpError, match=sentence):
            import_run([path])


def test_an_existing_run_is_replaced_only_by_force(tmp_path: Path) -> None:
    def imported(source: Path, *flags: str) -> subprocess.CompletedProcess[str]:
        return rrfp_here(tmp_path, "trace", "import", str(source), "-o", "run", *flags)

    first = imported(FIXTURES / "megatron")
    assert first.returncode == 0
    assert "192 tasks of 4 ranks in 3 steps" in first.stdout
    assert imported(FIXTURES / "megatron").returncode == 2
    assert imported(FIXTURES / "megatron", "--force").returncode == 0
    (tmp_path / "run" / "metrics.jsonl").touch()
    before = sorted(file.stat().st_mtime_ns for file in (tmp_path / "run").iterdir())
    assert imported(tmp_path / "none", "--force").returncode == 1
    assert before == sorted(file.stat().st_mtime_ns for file in (tmp_path / "run").iterdir())
    # It is refused before anything is read.
    assert imported(tmp_path / "none").returncode == 2


@pytest.mark.parametrize("is_new", [True, False])
def test_what_cannot_be_written_leaves_things_as_they_were(
    is_new: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    if not is_new:
        run.mkdir()
        (run / "trace.pftrace").write_text("the old one")

    def is_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rrfp.trace.perfetto.writer.write_trace", is_full)
    source = str(FIXTURES / "megatron")
    failed = rrfp_here(tmp_path, "trace", "import", source, "-o", str(run), "--force")
    assert failed.returncode == 1
    assert "could not be written: No space left" in failed.stderr
    assert [file.name for file in tmp_path.rglob("*")] == (
        [] if is_new else ["run", "trace.pftrace"]
    )
