"""Compares the order in which a rank ran its tasks with the order that its hint wanted."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rrfp.trace.records import TaskRecord

MAX_SKIPPED_NAMED = 8
"""How many of the tasks that a dispatch skipped are named; the rest are only counted."""


@dataclass(frozen=True, slots=True)
class HintedDispatch:
    """One dispatch, number k of its step on the rank, compared with the hint."""

    wanted: TaskRecord
    """Task number k of the step in the hint's order."""
    wanted_place: int
    """When that task was dispatched, counting from 0: k where the hint was followed."""
    skipped: tuple[TaskRecord, ...]
    """The unfinished tasks that the hint ranks above the one dispatched, best first; at most
    `MAX_SKIPPED_NAMED` + 1 of them."""


def beside_hint(tasks: Sequence[TaskRecord]) -> list[HintedDispatch | None]:
    """By task, its dispatch; None where the hint's order for the step is unknown.

    `tasks` are one rank's, in the order of their dispatch. In a step that was cut short, only the
    tasks that ran are compared.
    """
    dispatches: list[HintedDispatch | None] = [None] * len(tasks)
    steps: defaultdict[int, list[int]] = defaultdict(list)
    for index, task in enumerate(tasks):
        steps[task.step].append(index)
    for indices in steps.values():
        if all(tasks[index].hint_position >= 0 for index in indices):
            _compare_step(tasks, indices, dispatches)
    return dispatches


def _compare_step(
    tasks: Sequence[TaskRecord], indices: Sequence[int], dispatches: list[HintedDispatch | None]
) -> None:
    # Sort by hint position; the place of dispatch breaks ties, which a sound trace does not have.
    ranks = [(tasks[index].hint_position, place) for place, index in enumerate(indices)]
    hinted = sorted(ranks)
    unfinished = hinted.copy()
    for place, index in enumerate(indices):
        num_above = bisect_left(unfinished, ranks[place])
        named = unfinished[: min(num_above, MAX_SKIPPED_NAMED + 1)]
        del unfinished[num_above]
        _, wanted_place = hinted[place]
        dispatches[index] = HintedDispatch(
            tasks[indices[wanted_place]],
            wanted_place,
            tuple(tasks[indices[above]] for _, above in named),
        )
