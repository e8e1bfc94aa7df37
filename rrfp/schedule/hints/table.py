"""Every named hint. A new one takes a line in `HINTS`."""

from rrfp.errors import UsageError
from rrfp.schedule.hints.alternation import ALTERNATIONS
from rrfp.schedule.hints.hint import Hint
from rrfp.schedule.hints.orders import ORDERS

HINTS: dict[str, Hint] = {
    **ALTERNATIONS,
    **ORDERS,
}


def hint_named(name: str) -> Hint:
    """The hint of that name; raises UsageError, with the list of names, if there is none."""
    if name not in HINTS:
        raise UsageError(
            f"'{name}' is neither a hint ({', '.join(HINTS)}) nor the path of an order file"
        )
    return HINTS[name]
