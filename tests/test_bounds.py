"""What withholds tasks that are here: the limit on D with its drain mode, and the hold."""

from fractions import Fraction

import pytest

from rrfp.errors import UsageError
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.named_hints import HINTS, hint_named
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.shape import FORWARD_ONLY, SPLIT_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import ComputeIdle, RunTask
from tests.decisions import arrive, ask, run_on, task, turns

LOOP = Shape(2, 4, num_chunks=2)  # rank 0 holds stages 0 and 2, rank 1 stages 1 and 3
V = Shape(2, 4, num_chunks=2, placement=Placement.V)  # rank 0 holds 0 and 3, rank 1 holds 1 and 2


# The limit, one chunk a rank.


def test_at_the_limit_only_backwards_run_and_a_forward_here_is_withheld() -> None:
    dispatcher = turns("f-first", Shape(3, 4), 1, limit=2)
    arrive(dispatcher, "1F0 1F1")
    assert run_on(dispatcher) == "1F0 1F1"
    arrive(dispatcher, "1F2")
    assert ask(dispatcher) == "limit"
    arrive(dispatcher, "1B1")
    assert run_on(dispatcher) == "1B1 1F2"


def test_at_the_limit_without_a_forward_here_the_cause_is_the_missing_input() -> None:
    dispatcher = turns("bf", Shape(3, 4), 1, limit=1)
    arrive(dispatcher, "1F0")
    assert ask(dispatcher) == "1F0"
    assert ask(dispatcher) == "forward_input"
    arrive(dispatcher, "1F1")
    assert ask(dispatcher) == "limit"


def test_withheld_forwards_are_not_counted_as_ready() -> None:
    dispatcher = turns("bf", Shape(3, 4), 1, limit=1)
    arrive(dispatcher, "1F0 1F1 1F2 1B0")
    ask(dispatcher)
    (run,) = dispatcher.handle(0, ComputeIdle())
    assert run == RunTask(
        task=task("1B0"),
        chunk=0,
        hint_position=3,
        ready=1,
        skipped=2,
        depth=0,
        held=0,
        ready_forwards=0,
        ready_backwards=1,
    )


def test_a_forward_only_step_has_no_limit() -> None:
    dispatcher = turns("bf", Shape(2, 3, kinds=FORWARD_ONLY), 0, limit=1)
    assert run_on(dispatcher) == "0F0 0F1 0F2"
    assert ask(dispatcher) == "done"


# The limit with chunks: microbatches are finished one by one, in index order.


def test_at_the_limit_chunks_finish_the_smallest_microbatch_and_nothing_else() -> None:
    dispatcher = turns("bf", LOOP, 0, limit=2)
    arrive(dispatcher, "2F1 2F2")
    assert ask(dispatcher) == "0F0"
    assert ask(dispatcher) == "0F1"
    assert ask(dispatcher) == "limit"  # 2F0 is next, and 2F1 is here
    arrive(dispatcher, "2F0 2B1")
    assert ask(dispatcher) == "2F0"
    assert ask(dispatcher) == "limit"
    arrive(dispatcher, "2B0")
    assert ask(dispatcher) == "2B0"
    assert ask(dispatcher) == "limit"
    arrive(dispatcher, "0B0")
    assert ask(dispatcher) == "0B0"  # D is 1: the hint ranks again
    assert ask(dispatcher) == "0F2"


def test_the_microbatch_after_the_smallest_takes_its_turn_when_that_one_is_finished() -> None:
    dispatcher = turns("f-first", Shape(1, 3, num_chunks=2), 0, limit=1)
    assert run_on(dispatcher) == "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1 0F2 1F2 1B2 0B2"
    assert ask(dispatcher) == "done"


def test_d_passes_the_limit_by_at_most_the_number_of_chunks() -> None:
    dispatcher = turns("f-first", V, 0, limit=3)
    arrive(dispatcher, "3F0 3F1 3F2")
    runs = [dispatcher.handle(0, ComputeIdle())[-1] for _ in range(4)]
    assert [(str(run.task), run.depth) for run in runs if isinstance(run, RunTask)] == [
        ("0F0", 1),
        ("0F1", 2),
        ("0F2", 3),
        ("3F0", 4),
    ]
    assert ask(dispatcher) == "3B0"
    assert ask(dispatcher) == "limit"


def test_weight_gradients_run_while_a_rank_waits_for_its_smallest_microbatch() -> None:
    shape = Shape(2, 4, num_chunks=2, kinds=SPLIT_BACKWARD)
    dispatcher = turns("bfw", shape, 0, limit=3)
    arrive(dispatcher, "2F0")
    assert [ask(dispatcher) for _ in range(4)] == ["0F0", "0F1", "0F2", "2F0"]
    arrive(dispatcher, "2F1 2B0")
    assert run_on(dispatcher) == "2B0 2W0"
    assert ask(dispatcher) == "limit"
    arrive(dispatcher, "0B0")
    assert run_on(dispatcher) == "0B0 0F3 2F1 0W0"


