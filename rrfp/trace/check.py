"""Checks that a trace is complete: nothing lost, open, unmatched, missing or impossible.

A crash loses the records of the running step, on some ranks or on all. A rank that runs out of room
in a step loses that step's last records. Such a step is reported once; other checks skip it.

A trace's own description states how many steps its run should make, how it ended, and which ranks
stopped recording. The run's directory, if it exists, also states which steps were trained, and at
which step a later session continued.
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
    are_sizes_known,
    is_evaluation,
    step_name,
    step_windows,
    tasks_with_wrong_bytes,
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
    removed_steps,
)
from rrfp.trace.safe_files import lines_of, open_regular

# The sentences of `rrfp trace check`.


NUM_EXAMPLES = 3


def finding(pattern: str, noun: str, items: list[Any], num_items: int | None = None) -> str:
    """Format a finding: `pattern` with a count such as "3 tasks", then the first 3 items in
    parentheses, and `...` if there are more. The count is the number of items, or `num_items` if
    that is given."""
    num_items = len(items) if num_items is None else num_items
    count = f"{num_items} {noun if num_items != 1 else _singular(noun)}"
    examples = "; ".join(map(str, items[:NUM_EXAMPLES]))
    more = "; ..." if len(items) > NUM_EXAMPLES else ""
    return f"{pattern.format(count)} ({examples}{more})"


def _singular(noun: str) -> str:
    """Convert a plural noun: `tasks` to `task`, `pairs of tasks` to `pair of tasks`."""
    return noun.replace("pairs", "pair") if noun.startswith("pairs") else noun.removesuffix("s")


# The steps that a trace should hold, and how its run ended.


_NUM_SPANS = 3


@dataclass(frozen=True, slots=True)
class Promise:
    """The training steps that a trace should hold."""

    asked: range = range(0)
    """The steps that the run should make; empty if their number is unknown."""
    trained: frozenset[int] = frozenset()
    """The steps of the session, or of all joined sessions, in metrics.jsonl."""

    @classmethod
    def of_description(cls, description: Mapping[str, Any]) -> Self:
        """The promise in a trace's own description: the steps asked for, and no trained ones."""
        return cls(_asked(description))

    @classmethod
    def of_run(cls, trace: Path, description: Mapping[str, Any]) -> Self:
        """The promise of a session's or the joined trace in its run's directory: also the steps in
        metrics.jsonl, from the session's first step (0 for a joined trace), and of a session only
        the steps before the one at which a later session continued. Any other trace promises what
        its description does. An unreadable run.json is ignored."""
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
        first = _first_step(description)
        steps = _steps_in(run.metrics)
        return cls(asked, frozenset(s for s in steps if s >= first and (stop is None or s < stop)))


def _outcome_of(description: Mapping[str, Any]) -> tuple[Outcome | None, str]:
    """How a run ended according to the description of its trace, and the error's message. None and
    empty if the description states no outcome, or an unknown one."""
    entry = description.get(OUTCOME)
    if not isinstance(entry, dict):
        return None, ""
    error = entry.get("error")
    with suppress(ValueError):
        return Outcome(str(entry.get("outcome"))), error if isinstance(error, str) else ""
    return None, ""


def ending_sentence(description: Mapping[str, Any]) -> str:
    """Explain in a clause why the run did not finish: it failed (with the error's first line), was
    interrupted, or its launcher was killed; of a run stopped with an error, the error's first line.
    Empty if it finished, if it stopped without an error (on request after a step), or if that is
    unknown."""
    outcome, error = _outcome_of(description)
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


def _ranks_off(description: Mapping[str, Any]) -> dict[int, tuple[int, str]]:
    """The ranks that switched recording off, each with the step whose records it could not write
    and the reason. Invalid entries of the description are skipped."""
    listed = description.get(RECORDING_OFF)
    return {
        each["rank"]: (each["step"], str(each.get("reason")))
        for each in (listed if isinstance(listed, list) else [])
        if isinstance(each, dict)
        and isinstance(each.get("rank"), int)
        and isinstance(each.get("step"), int)
    }


def _check_outcome(description: Mapping[str, Any]) -> Iterator[str]:
    """Yield findings if the run did not finish, or if a flight record is damaged."""
    if why := ending_sentence(description):
        yield f"incomplete: {why}"
    unread = description.get(UNREAD_FLIGHTS)
    if isinstance(unread, list) and unread:
        yield f"lost: the flight record of {finding('{}', 'ranks', unread)}, which is damaged"


