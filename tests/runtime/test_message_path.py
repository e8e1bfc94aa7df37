"""The number of rrfp's files that handle an activation between two ranks."""

import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from rrfp.runtime.device.interface import CPU
from rrfp.runtime.planes import registry
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.planes.selection import RankPlanes
from rrfp.runtime.protocols import MessageArrived
from tests.runtime.link_pairs import pair, take
from tests.runtime.test_gpu_planes import cuda
from tests.runtime.test_planes import filled, message

__all__ = ["cuda"]

PACKAGE = str(Path(registry.__file__).parents[2])
WORKER = "runtime/worker.py"
"""Sends a task's outputs, and receives its inputs."""


class Profile:
    """Counts the files in which something is called while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.files = {WORKER}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if self.is_on and event == "call" and file.startswith(PACKAGE):
            self.files.add(file[len(PACKAGE) + 1 :])


def files_passed(transport: TransportName, num_bytes: int) -> set[str]:
    """Return the files called from `send` until the peer has consumed the message and its slot is
    free."""
    path = Profile()
    before = sys.getprofile()
    threading.setprofile(path)
    try:
        with pair(make_planes=lambda: RankPlanes(CPU, transport, 64 * 2**20)) as made:
            time.sleep(0.2)  # Credits are given.
            sys.setprofile(path)
            path.is_on = True
            made.transports[0].send(1, message(0, filled(num_bytes, 1)))
            (event,) = take(made.inboxes[1], 1)
            assert isinstance(event, MessageArrived)
            made.transports[1].consumed(0, 0)
            del event
            time.sleep(0.2)
            path.is_on = False
            sys.setprofile(before)
    finally:
        threading.setprofile(None)
        sys.setprofile(before)
    return path.files


def test_an_inline_activation_passes_few_files() -> None:
    passed = files_passed(TransportName.INLINE, 1000)
    assert {"runtime/link/sender.py", "runtime/link/receiver.py"} < passed
    assert len(passed) <= 12, sorted(passed)


def test_an_activation_by_shared_memory_passes_few_files() -> None:
    passed = files_passed(TransportName.SHM, 5 * 2**20)
    assert "runtime/planes/outbox.py" in passed
    assert len(passed) <= 14, sorted(passed)


@pytest.mark.usefixtures("cuda")
def test_an_activation_by_cuda_ipc_passes_few_files() -> None:
    passed = files_passed(TransportName.CUDA_IPC, 5 * 2**20)
    assert "runtime/planes/outbox.py" in passed
    assert len(passed) <= 14, sorted(passed)
