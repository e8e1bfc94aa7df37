"""The merge of what ranks have spilled: in parts it makes the same trace, and takes no more memory
for a longer run."""

import json
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from rrfp.trace import merge
from rrfp.trace.check import check_contents
from rrfp.trace.merge import encode_session
from rrfp.trace.perfetto import writer
from rrfp.trace.perfetto import writer as packets
from rrfp.trace.perfetto.reader import read_contents
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import NS_PER_S, Recording, num_times
from rrfp.trace.run_dir import RunDir
from rrfp.trace.spill import SpillWriter, records_bytes, row_of, segments_in
from tests.recordings import make_recording


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
    """What a viewer shows of a trace: every event, on its track, whatever their order and numbers
    in the file."""
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
    peaks: dict[int, list[int]] = {40: [], 320: []}
    for number, num_steps in enumerate((40, 320) * 3):
        run = RunDir(tmp_path / str(number))
        _spill_many(run, num_steps)
        # A table of half a megabyte replaces that of a cache which earlier tests have filled.
        for each in (*vars(packets).values(), *vars(writer).values()):
            if hasattr(each, "cache_clear"):
                each.cache_clear()
        tracemalloc.start()
        encode_session(run)
        peaks[num_steps].append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # What is made once, or by another thread of this process, counts for one of three at most.
    short, long = map(min, peaks.values())
    assert long < 1.5 * short + (1 << 20)


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
