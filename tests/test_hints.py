import pytest

from rrfp.errors import UsageError
from rrfp.schedule.hints import HINT_NAMES, ORDERS, TURNS, Turns, hint_named
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind

SHAPE = Shape(2, 3)


def test_every_name_gives_the_hint_of_that_name() -> None:
    assert HINT_NAMES == ("bf", "fb", "b-first", "f-first", "1f1b", "gpipe")
    assert [hint_named(name, SHAPE).name for name in HINT_NAMES] == list(HINT_NAMES)


@pytest.mark.parametrize(
    ("name", "first", "second", "in_rounds"),
    [
        ("bf", Kind.B, Kind.F, True),
        ("fb", Kind.F, Kind.B, True),
        ("b-first", Kind.B, Kind.F, False),
        ("f-first", Kind.F, Kind.B, False),
    ],
)
def test_turns_are_those_of_the_method(
    name: str, first: Kind, second: Kind, in_rounds: bool
) -> None:
    hint = TURNS[name]
    assert (hint.first, hint.second, hint.in_rounds) == (first, second, in_rounds)


def test_an_order_is_made_for_the_shape() -> None:
    for name in ORDERS:
        hint = hint_named(name, SHAPE)
        assert not isinstance(hint, Turns)
        assert hint.shape == SHAPE


def test_an_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(UsageError) as refusal:
        hint_named("zigzag", SHAPE)
    assert str(refusal.value).startswith("'zigzag' is neither a hint (bf, fb, b-first, f-first, ")
