"""`rrfp trace import` refuses what is damaged, incomplete, or no trace that it reads."""

import gzip
import json
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.analyze.bubbles import bubbles
from rrfp.analyze.frames import frames_of
from rrfp.cli import main as cli
from rrfp.cli.trace import describe_hang, hang_json
from rrfp.errors import RrfpError, UsageError
from rrfp.interchange.assemble import write_run
from rrfp.interchange.formats import import_run
from rrfp.interchange.range_names import ScheduleRange, schedule_range, task_range
from rrfp.interchange.torch_flight_recorder import hang_of, read_dumps
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind
from rrfp.trace.records import Recording
from tests.interchange.made_profiles import (
    FIXTURES,
    Timed,
    dump,
    event_of,
    execution_trace,
    exports,
    plain_profile,
    played,
    profile_of,
    put,
    ran,
    spans_file,
)
from tests.properties.cases import examples
from tests.train.trained import rrfp_here

# Refusals of `rrfp trace import`, which change no files, and its notes on missing ranks.


__all__ = ["put", "ran"]


def test_missing_ranks_are_reported(tmp_path: Path) -> None:
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


F0, B0 = event_of("PP:0F0", 0, 10), event_of("PP:0B0", 20, 10)
GOOD = profile_of([F0, B0])


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (
            {"a.json": profile_of([event_of("forward", 0, 1)])},
            "no ranges of pipeline tasks, and no f",
        ),
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
        ({"a.json": profile_of([{**F0, "dur": -1}])}, "whose dur is -1"),
        ({"a.json": profile_of([{**F0, "ts": float("nan")}])}, "whose ts is nan"),
        ({"a.json": profile_of([{**F0, "ts": 1e300}])}, "whose ts is 1e+300"),
        ({"a.json": profile_of([{**F0, "ts": "1"}])}, "whose ts is 1"),
        ({"a.json": profile_of([F0], 0, 10**9)}, "says that its run had 1000000000 ranks"),
        ({"a.json": {**GOOD, "baseTimeNanoseconds": 10**30}}, "says that its times count from"),
        (
            {"a.json": profile_of([{"ph": "X", "cat": "user_annotation", "name": "PP:0F0"}])},
            "is None",
        ),
        (
            {"a.json": profile_of([event_of("PP:(0F1;0B0)OVERLAP_F_B", 0, 1)])},
            "nothing tells apart",
        ),
        ({"a.json": GOOD, "b.json": GOOD}, "are both of rank 0"),
        ({"a.json": profile_of([F0], None), "b.json": GOOD}, "does not tell its rank"),
        (
            {"a.json": profile_of([F0], 0, 2), "b.json": profile_of([F0], 1, 3)},
            "is of a run of 2 ranks and ",
        ),
        (
            {
                "a.json": GOOD,
                "b.json": profile_of([event_of(task_range(Kind.F, 0, 0, 0, 0), 0, 1)], 1),
            },
            "they are not of one run",
        ),
        (
            {
                "a.json": profile_of(
                    [
                        event_of(task_range(Kind.F, 5, 0, 0, 0), 0, 1),
                        event_of(schedule_range(ScheduleRange(0, 0, 0, 0, 0, (1,))), 0, 1),
                    ]
                )
            },
            "rank 0 ran a task of stage 5 and says that it holds 1",
        ),
        (
            {
                f"{rank}.json": profile_of(
                    [
                        event_of(task_range(Kind.F, 0, 0, 0, 0), 0, 1),
                        event_of(schedule_range(ScheduleRange(0, rank, 0, 0, 0, (0,))), 0, 1),
                    ],
                    rank,
                    2,
                )
                for rank in range(2)
            },
            "ranks 0 and 1 both say that they are pp 0, tp 0, dp 0",
        ),
        ({"a.json": profile_of([{**F0, "ts": 10**400}])}, "whose ts is 1000"),
        ({"a.json": profile_of([{**F0, "ts": True}])}, "whose ts is True"),
        ({"a.json": profile_of([F0, B0], 4, 4)}, "is of rank 4, of a run of 4 ranks"),
        ({"a.json": profile_of([F0, B0], 10**30, 4)}, "as 1048576, so it is damaged"),
        ({"a.json": profile_of([event_of("PP:0F9999999", 0, 1)])}, "the number 9999999 for a rank"),
        ({"a.json": profile_of([F0, event_of("PP:0B0", 1e13, 1)])}, "to last more than 104 days"),
        ({}, "has no file whose name ends in"),
        ({"a.csv": b"", "b.csv": b""}, "import it alone"),
    ],
)
def test_a_file_that_is_not_a_run_is_refused_in_a_sentence(
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
    # A run that appears while the files are read is refused too.
    recording = import_run([FIXTURES / "megatron"]).recording
    with pytest.raises(UsageError, match="run exists; choose another"):
        write_run(tmp_path / "run", recording, force=False)
    assert before == sorted(file.stat().st_mtime_ns for file in (tmp_path / "run").iterdir())


@pytest.mark.parametrize("is_new", [True, False])
def test_a_failed_write_changes_nothing(
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


def rrfp(*arguments: str) -> int:
    with patch("sys.argv", ["rrfp", *arguments]):
        return cli.main()


@pytest.mark.parametrize("table", ["NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_KERNEL"])
def test_an_event_that_ends_before_it_begins_is_refused(
    table: str, ran: list[list[Timed]], tmp_path: Path
) -> None:
    path = exports(ran, tmp_path, late_ns=7_000)[0]
    with sqlite3.connect(path) as database:
        database.execute(f"UPDATE {table} SET end = start - 1 WHERE rowid = 5")
    with pytest.raises(RrfpError, match="that is damaged"):
        import_run([path])


def test_spans_of_more_ranks_than_any_run_has_are_refused(
    ran: list[list[Timed]], tmp_path: Path
) -> None:
    path = spans_file(tmp_path / "spans.jsonl", ran, num_tensor_ranks=1_000_000)
    with pytest.raises(RrfpError, match="says that its run had 2000000 ranks"):
        import_run([path])


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(RrfpError, match="is neither a file nor a directory"):
        import_run([tmp_path / "pipe.json"])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory of rrfp."""
    path = tmp_path / "run"
    code = rrfp("trace", "import", str(FIXTURES / "megatron"), "-o", str(path))
    assert code == 0
    return path


def test_rrfps_own_files_are_recognized(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported, tables = tmp_path / "exported.json.gz", tmp_path / "tables"
    assert rrfp("trace", "export", str(run), "-o", str(exported)) == 0
    assert rrfp("trace", "export", str(run), "-o", str(tables)) == 0
    copied = tmp_path / "copied.bin"
    shutil.copy(FIXTURES / "megatron/rank-0.json.gz", copied)
    for path, sentence in (
        (run, f"{run} is a run already and needs no import; look at it with rrfp analyze {run}"),
        (run / "run.json", f"{run} is a run already"),
        (run / "trace.pftrace", "is a trace of rrfp's own and needs no import"),
        (exported, "is a run of rrfp's that was exported"),
        (tables, "has the tables of a run that was exported"),
    ):
        capsys.readouterr()
        assert rrfp("trace", "import", str(path), "-o", str(tmp_path / "new")) == 1
        assert sentence in capsys.readouterr().err
    # Compressed, whatever its name is.
    assert len(import_run([copied]).recording.ranks) == 1


def packed(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.nsys-rep", b"x", "nsys export --type sqlite a.nsys-rep"),
        ("a.sqlite", b"x", "is no SQLite database"),
        ("a.sqlite", b"SQLite format 3\0" + b"x" * 500, "cannot be read as SQLite"),
        ("a.et", b"\xff" * 300, "is no execution trace of Chakra, or cut off"),
        ("a.et", b"\x7f\x01", "is no execution trace of Chakra, or cut off"),
        ("a.json", b'{"schema": "1.1.1-chakra.0.0.4", "nodes": [3, {}]}', "without times"),
        (
            "a.json",
            b'{"schema": "1.1.1-chakra.0.0.4", "nodes": [{"ts": 1, "inclusive_dur": 1, '
            b'"name": "PP:(0F1;0B0)OVERLAP_F_B"}]}',
            "profile a schedule without OVERLAP_F_B",
        ),
        ("a.json", b'{"resourceSpans": [{"scopeSpans": 3}, 7]}', "has no span megatron.microbatch"),
        ("nccl_trace_rank_0", b"\x80\x02}q\0.", "add --flight-recorder"),
        ("a.json", b'{"entries": []}', "add --flight-recorder"),
        ("a.gz", packed(b""), "is empty; the program"),
    ],
)
def test_a_file_that_is_not_a_trace_is_refused_in_a_sentence(
    name: str,
    content: bytes,
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert rrfp("trace", "import", str(path), "-o", str(tmp_path / "run")) == 1
    told = capsys.readouterr()
    assert sentence in told.err
    assert told.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("CREATE TABLE other (a)", "is a database, and not one of Nsight Systems"),
        ("CREATE TABLE StringIds (id, value)", "has no NVTX ranges"),
        ("CREATE TABLE NVTX_EVENTS (start, text)", "has a table NVTX_EVENTS without end,"),
        (
            "CREATE TABLE StringIds (id, value); CREATE TABLE NVTX_EVENTS (start, end, eventType, "
            "text, textId, globalTid); INSERT INTO NVTX_EVENTS VALUES ('a', 2, 59, 'b', 0, 1)",
            "that is damaged",
        ),
    ],
)
def test_other_databases_are_refused(script: str, sentence: str, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "a.sqlite") as database:
        database.executescript(script)
    with pytest.raises(RrfpError, match=sentence):
        import_run([tmp_path / "a.sqlite"])


def test_spans_of_an_unknown_rank_are_refused(ran: list[list[Timed]], tmp_path: Path) -> None:
    path = spans_file(tmp_path / "spans.jsonl", ran)
    path.write_text(path.read_text().replace("-rank", "-"))
    with pytest.raises(RrfpError, match="does not tell the rank"):
        import_run([path])
    path.write_text(path.read_text().replace("startTimeUnixNano", "start"))
    with pytest.raises(RrfpError, match="export it as OTLP in JSON"):
        import_run([path])


def test_files_of_two_kinds_are_refused(ran: list[list[Timed]], tmp_path: Path) -> None:
    (export, _) = exports(ran, tmp_path)
    spans = spans_file(tmp_path / "spans.jsonl", ran)
    with pytest.raises(RrfpError, match="import those of one kind"):
        import_run([export, spans])


def places_in(document: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value of a JSON document."""
    if isinstance(document, dict | list):
        for key in document if isinstance(document, dict) else range(len(document)):
            yield (*above, key)
            yield from places_in(document[key], (*above, key))


ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0.5,
    1e308,
    10**30,
    "",
    "x",
    [],
    {},
    [[]],
    {"": 0},
    "9" * 30,
)


@pytest.mark.parametrize("kind", ["profile", "spans", "nodes", "dump"])
@examples(quick=60, thorough=3000)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(kind: str, data: st.DataObject) -> None:
    rows = played("1f1b", Shape(2, 2), 1)
    with TemporaryDirectory() as name:
        directory = Path(name)
        match kind:
            case "profile":
                document: Any = plain_profile(rows[0], 0, 2, pg_config=[{"pg_desc": "pp"}])
            case "spans":
                document = json.loads(spans_file(directory / "0", rows).read_text().split("\n")[0])
            case "nodes":
                document = execution_trace(rows[0])
            case _:
                document = dump([("recv 0<-1", "18", 1, "started"), ("barrier", "0", 1, "x")])
        *above, last = data.draw(st.sampled_from(list(places_in(document))))
        holder = document
        for key in above:
            holder = holder[key]
        holder[last] = data.draw(st.sampled_from(ODD_VALUES))
        path = directory / "rank_0.json"
        path.write_text(json.dumps(document))
        with suppress(RrfpError):
            if kind == "dump":
                hang = hang_of(read_dumps([path], print))
                assert describe_hang(hang)
                assert json.loads(hang_json(hang))
            else:
                check_recording(import_run([path]).recording)


def check_recording(recording: Recording) -> None:
    for rank in bubbles(frames_of(recording)).ranks:
        assert rank.busy_ns + sum(rank.causes_ns.values()) == rank.window_ns


def test_a_database_with_names_that_are_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE xyzzy (number INTEGER)")
    data = path.read_bytes().replace(b"CREATE", b"CREAT\xc4").replace(b"xyzzy", b"xy\xc4zy")
    path.write_bytes(data)
    with pytest.raises(RrfpError, match="cannot be read as SQLite"):
        import_run([path])


def test_a_database_with_a_cycle_of_pages_is_refused(
    ran: list[list[Timed]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = exports(ran, tmp_path)[0]
    monkeypatch.setattr("rrfp.interchange.nsight._LEAST_STEPS", 1000)
    monkeypatch.setattr("rrfp.interchange.nsight._STEPS_OF_A_BYTE", 0)
    monkeypatch.setattr("rrfp.interchange.nsight._STEPS_AT_ONCE", 100)
    with pytest.raises(RrfpError, match=r"cannot be read as SQLite \(interrupted\)"):
        import_run([path])
