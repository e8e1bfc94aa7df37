from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.errors import UsageError
from rrfp.schedule.order import Order, format_order, parse_order
from rrfp.schedule.shape import FORWARD_ONLY, SPLIT_BACKWARD, WHOLE_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import Kind
from tests.cases import SEEDS, random_order

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
def test_what_is_written_is_read_back(order: Order) -> None:
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
def test_spreadsheets_ways_are_read(text: str) -> None:
    assert parse_order(text, SHAPE, "mine") == parse_order(GOOD, SHAPE, "mine")


def test_letters_tell_a_split_backward() -> None:
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
def test_no_text_gives_anything_but_an_order_or_a_sentence(text: str) -> None:
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
