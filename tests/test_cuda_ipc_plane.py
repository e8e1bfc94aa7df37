"""The plane of CUDA IPC: its protocol over a stand-in for CUDA, in whose place are files, in one
process and between two."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import cast

import pytest
import torch

from rrfp.runtime.device.cuda_runtime import BLOCK_BYTES
from rrfp.runtime.device.interface import CPU
from rrfp.runtime.planes.codec import Form
from rrfp.runtime.planes.cuda_ipc import CudaIpcPlane, CudaIpcPuller
from rrfp.runtime.planes.negotiation import Settled
from rrfp.runtime.planes.plane import Pull
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.protocols import Arrived, Failed, Inbox
from rrfp.schedule.tasks import Kind, Task
from tests import cuda_in_files
from tests.cuda_ipc_in_files import CUDA_IPC, cuda, memory_left, planes, put_files_in_place_of_cuda
from tests.doubles.simulated_device import SimulatedDevice
from tests.link_pairs import pair, take
from tests.ranks import run_ranks
from tests.simulated_ranks import Mistake, exchange
from tests.test_planes import OUTBOX_BYTES, filled, message, own_store, transport
from tests.test_simulated_device import MISTAKES

__all__ = ["cuda"]


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 1 else pytest.mark.slow) for seed in range(5)]
)
def test_nothing_is_corrupt_and_all_is_freed(cuda: Path, seed: int) -> None:
    findings = exchange(
        seed,
        500,
        Mistake(),
        make_plane=lambda device, size, _: CudaIpcPlane(device, size),
        plane=CUDA_IPC,
    )
    assert (findings.num_arrived, findings.num_corrupt) == (500, 0)
    assert memory_left(cuda) == []


def test_a_rank_that_says_farewell_before_it_detaches_is_found(cuda: Path) -> None:
    exchange(
        0,
        100,
        MISTAKES["detach after free"],
        make_plane=lambda device, size, _: CudaIpcPlane(device, size),
        plane=CUDA_IPC,
    )
    assert cuda_in_files.freed_open
    cuda_in_files.freed_open.clear()


def test_the_speed_is_told(cuda: Path) -> None:
    with pair(make_planes=planes) as ranks:
        for transport in ranks.transports:
            (settled,) = transport.settled.values()
            assert settled.plane is CUDA_IPC
            assert settled.gb_per_s
            assert settled.why == ""
    assert memory_left(cuda) == []


def test_a_peer_on_another_host_is_told_of(cuda: Path) -> None:
    with pair(make_planes=planes, allow_unix=False) as ranks:
        why = "rank 1 is on another host"
        assert ranks.transports[0].settled == {1: Settled(TransportName.BOUNCE, None, why)}


def test_a_slab_has_blocks_of_its_own(cuda: Path) -> None:
    plane = CudaIpcPlane(CPU, 10_000)
    assert plane.slab.numel() == 10_000
    (path,) = cuda.iterdir()
    assert path.stat().st_size == BLOCK_BYTES
    assert not plane.slab.any()
    plane.close(are_detached=True)


def test_an_arrival_is_told_when_the_host_has_seen_the_copy(cuda: Path) -> None:
    """And a puller that is detached lets its copies end."""
    device = SimulatedDevice(mean_delay_s=2e-3)
    owner, reader = CudaIpcPlane(device, BLOCK_BYTES), CudaIpcPlane(device, BLOCK_BYTES)
    owner.slab.fill_(7)
    puller, _ = reader.attach(owner.offer(), 0, 1.0)
    told: list[bool] = []
    pull = Pull(0, Task(0, Kind.F, 0), 0, (Form(torch.uint8, (4096,)),), 256, 0, is_lent=False)

    def pulled(_: Pull, tensors: object) -> None:
        assert isinstance(tensors, list)
        told.append(bool((tensors[0] == 7).all()))

    puller.pull(pull, pulled, lambda _: None)
    assert told == [True]
    puller.detach()
    puller.detach()  # once is enough
    puller.pull(pull, pulled, lambda _: None)
    assert told == [True]
    owner.close(are_detached=True)
    reader.close(are_detached=True)
    device.close()
    assert memory_left(cuda) == []


def test_memory_is_closed_once_no_copy_reads_it(
    cuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimulatedDevice(mean_delay_s=0.0)
    plane = CudaIpcPlane(device, BLOCK_BYTES)
    puller, _ = plane.attach(plane.offer(), 0, 1.0)
    assert isinstance(puller, CudaIpcPuller)
    happened: list[str] = []
    close = cuda_in_files.cudaIpcCloseMemHandle

    def told(address: int) -> tuple[int]:
        happened.append("closed")
        return close(address)

    monkeypatch.setattr(cuda_in_files, "cudaIpcCloseMemHandle", told)

    def copy() -> None:
        time.sleep(0.05)
        happened.append("copied")

    device.launch(copy, puller._stream)
    puller.detach()
    assert happened == ["copied", "closed"]
    plane.close(are_detached=True)
    device.close()


@pytest.mark.timeout(20)
def test_a_lost_link_does_not_wait_for_a_device_that_hangs(cuda: Path) -> None:
    device = SimulatedDevice(mean_delay_s=0.0)
    plane = CudaIpcPlane(device, BLOCK_BYTES)
    puller, _ = plane.attach(plane.offer(), 0, 1.0)
    assert isinstance(puller, CudaIpcPuller)
    goes_on = threading.Event()
    device.launch(lambda: cast(None, goes_on.wait()), puller._stream)
    puller.detach(waits=False)
    assert puller._slab is None
    goes_on.set()
    plane.close(are_detached=False)
    device.close()


def test_a_message_beyond_the_slab_is_an_error_of_the_link(cuda: Path) -> None:
    owner, reader = CudaIpcPlane(CPU, 1024), CudaIpcPlane(CPU, 1024)
    puller, _ = reader.attach(owner.offer(), 3, 1.0)
    pull = Pull(0, Task(0, Kind.F, 0), 0, (Form(torch.uint8, (4096,)),), 0, 0, is_lent=False)
    told: list[str] = []
    puller.pull(pull, lambda _, error: told.append(str(error)), lambda _: None)
    assert told[0].startswith("rank 3 posted 0F0 beyond its outbox of 1024 bytes")
    puller.detach()


# Between processes.


def _in_a_rank(directory: str) -> None:
    put_files_in_place_of_cuda(Path(directory), dict.__setitem__)


def _exchange(directory: str) -> list[str]:
    _in_a_rank(directory)
    rank, inbox = int(os.environ["RANK"]), Inbox()
    made = transport(rank, 2, own_store(), inbox, CUDA_IPC)
    size = OUTBOX_BYTES // 4
    for number in range(12):
        made.send(1 - rank, message(number, filled(size, number)))
    for event in take(inbox, 12)[:12]:  # and then perhaps a farewell
        assert isinstance(event, Arrived), event
        (tensor,) = event.message.tensors
        assert tensor is not None
        assert bool((tensor == event.message.task.microbatch).all())
        made.consumed(1 - rank, 0)
    plane = str(made.settled[1 - rank].plane)
    made.close()
    return [plane, *map(str, cuda_in_files.freed_open)]


def test_two_processes_exchange_and_free_in_order(tmp_path: Path) -> None:
    assert run_ranks(2, _exchange, str(tmp_path)) == [["cuda-ipc"]] * 2
    assert memory_left(tmp_path) == []


def _killed(directory: str) -> tuple[str, int] | None:
    """Rank 1's child is killed while it has rank 0's slab open."""
    _in_a_rank(directory)
    rank, inbox = int(os.environ["RANK"]), Inbox()
    if rank == 1 and os.fork():
        os.wait()
        return None
    made = transport(rank, 2, own_store(), inbox, CUDA_IPC)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    event, *_ = take(inbox, 1)
    assert isinstance(event, Failed)
    made.close(farewell=False)
    return str(event.error), len(cuda_in_files.freed_open)


def test_what_a_lost_peer_had_open_is_not_freed(tmp_path: Path) -> None:
    found, _ = run_ranks(2, _killed, str(tmp_path))
    assert found is not None
    told, num_freed_open = found
    assert told.startswith("rank 1 closed its connection without a farewell")
    assert num_freed_open == 0
