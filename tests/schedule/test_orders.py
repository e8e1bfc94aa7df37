"""Tests of tasks, shapes and orders: their texts, contents, and the errors of invalid ones."""

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rrfp.errors import UsageError
from rrfp.schedule.hints import Order, format_order, parse_order
from rrfp.schedule.named_hints import HINTS, ORDERS
from rrfp.schedule.policy import Policy
from rrfp.schedule.rehearsal import check_binding, order_of, rehearse
from rrfp.schedule.shape import (
    FORWARD_ONLY,
    SPLIT_BACKWARD,
    WHOLE_BACKWARD,
    Placement,
    Shape,
    shape_of_stages,
)
from rrfp.schedule.tasks import Kind, Task, format_task, parse_task
from tests.properties.cases import SEEDS, random_order

any_task = st.builds(
    Task,
    st.integers(min_value=0, max_value=10**6),
    st.sampled_from(Kind),
    st.integers(min_value=0, max_value=10**6),
)


@pytest.mark.parametrize(
    ("text", "task", "split"),
    [
        ("2F0", Task(2, Kind.F, 0), False),
        ("0B31", Task(0, Kind.B, 31), False),
        ("12I3", Task(12, Kind.B, 3), True),
        ("7W10", Task(7, Kind.W, 10), True),
    ],
)
def test_letters_match_torch(text: str, task: Task, split: bool) -> None:
    assert parse_task(text) == (task, split)
    assert format_task(task, split=split) == text


@given(any_task, st.booleans())
def test_a_written_task_is_read_back(task: Task, split: bool) -> None:
    read, is_split = parse_task(format_task(task, split=split))
    assert read == task
    assert is_split == (task.kind is Kind.W or (split and task.kind is Kind.B))


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "2f0", "-1F0", "2F0 ", "2F0.1", "2FF0", "2F-1", "2F0\n", "two"]
)
def test_other_texts_are_no_tasks(text: str) -> None:
    with pytest.raises(ValueError, match="is not a task such as 2F0"):
        parse_task(text)


def test_a_task_prints_as_its_whole_backward() -> None:
    assert str(Task(1, Kind.B, 4)) == "1B4"


def test_an_oversized_number_is_no_task() -> None:
    with pytest.raises(ValueError, match=r"^'9{30}\.\.\.' is not a task such as 2F0"):
        parse_task("9" * 5000 + "F0")


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    num_chunks = draw(st.integers(1, 4))
    placement = draw(st.sampled_from(list(Placement) if num_chunks == 2 else [Placement.LOOP]))
    kinds = draw(st.sampled_from([FORWARD_ONLY, WHOLE_BACKWARD, SPLIT_BACKWARD]))
    return Shape(draw(st.integers(1, 6)), draw(st.integers(1, 5)), num_chunks, placement, kinds)


def all_tasks(shape: Shape) -> list[Task]:
    return list(chain.from_iterable(shape.tasks_of(rank) for rank in range(shape.num_ranks)))


def tasks(texts: str) -> tuple[Task, ...]:
    return tuple(parse_task(text)[0] for text in texts.split())


