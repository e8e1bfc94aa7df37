"""NIXL's agent on a thread of its own: it is not safe to be called by several.

Reads are one-sided: the process that is read from does nothing for them but keep NIXL's progress
thread. That one spins a whole core as NIXL's Python makes it, so that it is told to block instead.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

import torch

from rrfp.errors import RrfpError
from rrfp.runtime.device.device import Device
from rrfp.runtime.planes.nixl_package import nixl_api
from rrfp.runtime.planes.plane import PlaneRefusal
from rrfp.runtime.planes.slots import Slots

T = TypeVar("T")

_PROGRESS_DELAY_US = 50_000
"""What makes NIXL's progress thread block until something comes, instead of spinning."""
_EAGER_S = 0.05
"""For how long after the last thing that happened to poll without a pause: a large read goes on
only while somebody polls."""
_POLL_S = 1e-3
_START_S = 30.0
_CLOSE_S = 2.0
_NETWORK_DEVICES = "UCX_NET_DEVICES"
_making = Lock()


class ReadError(RrfpError):
    """A peer's memory cannot be read any more."""


Done = Callable[[torch.Tensor | ReadError], None]
"""Told, on the agent's thread, the memory that was read into, which is given out again afterwards;
or why there is none."""


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes of a peer's that are to be read."""

    remote: str
    """The peer's agent."""
    address: int
    device: int
    num_bytes: int
    done: Done


@dataclass(slots=True)
class _Reading:
    read: Read
    offset: int
    """Of the landing slot."""
    handle: Any


