"""The plane of NVIDIA's NIXL: one-sided reads between hosts, over any fabric that UCX finds.

NIXL's agent runs on a thread of its own, because several threads must not call it. The process that
is read from only runs NIXL's progress thread. As NIXL's Python configures it, that thread spins on
a whole core; here it blocks instead.

Two slabs are registered once per rank. A read lands in the rank's landing slab, and is copied from
there to the tensors, because tensors of their own would have to be registered each time.
"""

import base64
import binascii
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, TypeVar

import torch

from rrfp.errors import RrfpError, first_line
from rrfp.runtime.device.cuda_runtime import CudaRuntime, CudaRuntimeError
from rrfp.runtime.device.interface import Device
from rrfp.runtime.planes.codec import copied, packed_bytes, unpacked
from rrfp.runtime.planes.outbox import Outbox, Slots
from rrfp.runtime.planes.plane import (
    TRIAL_BYTES,
    WINDOW_BYTES,
    Attachment,
    Completions,
    Descriptor,
    Fetched,
    Offer,
    PlaneFailed,
    PlaneRefusal,
    Ticket,
    beyond_slab,
)
from rrfp.runtime.planes.registry import TransportName, nixl_api
from rrfp.runtime.protocols import PeerLostError

T = TypeVar("T")

_PROGRESS_DELAY_US = 50_000
"""Delay with which NIXL's progress thread blocks until something arrives, instead of spinning."""
_EAGER_S = 0.05
"""Time after the last progress during which it polls without a pause: a large read continues only
while the agent is polled."""
_POLL_S = 1e-3
_START_S = 30.0
_CLOSE_S = 4.0
_making = Lock()


class ReadError(RrfpError):
    """Reading a peer's memory failed."""


Done = Callable[[torch.Tensor | ReadError], None]
"""Callback on the agent's thread, with the memory that was read into, which is reused after the
call, or with the error."""


@dataclass(frozen=True, slots=True)
class Read:
    """A read of a peer's memory."""

    remote: str
    """Name of the peer's agent."""
    address: int
    device: int
    num_bytes: int
    done: Done


@dataclass(slots=True)
class _Reading:
    read: Read
    offset: int
    """Offset of the landing slot."""
    handle: Any


class NixlAgent:
    """One agent with two slabs: peers read from the first, and this rank reads into the second."""

    def __init__(
        self, name: str, device: Device, lent: torch.Tensor, landing: torch.Tensor
    ) -> None:
        """Both slabs lie on the device."""
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
        self.metadata = b""
        """NIXL's description of this agent, by which peers connect to it, once it has started."""

    def start(self) -> None:
        """Start NIXL on the agent's thread. Raises PlaneRefusal if NIXL is not installed, or does
        not start or answer within 30 s; `close` must follow then, too."""
        self._thread.start()
        try:
            self.metadata = self._call(self._begin, _START_S)
        except PlaneRefusal:
            raise
        except Exception as error:
            raise PlaneRefusal(f"NIXL does not start ({type(error).__name__}: {error})") from None

    def add(self, metadata: bytes, timeout_s: float) -> str:
        """Connect the agent to a peer's agent by its metadata, and return the name of that agent.
        Raises NIXL's errors, and TimeoutError."""

        def add() -> str:
            name = self._agent.add_remote_agent(metadata)
            return name.decode() if isinstance(name, bytes) else str(name)

        return self._call(add, timeout_s)

    def read(self, read: Read) -> None:
        """Queue a read for the agent's thread, which calls `Read.done`. Any thread may call it;
        none waits."""
        self._work.put(read)

    def close(self) -> bool:
        """End the agent and its thread, and drop the reads that are waiting or in flight, whose
        `done` is not called. Returns False if the thread has not ended in 4 s: it may still use the
        slabs then."""
        self._work.put(None)
        self._thread.join(_CLOSE_S)
        return not self._thread.is_alive()

    def _call(self, function: Callable[[], T], timeout_s: float) -> T:
        """Run a function on the agent's thread, and return its result. Raises the function's
        exception, and TimeoutError."""
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
        """Make the agent and register both slabs, on the agent's thread; return the agent's
        metadata."""
        self._agent = _make_agent(self._name)
        for slab in self._slabs:
            self._registered.append(self._agent.register_memory(slab))
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def _run(self) -> None:
        """Serve the queue on the agent's thread with the device selected, until `close`."""
        with self._device.selected():
            self._serve()

    def _serve(self) -> None:
        """Run queued calls and reads in their order, and poll the reads in flight, until `close`;
        then cancel those reads."""
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
        """Begin the waiting reads, in their order, for which there is a landing slot. A read that
        cannot begin is done with its error."""
        agent = self._agent
        while self._waiting:
            offset = self._landing.allocate(self._waiting[0].num_bytes)
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
        """Return the address, size and device of a landing slot as NIXL describes memory."""
        landing = self._slabs[1]
        return landing.data_ptr() + offset, num_bytes, max(landing.get_device(), 0)

    def _poll(self) -> bool:
        """Finish the reads that have ended: pass each result to `done`, free its landing slot, and
        begin waiting reads; return whether there were any."""
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
        """Return the memory that a read has filled, or its error, and release its handle; None
        while it is in flight. Never raises."""
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
        """Cancel the reads in flight, without calling their `done`, and deregister the slabs.
        Errors are ignored."""
        for reading in self._reading:
            _release(reading)
        self._reading.clear()
        for each in self._registered:
            with suppress(Exception):
                self._agent.deregister_memory(each)
        self._agent = None


