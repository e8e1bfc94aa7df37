"""What Nsight Systems, OpenTelemetry and Chakra recorded, made into runs; and what is no trace."""

import gzip
import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
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
from rrfp.cli.trace.hang import hang_json, hang_text
from rrfp.errors import RrfpError
from rrfp.interchange.files import import_run
from rrfp.interchange.flight.dumps import read_dumps
from rrfp.interchange.flight.hang import hang_of
from rrfp.interchange.named_ranks import ranks_by_name
from rrfp.interchange.ranges import ScheduleRange, schedule_range, task_range
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind
from rrfp.trace.records import Recording
from rrfp.trace.steps import evaluation_step
from tests.effort import examples
from tests.flight_dumps import dump
from tests.timed_orders import (
    Timed,
    Told,
    expected_tasks,
    operators,
    plain_profile,
    played,
    told_tasks,
)

FIXTURES = Path(__file__).parent / "fixtures"
SHAPE = Shape(2, 4, 2)
ORIGIN_NS = 1_700_000_000_000_000_000


def rrfp(*arguments: str) -> int:
    with patch("sys.argv", ["rrfp", *arguments]):
        return cli.main()


@pytest.fixture
def ran() -> list[list[Timed]]:
    return played("interleaved", SHAPE, 2)


def check_imported(paths: list[Path], ran: list[list[Timed]]) -> tuple[str, ...]:
    imported = import_run(paths)
    for rank, rows in enumerate(ran):
        assert told_tasks(imported.recording, rank) == expected_tasks(rows)
    assert imported.recording.settings["settings"]["hint"] == "interleaved"  # type: ignore[index]
    return imported.notes


def nsight_export(path: Path, told: Iterator[Told], *, late_ns: int | None = None) -> Path:
    """An export in the schema that Nsight Systems documents, with the ranges of emit_nvtx. With
    `late_ns` every range launches a kernel, which runs so much later and for as long."""
    with sqlite3.connect(path) as database:
        database.executescript(
            "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);"
            "CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT "
            "NULL, rangeId INTEGER, category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, "
            "endGlobalTid INTEGER, textId INTEGER, domainId INTEGER);"
        )
        if late_ns is not None:
            database.executescript(
                "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT "
                "NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER, "
                "nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL);"
                "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT "
                "NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT "
                "NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL, "
                "shortName INTEGER NOT NULL);"
            )
        process = 1 << 56 | 4242 << 24
        for number, (start_ns, end_ns, name, sequence) in enumerate(told):
            text = name if sequence is None else f"{name}, seq = {sequence}, op_id = {number}"
            database.execute("INSERT INTO StringIds VALUES (?, ?)", (number, text))
            database.execute(
                "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, 0, 0, 0, NULL, ?, NULL, ?, 0)",
                (start_ns, end_ns, process | 4242, number),
            )
            if late_ns is not None:
                database.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, 0, 0)",
                    (start_ns + 1, start_ns + 2, process | 4242, number),
                )
                database.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 1, 7, ?, ?, 0, 0)",
                    (start_ns + late_ns, end_ns + late_ns, number, process),
                )
    return path


def exports(ran: list[list[Timed]], directory: Path, late_ns: int | None = None) -> list[Path]:
    return [
        nsight_export(directory / f"report_{rank}.sqlite", operators(rows), late_ns=late_ns)
        for rank, rows in enumerate(ran)
    ]


def test_nsight_systems_tells_the_ranges_of_operators(
    ran: list[list[Timed]], tmp_path: Path
) -> None:
    notes = check_imported(exports(ran, tmp_path), ran)
    assert any("2 chunks a rank, interleaved by Megatron" in note for note in notes)


def test_nsight_systems_tells_when_the_gpu_ran(ran: list[list[Timed]], tmp_path: Path) -> None:
    paths = exports(ran, tmp_path, late_ns=7_000)
    check_imported(paths, ran)
    assert import_run(paths).recording.settings["settings"]["device"] == "cuda"  # type: ignore[index]


@pytest.mark.parametrize(
    ("names", "found", "is_noted"),
    [
        (("report1", "report2"), [0, 1], True),
        (("report10", "report9"), [1, 0], True),
        (("job_48213", "job_48214"), [0, 1], True),
        (("report_1", "report_0"), [1, 0], False),
        (("a_rank3_of_8", "a_Rank-12_of_8"), [3, 12], False),
        (("pprank3", "b"), [1, 0], True),
    ],
)
def test_only_some_numbers_in_names_are_ranks(
    names: tuple[str, ...], found: list[int], is_noted: bool
) -> None:
    ranks, notes = ranks_by_name([Path(f"run7/{name}.json.gz") for name in names])
    assert (ranks, bool(notes)) == (found, is_noted)


