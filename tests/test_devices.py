"""A run on GPUs, as far as it can be seen without one: what it is refused, the GPU that a rank
takes, its groups, and what changes in its model."""

import os
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from rrfp.errors import UsageError
from rrfp.runtime.device.cuda_runtime import CudaPresence, Gpu
from rrfp.train import checks as device_checks
from rrfp.train.checks import check_settings
from rrfp.train.settings import TrainSettings
from tests.ranks import run_ranks

NO_DRIVER = CudaPresence((), "there is no driver")
ONE_GPU = CudaPresence((Gpu("GPU", 2**30, "0"),), None)
SMALL = {"layers": 4, "hidden": 32, "heads": 2, "seq_length": 16, "microbatches": 4, "steps": 2}


@pytest.mark.parametrize(
    ("presence", "flags", "words"),
    [
        (NO_DRIVER, {}, "there is no driver"),
        (ONE_GPU, {}, "4 ranks on this host take a GPU each and it has 1; start fewer, or let"),
        (ONE_GPU, {"pp": 1}, None),
        (ONE_GPU, {"share_gpu": True}, None),
        (ONE_GPU, {"share_gpu": True, "dp": 2, "distributed_optimizer": True}, None),
        (ONE_GPU, {"share_gpu": True, "tp": 2}, "--share-gpu leaves no NCCL, by which ranks of"),
        (ONE_GPU, {"share_gpu": True, "model": "moe", "ep": 2}, "--share-gpu leaves no NCCL"),
        (
            ONE_GPU,
            {"share_gpu": True, "dispatch": "megatron"},
            "by which Megatron-Core's own schedule transfers",
        ),
        (
            ONE_GPU,
            {"pp": 1, "dispatch": "megatron", "pace": "uniform"},
            "--pace holds Megatron-Core's own schedule back on the host only",
        ),
        (ONE_GPU, {"share_gpu": True, "device": "cpu"}, "add --device cuda or leave it out"),
        (ONE_GPU, {"share_gpu": True, "transport": "shm"}, "choose cuda-ipc or bounce"),
    ],
)
def test_what_a_run_on_gpus_asks_of_a_host(
    monkeypatch: pytest.MonkeyPatch,
    presence: CudaPresence,
    flags: dict[str, Any],
    words: str | None,
) -> None:
    device_checks.gpus_here.cache_clear()
    monkeypatch.setattr(device_checks, "cuda_presence", lambda: presence)
    settings = TrainSettings(**{"device": "cuda", **flags})
    try:
        if words is None:
            check_settings(settings)
        else:
            with pytest.raises(UsageError, match=words):
                check_settings(settings)
    finally:
        device_checks.gpus_here.cache_clear()


def take_gpu() -> tuple[str, list[str], bool, str, str | None, bool]:
    """What the fourth rank of a host takes where torch sees two GPUs."""
    from rrfp.megatron.cpu import patches
    from rrfp.train.launch import process_groups as devices

    taken: list[str] = []
    os.environ.update(LOCAL_RANK="3", CUBLAS_WORKSPACE_CONFIG=":16:8")
    with (
        patch.object(torch.cuda, "device_count", lambda: 2),
        patch.object(torch.cuda, "set_device", lambda device: taken.append(str(device))),
    ):
        device = devices.take_device(TrainSettings(device="cuda").run)
    return (
        str(device),
        taken,
        torch.are_deterministic_algorithms_enabled(),
        os.environ["CUBLAS_WORKSPACE_CONFIG"],
        os.environ.get("NCCL_ALGO"),
        patches._prepared,
    )


def test_ranks_take_the_gpus_in_turn() -> None:
    (told,) = run_ranks(1, take_gpu, fresh=True)
    assert told == ("cuda:1", ["cuda:1"], True, ":16:8", "^NVLS", False)