def _make_agent(name: str) -> Any:
    """Make NIXL's own agent, with a progress thread that blocks. Its class reads its bindings from
    its module, and sets their delay to 0; so the module has other bindings meanwhile. Raises
    PlaneRefusal without NIXL."""
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
        """Make an agent by the real bindings, with a delay of its progress thread that makes it
        block."""
        config.pthrDelay = _PROGRESS_DELAY_US
        return self._bindings.nixlAgent(name, config)


def _release(reading: _Reading) -> None:
    """Release the handle of a read; errors are ignored."""
    with suppress(Exception):
        reading.handle.release()


def _failed(error: Exception) -> ReadError:
    """Make, but not raise, the error of a read from NIXL's error."""
    return ReadError(f"{type(error).__name__}: {error}")


_TRIAL_S = 2.0
"""Longest trial of a slow link: the run begins only after the trials of all links."""

_log = logging.getLogger(__name__)


class NixlPlane:
    """The plane by which receivers read a rank's memory through NIXL, over any fabric. Implements
    `rrfp.runtime.planes.plane.Plane`."""

    name = TransportName.NIXL
    is_carried = False

    def __init__(self, device: Device, slab_bytes: int) -> None:
        """Raises PlaneRefusal if there is no memory, or if NIXL is not installed or does not
        start."""
        self.device = device
        self.reserved_bytes = 2 * slab_bytes
        self._on_exit = ExitStack()
        try:
            self.slab, landing = self._memory(slab_bytes), self._memory(slab_bytes)
        except PlaneRefusal:
            self._on_exit.close()
            raise
        self._agent = NixlAgent(f"rrfp-{secrets.token_hex(8)}", device, self.slab, landing)
        try:
            self._agent.start()
        except PlaneRefusal:
            self.close(are_detached=True)
            raise

    def _memory(self, num_bytes: int) -> torch.Tensor:
        """Allocate memory to be registered. On a GPU CUDA allocates it, not torch: reads of torch's
        expandable segments are slow (https://github.com/ai-dynamo/nixl/issues/1754). Raises
        PlaneRefusal if CUDA or torch gives none."""
        device = self.device
        try:
            if device.torch_device.type != "cuda":
                return device.empty([num_bytes], torch.uint8, device.compute_stream())
            with device.selected():
                cuda = CudaRuntime(device.torch_device.index or 0)
                address = cuda.allocate(num_bytes)
            self._on_exit.callback(self._free, cuda, address)
            return device.memory_at(address, num_bytes)
        except CudaRuntimeError as error:
            raise PlaneRefusal(f"CUDA gives no outbox for NIXL ({error})") from None
        except RuntimeError as error:  # torch's
            raise PlaneRefusal(
                f"torch gives no outbox for NIXL ({first_line(str(error))})"
            ) from None

    def _free(self, cuda: CudaRuntime, address: int) -> None:
        """Free GPU memory of the plane; a failure is logged."""
        with self.device.selected():
            try:
                cuda.free(address)
            except CudaRuntimeError as error:
                _log.warning("memory that NIXL read from was not freed: %s", error)

    def offer(self) -> Offer:
        """Offer the slab by its address, size and device, with the agent's metadata."""
        return Offer(
            self.name,
            {
                "agent": base64.b64encode(self._agent.metadata).decode(),
                "address": self.slab.data_ptr(),
                "device": max(self.slab.get_device(), 0),
                "bytes": self.slab.numel(),
            },
        )

    def attach(self, offer: Offer, peer: int, timeout_s: float) -> Attachment:
        """Connect this rank's agent to the peer's, and return a fetcher with the measured speed.
        Raises PlaneRefusal for an invalid offer, a slab that is empty or larger than this rank's,
        or a peer that NIXL does not reach or read in time."""
        agent = offer.values.get("agent")
        place = [offer.values.get(name) for name in ("address", "device", "bytes")]
        numbers = [number for number in place if isinstance(number, int)]
        if not isinstance(agent, str) or len(numbers) != len(place):
            raise PlaneRefusal(f"rank {peer} sent no agent of NIXL's")
        if numbers[2] < 1:
            raise PlaneRefusal(f"rank {peer} sent an outbox of {numbers[2]} bytes")
        if numbers[2] > self.slab.numel():
            # A message that fits there might not fit into this rank's landing slab.
            raise PlaneRefusal(
                f"rank {peer} has an outbox of {numbers[2]} bytes and its receiver one of"
                f" {self.slab.numel()}; give all ranks the same outbox_mb"
            )
        deadline_s = time.monotonic() + timeout_s
        try:
            remote = self._agent.add(base64.b64decode(agent, validate=True), timeout_s)
        except binascii.Error:
            raise PlaneRefusal(f"the agent of rank {peer} cannot be read") from None
        except Exception as error:  # NIXL's own errors have no common base
            raise PlaneRefusal(
                f"NIXL does not reach rank {peer} ({type(error).__name__}: {error})"
            ) from None
        address, remote_device, slab_bytes = numbers
        fetcher = NixlFetcher(
            self._agent, self.device, remote, peer, address, remote_device, slab_bytes
        )
        return Attachment(fetcher, fetcher.measure(deadline_s))

    def stager(self, answer: Offer | None, peer: int) -> Outbox:
        """Make an outbox in the slab that peers read from."""
        return Outbox(self.name, self.device, self.slab)

    def close(self, *, are_detached: bool) -> None:
        """End the agent, and free GPU memory if it has ended and all peers have detached; otherwise
        the memory is freed with this process."""
        has_ended = self._agent.close()
        del self.slab
        if has_ended and are_detached:
            self._on_exit.close()


