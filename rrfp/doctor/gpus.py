"""The checks of GPUs: copies, clocks, copies between pairs, and the PID namespace for CUDA IPC."""

import ctypes
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

from rrfp.doctor.checks import CUDA_RUNS, Check, absent, fails, works
from rrfp.runtime.device.cuda_runtime import CudaPresence
from rrfp.runtime.isolated_call import NoAnswerError, call_isolated

_OWN = Path("/proc/self/ns/pid")
_OF_THE_HOST = 0xEFFFFFFC
"""Number of the initial PID namespace, the same on every host."""


def pid_namespace(own: Path = _OWN) -> Check:
    """Find the number of this process's PID namespace; absent if /proc cannot be read. CUDA IPC
    works only within one namespace, so users compare the number between containers."""
    try:
        found = re.search(r"\d+", str(own.readlink()))
    except OSError:
        found = None
    if found is None:
        return absent("pid-namespace", f"{own} cannot be read; mount /proc")
    number = int(found[0])
    kind = (
        "that of the host"
        if number == _OF_THE_HOST
        else "of a container: ranks of a host that show another cannot use CUDA IPC with these; "
        "start containers with --pid=host"
    )
    return works("pid-namespace", number, "", kind)


_COPY_BYTES = 1 << 26
_NUM_COPIES = 20
"""Copies in a row, which hide launch times."""
_NUM_TIMINGS = 5
_SLEEP_CYCLES = 50_000_000
"""About 30 ms."""
_CLOCK_RATE = 13
"""CU_DEVICE_ATTRIBUTE_CLOCK_RATE, the highest clock in kHz."""
_LAG = 0.8
"""A GPU below this fraction of the best GPU's speed, or of its own highest clock, is slow."""
_LIMIT_S = 180.0


def gpus(presence: CudaPresence) -> Iterator[Check]:
    """Yield the checks `gpu` (copies within each GPU), `gpu-clock` and `peer-access` (copies
    between GPUs), measured in another process. If that fails, `gpu` fails and the others are not
    yielded."""
    if presence.problem is not None:
        yield absent("gpu", presence.problem, CUDA_RUNS)
        yield absent("gpu-clock", "see gpu")
        yield absent("peer-access", "see gpu")
        return
    try:
        figures = call_isolated(gpu_figures, limit_s=_LIMIT_S)
    except NoAnswerError as error:
        yield fails("gpu", f"CUDA failed while it was measured ({error})", CUDA_RUNS)
        return
    yield _copy_check(presence, figures["copy_gb_s"])
    yield _clock_check(figures["clock_mhz"], figures["highest_mhz"])
    yield _peer_check(figures["peer_gb_s"])


def _copy_check(presence: CudaPresence, copy_gb_s: Sequence[float]) -> Check:
    """Make the check `gpu`: the slowest GPU's copies in GB/s, slow below 80% of the fastest
    GPU's."""
    names = sorted({gpu.name for gpu in presence.gpus})
    least_bytes = min(gpu.memory_bytes for gpu in presence.gpus)
    found = f"{len(presence.gpus)} x {' and '.join(names)}, {least_bytes / 2**30:.0f} GiB"
    slowest = min(range(len(copy_gb_s)), key=copy_gb_s.__getitem__)
    is_slow = copy_gb_s[slowest] < _LAG * max(copy_gb_s)
    remedy = f"; GPU {slowest} is far slower than the best, see what else runs on it"
    return works(
        "gpu", round(copy_gb_s[slowest]), "GB/s", found, remedy if is_slow else "", CUDA_RUNS
    )


def _clock_check(clock_mhz: Sequence[float], highest_mhz: Sequence[float]) -> Check:
    """Make the check `gpu-clock`: the clock in MHz of the GPU furthest below its own highest clock,
    slow below 80% of that."""
    # Some drivers report 0 as the highest clock.
    of_mhz = [max(each, clock) for each, clock in zip(highest_mhz, clock_mhz, strict=True)]
    slowest = min(range(len(of_mhz)), key=lambda index: clock_mhz[index] / of_mhz[index])
    is_slow = clock_mhz[slowest] < _LAG * of_mhz[slowest]
    return works(
        "gpu-clock",
        round(clock_mhz[slowest]),
        "MHz",
        f"GPU {slowest} under a light load, of {of_mhz[slowest]:.0f} at most",
        "; nvidia-smi -q -d PERFORMANCE says what holds it back" if is_slow else "",
    )


