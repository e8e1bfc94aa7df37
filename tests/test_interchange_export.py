"""A trace in other forms: Chrome's trace events, and Parquet."""

import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rrfp.analyze.frame_files import TABLES
from rrfp.analyze.frames import frames_of
from rrfp.interchange.chrome import write_chrome
from rrfp.interchange.formats import import_run
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import TaskRecord, WaitRecord
from tests.recordings import make_recording
from tests.trace_processor import MISSING, trace_processor
from tests.trained import rrfp_here


@pytest.fixture
def run(tmp_path: Path) -> Path:
    recording = make_recording(4, 6, 2)
    # Nothing keeps a task from overlapping another in somebody's trace.
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
        recording = import_run([Path(__file__).parent / "fixtures" / "megatron"]).recording
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
def test_where_it_cannot_go_is_told_in_a_sentence(
    arguments: tuple[str, ...],
    code: int,
    run: Path,
) -> None:
    told = rrfp_here(run, "trace", "export", ".", *arguments)
    assert told.returncode == code
    assert told.stderr.count("\n") == 1
