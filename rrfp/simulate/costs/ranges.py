"""Ranges of numbers as people write them: ``0-2,5``."""

import re

from rrfp.errors import UsageError

_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)


def parse_ranges(text: str, where: str) -> tuple[range, ...]:
    """Read ``0-2,5``; `where` is what errors call it.

    Raises UsageError for any other text, and for a descending range.
    """
    ranges = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = match.groups() if match else ("1", "0")
        last = first if last is None else last
        if int(first) > int(last):
            raise UsageError(
                f"{where}: '{text}' names no pipeline ranks; write them as 0-2 or 0-2,5"
            )
        ranges.append(range(int(first), int(last) + 1))
    return tuple(ranges)
