"""Writes a recording as a trace; `rrfp.trace.perfetto` states the rules of the format."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import lru_cache
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from rrfp.errors import RrfpError
from rrfp.trace.perfetto.flows import MessageKey, TaskKey, key_of, received_by, sent_by
from rrfp.trace.perfetto.format import END_MARK, FIELDS, HINT, RANK, RUN, VERSION
from rrfp.trace.perfetto.hint_order import MAX_SKIPPED_NAMED, HintedDispatch, beside_hint
from rrfp.trace.perfetto.packets import Fields, PacketWriter
from rrfp.trace.perfetto.tracks import (
    COUNTERS,
    PATH_OF_CATEGORY,
    Node,
    assign_lanes,
    counters_of,
    stage_name,
    stage_path,
)
from rrfp.trace.records import (
    RECORD_TYPES,
    BegunRecord,
    Doing,
    RankInfo,
    RankRecords,
    Recording,
    StimulusRecord,
    TaskRecord,
)
from rrfp.trace.steps import STEP, is_evaluation, told_step
from rrfp.trace.whole_file import open_whole

_RUN_SEQUENCE = 1
_FIRST_RANK_SEQUENCE = 2
_RUN_PATH = ((1_000_000, RUN), (0, "settings"))
"""Below every pipeline. The viewer would move a childless top track above them."""
_FIELDS_OF_HINT = ("kind", "stage", "chunk", "microbatch")


def write_trace(path: Path, recording: Recording) -> None:
    """Write a recording as a trace, whole or not at all. Its times must not be negative.

    Raises RrfpError if the file cannot be written.
    """
    try:
        with open_whole(path) as file:
            _write_run(PacketWriter(file), recording)
    except OSError as error:
        raise RrfpError(f"the trace {path} could not be written: {error.strerror}") from error


def _write_run(out: PacketWriter, recording: Recording) -> None:
    infos = [records.info for records in recording.ranks]
    out.go_to_sequence(_RUN_SEQUENCE)
    run_track = out.track(*_RUN_PATH)
    settings = json.dumps(recording.settings)
    out.instant(0, run_track, RUN, RUN, [("version", VERSION), ("settings", settings)])
    sequences = range(_FIRST_RANK_SEQUENCE, _FIRST_RANK_SEQUENCE + len(infos))
    writers = [_RankWriter(out, records, infos) for records in recording.ranks]
    # A viewer orders tracks by their first events, so give every stage one early, in stage order.
    for sequence, writer in zip(sequences, writers, strict=True):
        out.go_to_sequence(sequence)
        writer.write_info()
    # Arrows follow time; at equal times they follow the order of writing. So write what an arrow
    # comes from before what it leads to, across all ranks.
    for write in (_RankWriter.write_sends, _RankWriter.write_receives, _RankWriter.write_rest):
        for sequence, writer in zip(sequences, writers, strict=True):
            out.go_to_sequence(sequence)
            write(writer)
    out.go_to_sequence(_RUN_SEQUENCE)
    num_records = sum(
        len(found) for records in recording.ranks for found in records.by_name().values()
    )
    out.instant(0, run_track, END_MARK, RUN, [("num_records", num_records)])
    out.flush()


def _task_name(record: Any) -> str:
    return f"{record.kind}{record.microbatch}"


def _stimulus_title(stimulus: StimulusRecord) -> str:
    """`input arrived F3` for the class InputArrived."""
    words = _words_of(stimulus.name)
    return f"{words} {_task_name(stimulus)}" if stimulus.kind else words


def _begun_title(begun: BegunRecord) -> str:
    """`never ended: F3`, `never ended: backward_input`; no task's name, for it did not run."""
    doing = _task_name(begun) if begun.doing == Doing.TASK else begun.doing
    return f"never ended: {doing}"


