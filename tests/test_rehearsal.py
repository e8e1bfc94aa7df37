from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.errors import UsageError
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.hints import kinds_of
from rrfp.schedule.named_hints import ALTERNATIONS, HINTS, ORDERS
from rrfp.schedule.order import Order, format_order, parse_order
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.rehearsal import Blocked, check_binding, order_of, rehearse
from rrfp.schedule.shape import SPLIT_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import Kind, Task
from tests.cases import SEEDS, random_case, random_order
from tests.invariants import check_step
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
            [Dispatcher(shape, rank, Policy(order, dispatch=Dispatch.FIXED))]
            for rank in range(shape.num_ranks)
        ],
        duration,
    )


def rows_of(history: History) -> tuple[tuple[Task, ...], ...]:
    ranks = range(history.shape.num_ranks)
    return tuple(tuple(history.nodes[Node(rank, 0)].tasks) for rank in ranks)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@given(
    num_ranks=st.integers(1, 8),
    num_microbatches=st.integers(1, 32),
    forward_ns=st.integers(1, 1000),
    backward_ns=st.integers(1, 1000),
)
def test_without_jitter_1f1b_and_gpipe_take_their_closed_form(
    name: str, num_ranks: int, num_microbatches: int, forward_ns: int, backward_ns: int
) -> None:
    order = ORDERS[name].on(Shape(num_ranks, num_microbatches))
    history = play_fixed(order, costs(forward_ns, backward_ns))
    check_step(history, order=order)
    num_slots = num_microbatches + num_ranks - 1
    assert history.makespan_ns == num_slots * (forward_ns + backward_ns)


@given(SEEDS)
def test_the_rehearsal_is_the_step_in_which_every_task_takes_one_unit(seed: int) -> None:
    case = random_case(seed, dispatch=Dispatch.READY, max_members=1)
    hint = HINTS["fb"] if isinstance(case.hint, Order) else case.hint
    order = order_of(hint, case.shape)
    shape = order.shape
    history = play(
        shape,
        [[Dispatcher(shape, rank, Policy(hint))] for rank in range(shape.num_ranks)],
        lambda _node, _task: 1,
    )
    assert order.rows == rows_of(history)
    # Bound to the order that it gives, the same step takes the same time.
    assert rehearse(order).num_units == history.makespan_ns


@pytest.mark.parametrize("name", list(ALTERNATIONS))
@given(SEEDS)
def test_the_order_of_a_round_based_hint_can_be_bound_to(name: str, seed: int) -> None:
    shape = random_case(seed).shape
    order = order_of(HINTS[name], shape)
    assert (order.name, order.shape.kinds) == (name, kinds_of(HINTS[name]))
    for rank, row in enumerate(order.rows):
        assert sorted(row) == sorted(order.shape.tasks_of(rank))
    check_binding(order, Policy(order))


def test_an_order_gives_itself() -> None:
    order = random_order(Shape(2, 3), 0, valid=False)
    assert order_of(order, order.shape) is order


def test_bf_is_1f1b_on_the_last_rank_and_runs_ahead_on_the_others() -> None:
    shape = Shape(3, 6)
    bf, binding = order_of(HINTS["bf"], shape), ORDERS["1f1b"].on(shape)
    assert bf.rows[2] == binding.rows[2]
    assert [bf.peak_depth(rank) for rank in range(3)] == [5, 3, 1]
    assert [binding.peak_depth(rank) for rank in range(3)] == [3, 2, 1]


def test_an_order_that_deadlocks_is_refused_with_the_place() -> None:
    order = parse_order("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", Shape(2, 2), "mine")
    with pytest.raises(UsageError) as refusal:
        check_binding(order, Policy(order))
    assert str(refusal.value) == (
        "order mine deadlocks as a fixed order, with rank 0 at 0B0, rank 1 at 1F1; "
        "reorder the lines or use it with --dispatch ready"
    )


