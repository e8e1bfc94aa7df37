"""Messages between two processes by CUDA's calls alone: what is left of a message's way without the
transport, its threads and torch.

As in the transport a copy is made on either side, each host sees its own done, and the sending one
tells the other over a socket.
"""

import socket
import statistics
import subprocess
import sys
import time

from rrfp.doctor.cuda_ipc import CopyingCuda
from rrfp.runtime.device.cuda_runtime import HANDLE_BYTES

_PATIENCE_S = 30.0
_NUM_WARM_UP = 5
_NUM_CLOCK_BYTES = 8


def one_way_us(num_bytes: int, num_rounds: int) -> float:
    """The median time of a message, until the other process' host has seen it copied, in us.
    Raises CudaRuntimeError or OSError where it does not come."""
    copies = _Copies(num_bytes)
    data, slab = copies.allocate(num_bytes), copies.allocate(num_bytes)
    ours, theirs = socket.socketpair()
    ours.settimeout(_PATIENCE_S)
    arguments = (str(theirs.fileno()), str(num_bytes), str(num_rounds))
    command = (sys.executable, "-m", __name__, *arguments)
    taken_ns = []
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as other:
        theirs.close()
        try:
            ours.sendall(copies.export(slab))
            for _ in range(_NUM_WARM_UP + num_rounds):
                start_ns = time.monotonic_ns()
                copies.make(slab, data)
                ours.sendall(b"\0")
                taken_ns.append(_number(ours) - start_ns)
            other.wait(_PATIENCE_S)
        finally:
            other.kill()
    return statistics.median(taken_ns[_NUM_WARM_UP:]) / 1e3


def _answer(link: socket.socket, num_bytes: int, num_rounds: int) -> None:
    """The other process' part."""
    copies = _Copies(num_bytes)
    slab = copies.open(link.recv(HANDLE_BYTES, socket.MSG_WAITALL))
    target = copies.allocate(num_bytes)
    for _ in range(_NUM_WARM_UP + num_rounds):
        link.recv(1)
        copies.make(target, slab)
        link.sendall(time.monotonic_ns().to_bytes(_NUM_CLOCK_BYTES, "little"))
    copies.close(slab)


class _Copies(CopyingCuda):
    """Copies that a host sees done. It sleeps meanwhile, as the transport's threads do."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(0)
        self._num_bytes = num_bytes
        flags = self.bindings.cudaEventBlockingSync | self.bindings.cudaEventDisableTiming
        self._copied = self.call("cudaEventCreateWithFlags", flags)

    def make(self, target: int, source: int) -> None:
        self.copy(target, source, self._num_bytes)
        self.call("cudaEventRecord", self._copied, self.stream)
        self.call("cudaEventSynchronize", self._copied)


def _number(link: socket.socket) -> int:
    octets = link.recv(_NUM_CLOCK_BYTES, socket.MSG_WAITALL)
    if len(octets) < _NUM_CLOCK_BYTES:
        raise ConnectionError("the other process is gone")
    return int.from_bytes(octets, "little")


if __name__ == "__main__":
    _descriptor, *_numbers = map(int, sys.argv[1:])
    with socket.socket(fileno=_descriptor) as _link:
        _answer(_link, *_numbers)
