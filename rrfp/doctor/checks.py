"""The checks of everything except GPUs: clock, core, limits, imports, memory, gloo and network."""

import ctypes
import errno
import importlib
import mmap
import os
import resource
import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

from rrfp.compiled import Core, core
from rrfp.errors import UsageError, described
from rrfp.runtime.isolated_call import NoAnswerError, call_isolated
from rrfp.runtime.launchers import LOOPBACK
from rrfp.runtime.net.source_filter import filter_refusal
from rrfp.runtime.planes.registry import HOW_TO_INSTALL, is_installed, nixl_api
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import PAPER_LIMIT, Policy
from rrfp.schedule.shape import Shape
from rrfp.simulate.engine import StepConditions, TaskTimes
from rrfp.simulate.step import play
from rrfp.system import check_open_files, most_open_files, num_cores, temporary_directory
from rrfp.train.launch.private_network import (
    NotPermittedError,
    created_network,
    enter_network,
    run_network,
)
from rrfp.train.settings import DeviceKind, LayoutSettings, RunSettings


class State(StrEnum):
    """Result of a check."""

    OK = "ok"
    SLOW = "slow"
    """It works, but it slows runs down, or there is little of it."""
    ABSENT = "absent"
    FAILS = "fails"
    """It is present but does not work."""


NO_RUN: frozenset[DeviceKind] = frozenset()
CUDA_RUNS = frozenset({DeviceKind.CUDA})
EVERY_RUN = frozenset(DeviceKind)


@dataclass(frozen=True, slots=True)
class Check:
    """The result of trying out one thing."""

    name: str
    state: State
    figure: float | None
    """The measured value; None if nothing could be measured."""
    unit: str
    advice: str
    """A description of the figure or the problem, and a remedy unless the state is OK."""
    needed_by: frozenset[DeviceKind] = NO_RUN
    """The devices on which a run fails without it."""

    def prevents_runs_on(self, device: DeviceKind) -> bool:
        """Return whether a run on this device would fail: it needs this thing, which is absent or
        fails."""
        return device in self.needed_by and self.state in (State.ABSENT, State.FAILS)

    def as_json(self) -> dict[str, object]:
        """Return the fields as JSON members, except `needed_by`."""
        return {
            "name": self.name,
            "state": self.state,
            "figure": self.figure,
            "unit": self.unit,
            "advice": self.advice,
        }


def absent(name: str, advice: str, needed_by: frozenset[DeviceKind] = NO_RUN) -> Check:
    """Make the result for a thing that this machine lacks. It has no figure."""
    return Check(name, State.ABSENT, None, "", advice, needed_by)


def fails(name: str, advice: str, needed_by: frozenset[DeviceKind] = NO_RUN) -> Check:
    """Make the result for a thing that is present and does not work. It has no figure."""
    return Check(name, State.FAILS, None, "", advice, needed_by)


def works(
    name: str,
    figure: float,
    unit: str,
    found: str,
    remedy: str = "",
    needed_by: frozenset[DeviceKind] = NO_RUN,
) -> Check:
    """Make the result for a thing that works. It counts as slow if there is a `remedy`, which is
    appended to the description `found` of the figure."""
    state = State.SLOW if remedy else State.OK
    return Check(name, state, figure, unit, f"{found}{remedy}", needed_by)


# Resolution and speed of the clock that traces use.


_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_NUM_READINGS = 20_000
_SLOW_NS = 1000.0
"""Recording a task takes about ten readings."""


def clock(source: Path = _SOURCE) -> Check:
    """Measure the median time in ns between two successive different readings: the larger of the
    clock's resolution and the time of a reading. It is slow above 1 us. `source` is the file that
    names the kernel's clock source."""
    readings = sorted({time.monotonic_ns() for _ in range(_NUM_READINGS)})
    step_ns = statistics.median(later - earlier for earlier, later in pairwise(readings))
    name = _read_text(source).strip() or "unknown"
    found = f"from a reading to the next; the kernel's clock source is {name}"
    remedy = ", boot with clocksource=tsc if this machine has it" if step_ns > _SLOW_NS else ""
    return works("clock", round(step_ns), "ns", found, remedy)


# Speed of the dispatcher and the simulator, compiled or interpreted.


_SHAPE = Shape(8, 32)
_NUM_ROUNDS = 5
_COMPILE = "in a checkout 'make setup' compiles it, where a C compiler is there"


