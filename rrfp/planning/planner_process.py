"""A separate process for searches: the parent's end, and the process' own.

The parent sends pickled requests, and the process answers in lines of JSON. It is a fresh Python
process that shares no lock, no garbage collector and no torch with the one that trains. It ends
when its parent closes it, and when its parent is gone.
"""

import json
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from fcntl import F_GETFL, F_SETFL, fcntl
from pathlib import Path
from typing import Any

import rrfp
from rrfp.errors import RrfpError

_PIPE_BYTES = 2**20
"""Size of the pipe with requests: a request has some 10,000 bytes, and sending must never block."""
_SET_PIPE_SIZE = 1031
"""Linux's F_SETPIPE_SZ, which Python names only where the platform has it."""

_LENGTH = struct.Struct("<Q")
_CLOSE_S = 5.0
_POLL_S = 1.0
"""How often an idle process checks that its parent is there."""


class PlannerProcess:
    """The parent's end of a process that runs a function of `rrfp.planning.process_tasks`."""

    def __init__(self, task: str, niceness: int = 0) -> None:
        """Start the process on the function named `task`, with a priority that is lower by
        `niceness`. Raises RrfpError if it cannot start."""
        root = str(Path(rrfp.__file__).parent.parent)
        program = (
            f"import sys; sys.path[:] = {[root, *sys.path]!r}; "
            f"from rrfp.planning import process_tasks; process_tasks.{task}()"
        )
        # A search has one thread; libraries would start one per core.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                # Isolated, so that it runs no start-up code that is meant for the job's processes.
                [sys.executable, "-I", "-c", program, str(os.getpid()), str(niceness)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
        except OSError as error:
            raise RrfpError(f"the planner's process cannot start: {error.strerror}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin.fileno(), self._process.stdout.fileno()
        with suppress(OSError):  # It works with a smaller pipe, if a request fits.
            fcntl(self._requests, _SET_PIPE_SIZE, _PIPE_BYTES)
        _set_nonblocking(self._requests)
        _set_nonblocking(self._answers)
        self._read = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """True if it has ended by itself or was killed."""
        return self._process.poll() is not None

    def send(self, request: object, *, waits: bool = False) -> bool:
        """Send a request, pickled. With `waits`, wait until the pipe has space for it; without,
        return False if the pipe is full. Also returns False if the process has ended. After False
        the process is unusable."""
        message = pickle.dumps(request)
        data = _LENGTH.pack(len(message)) + message
        while data:
            try:
                data = data[os.write(self._requests, data) :]
            except BlockingIOError:
                if not waits:
                    return False
                select.select([], [self._requests], [], _POLL_S)
            except OSError:
                return False
        return True

    def answers(self) -> list[dict[str, Any]]:
        """Return the complete answers since the last call, parsed JSON objects, without waiting."""
        with suppress(BlockingIOError):
            while data := os.read(self._answers, 65536):
                self._read += data
        *lines, self._read = self._read.split(b"\n")
        return [json.loads(line) for line in lines]

    def wait(self, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """Wait for the next answers and return them, at least one. Raises RrfpError if the process
        ends without one, and if none has come in time."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not (found := self.answers()):
            if self._process.poll() is not None and not (found := self.answers()):
                raise RrfpError(
                    f"the planner's process ended with {self._process.returncode} and no plan; "
                    "what it printed above says why"
                )
            if found:
                break
            if until_s is not None and time.monotonic() > until_s:
                raise RrfpError(
                    f"the planner's process {self.pid} has not answered in {timeout_s:g} s; see "
                    "whether it is stopped, or plan with fewer simulations"
                )
            select.select([self._answers], [], [], _POLL_S)
        return found

    def kill(self) -> None:
        """Kill the process, while another thread may be waiting for it. Its pipes remain open."""
        self._process.kill()

    def close(self) -> None:
        """Close the pipes, kill the process, and wait for its end for up to 5 s."""
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()
        self.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)


class Requests:
    """The process' own end: iterates over the requests of its parent until the parent is gone."""

    def __init__(self) -> None:
        """Lower the priority of this process, and make it ignore Ctrl-C, which is for the
        parent."""
        self._parent, niceness = map(int, sys.argv[1:3])
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if niceness:
            with suppress(OSError):  # it then competes with the ranks
                os.nice(niceness)
        _set_nonblocking(0)
        self._read = b""
        self._has_ended = False

    def __iter__(self) -> Iterator[Any]:
        while not self.is_over() or self.has_more:
            if self.has_more:
                yield self._next()
            else:
                select.select([0], [], [], _POLL_S)

    def is_over(self) -> bool:
        """Read pending requests without waiting. Returns True if the parent has closed this
        process; ends the process if the parent is gone."""
        if os.getppid() != self._parent:
            # Others may still hold the pipe open.
            sys.exit()
        with suppress(BlockingIOError):
            while data := os.read(0, _PIPE_BYTES):
                self._read += data
            self._has_ended = True
        return self._has_ended

    @property
    def has_more(self) -> bool:
        """True if `is_over` has read another complete request."""
        return len(self._read) > _LENGTH.size and self._end <= len(self._read)

    def _next(self) -> Any:
        """Return the first request in `_read`, which must be complete, and remove it."""
        end = self._end
        request = pickle.loads(self._read[_LENGTH.size : end])
        self._read = self._read[end:]
        return request

    @property
    def _end(self) -> int:
        """The offset at which the first request in `_read` ends, from the length at its start."""
        return _LENGTH.size + int(_LENGTH.unpack_from(self._read)[0])


def answer(fields: dict[str, object]) -> None:
    """Write an answer to standard output, which the parent reads. Exits if the parent is gone."""
    try:
        os.write(1, f"{json.dumps(fields)}\n".encode())
    except OSError:
        sys.exit()


def _set_nonblocking(descriptor: int) -> None:
    """Let reads and writes of a file descriptor raise BlockingIOError instead of waiting."""
    fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) | os.O_NONBLOCK)