def learn(is_on_gpu: bool) -> list[Any]:
    """What this rank learns on the CPU, by the settings of a run on it, or by those of one on GPUs
    with groups of two backends, and with collectives one by one."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - its import makes it

    from rrfp.megatron.adapters.fallbacks import reduce_one_by_one
    from rrfp.megatron.step_groups import device_for
    from rrfp.runtime.pace import Delays
    from rrfp.train.launch import process_groups as parallel
    from rrfp.verify.rank import _learn

    settings = TrainSettings(**SMALL, pp=2, dp=2, device="cuda" if is_on_gpu else "cpu")
    if is_on_gpu:
        reduce_one_by_one()
    with (
        patch.object(
            parallel, "backend_of", lambda _: "cpu:gloo,cuda:fake" if is_on_gpu else "gloo"
        ),
        parallel.parallel_groups(settings) as layout,
    ):
        assert ("fake" in dist.get_backend_config()) is is_on_gpu
        assert device_for(dist.group.WORLD) == torch.device("cpu")
        return [
            asdict(
                _learn(
                    settings.changed(distributed_optimizer=is_divided),
                    layout,
                    Delays(0, layout.rank, 1e-4),
                )
            )
            for is_divided in (False, True)
        ]


def test_what_the_settings_of_a_gpu_change_does_not_change_what_is_learnt() -> None:
    assert run_ranks(4, learn, True) == run_ranks(4, learn, False)


def test_the_backend_of_groups() -> None:
    from rrfp.train.launch.process_groups import backend_of

    assert backend_of(TrainSettings().run) == "gloo"
    assert backend_of(TrainSettings(device="cuda").run) == "cpu:gloo,cuda:nccl"
    assert backend_of(TrainSettings(device="cuda", share_gpu=True).run) == "gloo"


def test_what_tensors_take_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from rrfp.train.loop import _bytes_on_gpu

    gpu = torch.device("cuda", 1)
    reset: list[torch.device] = []
    for name, told in (
        ("memory_allocated", 300),
        ("max_memory_allocated", 500),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, told=told: told)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    assert _bytes_on_gpu(torch.device("cpu")) == (0, 0)
    assert _bytes_on_gpu(gpu) == (300, 500)
    assert reset == [gpu]


def room_on(gpus: str, sees_own: bool) -> int:
    """What activations of this rank may take. The ranks' GPUs are named by rank, and each sees its
    own alone, or all."""
    from rrfp.megatron.memory.bound import MemoryBound, room_of
    from rrfp.schedule.knobs import Auto

    own = gpus[int(os.environ["RANK"])]
    seen = own if sees_own else "".join(sorted({*gpus}))
    gpu = torch.device("cuda", seen.index(own))
    with (
        patch.object(torch.cuda, "device_count", lambda: len(seen)),
        patch.object(torch.cuda, "memory_allocated", lambda _: 300),
        patch.object(torch.cuda, "memory_reserved", lambda _: 700),
        patch.object(torch.cuda, "mem_get_info", lambda _: (2000, 10_000)),
        patch.object(
            torch.cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(uuid=seen[device.index]),
        ),
    ):
        dist.init_process_group("gloo")
        # An actor and a critic in one process are one rank.
        for _ in range(2):
            MemoryBound(Auto.AUTO, 1, gpu)
        dist.barrier()
        room = room_of(gpu)
        dist.barrier()
        dist.destroy_process_group()
    return room


@pytest.mark.parametrize(
    ("gpus", "sees_own"),
    [
        ("abc", False),  # torchrun
        ("abc", True),  # srun --gpus-per-task=1
        ("aba", False),  # --share-gpu
        ("aab", True),  # the same, in tasks that have a GPU each
    ],
)
def test_what_tensors_may_take_on_a_gpu(gpus: str, sees_own: bool) -> None:
    # A tenth of the GPU stays free, and those that are on it share the rest.
    rooms = [1000 // gpus.count(own) + 400 for own in gpus]
    assert run_ranks(len(gpus), room_on, gpus, sees_own) == rooms
