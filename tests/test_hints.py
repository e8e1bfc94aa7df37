"""The hints by their names."""

import pytest

from rrfp.errors import UsageError
from rrfp.schedule.hints import kinds_of
from rrfp.schedule.named_hints import HINTS, ORDERS, Alternation, hint_named
from rrfp.schedule.order import Order
from rrfp.schedule.shape import SPLIT_BACKWARD, WHOLE_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import Kind

SHAPES = {
    **dict.fromkeys(("zb-v", "v-half", "v-min"), Shape(2, 4, 2, Placement.V)),
    "interleaved": Shape(2, 4, 2),
}
SPLIT = {"bfw", "bfw-deep", "zb-h1", "zb-v", "v-half", "v-min"}


def test_the_names_are_those_of_the_command_line() -> None:
    assert tuple(HINTS) == (
        "bf",
        "fb",
        "b-first",
        "f-first",
        "bfw",
        "bf-deep",
        "bfw-deep",
        "1f1b",
        "gpipe",
        "zb-h1",
        "zb-v",
        "v-half",
        "v-min",
        "interleaved",
    )


@pytest.mark.parametrize("name", HINTS)
def test_every_name_gives_the_hint_of_that_name(name: str) -> None:
    hint = hint_named(name).on(SHAPES.get(name, Shape(2, 3)))
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
def test_alternations_are_those_of_the_method(
    name: str, first: Kind, second: Kind, in_rounds: bool, deep: bool
) -> None:
    hint = HINTS[name]
    assert isinstance(hint, Alternation)
    assert (hint.first, hint.second, hint.in_rounds, hint.deep) == (first, second, in_rounds, deep)


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_is_made_for_the_shape_whatever_its_kinds(name: str) -> None:
    shape = SHAPES.get(name, Shape(2, 3))
    hint = hint_named(name).on(shape)
    assert not isinstance(hint, Alternation)
    assert isinstance(hint, Order)
    assert (hint.shape.num_ranks, hint.shape.num_chunks) == (shape.num_ranks, shape.num_chunks)


def test_an_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(UsageError) as refusal:
        hint_named("zigzag").on(Shape(2, 3))
    assert str(refusal.value).startswith("'zigzag' is neither a hint (bf, fb, b-first, f-first, ")