def _check_promise(recording: Recording, promise: Promise) -> Iterator[str]:
    """Yield a finding about trained steps that not every rank recorded completely, and one about
    steps that the run was to make and that were neither trained nor recorded completely. Steps
    whose records were removed for the disk budget are no finding, nor are steps not made because
    the run stopped on request."""
    lossy = {loss.step for records in recording.ranks for loss in records.losses}
    whole = {step for step in step_windows(recording) if not is_evaluation(step)} - lossy
    asked: Iterable[int] = promise.asked
    outcome, error = _outcome_of(recording.settings)
    if outcome is Outcome.STOPPED and not error:
        # It stopped after a step on request, and may be resumed.
        asked = ()
    known = whole.union(*removed_steps(recording.settings))
    if lost := sorted(promise.trained - known):
        were = "was" if len(lost) == 1 else "were"
        yield f"lost: {_spans(lost)}, which metrics.jsonl says {were} trained"
    if missing := sorted(set(asked) - known - promise.trained):
        yield f"missing: {_spans(missing)} of the {promise.asked.stop} that the run was to make"


def _check_off(description: Mapping[str, Any]) -> Iterator[str]:
    """Yield a finding for each step and reason for which ranks switched recording off."""
    groups: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, (step, reason) in _ranks_off(description).items():
        groups[step, reason].append(rank)
    for (step, reason), ranks in groups.items():
        who = finding("{}", "ranks", sorted(ranks))
        yield f"incomplete: {who} switched recording off in {step_name(step)}: {reason}"


def _check_begun(recording: Recording) -> Iterator[str]:
    """Yield one finding, if any ranks ended during an activity, that lists these activities."""
    unfinished = [
        f"rank {records.info.rank}: {_describe_begun(begun)} in {step_name(begun.step)}"
        for records in recording.ranks
        for begun in records.begun
    ]
    if unfinished:
        yield finding("unfinished: {} ended amid something", "ranks", unfinished)


def _describe_begun(begun: BegunRecord) -> str:
    """Format an activity: `F3`, `backward_input, for B3 of rank 2`, `optimizer`."""
    task = f"{begun.kind}{begun.microbatch}" if begun.kind else ""
    if begun.doing == Doing.TASK:
        return task
    whom = f"rank {begun.peer}" if begun.peer >= 0 else ""
    what = " of ".join(filter(None, (task, whom)))
    return f"{begun.doing}, for {what}" if what else begun.doing


def _asked(description: Mapping[str, Any]) -> range:
    """The steps that a training run should make, from `_first_step`. Empty for imported and
    simulated runs, and if the number is unknown."""
    settings = description.get("settings")
    steps = settings.get("steps") if isinstance(settings, dict) else None
    if not isinstance(steps, int) or {"imported", "simulated"} & description.keys():
        return range(0)
    return range(_first_step(description), steps)


def _first_step(description: Mapping[str, Any]) -> int:
    """The first step that a trace should hold: of a session its own, of a joined trace 0."""
    return 0 if description.get(SESSIONS) else first_step_of(description)


def _sessions_of(run: RunDir) -> list[RunDir]:
    """The run's sessions; empty if its directory cannot be read."""
    with suppress(OSError):
        return run.sessions()
    return []


def _steps_in(metrics: Path) -> Iterator[int]:
    """Yield the steps in metrics.jsonl; none if it cannot be read. Lines that are not valid JSON or
    have no integer `step` are skipped."""
    with suppress(OSError), open_regular(metrics) as file:
        for line in lines_of(file, metrics):
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                step = json.loads(line)["step"]
                if isinstance(step, int):
                    yield step


def _spans(steps: list[int]) -> str:
    """Format a non-empty sorted list of steps: `step 3`, `steps 3, 5 to 9`; `...` after three
    ranges."""
    starts = [steps[0], *(b for a, b in pairwise(steps) if b != a + 1)]
    ends = [*(a for a, b in pairwise(steps) if b != a + 1), steps[-1]]
    spans = [f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True)]
    more = ["..."] if len(spans) > _NUM_SPANS else []
    return f"{'step' if len(steps) == 1 else 'steps'} {', '.join(spans[:_NUM_SPANS] + more)}"


# The cost of recording.


def recording_fraction(recording: Recording) -> float | None:
    """The time spent recording divided by the time of the steps, on the rank where that is largest.
    None if no rank has both finished a step and recorded its cost."""
    fractions = [
        records.costs[-1].cost_ns / steps_ns
        for records in recording.ranks
        if records.costs and (steps_ns := _steps_ns(records))
    ]
    return max(fractions, default=None)


def _steps_ns(records: RankRecords) -> int:
    """The total duration of a rank's `SCHEDULE` phases in ns."""
    return sum(
        phase.end_ns - phase.start_ns for phase in records.phases if phase.phase == Phase.SCHEDULE
    )


