"""Checks that a trace holds all of its run: nothing lost, open, unmatched, missing or impossible.

A crash loses the records of the running step, on some ranks or on all. A rank that runs out of room
in a step loses that step's last records. Such a step is reported once; other checks skip it.

A trace's own description tells how many steps its run was to make, how it ended, and which ranks
stopped recording. The run's directory, where there is one, also tells which steps were trained, and
of an earlier session where the next one went on.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count, islice, pairwise, takewhile
from pathlib import Path
from typing import Any, Self

from rrfp.errors import RrfpError
from rrfp.trace.outcome import Outcome
from rrfp.trace.perfetto.format import MessageKey, TaskKey, key_of, received_by, sent_by
from rrfp.trace.perfetto.reader import TraceContents
from rrfp.trace.records import (
    BegunRecord,
    Doing,
    Phase,
    PhaseRecord,
    RankRecords,
    ReceiveRecord,
    Recording,
    SendRecord,
    TaskRecord,
    are_known,
    is_evaluation,
    step_name,
    step_windows,
    wrong_changes,
)
from rrfp.trace.run_dir import RunDir, expected_ranks
from rrfp.trace.run_json import (
    FIRST_KEPT_STEP,
    OUTCOME,
    RECORDING_OFF,
    SESSIONS,
    UNREAD_FLIGHTS,
    first_step_after,
    first_step_of,
    read_description,
    steps_gone,
)
from rrfp.trace.safe_files import lines_of, open_regular

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


# The steps that a trace should hold, and how its run ended.


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


# What recording cost a run, by the run's own records.


def recording_fraction(recording: Recording) -> float | None:
    """The time spent recording over the time of the steps, on the rank where that is largest.

    None if no rank has both finished a step and recorded its cost.
    """
    fractions = [
        records.costs[-1].cost_ns / steps_ns
        for records in recording.ranks
        if records.costs and (steps_ns := _steps_ns(records))
    ]
    return max(fractions, default=None)


def _steps_ns(records: RankRecords) -> int:
    return sum(
        phase.end_ns - phase.start_ns for phase in records.phases if phase.phase == Phase.SCHEDULE
    )


def check_contents(contents: TraceContents, promise: Promise | None = None) -> list[str]:
    """The problems of a trace that was read, one sentence each; empty if there are none. `promise`
    is what the run's directory says that it should hold; without one, what it says itself."""
    recording = contents.recording
    torn = _torn_steps(recording)
    ranks = {records.info.rank for records in recording.ranks}
    problems = [
        *_check_file(contents),
        *_check_ranks(recording, ranks),
        *_check_losses(recording),
        *check_outcome(recording.settings),
        *check_promise(recording, promise or Promise.of_description(recording.settings)),
        *check_off(recording.settings),
        *_check_torn(recording, torn),
        *check_begun(recording),
        *_check_messages(recording, ranks, torn, contents.flow_lengths),
    ]
    for records in recording.ranks:
        problems += _check_times(records)
        problems += _check_tasks(records, torn)
        problems += _check_bytes(records, torn)
    return problems


def _check_file(contents: TraceContents) -> Iterator[str]:
    num_found = sum(
        len(found) for rank in contents.recording.ranks for found in rank.by_name().values()
    )
    num_written = contents.num_records_written
    if num_written is None:
        yield "truncated: the closing mark is missing, the last events are lost"
    elif num_found + len(contents.open_slices) < num_written:
        num_lost = num_written - num_found - len(contents.open_slices)
        yield f"lost: {num_lost} of {num_written} events"
    elif num_found > num_written:
        yield f"unmatched: {num_found - num_written} events more than the run recorded"
    if contents.open_slices:
        yield finding("open: {} without an end", "slices", contents.open_slices)
    if contents.num_stray_ends:
        yield f"unmatched: {contents.num_stray_ends} ends of slices that never began"


def _check_ranks(recording: Recording, ranks: set[int]) -> Iterator[str]:
    missing = sorted(expected_ranks(recording.settings) - ranks)
    if missing:
        yield finding("missing: {} of the run left no records", "ranks", missing)
    counts = Counter(records.info.rank for records in recording.ranks)
    twice = [rank for rank, count in counts.items() if count > 1]
    if twice:
        yield finding("unmatched: {} in the trace more than once", "ranks", twice)


def _torn_steps(recording: Recording) -> dict[int, list[int]]:
    """The steps that some ranks began but did not finish or fully record, in order of time, each
    with those ranks."""
    finished = {
        records.info.rank: {p.step for p in records.phases if p.phase == Phase.SCHEDULE}
        - {loss.step for loss in records.losses}
        for records in recording.ranks
    }
    unfinished = {
        step: [rank for rank, steps in finished.items() if step not in steps]
        for step in _begun_steps(recording)
    }
    return {step: ranks for step, ranks in unfinished.items() if ranks}


