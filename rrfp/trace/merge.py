"""Merges the ranks' spill files into the run's one trace.

The files are read twice, and never held in memory as a whole. The first time tells what the trace
must say before its records: when the run began, and which of its steps are kept on all ranks. The
second time the records go into the trace, some steps of all ranks at a time.
"""

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from rrfp.errors import RrfpError
from rrfp.schedule.tasks import Cause
from rrfp.trace.flight_record import MOST_RECORDS, Flight, read_flight, ring_of
from rrfp.trace.outcome import read_ending, why_without_records
from rrfp.trace.perfetto.reader import read_trace
from rrfp.trace.perfetto.writer import trace_writer, write_trace
from rrfp.trace.records import (
    RECORD_TYPES,
    BegunRecord,
    CostRecord,
    Doing,
    Phase,
    PhaseRecord,
    RankRecords,
    ReceiveRecord,
    Record,
    Recording,
    SendRecord,
    TaskRecord,
    WaitRecord,
    num_times,
)
from rrfp.trace.run_dir import RunDir, update_latest
from rrfp.trace.run_json import (
    FIRST_KEPT_STEP,
    OUTCOME,
    RECORDING_OFF,
    SESSIONS,
    UNREAD_FLIGHTS,
    describe_recording,
    description_of,
    first_step_of,
    is_last,
)
from rrfp.trace.spill import KeptSteps, SpilledRank, is_being_written, kept_steps, segments_in

_PART_BYTES = 2 << 20
"""Of all ranks' files that are in memory at a time; their records take twenty times as much."""


def encode_run(directory: Path, elsewhere: Path | None = None) -> Path:
    """Merge what the sessions of a run have recorded into their traces, and return the path of the
    run's: that of its one session, or of all of them joined. With `elsewhere`, traces that the run
    lacks are made in that directory, and the run is left as it is.

    Raises RrfpError if the run is still going, if a file is corrupt, if no rank recorded anything,
    or if the sessions cannot be joined; the records of a session without a trace then stay.
    """
    sessions = RunDir(directory).sessions()
    traces = [trace for session in sessions if (trace := _encoded(session, elsewhere)) is not None]
    if not traces:
        raise RrfpError(why_without_records(RunDir(directory)))
    if len(traces) == 1:
        return traces[0]
    whole = RunDir(elsewhere or directory).joined_trace
    if not whole.exists():
        write_trace(whole, joined([read_trace(trace) for trace in traces]))
    return whole


def encode_session(run: RunDir) -> bool:
    """Merge one session's records into its trace, if that has not been done, and remove them.
    Returns whether there is a trace; raises RrfpError as `encode_run` does."""
    return _encoded(run, None) is not None


def _encoded(run: RunDir, elsewhere: Path | None) -> Path | None:
    segments = segments_in(run.records)
    for segment in chain.from_iterable(segments.values()):
        if is_being_written(segment):
            raise RrfpError(
                f"the run in {run.path} is still going ({segment.name} is being written), and the "
                "first command that opens it when it has ended makes its trace; follow it with "
                "'rrfp watch', or take another that 'rrfp runs' lists"
            )
    ranks = [rank for paths in segments.values() if (rank := SpilledRank.of(paths)) is not None]
    if not ranks:
        return run.trace if run.trace.exists() else None
    if elsewhere is not None:
        trace = RunDir(elsewhere, run.session).trace
        _merge(run, ranks, trace)
        return trace
    describe_recording(run, _merge(run, ranks, run.trace))
    run.joined_trace.unlink(missing_ok=True)
    shutil.rmtree(run.records, ignore_errors=True)
    update_latest(run.path.parent)
    return run.trace


def _merge(run: RunDir, ranks: Sequence[SpilledRank], trace: Path) -> dict[str, Any]:
    """Write the trace of a session, and return its description."""
    description = description_of_trace(run)
    recovered = [_surveyed(run, rank, description) for rank in ranks]
    kept = kept_steps([rank.ended_steps for rank in ranks if rank.begins_late])
    if kept is not None:
        description |= kept.described(description)
    first_ns = min(
        (
            each_ns + rank.info.clock_offset_ns
            for rank, records in zip(ranks, recovered, strict=True)
            for each_ns in (rank.first_ns, _first_ns(records))
            if each_ns is not None
        ),
        default=0,
    )
    last_ns = max(
        max(rank.last_ns, _last_ns(records)) + rank.info.clock_offset_ns
        for rank, records in zip(ranks, recovered, strict=True)
    )
    for records in recovered:
        end_begun(records, last_ns - records.info.clock_offset_ns)
        _leave(records, kept)
    shifts_ns = [rank.info.clock_offset_ns - first_ns for rank in ranks]
    infos = [rank.info for rank in ranks]
    with trace_writer(trace, description, infos, shifts_ns) as writer:
        for part in _parts(ranks, kept):
            writer.write(part, is_last=False)
        writer.write(recovered, is_last=True)
    return description