def test_files_are_numbered_by_name_and_that_is_told(
    ran: list[list[Timed]], tmp_path: Path
) -> None:
    paths = [
        path.rename(tmp_path / f"job_4821{place}.sqlite")
        for place, path in enumerate(exports(ran, tmp_path), 3)
    ]
    notes = check_imported(paths, ran)
    assert any("the files' names do not tell ranks" in note for note in notes)
    assert not any("missing" in note for note in notes)


@pytest.mark.parametrize("table", ["NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_KERNEL"])
def test_what_ends_before_it_began_is_refused(
    table: str, ran: list[list[Timed]], tmp_path: Path
) -> None:
    path = exports(ran, tmp_path, late_ns=7_000)[0]
    with sqlite3.connect(path) as database:
        database.execute(f"UPDATE {table} SET end = start - 1 WHERE rowid = 5")
    with pytest.raises(RrfpError, match="that is damaged"):
        import_run([path])


def test_nsight_systems_tells_our_ranges(ran: list[list[Timed]], tmp_path: Path) -> None:
    """Those of trace_native, which tell everything, whatever the files are called."""

    def ranges(rank: int, rows: list[Timed]) -> Iterator[Told]:
        for start_ns, end_ns, step, task in rows:
            chunk = SHAPE.chunk_of(task.stage)
            name = task_range(task.kind, task.stage, chunk, task.microbatch, step)
            yield Told(start_ns, end_ns, name, None)
        for step in {row.step for row in rows}:
            own = [row for row in rows if row.step == step]
            call = ScheduleRange(step, rank, rank, 0, 0, SHAPE.stages_of(rank))
            yield Told(own[0].start_ns, own[-1].end_ns, schedule_range(call), None)

    paths = [
        nsight_export(tmp_path / f"{name}.sqlite", ranges(rank, rows))
        for name, rank, rows in zip("ab", (0, 1), ran, strict=True)
    ]
    assert check_imported(paths, ran) == ()


def spans_file(
    path: Path, ran: list[list[Timed]], *, evaluates: bool = False, num_tensor_ranks: int = 1
) -> Path:
    """What the collector's file exporter writes of Megatron-LM's spans: a line an export."""
    lines = []
    for rank, rows in enumerate(ran):
        spans = []
        for step in sorted({row.step for row in rows}):
            own = [row for row in rows if row.step == step]
            is_test = evaluates and step == 1
            own = [row for row in own if row.task.kind is Kind.F] if is_test else own
            around = "megatron.evaluate.step" if is_test else "megatron.train.iteration"
            told = [{"key": "megatron.iteration", "value": {"intValue": str(step)}}]
            spans.append((own[0].start_ns - 5_000, own[-1].end_ns + 5_000, around, told))
            for start_ns, end_ns, _, task in own:
                kind = "forward" if task.kind is Kind.F else "backward"
                spans.append((start_ns, end_ns, f"megatron.microbatch.{kind}", []))
                spans.append((start_ns - 4_000, start_ns, f"megatron.p2p.recv_{kind}", []))
        resource = [
            {"key": "service.instance.id", "value": {"stringValue": f"job7-rank{rank}"}},
            {"key": "dl.pipeline_parallel.size", "value": {"intValue": "2"}},
            {"key": "dl.tensor_parallel.size", "value": {"intValue": str(num_tensor_ranks)}},
        ]
        exported = [
            {
                "name": name,
                "startTimeUnixNano": str(ORIGIN_NS + start_ns),
                "endTimeUnixNano": str(ORIGIN_NS + end_ns),
                "attributes": attributes,
            }
            for start_ns, end_ns, name, attributes in spans
        ]
        lines.append(
            {
                "resourceSpans": [
                    {"resource": {"attributes": resource}, "scopeSpans": [{"spans": exported}]}
                ]
            }
        )
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_spans_of_megatron_are_numbered(ran: list[list[Timed]], tmp_path: Path) -> None:
    notes = check_imported([spans_file(tmp_path / "spans.jsonl", ran)], ran)
    assert any("the spans are the host's" in note for note in notes)


def test_steps_of_a_resumed_job_count_as_they_ran_last(
    ran: list[list[Timed]], tmp_path: Path
) -> None:
    """It ran steps 0 and 1, and was resumed from 1 after a second."""
    resumed = [
        rows
        + [
            row._replace(start_ns=row.start_ns + 1_000_000_000, end_ns=row.end_ns + 1_000_000_000)
            for row in rows
            if row.step == 1
        ]
        for rows in ran
    ]
    parts = ran, [rows[len(ran[0]) :] for rows in resumed]
    lines = [spans_file(tmp_path / "part.jsonl", part).read_text() for part in parts]
    path = tmp_path / "spans.jsonl"
    path.write_text("\n".join(lines))
    ran_last = [
        [row for row in rows[: len(ran[0])] if row.step == 0] + rows[len(ran[0]) :]
        for rows in resumed
    ]
    notes = check_imported([path], ran_last)
    assert any(
        "1 step ran more than once, as in a job that was resumed (1)" in each for each in notes
    )


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


