"""How a finding of `rrfp trace check` is worded."""

from typing import Any

NUM_EXAMPLES = 3


def finding(pattern: str, noun: str, items: list[Any], num_items: int | None = None) -> str:
    """Fill in "3 tasks" and append the first few `items`. `num_items` is given where an item stands
    for several."""
    num_items = len(items) if num_items is None else num_items
    count = f"{num_items} {noun if num_items != 1 else _singular(noun)}"
    examples = "; ".join(map(str, items[:NUM_EXAMPLES]))
    more = "; ..." if len(items) > NUM_EXAMPLES else ""
    return f"{pattern.format(count)} ({examples}{more})"


def _singular(noun: str) -> str:
    return noun.replace("pairs", "pair") if noun.startswith("pairs") else noun.removesuffix("s")
