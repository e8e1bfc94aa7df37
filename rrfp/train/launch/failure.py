"""How a rank reports its failure to the launcher: in the error file that the launcher names.

The variable and the format are those of torch's elastic launcher, so that torchrun can read the
report too.
"""

import json
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from rrfp.runtime import launchers as variables
from rrfp.trace.outcome import FaultOrigin
from rrfp.trace.safe_files import open_whole

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The variable with the file's path."""


@dataclass(frozen=True, slots=True)
class FailureReport:
    """Why a rank ended, in its own words."""

    sentence: str
    exit_code: int
    is_consequence: bool
    """Whether another rank failed first, and this one only lost its peer."""
    is_silence: bool
    """Whether another rank did not answer for too long; it may still be alive."""
    detail: str = ""
    """Further lines below the sentence: the grid of a stall."""
    at_s: float = field(default=0.0, compare=False)
    """When it was written, on the host's monotonic clock: the time of day may jump."""
    culprit: FaultOrigin | None = None
    """Whose fault it was, and who found that."""

    @property
    def is_own(self) -> bool:
        """Whether the cause is this rank's own."""
        return not (self.is_consequence or self.is_silence)

    def write(self) -> None:
        """Write the report to where the launcher of this process looks for it."""
        path = os.environ.get(ERROR_FILE)
        if path is None:
            return
        message = {
            "message": self.sentence,
            "extraInfo": {"timestamp": int(time.time())},
            "report": asdict(replace(self, at_s=time.monotonic())),
        }
        # Atomically, because the launcher ends this process if another one has failed too.
        with open_whole(Path(path)) as file:
            file.write(json.dumps({"message": message}).encode())

    @classmethod
    def read(cls, error_file_data: Mapping[str, Any]) -> Self | None:
        """The report in a rank's error file; None if it is not one of ours."""
        message = error_file_data.get("message")
        if isinstance(message, dict) and "report" in message:
            report = cls(**message["report"])
            culprit = message["report"].get("culprit")
            return (
                report if culprit is None else replace(report, culprit=FaultOrigin.decode(culprit))
            )
        return None


# What ranks warn of reaches the person who started them, and not their logs alone.
#
# A rank's warnings go to its launcher through a pipe with a name, in the launcher's own directory.
# A pipe takes no room, so it works where a full disk is what they warn of.


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
