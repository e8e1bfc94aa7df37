"""Merges the ranks' spill files into the run's one trace.

The files are read twice, and never held in memory as a whole. The first pass finds what the trace
states before its records: when the run began, and which steps all ranks still have. The second pass
writes the records into the trace, some steps of all ranks at a time.
"""

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from rrfp.errors import RrfpError
from rrfp.trace.flight_record import MOST_RECORDS, Flight, missing_from, read_flight, ring_of
from rrfp.trace.outcome import read_ending, why_without_records
from rrfp.trace.perfetto.reader import read_trace
from rrfp.trace.perfetto.writer import trace_writer, write_trace
from rrfp.trace.records import (
    CostRecord,
    RankRecords,
    ReceiveRecord,
    Recording,
    SendRecord,
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
from rrfp.trace.spill import (
    RecordedSteps,
    SpilledRank,
    is_being_written,
    segments_in,
    steps_on_all_ranks,
)

_PART_BYTES = 2 << 20
"""Bytes of all ranks' files in memory at a time; decoded records take twenty times as much."""


def encode_run(directory: Path, elsewhere: Path | None = None) -> Path:
    """Merge the records of a run's sessions into traces, and return the path of the run's trace:
    that of its only session, or of all sessions joined. With `elsewhere`, missing traces are made
    in that directory, and the run's directory does not change.

    Raises RrfpError if the run is still going, if a file is corrupt, if no rank recorded anything,
    or if the sessions cannot be joined. The records of a session without a trace then stay.
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
    Returns False if the session has neither records nor a trace. Raises RrfpError if a rank still
    writes records, or a file is corrupt."""
    return _encoded(run, None) is not None


def _encoded(run: RunDir, elsewhere: Path | None) -> Path | None:
    """Merge one session, if it has records, and return its trace's path; None if it has neither
    records nor a trace. A merge without `elsewhere` also updates run.json and the link `latest`,
    and removes the records and the joined trace. Raises RrfpError if a rank still writes
    records."""
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
    """Write the trace of a session, including records that only the flight records have, and return
    its description. If some ranks removed their first steps, only the steps from the first one that
    all ranks still have are written."""
    description = description_of_trace(run)
    recovered = [_survey(run, rank, description) for rank in ranks]
    steps = steps_on_all_ranks([rank.ended_steps for rank in ranks if rank.begins_late])
    if steps is not None:
        description |= steps.described(description)
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
        max(rank.last_ns, _last_ns([records])) + rank.info.clock_offset_ns
        for rank, records in zip(ranks, recovered, strict=True)
    )
    for records in recovered:
        # An activity that a rank never ended lasts to the last known time of the run.
        end_ns = last_ns - records.info.clock_offset_ns
        records.begun[:] = [begun._replace(end_ns=end_ns) for begun in records.begun]
        _drop_other_steps(records, steps)
    shifts_ns = [rank.info.clock_offset_ns - first_ns for rank in ranks]
    infos = [rank.info for rank in ranks]
    with trace_writer(trace, description, infos, shifts_ns) as writer:
        for part in _parts(ranks, steps):
            writer.write(part, is_last=False)
        writer.write(recovered, is_last=True)
    return description


def _survey(run: RunDir, rank: SpilledRank, description: dict[str, Any]) -> RankRecords:
    """Read a rank's spill files once for their overview, and return the records that only its
    flight record has. Notes in the description if the flight record is damaged or recording was
    off."""
    flight = flight_of(run, rank.info.rank, description)
    recent = rank.survey(MOST_RECORDS if flight is not None else 0)
    return RankRecords(rank.info) if flight is None else missing_from(recent, flight)


def _parts(
    ranks: Sequence[SpilledRank], steps: RecordedSteps | None
) -> Iterator[list[RankRecords]]:
    """Yield the records of these steps (None: all), some flushes of all ranks at a time."""
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
            _drop_other_steps(each, steps)
        yield records


def _drop_other_steps(records: RankRecords, steps: RecordedSteps | None) -> None:
    """Remove all records but those of these steps, in place; None means all steps."""
    if steps is not None:
        for found in records.by_name().values():
            found[:] = [record for record in found if steps.has(record.step)]


def _first_ns(records: RankRecords) -> int | None:
    """The earliest start of these records; None without records."""
    return min(
        (record[0] for found in records.by_name().values() for record in found), default=None
    )


def _last_ns(ranks: Iterable[RankRecords]) -> int:
    """The latest end of all records; 0 without records."""
    return max(
        (
            record[num_times(record) - 1]
            for records in ranks
            for found in records.by_name().values()
            for record in found
        ),
        default=0,
    )


# Information from the flight records of ranks that died.
#
# If a rank dies in the middle of a step, only its flight record has that step's records and the
# activity that the rank had begun. Information about the recording goes into the trace's
# description, so that a trace can be checked without its run's directory.


def description_of_trace(run: RunDir) -> dict[str, Any]:
    """The description of a session for its trace: the one in run.json and, for the run's last
    session, how the run ended."""
    description = description_of(run)
    ending = read_ending(run) if is_last(run) else None
    if ending is not None:
        description[OUTCOME] = {"outcome": ending.outcome, "error": ending.error}
    return description


