"""Traces of other tools become runs, and runs become traces of other tools."""

import csv
import gzip
import io
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

import polars as pl
import pytest

from rrfp.analyze.bubbles import bubbles
from rrfp.analyze.frame_files import TABLES
from rrfp.analyze.frames import frames_of
from rrfp.errors import RrfpError
from rrfp.interchange.chrome import write_chrome
from rrfp.interchange.formats import import_run
from rrfp.interchange.range_names import ScheduleRange, ranks_by_name, schedule_range, task_range
from rrfp.replay.whatif import what_if
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import Phase, TaskRecord, WaitRecord, evaluation_step
from tests.analyze.recordings import make_recording
from tests.e2e.trace_processor import MISSING, trace_processor
from tests.interchange.made_profiles import (
    SHAPE,
    NamedSpan,
    Timed,
    execution_trace,
    expected_tasks,
    exports,
    imported_tasks,
    nsight_export,
    operators,
    protobuf,
    ran,
    spans_file,
)
from tests.train.trained import rrfp_here

# Runs from traces of Nsight Systems, OpenTelemetry and Chakra.


__all__ = ["ran"]


def check_imported(paths: list[Path], ran: list[list[Timed]]) -> tuple[str, ...]:
    imported = import_run(paths)
    for rank, rows in enumerate(ran):
        assert imported_tasks(imported.recording, rank) == expected_tasks(rows)
    assert imported.recording.settings["settings"]["hint"] == "interleaved"  # type: ignore[index]
    return imported.notes


def test_operators_in_nsight_systems_are_imported(ran: list[list[Timed]], tmp_path: Path) -> None:
    notes = check_imported(exports(ran, tmp_path), ran)
    assert any("2 chunks a rank, interleaved by Megatron" in note for note in notes)


def test_gpu_times_in_nsight_systems_are_imported(ran: list[list[Timed]], tmp_path: Path) -> None:
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


def test_files_are_numbered_by_name_with_a_note(ran: list[list[Timed]], tmp_path: Path) -> None:
    paths = [
        path.rename(tmp_path / f"job_4821{place}.sqlite")
        for place, path in enumerate(exports(ran, tmp_path), 3)
    ]
    notes = check_imported(paths, ran)
    assert any("the files' names do not tell ranks" in note for note in notes)
    assert not any("missing" in note for note in notes)


def test_rrfps_ranges_in_nsight_systems_are_imported(
    ran: list[list[Timed]], tmp_path: Path
) -> None:
    """The ranges of trace_native contain everything, so the names of the files do not matter."""

    def ranges(rank: int, rows: list[Timed]) -> Iterator[NamedSpan]:
        for start_ns, end_ns, step, task in rows:
            chunk = SHAPE.chunk_of(task.stage)
            name = task_range(task.kind, task.stage, chunk, task.microbatch, step)
            yield NamedSpan(start_ns, end_ns, name, None)
        for step in {row.step for row in rows}:
            own = [row for row in rows if row.step == step]
            call = ScheduleRange(step, rank, rank, 0, 0, SHAPE.stages_of(rank))
            yield NamedSpan(own[0].start_ns, own[-1].end_ns, schedule_range(call), None)

    paths = [
        nsight_export(tmp_path / f"{name}.sqlite", ranges(rank, rows))
        for name, rank, rows in zip("ab", (0, 1), ran, strict=True)
    ]
    assert check_imported(paths, ran) == ()


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


def test_spans_of_an_evaluation_are_one(ran: list[list[Timed]], tmp_path: Path) -> None:
    path = spans_file(tmp_path / "spans.jsonl", ran, evaluates=True)
    steps = {task.step for task in import_run([path]).recording.ranks[1].tasks}
    assert steps == {0, evaluation_step(0)}


def test_an_execution_trace_with_times_is_read(ran: list[list[Timed]], tmp_path: Path) -> None:
    paths = []
    for rank, rows in enumerate(ran):
        paths.append(tmp_path / f"linked.{rank}.json")
        paths[-1].write_text(json.dumps(execution_trace(rows)))
    check_imported(paths, ran)


