"""What the hint wanted in the place of each dispatch, and what each dispatch skipped."""

import random
from collections.abc import Sequence

from hypothesis import given

from rrfp.trace.perfetto.format import MAX_SKIPPED_NAMED, HintedDispatch, beside_hint
from rrfp.trace.records import TaskRecord
from tests.cases import Case, cases
from tests.effort import examples
from tests.simulated import simulated_case
from tests.step_times import random_times


def _tasks(*positions: int, step: int = 0) -> list[TaskRecord]:
    """Tasks whose microbatch is their place in the hint, dispatched in this order."""
    return [
        TaskRecord(10 * place, 10 * place + 9, step, "F", 0, 0, position, position, *[0] * 6)
        for place, position in enumerate(positions)
    ]


def _known(tasks: Sequence[TaskRecord]) -> list[HintedDispatch]:
    return [dispatch for dispatch in beside_hint(tasks) if dispatch is not None]


def test_what_was_wanted_stands_beside_what_ran() -> None:
    dispatches = _known(_tasks(2, 0, 3, 1))
    assert [each.wanted.microbatch for each in dispatches] == [0, 1, 2, 3]
    assert [each.wanted_place for each in dispatches] == [1, 3, 0, 2]
    assert [[task.microbatch for task in each.skipped] for each in dispatches] == [
        [0, 1],
        [],
        [1],
        [],
    ]


def test_steps_are_apart_and_one_that_was_cut_short_is_compared_as_far_as_it_ran() -> None:
    dispatches = _known([*_tasks(1, 0), *_tasks(7, 3, step=1)])
    assert [each.wanted.hint_position for each in dispatches] == [0, 1, 3, 7]
    assert [len(each.skipped) for each in dispatches] == [1, 0, 1, 0]


def test_a_step_whose_hint_is_not_known_is_passed_over() -> None:
    assert beside_hint([*_tasks(-1, -1), *_tasks(0, step=1)])[:2] == [None, None]
    assert len(_known([*_tasks(-1, -1), *_tasks(0, step=1)])) == 1


def test_no_more_are_named_than_tell_that_there_are_more() -> None:
    first, *_ = _known(_tasks(20, *range(20)))
    assert [task.microbatch for task in first.skipped] == list(range(MAX_SKIPPED_NAMED + 1))


@examples(quick=20, thorough=300)
@given(cases())
def test_those_named_are_as_many_as_the_dispatcher_counted(case: Case) -> None:
    recording = simulated_case(case, random_times(random.Random(case.seed), case.shape))
    for records in recording.ranks:
        dispatches = _known(records.tasks)
        assert len(dispatches) == len(records.tasks)
        for task, dispatch in zip(records.tasks, dispatches, strict=True):
            assert len(dispatch.skipped) == min(task.skipped, MAX_SKIPPED_NAMED + 1)
        wanted = [each.wanted.hint_position for each in dispatches]
        assert wanted == sorted(task.hint_position for task in records.tasks)
