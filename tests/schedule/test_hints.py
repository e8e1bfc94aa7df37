"""Tests of the names of hints, the orders that they give, and the memory of V-Half and V-Min."""

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.errors import UsageError
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.hints import Order, format_order, kinds_of, parse_order
from rrfp.schedule.named_hints import (
    ALTERNATIONS,
    AUTO_CHOICES,
    HINTS,
    ORDERS,
    Alternation,
    hint_named,
)
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.rehearsal import Blocked, check_binding, order_of, rehearse
from rrfp.schedule.shape import SPLIT_BACKWARD, WHOLE_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import Kind, Task
from tests.properties.cases import SEEDS, examples, random_case, random_order
from tests.properties.virtual_time import Duration, History, Node, check_step, play

SHAPES = {
    **dict.fromkeys(("zb-v", "v-half", "v-min"), Shape(2, 4, 2, Placement.V)),
    "interleaved": Shape(2, 4, 2),
}
SPLIT = {"bfw", "bfw-deep", "zb-h1", "zb-v", "v-half", "v-min"}


FIRST_NAMES = (
    *("bf", "fb", "b-first", "f-first", "bfw", "bf-deep", "bfw-deep"),
    *("1f1b", "gpipe", "zb-h1", "zb-v", "v-half", "v-min", "interleaved"),
)
"""The names that users' commands contain; each must stay valid."""