def _peer_check(peer_gb_s: Sequence[tuple[int, int, bool, float]]) -> Check:
    """Make the check `peer-access`: the speed in GB/s of the slowest pair. It is slow if any pair
    lacks peer access, and absent with one GPU."""
    if not peer_gb_s:
        return absent("peer-access", "there is one GPU, so none has a peer")
    one, other, _, slowest = min(peer_gb_s, key=lambda pair: pair[3])
    num_without = sum(not has_access for _, _, has_access, _ in peer_gb_s)
    remedy = (
        f"; {num_without} of {len(peer_gb_s)} pairs copy by way of the host, see nvidia-smi topo -m"
    )
    return works(
        "peer-access",
        round(slowest),
        "GB/s",
        f"from GPU {one} to {other}, the slowest pair",
        remedy if num_without else "",
    )


def gpu_figures() -> dict[str, Any]:
    """Measure copies and clock of each GPU, and copies of each ordered pair; return lists by name.
    Initializes CUDA in this process; raises torch's own errors if that fails."""
    import torch

    torch.cuda.current_device()
    devices = range(torch.cuda.device_count())
    return {
        "copy_gb_s": [copy_gb_s(index, index) for index in devices],
        "clock_mhz": [_clock_mhz(index) for index in devices],
        "highest_mhz": [_highest_mhz(index) for index in devices],
        "peer_gb_s": [
            (one, other, torch.cuda.can_device_access_peer(one, other), copy_gb_s(one, other))
            for one, other in permutations(devices, 2)
        ],
    }


def copy_gb_s(source: int, target: int, num_bytes: int = _COPY_BYTES) -> float:
    """Return the speed in GB/s of copies from GPU to GPU, or within one. Each byte counts once, not
    as read and write. Raises RuntimeError if the copy is corrupt."""
    import torch

    data = torch.ones(num_bytes, dtype=torch.uint8, device=f"cuda:{source}")
    copied = torch.empty_like(data, device=f"cuda:{target}")
    copy_s = _median_s(source, lambda: copied.copy_(data, non_blocking=True), _NUM_COPIES)
    if not bool((copied == 1).all()):
        raise RuntimeError(f"a copy from GPU {source} to GPU {target} is corrupt")
    return num_bytes / copy_s / 1e9


def _clock_mhz(index: int) -> float:
    """Return the clock of a GPU in MHz, measured with a kernel that spins for a known number of
    cycles."""
    import torch

    cuda: Any = torch.cuda  # declares no types here
    return _SLEEP_CYCLES / _median_s(index, lambda: cuda._sleep(_SLEEP_CYCLES), 1) / 1e6


def _median_s(index: int, work: Callable[[], object], num_times: int) -> float:
    """Return the median time in seconds of one call of `work` on a GPU's current stream, in five
    timings of `num_times` calls each. One timing before them is not counted."""
    import torch

    cuda: Any = torch.cuda
    times_s: list[float] = []
    with torch.cuda.device(index):
        for _ in range(_NUM_TIMINGS + 1):
            started, ended = (cuda.Event(enable_timing=True) for _ in range(2))
            started.record()
            for _ in range(num_times):
                work()
            ended.record()
            ended.synchronize()
            times_s.append(started.elapsed_time(ended) / 1e3 / num_times)
    # The first timing may include loading of code, and low clocks.
    return statistics.median(times_s[1:])


def _highest_mhz(index: int) -> float:
    """Return the highest clock of a GPU in MHz according to its driver. Raises RuntimeError if the
    driver refuses."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, khz = ctypes.c_int(), ctypes.c_int()
    for code in (
        driver.cuDeviceGet(ctypes.byref(device), index),
        driver.cuDeviceGetAttribute(ctypes.byref(khz), _CLOCK_RATE, device),
    ):
        if code:
            raise RuntimeError(f"the driver does not report GPU {index}'s clock (error {code})")
    return khz.value / 1e3
