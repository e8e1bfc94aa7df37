"""Streams that outlive their reader, and that no text steers.

A command goes on when its reader has gone (`rrfp ... | head -1`, a closed terminal). Its exit code
still states how its work ended: a training under a closed pipe is trained, and a gate that fails
still fails.
"""

import codecs
import errno
import io
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

# The one place through which text reaches a terminal: what would steer it is shown as an escape.
#
# Names, errors and settings come from files that others may have made. A control character among
# them could move the cursor, change the title or hide what follows, and a bidirectional one could
# show it in another order. While a command runs, stdout and stderr are therefore `guarded`
# (`rrfp.cli.terminal`). rich passes by them, for its colors are such characters; what it draws is
# guarded by `rrfp.cli.console`.


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
        """The stream to which rich writes instead."""

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(shown(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


_IN_ASCII = {
    "\N{RIGHTWARDS ARROW}": "->",
    "\N{HORIZONTAL ELLIPSIS}": "...",
    "\N{MICRO SIGN}": "u",
    "\N{BLACK UP-POINTING TRIANGLE}": "^",
    "\N{BLACK SQUARE}": "#",
}
"""Replacements of the signs that commands print, for locales whose encoding lacks them."""

_ENCODABLE = "rrfp.encodable"


def _encodable(error: UnicodeError) -> tuple[str, int]:
    """Write what a stream's encoding lacks in ASCII: our own signs as above, others as escapes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_IN_ASCII.get(each, ascii(each)[1:-1]) for each in lacking), error.end


codecs.register_error(_ENCODABLE, _encodable)


@contextmanager
def tolerate_closed_streams() -> Iterator[None]:
    """Within the block, stdout and stderr swallow what is written after their reader has gone."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (guarded(_forgiving(stream)) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            # The command has reported a full disk when it flushed.
            with suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = before


def has_reader() -> bool:
    """True while stdout has a reader; a command that runs until it is stopped ends without one."""
    buffer = getattr(sys.stdout, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    return not (isinstance(raw, _ForgivingFile) and raw.has_lost_reader)


class _ForgivingFile(io.FileIO):
    """A stream of this process that leads nowhere once its reader has gone."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.has_lost_reader = False

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not self._leads_nowhere(error):
                raise
            self.has_lost_reader = True
            # Later writes succeed, those of the interpreter at its exit among them.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return memoryview(data).nbytes

    def _leads_nowhere(self, error: OSError) -> bool:
        """Whether the reader has gone: that of a pipe, or the terminal. A disk may fail, too."""
        is_terminal = stat.S_ISCHR(os.fstat(self.fileno()).st_mode)
        return error.errno == errno.EPIPE or (error.errno == errno.EIO and is_terminal)


def _forgiving(stream: TextIO | None) -> TextIO:
    """The same stream, forgiving; itself if it is no file of the system (as in tests)."""
    if stream is None:  # closed before the process began
        return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        stream.flush()
        raw = _ForgivingFile(stream.fileno())
    except (OSError, ValueError):
        return stream
    # Python leaves out the buffer where PYTHONUNBUFFERED asks for none.
    is_unbuffered = isinstance(stream.buffer, io.RawIOBase)
    return io.TextIOWrapper(
        raw if is_unbuffered else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=_ENCODABLE,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
