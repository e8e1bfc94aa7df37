"""A process that plans: its parent's end, and its own.

The parent sends pickled requests; the process answers in lines of JSON. It is a Python process of
its own, started afresh, so that it shares no lock, no collector and no torch with the one that
trains. It ends when its parent closes it, and when its parent is gone.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fcntl import F_GETFL, F_SETFL, fcntl
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import rrfp
from rrfp.errors import RrfpError, UsageError
from rrfp.planning.order_search import Known, Plan, plan_entry
from rrfp.system import num_cores

_PIPE_BYTES = 2**20
"""Of the pipe with requests: a request is some ten thousand, and must never wait for a reader."""
_SET_PIPE_SIZE = 1031
"""Linux's F_SETPIPE_SZ, which Python names only where the platform has it."""

_LENGTH = struct.Struct("<Q")
_CLOSE_S = 5.0
_LOOK_S = 1.0
"""How often an idle process looks whether its parent is there."""


class PlannerProcess:
    """A process that runs the function `main` of a module."""

    def __init__(self, module: str, niceness: int = 0) -> None:
        """Start it, with a lower priority by `niceness`. Raises RrfpError if it cannot start."""
        root = str(Path(rrfp.__file__).parent.parent)
        program = f"import sys; sys.path[:] = {[root, *sys.path]!r}; import {module} as m; m.main()"
        # One thread: a search is one, and libraries would start one a core.
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
        _never_wait(self._requests)
        _never_wait(self._answers)
        self._read = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it has ended by itself, or was killed."""
        return self._process.poll() is not None

    def send(self, request: object, *, waits: bool = False) -> bool:
        """Send a request; False if the process takes none now, or `waits` and it has ended. It is
        of no more use then."""
        message = pickle.dumps(request)
        data = _LENGTH.pack(len(message)) + message
        while data:
            try:
                data = data[os.write(self._requests, data) :]
            except BlockingIOError:
                if not waits:
                    return False
                select.select([], [self._requests], [], _LOOK_S)
            except OSError:
                return False
        return True

    def answers(self) -> list[dict[str, Any]]:
        """What it has answered since the last call, without waiting."""
        with suppress(BlockingIOError):
            while data := os.read(self._answers, 65536):
                self._read += data
        *lines, self._read = self._read.split(b"\n")
        return [json.loads(line) for line in lines]

    def wait(self, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """The next answers, at least one. Raises RrfpError if the process ends without one, and
        if none has come in time."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not (told := self.answers()):
            if self._process.poll() is not None and not (told := self.answers()):
                raise RrfpError(
                    f"the planner's process ended with {self._process.returncode} and no plan; "
                    "what it printed above says why"
                )
            if told:
                break
            if until_s is not None and time.monotonic() > until_s:
                raise RrfpError(
                    f"the planner's process {self.pid} has not answered in {timeout_s:g} s; see "
                    "whether it is stopped, or plan with fewer simulations"
                )
            select.select([self._answers], [], [], _LOOK_S)
        return told

    def kill(self) -> None:
        """End it while another thread waits for it."""
        self._process.kill()

    def close(self) -> None:
        """End it."""
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()
        self.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)


class Requests:
    """The requests that reach a planner's process, from its parent alone."""

    def __init__(self) -> None:
        """Settle in: a lower priority, and no end by a Ctrl-C that is meant for the parent."""
        self._parent, niceness = map(int, sys.argv[1:3])
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if niceness:
            with suppress(OSError):  # it then competes with the ranks
                os.nice(niceness)
        _never_wait(0)
        self._read = b""
        self._has_ended = False

    def __iter__(self) -> Iterator[Any]:
        """All requests, one by one, until the parent is gone."""
        while not self.is_over() or self.has_more:
            if self.has_more:
                yield self._next()
            else:
                select.select([0], [], [], _LOOK_S)

    def is_over(self) -> bool:
        """Whether the parent has closed this process, without waiting. Ends it if the parent is
        gone."""
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
        """Whether another request has come, as far as `is_over` has looked."""
        return len(self._read) > _LENGTH.size and self._end <= len(self._read)

    def _next(self) -> Any:
        end = self._end
        request = pickle.loads(self._read[_LENGTH.size : end])
        self._read = self._read[end:]
        return request

    @property
    def _end(self) -> int:
        """Where the first request that was read ends."""
        if len(self._read) < _LENGTH.size:
            return _LENGTH.size
        return _LENGTH.size + int(_LENGTH.unpack_from(self._read)[0])


def answer(told: dict[str, Any]) -> None:
    """Tell the parent something."""
    try:
        os.write(1, f"{json.dumps(told)}\n".encode())
    except OSError:
        sys.exit()


def _never_wait(descriptor: int) -> None:
    fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) | os.O_NONBLOCK)


# Plans of many steps, by as many processes as there are cores.


_LEAST_SIMULATIONS = 500
"""Of all plans together; for fewer, starting a process takes longer than it saves."""


def plan_all(
    steps: Sequence[Known],
    num_simulations: int,
    finished: Callable[[], None] = lambda: None,
    num_processes: int | None = None,
) -> list[Plan]:
    """A plan for each step, whatever the number of processes (by default, one a core). `finished`
    is called after each. Raises as `plan_entry` does."""
    num_processes = min(num_processes or num_cores(), len(steps))
    if num_processes < 2 or num_simulations * len(steps) < _LEAST_SIMULATIONS:
        plans = []
        for known in steps:
            plans.append(plan_entry(known, num_simulations))
            finished()
        return plans
    processes = [PlannerProcess("rrfp.planning.order_search_main") for _ in range(num_processes)]
    free: SimpleQueue[PlannerProcess] = SimpleQueue()
    for process in processes:
        free.put(process)

    def plan(known: Known) -> Plan:
        process = free.get()
        try:
            found = _plan_in(process, known, num_simulations)
        finally:
            # Whoever waits for a process must get one, if only to see that it has failed.
            free.put(process)
        finished()
        return found

    try:
        with ThreadPoolExecutor(num_processes) as pool:
            futures = [pool.submit(plan, known) for known in steps]
            try:
                return [future.result() for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                # Those that plan end at once, and so do the threads that wait for them.
                for process in processes:
                    process.kill()
                raise
    finally:
        for process in processes:
            process.close()


def _plan_in(process: PlannerProcess, known: Known, num_simulations: int) -> Plan:
    process.send((known, num_simulations), waits=True)
    told, *_ = process.wait()
    if "error" in told:
        error = UsageError if told["kind"] == UsageError.__name__ else RrfpError
        raise error(told["error"])
    return Plan(tuple(told["order"]), told["candidates"], told["predicted_ns"], told["pyramid_ns"])