def test_spans_of_an_evaluation_are_one(ran: list[list[Timed]], tmp_path: Path) -> None:
    path = spans_file(tmp_path / "spans.jsonl", ran, evaluates=True)
    steps = {task.step for task in import_run([path]).recording.ranks[1].tasks}
    assert steps == {0, evaluation_step(0)}


def execution_trace(rows: list[Timed]) -> dict[str, Any]:
    """What chakra_trace_link writes."""
    nodes = [
        {
            "id": number,
            "name": name,
            "ctrl_deps": 1,
            "ts": start_ns / 1_000,
            "inclusive_dur": (end_ns - start_ns) / 1_000,
            "attrs": [{"name": "seq_id", "type": "int64", "value": sequence}],
        }
        for number, (start_ns, end_ns, name, sequence) in enumerate(operators(rows))
    ]
    return {"schema": "1.1.1-chakra.0.0.4", "nodes": nodes}


def test_an_execution_trace_with_times_is_read(ran: list[list[Timed]], tmp_path: Path) -> None:
    paths = []
    for rank, rows in enumerate(ran):
        paths.append(tmp_path / f"linked.{rank}.json")
        paths[-1].write_text(json.dumps(execution_trace(rows)))
    check_imported(paths, ran)


def varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def protobuf(told: Iterator[Told], *, has_times: bool) -> bytes:
    """Nodes as et_def.proto has them, with their times rounded to microseconds."""
    messages = [field(1, b"0.0.4")]
    for number, (start_ns, end_ns, name, sequence) in enumerate(told):
        seq_id = field(1, b"seq_id") + field(9, sequence or 0)
        start_us = start_ns // 1_000
        times = field(6, start_us) + field(7, end_ns // 1_000 - start_us) if has_times else b""
        messages.append(
            field(1, number) + field(2, name.encode()) + field(3, 4) + times + field(10, seq_id)
        )
    return b"".join(varint(len(message)) + message for message in messages)


def test_an_execution_trace_in_protobuf_is_read(ran: list[list[Timed]], tmp_path: Path) -> None:
    paths = []
    for rank, rows in enumerate(ran):
        paths.append(tmp_path / f"job.{rank}.et")
        paths[-1].write_bytes(protobuf(operators(rows), has_times=True))
    recording = import_run(paths).recording
    for rank, rows in enumerate(ran):
        found = [(step, task) for _, step, task in told_tasks(recording, rank)]
        assert found == [(row.step, row.task) for row in rows]
    (tmp_path / "untimed.0.et").write_bytes(protobuf(operators(ran[0]), has_times=False))
    with pytest.raises(RrfpError, match="is an execution trace without times"):
        import_run([tmp_path / "untimed.0.et"])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of ours."""
    path = tmp_path / "run"
    code = rrfp("trace", "import", str(FIXTURES / "megatron"), "-o", str(path))
    assert code == 0
    return path


def test_what_is_ours_is_known_as_such(
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
    return gzip.compress(data)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.nsys-rep", b"x", "nsys export --type sqlite a.nsys-rep"),
        ("a.sqlite", b"x", "is no SQLite database"),
        ("a.sqlite", b"SQLite format 3\0" + b"x" * 500, "cannot be read as SQLite"),
        ("a.et", b"\xff" * 300, "is no execution trace of Chakra, or cut off"),
        ("a.et", b"\x7f\x01", "is no execution trace of Chakra, or cut off"),
        ("a.json", b'{"schema": "1.1.1-chakra.0.0.4", "nodes": [3, {}]}', "without times"),
        ("a.json", b'{"resourceSpans": [{"scopeSpans": 3}, 7]}', "has no span megatron.microbatch"),
        ("nccl_trace_rank_0", b"\x80\x02}q\0.", "add --flight-recorder"),
        ("a.json", b'{"entries": []}', "add --flight-recorder"),
        ("a.gz", packed(b""), "is empty; the program"),
    ],
)
def test_what_is_no_trace_is_refused_in_a_sentence(
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
                assert hang_text(hang)
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


def test_a_database_without_an_end_is_refused(
    ran: list[list[Timed]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = exports(ran, tmp_path)[0]
    monkeypatch.setattr("rrfp.interchange.nsight.tables._LEAST_STEPS", 1000)
    monkeypatch.setattr("rrfp.interchange.nsight.tables._STEPS_OF_A_BYTE", 0)
    monkeypatch.setattr("rrfp.interchange.nsight.tables._STEPS_AT_ONCE", 100)
    with pytest.raises(RrfpError, match=r"cannot be read as SQLite \(interrupted\)"):
        import_run([path])