def test_what_is_counted_ready_while_a_rank_drains_is_what_may_run() -> None:
    dispatcher = turns("bf", LOOP, 0, limit=1)
    ask(dispatcher)
    arrive(dispatcher, "2F0 2F1")
    (run,) = dispatcher.handle(0, ComputeIdle())
    assert isinstance(run, RunTask)
    assert (str(run.task), run.ready, run.ready_forwards) == ("2F0", 1, 1)


# The hold: a forward of chunk c may start while fewer than hold - (C - 1 - c) slots are in use.


def test_a_hold_bounds_the_slots_in_use() -> None:
    dispatcher = turns("f-first", Shape(3, 4), 1, hold=2)
    arrive(dispatcher, "1F0 1F1 1F2")
    assert run_on(dispatcher) == "1F0 1F1"
    assert ask(dispatcher) == "hold"
    arrive(dispatcher, "1B1")
    assert run_on(dispatcher) == "1B1 1F2"


def test_a_hold_keeps_slots_for_the_deeper_chunks() -> None:
    dispatcher = turns("bf", LOOP, 0, hold=3)
    assert run_on(dispatcher) == "0F0 0F1"  # the third slot is for stage 2
    assert ask(dispatcher) == "hold"
    arrive(dispatcher, "2F1")
    assert ask(dispatcher) == "2F1"
    assert ask(dispatcher) == "hold"
    arrive(dispatcher, "2B1")
    assert ask(dispatcher) == "2B1"
    assert ask(dispatcher) == "hold"
    arrive(dispatcher, "0B1")
    assert run_on(dispatcher) == "0B1 0F2"


def test_a_hold_of_a_slot_a_chunk_carries_one_microbatch_at_a_time() -> None:
    dispatcher = turns("f-first", Shape(1, 2, num_chunks=3), 0, hold=3)
    assert run_on(dispatcher) == "0F0 1F0 2F0 2B0 1B0 0B0 0F1 1F1 2F1 2B1 1B1 0B1"


def test_a_slot_is_in_use_until_the_weight_gradient_where_it_is_split_off() -> None:
    dispatcher = turns("bfw", Shape(3, 4, kinds=SPLIT_BACKWARD), 1, hold=1)
    arrive(dispatcher, "1F0 1F1 1B0")
    assert run_on(dispatcher) == "1F0 1B0 1W0 1F1"


def test_forwards_that_the_hold_withholds_are_not_counted_as_ready() -> None:
    dispatcher = turns("bf", LOOP, 0, hold=2)
    ask(dispatcher)
    arrive(dispatcher, "2F0")
    (run,) = dispatcher.handle(0, ComputeIdle())
    assert isinstance(run, RunTask)
    assert (str(run.task), run.ready, run.held) == ("2F0", 1, 2)


def test_at_the_hold_without_a_forward_here_the_cause_is_the_missing_input() -> None:
    dispatcher = turns("bf", Shape(3, 4), 1, hold=1)
    arrive(dispatcher, "1F0")
    assert ask(dispatcher) == "1F0"
    assert ask(dispatcher) == "forward_input"


def test_fixed_dispatch_ignores_both_bounds() -> None:
    shape = Shape(1, 3)
    gpipe = hint_named("gpipe").on(shape)
    limited = Dispatcher(shape, 0, Policy(gpipe, dispatch=Dispatch.FIXED, limit=1))
    held = Dispatcher(shape, 0, Policy(gpipe, dispatch=Dispatch.FIXED, hold=1))
    assert run_on(limited) == run_on(held) == "0F0 0F1 0F2 0B0 0B1 0B2"


def test_a_forward_only_step_has_no_hold() -> None:
    dispatcher = turns("bf", Shape(2, 3, kinds=FORWARD_ONLY), 0, hold=1)
    assert run_on(dispatcher) == "0F0 0F1 0F2"


# Bounds that cannot be.


@pytest.mark.parametrize("limit", [0, -3])
def test_a_limit_below_1_is_refused(limit: int) -> None:
    with pytest.raises(
        UsageError, match=f"the limit is {limit}; it must be a whole number, at least 1"
    ):
        turns("bf", Shape(2, 2), 0, limit=limit)


@pytest.mark.parametrize(("hold", "num_chunks"), [(0, 1), (1, 2), (3, 4)])
def test_a_hold_below_one_slot_a_chunk_is_refused(hold: int, num_chunks: int) -> None:
    with pytest.raises(UsageError, match=r"the hold is .*; it must be a whole number, at least 1"):
        Dispatcher(Shape(2, 2, num_chunks), 0, Policy(HINTS["bf"], hold=Fraction(hold, num_chunks)))


def test_a_limit_and_a_hold_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        turns("bf", Shape(2, 2), 0, limit=2, hold=2)
