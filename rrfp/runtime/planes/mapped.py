"""Pulling out of a peer's slab that is mapped into this process: host memory, or a device's."""

import ctypes
import mmap
import time
import weakref

import torch

from rrfp.runtime.device.device import Device
from rrfp.runtime.planes.packing import copied, packed_bytes, unpacked
from rrfp.runtime.planes.plane import TRIAL_BYTES, WINDOW_BYTES, Pull, Pulled, Release, beyond_slab


class MappedPuller:
    """Pulls on the link's own thread. Implements `rrfp.runtime.planes.plane.Puller`."""

    def __init__(
        self, device: Device, slab: torch.Tensor, peer: int, memory: mmap.mmap | None = None
    ) -> None:
        """`memory` is the slab's, where its slots may be lent."""
        self._device = device
        self._stream = device.new_stream()
        self._slab: torch.Tensor | None = slab
        self._peer = peer
        self._memory = memory

    def pull(self, pull: Pull, told: Pulled, release: Release) -> None:
        slab = self._slab
        if slab is None:
            return
        end = pull.offset + packed_bytes(pull.forms)
        if end > slab.numel():
            told(pull, beyond_slab(self._peer, pull, slab.numel()))
            return
        if pull.is_lent and self._memory is not None:
            told(pull, _borrowed(self._memory, pull, release))
            return
        sources = unpacked(slab[pull.offset : end], pull.forms)
        told(pull, copied(sources, self._device, self._stream))

    def _await_copies(self) -> None:
        """Let the host see that what was pulled is here."""
        self._device.synchronize(self._device.record(self._stream))

    def measure(self) -> float:
        """Pull as much as a trial takes; gives GB/s."""
        slab, device, stream = self._slab, self._device, self._stream
        assert slab is not None
        source = slab[: min(WINDOW_BYTES, slab.numel())]
        target = device.empty(source.shape, source.dtype, stream)
        num_windows = TRIAL_BYTES // source.numel()
        device.copy(target, source, stream)
        self._await_copies()
        begun_s = time.perf_counter()
        for _ in range(num_windows):
            device.copy(target, source, stream)
        self._await_copies()
        return num_windows * source.numel() / (time.perf_counter() - begun_s) / 1e9

    def detach(self, *, waits: bool = True) -> None:
        if self._slab is not None:
            if waits:
                self._await_copies()
            self._slab = self._memory = None


def _borrowed(memory: mmap.mmap, pull: Pull, release: Release) -> list[torch.Tensor | None]:
    """The tensors where they lie; their slot is released once they are gone."""
    view = (ctypes.c_char * packed_bytes(pull.forms)).from_buffer(memory, pull.offset)
    # The view lives as long as a tensor that has its memory.
    weakref.finalize(view, release, pull.offset).atexit = False
    return unpacked(torch.frombuffer(view, dtype=torch.uint8), pull.forms)