def _surveyed(run: RunDir, rank: SpilledRank, description: dict[str, Any]) -> RankRecords:
    """Find out what a rank has spilled, and return what only its flight record holds."""
    flight = flight_of(run, rank.info.rank, description)
    recent = rank.survey(MOST_RECORDS if flight is not None else 0)
    return RankRecords(rank.info) if flight is None else missing_from(recent, flight)


def _parts(ranks: Sequence[SpilledRank], kept: KeptSteps | None) -> Iterator[list[RankRecords]]:
    """The records that are kept, some flushes of all ranks at a time."""
    num_bytes = sum(rank.num_bytes for rank in ranks)
    num_flushes = max(rank.num_flushes for rank in ranks)
    num_of_a_part = max(1, num_flushes * _PART_BYTES // max(1, num_bytes))
    by_rank = [rank.parts(num_of_a_part) for rank in ranks]
    for part in zip_longest(*by_rank):
        records = [
            RankRecords(rank.info) if each is None else each
            for rank, each in zip(ranks, part, strict=True)
        ]
        for each in records:
            _leave(each, kept)
        yield records


def _leave(records: RankRecords, kept: KeptSteps | None) -> None:
    """Leave only what is kept."""
    if kept is not None:
        for found in records.by_name().values():
            found[:] = [record for record in found if kept.has(record.step)]


def _first_ns(records: RankRecords) -> int | None:
    """When the first of these records began."""
    return min(
        (record[0] for found in records.by_name().values() for record in found), default=None
    )


def _last_ns(records: RankRecords) -> int:
    """When the last of these records ended."""
    return max(
        (record[num_times(record) - 1] for found in records.by_name().values() for record in found),
        default=0,
    )


# What flight records add to the files of ranks that did not close theirs.
#
# A rank that ends in the middle of a step leaves that step's records, and what it was in, in its
# flight record alone. What this says of a run goes into the trace's description, so that it can be
# judged wherever it is.


_CAUSES = frozenset(Cause)
_NAMES = {record_type: name for name, record_type in RECORD_TYPES.items()}


def description_of_trace(run: RunDir) -> dict[str, Any]:
    """What the trace of a session says of it: what run.json says, and how the run ended."""
    description = description_of(run)
    ending = read_ending(run) if is_last(run) else None
    if ending is not None:
        description[OUTCOME] = {"outcome": ending.outcome, "error": ending.error}
    return description


def flight_of(run: RunDir, rank: int, description: dict[str, Any]) -> Flight | None:
    """What is in a rank's flight record, or None without one; what it says of the rank's recording
    is added to the description of the trace."""
    path = ring_of(run.rank_records(rank))
    if not path.is_file():
        return None
    flight = None
    with suppress(OSError):
        flight = read_flight(path)
    if flight is None:
        description.setdefault(UNREAD_FLIGHTS, []).append(rank)
    elif flight.off is not None:
        step, reason = flight.off
        told = {"rank": rank, "step": step, "reason": reason}
        description.setdefault(RECORDING_OFF, []).append(told)
    return flight


def end_begun(records: RankRecords, end_ns: int) -> None:
    """Let what a rank never ended last to the end of the run, as far as it is known."""
    records.begun[:] = [begun._replace(end_ns=end_ns) for begun in records.begun]


def missing_from(recent: RankRecords, flight: Flight) -> RankRecords:
    """The records of a flight that are not among the last ones that its rank has spilled, and what
    the rank was in."""
    added = RankRecords(recent.info)
    lists = added.by_name()
    begun = _last_begun(flight.records)
    known = {record for found in recent.by_name().values() for record in found}
    taken = [r for r in flight.records if not isinstance(r, BegunRecord)]
    missing = [record for record in taken if record not in known]
    if missing and not flight.is_whole and missing[0] is taken[0]:
        # What came before was overwritten. Of the steps that are known in part, only the one that
        # was running is of use, and it must not pass for a whole one.
        step = (begun or missing[-1]).step
        missing = [
            record
            for record in missing
            if record.step == step
            and not (isinstance(record, PhaseRecord) and record.phase == Phase.SCHEDULE)
        ]
    for record in missing:
        lists[_NAMES[type(record)]].append(record)
    if begun is not None:
        added.begun.append(begun)
    return added


def _last_begun(records: Iterable[Record]) -> BegunRecord | None:
    """What the rank began and did not end: a task or a wait, or else the phase around them. None if
    it began nothing."""
    around: BegunRecord | None = None
    within: BegunRecord | None = None
    for record in records:
        if isinstance(record, BegunRecord):
            if record.doing == Doing.TASK or record.doing in _CAUSES:
                # A wait goes on when something arrives that does not end it.
                if within is not None and within.doing == record.doing != Doing.TASK:
                    record = record._replace(start_ns=within.start_ns)
                within = record
            else:
                around, within = record, None
        elif isinstance(record, TaskRecord | WaitRecord):
            # On a GPU a step's own records may come after the next one has begun.
            if within is not None and within.step == record.step:
                within = None
        elif isinstance(record, PhaseRecord) and (
            around is not None and (around.doing, around.step) == (record.phase, record.step)
        ):
            between = record.end_ns, record.end_ns, record.step, Doing.BETWEEN
            around, within = BegunRecord(*between), None
    return within or around


# The traces of a run's sessions, joined.


Link = tuple[int, int]
"""The ranks that a message goes from and to."""


def joined(recordings: list[Recording]) -> Recording:
    """The recordings of a run's sessions as one: each step from the session that ran it last, one
    session behind the other without the time between them.

    Raises RrfpError if their layouts differ.
    """
    parts = _contributions(recordings)
    recordings = [recording for recording, _ in parts]
    layouts = [_layout(recording) for recording in recordings]
    for number, layout in enumerate(layouts):
        if layout != layouts[-1]:
            raise RrfpError(
                f"the sessions of this run have several layouts ({_told(layout)} in recorded "
                f"session {number + 1}, {_told(layouts[-1])} in the last one), so they do not fit "
                "into one picture; name the trace of one session (trace.pftrace, trace-2.pftrace "
                "and so on)"
            )
    descriptions = [recording.settings for recording in recordings]
    whole = Recording({}, [RankRecords(records.info) for records in _by_rank(recordings[-1])])
    start_ns, sequences = 0, Counter[Link]()
    for recording, before in parts:
        if FIRST_KEPT_STEP in recording.settings:
            # As if the messages of the steps that have gone had never been counted.
            sequences.subtract(_first_sequences(recording))
        for records, into in zip(_by_rank(recording), whole.ranks, strict=True):
            _append(into, records, before, start_ns, sequences)
        start_ns, sequences = _end_ns(whole), _next_sequences(whole)
    whole.settings = {**descriptions[-1], SESSIONS: descriptions[:-1]}
    return whole


def _contributions(recordings: list[Recording]) -> list[tuple[Recording, int | None]]:
    """The sessions with steps that no later one ran again, each with the first step that one did;
    the last session if none has steps. A session that was killed as it began may have the records
    of some ranks only, and is left out."""
    first_steps = [first_step_of(recording.settings) for recording in recordings]
    found: list[tuple[Recording, int | None]] = []
    for number, recording in enumerate(recordings):
        # A later session may have gone back further than one before it.
        before = min(first_steps[number + 1 :], default=None)
        tasks = (task for records in recording.ranks for task in records.tasks)
        if any(before is None or task.step < before for task in tasks):
            found.append((recording, before))
    return found or [(recordings[-1], None)]


def _layout(recording: Recording) -> list[tuple[object, ...]]:
    return [
        (each.info.rank, each.info.pp_rank, each.info.tp_rank, each.info.dp_rank, each.info.stages)
        for each in _by_rank(recording)
    ]


def _told(layout: list[tuple[Any, ...]]) -> str:
    num_stages = len({stage for *_, stages in layout for stage in stages})
    return f"{len(layout)} ranks and {num_stages} stages"


def _by_rank(recording: Recording) -> list[RankRecords]:
    return sorted(recording.ranks, key=lambda records: records.info.rank)


def _append(
    into: RankRecords,
    records: RankRecords,
    before: int | None,
    start_ns: int,
    sequences: Mapping[Link, int],
) -> None:
    """Append the records of steps before a step. Their times count from `start_ns`, the messages of
    a link from its entry in `sequences`."""
    rank = records.info.rank
    costs = into.costs[-1] if into.costs else None
    found = records.by_name()
    if before is not None:
        # A later session went on from there.
        found["begun"] = []
    for name, target in into.by_name().items():
        for record in found[name]:
            if before is not None and record.step >= before:
                continue
            times = [start_ns + record[each] for each in range(num_times(record))]
            moved = type(record)(*times, *record[len(times) :])
            if isinstance(moved, SendRecord):
                sequence = moved.sequence + sequences[rank, moved.peer]
                moved = moved._replace(sequence=sequence)
            elif isinstance(moved, ReceiveRecord):
                sequence = moved.sequence + sequences[moved.peer, rank]
                moved = moved._replace(sequence=sequence)
            elif isinstance(moved, CostRecord) and costs is not None:
                moved = moved._replace(
                    num_records=moved.num_records + costs.num_records,
                    cost_ns=moved.cost_ns + costs.cost_ns,
                )
            target.append(moved)


def _end_ns(recording: Recording) -> int:
    """When the last record ended."""
    return max(
        (
            record[num_times(record) - 1]
            for records in recording.ranks
            for found in records.by_name().values()
            for record in found
        ),
        default=0,
    )


def _next_sequences(recording: Recording) -> Counter[Link]:
    """The number of each link's next message."""
    following = Counter[Link]()
    for link, sequence in _messages(recording):
        following[link] = max(following[link], sequence + 1)
    return following


def _first_sequences(recording: Recording) -> dict[Link, int]:
    """The number of each link's first message."""
    firsts: dict[Link, int] = {}
    for link, sequence in _messages(recording):
        firsts[link] = min(firsts.get(link, sequence), sequence)
    return firsts


def _messages(recording: Recording) -> Iterator[tuple[Link, int]]:
    """The link and the number of each message, as either end recorded it."""
    for records in recording.ranks:
        rank = records.info.rank
        for send in records.sends:
            yield (rank, send.peer), send.sequence
        for receive in records.receives:
            yield (receive.peer, rank), receive.sequence