class NixlAgent:
    """One agent, with two slabs: peers read from the first, and what is read lands in the other."""

    def __init__(
        self, name: str, device: Device, lent: torch.Tensor, landing: torch.Tensor
    ) -> None:
        """Both slabs lie on the device. Raises PlaneRefusal where there is no NIXL, or none that
        starts."""
        self._name = name
        self._device = device
        self._slabs = lent, landing
        self._memory = "VRAM" if lent.is_cuda else "DRAM"
        self._work: SimpleQueue[Callable[[], None] | Read | None] = SimpleQueue()
        self._landing = Slots(landing.numel())
        self._waiting: deque[Read] = deque()
        """Reads without a landing slot."""
        self._reading: deque[_Reading] = deque()
        self._agent: Any = None
        self._registered: list[Any] = []
        self._thread = Thread(target=self._run, name="rrfp-nixl", daemon=True)
        self._thread.start()
        try:
            self.metadata: bytes = self._call(self._begin, _START_S)
        except PlaneRefusal:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise PlaneRefusal(f"NIXL does not start ({type(error).__name__}: {error})") from None

    def add(self, metadata: bytes, timeout_s: float) -> str:
        """Learn of a peer's agent; gives its name."""

        def add() -> str:
            name = self._agent.add_remote_agent(metadata)
            return name.decode() if isinstance(name, bytes) else str(name)

        return self._call(add, timeout_s)

    def read(self, read: Read) -> None:
        """Have bytes read. Any thread may call it; none waits."""
        self._work.put(read)

    def close(self) -> None:
        """End the agent and its thread; what is being read is given up."""
        self._work.put(None)
        self._thread.join(2 * _CLOSE_S)

    def _call(self, function: Callable[[], T], timeout_s: float) -> T:
        """What a function gives that runs on the agent's thread. Raises TimeoutError."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._work.put(run)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            raise TimeoutError(f"it did not answer for {timeout_s:g} s") from None

    # The thread.

    def _begin(self) -> bytes:
        self._agent = _made(self._name)
        for slab in self._slabs:
            self._registered.append(self._agent.register_memory(slab))
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def _run(self) -> None:
        with self._device.selected():
            self._serve()

    def _serve(self) -> None:
        happened_s = time.monotonic()
        while True:
            try:
                work = self._work.get(block=not self._reading)
                happened_s = time.monotonic()
            except Empty:
                now_s = time.monotonic()
                if self._poll():
                    happened_s = now_s
                time.sleep(0 if now_s - happened_s < _EAGER_S else _POLL_S)
                continue
            if work is None:
                break
            if isinstance(work, Read):
                self._waiting.append(work)
                self._post_waiting()
            else:
                work()
        self._end()

    def _post_waiting(self) -> None:
        """Begin what has a place to land."""
        agent = self._agent
        while self._waiting:
            offset = self._landing.take(self._waiting[0].num_bytes)
            if offset is None:
                return
            read = self._waiting.popleft()
            own = self._place(offset, read.num_bytes)
            try:
                handle = agent.initialize_xfer(
                    "READ",
                    agent.get_xfer_descs([own], self._memory),
                    agent.get_xfer_descs(
                        [(read.address, read.num_bytes, read.device)], self._memory
                    ),
                    read.remote,
                )
                self._reading.append(_Reading(read, offset, handle))
                if agent.transfer(handle) == "ERR":
                    raise RuntimeError("the transfer failed as it began")
            except Exception as error:  # NIXL's own errors have no common base
                self._landing.release(offset)
                if self._reading and self._reading[-1].read is read:
                    _release(self._reading.pop())
                read.done(_failed(error))

    def _place(self, offset: int, num_bytes: int) -> tuple[int, int, int]:
        landing = self._slabs[1]
        return landing.data_ptr() + offset, num_bytes, max(landing.get_device(), 0)

    def _poll(self) -> bool:
        """Finish what has ended; tells whether there was any."""
        ended = []
        for reading in self._reading:
            outcome = self._outcome(reading)
            if outcome is not None:
                ended.append((reading, outcome))
        for reading, outcome in ended:
            self._reading.remove(reading)
            reading.read.done(outcome)
            self._landing.release(reading.offset)
        if ended:
            self._post_waiting()
        return bool(ended)

    def _outcome(self, reading: _Reading) -> torch.Tensor | ReadError | None:
        """What came of a read; None while it is under way."""
        try:
            state = self._agent.check_xfer_state(reading.handle)
            if state == "PROC":
                return None
            if state == "DONE":
                reading.handle.release()
                return self._slabs[1][reading.offset : reading.offset + reading.read.num_bytes]
            raise RuntimeError("the transfer failed")
        except Exception as error:  # as above
            _release(reading)
            return _failed(error)

    def _end(self) -> None:
        for reading in self._reading:
            _release(reading)
        self._reading.clear()
        for each in self._registered:
            with suppress(Exception):
                self._agent.deregister_memory(each)
        self._agent = None


def keep_to_this_host() -> None:
    """Have UCX, by which NIXL reads, listen at loopback alone, and not at every interface; what the
    user has set stays. For a process whose peers are all on its host, before its first agent."""
    os.environ.setdefault(_NETWORK_DEVICES, "lo")


def _made(name: str) -> Any:
    """NIXL's own agent. Its class reads its bindings from its module, and sets the delay in them to
    0 by itself."""
    try:
        api = nixl_api()
    except ImportError as error:
        raise PlaneRefusal(str(error)) from None
    with _making:
        bindings = api.nixlBind
        api.nixlBind = _BlockingBindings(bindings)
        try:
            return api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=True))
        finally:
            api.nixlBind = bindings


class _BlockingBindings:
    """NIXL's bindings, with a progress thread that blocks."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)

    def nixlAgent(self, name: str, config: Any) -> Any:  # noqa: N802 - their name
        config.pthrDelay = _PROGRESS_DELAY_US
        return self._bindings.nixlAgent(name, config)


def _release(reading: _Reading) -> None:
    """Let NIXL forget a read that came to nothing."""
    with suppress(Exception):
        reading.handle.release()


def _failed(error: Exception) -> ReadError:
    return ReadError(f"{type(error).__name__}: {error}")
