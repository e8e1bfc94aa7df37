"""Messages between two processes, over the transport and the data plane of a run.

Rank 0 sends one and waits for its answer, which says when rank 1's host had it; what arrives is
compared with what was sent.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch.distributed import FileStore

from rrfp.errors import RrfpError
from rrfp.runtime.net.transport import SocketTransport, make_planes
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.planes.selection import RankPlanes
from rrfp.runtime.protocols import Inbox, Message, MessageArrived
from rrfp.schedule.tasks import Kind, Task

_PATIENCE_S = 60.0
_NUM_WARM_UP = 5
_CORRUPT = -1


def one_way_us(device: str, transport: str, num_bytes: int, num_rounds: int) -> float:
    """Median time in us of a message, from the send call until the receiving host sees its data on
    the receiver's device. Raises RrfpError or RuntimeError if the measurement fails."""
    planes = _planes(device, transport, num_bytes)
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        arguments = (store, device, transport, str(num_bytes), str(num_rounds))
        with subprocess.Popen([sys.executable, "-m", __name__, *arguments]) as other:
            try:
                taken_ns = _send(store, planes, num_bytes, num_rounds)
                other.wait(_PATIENCE_S)
            finally:
                other.kill()
    return statistics.median(taken_ns[_NUM_WARM_UP:]) / 1e3


def _planes(device: str, transport: str, num_bytes: int) -> RankPlanes:
    # Shared memory lends half of it.
    outbox_mb = 4 + 4 * (num_bytes >> 20)
    return make_planes(torch.device(device), TransportName(transport), outbox_mb)


class _Rank:
    """One of the two, linked to the other."""

    def __init__(self, rank: int, store: str, planes: RankPlanes) -> None:
        self.device = planes.device
        self._peer = 1 - rank
        self._inbox = Inbox()
        self._transport = SocketTransport(
            *(rank, FileStore(store, 2), [self._peer], [self._peer], self._inbox),
            num_credits=4,
            connect_s=_PATIENCE_S,
            planes=planes,
        )
        self._transport.open()
        settled = planes.accepted.links[self._peer]
        if settled.plane is not planes.requested:
            self.close(farewell=False)
            raise RrfpError(f"{planes.requested} does not serve here: {settled.why}")

    def send(self, number: int, tensor: torch.Tensor) -> None:
        message = Message(0, Task(0, Kind.F, number), (tensor,))
        self._transport.send(self._peer, message)

    def take(self) -> torch.Tensor:
        """The tensor of the next message."""
        events = self._inbox.take(_PATIENCE_S)
        if not events:
            raise RrfpError(f"rank {self._peer} sent nothing within {_PATIENCE_S:g} s")
        event = events[0]
        if not isinstance(event, MessageArrived):
            raise RrfpError(f"rank {self._peer} is gone: {event}")
        self._transport.consumed(self._peer, 0)
        self.device.use_on_compute_stream(event.message.tensors)
        (tensor,) = event.message.tensors
        assert tensor is not None
        return tensor

    def await_compute(self) -> None:
        self.device.synchronize(self.device.record(self.device.compute_stream()))

    def close(self, *, farewell: bool = True) -> None:
        self._transport.close(farewell=farewell)


def _send(store: str, planes: RankPlanes, num_bytes: int, num_rounds: int) -> list[int]:
    """Rank 0's part: how long each message took, in ns."""
    rank = _Rank(0, store, planes)
    taken_ns = []
    for number in range(_NUM_WARM_UP + num_rounds):
        tensor = _filled(number, num_bytes, rank.device.torch_device)
        rank.await_compute()
        start_ns = time.monotonic_ns()
        rank.send(number, tensor)
        seen_ns = int(rank.take().item())
        if seen_ns == _CORRUPT:
            raise RuntimeError("what came over the transport is corrupt")
        taken_ns.append(seen_ns - start_ns)
    rank.close()
    return taken_ns


def _answer(store: str, planes: RankPlanes, num_bytes: int, num_rounds: int) -> None:
    """Rank 1's part."""
    rank = _Rank(1, store, planes)
    for number in range(_NUM_WARM_UP + num_rounds):
        tensor = rank.take()
        seen_ns = time.monotonic_ns()
        place = rank.device.torch_device
        if not torch.equal(tensor, _filled(number, num_bytes, place)):
            seen_ns = _CORRUPT
        rank.send(number, torch.tensor([seen_ns], device=place))
    rank.close()


def _filled(number: int, num_bytes: int, place: torch.device) -> torch.Tensor:
    """Data that differs from the last round's and from zeroed memory."""
    return torch.full((num_bytes,), number % 255 + 1, dtype=torch.uint8, device=place)


if __name__ == "__main__":
    with suppress(RrfpError):  # rank 0 says why
        _store, _device, _transport, *_numbers = sys.argv[1:]
        _num_bytes, _num_rounds = map(int, _numbers)
        _answer(_store, _planes(_device, _transport, _num_bytes), _num_bytes, _num_rounds)
