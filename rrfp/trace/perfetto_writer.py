"""Writes a recording as a trace; `rrfp.trace.perfetto` states the rules of the format."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from rrfp.errors import RrfpError
from rrfp.trace.flows import TaskKey, key_of, received_by, sent_by
from rrfp.trace.perfetto_format import END_MARK, FIELDS, RANK, RUN
from rrfp.trace.records import (
    RankInfo,
    RankRecords,
    Recording,
    StimulusRecord,
    TaskRecord,
)
from rrfp.trace.tracks import (
    COUNTER_TRACKS,
    COUNTERS,
    PATH_OF_CATEGORY,
    Node,
    Tracks,
    assign_lanes,
    stage_name,
    stage_path,
)
from rrfp.trace.whole_file import open_whole

_RUN_SEQUENCE = 1
_FIRST_RANK_SEQUENCE = 2
_RUN_PATH = ((1_000_000, RUN), (0, "settings and ranks"))
"""Below every pipeline. A track at the top without one below it would be moved above them."""
_NUM_PACKETS_OF_A_BATCH = 4096

Fields = Iterable[tuple[str, int | str]]

_BEGIN = pb.TrackEvent.TYPE_SLICE_BEGIN
_END = pb.TrackEvent.TYPE_SLICE_END
_INSTANT = pb.TrackEvent.TYPE_INSTANT
_COUNTER = pb.TrackEvent.TYPE_COUNTER


def write_trace(path: Path, recording: Recording) -> None:
    """Write a recording as a trace, whole or not at all. Its times must not be negative.

    Raises RrfpError when the file cannot be written.
    """
    try:
        with open_whole(path) as file:
            _write_run(_PacketWriter(file), recording)
    except OSError as error:
        raise RrfpError(f"the trace {path} could not be written: {error.strerror}") from error


class _PacketWriter:
    """Appends packets to a file, in batches."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._batch = pb.Trace()
        self._tracks = Tracks()
        self._sequence = _RUN_SEQUENCE

    def start_sequence(self, sequence: int) -> None:
        """Write what follows as another packet sequence."""
        self._sequence = sequence
        self._packet().sequence_flags = pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED

    def track(self, *path: Node, lane: int = 0, is_counter: bool = False) -> int:
        """The uuid of the track at a path of (place, name), described before its first use."""
        uuid = self._tracks.get(*path, lane=lane, is_counter=is_counter)
        for track in self._tracks.take_new():
            descriptor = self._packet().track_descriptor
            descriptor.uuid = track.uuid
            if track.parent:
                descriptor.parent_uuid = track.parent
            descriptor.name = track.name
            descriptor.child_ordering = pb.TrackDescriptor.EXPLICIT
            descriptor.sibling_order_rank = track.place
            if track.is_counter:
                descriptor.counter.unit = pb.CounterDescriptor.UNIT_COUNT
        return uuid

    def begin(
        self,
        time_ns: int,
        track: int,
        name: str,
        category: str,
        fields: Fields,
        *,
        passes: Iterable[int] = (),
        ends: Iterable[int] = (),
    ) -> None:
        """Begin a slice, on the way of some arrows and at the end of others."""
        event = self._named(_BEGIN, time_ns, track, name, category, fields)
        event.flow_ids.extend(passes)
        event.terminating_flow_ids.extend(ends)

    def end(self, time_ns: int, track: int) -> None:
        """End the track's innermost slice."""
        self._event(_END, time_ns, track)

    def instant(self, time_ns: int, track: int, name: str, category: str, fields: Fields) -> None:
        self._named(_INSTANT, time_ns, track, name, category, fields)

    def count(self, time_ns: int, track: int, value: int) -> None:
        """Write a counter's value."""
        self._event(_COUNTER, time_ns, track).counter_value = value

    def flush(self) -> None:
        self._file.write(self._batch.SerializeToString())
        self._batch.Clear()

    def _named(
        self,
        event_type: int,
        time_ns: int,
        track: int,
        name: str,
        category: str,
        fields: Fields,
    ) -> Any:
        event = self._event(event_type, time_ns, track)
        event.name = name
        event.categories.append(category)
        add = event.debug_annotations.add
        for key, value in fields:
            if isinstance(value, str):
                add(name=key, string_value=value)
            else:
                add(name=key, int_value=value)
        return event

    def _event(self, event_type: int, time_ns: int, track: int) -> Any:
        packet = self._packet()
        packet.timestamp = time_ns
        event = packet.track_event
        event.type = event_type
        event.track_uuid = track
        return event

    def _packet(self) -> Any:
        if len(self._batch.packet) >= _NUM_PACKETS_OF_A_BATCH:
            self.flush()
        return self._batch.packet.add(trusted_packet_sequence_id=self._sequence)


def _write_run(out: _PacketWriter, recording: Recording) -> None:
    infos = [records.info for records in recording.ranks]
    out.start_sequence(_RUN_SEQUENCE)
    run_track = out.track(*_RUN_PATH)
    settings = json.dumps(recording.settings)
    out.instant(0, run_track, RUN, RUN, [("settings", settings)])
    for sequence, records in enumerate(recording.ranks, start=_FIRST_RANK_SEQUENCE):
        out.start_sequence(sequence)
        _write_rank_info(out, run_track, records.info)
        _RankWriter(out, records.info, infos).write(records)
    out.start_sequence(_RUN_SEQUENCE)
    num_records = sum(
        len(found) for records in recording.ranks for found in records.by_name().values()
    )
    out.instant(0, run_track, END_MARK, RUN, [("num_records", num_records)])
    out.flush()


