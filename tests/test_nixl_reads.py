"""What becomes of reads by NIXL that go wrong, on an agent that stands in for NIXL's own."""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Self

import pytest
import torch

from rrfp.errors import RrfpError
from rrfp.runtime.device.interface import CpuDevice, Stream
from rrfp.runtime.planes import nixl as nixl_agent
from rrfp.runtime.planes.codec import Form
from rrfp.runtime.planes.nixl import NixlPlane
from rrfp.runtime.planes.plane import PlaneRefusal, Pull, Puller
from rrfp.schedule.tasks import Kind, Task

PATIENCE_S = 20.0
SLAB_BYTES = 2**16
TASK = Task(1, Kind.F, 0)


class OwnReads:
    """Reads memory of this process. Implements what `NixlAgent` uses of NIXL's agent."""

    def __init__(self, name: str, may_answer: threading.Event) -> None:
        self._name = name
        self._may_answer = may_answer

    def register_memory(self, slab: torch.Tensor) -> None: ...

    def deregister_memory(self, registered: None) -> None: ...

    def get_agent_metadata(self) -> bytes:
        return self._name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self._may_answer.wait(PATIENCE_S)
        return metadata

    def get_xfer_descs(self, descriptors: Sequence[Any], memory: str) -> Any:
        return descriptors[0]

    def initialize_xfer(self, kind: str, own: Any, theirs: Any, remote: str) -> "OwnReads":
        ctypes.memmove(own[0], theirs[0], own[1])
        return self

    states = ("PROC", "DONE")
    """What a transfer says as it begins, and later."""
    num_released = 0

    def transfer(self, handle: Self) -> str:
        return self.states[0]

    def check_xfer_state(self, handle: Self) -> str:
        return self.states[1]

    def release(self) -> None:
        OwnReads.num_released += 1


class FullDevice(CpuDevice):
    """Has no memory left, where it is told so."""

    is_full = False

    def empty(self, shape: Any, dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        if self.is_full:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return super().empty(shape, dtype, stream)


@pytest.fixture
def may_answer(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    answers = threading.Event()
    answers.set()
    monkeypatch.setattr(nixl_agent, "_made", lambda name: OwnReads(name, answers))
    yield answers
    answers.set()


def pulled(puller: Puller) -> object:
    """What is told of a message of one tensor."""
    told: list[object] = []
    is_told = threading.Event()

    def tell(_: Pull, outcome: object) -> None:
        told.append(outcome)
        is_told.set()

    form = Form(torch.uint8, (100,))
    puller.pull(Pull(0, TASK, 0, (form,), 0, 0, is_lent=False), tell, lambda _: None)
    assert is_told.wait(PATIENCE_S), "nobody was told"
    return told[0]


def test_a_message_that_cannot_be_taken_over_fails_its_link_and_no_other(
    may_answer: threading.Event,
) -> None:
    source, device = NixlPlane(CpuDevice(), SLAB_BYTES), FullDevice()
    reader = NixlPlane(device, SLAB_BYTES)
    try:
        source.slab.fill_(7)
        puller, rate = reader.attach(source.offer(), 3, PATIENCE_S)
        assert rate
        device.is_full = True
        error = pulled(puller)
        assert isinstance(error, RrfpError)
        assert str(error) == (
            "what rank 3 sent for 1F0 was read and cannot be taken over (OutOfMemoryError: CUDA"
            " out of memory.)"
        )
        assert isinstance(error.__cause__, torch.OutOfMemoryError)
        device.is_full = False
        tensors = pulled(puller)
        assert isinstance(tensors, list)
        assert bool((tensors[0] == 7).all())
    finally:
        source.close(are_detached=True)
        reader.close(are_detached=True)


@pytest.mark.parametrize("states", [("ERR", "ERR"), ("PROC", "ERR")])
def test_a_read_that_fails_is_let_go_of(
    may_answer: threading.Event, monkeypatch: pytest.MonkeyPatch, states: tuple[str, str]
) -> None:
    source, reader = (NixlPlane(CpuDevice(), SLAB_BYTES) for _ in range(2))
    try:
        puller, _ = reader.attach(source.offer(), 3, PATIENCE_S)
        monkeypatch.setattr(OwnReads, "states", states)
        monkeypatch.setattr(OwnReads, "num_released", 0)
        assert "rank 3 was lost while its outbox was read" in str(pulled(puller))
        assert OwnReads.num_released == 1
    finally:
        source.close(are_detached=True)
        reader.close(are_detached=True)


def test_a_larger_outbox_than_the_receivers_is_refused(may_answer: threading.Event) -> None:
    source, reader = (NixlPlane(CpuDevice(), size) for size in (2 * SLAB_BYTES, SLAB_BYTES))
    try:
        with pytest.raises(PlaneRefusal, match="give all ranks the same outbox_mb"):
            reader.attach(source.offer(), 1, PATIENCE_S)
    finally:
        source.close(are_detached=True)
        reader.close(are_detached=True)


def test_a_nixl_that_does_not_answer_is_refused(may_answer: threading.Event) -> None:
    source, reader = (NixlPlane(CpuDevice(), SLAB_BYTES) for _ in range(2))
    try:
        may_answer.clear()
        with pytest.raises(PlaneRefusal, match=r"rank 1 .*it did not answer"):
            reader.attach(source.offer(), 1, 0.1)
    finally:
        may_answer.set()
        source.close(are_detached=True)
        reader.close(are_detached=True)
