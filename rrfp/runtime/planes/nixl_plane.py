"""One-sided reads by NVIDIA's NIXL: between hosts, over whatever fabric UCX finds.

Both slabs are registered once. A read lands in this rank's landing slab, and is copied from there
to the tensors: memory that comes and goes would have to be registered each time.
"""

import base64
import binascii
import logging
import secrets
import time
from contextlib import ExitStack
from threading import Event

import torch

from rrfp.errors import RrfpError, first_line
from rrfp.runtime.device.cuda_runtime import CudaRuntime, CudaRuntimeError
from rrfp.runtime.device.device import Device
from rrfp.runtime.planes.names import TransportName
from rrfp.runtime.planes.nixl_agent import NixlAgent, Read, ReadError
from rrfp.runtime.planes.packing import copied, packed_bytes, unpacked
from rrfp.runtime.planes.plane import (
    TRIAL_BYTES,
    WINDOW_BYTES,
    Offer,
    PlaneRefusal,
    Pull,
    Pulled,
    Puller,
    Release,
    beyond_slab,
)
from rrfp.runtime.protocols import PeerLostError

_TRIAL_S = 2.0
"""A trial of a slow link ends then: every link's comes before a run can begin."""

_log = logging.getLogger(__name__)


class NixlPlane:
    """Implements `rrfp.runtime.planes.plane.Plane`."""

    name = TransportName.NIXL
    is_inline = False
    lends = False

    def __init__(self, device: Device, slab_bytes: int) -> None:
        """Raises PlaneRefusal where there is no NIXL, or none that starts."""
        self.device = device
        self.reserved_bytes = 2 * slab_bytes
        self._on_exit = ExitStack()
        try:
            self.slab, landing = self._memory(slab_bytes), self._memory(slab_bytes)
            self._agent = NixlAgent(f"rrfp-{secrets.token_hex(8)}", device, self.slab, landing)
        except PlaneRefusal:
            self._on_exit.close()
            raise

    def _memory(self, num_bytes: int) -> torch.Tensor:
        """Memory to be registered. Of a GPU it is none of torch's: reads of that are slow where
        its segments expand (https://github.com/ai-dynamo/nixl/issues/1754)."""
        device = self.device
        if device.torch_device.type != "cuda":
            return device.empty([num_bytes], torch.uint8, device.compute_stream())
        with device.selected():
            try:
                cuda = CudaRuntime(device.torch_device.index or 0)
                address = cuda.allocate(num_bytes)
            except CudaRuntimeError as error:
                raise PlaneRefusal(f"CUDA gives no outbox for NIXL ({error})") from None
        self._on_exit.callback(self._free, cuda, address)
        return device.memory_at(address, num_bytes)

    def _free(self, cuda: CudaRuntime, address: int) -> None:
        with self.device.selected():
            try:
                cuda.free(address)
            except CudaRuntimeError as error:
                _log.warning("memory that NIXL read from was not freed: %s", error)

    def offer(self) -> Offer:
        return Offer(
            self.name,
            {
                "agent": base64.b64encode(self._agent.metadata).decode(),
                "address": self.slab.data_ptr(),
                "device": max(self.slab.get_device(), 0),
                "bytes": self.slab.numel(),
            },
        )

    def attach(self, offer: Offer, peer: int, timeout_s: float) -> tuple[Puller, float | None]:
        agent = offer.values.get("agent")
        place = [offer.values.get(name) for name in ("address", "device", "bytes")]
        numbers = [number for number in place if isinstance(number, int)]
        if not isinstance(agent, str) or len(numbers) != len(place):
            raise PlaneRefusal(f"rank {peer} sent no agent of NIXL's")
        if numbers[2] > self.slab.numel():
            # A message that fits there might have no place to land here.
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
        puller = NixlPuller(self._agent, self.device, remote, peer, *numbers)
        return puller, puller.measure(deadline_s)

    def close(self, *, are_detached: bool) -> None:
        self._agent.close()
        del self.slab
        if are_detached:
            self._on_exit.close()


class NixlPuller:
    """Pulls on the agent's thread. Implements `rrfp.runtime.planes.plane.Puller`."""

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
        """The peer's slab lies at this address of its own, on its device of this number."""
        self._agent = agent
        self._device = device
        self._stream = device.new_stream()
        self._remote = remote
        self._peer = peer
        self._address = address
        self._remote_device = remote_device
        self._slab_bytes = slab_bytes

    def pull(self, pull: Pull, told: Pulled, release: Release) -> None:
        num_bytes = packed_bytes(pull.forms)
        if pull.offset + num_bytes > self._slab_bytes:
            told(pull, beyond_slab(self._peer, pull, self._slab_bytes))
            return

        def done(landed: torch.Tensor | ReadError) -> None:
            if isinstance(landed, ReadError):
                told(pull, self._loss(landed))
                return
            try:
                told(pull, copied(unpacked(landed, pull.forms), self._device, self._stream))
            except Exception as error:  # the agent's thread serves other links, too
                told(pull, self._not_taken(pull, error))

        place = self._address + pull.offset
        self._agent.read(Read(self._remote, place, self._remote_device, num_bytes, done))

    def _loss(self, error: ReadError) -> PeerLostError:
        return PeerLostError(
            f"rank {self._peer} was lost while its outbox was read ({error}); see its own output"
            " for the cause"
        )

    def _not_taken(self, pull: Pull, error: Exception) -> RrfpError:
        told = RrfpError(
            f"what rank {self._peer} sent for {pull.task} was read and cannot be taken over"
            f" ({type(error).__name__}: {first_line(str(error))})"
        )
        told.__cause__ = error
        return told

    def measure(self, deadline_s: float) -> float:
        """Read as much as a trial takes, or for a while; gives GB/s. Raises PlaneRefusal."""
        window = min(WINDOW_BYTES, self._slab_bytes)
        self._read(window, deadline_s)
        begun_s, num_bytes, taken_s = time.perf_counter(), 0, 0.0
        while num_bytes < TRIAL_BYTES and taken_s < _TRIAL_S:
            self._read(window, deadline_s)
            num_bytes += window
            taken_s = time.perf_counter() - begun_s
        return num_bytes / taken_s / 1e9

    def _read(self, num_bytes: int, deadline_s: float) -> None:
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
        # Nothing is pulled any more; NIXL forgets its peers with the agent.
        pass
