"""CUDA IPC: device memory that the processes of a host share, for tensors on its GPUs.

The slab is allocated by CUDA itself, not by torch. A peer opens it by its handle and copies out of
it on a stream of its own GPU, the same or another; it closes it before it says farewell.
"""

import logging
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from rrfp.errors import first_line
from rrfp.runtime.device.cuda_runtime import CudaRuntime, CudaRuntimeError
from rrfp.runtime.device.interface import Device
from rrfp.runtime.planes.outbox import Outbox
from rrfp.runtime.planes.plane import Attachment, MappedFetcher, Offer, PlaneRefusal
from rrfp.runtime.planes.registry import TransportName

_PID_NAMESPACE = Path("/proc/self/ns/pid")

_log = logging.getLogger(__name__)


class CudaIpcPlane:
    """The plane whose slots are GPU memory that the processes of one host share by CUDA IPC.
    Implements `rrfp.runtime.planes.plane.Plane`."""

    name = TransportName.CUDA_IPC
    is_carried = False

    def __init__(self, device: Device, slab_bytes: int) -> None:
        """Raises PlaneRefusal if CUDA is missing, has too little memory, or cannot export it."""
        self.device = device
        try:
            self._pid_namespace = str(_PID_NAMESPACE.readlink())
        except OSError as error:
            raise PlaneRefusal(f"the PID namespace is unknown ({error}); mount /proc") from None
        with device.selected():
            try:
                self._cuda = CudaRuntime(device.torch_device.index or 0)
                self._gpu = self._cuda.name
            except CudaRuntimeError as error:
                raise PlaneRefusal(str(error)) from None
            try:
                self._address = self._cuda.allocate(slab_bytes)
            except CudaRuntimeError as error:
                raise PlaneRefusal(
                    f"CUDA gives no outbox of {slab_bytes} bytes ({error})"
                ) from None
            try:
                self._handle = self._cuda.export(self._address)
            except CudaRuntimeError as error:
                self._free()
                raise PlaneRefusal(f"CUDA exports no memory ({error})") from None
        try:
            self.slab = device.memory_at(self._address, slab_bytes)
        except RuntimeError as error:  # torch's
            self._free()
            raise PlaneRefusal(
                f"torch does not use CUDA's memory ({first_line(str(error))})"
            ) from None
        self.reserved_bytes = slab_bytes

    def offer(self) -> Offer:
        """Offer the slab by its IPC handle and size, with this rank's GPU and PID namespace."""
        return Offer(
            self.name,
            {
                "handle": self._handle.hex(),
                "bytes": self.slab.numel(),
                "gpu": self._gpu,
                "pid_namespace": self._pid_namespace,
            },
        )

    def attach(self, offer: Offer, peer: int, timeout_s: float) -> Attachment:
        """Map the peer's slab, and return its fetcher with the measured speed. Raises PlaneRefusal
        for an invalid offer, another PID namespace, no peer access between the GPUs, or memory that
        cannot be opened or copied."""
        octets, num_bytes = offer.values.get("handle"), offer.values.get("bytes")
        gpu, namespace = offer.values.get("gpu"), offer.values.get("pid_namespace")
        if not (isinstance(octets, str) and isinstance(num_bytes, int) and isinstance(gpu, str)):
            raise PlaneRefusal(f"rank {peer} sent no handle of CUDA memory")
        if num_bytes < 1:
            raise PlaneRefusal(f"rank {peer} sent a handle of {num_bytes} bytes")
        if namespace != self._pid_namespace:
            raise PlaneRefusal(
                f"CUDA IPC needs one PID namespace, and rank {peer} is in {namespace}, its receiver"
                f" in {self._pid_namespace}; start containers with --pid=host"
            )
        with self.device.selected():
            try:
                if self._cuda.lacks_access_to(gpu):
                    raise PlaneRefusal(
                        f"{self._gpu} has no peer access to {gpu} of rank {peer}; see nvidia-smi"
                        " topo -m"
                    )
                address = self._cuda.open(bytes.fromhex(octets))
            except (CudaRuntimeError, ValueError) as error:
                raise PlaneRefusal(
                    f"the CUDA memory of rank {peer} cannot be opened ({error})"
                ) from None
        close = partial(self._close, address, peer)
        fetcher = None
        try:
            slab = self.device.memory_at(address, num_bytes)
            fetcher = CudaIpcFetcher(self.device, slab, peer, close)
            return Attachment(fetcher, fetcher.measure())
        except RuntimeError as error:  # torch's
            if fetcher is None:
                close()
            else:
                fetcher.detach()
            raise PlaneRefusal(
                f"the CUDA memory of rank {peer} cannot be copied ({first_line(str(error))})"
            ) from None

    def stager(self, answer: Offer | None, peer: int) -> Outbox:
        """Make an outbox in this rank's slab."""
        return Outbox(self.name, self.device, self.slab)

    def _close(self, address: int, peer: int) -> None:
        """Unmap a peer's slab; a failure is logged."""
        with self.device.selected():
            try:
                self._cuda.close(address)
            except CudaRuntimeError as error:
                _log.warning("the CUDA memory of rank %d was not closed: %s", peer, error)

    def close(self, *, are_detached: bool) -> None:
        """Drop the slab, and free it if all peers have detached; otherwise it is freed with this
        process, because freeing memory that a peer has open is undefined."""
        del self.slab
        if are_detached:
            with self.device.selected():
                self._free()

    def _free(self) -> None:
        """Free the slab's memory; a failure is logged."""
        try:
            self._cuda.free(self._address)
        except CudaRuntimeError as error:
            _log.warning("the outbox was not freed: %s", error)


class CudaIpcFetcher(MappedFetcher):
    """Copies from a peer's slab of CUDA memory, and closes the slab when it detaches."""

    def __init__(self, device: Device, slab: torch.Tensor, peer: int, close: partial[None]) -> None:
        super().__init__(device, slab, peer)
        self._close = close

    def detach(self, *, waits: bool = True) -> None:
        """Wait for the copies, and close the peer's slab. With `waits=False` the slab stays open
        until this process ends, because CUDA would wait for the device. A second call does
        nothing."""
        if self._slab is None:
            return
        if waits:
            # A device that has failed raises again, and copies nothing any more.
            with suppress(RuntimeError):
                self._await_copies()
        self._slab = None
        if waits:  # CUDA waits for the device when it closes memory
            self._close()