def test_an_execution_trace_in_protobuf_is_read(ran: list[list[Timed]], tmp_path: Path) -> None:
    paths = []
    for rank, rows in enumerate(ran):
        paths.append(tmp_path / f"job.{rank}.et")
        paths[-1].write_bytes(protobuf(operators(rows), has_times=True))
    recording = import_run(paths).recording
    for rank, rows in enumerate(ran):
        found = [(step, task) for _, step, task in imported_tasks(recording, rank)]
        assert found == [(row.step, row.task) for row in rows]
    (tmp_path / "untimed.0.et").write_bytes(protobuf(operators(ran[0]), has_times=False))
    with pytest.raises(RrfpError, match="is an execution trace without times"):
        import_run([tmp_path / "untimed.0.et"])


COLUMNS = (
    *("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration"),
    *("seq_id", "mc", "gmc", "mb_id"),
)


def row(rank: int, step: int, optype: str, start: float, end: float, mb: int = -1) -> list[Any]:
    is_task = optype.endswith("-compute")
    chunk, of_model = (0, rank) if is_task else (-1, -1)
    return [0, rank, rank, step, optype, start, round(end - start, 9), 0, chunk, of_model, mb]


def steps_of_two_stages(step: int) -> list[list[Any]]:
    """One microbatch over two stages: forwards of 1 s, backwards of 2 s, messages of 0.1 s."""
    return [
        row(0, step, "params-all-gather", 0, 0.5),
        row(0, step, "forward-compute", 1, 2, 0),
        row(0, step, "forward-send", 2, 2.1),
        row(0, step, "backward-recv", 2.1, 5.2),
        row(0, step, "backward-compute", 5.2, 7.2, 0),
        row(0, step, "grads-reduce-scatter", 7.2, 8),
        row(0, step, "optimizer", 8, 8.5),
        row(1, step, "forward-recv", 1, 2.1),
        row(1, step, "forward-compute", 2.1, 3.1, 0),
        row(1, step, "backward-compute", 3.1, 5.1, 0),
        row(1, step, "backward-send", 5.1, 5.2),
        row(1, step, "gc", 5.2, 5.2, 0),
    ]


def written(path: Path, rows: list[list[Any]], columns: tuple[str, ...] = COLUMNS) -> Path:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(rows)
    path.write_text(text.getvalue())
    return path