def _begun_steps(recording: Recording) -> list[int]:
    """The steps of which anything ran, in order of time (which step numbers do not follow)."""
    begins_ns: dict[int, int] = {}
    for records in recording.ranks:
        finished = (phase for phase in records.phases if phase.phase == Phase.SCHEDULE)
        for record in chain[TaskRecord | PhaseRecord](records.tasks, finished):
            begin_ns = begins_ns.get(record.step, record.start_ns)
            begins_ns[record.step] = min(begin_ns, record.start_ns)
    return sorted(begins_ns, key=lambda step: (begins_ns[step], is_evaluation(step), abs(step)))


def _check_losses(recording: Recording) -> Iterator[str]:
    """Losses that a rank itself reports."""
    for records in recording.ranks:
        if records.losses:
            num_lost = sum(loss.num_lost for loss in records.losses)
            parts = [f"{loss.num_lost} in {step_name(loss.step)}" for loss in records.losses]
            told = finding("{}", "records", parts, num_lost)
            yield f"lost: {told} that rank {records.info.rank} had no room for"


def _check_torn(recording: Recording, torn: dict[int, list[int]]) -> Iterator[str]:
    begun = _begun_steps(recording)
    run_end = step_name(begun[-1]) if begun else ""
    known = {
        (loss.step, records.info.rank) for records in recording.ranks for loss in records.losses
    }
    off = ranks_off(recording.settings)
    stopped: defaultdict[str, list[int]] = defaultdict(list)
    for records in recording.ranks:
        rank = records.info.rank
        end = _end_without(rank, begun, torn)
        if len(end) > 1 or rank in off:
            known.update((step, rank) for step in end)
        if len(end) > 1 and rank not in off:
            last = step_name(begun[-len(end) - 1]) if len(end) < len(begun) else "no whole step"
            stopped[last].append(rank)
    for last, ranks in stopped.items():
        told = finding("{}", "ranks", ranks)
        yield f"incomplete: the records of {told} end with {last}, others' with {run_end}"
    for step, torn_ranks in torn.items():
        ranks = [rank for rank in torn_ranks if (step, rank) not in known]
        if not ranks:
            continue
        told = finding("{}", "ranks", ranks)
        if step == begun[-1]:
            yield f"incomplete: the run ended in {step_name(step)}, which {told} did not finish"
        else:
            yield f"lost: the end of {step_name(step)} on {told}"


def _end_without(rank: int, begun: list[int], torn: dict[int, list[int]]) -> list[int]:
    """The last steps of the run, as far as the rank finished none of them."""
    return list(takewhile(lambda step: rank in torn.get(step, ()), reversed(begun)))


def _check_messages(
    recording: Recording, ranks: set[int], torn: Iterable[int], flow_lengths: Counter[int]
) -> Iterator[str]:
    sends: dict[MessageKey, SendRecord] = {}
    receives: dict[MessageKey, ReceiveRecord] = {}
    tasks: dict[tuple[int, TaskKey], TaskRecord] = {}
    for records in recording.ranks:
        rank = records.info.rank
        sends.update((sent_by(rank, send), send) for send in records.sends)
        receives.update((received_by(rank, receive), receive) for receive in records.receives)
        tasks.update(((rank, key_of(task)), task) for task in records.tasks)

    unreceived: list[str] = []
    unsent: list[str] = []
    unconsumed: list[str] = []
    early: list[str] = []
    too_soon: list[str] = []
    arrows: list[str] = []
    skipped = set(torn)
    # Clocks of two hosts agree only to within the sum of their measurement errors.
    clock_errors_ns = {r.info.rank: r.info.clock_error_ns for r in recording.ranks}
    for key in sorted(sends.keys() | receives.keys()):
        send, receive = sends.get(key), receives.get(key)
        record: Any = send or receive
        if record.step in skipped or not {key.source, key.destination} <= ranks:
            continue
        told = (
            f"{record.kind}{record.microbatch} of {step_name(record.step)}, "
            f"rank {key.source} to {key.destination}"
        )
        if receive is None:
            unreceived.append(told)
            continue
        if send is None:
            unsent.append(told)
        elif receive.start_ns - send.start_ns < -(
            clock_errors_ns[key.source] + clock_errors_ns[key.destination]
        ):
            early.append(f"{told}: {receive.start_ns - send.start_ns} ns")
        task = tasks.get((key.destination, key_of(receive)))
        if task is None:
            unconsumed.append(told)
        elif task.start_ns < receive.end_ns:
            too_soon.append(f"{told}: {task.start_ns - receive.end_ns} ns")
        if send and task and flow_lengths[key.flow_id] != 3:
            arrows.append(told)
    for pattern, told_of in (
        ("lost: {} sent and never received", unreceived),
        ("lost: {} received and never sent", unsent),
        ("unmatched: {} received and taken by no task", unconsumed),
        ("negative latency: {} received before they were sent", early),
        ("negative latency: {} taken by a task before they arrived", too_soon),
        ("unmatched: {} without an arrow from send to receive to task", arrows),
    ):
        if told_of:
            yield finding(pattern, "messages", told_of)
    have_lost = {records.info.rank for records in recording.ranks if records.losses}
    yield from _check_gaps(
        (key for key in sends if key.source not in have_lost), begins_late=_begins_late(recording)
    )
    yield from _check_inputs(recording, receives, skipped)