def test_a_loop_gives_each_rank_every_nth_stage() -> None:
    shape = Shape(3, 1, num_chunks=2)
    assert [shape.stages_of(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]


def test_a_v_turns_at_the_last_rank() -> None:
    shape = Shape(3, 1, num_chunks=2, placement=Placement.V)
    assert [shape.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


def test_tasks_come_by_kind_chunk_and_microbatch() -> None:
    shape = Shape(2, 2, num_chunks=2, kinds=SPLIT_BACKWARD)
    assert tuple(shape.tasks_of(0)) == tasks("0F0 0F1 2F0 2F1 0B0 0B1 2B0 2B1 0W0 0W1 2W0 2W1")


@pytest.mark.parametrize(
    ("task", "needed"),
    [
        ("0F1", ""),
        ("1F1", "0F1"),
        ("2B1", "2F1"),
        ("1B1", "1F1 2B1"),
        ("0B1", "0F1 1B1"),
        ("1W1", "1B1"),
    ],
)
def test_prerequisites_match_the_method(task: str, needed: str) -> None:
    shape = Shape(3, 2, kinds=SPLIT_BACKWARD)
    assert shape.prerequisites(*tasks(task)) == tasks(needed)


@given(shapes())
def test_stages_chunks_and_ranks_map_onto_each_other(shape: Shape) -> None:
    seen = []
    for rank in range(shape.num_ranks):
        for chunk, stage in enumerate(shape.stages_of(rank)):
            assert (shape.rank_of(stage), shape.chunk_of(stage)) == (rank, chunk)
            seen.append(stage)
    assert sorted(seen) == list(range(shape.num_stages))


@given(shapes())
def test_every_task_belongs_to_exactly_one_rank(shape: Shape) -> None:
    every = all_tasks(shape)
    assert len(set(every)) == len(every) == shape.num_ranks * shape.num_tasks_of_a_rank
    for task in every:
        holders = [rank for rank in range(shape.num_ranks) if shape.holds(rank, task)]
        assert holders == [shape.rank_of(task.stage)]


@given(shapes())
def test_senders_and_receivers_mirror_each_other_and_are_prerequisites(shape: Shape) -> None:
    for task in all_tasks(shape):
        receiver = shape.receiver(task)
        if receiver is not None:
            assert shape.sender(receiver) == task
            assert task in shape.prerequisites(receiver)
        sender = shape.sender(task)
        from_elsewhere = [
            needed for needed in shape.prerequisites(task) if needed.stage != task.stage
        ]
        assert from_elsewhere == ([] if sender is None else [sender])


@given(shapes())
def test_prerequisites_are_tasks_of_the_step_and_form_no_cycle(shape: Shape) -> None:
    every = set(all_tasks(shape))
    done: set[Task] = set()
    while done != every:
        able = {task for task in every - done if done.issuperset(shape.prerequisites(task))}
        assert able
        done |= able


@pytest.mark.parametrize(
    "task", [Task(3, Kind.F, 0), Task(-1, Kind.F, 0), Task(1, Kind.F, 2), Task(1, Kind.W, 0)]
)
def test_tasks_outside_the_step_belong_to_no_rank(task: Task) -> None:
    shape = Shape(3, 2)
    assert not any(shape.holds(rank, task) for rank in range(3))


def test_sizes_below_1_are_refused() -> None:
    with pytest.raises(UsageError, match="num_ranks is 0; it must be at least 1"):
        Shape(0, 1)
    with pytest.raises(UsageError, match="num_microbatches is -2; it must be at least 1"):
        Shape(1, -2)
    with pytest.raises(UsageError, match="num_chunks is 0; it must be at least 1"):
        Shape(1, 1, num_chunks=0)


def test_integers_of_any_library_are_accepted() -> None:
    shape = Shape(np.int64(2), torch.tensor(3), np.array(2))
    assert shape == Shape(2, 3, 2)
    assert json.dumps([shape.num_ranks, shape.num_microbatches, shape.num_chunks]) == "[2, 3, 2]"
    assert pickle.loads(pickle.dumps(shape)) == shape
    with pytest.raises(UsageError, match=r"num_ranks is 2\.5; it must be a whole number"):
        Shape(2.5, 3)  # type: ignore[arg-type]


def test_other_sets_of_kinds_are_refused() -> None:
    with pytest.raises(UsageError, match="is not F, F B or F B W"):
        Shape(1, 1, kinds=(Kind.B,))


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_a_v_has_two_chunks(num_chunks: int) -> None:
    with pytest.raises(UsageError, match=f"placement v takes 2 chunks per rank, not {num_chunks}"):
        Shape(2, 2, num_chunks=num_chunks, placement=Placement.V)


@given(shapes())
def test_a_link_leads_from_the_rank_of_the_sender_to_that_of_the_task(shape: Shape) -> None:
    links = set()
    for task in all_tasks(shape):
        sender, link = shape.sender(task), shape.link(task)
        ranks = None if sender is None else (shape.rank_of(sender.stage), shape.rank_of(task.stage))
        assert link == (None if ranks is None or ranks[0] == ranks[1] else ranks)
        links.add(link)
    reached = {frozenset(link) for link in links if link is not None}
    for rank in range(shape.num_ranks):
        assert {frozenset((rank, other)) for other in shape.neighbors(rank)} == {
            link for link in reached if rank in link
        }


@given(shapes())
def test_a_shape_is_found_by_its_stages(shape: Shape) -> None:
    stages = {rank: shape.stages_of(rank) for rank in range(shape.num_ranks)}
    found = shape_of_stages(stages, shape.num_microbatches, shape.kinds)
    assert found is not None
    assert {rank: found.stages_of(rank) for rank in range(found.num_ranks)} == stages
    stages[0] = tuple(stage + 1 for stage in stages[0])
    assert shape_of_stages(stages, shape.num_microbatches, shape.kinds) is None


GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
SHAPE = Shape(2, 2)


def test_the_forwards_of_an_order_keep_their_sequence() -> None:
    order = parse_order("0F1,0B1,0F0,0B0\n", Shape(1, 2), "mine").forwards()
    assert order.shape == Shape(1, 2, kinds=FORWARD_ONLY)
    assert format_order(order) == "0F1,0F0\n"


@st.composite
def orders(draw: st.DrawFn) -> Order:
    num_chunks = draw(st.integers(1, 3))
    placement = draw(st.sampled_from(list(Placement) if num_chunks == 2 else [Placement.LOOP]))
    kinds = draw(st.sampled_from([WHOLE_BACKWARD, SPLIT_BACKWARD]))
    shape = Shape(draw(st.integers(1, 5)), draw(st.integers(1, 6)), num_chunks, placement, kinds)
    return random_order(shape, draw(SEEDS), valid=False)


@given(orders())
def test_an_order_that_is_written_is_read_back(order: Order) -> None:
    unsplit = replace(order.shape, kinds=WHOLE_BACKWARD)
    assert parse_order(format_order(order), unsplit, order.name) == order


@pytest.mark.parametrize(
    "text",
    [
        ",0F0,,0F1,0B0,0B1,,\n,1F0,1B0,1F1,1B1\n",
        " 0F0 , 0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1",
        '"0F0","0F1","0B0","0B1"\n1F0,1B0,1F1,1B1\n\n , \n',
    ],
    ids=["empty cells", "blanks and line ends", "quotes and empty lines at the end"],
)
def test_csv_variants_of_spreadsheets_are_read(text: str) -> None:
    assert parse_order(text, SHAPE, "mine") == parse_order(GOOD, SHAPE, "mine")


def test_letters_distinguish_a_split_backward() -> None:
    order = parse_order("0F0,0I0,0W0\n", Shape(1, 1), "mine")
    assert order.shape.kinds == SPLIT_BACKWARD
    assert [task.kind for task in order.rows[0]] == [Kind.F, Kind.B, Kind.W]


def test_a_whole_backward_among_split_ones_is_both_of_its_tasks() -> None:
    order = parse_order("0F0,0B0,0F1,0I1,0W1\n1F0,1F1,1B1,1B0\n", SHAPE, "mine")
    assert order.shape.kinds == SPLIT_BACKWARD
    assert format_order(order) == "0F0,0I0,0W0,0F1,0I1,0W1\n1F0,1F1,1I1,1W1,1I0,1W0\n"


def test_peaks_count_until_the_backward_and_until_the_activation_is_free() -> None:
    whole = parse_order("0F0,0F1,0B0,0F2,0B1,0B2\n", Shape(1, 3), "mine")
    assert (whole.peak_depth(0), whole.peak_held(0)) == (2, 2)
    split = parse_order("0F0,0I0,0F1,0I1,0W0,0F2,0I2,0W1,0W2\n", Shape(1, 3), "mine")
    assert (split.peak_depth(0), split.peak_held(0)) == (1, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mine has 0 lines for 2 pipeline ranks; an order file has one line per rank"),
        ("0F0\n", "mine has 1 lines for 2 pipeline ranks"),
        (GOOD + "2F0\n", "mine has 3 lines for 2 pipeline ranks"),
        (GOOD.replace("1B1", "oops"), "mine, line 2: 'oops' is not a task such as 2F0"),
        (GOOD.replace("0F1", "1F1"), "mine, line 1: 1F1 is not a task of rank 0"),
        (GOOD.replace("1F1", "1F2"), "mine, line 2: 1F2 is not a task of rank 1, which has stages "
         "1 and microbatches 0 to 1"),
        (GOOD.replace("0B1", "0B0"), "mine, line 1: 0B0 is listed twice"),
        (GOOD.replace("0B1", "00B0"), "mine, line 1: 00B0 is listed twice"),
        (GOOD.replace(",1B1", ""), "mine, line 2: 1B1 is missing"),
        ("\n" + GOOD.splitlines()[1], "mine, line 1: 0F0 is missing"),
        (GOOD.replace("0B0", "0I0"), "mine, line 1: 0W0 is missing"),
        (GOOD.replace("0B0", "0B0,0I0"), "mine, line 1: 0B0 and 0I0 cannot both be there; the "
         "backward of a microbatch on a stage is either B, or I and W"),
        (GOOD.replace("1B1", "1W1,1B1"), "mine, line 2: 1W1 and 1B1 cannot both be there"),
        (GOOD.replace("0B0", "0I0,0W0,0W0"), "mine, line 1: 0W0 is listed twice"),
        (GOOD.replace("0B0", "0I0,0W0,0B1"), "mine, line 1: 0B1 is listed twice"),
        (GOOD.replace("B", "I"), "mine, line 1: 0W0 is missing"),
        ('"0F0,0F1,0B0,0B1\n', "mine, line 1: unexpected end of data; write plain CSV"),
        (GOOD.replace("0F0", "0" * 200_000), "mine, line 1: field larger than field limit"),
    ],
)  # fmt: skip
def test_a_malformed_file_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_order(text, SHAPE, "mine")
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)