class NixlFetcher:
    """Fetches on the agent's thread. Implements `rrfp.runtime.planes.plane.Fetcher`."""

    def __init__(
        self,
        agent: NixlAgent,
        device: Device,
        remote: str,
        peer: int,
        address: int,
        remote_device: int,
        slab_bytes: int,
    ) -> None:
        """`address` and `remote_device` are those of the peer's slab, in its process."""
        self._agent = agent
        self._device = device
        self._stream = device.new_stream()
        self._remote = remote
        self._peer = peer
        self._address = address
        self._remote_device = remote_device
        self._slab_bytes = slab_bytes

    def fetch(self, descriptor: Descriptor, ticket: Ticket, completions: Completions) -> None:
        """Queue a read of a message's slot; the agent's thread copies the tensors out of the
        landing slab, and completes. Completes with `PlaneFailed` beyond the slab's end, or if the
        read or the copy fails."""
        num_bytes = packed_bytes(descriptor.forms)
        if descriptor.offset + num_bytes > self._slab_bytes:
            error = beyond_slab(self._peer, ticket, self._slab_bytes)
            completions.put(PlaneFailed(error))
            return

        def done(landed: torch.Tensor | ReadError) -> None:
            if isinstance(landed, ReadError):
                completions.put(PlaneFailed(self._loss(landed)))
                return
            try:
                tensors = copied(unpacked(landed, descriptor.forms), self._device, self._stream)
            except Exception as error:  # the agent's thread serves other links, too
                completions.put(PlaneFailed(self._not_copied(ticket, error)))
            else:
                completions.put(Fetched(ticket, tensors))

        address = self._address + descriptor.offset
        self._agent.read(Read(self._remote, address, self._remote_device, num_bytes, done))

    def _loss(self, error: ReadError) -> PeerLostError:
        """Make, but not raise, the error for a peer whose memory cannot be read."""
        return PeerLostError(
            f"rank {self._peer} was lost while its outbox was read ({error}); see its own output"
            " for the cause"
        )

    def _not_copied(self, ticket: Ticket, error: Exception) -> RrfpError:
        """Make, but not raise, the error for tensors that were read but could not be copied."""
        failure = RrfpError(
            f"what rank {self._peer} sent for {ticket.task} was read and cannot be taken over"
            f" ({type(error).__name__}: {first_line(str(error))})"
        )
        failure.__cause__ = error
        return failure

    def measure(self, deadline_s: float) -> float:
        """Read 64 MiB from the peer's slab, or for 2 s, in windows of up to 4 MiB, after one read
        to warm up, and return the speed in GB/s. Raises PlaneRefusal if a read fails or the
        deadline passes."""
        window = min(WINDOW_BYTES, self._slab_bytes)
        self._read(window, deadline_s)
        begun_s, num_bytes, taken_s = time.perf_counter(), 0, 0.0
        while num_bytes < TRIAL_BYTES and taken_s < _TRIAL_S:
            self._read(window, deadline_s)
            num_bytes += window
            taken_s = time.perf_counter() - begun_s
        return num_bytes / taken_s / 1e9

    def _read(self, num_bytes: int, deadline_s: float) -> None:
        """Read the start of the peer's slab once, and wait for it. Raises PlaneRefusal if it fails
        or the deadline passes."""
        landed: list[torch.Tensor | ReadError] = []
        is_done = Event()

        def done(outcome: torch.Tensor | ReadError) -> None:
            landed.append(outcome)
            is_done.set()

        self._agent.read(Read(self._remote, self._address, self._remote_device, num_bytes, done))
        if not is_done.wait(max(deadline_s - time.monotonic(), 0)):
            raise PlaneRefusal(f"NIXL read nothing from rank {self._peer} in time")
        if isinstance(landed[0], ReadError):
            raise PlaneRefusal(f"NIXL reads nothing from rank {self._peer} ({landed[0]})")

    def detach(self, *, waits: bool = True) -> None:
        """Do nothing: nothing is being fetched, and NIXL forgets its peers with the agent."""