def _write_rank_info(out: _PacketWriter, track: int, info: RankInfo) -> None:
    fields = asdict(info) | {"stages": " ".join(map(str, info.stages))}
    out.instant(0, track, f"rank {info.rank}", RANK, fields.items())


def _stimulus_title(stimulus: StimulusRecord) -> str:
    """`input arrived F3` for the class InputArrived."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", stimulus.name).lower()
    return f"{words} {stimulus.kind}{stimulus.microbatch}" if stimulus.kind else words


def _no_branch(_: object) -> tuple[Node, ...]:
    return ()


def _no_arrows(_: object) -> tuple[int, ...]:
    return ()


class _RankWriter:
    """Writes one rank's records on the tracks of its stage, each list in its own order."""

    def __init__(self, out: _PacketWriter, info: RankInfo, infos: Sequence[RankInfo]) -> None:
        self._out = out
        self._rank = info.rank
        self._stage_path = stage_path(info, infos)
        self._has_chunks = any(len(other.stages) > 1 for other in infos)
        self._peer_names = {other.rank: stage_name(other) for other in infos}

    def write(self, records: RankRecords) -> None:
        self._write_tasks(records)
        self._write_counters(records.tasks)
        self._write_slices("wait", records.waits, lambda wait: wait.cause)
        self._write_slices(
            "send",
            records.sends,
            lambda send: f"send {send.kind}{send.microbatch}",
            branch=lambda send: self._link("send to", send.peer),
            passes=lambda send: (sent_by(self._rank, send).flow_id,),
        )
        self._write_slices(
            "receive",
            records.receives,
            lambda receive: f"recv {receive.kind}{receive.microbatch}",
            branch=lambda receive: self._link("receive from", receive.peer),
            passes=lambda receive: (received_by(self._rank, receive).flow_id,),
        )
        self._write_slices(
            "agreement",
            records.agreements,
            lambda agreement: f"agree {agreement.kind}{agreement.microbatch}",
        )
        self._write_slices("phase", records.phases, lambda phase: phase.phase)
        self._write_instants("stimulus", records.stimuli, _stimulus_title)
        self._write_instants("cost", records.costs, lambda _: "recording cost")

    def _write_tasks(self, records: RankRecords) -> None:
        arrows: defaultdict[TaskKey, list[int]] = defaultdict(list)
        for receive in records.receives:
            arrows[key_of(receive)].append(received_by(self._rank, receive).flow_id)
        self._write_slices(
            "task",
            records.tasks,
            self._task_title,
            ends=lambda task: arrows.get(key_of(task), ()),
            extra=(("rank", self._rank),),
        )

    def _task_title(self, task: TaskRecord) -> str:
        title = f"{task.kind}{task.microbatch}"
        return f"{title}.{task.chunk}" if self._has_chunks else title

    def _write_counters(self, tasks: Sequence[TaskRecord]) -> None:
        last_values: dict[str, int] = {}
        for task in tasks:
            values = (task.depth, task.held, task.ready_forwards, task.ready_backwards)
            for place, (name, value) in enumerate(zip(COUNTER_TRACKS, values, strict=True)):
                if last_values.get(name) != value:
                    last_values[name] = value
                    path = (*self._stage_path, COUNTERS, (place, name))
                    self._out.count(task.start_ns, self._out.track(*path, is_counter=True), value)

    def _write_slices(
        self,
        category: str,
        records: Sequence[Any],
        title: Callable[[Any], str],
        *,
        branch: Callable[[Any], tuple[Node, ...]] = _no_branch,
        passes: Callable[[Any], Iterable[int]] = _no_arrows,
        ends: Callable[[Any], Iterable[int]] = _no_arrows,
        extra: Fields = (),
    ) -> None:
        """Write a slice a record, below the category's track of the stage."""
        out = self._out
        names = [name for name, _ in FIELDS[category]]
        tracks = self._tracks_of(category, records, branch)
        for record, track in zip(records, tracks, strict=True):
            fields = (*zip(names, record[2:], strict=True), *extra)
            out.begin(
                record.start_ns,
                track,
                title(record),
                category,
                fields,
                passes=passes(record),
                ends=ends(record),
            )
            out.end(record.end_ns, track)

    def _write_instants(
        self, category: str, records: Sequence[Any], title: Callable[[Any], str]
    ) -> None:
        if not records:
            return
        names = [name for name, _ in FIELDS[category]]
        track = self._out.track(*self._stage_path, *PATH_OF_CATEGORY[category])
        for record in records:
            fields = zip(names, record[1:], strict=True)
            self._out.instant(record.time_ns, track, title(record), category, fields)

    def _tracks_of(
        self, category: str, records: Sequence[Any], branch: Callable[[Any], tuple[Node, ...]]
    ) -> list[int]:
        """The track of each record: its branch's, on a lane where it overlaps no other."""
        branches = [branch(record) for record in records]
        members: defaultdict[tuple[Node, ...], list[int]] = defaultdict(list)
        for index, key in enumerate(branches):
            members[key].append(index)
        tracks = [0] * len(records)
        for key, indices in members.items():
            lanes = assign_lanes([(records[i].start_ns, records[i].end_ns) for i in indices])
            for index, lane in zip(indices, lanes, strict=True):
                path = (*self._stage_path, *PATH_OF_CATEGORY[category], *key)
                tracks[index] = self._out.track(*path, lane=lane)
        return tracks

    def _link(self, direction: str, peer: int) -> tuple[Node, ...]:
        return ((peer, f"{direction} {self._peer_names.get(peer, f'rank {peer}')}"),)