@given(st.text(alphabet="0123FBIW, \n\"'x", max_size=60))
def test_every_text_gives_an_order_or_an_error_message(text: str) -> None:
    outcome = parsed_or_refused(text)
    if isinstance(outcome, str):
        assert outcome.startswith("mine")
    else:
        assert sorted(outcome.rows[0]) == sorted(outcome.shape.tasks_of(0))


def parsed_or_refused(text: str) -> Order | str:
    try:
        return parse_order(text, Shape(1, 1), "mine")
    except UsageError as refusal:
        return str(refusal)


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
    order = ORDERS[name].for_shape(shape) if name in ORDERS else order_of(HINTS[name], shape)
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
            named.for_shape(shape)
        return
    order = named.for_shape(shape)
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
    # The fewest possible microbatches, unless the order needs whole rounds of them.
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
def test_shapes_that_an_order_does_not_support_are_refused(
    name: str, shape: Shape, sentence: str
) -> None:
    with pytest.raises(UsageError) as refusal:
        ORDERS[name].for_shape(shape)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize("kinds", [FORWARD_ONLY, WHOLE_BACKWARD, SPLIT_BACKWARD])
def test_the_kinds_of_an_order_match_its_backward(kinds: tuple[Kind, ...]) -> None:
    for name, expected in (("1f1b", WHOLE_BACKWARD), ("zb-h1", SPLIT_BACKWARD)):
        assert ORDERS[name].for_shape(Shape(3, 4, kinds=kinds)).shape.kinds == expected