def compiled_core(found: Core | None = None) -> Check:
    """Measure the time in us of a task in a simulated step, the best of five steps. It is slow
    unless the core is compiled. `found` overrides only what the result says of the core, not how it
    runs."""
    found = core() if found is None else found
    rows = [[1] * _SHAPE.num_microbatches] * _SHAPE.num_stages
    policy = Policy(HINTS["bf"].for_shape(_SHAPE), limit=PAPER_LIMIT)
    times_s = []
    for _ in range(_NUM_ROUNDS):
        start_s = time.perf_counter()
        play(_SHAPE, policy, StepConditions(TaskTimes(rows, rows, rows)))
        times_s.append(time.perf_counter() - start_s)
    num_tasks = _SHAPE.num_ranks * _SHAPE.num_tasks_of_a_rank
    task_us = round(min(times_s) / num_tasks * 1e6, 1)
    remedy = "" if found is Core.COMPILED else f"; {_COMPILE}"
    return works("core", task_us, "us", f"a simulated task; {found}", remedy)


# Number of cores that this process may use.


_CGROUPS = Path("/sys/fs/cgroup")


def cores(cgroups: Path = _CGROUPS) -> Check:
    """Count the cores of this process's affinity, or of its control group's quota if that is
    smaller. The result is slow if a default run has more ranks."""
    num_allowed = num_cores()
    quota = quota_cores(cgroups)
    usable = num_allowed if quota is None else min(num_allowed, quota)
    num_ranks = LayoutSettings().pp
    found = f"of {os.cpu_count()} in this machine"
    if quota is not None and quota < num_allowed:
        found += ", by the quota of the control group"
    remedy = f"; {num_ranks} ranks share them by default, so pace runs or take fewer, --pp 2"
    return works("cores", round(usable, 1), "cores", found, remedy if usable < num_ranks else "")


