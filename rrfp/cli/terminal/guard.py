"""The one place through which text reaches a terminal: what would steer it is shown as an escape.

Names, errors and settings come from files that others may have made. A control character among them
could move the cursor, change the title or hide what follows, and a bidirectional one could show it
in another order. While a command runs, stdout and stderr are therefore `guarded`
(`rrfp.cli.streams`). rich passes by them, for its colours are such characters; what it draws is
guarded by `rrfp.cli.terminal.console`.
"""

import re
from collections.abc import Iterable
from typing import Any, TextIO, cast

_STEERING = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"
    "\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters but the tabulator and the line feed; marks of direction and of lines that no
terminal agrees on; and halves of characters, which no encoding takes."""


def shown(text: str) -> str:
    """The text with an escape in Python's notation, such as `\\x1b`, for what would steer."""
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], text)


def guarded(stream: TextIO) -> TextIO:
    """The same stream, to which only what is shown is written."""
    return cast(TextIO, _Guarded(stream))


class _Guarded:
    """A stream of text between those who write and the terminal."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream
        """Where rich writes to instead."""

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(shown(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)