def _check_gaps(sends: Iterable[MessageKey], *, begins_late: bool) -> Iterator[str]:
    """A link's sequence numbers must start at 0, unless the recording begins late, and have no
    gaps."""
    links: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for source, destination, sequence in sends:
        links[source, destination].add(sequence)
    for (source, destination), found in sorted(links.items()):
        first = min(found) if begins_late else 0
        num_missing = max(found) + 1 - first - len(found)
        if num_missing > 0:
            # A damaged number may be huge, so look only for the first few missing ones.
            missing = (f"number {number}" for number in count(first) if number not in found)
            examples = list(islice(missing, min(num_missing, NUM_EXAMPLES + 1)))
            told = finding("lost: {}", "messages", examples, num_missing)
            yield f"{told} of the link from rank {source} to {destination}"


def _begins_late(recording: Recording) -> bool:
    """Whether only some steps were recorded, or kept, and not the first ones."""
    if FIRST_KEPT_STEP in recording.settings:
        return True
    settings = recording.settings.get("settings")
    steps = settings.get("recorded_steps") if isinstance(settings, dict) else None
    return isinstance(steps, str) and not steps.startswith((":", "0:"))


def _check_inputs(
    recording: Recording, receives: dict[MessageKey, ReceiveRecord], skipped: set[int]
) -> Iterator[str]:
    """If a stage gets any input of a kind by message, each of its tasks must have one."""
    received: defaultdict[int, set[TaskKey]] = defaultdict(set)
    for key, receive in receives.items():
        received[key.destination].add(key_of(receive))
    unfed = []
    for records in recording.ranks:
        inputs = received[records.info.rank]
        fed = {(key.kind, key.stage) for key in inputs}
        unfed += [
            _name(task)
            for task in records.tasks
            if task.step not in skipped
            and (task.kind, task.stage) in fed
            and key_of(task) not in inputs
        ]
    if unfed:
        yield finding("unmatched: {} ran on an input never received", "tasks", unfed)


def _check_times(records: RankRecords) -> Iterator[str]:
    backward = [
        f"{name} at {record.start_ns} ns"
        for name, found in records.by_name().items()
        for record in found
        if hasattr(record, "end_ns") and record.end_ns < record.start_ns
    ]
    if backward:
        told = finding("negative duration: {}", "events", backward)
        yield f"{told} on rank {records.info.rank}"


def _check_tasks(records: RankRecords, torn: Iterable[int]) -> Iterator[str]:
    rank = records.info.rank
    overlapping = []
    by_start = sorted(records.tasks)
    for earlier, later in pairwise(by_start):
        if later.start_ns < earlier.end_ns:
            overlapping.append(f"{_name(earlier)} and {_name(later)}")
    if overlapping:
        yield finding("overlapping: {}", "pairs of tasks", overlapping) + f" on rank {rank}"

    counts = Counter(key_of(task) for task in records.tasks)
    twice = [_name(key) for key, count in counts.items() if count > 1]
    if twice:
        yield finding("unmatched: {} ran more than once", "tasks", twice) + f" on rank {rank}"

    missing = [_name(key) for key in _missing_tasks(counts, set(torn))]
    if missing:
        yield finding("lost: {}", "tasks", missing) + f" on rank {rank}"


def _check_bytes(records: RankRecords, torn: Iterable[int]) -> Iterator[str]:
    """The bytes held must add up, and stay within the bound in force."""
    skipped = set(torn)
    tasks = [task for task in records.tasks if task.step not in skipped]
    if not are_known(tasks):
        return
    rank = records.info.rank
    wrong = [_name(task) for task in wrong_changes(tasks)]
    if wrong:
        told = finding("impossible: {} with bytes held that do not add up", "tasks", wrong)
        yield f"{told} on rank {rank}"
    budgets = {p.step: p.budget_bytes for p in records.phases if p.phase == Phase.SCHEDULE}
    over = [
        f"{_name(task)}: {task.held_bytes} of {budget} bytes"
        for task in tasks
        if task.held_bytes > (budget := budgets.get(task.step, 0)) > 0
    ]
    if over:
        yield finding("impossible: {} passed the bound", "tasks", over) + f" on rank {rank}"


def _missing_tasks(found: Iterable[TaskKey], skipped: set[int]) -> list[TaskKey]:
    """In a finished step, a stage must run each of its kinds for the same microbatches."""
    microbatches: defaultdict[int, set[int]] = defaultdict(set)
    groups: defaultdict[tuple[int, str, int], set[int]] = defaultdict(set)
    for step, kind, stage, microbatch in found:
        if step not in skipped:
            microbatches[step].add(microbatch)
            groups[step, kind, stage].add(microbatch)
    return [
        TaskKey(step, kind, stage, microbatch)
        for (step, kind, stage), present in sorted(groups.items())
        for microbatch in sorted(microbatches[step] - present)
    ]


def _name(task: TaskRecord | TaskKey) -> str:
    return f"{task.kind}{task.microbatch} of {step_name(task.step)}, stage {task.stage}"
