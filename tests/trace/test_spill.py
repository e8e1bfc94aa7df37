"""A spill file is read back except for a torn last line, and the merge takes bounded memory."""

import fcntl
import json
import os
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from rrfp.errors import RrfpError
from rrfp.trace import merge
from rrfp.trace.check import check_contents
from rrfp.trace.merge import encode_session
from rrfp.trace.perfetto import writer
from rrfp.trace.perfetto import writer as packets
from rrfp.trace.perfetto.reader import read_contents
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import NS_PER_S, RankInfo, RankRecords, Recording, WaitRecord, num_times
from rrfp.trace.run_dir import RunDir
from rrfp.trace.spill import (
    SpillWriter,
    add_flush,
    header_of,
    is_being_written,
    iter_lines,
    records_bytes,
    row_of,
    segments_in,
)
from tests.analyze.recordings import make_recording


def read_spill(path: Path) -> RankRecords | None:
    """All records in a spill file, on the rank's own clock; None if the rank died before its header
    was complete. Raises RrfpError, with the line, for corruption other than a torn last line."""
    lines = iter_lines(path)
    first = next(lines, None)
    if first is None:
        return None
    records = RankRecords(header_of(path, first.value))
    lists = records.by_name()
    for line in lines:
        add_flush(path, line.number, line.value, lists)
    return records


INFO = RankInfo(3, 1, 1, 0, (1, 6), "node", 77, -5, 2)


def _write(path: Path, *flushes: list[WaitRecord]) -> None:
    writer = SpillWriter(path, INFO)
    for records in flushes:
        writer.append(map(row_of, records))
        writer.flush()
    writer.close()


def test_every_record_comes_back(tmp_path: Path) -> None:
    expected = make_recording(2, 3, 2).ranks[1]
    path = tmp_path / "records" / "rank-1.jsonl"
    writer = SpillWriter(path, expected.info)
    for found in expected.by_name().values():
        writer.append(map(row_of, found))
        writer.flush()
    writer.close()
    assert read_spill(path) == expected


def test_a_flush_of_any_length_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rank-3.jsonl"
    waits = [WaitRecord(number, number + 1, 0, "drain") for number in range(2500)]
    writer = SpillWriter(path, INFO)
    writer.append(map(row_of, waits[:2100]))
    writer.append(map(row_of, waits[2100:]))
    writer.flush()
    writer.flush()
    writer.append(map(row_of, waits[:1]))
    writer.close()
    whole = path.read_bytes()
    # What no flush has ended is taken back.
    assert [line.endswith(b"\n") for line in whole.splitlines(keepends=True)] == [True, True]
    assert read_spill(path) == RankRecords(INFO, waits=waits)


def test_a_torn_last_line_loses_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "rank-3.jsonl"
    first, second = WaitRecord(0, 5, 0, "drain"), WaitRecord(7, 9, 1, "drain")
    _write(path, [first], [second])
    whole = path.read_bytes()
    second_line_bytes = len(whole.splitlines(keepends=True)[-1])
    for num_lost in range(2, second_line_bytes + 1):
        path.write_bytes(whole[:-num_lost])
        assert read_spill(path) == RankRecords(INFO, waits=[first])
    path.write_bytes(whole[:-1])
    assert read_spill(path) == RankRecords(INFO, waits=[first, second])


@pytest.mark.parametrize("left", [b"", b'{"format": "rr'])
def test_a_rank_that_died_at_once_left_nothing(tmp_path: Path, left: bytes) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(left)
    assert read_spill(path) is None


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ("[[", "is not JSON"),
        ("{}", "is not a list of records"),
        ('["wait"]', "has a row that is not a record"),
        ('[["nap",0,1,2,"drain"]]', "has a row that is not a record"),
        ('[["wait",0,1,2]]', "has a 'wait' with wrong fields"),
        ('[["wait",0,1,"2","drain"]]', "has a 'wait' with wrong fields"),
        ("[" * 100_000, "is not JSON"),
        ('[["wait",9,8,2,"drain"]]', "has a 'wait' that ends before it begins"),
        (f'[["wait",0,{2**70},2,"drain"]]', "has a 'wait' at a time that no clock shows"),
        (f'[["wait",{-(2**63)},0,2,"drain"]]', "has a 'wait' at a time that no clock shows"),
        (f'[["wait",0,1,{2**64 - 1},"drain"]]', "has a 'wait' whose step is 18446744073709551615"),
        (f'[["loss",0,1,{-(2**63)}]]', "has a 'loss' whose num_lost is -9223372036854775808"),
        ('[["agreement",0,1,2,"Q",0,0,0]]', "has a 'agreement' of the kind 'Q'"),
        ('[["agreement",0,1,2,"F",9999999,0,0]]', "has a 'agreement' whose stage is 9999999"),
    ],
)
def test_any_other_corruption_is_reported_with_its_line(
    tmp_path: Path, line: str, fact: str
) -> None:
    path = tmp_path / "rank-3.jsonl"
    _write(path, [WaitRecord(0, 5, 0, "drain")])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RrfpError, match=rf"rank-3\.jsonl, line 3 {fact}"):
        read_spill(path)


