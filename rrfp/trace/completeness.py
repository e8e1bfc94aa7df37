"""How the run of a trace ended, and whether the trace holds the steps that the run promised.

A trace's own description tells how many steps its run was to make, how it ended, and which ranks
stopped recording (`rrfp.trace.completeness`). The run's directory, where there is one, also
tells which steps were trained, and of an earlier session where the next one went on.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from rrfp.errors import RrfpError
from rrfp.schedule.tasks import Cause
from rrfp.trace.flight_record import Flight, read_flight, ring_of
from rrfp.trace.outcome import Outcome, read_ending
from rrfp.trace.records import (
    RECORD_TYPES,
    BegunRecord,
    Doing,
    Phase,
    PhaseRecord,
    RankRecords,
    Record,
    Recording,
    TaskRecord,
    WaitRecord,
    is_evaluation,
    step_name,
    step_windows,
)
from rrfp.trace.run_dir import RunDir
from rrfp.trace.safe_files import lines_of, open_regular
from rrfp.trace.sessions import (
    SESSIONS,
    description_of,
    first_step_after,
    first_step_of,
    is_last,
    read_description,
    steps_gone,
)

# How a finding of `rrfp trace check` is worded.


NUM_EXAMPLES = 3


def finding(pattern: str, noun: str, items: list[Any], num_items: int | None = None) -> str:
    """Fill in "3 tasks" and append the first few `items`. `num_items` is given where an item stands
    for several."""
    num_items = len(items) if num_items is None else num_items
    count = f"{num_items} {noun if num_items != 1 else _singular(noun)}"
    examples = "; ".join(map(str, items[:NUM_EXAMPLES]))
    more = "; ..." if len(items) > NUM_EXAMPLES else ""
    return f"{pattern.format(count)} ({examples}{more})"


def _singular(noun: str) -> str:
    return noun.replace("pairs", "pair") if noun.startswith("pairs") else noun.removesuffix("s")


# What flight records add to the files of ranks that did not close theirs.
#
# A rank that ends in the middle of a step leaves that step's records, and what it was in, in its
# flight record alone. What this says of a run goes into the trace's description, so that it can be
# judged wherever it is.


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


_NUM_SPANS = 3


@dataclass(frozen=True, slots=True)
class Promise:
    """The training steps that a trace should hold."""

    asked: range = range(0)
    """Those that the run was to make; empty where nobody said how many."""
    trained: frozenset[int] = frozenset()
    """Those that metrics.jsonl has, of the same session."""

    @classmethod
    def of_description(cls, description: Mapping[str, Any]) -> Self:
        """By what a trace says itself."""
        return cls(_asked(description))

    @classmethod
    def of_run(cls, trace: Path, description: Mapping[str, Any]) -> Self:
        """By the directory of a run, too, if the trace lies in that of its own."""
        run = RunDir(trace.parent)
        session = next((each for each in _sessions_of(run) if each.trace == trace), None)
        is_joined = trace == run.joined_trace
        if session is None and not is_joined:
            return cls.of_description(description)
        asked, stop = _asked(description), None
        if session is not None:
            with suppress(RrfpError):
                stop = first_step_after(read_description(run.run_json), session.session)
        if stop is not None:
            asked = range(asked.start, min(stop, asked.stop))
        first = first_step_of(description)
        steps = _steps_in(run.metrics)
        return cls(asked, frozenset(s for s in steps if s >= first and (stop is None or s < stop)))


def outcome_of(description: Mapping[str, Any]) -> tuple[Outcome | None, str]:
    """How a run ended by the description of its trace, and the sentence of the error; None and
    empty where it does not say."""
    told = description.get(OUTCOME)
    if not isinstance(told, dict):
        return None, ""
    error = told.get("error")
    with suppress(ValueError):
        return Outcome(str(told.get("outcome"))), error if isinstance(error, str) else ""
    return None, ""


def ending_sentence(description: Mapping[str, Any]) -> str:
    """Why the run did not come to its end, in a clause; empty if it did, if it was asked to stop
    and did so after a step, or if nobody said."""
    outcome, error = outcome_of(description)
    error = error.partition("\n")[0]
    match outcome:
        case Outcome.FAILED:
            return f"the run failed: {error}"
        case Outcome.INTERRUPTED:
            return "the run was interrupted"
        case Outcome.KILLED:
            return "the run's launcher was killed, and nobody wrote how it ended"
        case Outcome.STOPPED if error:
            return error
    return ""


def ranks_off(description: Mapping[str, Any]) -> dict[int, tuple[int, str]]:
    """The ranks that switched recording off: each with the step whose records it could not write,
    and the reason."""
    listed = description.get(RECORDING_OFF)
    return {
        each["rank"]: (each["step"], str(each.get("reason")))
        for each in (listed if isinstance(listed, list) else [])
        if isinstance(each, dict)
        and isinstance(each.get("rank"), int)
        and isinstance(each.get("step"), int)
    }


def check_outcome(description: Mapping[str, Any]) -> Iterator[str]:
    if why := ending_sentence(description):
        yield f"incomplete: {why}"
    unread = description.get(UNREAD_FLIGHTS)
    if isinstance(unread, list) and unread:
        yield f"lost: the flight record of {finding('{}', 'ranks', unread)}, which is damaged"


def check_promise(recording: Recording, promise: Promise) -> Iterator[str]:
    """Steps that should be there, and that not every rank recorded to their end."""
    lossy = {loss.step for records in recording.ranks for loss in records.losses}
    whole = {step for step in step_windows(recording) if not is_evaluation(step)} - lossy
    asked: Iterable[int] = promise.asked
    outcome, error = outcome_of(recording.settings)
    if outcome is Outcome.STOPPED and not error:
        # It ended after a step, as it was asked to, and may be resumed.
        asked = ()
    gone = steps_gone(recording.settings)
    lost = [step for step in sorted(promise.trained - whole) if not _is_in(gone, step)]
    if lost:
        yield f"lost: {_spans(lost)}, which metrics.jsonl says {_were(lost)} trained"
    missing = [
        step for step in sorted(set(asked) - whole - promise.trained) if not _is_in(gone, step)
    ]
    if missing:
        yield f"missing: {_spans(missing)} of the {promise.asked.stop} that the run was to make"


def _is_in(ranges: Iterable[range], step: int) -> bool:
    return any(step in each for each in ranges)


def check_off(description: Mapping[str, Any]) -> Iterator[str]:
    groups: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, (step, reason) in ranks_off(description).items():
        groups[step, reason].append(rank)
    for (step, reason), ranks in groups.items():
        told = finding("{}", "ranks", sorted(ranks))
        yield f"incomplete: {told} switched recording off in {step_name(step)}: {reason}"


def check_begun(recording: Recording) -> Iterator[str]:
    told = [
        f"rank {records.info.rank}: {begun_told(begun)} in {step_name(begun.step)}"
        for records in recording.ranks
        for begun in records.begun
    ]
    if told:
        yield finding("unfinished: {} ended amid something", "ranks", told)


def begun_told(begun: BegunRecord) -> str:
    """`F3`, `backward_input for B3 of rank 2`, `optimizer`."""
    task = f"{begun.kind}{begun.microbatch}" if begun.kind else ""
    if begun.doing == Doing.TASK:
        return task
    whom = f"rank {begun.peer}" if begun.peer >= 0 else ""
    what = " of ".join(filter(None, (task, whom)))
    return f"{begun.doing}, for {what}" if what else begun.doing


def _asked(description: Mapping[str, Any]) -> range:
    """The steps that a training was to make. A trace of several sessions has them all."""
    settings = description.get("settings")
    steps = settings.get("steps") if isinstance(settings, dict) else None
    if not isinstance(steps, int) or {"imported", "simulated"} & description.keys():
        return range(0)
    return range(0 if description.get(SESSIONS) else first_step_of(description), steps)


def _sessions_of(run: RunDir) -> list[RunDir]:
    with suppress(OSError):
        return run.sessions()
    return []


def _steps_in(metrics: Path) -> Iterator[int]:
    """The steps of the lines of a file of metrics; others are none of ours, or not whole yet."""
    with suppress(OSError), open_regular(metrics) as file:
        for line in lines_of(file, metrics):
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                step = json.loads(line)["step"]
                if isinstance(step, int):
                    yield step


def _spans(steps: list[int]) -> str:
    """`step 3`, `steps 3, 5 to 9`."""
    starts = [steps[0], *(b for a, b in pairwise(steps) if b != a + 1)]
    ends = [*(a for a, b in pairwise(steps) if b != a + 1), steps[-1]]
    spans = [f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True)]
    more = ["..."] if len(spans) > _NUM_SPANS else []
    return f"{'step' if len(steps) == 1 else 'steps'} {', '.join(spans[:_NUM_SPANS] + more)}"


def _were(steps: list[int]) -> str:
    return "was" if len(steps) == 1 else "were"
