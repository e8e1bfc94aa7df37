"""What an outbox says when it cannot go on."""

import threading

import pytest
import torch

from rrfp.errors import RrfpError
from rrfp.runtime.device.interface import CpuDevice, Stream
from rrfp.runtime.planes.host_memory import SharedMemoryPlane
from rrfp.runtime.planes.outbox import Outbox
from rrfp.runtime.planes.plane import Posted
from rrfp.runtime.protocols import Message
from rrfp.schedule.tasks import Kind, Task

PATIENCE_S = 20.0
MESSAGE = Message(0, Task(1, Kind.F, 0), (torch.zeros(100, dtype=torch.uint8),))


class BrokenDevice(CpuDevice):
    """Its second copy fails, as a GPU's does after an error of any kernel."""

    def __init__(self) -> None:
        super().__init__()
        self._num_copies = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        self._num_copies += 1
        if self._num_copies > 1:
            raise RuntimeError("CUDA error: an illegal memory access\nand much more")


class Ending:
    """The sending end of a link."""

    def __init__(self) -> None:
        self.has_posted = threading.Event()
        self.has_failed = threading.Event()
        self.error: RrfpError | None = None

    def post(self, posted: Posted) -> None:
        self.has_posted.set()

    def fail(self, error: RrfpError) -> None:
        self.error = error
        self.has_failed.set()


@pytest.mark.timeout(2 * PATIENCE_S)
def test_an_outbox_that_fails_tells_every_link_also_those_that_send_later() -> None:
    plane = SharedMemoryPlane(BrokenDevice(), 2**20)
    outbox = Outbox(plane)
    outbox.open()
    ends = idle, sending, later = Ending(), Ending(), Ending()
    try:
        outbox.put(idle, MESSAGE)
        assert idle.has_posted.wait(PATIENCE_S)
        outbox.put(sending, MESSAGE)
        assert sending.has_failed.wait(PATIENCE_S)
        outbox.put(later, MESSAGE)
        for end in ends:
            assert end.has_failed.wait(PATIENCE_S)
            assert str(end.error) == (
                "the outbox of plane shm failed with RuntimeError: CUDA error: an illegal memory"
                " access"
            )
        outbox.drain(PATIENCE_S)
    finally:
        outbox.close(PATIENCE_S)
        plane.close(are_detached=True)
