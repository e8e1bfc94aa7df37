"""What ranks warn of reaches the person who started them, and not their logs alone.

A rank's warnings go to its launcher through a pipe with a name, in the launcher's own directory. A
pipe takes no room, so it works where a full disk is what they warn of.
"""

import logging
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rrfp.runtime import variables

_LOOK_S = 0.2
_MOST_BYTES = select.PIPE_BUF
"""Of a warning: it arrives in one piece."""


@contextmanager
def hearing(directory: Path, tell: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """While the block runs, `tell` what ranks with these environment variables warn of."""
    path = directory / "warnings"
    os.mkfifo(path, 0o600)
    # For writing, too, so that it has no end before the block's.
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    is_over = threading.Event()
    thread = threading.Thread(target=_hear, args=(pipe, tell, is_over), name="rrfp-warnings")
    thread.start()
    try:
        yield {variables.WARNINGS: str(path)}
    finally:
        is_over.set()
        thread.join()
        os.close(pipe)


def _hear(pipe: int, tell: Callable[[str], None], is_over: threading.Event) -> None:
    rest = b""
    while True:
        was_over = is_over.is_set()
        ready, _, _ = select.select([pipe], [], [], 0 if was_over else _LOOK_S)
        if ready:
            *lines, rest = (rest + os.read(pipe, 1 << 16)).split(b"\n")
            for line in lines:
                tell(line.decode(errors="replace"))
        elif was_over:
            return


def warn_launcher(rank: int) -> None:
    """Send the launcher what this rank's own modules warn of, from now on; without a launcher that
    listens this does nothing."""
    path = os.environ.get(variables.WARNINGS)
    if path is None:
        return
    with suppress(OSError):
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        logging.getLogger("rrfp").addHandler(_ToLauncher(pipe, rank))


class _ToLauncher(logging.Handler):
    def __init__(self, pipe: int, rank: int) -> None:
        super().__init__(logging.WARNING)
        self._pipe = pipe
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        # How a rank fails is reported otherwise.
        if record.levelno > logging.WARNING:
            return
        told = f"rank {self._rank}: {record.getMessage()}".replace("\n", " ")
        # A launcher that hears nothing is gone, and holds up no training.
        with suppress(OSError):
            os.write(self._pipe, told.encode()[: _MOST_BYTES - 1] + b"\n")