def documented_names() -> tuple[str, ...]:
    """Return the names in the table of hints of docs/reference/training.md."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "training.md").read_text()
    table = page.partition("\n## Hints\n")[2].partition("\n\nAmong")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return tuple(name for cell in cells for name in re.findall(r"`([^`]+)`", cell))


def test_the_names_are_those_of_the_command_line_and_of_the_page() -> None:
    assert documented_names() == (*HINTS, "auto")
    assert tuple(name for name in HINTS if name in FIRST_NAMES) == FIRST_NAMES
    assert set(AUTO_CHOICES) <= set(HINTS)


@pytest.mark.parametrize("name", HINTS)
def test_every_name_gives_the_hint_of_that_name(name: str) -> None:
    hint = hint_named(name).for_shape(SHAPES.get(name, Shape(2, 3)))
    assert hint.name == name
    assert hint.splits_backward == (name in SPLIT)
    assert kinds_of(hint) == (SPLIT_BACKWARD if name in SPLIT else WHOLE_BACKWARD)


@pytest.mark.parametrize(
    ("name", "first", "second", "in_rounds", "deep"),
    [
        ("bf", Kind.B, Kind.F, True, False),
        ("fb", Kind.F, Kind.B, True, False),
        ("b-first", Kind.B, Kind.F, False, False),
        ("f-first", Kind.F, Kind.B, False, False),
        ("bfw", Kind.B, Kind.F, True, False),
        ("bf-deep", Kind.B, Kind.F, True, True),
        ("bfw-deep", Kind.B, Kind.F, True, True),
    ],
)
def test_alternations_match_the_method(
    name: str, first: Kind, second: Kind, in_rounds: bool, deep: bool
) -> None:
    hint = HINTS[name]
    assert isinstance(hint, Alternation)
    assert (hint.first, hint.second, hint.in_rounds, hint.deep) == (first, second, in_rounds, deep)


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_hint_fits_a_shape_of_any_kinds(name: str) -> None:
    shape = SHAPES.get(name, Shape(2, 3))
    hint = hint_named(name).for_shape(shape)
    assert not isinstance(hint, Alternation)
    assert isinstance(hint, Order)
    assert (hint.shape.num_ranks, hint.shape.num_chunks) == (shape.num_ranks, shape.num_chunks)


def test_an_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(UsageError) as refusal:
        hint_named("zigzag").for_shape(Shape(2, 3))
    assert str(refusal.value).startswith("'zigzag' is neither a hint (bf, fb, b-first, f-first, ")


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
def test_without_jitter_1f1b_and_gpipe_match_their_closed_form(
    name: str, num_ranks: int, num_microbatches: int, forward_ns: int, backward_ns: int
) -> None:
    order = ORDERS[name].for_shape(Shape(num_ranks, num_microbatches))
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
    # With that order binding, the same step takes the same time.
    assert rehearse(order).num_units == history.makespan_ns


@pytest.mark.parametrize("name", list(ALTERNATIONS))
@given(SEEDS)
def test_the_order_of_a_round_based_hint_can_be_binding(name: str, seed: int) -> None:
    shape = random_case(seed).shape
    order = order_of(HINTS[name], shape)
    assert (order.name, order.shape.kinds) == (name, kinds_of(HINTS[name]))
    for rank, row in enumerate(order.rows):
        assert sorted(row) == sorted(order.shape.tasks_of(rank))
    check_binding(order, Policy(order))


def test_the_order_of_an_order_hint_is_itself() -> None:
    order = random_order(Shape(2, 3), 0, valid=False)
    assert order_of(order, order.shape) is order


def test_bf_is_1f1b_on_the_last_rank_and_runs_ahead_on_the_others() -> None:
    shape = Shape(3, 6)
    bf, binding = order_of(HINTS["bf"], shape), ORDERS["1f1b"].for_shape(shape)
    assert bf.rows[2] == binding.rows[2]
    assert [bf.peak_depth(rank) for rank in range(3)] == [5, 3, 1]
    assert [binding.peak_depth(rank) for rank in range(3)] == [3, 2, 1]


def test_an_order_that_deadlocks_is_refused_with_the_location() -> None:
    order = parse_order("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", Shape(2, 2), "mine")
    with pytest.raises(UsageError) as refusal:
        check_binding(order, Policy(order))
    assert str(refusal.value) == (
        "order mine deadlocks as a fixed order, with rank 0 at 0B0, rank 1 at 1F1; "
        "reorder the lines or use it with --dispatch ready"
    )


def test_a_deadlock_lists_missing_inputs_by_rank() -> None:
    order = parse_order("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", Shape(2, 2), "mine")
    rehearsal = rehearse(order)
    first_f, second_f = Task(0, Kind.F, 0), Task(1, Kind.F, 0)
    assert rehearsal.timeline == ((first_f, None), (None, second_f))
    assert rehearsal.blocked == (
        Blocked(0, Task(0, Kind.B, 0), (Task(1, Kind.B, 0),)),
        Blocked(1, Task(1, Kind.F, 1), (Task(0, Kind.F, 1),)),
    )


def test_a_deadlock_of_a_split_backward_is_described_in_its_own_letters() -> None:
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
    # It stalls at the same task under any task times, and each rank lacks tasks that never ran.
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
    """Return a valid order with two neighbors swapped in its first row; some of these still run."""
    order = random_order(shape, seed, valid=True)
    first, *others = order.rows
    place = seed % len(first)
    swapped = (*first[:place], *reversed(first[place : place + 2]), *first[place + 2 :])
    return replace(order, rows=(swapped, *others))


def test_a_binding_order_above_the_limit_is_refused() -> None:
    order = ORDERS["1f1b"].for_shape(Shape(4, 8))
    check_binding(order, Policy(order, limit=4))
    with pytest.raises(UsageError) as refusal:
        check_binding(order, Policy(order, limit=3))
    assert str(refusal.value) == (
        "order 1f1b runs 4 forwards ahead of their backwards on rank 0, above the limit of 3; "
        "raise --limit to 4 or use --dispatch ready"
    )


def test_a_binding_order_above_the_hold_is_refused() -> None:
    order = ORDERS["zb-v"].for_shape(Shape(3, 8, 2, Placement.V))
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


# V-Half and V-Min, against Qi et al. 2024 (arXiv 2405.15362) and the authors' generator.


NAMES = ("v-half", "v-min")
SIZES = st.integers(1, 16), st.integers(1, 40)

PUBLISHED = {
    # sail-sg/zero-bubble-pipeline-parallelism at 39f2c186, zbv_greedy.py with all times 1 and free
    # links: the time in units, and a rank's peak in slots of one chunk and one microbatch.
    ("v-half", 2, 8): (49, 4),
    ("v-half", 3, 12): (77, 4),
    ("v-half", 4, 8): (53, 6),
    ("v-half", 4, 32): (197, 6),
    ("v-half", 5, 20): (131, 6),
    ("v-half", 6, 24): (155, 8),
    ("v-half", 8, 16): (113, 10),
    ("v-half", 8, 32): (209, 10),
    ("v-half", 16, 64): (425, 18),
    ("v-min", 2, 8): (51, 4),
    ("v-min", 3, 12): (77, 4),
    ("v-min", 4, 8): (59, 4),
    ("v-min", 4, 32): (203, 4),
    ("v-min", 5, 20): (135, 6),
    ("v-min", 6, 24): (161, 6),
    ("v-min", 8, 16): (123, 8),
    ("v-min", 8, 32): (219, 8),
    ("v-min", 16, 64): (443, 12),
}


def on_a_v(name: str, num_ranks: int, num_microbatches: int) -> Order:
    return ORDERS[name].for_shape(Shape(num_ranks, num_microbatches, 2, Placement.V))


def peaks_held(order: Order) -> list[int]:
    return [order.peak_held(rank) for rank in range(order.shape.num_ranks)]


def most_microbatches(name: str, num_ranks: int) -> int:
    """Return the peak activation memory in microbatches, from the table of the authors' simulator
    (the Hugging Face space sail/pipeline-parallelism-with-controllable-memory)."""
    return (num_ranks + 2) // 2 if name == "v-half" else (num_ranks + 4) // 3


@pytest.mark.parametrize("name", NAMES)
@examples(quick=60, thorough=640)
@given(*SIZES)
def test_any_number_of_microbatches_on_any_number_of_ranks(
    name: str, num_ranks: int, num_microbatches: int
) -> None:
    order = on_a_v(name, num_ranks, num_microbatches)
    for rank, row in enumerate(order.rows):
        assert sorted(row) == sorted(order.shape.tasks_of(rank))
        for stage in order.shape.stages_of(rank):
            for kind in Kind:
                ran = [task.microbatch for task in row if task[:2] == (stage, kind)]
                assert ran == sorted(ran)
    assert rehearse(order).blocked == ()
    assert max(peaks_held(order)) <= 2 * most_microbatches(name, num_ranks)


@pytest.mark.parametrize(
    ("name", "microbatches"),
    [("v-half", {4: 3, 8: 5, 16: 9, 32: 17}), ("v-min", {4: 2, 8: 4, 16: 6, 32: 12})],
)
def test_held_activations_are_the_papers_half_and_third(
    name: str, microbatches: dict[int, int]
) -> None:
    for num_ranks, most in microbatches.items():
        assert most == most_microbatches(name, num_ranks)
        assert max(peaks_held(on_a_v(name, num_ranks, 2 * num_ranks))) == 2 * most


@pytest.mark.parametrize("num_ranks", range(1, 17))
def test_all_ranks_hold_nearly_the_same(num_ranks: int) -> None:
    for num_microbatches in (num_ranks + 2, 3 * num_ranks):
        for name in NAMES:
            peaks = peaks_held(on_a_v(name, num_ranks, num_microbatches))
            most = 2 * most_microbatches(name, num_ranks)
            # If 3 divides N + 1, the gaps of some ranks are early enough to save a microbatch.
            less = 2 if name == "v-min" and num_ranks % 3 == 2 else 0
            assert (min(peaks), max(peaks)) == (most - less, most)


@pytest.mark.parametrize(("name", "num_ranks", "num_microbatches"), PUBLISHED)
def test_times_and_peaks_match_the_authors_generator(
    name: str, num_ranks: int, num_microbatches: int
) -> None:
    order = on_a_v(name, num_ranks, num_microbatches)
    published = PUBLISHED[name, num_ranks, num_microbatches]
    assert (rehearse(order).num_units, max(peaks_held(order))) == published


@pytest.mark.parametrize("name", NAMES)
def test_no_microbatch_adds_a_bubble_once_the_pipeline_is_full(name: str) -> None:
    # 1F1B idles for 6(N - 1) units of one chunk. These idle for about half, 3N, and two thirds, 4N.
    for num_ranks in range(2, 17):
        idle = {
            rehearse(on_a_v(name, num_ranks, num_microbatches)).num_units - 6 * num_microbatches
            for num_microbatches in (num_ranks + 2, 2 * num_ranks + 1, 3 * num_ranks)
        }
        assert len(idle) == 1
        share = 3 if name == "v-half" else 4
        assert share * num_ranks - 7 <= idle.pop() <= share * num_ranks - 4
