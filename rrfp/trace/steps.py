"""Steps of a run: how they are numbered and named, and when each one ran.

In every record, training steps are numbered 0, 1, 2, ... Evaluations, which run forwards only, have
negative numbers: -1 is evaluation 0, -2 is evaluation 1, ... So step numbers do not rise with time.
Earlier versions numbered evaluations among the training steps.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from rrfp.errors import numbered
from rrfp.trace.records import Phase, Recording

Window = tuple[int, int]
"""Start and end, in nanoseconds of the trace."""

STEP, EVALUATION = "step", "evaluation"
"""The two sorts of step."""


def evaluation_step(number: int) -> int:
    """The step number of a run's evaluation `number`, counted from 0."""
    return -1 - number


def is_evaluation(step: int) -> bool:
    return step < 0


def told_step(step: int) -> tuple[str, int]:
    """The sort of a step, and its number within that sort: `("evaluation", 0)`."""
    return (EVALUATION, -1 - step) if step < 0 else (STEP, step)


def step_name(step: int) -> str:
    """`step 3`, `evaluation 0`."""
    sort, number = told_step(step)
    return f"{sort} {number}"


def step_names(steps: Iterable[int]) -> str:
    """`steps 3, 4`, `evaluation 0`, or both, each in order."""
    numbers: dict[str, list[int]] = {STEP: [], EVALUATION: []}
    for sort, number in map(told_step, in_order(steps)):
        numbers[sort].append(number)
    return " and ".join(numbered(sort, found) for sort, found in numbers.items() if found)


def count_of(steps: Collection[int]) -> str:
    """`1 step`, `3 evaluations`, or both."""
    num_evaluations = sum(map(is_evaluation, steps))
    counts = {STEP: len(steps) - num_evaluations, EVALUATION: num_evaluations}
    told = [counted(number, sort) for sort, number in counts.items() if number]
    return " and ".join(told) or counted(0, STEP)


def counted(number: int, sort: str) -> str:
    """`1 step`, `3 evaluations`."""
    return f"{number} {sort}{'' if number == 1 else 's'}"


def in_order(steps: Iterable[int]) -> list[int]:
    """Training steps in their order, then evaluations in theirs."""
    return sorted(steps, key=lambda step: (is_evaluation(step), abs(step)))


def spread_evenly(steps: Sequence[int], most: int) -> list[int]:
    """At most `most` of a run's steps, spread evenly over them.

    Each comes from the middle of its share of the run, because the first step warms up caches.
    """
    num = min(len(steps), most)
    return [steps[(2 * part + 1) * len(steps) // (2 * num)] for part in range(num)]


def step_windows(recording: Recording) -> dict[int, Window]:
    """By step: the window of each step that every rank finished."""
    return windows_of(
        (
            (records.info.rank, phase.step, phase.start_ns, phase.end_ns)
            for records in recording.ranks
            for phase in records.phases
            if phase.phase == Phase.SCHEDULE
        ),
        len(recording.ranks),
    )


def windows_of(schedules: Iterable[tuple[int, int, int, int]], num_ranks: int) -> dict[int, Window]:
    """By step: the window of each step that all `num_ranks` ranks finished.

    `schedules` are the run's `SCHEDULE` phases: rank, step, start and end in ns. A window extends
    from the first rank's entry into the schedule to the last one's return from it.
    """
    windows: dict[int, Window] = {}
    finished: defaultdict[int, set[int]] = defaultdict(set)
    for rank, step, start_ns, end_ns in schedules:
        finished[step].add(rank)
        first_ns, last_ns = windows.get(step, (start_ns, end_ns))
        windows[step] = min(first_ns, start_ns), max(last_ns, end_ns)
    return {step: windows[step] for step in sorted(windows) if len(finished[step]) == num_ranks}
