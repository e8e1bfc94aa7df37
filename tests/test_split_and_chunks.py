"""Weight gradients that are split off, and ranks that hold several chunks."""

import pytest

from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.hints import WeightGradients
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.shape import FORWARD_ONLY, SPLIT_BACKWARD, WHOLE_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import ComputeIdle, Kind, RunTask
from tests.decisions import an_order, arrive, ask, run_on, turns

# Split backwards.


def test_a_weight_gradient_runs_only_when_neither_direction_is_ready() -> None:
    shape = Shape(3, 4, kinds=SPLIT_BACKWARD)
    dispatcher = turns("bfw", shape, 1)
    arrive(dispatcher, "1F0 1F1 1F2")
    ask(dispatcher)
    arrive(dispatcher, "1B0")
    assert run_on(dispatcher) == "1B0 1F1 1F2 1W0"


def test_after_a_weight_gradient_a_new_round_starts() -> None:
    dispatcher = turns("bfw", Shape(3, 4, kinds=SPLIT_BACKWARD), 1)
    arrive(dispatcher, "1F0 1F1 1B0 1B1")
    assert run_on(dispatcher) == "1F0 1B0 1F1 1B1 1W0 1W1"
    arrive(dispatcher, "1F2 1B2")
    ask(dispatcher)
    assert ask(dispatcher) == "1B2"
    assert ask(dispatcher) == "1W2"
    arrive(dispatcher, "1F3")
    assert ask(dispatcher) == "1F3"


def test_activations_are_held_until_the_weight_gradient_where_it_is_split_off() -> None:
    def held(kinds: tuple[Kind, ...]) -> list[int]:
        name = "bfw" if kinds == SPLIT_BACKWARD else "bf"
        dispatcher = turns(name, Shape(1, 2, kinds=kinds), 0)
        runs = [dispatcher.handle(0, ComputeIdle())[-1] for _ in range(2 * len(kinds))]
        return [run.held for run in runs if isinstance(run, RunTask)]

    assert held(WHOLE_BACKWARD) == [1, 0, 1, 0]
    assert held(SPLIT_BACKWARD) == [1, 1, 2, 2, 1, 0]
    assert held(FORWARD_ONLY) == [0, 0]


def test_an_order_as_a_hint_keeps_weight_gradients_for_idle_time() -> None:
    shape = Shape(1, 2, kinds=SPLIT_BACKWARD)
    order = an_order(shape, "0F0 0B0 0W0 0F1 0B1 0W1")
    assert run_on(Dispatcher(shape, 0, Policy(order))) == "0F0 0B0 0F1 0B1 0W0 0W1"
    fixed = Dispatcher(shape, 0, Policy(order, dispatch=Dispatch.FIXED))
    assert run_on(fixed) == "0F0 0B0 0W0 0F1 0B1 0W1"
    assert ask(fixed) == "done"


def test_an_order_ranks_weight_gradients_by_place_when_told_to() -> None:
    shape = Shape(2, 2, kinds=SPLIT_BACKWARD)
    order = an_order(shape, "0F0 0F1 0B0 0W0 0B1 0W1", "1F0 1B0 1W0 1F1 1B1 1W1")
    first = Dispatcher(shape, 0, Policy(order, w=WeightGradients.RANKED))
    assert run_on(first) == "0F0 0F1"
    arrive(first, "0B1")
    assert ask(first) == "0B1"
    arrive(first, "0B0")
    assert run_on(first) == "0B0 0W0 0W1"
    last = Dispatcher(shape, 1, Policy(order, w=WeightGradients.RANKED))
    arrive(last, "1F0 1F1")
    assert run_on(last) == "1F0 1B0 1W0 1F1 1B1 1W1"


@pytest.mark.parametrize(("limit", "hold"), [(1, None), (None, 2)])
def test_weight_gradients_run_when_a_bound_withholds_the_forwards(
    limit: int | None, hold: int | None
) -> None:
    shape = Shape(2, 3, kinds=SPLIT_BACKWARD)
    dispatcher = turns("bfw", shape, 1, limit=limit, hold=hold)
    arrive(dispatcher, "1F0")
    assert run_on(dispatcher) == "1F0 1B0 1W0"
    first = turns("bfw", shape, 0, limit=limit, hold=hold)
    assert run_on(first).split() == ["0F0", "0F1"][: limit or hold]
    arrive(first, "0B0")
    assert run_on(first).startswith("0B0 0F1" if limit else "0B0 0W0 0F2")


# Chunks.


def test_forwards_prefer_the_smallest_chunk_and_backwards_the_largest() -> None:
    shape = Shape(2, 2, num_chunks=2)  # rank 0 holds stages 0 and 2
    dispatcher = turns("bf", shape, 0)
    arrive(dispatcher, "2F0")
    assert run_on(dispatcher) == "0F0 0F1 2F0"
    arrive(dispatcher, "2F1 0B0 2B0")
    assert run_on(dispatcher) == "2B0 2F1 0B0"


def test_the_deep_hints_prefer_the_deepest_chunk_in_both_directions() -> None:
    shape = Shape(2, 3, num_chunks=2)
    dispatcher = turns("bf-deep", shape, 0)  # stages 0 and 2
    assert ask(dispatcher) == "0F0"
    arrive(dispatcher, "2F0")
    assert ask(dispatcher) == "2F0"
    assert ask(dispatcher) == "0F1"
    arrive(dispatcher, "2F1 2B0")
    assert [ask(dispatcher) for _ in range(2)] == ["2B0", "2F1"]
    arrive(dispatcher, "0B0 2B1")
    assert run_on(dispatcher) == "2B1 0F2 0B0"


def test_a_deep_hint_in_a_v_takes_a_microbatch_to_its_end_first() -> None:
    shape = Shape(2, 3, num_chunks=2, placement=Placement.V)
    dispatcher = turns("bf-deep", shape, 1)  # stages 1 and 2
    arrive(dispatcher, "1F0 1F1")
    assert run_on(dispatcher) == "1F0 2F0 1F1 2F1"


def test_the_turn_of_a_v_is_handed_over_locally() -> None:
    shape = Shape(2, 1, num_chunks=2, placement=Placement.V)  # rank 1 holds stages 1 and 2
    dispatcher = turns("bf", shape, 1)
    arrive(dispatcher, "1F0")
    assert run_on(dispatcher) == "1F0 2F0"
    arrive(dispatcher, "2B0")
    assert run_on(dispatcher) == "2B0 1B0"
    assert ask(dispatcher) == "done"


def test_the_end_of_a_v_hands_its_forward_over_to_its_backward() -> None:
    shape = Shape(2, 1, num_chunks=2, placement=Placement.V)  # rank 0 holds stages 0 and 3
    dispatcher = turns("bf", shape, 0)
    assert run_on(dispatcher) == "0F0"
    arrive(dispatcher, "3F0")
    assert run_on(dispatcher) == "3F0 3B0"


def test_chunks_on_one_rank_need_no_messages() -> None:
    dispatcher = turns("bf", Shape(1, 1, num_chunks=3), 0)
    assert run_on(dispatcher) == "0F0 1F0 2F0 2B0 1B0 0B0"
    assert ask(dispatcher) == "done"
