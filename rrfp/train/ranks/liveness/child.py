"""One rank's process, as its launcher holds it: started, looked at, and ended for certain."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rrfp.errors import RrfpError
from rrfp.runtime import variables
from rrfp.train.ranks.failure import ERROR_FILE, FailureReport
from rrfp.train.ranks.liveness.heartbeat import BEAT_S, STACK_SIGNAL
from rrfp.train.ranks.liveness.kernel import signal_main_thread
from rrfp.train.ranks.liveness.page import StatusPage, nameless_file, page_file
from rrfp.train.ranks.liveness.vigil import Standstill

_ANSWER_S = 1.5
"""How long a rank may take to write the stacks of its threads after a signal."""
_BEATS_S = 2.5 * BEAT_S
"""The same, if it is asked to do so with its next beat."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Failure:
    """How a rank's process failed."""

    pid: int
    exit_code: int
    """If negative, the signal that killed it. 0 is a failure, too, without the rank's own note that
    it has done all its work."""
    ended_s: float
    """When it reported the failure, or was found to have ended, on this host's monotonic clock."""
    report: FailureReport | None
    """The contents of its error file."""
    was_ended: bool = False
    """Whether a signal of the launcher's ended it."""
    standstill: Standstill | None = None
    """How it was found, if it stood still."""
    stacks: str = ""
    """What its threads did then, in faulthandler's words."""
    stage: str = ""
    """What it did when it ended: `in step 7`."""


class Child:
    """A rank's process, in a session of its own."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], error_file: Path
    ) -> None:
        """Start it with these variables besides this process' own. Raises OSError if it cannot be
        started."""
        self._error_file = error_file
        self._stacks = nameless_file()
        with page_file() as page:
            self.page = StatusPage(page.fileno())
            shared = (page.fileno(), self._stacks.fileno())
            ours = {
                ERROR_FILE: str(error_file),
                variables.LAUNCHER: str(os.getpid()),
                variables.LIVENESS: ",".join(map(str, shared)),
            }
            try:
                self._process = subprocess.Popen(
                    command,
                    env={**os.environ, **environment, **ours},
                    start_new_session=True,
                    pass_fds=shared,
                )
            except OSError:
                self._stacks.close()
                raise
        self._exit_code: int | None = None
        self._ended_by: set[int] = set()
        self._standstill: Standstill | None = None
        self._told = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it has ended. What it had started ends with it, even if that was stopped: a
        group of processes keeps its number until its leader is asked for its exit code."""
        if self._exit_code is None:
            ended = os.WEXITED | os.WNOWAIT | os.WNOHANG
            if os.waitid(os.P_PID, self.pid, ended) is not None:
                self._signal(signal.SIGKILL)
                self._exit_code = self._process.wait()
        return self._exit_code is not None

    def tell(self, number: signal.Signals) -> None:
        """Pass on a signal that does not end it."""
        if not self.has_ended:
            self._signal(number)

    def end(self, number: signal.Signals) -> None:
        """Send it, and what it has started, a signal that ends it."""
        if not self.has_ended:
            self._ended_by.add(number)
            self._signal(number)
            # What is stopped takes no other signal than SIGKILL before it goes on.
            self._signal(signal.SIGCONT)

    def end_still(self, standstill: Standstill) -> None:
        """Kill it, as it stands still, once it has told the stacks of its threads. If a signal has
        stopped it, it goes on for this moment."""
        self._standstill = standstill
        # Before its first beat it would die of this signal.
        if self.page.beats and not self.has_ended:
            size = self._stacks_size()
            signal_main_thread(self.pid, STACK_SIGNAL)
            os.kill(self.pid, signal.SIGCONT)
            self._told = self._await_stacks(size, _ANSWER_S)
        self.end(signal.SIGKILL)

    def stacks(self) -> str:
        """What its threads do now. No signal asks for that, which could interrupt what it does."""
        size = self._stacks_size()
        self.page.ask_for_stacks(wanted=True)
        told = self._await_stacks(size, _BEATS_S)
        self.page.ask_for_stacks(wanted=False)
        return told

    def close(self) -> None:
        """Let go of its files."""
        self._stacks.close()

    def failure(self) -> Failure | None:
        """How it failed; None if it has not."""
        has_failed = self.has_ended and (self._exit_code != 0 or not self.page.is_done)
        if self._standstill is None and not has_failed:
            return None
        # Not even SIGKILL ends what waits inside the kernel.
        exit_code = self._exit_code if self.has_ended else -signal.SIGKILL
        assert exit_code is not None
        try:
            report = FailureReport.read(json.loads(self._error_file.read_bytes()))
        except (OSError, ValueError):
            report = None
        ended_s = time.monotonic() if report is None else report.at_s
        # One that was sent a signal may also have ended by itself because of it.
        was_ended = -exit_code in self._ended_by or (
            exit_code >= 0 and report is None and bool(self._ended_by)
        )
        return Failure(
            self.pid,
            exit_code,
            ended_s,
            report,
            was_ended,
            self._standstill,
            self._told,
            self.page.stage,
        )

    def _stacks_size(self) -> int:
        return os.fstat(self._stacks.fileno()).st_size

    def _await_stacks(self, size: int, within_s: float) -> str:
        """What it writes behind so many bytes, once that is no longer growing."""
        deadline_s = time.monotonic() + within_s
        before, now = -1, size
        while (now == size or now != before) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            before, now = now, self._stacks_size()
        # The rank writes where this process would otherwise have read to.
        return os.pread(self._stacks.fileno(), now - size, size).decode(errors="replace")

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def started(command: Sequence[str], environment: Mapping[str, str], error_file: Path) -> Child:
    """A rank's process. Raises RrfpError if it cannot be started."""
    try:
        return Child(command, environment, error_file)
    except OSError as error:
        raise RrfpError(
            f"a rank's process cannot be started ({error}); see whether this host allows one more"
        ) from None