def rank_header(**fields: object) -> dict[str, object]:
    return {"format": "rrfp records", "version": 1, "rank": {**asdict(INFO), **fields}}


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"format": "other"},
        {"format": "rrfp records", "version": 1, "rank": {"rank": 0}},
        rank_header(rank=2**70),
        rank_header(rank="3"),
        rank_header(stages=[1, -6]),
        rank_header(stages=["1"]),
        rank_header(host=None),
        rank_header(clock_offset_ns=-(2**63)),
    ],
)
def test_a_foreign_header_is_reported(tmp_path: Path, header: object) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_text(json.dumps(header) + "\n")
    with pytest.raises(RrfpError, match="line 1 "):
        read_spill(path)


def test_a_file_is_known_to_be_written_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    writer = SpillWriter(path, INFO)
    assert is_being_written(path)
    writer.close()
    assert not is_being_written(path)


def test_a_forked_child_does_not_keep_a_run_open(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    writer = SpillWriter(path, INFO)
    # As in a child, another descriptor of the same open file.
    kept = os.dup(writer._file.fileno())
    assert is_being_written(path)
    writer.close()
    writer.close()
    assert not is_being_written(path)
    os.close(kept)


def test_locks_have_the_open_modes_that_nfs_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing for an exclusive lock, and reading for a shared one, which any reader has."""
    modes = []

    def flock(file: IO[Any], operation: int) -> None:
        modes.append(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE)

    monkeypatch.setattr(fcntl, "flock", flock)
    path = tmp_path / "rank-0.jsonl"
    SpillWriter(path, INFO).close()
    is_being_written(path)
    assert modes == [os.O_RDWR, os.O_RDWR, os.O_RDONLY]


# The merge of what ranks have spilled: in parts it makes the same trace, and takes no more memory
# for a longer run.


def _spill(run: RunDir, recording: Recording, most_bytes: int | None = None) -> None:
    """As its ranks would, a step at a time; of every third step, each rank's last message is
    recorded with the step after it, as one that a link's own thread has sent may be."""
    run.path.mkdir(exist_ok=True)
    run.run_json.write_text(json.dumps(recording.settings))
    for records in recording.ranks:
        writer = SpillWriter(run.rank_records(records.info.rank), records.info, most_bytes)
        late: list[Any] = []
        for step in range(max(phase.step for phase in records.phases) + 1):
            rows = late
            own = [r for found in records.by_name().values() for r in found if r.step == step]
            late = [each for each in own if each in records.sends][-1:] if step % 3 == 0 else []
            writer.append(row_of(each) for each in (*rows, *own) if each not in late)
            writer.flush()
        writer.append(map(row_of, late))
        writer.flush()
        writer.close()


def _shown(path: Path) -> Counter[Any]:
    """Every event with its track, as a viewer shows it: independent of the order of events in the
    file and of the numbers of tracks."""
    trace = pb.Trace.FromString(path.read_bytes())
    tracks: dict[int, tuple[Any, ...]] = {0: ()}
    shown: Counter[Any] = Counter()
    open_ns: dict[int, list[Any]] = {}
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            told = packet.track_descriptor
            tracks[told.uuid] = (*tracks[told.parent_uuid], (told.sibling_order_rank, told.name))
            continue
        event, at_ns = packet.track_event, packet.timestamp
        if event.type == pb.TrackEvent.TYPE_SLICE_END:
            shown[open_ns[event.track_uuid].pop(), at_ns] += 1
            continue
        key = (
            packet.trusted_packet_sequence_id,
            tracks.get(event.track_uuid),
            at_ns,
            event.name,
            event.counter_value,
            tuple((n.name, n.int_value, n.string_value) for n in event.debug_annotations),
            (*event.flow_ids, *(-flow for flow in event.terminating_flow_ids)),
        )
        if event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
            open_ns.setdefault(event.track_uuid, []).append(key)
        else:
            shown[key] += 1
    return shown


def _with_bytes(recording: Recording) -> Recording:
    """The recording with sizes that are known."""
    for records in recording.ranks:
        records.tasks[:] = [
            t._replace(held_bytes=64 * t.held, waiting_bytes=8 * (t.microbatch % 2))
            for t in records.tasks
        ]
        records.phases[:] = [p._replace(budget_bytes=999) for p in records.phases]
    return recording


@pytest.mark.parametrize("is_known", [False, True])
def test_a_trace_made_in_parts_shows_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    recording = make_recording(3, 4, 7)
    if is_known:
        recording = _with_bytes(recording)
    parts, whole = RunDir(tmp_path / "parts"), RunDir(tmp_path / "whole")
    for run in (parts, whole):
        _spill(run, recording)
    encode_session(whole)
    num_parts = _counted_parts(monkeypatch)
    monkeypatch.setattr(merge, "_PART_BYTES", 4000)
    encode_session(parts)
    assert len(num_parts) > 4
    assert _shown(parts.trace) == _shown(whole.trace)
    assert read_contents(parts.trace).flow_lengths == read_contents(whole.trace).flow_lengths
    # And as the recording itself, whose times count from its first record.
    write_trace(tmp_path / "direct.pftrace", _from_its_start(recording))
    assert _shown(whole.trace) == _shown(tmp_path / "direct.pftrace")


def _counted_parts(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    parts: list[None] = []
    take = merge._parts

    def counted(*arguments: Any) -> Iterable[Any]:
        for part in take(*arguments):
            parts.append(None)
            yield part

    monkeypatch.setattr(merge, "_parts", counted)
    return parts


def _from_its_start(recording: Recording) -> Recording:
    first_ns = min(
        record[0]
        for records in recording.ranks
        for found in records.by_name().values()
        for record in found
    )
    for records in recording.ranks:
        for found in records.by_name().values():
            found[:] = [
                type(r)(*(t - first_ns for t in r[: num_times(r)]), *r[num_times(r) :])
                for r in found
            ]
    return recording


def test_a_merge_takes_no_more_memory_for_more_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "_PART_BYTES", 1 << 16)
    # What is made once, or by another thread of this process, counts in one attempt at most.
    for attempt in range(3):
        short, long = (_peak(RunDir(tmp_path / f"{num}-{attempt}"), num) for num in (40, 320))
        if long < 1.5 * short + (1 << 20):
            return
    pytest.fail(f"320 steps took {long} bytes, and 40 took {short}")


def _peak(run: RunDir, num_steps: int) -> int:
    """The peak of Python's allocated bytes during the merge of a run of these steps."""
    _spill_many(run, num_steps)
    # A table of half a megabyte replaces that of a cache which earlier tests have filled.
    for each in (*vars(packets).values(), *vars(writer).values()):
        if hasattr(each, "cache_clear"):
            each.cache_clear()
    tracemalloc.start()
    encode_session(run)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def _spill_many(run: RunDir, num_steps: int) -> None:
    """One step, again and again."""
    recording = make_recording(2, 4, 1)
    run.path.mkdir()
    for records in recording.ranks:
        writer = SpillWriter(run.rank_records(records.info.rank), records.info)
        own = [record for found in records.by_name().values() for record in found]
        for step in range(num_steps):
            writer.append(
                row_of(
                    type(r)(
                        *(t + step * NS_PER_S for t in r[: num_times(r)]), *r[num_times(r) :]
                    )._replace(step=step)
                )
                for r in own
            )
            writer.flush()
        writer.close()


def test_what_is_bounded_keeps_the_last_steps_whole_on_all_ranks(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    recording = make_recording(3, 4, 40)
    most_bytes = 30_000
    _spill(run, recording, most_bytes)
    for paths in segments_in(run.records).values():
        assert sum(path.stat().st_size for path in paths) <= most_bytes
    encode_session(run)
    contents = read_contents(run.trace)
    told = contents.recording.settings
    first = told["first_kept_step"]
    assert isinstance(first, int)
    assert 10 < first < 38
    assert told["dropped_steps"] == first
    assert check_contents(contents) == []
    for records, expected in zip(contents.recording.ranks, recording.ranks, strict=True):
        kept = [task[2:] for task in expected.tasks if task.step >= first]
        assert [task[2:] for task in records.tasks] == kept
        assert {phase.step for phase in records.phases} == {*range(first, 40)}
    described = json.loads(run.run_json.read_text())
    assert (described["first_kept_step"], described["dropped_steps"]) == (first, first)


@pytest.mark.parametrize(("trace_mb", "num_ranks"), [(None, 4), (16, 2), (100, 8), (None, 1000)])
def test_ranks_share_the_room_for_records_and_their_trace(
    trace_mb: int | None, num_ranks: int
) -> None:
    each = records_bytes(trace_mb, num_ranks)
    assert each > 1 << 19
    # A flight record, and a trace that is five times as large.
    total = num_ranks * (6 * each + (4 << 20))
    assert total <= (trace_mb or max(2048, 8 * num_ranks)) << 20


def test_ranks_that_keep_different_steps_share_the_later_ones(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    recording = make_recording(2, 2, 60)
    short, long = (Recording(recording.settings, [records]) for records in recording.ranks)
    _spill(run, short, 10_000)
    _spill(run, long, 20_000)
    encode_session(run)
    contents = read_contents(run.trace)
    kept = [{task.step for task in records.tasks} for records in contents.recording.ranks]
    assert kept[0] == kept[1] == {*range(min(kept[0]), 60)}
    assert check_contents(contents) == []