def check_contents(contents: TraceContents, promise: Promise | None = None) -> list[str]:
    """Check a trace. Returns its problems, one sentence each; empty if it is complete. `promise`
    has the steps that it should contain; None means those in its own description."""
    recording = contents.recording
    torn = _torn_steps(recording)
    ranks = {records.info.rank for records in recording.ranks}
    problems = [
        *_check_file(contents),
        *_check_ranks(recording, ranks),
        *_check_losses(recording),
        *_check_outcome(recording.settings),
        *_check_promise(recording, promise or Promise.of_description(recording.settings)),
        *_check_off(recording.settings),
        *_check_torn(recording, torn),
        *_check_begun(recording),
        *_check_messages(recording, ranks, torn, contents.flow_lengths),
    ]
    for records in recording.ranks:
        problems += _check_times(records)
        problems += _check_tasks(records, torn)
        problems += _check_bytes(records, torn)
    return problems


# Checks of one aspect each, which yield their findings.


def _check_file(contents: TraceContents) -> Iterator[str]:
    """Yield findings about the events of a file: fewer or more than its closing mark states, no
    closing mark, slices without an end, and ends without a beginning."""
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
    """Yield findings about ranks of the run that left no records, and ranks that are in the trace
    more than once."""
    missing = sorted(expected_ranks(recording.settings) - ranks)
    if missing:
        yield finding("missing: {} of the run left no records", "ranks", missing)
    counts = Counter(records.info.rank for records in recording.ranks)
    twice = [rank for rank, count in counts.items() if count > 1]
    if twice:
        yield finding("unmatched: {} in the trace more than once", "ranks", twice)


def _torn_steps(recording: Recording) -> dict[int, list[int]]:
    """The steps that any rank began and that not all ranks finished and fully recorded, in order of
    time, each with all ranks that did not, also those that never began it. A finished step has a
    `SCHEDULE` phase and no loss."""
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
    """The steps with any task or closing phase, ordered by time, which step numbers do not
    follow."""
    begins_ns: dict[int, int] = {}
    for records in recording.ranks:
        finished = (phase for phase in records.phases if phase.phase == Phase.SCHEDULE)
        for record in chain[TaskRecord | PhaseRecord](records.tasks, finished):
            begin_ns = begins_ns.get(record.step, record.start_ns)
            begins_ns[record.step] = min(begin_ns, record.start_ns)
    return sorted(begins_ns, key=lambda step: (begins_ns[step], is_evaluation(step), abs(step)))


def _check_losses(recording: Recording) -> Iterator[str]:
    """Yield a finding for each rank that had no room for some records, with their number by
    step."""
    for records in recording.ranks:
        if records.losses:
            num_lost = sum(loss.num_lost for loss in records.losses)
            parts = [f"{loss.num_lost} in {step_name(loss.step)}" for loss in records.losses]
            count = finding("{}", "records", parts, num_lost)
            yield f"lost: {count} that rank {records.info.rank} had no room for"


def _check_torn(recording: Recording, torn: dict[int, list[int]]) -> Iterator[str]:
    """Yield findings about the steps that some ranks did not finish (`torn`): ranks that lack two
    or more of the run's last steps, the step in which the run ended, and others that lost their
    end. Recorded losses, and the last steps of ranks that switched recording off, are left to other
    findings."""
    begun = _begun_steps(recording)
    run_end = step_name(begun[-1]) if begun else ""
    known = {
        (loss.step, records.info.rank) for records in recording.ranks for loss in records.losses
    }
    off = _ranks_off(recording.settings)
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
        who = finding("{}", "ranks", ranks)
        yield f"incomplete: the records of {who} end with {last}, others' with {run_end}"
    for step, torn_ranks in torn.items():
        ranks = [rank for rank in torn_ranks if (step, rank) not in known]
        if not ranks:
            continue
        who = finding("{}", "ranks", ranks)
        if step == begun[-1]:
            yield f"incomplete: the run ended in {step_name(step)}, which {who} did not finish"
        else:
            yield f"lost: the end of {step_name(step)} on {who}"


def _end_without(rank: int, begun: list[int], torn: dict[int, list[int]]) -> list[int]:
    """The run's last consecutive steps that a rank did not finish, the last one first."""
    return list(takewhile(lambda step: rank in torn.get(step, ()), reversed(begun)))


