"""Measurements on a GPU. Each function runs in a process of its own and returns JSON."""

import statistics
import time
from typing import Any

NUM_BYTES = 1 << 26
SMALL_BYTES = 1 << 16
_NUM_ROUNDS = 5
_NUM_SMALL_ROUNDS = 500
_NUM_LARGE_ROUNDS = 50
_NUM_WAITS = 200
_KERNEL_CYCLES = 2_000_000
"""Some 1 ms."""


def copies() -> float:
    """The speed of copies within the device, in GB/s."""
    from rrfp.doctor.gpus import copy_gb_s

    return copy_gb_s(0, 0, NUM_BYTES)


def large_ipc() -> dict[str, float]:
    """The speed of CUDA IPC's copies within the device, and that of its own, in GB/s."""
    from rrfp.doctor.cuda_ipc import pull_s
    from rrfp.doctor.gpus import copy_gb_s

    before = copy_gb_s(0, 0, NUM_BYTES)
    pulled = NUM_BYTES / pull_s(NUM_BYTES, _NUM_ROUNDS) / 1e9
    after = copy_gb_s(0, 0, NUM_BYTES)
    return {"ipc": pulled, "own": (before + after) / 2}


def bare_message() -> float:
    """The way of a small message by CUDA's calls alone, both hosts' wake-ups included, in us."""
    from benchmarks.gpu.bare_calls import one_way_us

    return one_way_us(SMALL_BYTES, _NUM_SMALL_ROUNDS)


def small_message() -> float:
    """The way of a small message over the data plane, both hosts' wake-ups included, in us."""
    from benchmarks.gpu.messages import one_way_us

    return one_way_us("cuda", "cuda-ipc", SMALL_BYTES, _NUM_SMALL_ROUNDS)


def large_message() -> float:
    """Likewise, of a large one."""
    from benchmarks.gpu.messages import one_way_us

    return one_way_us("cuda", "cuda-ipc", NUM_BYTES, _NUM_LARGE_ROUNDS)


def bounced_message() -> float:
    """The way of a large one through the host, in us."""
    from benchmarks.gpu.messages import one_way_us

    return one_way_us("cuda", "bounce", NUM_BYTES, _NUM_LARGE_ROUNDS)


def wake_ups() -> dict[str, float]:
    """Time in us that a host needs to launch a kernel and detect its end, without the kernel's own
    time; the host spins or blocks while it waits."""
    import torch

    torch.cuda.current_device()
    cuda: Any = torch.cuda  # declares no types here
    taken_us = {}
    for name, blocks in (("spinning", False), ("blocking", True)):
        beyond_us = []
        for _ in range(_NUM_WAITS):
            started = cuda.Event(enable_timing=True)
            ended = cuda.Event(enable_timing=True, blocking=blocks)
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            started.record()
            cuda._sleep(_KERNEL_CYCLES)
            ended.record()
            ended.synchronize()
            total_us = (time.perf_counter() - start_s) * 1e6
            beyond_us.append(total_us - started.elapsed_time(ended) * 1e3)
        taken_us[name] = statistics.median(beyond_us)
    return taken_us