def quota_cores(cgroups: Path) -> float | None:
    """Return the CPU quota, in cores, of a container's control group, version 2 or else 1. None if
    there is no limit, or the files cannot be read."""
    try:
        limit, period = (cgroups / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            limit = (cgroups / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroups / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    try:
        quota = int(limit) / int(period)
    except (ValueError, ZeroDivisionError):
        return None  # "max" means unlimited
    return quota if quota > 0 else None  # -1 means unlimited


# Number of files, including sockets, that a process may have open.


_NAME = "open-files"
_ENOUGH = 1024


def open_files() -> Check:
    """Check the hard limit on open files, up to which ranks raise the soft limit. The check fails
    below the 64 that a rank needs, and is slow below 1024."""
    try:
        check_open_files()
    except UsageError as refusal:
        return fails(_NAME, str(refusal), EVERY_RUN)
    most = most_open_files()
    remedy = ", too few with many peers; raise the limit: ulimit -n 4096" if most < _ENOUGH else ""
    return works(_NAME, most, "files", "may be open in a process", remedy, EVERY_RUN)


# Time to import a rank's code: torch first, then the rest.


_MODULES = {"torch": "torch", "megatron-core": "rrfp.train.loop"}
"""The module to import for each distribution. The loop imports all that Megatron-Core needs."""
_SLOW_S = 20.0
_IMPORT_LIMIT_S = 180.0


def imports() -> Iterator[Check]:
    """Yield the checks of torch and of Megatron-Core (as `rrfp.train.loop`, after torch): the time
    in s to import each, in a process of its own. More than 20 s is slow, and an import that raises,
    crashes or takes 180 s fails."""
    for name, module in _MODULES.items():
        try:
            # A process for each, so that a crash is attributed to the right one.
            modules = [*dict.fromkeys(("torch", module))]
            result = call_isolated(seconds_to_import, modules, limit_s=_IMPORT_LIMIT_S)[module]
        except NoAnswerError as error:
            result = f"cannot be imported ({error})"
        if isinstance(result, str):
            remedy = "install rrfp again, or raise the limit (ulimit -a) that keeps it from loading"
            if "PermissionError" in result:
                remedy = "let this user read that file and the directories above it"
            yield fails(name, f"{module} {result}; {remedy}", EVERY_RUN)
        else:
            try:
                version = metadata.version(name)
            except metadata.PackageNotFoundError:
                version = "from a checkout"
            remedy = ", as every rank does; keep the environment on a local disk"
            yield works(
                name,
                round(result, 1),
                "s",
                f"to import {name} {version}",
                remedy if result > _SLOW_S else "",
                EVERY_RUN,
            )


def seconds_to_import(modules: list[str]) -> dict[str, float | str]:
    """Import the modules in order, and return for each the time in seconds, or a text with its
    error. A failed import does not end the others."""
    results: dict[str, float | str] = {}
    for module in modules:
        start_s = time.perf_counter()
        try:
            importlib.import_module(module)
        except Exception as error:
            results[module] = f"cannot be imported ({described(error)})"
        else:
            results[module] = time.perf_counter() - start_s
    return results


def temporary_files() -> Check:
    """Measure the free space in GB in the directory for temporary files. It fails if no such
    directory can be used, and is never slow."""
    try:
        where = temporary_directory()
    except UsageError as error:
        return fails("temp-dir", str(error), EVERY_RUN)
    try:
        free_gb = shutil.disk_usage(where).free / 1e9
    except OSError as error:
        return fails("temp-dir", f"{where} cannot be used ({error}); set TMPDIR", EVERY_RUN)
    return works("temp-dir", round(free_gb, 2), "GB", f"free in {where}", needed_by=EVERY_RUN)


# Protection of a run's ports: a private network namespace, or the kernel's socket filter.


def private_network() -> Check:
    """Measure the time in ms to create a private network namespace. It is absent if that fails, as
    for a user who may not, or takes over 10 s."""
    began_s = time.perf_counter()
    try:
        with created_network():
            taken_ms = (time.perf_counter() - began_s) * 1e3
    except NotPermittedError as error:
        filtered = "gloo's ports accept anybody while a run starts"
        if filter_refusal():
            filtered = "gloo's ports accept anybody"
        advice = (
            f"cannot be made ({error}); let users make network namespaces "
            "(kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns or "
            "user.max_user_namespaces; in a container its seccomp profile, or as root "
            f"CAP_SYS_ADMIN and CAP_NET_ADMIN), or use a host without other users: {filtered}"
        )
        return absent("private-network", advice)
    found = "to make a network that only a run's own ranks can reach"
    return works("private-network", round(taken_ms), "ms", found)


def port_filter() -> Check:
    """Measure the time in us to attach a filter to a new TCP socket, also if this process has tried
    it before. It is absent if the kernel refuses."""
    filter_refusal.cache_clear()
    began_s = time.perf_counter()
    if refusal := filter_refusal():
        advice = (
            f"cannot be attached to a TCP socket ({refusal}); add CAP_NET_ADMIN, or let only the "
            "hosts of a run of several hosts reach each other: its ports accept anybody"
        )
        return absent("port-filter", advice)
    taken_us = (time.perf_counter() - began_s) * 1e6
    found = "to close a port of a run to all but its hosts"
    return works("port-filter", round(taken_us), "us", found)


# How much shared memory there is, and how fast it is.


_WHERE = Path("/dev/shm")
_ENOUGH_BYTES = 1 << 30
_TRIED_BYTES = 1 << 26
_SLOW_GB_S = 1.0


def shared_memory(where: Path = _WHERE) -> Iterator[Check]:
    """Yield two checks: the free space for libraries that share named files, and the speed of
    copies into an anonymous file, as ranks use it."""
    yield _shared_memory_size(where)
    yield _shared_memory_speed()


def _shared_memory_size(where: Path) -> Check:
    """Measure the free space in GB in `where`: slow below 1 GiB. It is absent if the directory
    cannot be used, and fails if this user may not write to it."""
    try:
        found = os.statvfs(where)
    except OSError as error:
        return absent("shm-room", f"{where} cannot be used ({error.strerror}); mount a tmpfs there")
    if not os.access(where, os.W_OK):
        return fails("shm-room", f"this user may not write to {where}; mount it with mode 1777")
    free_bytes = found.f_bavail * found.f_frsize
    return works(
        "shm-room",
        round(free_bytes / 1e9, 2),
        "GB",
        f"free in {where} for NCCL, UCX and data loaders",
        "; start containers with --shm-size 8g" if free_bytes < _ENOUGH_BYTES else "",
    )


def _shared_memory_speed() -> Check:
    """Measure the speed in GB/s of copies into an anonymous shared file (memfd): slow below 1 GB/s.
    It is absent without memfd_create, and fails if the system refuses memory."""
    if not hasattr(os, "memfd_create"):
        return absent("shm-speed", "this system has no memfd_create, so ranks take sockets instead")
    try:
        gb_s = copied_gb_s(_TRIED_BYTES)
    except OSError as error:
        problem = f"ranks get no shared memory ({described(error)}) and take sockets instead"
        is_full = error.errno in (errno.ENOSPC, errno.ENOMEM)
        remedy = "see how much memory is free" if is_full else "permit that call in the container"
        return fails("shm-speed", f"{problem}; {remedy}")
    return works(
        "shm-speed",
        round(gb_s, 1),
        "GB/s",
        f"to copy {_TRIED_BYTES >> 20} MiB into shared memory",
        "; see whether memory is swapped out" if gb_s < _SLOW_GB_S else "",
    )


def copied_gb_s(num_bytes: int) -> float:
    """Return the speed in GB/s of the fastest of five copies of `num_bytes`, in whole MiB, into an
    anonymous shared file. Raises OSError if the system refuses the file or has too little
    memory."""
    data = os.urandom(1 << 20) * (num_bytes >> 20)
    with os.fdopen(os.memfd_create("rrfp-doctor"), "r+b") as file:
        # Without this, the first write to a missing page would kill the process by SIGBUS.
        os.posix_fallocate(file.fileno(), 0, len(data))
        with mmap.mmap(file.fileno(), len(data)) as mapped:
            times_s = []
            for _ in range(_NUM_ROUNDS):
                start_s = time.perf_counter()
                mapped[:] = data
                times_s.append(time.perf_counter() - start_s)
    return len(data) / min(times_s) / 1e9


# gloo, which runs the collectives of CPU runs, in the network that ranks use.


_SLOW_US = 20_000.0
"""Ten times the time on two busy cores."""
_NUM_GLOO_ROUNDS = 50
_TIMEOUT_S = 20.0
_GLOO_LIMIT_S = 120.0


def gloo() -> Check:
    """Measure the time in us of an all-reduce between two ranks in the network of a default run:
    slow above 20 ms. It fails if gloo raises, crashes or does not end within 120 s."""
    try:
        with run_network(RunSettings()) as network:
            taken_us = call_isolated(sum_us, network, limit_s=_GLOO_LIMIT_S)
    except NoAnswerError as error:
        if not error.raised:
            advice = "see whether torch can be imported, and no firewall fences loopback"
        elif error.raised in ("ImportError", "ModuleNotFoundError"):
            advice = "see what is found of torch and megatron-core"
        else:
            advice = "see what refuses that to this user"
        return fails("gloo", f"gloo does not work on {LOOPBACK} ({error}); {advice}", EVERY_RUN)
    return works(
        "gloo",
        round(taken_us),
        "us",
        f"for a sum of two ranks on {LOOPBACK}",
        "; see what else runs on this machine" if taken_us > _SLOW_US else "",
        EVERY_RUN,
    )


def sum_us(network: dict[str, str]) -> float:
    """Return the median time in us of an all-reduce between two threads of this process.

    It sets the environment variables in `network`, which name a run's network, and enters that
    network, which it does not leave.
    """
    os.environ.update(network)
    enter_network()

    import torch.distributed as dist

    from rrfp.train.launch.process_groups import one_device_at

    store = dist.HashStore()
    times_us: list[float] = []

    def rank(number: int) -> None:
        import torch

        group: Any = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=_TIMEOUT_S))
        for _ in range(_NUM_GLOO_ROUNDS):
            total = torch.ones(1)
            start_s = time.perf_counter()
            group.allreduce(total).wait()
            if number == 0:
                times_us.append((time.perf_counter() - start_s) * 1e6)

    with one_device_at(LOOPBACK):
        other = Thread(target=rank, args=(1,), daemon=True)
        other.start()
        rank(0)
        other.join(_TIMEOUT_S)
    return statistics.median(times_us)