# Held activations.


@given(*SIZES)
def test_1f1b_has_one_microbatch_in_flight_per_remaining_rank(
    num_ranks: int, num_microbatches: int
) -> None:
    order = ORDERS["1f1b"].for_shape(Shape(num_ranks, num_microbatches))
    expected = [min(num_ranks - rank, num_microbatches) for rank in range(num_ranks)]
    assert [order.peak_depth(rank) for rank in range(num_ranks)] == expected
    assert peaks_held(order) == expected


@given(*SIZES)
def test_gpipe_has_all_microbatches_in_flight(num_ranks: int, num_microbatches: int) -> None:
    for shape in (Shape(num_ranks, num_microbatches), v(num_ranks, num_microbatches)):
        assert set(peaks_held(ORDERS["gpipe"].for_shape(shape))) == {
            num_microbatches * shape.num_chunks
        }


@given(*SIZES)
def test_zb_h1_has_1f1bs_warm_up_and_holds_no_more_than_its_first_rank(
    num_ranks: int, num_microbatches: int
) -> None:
    shape = Shape(num_ranks, num_microbatches)
    order, one_forward_one_backward = (
        ORDERS["zb-h1"].for_shape(shape),
        ORDERS["1f1b"].for_shape(shape),
    )
    for rank, row in enumerate(order.rows):
        rest = tuple(task for task in row if task.kind is not Kind.W)
        assert rest == one_forward_one_backward.rows[rank]
    assert max(peaks_held(order)) == min(num_ranks, num_microbatches)