def _check_messages(
    recording: Recording, ranks: set[int], torn: Iterable[int], flow_lengths: Counter[int]
) -> Iterator[str]:
    """Yield findings about messages without a send, a receive, a consuming task or an arrow, and
    about ones received before their send (beyond the clocks' errors) or taken by a task before they
    arrived. Skips unfinished steps and absent ranks. Then checks the links' sequence numbers and
    the tasks' inputs."""
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
        name = (
            f"{record.kind}{record.microbatch} of {step_name(record.step)}, "
            f"rank {key.source} to {key.destination}"
        )
        if receive is None:
            unreceived.append(name)
            continue
        if send is None:
            unsent.append(name)
        elif receive.start_ns - send.start_ns < -(
            clock_errors_ns[key.source] + clock_errors_ns[key.destination]
        ):
            early.append(f"{name}: {receive.start_ns - send.start_ns} ns")
        task = tasks.get((key.destination, key_of(receive)))
        if task is None:
            unconsumed.append(name)
        elif task.start_ns < receive.end_ns:
            too_soon.append(f"{name}: {task.start_ns - receive.end_ns} ns")
        if send and task and flow_lengths[key.flow_id] != 3:
            arrows.append(name)
    for pattern, lines in (
        ("lost: {} sent and never received", unreceived),
        ("lost: {} received and never sent", unsent),
        ("unmatched: {} received and taken by no task", unconsumed),
        ("negative latency: {} received before they were sent", early),
        ("negative latency: {} taken by a task before they arrived", too_soon),
        ("unmatched: {} without an arrow from send to receive to task", arrows),
    ):
        if lines:
            yield finding(pattern, "messages", lines)
    have_lost = {records.info.rank for records in recording.ranks if records.losses}
    yield from _check_gaps(
        (key for key in sends if key.source not in have_lost), begins_late=_begins_late(recording)
    )
    yield from _check_inputs(recording, receives, skipped)


def _check_gaps(sends: Iterable[MessageKey], *, begins_late: bool) -> Iterator[str]:
    """Yield a finding for each link whose sequence numbers have gaps, or do not start at 0 although
    the recording does not begin late."""
    links: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for source, destination, sequence in sends:
        links[source, destination].add(sequence)
    for (source, destination), found in sorted(links.items()):
        first = min(found) if begins_late else 0
        num_missing = max(found) + 1 - first - len(found)
        if num_missing > 0:
            # A damaged sequence number may be huge, so look only for the first few missing ones.
            missing = (f"number {number}" for number in count(first) if number not in found)
            examples = list(islice(missing, min(num_missing, NUM_EXAMPLES + 1)))
            lost = finding("lost: {}", "messages", examples, num_missing)
            yield f"{lost} of the link from rank {source} to {destination}"


def _begins_late(recording: Recording) -> bool:
    """True if the first steps were not recorded (the run's setting `recorded_steps`), or their
    records were removed."""
    if FIRST_KEPT_STEP in recording.settings:
        return True
    settings = recording.settings.get("settings")
    steps = settings.get("recorded_steps") if isinstance(settings, dict) else None
    return isinstance(steps, str) and not steps.startswith((":", "0:"))


def _check_inputs(
    recording: Recording, receives: dict[MessageKey, ReceiveRecord], skipped: set[int]
) -> Iterator[str]:
    """Yield a finding about tasks without a received message, if another task of the same kind and
    stage on that rank received one. Tasks of `skipped` steps are not checked."""
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
    """Yield a finding if any of a rank's records ends before it begins."""
    backward = [
        f"{name} at {record.start_ns} ns"
        for name, found in records.by_name().items()
        for record in found
        if hasattr(record, "end_ns") and record.end_ns < record.start_ns
    ]
    if backward:
        yield finding("negative duration: {}", "events", backward) + f" on rank {records.info.rank}"


def _check_tasks(records: RankRecords, torn: Iterable[int]) -> Iterator[str]:
    """Yield findings about a rank's tasks that overlap, that ran more than once, and that are
    missing in steps other than those in `torn`."""
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
    """Yield findings about tasks whose activation bytes do not add up, or exceed the step's budget.
    Skips the steps in `torn`, and a rank whose sizes are unknown."""
    skipped = set(torn)
    tasks = [task for task in records.tasks if task.step not in skipped]
    if not are_sizes_known(tasks):
        return
    rank = records.info.rank
    wrong = [_name(task) for task in tasks_with_wrong_bytes(tasks)]
    if wrong:
        found = finding("impossible: {} with bytes held that do not add up", "tasks", wrong)
        yield f"{found} on rank {rank}"
    budgets = {p.step: p.budget_bytes for p in records.phases if p.phase == Phase.SCHEDULE}
    over = [
        f"{_name(task)}: {task.held_bytes} of {budget} bytes"
        for task in tasks
        if task.held_bytes > (budget := budgets.get(task.step, 0)) > 0
    ]
    if over:
        yield finding("impossible: {} passed the bound", "tasks", over) + f" on rank {rank}"


def _missing_tasks(found: Iterable[TaskKey], skipped: set[int]) -> list[TaskKey]:
    """The tasks that are missing in steps other than the skipped ones: each kind that a stage ran
    must have run for every microbatch of which any task was found in the step."""
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
    """Format a task: `F3 of step 2, stage 1`."""
    return f"{task.kind}{task.microbatch} of {step_name(task.step)}, stage {task.stage}"