_NIXL_SOURCE, _READER = "rrfp-doctor-source", "rrfp-doctor-reader"
_READ_BYTES = 1 << 26
_NUM_READS = 5
_SLOW_NIXL_GB_S = 0.5
_NIXL_LIMIT_S = 90.0
_PORTS = Path("/sys/class/infiniband")
_ENOUGH_LOCKED_BYTES = 1 << 34


def nixl() -> Check:
    """Measure the speed in GB/s of a NIXL READ of CPU memory between two agents of a process: slow
    below 0.5 GB/s. It is absent if NIXL is not installed, and fails if the READ fails or takes over
    90 s."""
    if not is_installed():
        return absent(
            "nixl",
            f"it is not installed, and only messages between hosts gain by it; {HOW_TO_INSTALL}",
        )
    try:
        gb_s = call_isolated(read_gb_s, limit_s=_NIXL_LIMIT_S)
    except NoAnswerError as error:
        is_broken = error.raised in ("", "ImportError", "ModuleNotFoundError")
        advice = f"reinstall it: {HOW_TO_INSTALL}" if is_broken else "UCX_LOG_LEVEL=info says more"
        return fails("nixl", f"a READ on this host fails ({error}); {advice}")
    return works(
        "nixl",
        round(gb_s, 1),
        "GB/s",
        f"to READ {_READ_BYTES >> 20} MiB on this host",
        "; see whether UCX_TLS leaves out shared memory" if gb_s < _SLOW_NIXL_GB_S else "",
    )