def flight_of(run: RunDir, rank: int, description: dict[str, Any]) -> Flight | None:
    """Read a rank's flight record; None if it is missing or damaged. Adds to the trace's
    description that it is damaged, or that the rank switched recording off."""
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
        entry = {"rank": rank, "step": step, "reason": reason}
        description.setdefault(RECORDING_OFF, []).append(entry)
    return flight


# Joining the traces of a run's sessions.


Link = tuple[int, int]
"""The source and destination rank of a message."""


def joined(recordings: list[Recording]) -> Recording:
    """Join the recordings of a run's sessions: of each session the steps before the earliest first
    step of any later one, and all evaluations. The sessions follow each other without the time
    between them; messages are renumbered. A session whose steps all ran again is left out.

    Raises RrfpError if the layouts of the others differ.
    """
    parts = _contributions(recordings)
    recordings = [recording for recording, _ in parts]
    layouts = [_layout(recording) for recording in recordings]
    for number, layout in enumerate(layouts):
        if layout != layouts[-1]:
            raise RrfpError(
                f"the sessions of this run have several layouts ({_describe(layout)} in recorded "
                f"session {number + 1}, {_describe(layouts[-1])} in the last one), so they do not "
                "fit into one picture; name the trace of one session (trace.pftrace, "
                "trace-2.pftrace and so on)"
            )
    descriptions = [recording.settings for recording in recordings]
    whole = Recording({}, [RankRecords(records.info) for records in _by_rank(recordings[-1])])
    start_ns, sequences = 0, Counter[Link]()
    for recording, before in parts:
        if FIRST_KEPT_STEP in recording.settings:
            # Do not count the messages of steps whose records were removed.
            sequences.subtract(_first_sequences(recording))
        for records, into in zip(_by_rank(recording), whole.ranks, strict=True):
            _append(into, records, before, start_ns, sequences)
        start_ns, sequences = _last_ns(whole.ranks), _next_sequences(whole)
    whole.settings = {**descriptions[-1], SESSIONS: descriptions[:-1]}
    return whole


def _contributions(recordings: list[Recording]) -> list[tuple[Recording, int | None]]:
    """The sessions with a task of an evaluation, or of a step before the earliest first step of all
    later sessions, each with that step (None for the last session); the last session if there is
    none. A session that was killed at its start may have the records of some ranks only, and is
    skipped."""
    first_steps = [first_step_of(recording.settings) for recording in recordings]
    found: list[tuple[Recording, int | None]] = []
    for number, recording in enumerate(recordings):
        # A later session may begin at an earlier step than the one before it.
        before = min(first_steps[number + 1 :], default=None)
        tasks = (task for records in recording.ranks for task in records.tasks)
        if any(before is None or task.step < before for task in tasks):
            found.append((recording, before))
    return found or [(recordings[-1], None)]


def _layout(recording: Recording) -> list[tuple[object, ...]]:
    """The place and the stages of each rank, by rank."""
    return [
        (each.info.rank, each.info.pp_rank, each.info.tp_rank, each.info.dp_rank, each.info.stages)
        for each in _by_rank(recording)
    ]


def _describe(layout: list[tuple[Any, ...]]) -> str:
    """Format a layout: `4 ranks and 2 stages`."""
    num_stages = len({stage for *_, stages in layout for stage in stages})
    return f"{len(layout)} ranks and {num_stages} stages"


def _by_rank(recording: Recording) -> list[RankRecords]:
    """The records of each rank of a recording, sorted by rank."""
    return sorted(recording.ranks, key=lambda records: records.info.rank)


def _append(
    into: RankRecords,
    records: RankRecords,
    before: int | None,
    start_ns: int,
    sequences: Mapping[Link, int],
) -> None:
    """Append the records of the steps before the step `before` (None: all) and of evaluations.
    Times are moved by `start_ns`, sequence numbers by their link's entry in `sequences`; recording
    costs are added up. With `before`, an activity that was never ended is left out."""
    rank = records.info.rank
    costs = into.costs[-1] if into.costs else None
    found = records.by_name()
    if before is not None:
        # A later session continued, so the activity is no longer the run's last one.
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


def _next_sequences(recording: Recording) -> Counter[Link]:
    """The sequence number of each link's next message."""
    following = Counter[Link]()
    for link, sequence in _messages(recording):
        following[link] = max(following[link], sequence + 1)
    return following


def _first_sequences(recording: Recording) -> dict[Link, int]:
    """The sequence number of each link's first recorded message."""
    firsts: dict[Link, int] = {}
    for link, sequence in _messages(recording):
        firsts[link] = min(firsts.get(link, sequence), sequence)
    return firsts


def _messages(recording: Recording) -> Iterator[tuple[Link, int]]:
    """The link and the sequence number of each message, as either end recorded it."""
    for records in recording.ranks:
        rank = records.info.rank
        for send in records.sends:
            yield (rank, send.peer), send.sequence
        for receive in records.receives:
            yield (receive.peer, rank), receive.sequence