@given(*SIZES)
def test_zb_v_holds_at_most_two_chunks_a_rank(num_ranks: int, num_microbatches: int) -> None:
    order = ORDERS["zb-v"].for_shape(v(num_ranks, num_microbatches))
    assert max(peaks_held(order)) <= 2 * num_ranks
    if num_microbatches >= 2 * num_ranks:
        assert set(peaks_held(order)) == {2 * num_ranks}


# Makespans with equal times of all tasks, so that a whole backward takes as long as an I.


@given(*SIZES)
def test_1f1b_and_gpipe_fill_and_drain_once(num_ranks: int, num_microbatches: int) -> None:
    for name in ("1f1b", "gpipe"):
        rehearsal = rehearse(ORDERS[name].for_shape(Shape(num_ranks, num_microbatches)))
        assert rehearsal.num_units == 2 * (num_microbatches + num_ranks - 1)


@given(SIZES[0], SIZES[1])
def test_zb_h1_has_a_third_of_1f1bs_bubble(num_ranks: int, num_microbatches: int) -> None:
    # With B and W of one unit each, 1F1B would idle for 3(N - 1) units (Qi et al., table 2).
    num_units = rehearse(ORDERS["zb-h1"].for_shape(Shape(num_ranks, num_microbatches))).num_units
    if num_microbatches >= num_ranks:
        assert num_units == 3 * num_microbatches + num_ranks - 1
    assert num_units <= 3 * (num_microbatches + num_ranks - 1)


@given(*SIZES)
def test_zb_v_idles_only_to_fill_the_first_half_of_the_v(
    num_ranks: int, num_microbatches: int
) -> None:
    num_units = rehearse(ORDERS["zb-v"].for_shape(v(num_ranks, num_microbatches))).num_units
    if num_microbatches >= 2 * num_ranks - 1:
        assert num_units == 6 * num_microbatches + num_ranks - 1


def test_zb_v_at_8_x_32_takes_a_twenty_fifth_more_than_its_load() -> None:
    assert rehearse(ORDERS["zb-v"].for_shape(v(8, 32))).num_units / (6 * 32) == pytest.approx(
        1.036, abs=5e-4
    )


# Megatron's own interleaving.


@pytest.mark.parametrize("num_chunks", [2, 3, 4])
@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches"), [(2, 2), (2, 6), (3, 6), (4, 4), (8, 32)]
)
def test_interleaved_matches_megatron(
    num_ranks: int, num_microbatches: int, num_chunks: int
) -> None:
    shape = Shape(num_ranks, num_microbatches, num_chunks)
    order = ORDERS["interleaved"].for_shape(shape)
    for rank, row in enumerate(order.rows):
        assert row == megatrons_row(shape, rank)


def megatrons_row(shape: Shape, rank: int) -> tuple[Task, ...]:
    """Return the tasks of Megatron's interleaved schedule, from its own table and warm-up count."""
    from megatron.core.pipeline_parallel.schedules import (
        get_pp_rank_microbatches,
        get_schedule_table,
    )

    group_size = shape.num_ranks  # the default of microbatch_group_size_per_vp_stage
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