def read_gb_s() -> float:
    """Return the speed in GB/s of the fastest of five NIXL READs. Raises RuntimeError if one fails
    or the data are corrupt.

    Restricts UCX in this process to loopback; otherwise it would listen at every address.
    """
    os.environ["UCX_NET_DEVICES"] = "lo"
    api = nixl_api()
    source, reader = api.nixl_agent(_NIXL_SOURCE), api.nixl_agent(_READER)
    theirs, ours = (ctypes.create_string_buffer(_READ_BYTES) for _ in range(2))
    ctypes.memset(theirs, 1, _READ_BYTES)
    for agent, memory in ((source, theirs), (reader, ours)):
        agent.register_memory([(ctypes.addressof(memory), _READ_BYTES, 0, "")], "DRAM")
    reader.add_remote_agent(source.get_agent_metadata())
    local, remote = (
        reader.get_xfer_descs([(ctypes.addressof(memory), _READ_BYTES, 0)], "DRAM")
        for memory in (ours, theirs)
    )
    times_s = []
    for _ in range(_NUM_READS):
        start_s = time.perf_counter()
        handle = reader.initialize_xfer("READ", local, remote, _NIXL_SOURCE)
        state = reader.transfer(handle)
        while state == "PROC" and time.perf_counter() - start_s < _TIMEOUT_S:
            state = reader.check_xfer_state(handle)
        times_s.append(time.perf_counter() - start_s)
        if state != "DONE":
            raise RuntimeError(f"it is in state {state} after {times_s[-1]:.1f} s")
        reader.release_xfer_handle(handle)
    if ours.raw != theirs.raw:
        raise RuntimeError("what was read is corrupt")
    return _READ_BYTES / min(times_s) / 1e9


def fabric(ports: Path = _PORTS, locked_bytes: int | None = None) -> Check:
    """Find the rate in Gbit/s of the fastest active port of InfiniBand, RoCE or EFA. It is absent
    without a device, fails if no port is active, and is slow if less than 16 GiB may be locked."""
    if locked_bytes is None:
        locked_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = sorted(ports.glob("*/ports/*"))
    if not found:
        return absent("fabric", "no InfiniBand, RoCE or EFA device; other hosts are reached by TCP")
    active = [port for port in found if "ACTIVE" in _read_text(port / "state").split()]
    if not active:
        down = f"none of {len(found)} ports is active; see ibstat"
        return fails("fabric", f"{down}; until then other hosts are reached by TCP")
    gbit_s = max(_rate_gbit_s(port) for port in active)
    names = ", ".join(sorted({port.parent.parent.name for port in active}))
    is_limited = locked_bytes != resource.RLIM_INFINITY and locked_bytes < _ENOUGH_LOCKED_BYTES
    remedy = "; memory cannot be registered with it: ulimit -l unlimited" if is_limited else ""
    return works("fabric", gbit_s, "Gbit/s", names, remedy)


def _read_text(file: Path) -> str:
    """Read a file; the text is empty if that fails."""
    try:
        return file.read_text()
    except OSError:
        return ""


def _rate_gbit_s(port: Path) -> float:
    """Return the rate of a port in Gbit/s, whose file reads `400 Gb/sec (4X NDR)`; 0 if it cannot
    be read, or begins with no number."""
    rate, *_ = [*_read_text(port / "rate").split(), "0"]
    try:
        return float(rate)
    except ValueError:
        return 0.0
