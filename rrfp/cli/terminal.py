"""stdout and stderr that survive a closed reader and escape control characters.

A command continues when its reader has gone (`rrfp ... | head -1`, a closed terminal), and its exit
code still states how its work ended: training finishes under a closed pipe, and a failed gate
fails.

Names, errors and settings come from files that others may have written. A control character in them
could move the cursor, change the title or hide the following text, and a bidirectional one could
reorder it. While a command runs, stdout and stderr therefore escape such characters. rich bypasses
these streams, because its colors are control characters; `rrfp.cli.console` escapes its text.
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

_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"
    "\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters except tab and line feed, marks of direction and lines, and surrogates."""


def escape_controls(text: str) -> str:
    """Replace control characters (not tab and line feed), marks of direction and lines, and
    surrogates by escapes in Python's notation, such as `\\x1b`."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def guard(stream: TextIO) -> TextIO:
    """Wrap a stream so that control characters in written text are escaped."""
    return cast(TextIO, _GuardedStream(stream))


class _GuardedStream:
    """A text stream that escapes control characters before it writes to another stream."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream
        """The wrapped stream; rich writes to it directly."""

    def write(self, text: str) -> int:
        """Write a text with control characters escaped; return the length of the text as given."""
        self.rich_proxied_file.write(escape_controls(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each text with control characters escaped, without adding line ends."""
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
"""ASCII replacements of the signs that commands print, for encodings that lack them."""

_ENCODABLE = "rrfp.encodable"


def _encodable(error: UnicodeError) -> tuple[str, int]:
    """Codec error handler: replace characters that cannot be encoded by ASCII, `_IN_ASCII` first,
    others as escapes. Errors of decoding are raised."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_IN_ASCII.get(each, ascii(each)[1:-1]) for each in lacking), error.end


codecs.register_error(_ENCODABLE, _encodable)


@contextmanager
def tolerate_closed_streams() -> Iterator[None]:
    """Within the block, escape control characters in output to stdout and stderr, and discard it
    after their reader has gone. At the end both are flushed and restored."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (guard(_tolerant(stream)) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            # The command already reported a full disk at its own flush.
            with suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = before


def has_reader() -> bool:
    """Return False once a write to stdout has failed because its reader has gone; endless commands
    then stop."""
    buffer = getattr(sys.stdout, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    return not (isinstance(raw, _TolerantFile) and raw.has_lost_reader)


class _TolerantFile(io.FileIO):
    """A file descriptor that is redirected to the null device once its reader has gone."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.has_lost_reader = False

    def write(self, data: Any) -> int:
        """Write to the descriptor. If the reader has gone, redirect the descriptor to the null
        device and report success; other errors are raised."""
        try:
            return super().write(data)
        except OSError as error:
            if not self._means_no_reader(error):
                raise
            self.has_lost_reader = True
            # Later writes then succeed, including the interpreter's at exit.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return memoryview(data).nbytes

    def _means_no_reader(self, error: OSError) -> bool:
        """Return True for a broken pipe (EPIPE), and for EIO on a terminal that has gone. Errors of
        a disk give False."""
        is_terminal = stat.S_ISCHR(os.fstat(self.fileno()).st_mode)
        return error.errno == errno.EPIPE or (error.errno == errno.EIO and is_terminal)


def _tolerant(stream: TextIO | None) -> TextIO:
    """Reopen a stream over a `_TolerantFile`. None, a closed stream, gives one to the null device;
    a stream without a descriptor, of another type or that cannot be flushed is returned as it
    is."""
    if stream is None:  # closed before the process started
        return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        stream.flush()
        raw = _TolerantFile(stream.fileno())
    except (OSError, ValueError):
        return stream
    # With PYTHONUNBUFFERED Python uses no buffer.
    is_unbuffered = isinstance(stream.buffer, io.RawIOBase)
    return io.TextIOWrapper(
        raw if is_unbuffered else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=_ENCODABLE,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