@lru_cache
def _words_of(class_name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", class_name).lower()


_NAMES = {category: tuple(name for name, _ in fields) for category, fields in FIELDS.items()}


_DEFAULTS = {name: record_type._field_defaults for name, record_type in RECORD_TYPES.items()}


def _notes_of(category: str, record: Any, values: tuple[int | str, ...]) -> Fields:
    """A record's fields other than times, without bytes that are not known; an evaluation's step is
    renamed."""
    names, defaults = _NAMES[category], _DEFAULTS[category]
    notes: Fields = zip(names, values, strict=True)
    if defaults:
        always = len(names) - len(defaults)
        others = zip(names[always:], values[always:], strict=True)
        told = [(name, value) for name, value in others if value != defaults[name]]
        notes = [*zip(names[:always], values, strict=False), *told]
    if not is_evaluation(record.step):
        return notes
    return (told_step(record.step) if name == STEP else (name, value) for name, value in notes)


class _RankWriter:
    """Writes one rank's records to the tracks of its stage, each list in its own order."""

    def __init__(self, out: PacketWriter, records: RankRecords, infos: Sequence[RankInfo]) -> None:
        self._out = out
        self._records = records
        self._rank = records.info.rank
        self._stage_path = stage_path(records.info, infos)
        self._has_chunks = any(len(other.stages) > 1 for other in infos)
        self._peer_names = {other.rank: stage_name(other) for other in infos}

    def write_info(self) -> None:
        info = self._records.info
        fields = asdict(info) | {"stages": " ".join(map(str, info.stages))}
        track = self._out.track(*self._stage_path, *PATH_OF_CATEGORY[RANK])
        self._out.instant(0, track, f"rank {info.rank}", RANK, fields.items())

    def write_sends(self) -> None:
        self._write_messages("send", self._records.sends, "send", "send to", sent_by)

    def write_receives(self) -> None:
        received = self._records.receives
        self._write_messages("receive", received, "recv", "receive from", received_by)

    def write_rest(self) -> None:
        records = self._records
        self._write_tasks(records)
        self._write_counters(records)
        waits, agreements, phases = records.waits, records.agreements, records.phases
        self._write_slices("wait", waits, (wait.cause for wait in waits))
        self._write_slices("agreement", agreements, (f"agree {_task_name(a)}" for a in agreements))
        self._write_slices("phase", phases, (phase.phase for phase in phases))
        self._write_slices("begun", records.begun, map(_begun_title, records.begun))
        self._write_instants("stimulus", records.stimuli, _stimulus_title)
        self._write_instants("cost", records.costs, lambda _: "recording cost")
        self._write_instants("loss", records.losses, lambda loss: f"lost {loss.num_lost} records")

    def _write_tasks(self, records: RankRecords) -> None:
        tasks = records.tasks
        arrows: defaultdict[TaskKey, list[int]] = defaultdict(list)
        for receive in records.receives:
            arrows[key_of(receive)].append(received_by(self._rank, receive).flow_id)
        dispatches = beside_hint(tasks)
        self._write_slices(
            "task",
            tasks,
            map(self._title, tasks),
            extra=map(self._notes_of_dispatch, dispatches),
            ends=(arrows.get(key_of(task), ()) for task in tasks),
        )
        self._write_hints(tasks, dispatches)

    def _title(self, task: TaskRecord) -> str:
        return f"{_task_name(task)}.{task.chunk}" if self._has_chunks else _task_name(task)

    def _notes_of_dispatch(self, dispatch: HintedDispatch | None) -> Fields:
        """A task's annotations besides its record."""
        rank = ("rank", self._rank)
        if dispatch is None or not dispatch.skipped:
            return (rank,)
        names = [self._title(task) for task in dispatch.skipped]
        if len(names) > MAX_SKIPPED_NAMED:
            names[MAX_SKIPPED_NAMED:] = ["..."]
        return rank, ("skipped_tasks", " ".join(names))

    def _write_hints(
        self, tasks: Sequence[TaskRecord], dispatches: Sequence[HintedDispatch | None]
    ) -> None:
        """Write what the hint wanted in place of each task, at the task's time."""
        found = [
            (task, dispatch)
            for task, dispatch in zip(tasks, dispatches, strict=True)
            if dispatch is not None
        ]
        tracks = self._tracks_of(HINT, [task for task, _ in found])
        for (task, dispatch), track in zip(found, tracks, strict=True):
            wanted = dispatch.wanted
            fields: list[tuple[str, int | str]] = [
                *((name, getattr(wanted, name)) for name in _FIELDS_OF_HINT),
                told_step(wanted.step),
                ("hint_position", wanted.hint_position),
                ("dispatch_position", dispatch.wanted_place),
            ]
            self._out.begin(task.start_ns, track, f"hint {self._title(wanted)}", HINT, fields)
            self._out.end(task.end_ns, track)

    def _write_counters(self, records: RankRecords) -> None:
        if not records.tasks:
            return
        for place, (name, points) in enumerate(counters_of(records).items()):
            track = self._out.track(*self._stage_path, COUNTERS, (place, name), is_counter=True)
            last = None
            for time_ns, value in points:
                if value != last:
                    self._out.count(time_ns, track, value)
                    last = value

    def _write_messages(
        self,
        category: str,
        messages: Sequence[Any],
        verb: str,
        direction: str,
        key: Callable[[int, Any], MessageKey],
    ) -> None:
        links = {
            peer: ((peer, f"{direction} {self._peer_names.get(peer, f'rank {peer}')}"),)
            for peer in {message.peer for message in messages}
        }
        self._write_slices(
            category,
            messages,
            (f"{verb} {_task_name(message)}" for message in messages),
            branches=[links[message.peer] for message in messages],
            passes=((key(self._rank, message).flow_id,) for message in messages),
        )

    def _write_slices(
        self,
        category: str,
        records: Sequence[Any],
        titles: Iterable[str],
        *,
        branches: Sequence[tuple[Node, ...]] | None = None,
        extra: Iterable[Fields] = repeat(()),
        passes: Iterable[Sequence[int]] = repeat(()),
        ends: Iterable[Sequence[int]] = repeat(()),
    ) -> None:
        """Write a slice per record, below the category's track of the stage."""
        tracks = self._tracks_of(category, records, branches)
        rows = zip(records, tracks, titles, extra, passes, ends, strict=False)
        for record, track, title, more, passed, ended in rows:
            fields = chain(_notes_of(category, record, record[2:]), more)
            self._out.begin(
                record.start_ns, track, title, category, fields, passes=passed, ends=ended
            )
            self._out.end(record.end_ns, track)

    def _write_instants(
        self, category: str, records: Sequence[Any], title: Callable[[Any], str]
    ) -> None:
        if not records:
            return
        track = self._out.track(*self._stage_path, *PATH_OF_CATEGORY[category])
        for record in records:
            fields = _notes_of(category, record, record[1:])
            self._out.instant(record.time_ns, track, title(record), category, fields)

    def _tracks_of(
        self,
        category: str,
        records: Sequence[Any],
        branches: Sequence[tuple[Node, ...]] | None = None,
    ) -> list[int]:
        """The track of each record: its branch's, on a lane where nothing overlaps it."""
        members: defaultdict[tuple[Node, ...], list[int]] = defaultdict(list)
        for index, branch in enumerate(branches or repeat((), len(records))):
            members[branch].append(index)
        tracks = [0] * len(records)
        for branch, indices in members.items():
            lanes = assign_lanes([records[index][:2] for index in indices])
            path = (*self._stage_path, *PATH_OF_CATEGORY[category], *branch)
            track_of = [self._out.track(*path, lane=lane) for lane in range(max(lanes) + 1)]
            for index, lane in zip(indices, lanes, strict=True):
                tracks[index] = track_of[lane]
        return tracks