def test_a_deadlock_tells_what_each_rank_lacks() -> None:
    order = parse_order("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", Shape(2, 2), "mine")
    rehearsal = rehearse(order)
    first_f, second_f = Task(0, Kind.F, 0), Task(1, Kind.F, 0)
    assert rehearsal.timeline == ((first_f, None), (None, second_f))
    assert rehearsal.blocked == (
        Blocked(0, Task(0, Kind.B, 0), (Task(1, Kind.B, 0),)),
        Blocked(1, Task(1, Kind.F, 1), (Task(0, Kind.F, 1),)),
    )


def test_a_deadlock_of_a_split_backward_is_told_in_its_own_letters() -> None:
    order = parse_order("0F0,0W0,0I0\n", Shape(1, 1), "mine")
    with pytest.raises(UsageError, match="rank 0 at 0W0"):
        check_binding(order, Policy(order))


@given(SEEDS, st.integers(1, 5), st.integers(1, 6), st.integers(1, 50))
def test_an_order_is_refused_exactly_when_it_stalls(
    seed: int, num_ranks: int, num_microbatches: int, backward_ns: int
) -> None:
    shape = Shape(num_ranks, num_microbatches, kinds=SPLIT_BACKWARD)
    order = nearly_valid_order(shape, seed)
    history = play_fixed(order, costs(10, backward_ns))
    rehearsal = rehearse(order)
    if history.is_whole:
        assert rehearsal.blocked == ()
        check_binding(order, Policy(order))
        return
    with pytest.raises(UsageError, match="deadlocks as a fixed order"):
        check_binding(order, Policy(order))
    # It stands where it does whatever the tasks take, and each rank lacks what never ran.
    ran = {task for row in rows_of(history) for task in row}
    assert {b.rank: b.task for b in rehearsal.blocked} == {
        rank: row[len(done)]
        for rank, (row, done) in enumerate(zip(order.rows, rows_of(history), strict=True))
        if len(done) < len(row)
    }
    for blocked in rehearsal.blocked:
        assert blocked.lacks
        assert ran.isdisjoint(blocked.lacks)


def nearly_valid_order(shape: Shape, seed: int) -> Order:
    """A valid order in whose first row two neighbours are exchanged: some still run."""
    order = random_order(shape, seed, valid=True)
    first, *others = order.rows
    place = seed % len(first)
    swapped = (*first[:place], *reversed(first[place : place + 2]), *first[place + 2 :])
    return replace(order, rows=(swapped, *others))


def test_a_binding_order_above_the_limit_is_refused() -> None:
    order = ORDERS["1f1b"].on(Shape(4, 8))
    check_binding(order, Policy(order, limit=4))
    with pytest.raises(UsageError) as refusal:
        check_binding(order, Policy(order, limit=3))
    assert str(refusal.value) == (
        "order 1f1b runs 4 forwards ahead of their backwards on rank 0, above the limit of 3; "
        "raise --limit to 4 or use --dispatch ready"
    )


def test_a_binding_order_above_the_hold_is_refused() -> None:
    order = ORDERS["zb-v"].on(Shape(3, 8, 2, Placement.V))
    check_binding(order, Policy(order, hold=Fraction(6, order.shape.num_chunks)))
    with pytest.raises(UsageError) as refusal:
        check_binding(order, Policy(order, hold=Fraction(5, order.shape.num_chunks)))
    assert str(refusal.value) == (
        "order zb-v keeps 3 microbatches on rank 0, above the hold of 2.5; raise --hold to 3 or "
        "use --dispatch ready"
    )


def test_a_v_has_an_order() -> None:
    shape = Shape(2, 2, num_chunks=2, placement=Placement.V)
    order = order_of(HINTS["bf"], shape)
    check_binding(order, Policy(order))
    assert format_order(order) == (
        "0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1\n1F0,1F1,2F0,2F1,2B0,1B0,2B1,1B1\n"
    )
