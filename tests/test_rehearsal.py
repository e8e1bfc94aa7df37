from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.errors import UsageError
from rrfp.schedule.dispatcher import Dispatch, Dispatcher
from rrfp.schedule.hints import HINT_NAMES, ORDERS, TURNS, hint_named
from rrfp.schedule.order import Order, format_order, parse_order
from rrfp.schedule.rehearsal import check_binding, order_of
from rrfp.schedule.shape import FORWARD_ONLY, SPLIT_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import Kind, Task
from tests.invariants import check_step
from tests.test_dispatcher import Case, cases, random_order
from tests.virtual_time import Duration, History, Node, play


def costs(forward_ns: int, backward_ns: int) -> Duration:
    def duration(_node: Node, task: Task) -> int:
        return forward_ns if task.kind is Kind.F else backward_ns

    return duration


def play_fixed(order: Order, duration: Duration) -> History:
    shape = order.shape
    return play(
        shape,
        [
            [Dispatcher(shape, rank, order, dispatch=Dispatch.FIXED)]
            for rank in range(shape.num_ranks)
        ],
        duration,
    )


@pytest.mark.parametrize("name", list(ORDERS))
@given(
    num_ranks=st.integers(1, 8),
    num_microbatches=st.integers(1, 32),
    forward_ns=st.integers(1, 1000),
    backward_ns=st.integers(1, 1000),
)
def test_without_jitter_1f1b_and_gpipe_take_their_closed_form(
    name: str, num_ranks: int, num_microbatches: int, forward_ns: int, backward_ns: int
) -> None:
    order = ORDERS[name](Shape(num_ranks, num_microbatches))
    history = play_fixed(order, costs(forward_ns, backward_ns))
    check_step(history, order=order)
    num_slots = num_microbatches + num_ranks - 1
    assert history.makespan_ns == num_slots * (forward_ns + backward_ns)


@given(cases())
def test_the_rehearsal_is_the_step_in_which_every_task_takes_one_unit(case: Case) -> None:
    hint = TURNS["fb"] if isinstance(case.hint, Order) else case.hint
    shape = case.shape
    history = play(
        shape,
        [[Dispatcher(shape, rank, hint)] for rank in range(shape.num_ranks)],
        lambda _node, _task: 1,
    )
    assert order_of(hint, shape).rows == tuple(
        tuple(history.nodes[Node(rank, 0)].tasks) for rank in range(shape.num_ranks)
    )


@given(cases())
def test_the_order_of_a_round_based_hint_can_be_bound_to(case: Case) -> None:
    hint = TURNS["bf"] if isinstance(case.hint, Order) else case.hint
    order = order_of(hint, case.shape)
    assert order.name == hint.name
    for rank, row in enumerate(order.rows):
        assert sorted(row) == sorted(case.shape.tasks_of(rank))
    check_binding(order)


def test_an_order_gives_itself() -> None:
    order = random_order(Shape(2, 3), 0, valid=False)
    assert order_of(order, order.shape) is order


@pytest.mark.parametrize(
    ("name", "kinds"),
    # 1f1b has no weight gradients of their own.
    [*product(HINT_NAMES, [FORWARD_ONLY]), *product([*TURNS, "gpipe"], [SPLIT_BACKWARD])],
)
def test_other_steps_have_orders_too(name: str, kinds: tuple[Kind, ...]) -> None:
    shape = Shape(3, 4, kinds=kinds)
    order = order_of(hint_named(name, shape), shape)
    assert order.shape == shape
    check_binding(order)


def test_bf_is_1f1b_on_the_last_rank_and_runs_ahead_on_the_others() -> None:
    shape = Shape(3, 6)
    bf, binding = order_of(TURNS["bf"], shape), ORDERS["1f1b"](shape)
    assert bf.rows[2] == binding.rows[2]
    assert [bf.peak_depth(rank) for rank in range(3)] == [5, 3, 1]
    assert [binding.peak_depth(rank) for rank in range(3)] == [3, 2, 1]


def test_an_order_that_deadlocks_is_refused_with_the_place() -> None:
    order = parse_order("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", Shape(2, 2), "mine")
    with pytest.raises(UsageError) as refusal:
        check_binding(order)
    assert str(refusal.value) == (
        "order mine deadlocks as a fixed order, with rank 0 at 0B0, rank 1 at 1F1; "
        "reorder the lines or use it with --dispatch ready"
    )


def test_a_deadlock_of_a_split_backward_is_told_in_its_own_letters() -> None:
    order = parse_order("0F0,0W0,0I0\n", Shape(1, 1), "mine")
    with pytest.raises(UsageError, match="rank 0 at 0W0"):
        check_binding(order)


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 6))
def test_an_order_is_refused_exactly_when_it_stalls(
    seed: int, num_ranks: int, num_microbatches: int
) -> None:
    order = nearly_valid_order(Shape(num_ranks, num_microbatches), seed)
    if play_fixed(order, costs(1, 2)).is_whole:
        check_binding(order)
    else:
        with pytest.raises(UsageError, match="deadlocks as a fixed order"):
            check_binding(order)


def nearly_valid_order(shape: Shape, seed: int) -> Order:
    """A valid order in whose first row two neighbours are exchanged: some still run."""
    order = random_order(shape, seed, valid=True)
    first, *others = order.rows
    place = seed % len(first)
    swapped = (*first[:place], *reversed(first[place : place + 2]), *first[place + 2 :])
    return replace(order, rows=(swapped, *others))


def test_a_binding_order_above_the_limit_is_refused() -> None:
    order = ORDERS["1f1b"](Shape(4, 8))
    check_binding(order, limit=4)
    with pytest.raises(UsageError) as refusal:
        check_binding(order, limit=3)
    assert str(refusal.value) == (
        "order 1f1b runs 4 forwards ahead of their backwards on rank 0, above the limit of 3; "
        "raise --limit or use --dispatch ready"
    )


def test_a_v_has_an_order() -> None:
    shape = Shape(2, 2, num_chunks=2, placement=Placement.V)
    order = order_of(TURNS["bf"], shape)
    check_binding(order)
    assert format_order(order) == (
        "0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1\n1F0,1F1,2F0,2F1,2B0,1B0,2B1,1B1\n"
    )
