"""The named orders: that they can run, what they hold, how long they take, and whom they refuse."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.errors import UsageError
from rrfp.schedule.named_hints import HINTS, ORDERS
from rrfp.schedule.order import Order, format_order
from rrfp.schedule.policy import Policy
from rrfp.schedule.rehearsal import check_binding, order_of, rehearse
from rrfp.schedule.shape import FORWARD_ONLY, SPLIT_BACKWARD, WHOLE_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import Kind, Task

SIZES = st.integers(1, 8), st.integers(1, 32)
LAYOUTS = [(1, Placement.LOOP), (2, Placement.LOOP), (2, Placement.V), (4, Placement.LOOP)]


def v(num_ranks: int, num_microbatches: int) -> Shape:
    return Shape(num_ranks, num_microbatches, 2, Placement.V)


def peaks_held(order: Order) -> list[int]:
    return [order.peak_held(rank) for rank in range(order.shape.num_ranks)]


@pytest.mark.parametrize(
    ("name", "shape", "golden_name"),
    [
        ("1f1b", Shape(4, 8), "1f1b-4x8"),
        ("gpipe", Shape(4, 8), "gpipe-4x8"),
        ("bf", Shape(4, 8), "bf-4x8"),
        ("f-first", Shape(4, 8), "f-first-4x8"),
        ("bfw", Shape(4, 8), "bfw-4x8"),
        ("zb-h1", Shape(4, 8), "zb-h1-4x8"),
        ("gpipe", Shape(2, 2, 2), "gpipe-2x2-loop"),
        ("interleaved", Shape(4, 8, 2), "interleaved-4x8"),
        ("zb-v", v(4, 8), "zb-v-4x8"),
        ("zb-v", v(4, 3), "zb-v-4x3"),
        ("v-half", v(4, 8), "v-half-4x8"),
        ("v-min", v(4, 8), "v-min-4x8"),
    ],
)
def test_golden_orders(
    name: str, shape: Shape, golden_name: str, golden: Callable[[str, str], None]
) -> None:
    order = ORDERS[name].on(shape) if name in ORDERS else order_of(HINTS[name], shape)
    golden(f"{golden_name}.csv", format_order(order))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", list(ORDERS))
@given(num_ranks=SIZES[0], num_microbatches=SIZES[1])
def test_an_order_has_every_task_once_and_runs_to_its_end(
    name: str, layout: tuple[int, Placement], num_ranks: int, num_microbatches: int
) -> None:
    shape = Shape(num_ranks, num_microbatches, *layout)
    named = ORDERS[name]
    if not named.fits(shape):
        with pytest.raises(UsageError, match=f"^order {name} (needs|takes)"):
            named.on(shape)
        return
    order = named.on(shape)
    assert (order.name, order.shape.kinds) == (name, named.kinds)
    for rank, row in enumerate(order.rows):
        assert sorted(row) == sorted(order.shape.tasks_of(rank))
    check_binding(order, Policy(order))


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("1f1b", LAYOUTS[:1]),
        ("gpipe", LAYOUTS),
        ("zb-h1", LAYOUTS[:1]),
        ("zb-v", [(2, Placement.V)]),
        ("v-half", [(2, Placement.V)]),
        ("v-min", [(2, Placement.V)]),
        ("interleaved", [(2, Placement.LOOP), (4, Placement.LOOP)]),
    ],
)
def test_the_layouts_of_an_order(name: str, layouts: list[tuple[int, Placement]]) -> None:
    # As few microbatches as can be, where the order does not go around in whole rounds of them.
    num_microbatches = 4 if name == "interleaved" else 1
    fitting = [
        layout for layout in LAYOUTS if ORDERS[name].fits(Shape(4, num_microbatches, *layout))
    ]
    assert fitting == layouts


@pytest.mark.parametrize(
    ("name", "shape", "sentence"),
    [
        (
            "1f1b",
            Shape(2, 2, 2),
            "order 1f1b needs 1 chunk per rank, not 2 in placement loop; change --placement and "
            "--chunks (in a job of your own, its virtual pipeline size), or choose another hint",
        ),
        (
            "zb-h1",
            v(2, 2),
            "order zb-h1 needs 1 chunk per rank, not 2 in placement v; change --placement and "
            "--chunks (in a job of your own, its virtual pipeline size), or choose another hint",
        ),
        (
            "zb-v",
            Shape(2, 2),
            "order zb-v needs 2 chunks per rank in placement v, not 1 in placement loop; change "
            "--placement and --chunks (in a job of your own, its virtual pipeline size), or choose "
            "another hint",
        ),
        (
            "interleaved",
            v(2, 2),
            "order interleaved needs 2 or more chunks per rank in placement loop, not 2 in "
            "placement v; change --placement and --chunks (in a job of your own, its virtual "
            "pipeline size), or choose another hint",
        ),
        (
            "interleaved",
            Shape(4, 6, 2),
            "order interleaved needs a multiple of its 4 pipeline ranks as microbatches, not 6; "
            "change their number",
        ),
    ],
)
def test_what_an_order_is_not_for_is_refused(name: str, shape: Shape, sentence: str) -> None:
    with pytest.raises(UsageError) as refusal:
        ORDERS[name].on(shape)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize("kinds", [FORWARD_ONLY, WHOLE_BACKWARD, SPLIT_BACKWARD])
def test_the_order_says_how_the_backward_is_split(kinds: tuple[Kind, ...]) -> None:
    for name, expected in (("1f1b", WHOLE_BACKWARD), ("zb-h1", SPLIT_BACKWARD)):
        assert ORDERS[name].on(Shape(3, 4, kinds=kinds)).shape.kinds == expected


# What is held.


@given(*SIZES)
def test_1f1b_keeps_as_many_in_flight_as_ranks_follow(
    num_ranks: int, num_microbatches: int
) -> None:
    order = ORDERS["1f1b"].on(Shape(num_ranks, num_microbatches))
    expected = [min(num_ranks - rank, num_microbatches) for rank in range(num_ranks)]
    assert [order.peak_depth(rank) for rank in range(num_ranks)] == expected
    assert peaks_held(order) == expected


@given(*SIZES)
def test_gpipe_keeps_everything_in_flight(num_ranks: int, num_microbatches: int) -> None:
    for shape in (Shape(num_ranks, num_microbatches), v(num_ranks, num_microbatches)):
        assert set(peaks_held(ORDERS["gpipe"].on(shape))) == {num_microbatches * shape.num_chunks}


@given(*SIZES)
def test_zb_h1_has_1f1bs_warm_up_and_holds_no_more_than_its_first_rank(
    num_ranks: int, num_microbatches: int
) -> None:
    shape = Shape(num_ranks, num_microbatches)
    order, one_forward_one_backward = ORDERS["zb-h1"].on(shape), ORDERS["1f1b"].on(shape)
    for rank, row in enumerate(order.rows):
        rest = tuple(task for task in row if task.kind is not Kind.W)
        assert rest == one_forward_one_backward.rows[rank]
    assert max(peaks_held(order)) == min(num_ranks, num_microbatches)


@given(*SIZES)
def test_zb_v_holds_at_most_two_chunks_a_rank(num_ranks: int, num_microbatches: int) -> None:
    order = ORDERS["zb-v"].on(v(num_ranks, num_microbatches))
    assert max(peaks_held(order)) <= 2 * num_ranks
    if num_microbatches >= 2 * num_ranks:
        assert set(peaks_held(order)) == {2 * num_ranks}


# How long it takes when all times are equal, so that a whole backward is as long as I is.


@given(*SIZES)
def test_1f1b_and_gpipe_fill_and_drain_once(num_ranks: int, num_microbatches: int) -> None:
    for name in ("1f1b", "gpipe"):
        rehearsal = rehearse(ORDERS[name].on(Shape(num_ranks, num_microbatches)))
        assert rehearsal.num_units == 2 * (num_microbatches + num_ranks - 1)


@given(SIZES[0], SIZES[1])
def test_zb_h1_has_a_third_of_1f1bs_bubble(num_ranks: int, num_microbatches: int) -> None:
    # With B and W one unit each, 1F1B would idle for 3 units a rank but one (Qi et al., table 2).
    num_units = rehearse(ORDERS["zb-h1"].on(Shape(num_ranks, num_microbatches))).num_units
    if num_microbatches >= num_ranks:
        assert num_units == 3 * num_microbatches + num_ranks - 1
    assert num_units <= 3 * (num_microbatches + num_ranks - 1)


@given(*SIZES)
def test_zb_v_idles_only_to_fill_the_first_half_of_the_v(
    num_ranks: int, num_microbatches: int
) -> None:
    num_units = rehearse(ORDERS["zb-v"].on(v(num_ranks, num_microbatches))).num_units
    if num_microbatches >= 2 * num_ranks - 1:
        assert num_units == 6 * num_microbatches + num_ranks - 1


def test_zb_v_at_8_x_32_takes_a_twenty_fifth_more_than_its_load() -> None:
    assert rehearse(ORDERS["zb-v"].on(v(8, 32))).num_units / (6 * 32) == pytest.approx(
        1.036, abs=5e-4
    )


# Megatron's own interleaving.


@pytest.mark.parametrize("num_chunks", [2, 3, 4])
@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches"), [(2, 2), (2, 6), (3, 6), (4, 4), (8, 32)]
)
def test_interleaved_is_megatrons(num_ranks: int, num_microbatches: int, num_chunks: int) -> None:
    shape = Shape(num_ranks, num_microbatches, num_chunks)
    order = ORDERS["interleaved"].on(shape)
    for rank, row in enumerate(order.rows):
        assert row == megatrons_row(shape, rank)


def megatrons_row(shape: Shape, rank: int) -> tuple[Task, ...]:
    """What Megatron's interleaved schedule runs, from its own table and warm-up count."""
    from megatron.core.pipeline_parallel.schedules import (
        get_pp_rank_microbatches,
        get_schedule_table,
    )

    group_size = shape.num_ranks  # what microbatch_group_size_per_vp_stage is by default
    table = get_schedule_table(shape.num_microbatches, shape.num_chunks, group_size)
    total, _, num_warmup, num_remaining = get_pp_rank_microbatches(
        shape.num_microbatches,
        shape.num_chunks,
        group_size,
        p2p_communicator=SimpleNamespace(
            pp_group=SimpleNamespace(size=lambda: shape.num_ranks, rank=lambda: rank),
            virtual_pipeline_model_parallel_size=shape.num_chunks,
        ),
    )

    def task(kind: Kind, turn: int) -> Task:
        microbatch, chunk = table[turn]
        if kind is Kind.B:
            chunk = shape.num_chunks - 1 - chunk
        return Task(shape.stage_of(rank, chunk), kind, microbatch)

    row = [task(Kind.F, turn) for turn in range(num_warmup)]
    for turn in range(num_remaining):
        row += [task(Kind.F, num_warmup + turn), task(Kind.B, turn)]
    row += [task(Kind.B, turn) for turn in range(num_remaining, total)]
    return tuple(row)
