"""Pulling out of a peer's slab that is mapped into this process: host memory, or a device's."""

import time

import torch

from rrfp.errors import RrfpError
from rrfp.runtime.device.device import Device
from rrfp.runtime.planes.packing import packed_bytes, parts_of_pieces
from rrfp.runtime.planes.plane import TRIAL_BYTES, WINDOW_BYTES, Pull, Pulled, sizes_of
from rrfp.runtime.protocols import monotonic


class MappedPuller:
    """Pulls on the link's own thread. Implements `rrfp.runtime.planes.plane.Puller`."""

    def __init__(self, device: Device, slab: torch.Tensor, peer: int) -> None:
        self._device = device
        self._stream = device.new_stream()
        self._slab: torch.Tensor | None = slab
        self._peer = peer

    def pull(self, pull: Pull, told: Pulled) -> None:
        slab, device, stream = self._slab, self._device, self._stream
        if slab is None:
            return
        sizes = sizes_of(pull.forms)
        if pull.offset + packed_bytes(sizes) > slab.numel():
            told(pull, beyond(self._peer, pull, slab.numel()))
            return
        begun_ns = monotonic()
        if not pull.tensors:
            pull.tensors = [
                None if form is None else device.empty(form.shape, form.dtype, stream)
                for form in pull.forms
            ]
        num_filled = pull.num_filled
        for part in parts_of_pieces(sizes, pull.piece_bytes, pull.num_pulled, num_filled):
            target = pull.tensors[part.tensor]
            assert target is not None
            begin = pull.offset + part.offset
            device.copy(
                target.view(-1).view(torch.uint8)[part.start : part.start + part.num_bytes],
                slab[begin : begin + part.num_bytes],
                stream,
            )
        pull.num_pulled = num_filled
        self._await_copies()
        pull.copy_ns += monotonic() - begun_ns
        told(pull, None)

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

    def detach(self) -> None:
        if self._slab is not None:
            self._await_copies()
            self._slab = None


def beyond(peer: int, pull: Pull, slab_bytes: int) -> RrfpError:
    """A message that does not lie where it should."""
    return RrfpError(
        f"rank {peer} posted {pull.task} at {pull.offset}, which does not lie in its outbox of"
        f" {slab_bytes} bytes; see that all ranks run the same version of rrfp"
    )