def test_causes_are_those_of_the_construction(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", steps_of_two_stages(7))
    imported = import_run([path])
    assert imported.notes == ()
    report = bubbles(frames_of(imported.recording))
    assert report.window_ns == 7 * 10**9
    first, second = (
        {cause: ns / 1e9 for cause, ns in rank.causes_ns.items() if ns} for rank in report.ranks
    )
    # It waits while stage 1 runs its two tasks; the rest of the two messages is their way.
    assert first == {"backward_input": 3.1, "transfer": 0.1, "gradient_sync": 0.8}
    assert second == {"warmup": 1.1, "drain": 2.9}
    assert what_if(imported.recording, lambda _: []).replay_error < 0.01
    phases = {phase.phase for phase in imported.recording.ranks[0].phases}
    assert phases == {Phase.SCHEDULE, Phase.OPTIMIZER}


def test_parquet_says_the_same_as_csv(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", steps_of_two_stages(7))
    table = pl.read_csv(path).with_columns(
        pl.col("optype").cast(pl.Categorical), pl.col("rank").cast(pl.Int16)
    )
    table.write_parquet(tmp_path / "t.parquet")
    assert import_run([tmp_path / "t.parquet"]) == import_run([path])


def test_steps_that_all_begin_at_zero_are_laid_end_to_end(tmp_path: Path) -> None:
    rows = steps_of_two_stages(7) + steps_of_two_stages(9)
    recording = import_run([written(tmp_path / "t.csv", rows)]).recording
    entries = [p.start_ns for p in recording.ranks[0].phases if p.phase == Phase.SCHEDULE]
    assert [entry - entries[0] for entry in entries] == [0, 8_500_000_000]
    assert bubbles(frames_of(recording)).window_ns == 14 * 10**9


def test_chunks_are_stages_in_a_loop(tmp_path: Path) -> None:
    rows = []
    for chunk in range(2):
        for rank in range(2):
            for kind, start in (("forward", 2 * chunk + rank), ("backward", 10 - 2 * chunk - rank)):
                each = row(rank, 0, f"{kind}-compute", start, start + 1, 0)
                each[COLUMNS.index("mc")] = chunk
                rows.append(each)
    recording = import_run([written(tmp_path / "t.csv", rows)]).recording
    assert [rank.info.stages for rank in recording.ranks] == [(0, 2), (1, 3)]
    assert sorted(task.stage for task in recording.ranks[1].tasks) == [1, 1, 3, 3]


def test_neighbours_that_rounding_made_overlap_are_put_apart(tmp_path: Path) -> None:
    rows = [
        row(0, 0, "forward-compute", 0, 1.000004, 0),
        row(0, 0, "backward-compute", 1, 2, 0),
        row(0, 0, "forward-compute", 1.9, 3, 1),
    ]
    tasks = import_run([written(tmp_path / "t.csv", rows)]).recording.ranks[0].tasks
    # Microseconds are of rounding; a tenth of a second is not, and stays.
    assert [task.start_ns for task in tasks] == [0, 1_000_004_000, 1_900_000_000]


GOOD = row(0, 0, "forward-compute", 0, 1, 0)


def spoiled(column: str, value: object) -> list[Any]:
    bad = list(GOOD)
    bad[COLUMNS.index(column)] = value
    return bad


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], "no forward-compute or backward-compute"),
        ([row(0, 0, "forward-send", 0, 1)], "no forward-compute or backward-compute"),
        ([GOOD, spoiled("duration", -1)], "row 2: duration is -1.0"),
        ([GOOD, spoiled("duration", "nan")], "row 2: duration is nan"),
        ([GOOD, spoiled("start_ts", "inf")], "row 2: start_ts is inf"),
        ([GOOD, spoiled("start_ts", "soon")], "row 2: start_ts is None"),
        ([GOOD, spoiled("rank", "")], "row 2: rank is None"),
        ([GOOD, spoiled("mc", -1)], "row 2: mc is -1.0"),
        ([GOOD, spoiled("mc", 10**8)], "row 2: mc is 100000000.0"),
        ([GOOD, spoiled("stage", 10**12)], "row 2: stage is 1000000000000.0"),
        ([GOOD, spoiled("mb_id", 1 << 20)], "row 2: mb_id is 1048576.0"),
        ([GOOD, spoiled("step", 0.5)], "step is 0.5; it must be a whole number"),
        (
            [GOOD, spoiled("duration", 3e9), spoiled("step", 1)],
            "has steps that take 3e+09 s together",
        ),
        ([GOOD, spoiled("optype", "nap")], "has the optype 'nap'"),
        ([GOOD, spoiled("optype", "")], "has the optype 'missing'"),
        ([GOOD, spoiled("stage", 1)], "gives rank 0 several stages or replicas"),
        ([GOOD, [1, 2]], "row 2: rank is None"),
    ],
)
def test_rows_that_cannot_be_are_refused(
    rows: list[list[Any]], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(RrfpError) as raised:
        import_run([written(tmp_path / "t.csv", rows)])
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_huge_numbers_cost_nothing(tmp_path: Path) -> None:
    rows = [GOOD, spoiled("mb_id", 10**6), spoiled("step", 10**9)]
    imported = import_run([written(tmp_path / "t.csv", rows)])
    assert imported.recording.settings["settings"]["hint"] == "as recorded"  # type: ignore[index]


def test_steps_may_be_dated(tmp_path: Path) -> None:
    dated = [spoiled("start_ts", 1.7e9 + second) for second in range(20)]
    for step, each in enumerate(dated):
        each[COLUMNS.index("step")] = step
    tasks = import_run([written(tmp_path / "t.csv", dated)]).recording.ranks[0].tasks
    assert [task.start_ns for task in tasks] == [step * 10**9 for step in range(20)]
    # By so little they overlap that they are laid end to end.
    for each in dated[1:]:
        each[COLUMNS.index("start_ts")] -= 1e-6
    tasks = import_run([written(tmp_path / "t.csv", dated)]).recording.ranks[0].tasks
    assert [task.start_ns for task in tasks] == [step * 10**9 for step in range(20)]


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("rank", [[0]]),
        ("rank", [{"a": 1}]),
        ("rank", [b"0"]),
        ("start_ts", [datetime(2024, 1, 1)]),
        ("duration", [timedelta(seconds=1)]),
        ("optype", [["forward-compute"]]),
    ],
)
def test_columns_of_other_types_are_refused(column: str, values: list[Any], tmp_path: Path) -> None:
    table = pl.DataFrame(dict(zip(COLUMNS, ([value] for value in GOOD), strict=True)))
    table.with_columns(pl.Series(column, values)).write_parquet(tmp_path / "t.parquet")
    with pytest.raises(RrfpError, match=f"has {column} as "):
        import_run([tmp_path / "t.parquet"])


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    for name, data, sentence in (
        ("a.csv", b"", "is no table"),
        ("b.csv", b"\xff\xfe\x00", "lacks the columns"),
        ("c.parquet", b"PAR1", "is no table"),
        ("d.csv", b"rank,step\n0,0\n", "lacks the columns dp_rank, stage"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(RrfpError, match=sentence):
            import_run([tmp_path / name])


def test_a_panic_of_the_reader_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The message that Rust prints on a thread of its own is discarded."""

    def panic(*_: object, **__: object) -> NoReturn:
        os.write(2, b"thread 'async-executor-0' panicked")
        raise pl.exceptions.PanicException("Thrift out of range")

    table = pl.DataFrame([row(0, 0, "optimizer", 0, 1)], COLUMNS, orient="row")
    table.write_parquet(tmp_path / "t.parquet")
    monkeypatch.setattr(pl, "read_parquet", panic)
    with pytest.raises(RrfpError, match="is no table \\(Thrift out of range\\)"):
        import_run([tmp_path / "t.parquet"])
    os.write(2, b"heard again")
    assert capfd.readouterr().err == "heard again"


def test_more_rows_than_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    table = pl.DataFrame([row(0, 0, "optimizer", 0, 1)], COLUMNS, orient="row")
    table.select(pl.all().repeat_by(1_000_000).explode()).write_parquet(path)
    assert path.stat().st_size < 100_000
    with pytest.raises(RrfpError, match="claims 1000000 rows, more than it has bytes"):
        import_run([path])


# A trace in other forms: Chrome's trace events, and Parquet.


@pytest.fixture
def run(tmp_path: Path) -> Path:
    recording = make_recording(4, 6, 2)
    # Tasks may overlap in another program's trace.
    recording.ranks[0].tasks.append(recording.ranks[0].tasks[0]._replace(microbatch=99))
    (tmp_path / "run").mkdir()
    write_trace(tmp_path / "run" / "trace.pftrace", recording)
    return tmp_path / "run"


def exported(run: Path, name: str) -> list[dict[str, Any]]:
    out = run / name
    assert rrfp_here(run, "trace", "export", ".", "-o", str(out)).returncode == 0
    data = gzip.decompress(out.read_bytes()) if name.endswith(".gz") else out.read_bytes()
    events: list[dict[str, Any]] = json.loads(data)["traceEvents"]
    return events


def test_every_record_is_an_event_on_a_named_track(run: Path) -> None:
    events = exported(run, "t.json")
    recording = make_recording(4, 6, 2)
    slices = Counter(event["cat"] for event in events if event["ph"] == "X")
    records = Counter(
        {
            name: sum(len(rank.by_name()[name]) for rank in recording.ranks)
            for name in ("task", "wait", "send", "receive", "phase")
        }
    )
    records["task"] += 1
    assert slices == records
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    task = recording.ranks[2].tasks[3]
    (found,) = (
        event
        for event in events
        if event["ph"] == "X"
        and tracks[event["pid"], event["tid"]] == "stage 2 compute"
        and round(event["ts"] * 1000) == task.start_ns
    )
    assert found["name"] == f"{task.kind}{task.microbatch}"
    assert round(found["dur"] * 1000) == task.end_ns - task.start_ns
    assert found["args"] == {
        name: getattr(task, name) for name in TaskRecord._fields if not name.endswith("_ns")
    }
    assert all("cause" in e["args"] for e in events if e.get("cat") == "wait" and e["ph"] == "X")
    assert "start_ns" in WaitRecord._fields


def test_arrows_lead_from_send_by_receive_to_task(run: Path) -> None:
    events = exported(run, "t.json.gz")
    flows: defaultdict[str, list[str]] = defaultdict(list)
    for event in sorted(
        (event for event in events if event["ph"] in "stf" and "id" in event),
        key=lambda event: float(event["ts"]),
    ):
        flows[event["id"]].append(event["ph"])
    num_messages = sum(len(rank.sends) for rank in make_recording(4, 6, 2).ranks)
    assert len(flows) == num_messages
    assert all(sorted(phases) == ["f", "s", "t"] for phases in flows.values())
    starts = {(e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] == "X"}
    arrows = [event for event in events if event["ph"] in "stf"]
    assert all((arrow["pid"], arrow["tid"], arrow["ts"]) in starts for arrow in arrows)


def test_slices_of_a_track_nest(run: Path) -> None:
    tracks: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in exported(run, "t.json"):
        if event["ph"] == "X":
            start_ns = round(event["ts"] * 1000)
            span = start_ns, start_ns + round(event["dur"] * 1000)
            tracks[event["pid"], event["tid"]].append(span)
    for spans in tracks.values():
        ends_ns = 0
        for start_ns, end_ns in sorted(spans):
            assert start_ns >= ends_ns
            ends_ns = end_ns


def test_counters_follow_the_tasks(run: Path) -> None:
    depths = [
        event["args"]["value"]
        for event in exported(run, "t.json")
        if event["ph"] == "C" and event["name"] == "stage 1 D"
    ]
    assert depths == [task.depth for task in make_recording(4, 6, 2).ranks[1].tasks]


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("is_imported", [False, True])
def test_perfettos_own_engine_finds_it_all(is_imported: bool, tmp_path: Path) -> None:
    recording = make_recording(4, 6, 2)
    if is_imported:
        recording = import_run([Path(__file__).parents[1] / "fixtures" / "megatron"]).recording
    path = tmp_path / "t.json"
    write_chrome(path, recording)
    slices: Counter[str] = Counter()
    for rank in recording.ranks:
        slices.update({name: len(found) for name, found in rank.by_name().items() if found})
    num_tasks, num_messages = slices["task"], slices["send"]
    with trace_processor() as processor:
        processor.load(path.read_bytes())
        found = processor.query("SELECT category, count(*) FROM slice GROUP BY category")
        assert dict(found) == slices
        ((num_flows,),) = processor.query("SELECT count(*) FROM flow")
        assert num_flows == 2 * num_messages
        arrows = processor.query(
            "SELECT o.category, i.category, count(*) FROM flow JOIN slice o ON o.id = slice_out "
            "JOIN slice i ON i.id = slice_in GROUP BY 1, 2 ORDER BY 1"
        )
        assert arrows == [("receive", "task", num_messages), ("send", "receive", num_messages)]
        ((num_values,),) = processor.query("SELECT count(*) FROM counter")
        assert num_values == 4 * num_tasks
        assert processor.query("SELECT sum(value) FROM stats WHERE severity = 'error'") == [(0,)]


def test_parquet_holds_the_frames(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "tables"
    assert rrfp_here(run, "trace", "export", ".", "-o", str(out)).returncode == 0
    assert {file.stem for file in out.iterdir()} == set(TABLES)
    expected = frames_of(make_recording(4, 6, 2))
    found = pl.read_parquet(out / "messages.parquet")
    assert found["evaluation"].is_null().all()
    assert found.drop("evaluation").equals(expected.messages)
    assert len(pl.read_parquet(out / "tasks.parquet")) == len(expected.tasks) + 1


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("-o", "t.txt", "--format", "chrome"), 2),
        (("-o", "t.csv"), 2),
        (("-o", ""), 2),
        (("-o", "missing/t.json"), 1),
        (("-o", "trace.pftrace", "--format", "parquet"), 2),
        ((), 2),
    ],
)
def test_an_output_that_cannot_be_written_is_a_sentence(
    arguments: tuple[str, ...],
    code: int,
    run: Path,
) -> None:
    told = rrfp_here(run, "trace", "export", ".", *arguments)
    assert told.returncode == code
    assert told.stderr.count("\n") == 1
