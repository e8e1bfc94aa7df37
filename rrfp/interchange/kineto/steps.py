"""Which step each range of a run's profiles belongs to, where the ranges do not tell."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rrfp.interchange.kineto.rank import ProfiledRank
from rrfp.interchange.ranges import (
    Maker,
    Range,
    ScheduleRange,
    TaskRange,
    WaitRange,
    parse_profiler_step,
)
from rrfp.schedule.tasks import Kind


def number_steps(ranks: list[ProfiledRank]) -> Iterator[str]:
    """Give a step to each range that does not tell its own, and yield notes on it.

    It is the profiler's step if each of these has every task at most once; else steps are counted.
    """
    if ranks[0].maker is Maker.RRFP:
        return
    chosen = [_steps_of_profiler(rank) for rank in ranks]
    if any(steps is None for steps in chosen):
        counted = [_counted_steps(rank) for rank in ranks]
        torn = [rank for rank, each in zip(ranks, counted, strict=True) if each.is_torn]
        if torn:
            yield (
                f"{len(torn)} of {len(ranks)} profiles begin in the middle of a step, which is "
                f"left out there ({torn[0].path}{', ...' if torn[1:] else ''})"
            )
            _align(counted)
        chosen = [each.steps for each in counted]
    for rank, steps in zip(ranks, chosen, strict=True):
        assert steps is not None
        for found, step in zip(rank.found, steps, strict=True):
            tells = found.tells
            if not isinstance(tells, ScheduleRange) and tells.step is None:
                found.tells = replace(tells, step=step)


def _steps_of_profiler(rank: ProfiledRank) -> Sequence[int | None] | None:
    steps = []
    seen: set[tuple[int, Range]] = set()
    index = -1
    for found in rank.found:
        while index + 1 < len(rank.steps) and rank.steps[index + 1].start_ns <= found.launched_ns:
            index += 1
        if index < 0 or found.launched_ns >= rank.steps[index].end_ns:
            return None
        step = parse_profiler_step(rank.steps[index].name)
        assert step is not None
        if isinstance(found.tells, TaskRange):
            if (step, found.tells) in seen:
                return None
            seen.add((step, found.tells))
        steps.append(step)
    return steps


@dataclass(slots=True)
class _Counted:
    """The steps of a rank's ranges, counted from the first whole one."""

    steps: list[int | None]
    """By range; None before the first whole step."""
    begins_ns: list[int]
    """When each step began."""
    is_torn: bool
    """Whether tasks come before the first whole step."""


def _counted_steps(rank: ProfiledRank) -> _Counted:
    """A step begins with the first forward of the rank's first stage, as in every order, or when a
    task comes again."""
    first = min(
        ((task.stage or 0, task.microbatch) for _, task in rank.tasks if task.kind is Kind.F),
        default=None,
    )
    seen: set[Range] = set()
    counted = _Counted([], [], is_torn=False)
    for found in rank.found:
        task = found.tells
        if isinstance(task, TaskRange):
            is_first = task.kind is Kind.F and (task.stage, task.microbatch) == first
            if is_first or (counted.begins_ns and task in seen):
                seen.clear()
                counted.begins_ns.append(found.launched_ns)
            seen.add(task)
            counted.is_torn |= not counted.begins_ns
        counted.steps.append(len(counted.begins_ns) - 1 if counted.begins_ns else None)
    # A receive belongs to the next task.
    step = counted.steps[-1]
    for index, found in reversed(list(enumerate(rank.found))):
        if isinstance(found.tells, TaskRange):
            step = counted.steps[index]
        elif isinstance(found.tells, WaitRange) and found.tells.is_receive:
            counted.steps[index] = step
    return counted


def _align(ranks: list[_Counted]) -> None:
    """Count on all ranks from the earliest rank's first whole step, which others may have torn. A
    step begins on all ranks within half its length, as filling the pipeline takes no longer."""
    reference_ns = min((rank.begins_ns for rank in ranks if rank.begins_ns), default=[])
    for rank in ranks:
        if rank.begins_ns:
            skipped = _nearest(reference_ns, rank.begins_ns[0])
            rank.steps = [None if step is None else step + skipped for step in rank.steps]


def _nearest(times_ns: list[int], time_ns: int) -> int:
    """The index of the nearest time."""
    return min(range(len(times_ns)), key=lambda place: abs(times_ns[place] - time_ns))
