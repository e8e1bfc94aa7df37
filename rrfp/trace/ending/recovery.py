"""What flight records add to the files of ranks that did not close theirs.

A rank that ends in the middle of a step leaves that step's records, and what it was in, in its
flight record alone. What this says of a run goes into the trace's description, so that it can be
judged wherever it is.
"""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from rrfp.schedule.causes import Cause
from rrfp.trace.ending.flight import Flight, read_flight, ring_of
from rrfp.trace.outcome import read_ending
from rrfp.trace.records import (
    RECORD_TYPES,
    BegunRecord,
    Doing,
    Phase,
    PhaseRecord,
    RankRecords,
    Record,
    TaskRecord,
    WaitRecord,
)
from rrfp.trace.rundir import RunDir
from rrfp.trace.sessions import description_of, is_last

RECORDING_OFF = "recording_off"
"""In a trace's description: the ranks that switched their recording off, each with the `step` whose
records it could not write, and the `reason`."""
UNREAD_FLIGHTS = "unread_flights"
"""Likewise: the ranks whose flight record is damaged."""
OUTCOME = "outcome"
"""Likewise: how the run ended, and the `error` that ended it, as in outcome.json."""


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
