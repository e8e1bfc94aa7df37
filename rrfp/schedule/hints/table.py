"""Every named hint. A new one takes a line in `HINTS`, and what it is a line in `IN_WORDS`."""

from collections.abc import Sequence

from rrfp.errors import UsageError, did_you_mean
from rrfp.schedule.hints.alternation import ALTERNATIONS
from rrfp.schedule.hints.hint import Hint
from rrfp.schedule.hints.orders import ORDERS

HINTS: dict[str, Hint] = {
    **ALTERNATIONS,
    **ORDERS,
}


IN_WORDS: dict[str, str] = {
    "bf": "in turns: a backward, a forward",
    "fb": "in turns: a forward, a backward",
    "b-first": "any ready backward before forwards",
    "f-first": "any ready forward before backwards",
    "bfw": "bf, with weight gradients when idle",
    "bf-deep": "bf, deepest chunk's forwards first",
    "bfw-deep": "bfw, deepest chunk's forwards first",
    "1f1b": "Megatron's: a forward, a backward",
    "gpipe": "all forwards, then all backwards",
    "zb-h1": "zero bubble: 1f1b, backward split",
    "zb-v": "zero bubble over a V of two chunks",
    "v-half": "over a V: half of 1f1b's memory",
    "v-min": "over a V: a third of 1f1b's memory",
    "interleaved": "Megatron's 1f1b over several chunks",
}
"""What each hint is, in a few words."""


def hint_named(name: str, others: Sequence[str] = ()) -> Hint:
    """The hint of that name; raises UsageError, with the list of names, if there is none. `others`
    are names that the caller takes besides."""
    if name not in HINTS:
        names = [*HINTS, *others]
        raise UsageError(
            f"'{name}' is neither a hint ({', '.join(names)}) nor the path of an order file"
            f"{did_you_mean(name, names)}"
        )
    return HINTS[name]
