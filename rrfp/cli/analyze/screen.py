"""What fits a screen of 24 lines: advice is shortened, commands never are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_ROWS = 24
_ROWS_AROUND = 2
"""The prompt, and a note on stderr."""
_INDENT = "   "


@dataclass(frozen=True, slots=True)
class Part:
    """One finding on a screen."""

    title: str
    words: str
    """May be shortened."""
    command: str
    """On one line, to be copied; a terminal breaks it where it must."""


def fitted(console: "Console", lead: str, parts: Sequence[Part], last: Sequence[str]) -> list[str]:
    """The lines of a screen: the lead, the parts, and what is last, with empty lines between them.

    If they are more than a terminal has, or 24, words are shortened, the longest first; where that
    is not enough, empty lines are left out, and then parts from the last one on.
    """
    rows = max(_ROWS, console.height if console.is_terminal else 0) - _ROWS_AROUND
    num_parts = len(parts)
    while True:
        shown = parts[:num_parts]
        left = [f"{len(parts) - num_parts} more: --format md"] if num_parts < len(parts) else []
        words = [_wrapped(console, part.words, len(_INDENT)) for part in shown]
        lengths = [len(lines) for lines in words]
        blocks = _blocks(console, lead, shown, words, [*left, *last])
        for gap in (1, 0):
            fixed = _num_rows(console, blocks) - sum(lengths) + gap * (len(blocks) - 1)
            if fixed <= rows or (num_parts == 0 and not gap):
                kept = _shortened(lengths, max(0, rows - fixed))
                cut = [
                    _cut(lines, num, console.width) for lines, num in zip(words, kept, strict=True)
                ]
                final = _blocks(console, lead, shown, cut, [*left, *last])
                empty = [""] * gap
                lines = [line for block in final for line in (*empty, *block)]
                return lines[gap:]
        num_parts -= 1


def _blocks(
    console: "Console",
    lead: str,
    parts: Sequence[Part],
    words: Sequence[Sequence[str]],
    last: Sequence[str],
) -> list[list[str]]:
    return [
        _wrapped(console, lead),
        *(
            [*_hanging(console, part.title), *lines, f"{_INDENT}{part.command}"]
            for part, lines in zip(parts, words, strict=True)
        ),
        *([line] if line.startswith("Next: ") else _wrapped(console, line) for line in last),
    ]


def _num_rows(console: "Console", blocks: Sequence[Sequence[str]]) -> int:
    """How many rows of the terminal they take."""
    return sum(max(1, -(-len(line) // console.width)) for block in blocks for line in block)


def _wrapped(console: "Console", words: str, indent: int = 0) -> list[str]:
    from rich.text import Text

    lines = Text(words).wrap(console, console.width - indent)
    return [" " * indent + line.plain.rstrip() for line in lines]


def _hanging(console: "Console", words: str) -> list[str]:
    """Wrapped, and indented from the second line on."""
    first = _wrapped(console, words)[0]
    rest = words[len(first) :].strip()
    return [first, *(_wrapped(console, rest, len(_INDENT)) if rest else ())]


def _shortened(lengths: Sequence[int], most: int) -> list[int]:
    """How many lines of each there is room for; the longest give way first."""
    kept = list(lengths)
    while sum(kept) > most:
        longest = max(range(len(kept)), key=lambda place: (kept[place], place))
        kept[longest] -= 1
    return kept


def _cut(lines: Sequence[str], num: int, width: int) -> list[str]:
    """The first so many lines, up to the end of their last sentence; if none ends there, the last
    of them tells that there were more."""
    if num >= len(lines) or not num:
        return list(lines[:num])
    *first, last = lines[:num]
    for place in reversed(range(num)):
        whole, stop, _ = f"{lines[place]} ".rpartition(". ")
        if stop:
            return [*lines[:place], f"{whole}."]
    while len(last) + 2 > width and " " in last:
        last = last.rsplit(" ", 1)[0]
    return [*first, f"{last} …"]
