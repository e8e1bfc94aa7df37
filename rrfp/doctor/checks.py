"""Whether NIXL works, and over what it would reach other hosts."""

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
from rrfp.runtime.isolated_call import NoAnswerError, probe
from rrfp.runtime.launchers import LOOPBACK
from rrfp.runtime.net.source_filter import filter_refusal
from rrfp.runtime.planes.registry import HOW_TO_INSTALL, is_installed, nixl_api
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import PAPER_LIMIT, Policy
from rrfp.schedule.shape import Shape
from rrfp.simulate.step import play
from rrfp.simulate.world import TaskTimes, World
from rrfp.system import check_open_files, most_open_files, num_cores, temporary_directory
from rrfp.train.launch.private_network import (
    NotPermittedError,
    created_network,
    enter_network,
    run_network,
)
from rrfp.train.settings import DeviceKind, LayoutSettings, RunSettings

# What a check has found.


class State(StrEnum):
    """How good it is."""

    OK = "ok"
    SLOW = "slow"
    """It works, and a run will wait for it, or soon have too little of it."""
    ABSENT = "absent"
    FAILS = "fails"
    """It is here and does not work."""


NO_RUN: frozenset[DeviceKind] = frozenset()
CUDA_RUNS = frozenset({DeviceKind.CUDA})
EVERY_RUN = frozenset(DeviceKind)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried out."""

    name: str
    state: State
    figure: float | None
    """What was measured; None if nothing could be."""
    unit: str
    advice: str
    """What was found, and unless all is well what to do."""
    needed_by: frozenset[DeviceKind] = NO_RUN
    """The devices on which a run fails without it."""

    def ends_runs_on(self, device: DeviceKind) -> bool:
        """Whether a run on this device would fail."""
        return device in self.needed_by and self.state in (State.ABSENT, State.FAILS)

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "state": self.state,
            "figure": self.figure,
            "unit": self.unit,
            "advice": self.advice,
        }


def absent(name: str, advice: str, needed_by: frozenset[DeviceKind] = NO_RUN) -> Check:
    """A thing that this machine lacks."""
    return Check(name, State.ABSENT, None, "", advice, needed_by)


def fails(name: str, advice: str, needed_by: frozenset[DeviceKind] = NO_RUN) -> Check:
    """A thing that does not work."""
    return Check(name, State.FAILS, None, "", advice, needed_by)


# How finely, and how fast, the clock of the trace tells the time.


_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_NUM_READINGS = 20_000
_SLOW_NS = 1000.0
"""A task is recorded with some ten readings."""


def clock(source: Path = _SOURCE) -> Check:
    """The median time between two readings that differ: the resolution, or what a reading takes."""
    readings = sorted({time.monotonic_ns() for _ in range(_NUM_READINGS)})
    step_ns = statistics.median(later - earlier for earlier, later in pairwise(readings))
    is_slow = step_ns > _SLOW_NS
    try:
        name = source.read_text().strip()
    except OSError:
        name = "unknown"
    advice = f"from a reading to the next; the kernel's clock source is {name}"
    return Check(
        "clock",
        State.SLOW if is_slow else State.OK,
        round(step_ns),
        "ns",
        f"{advice}, boot with clocksource=tsc if this machine has it" if is_slow else advice,
    )


# How fast the dispatcher and the simulator are: compiled, or not.


_SHAPE = Shape(8, 32)
_NUM_ROUNDS = 5
_COMPILE = "in a checkout 'make setup' compiles it, where a C compiler is there"


def compiled_core(found: Core | None = None) -> Check:
    """What a task takes in a simulated step; how the core runs is found out unless it is given."""
    found = core() if found is None else found
    rows = [[1] * _SHAPE.num_microbatches] * _SHAPE.num_stages
    policy = Policy(HINTS["bf"].on(_SHAPE), limit=PAPER_LIMIT)
    taken_s = []
    for _ in range(_NUM_ROUNDS):
        start_s = time.perf_counter()
        play(_SHAPE, policy, World(TaskTimes(rows, rows, rows)))
        taken_s.append(time.perf_counter() - start_s)
    num_tasks = _SHAPE.num_ranks * _SHAPE.num_tasks_of_a_rank
    is_compiled = found is Core.COMPILED
    return Check(
        "core",
        State.OK if is_compiled else State.SLOW,
        round(min(taken_s) / num_tasks * 1e6, 1),
        "us",
        f"a simulated task; {found}" if is_compiled else f"a simulated task; {found}; {_COMPILE}",
    )


# How many cores this process may use.


_CGROUPS = Path("/sys/fs/cgroup")


def cores(cgroups: Path = _CGROUPS) -> Check:
    """The cores of its affinity, less where the quota of its control group allows less."""
    num_allowed = num_cores()
    quota = quota_cores(cgroups)
    usable = num_allowed if quota is None else min(num_allowed, quota)
    num_ranks = LayoutSettings().pp
    advice = f"of {os.cpu_count()} in this machine"
    if quota is not None and quota < num_allowed:
        advice += ", by the quota of the control group"
    if usable < num_ranks:
        advice += f"; {num_ranks} ranks share them by default, so pace runs or take fewer, --pp 2"
    return Check(
        "cores",
        State.SLOW if usable < num_ranks else State.OK,
        round(usable, 1),
        "cores",
        advice,
    )


def quota_cores(cgroups: Path) -> float | None:
    """The quota of a control group, of either version, as a container sees its own."""
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
        return None  # "max": there is none
    return quota if quota > 0 else None  # -1: the same


# How many files, sockets included, a process may have open.


_NAME = "open-files"
_ENOUGH = 1024


def open_files() -> Check:
    """The hard limit, which is what ends a run: ranks raise the soft one as far as they need."""
    try:
        check_open_files()
    except UsageError as refusal:
        return fails(_NAME, str(refusal), EVERY_RUN)
    most = most_open_files()
    if most < _ENOUGH:
        state, advice = State.SLOW, ", too few with many peers; raise the limit: ulimit -n 4096"
    else:
        state, advice = State.OK, ""
    return Check(_NAME, state, most, "files", f"may be open in a process{advice}", EVERY_RUN)


# Whether a rank's code can be imported, and how long that takes: torch first, then the rest.


_MODULES = {"torch": "torch", "megatron-core": "rrfp.train.loop"}
"""What is imported for each distribution; a rank also imports what Megatron-Core needs."""
_SLOW_S = 20.0
_IMPORT_LIMIT_S = 180.0


def imports() -> Iterator[Check]:
    """A check for each distribution."""
    for name, module in _MODULES.items():
        try:
            # In a process of its own: if one crashes the other is not to blame.
            modules = [*dict.fromkeys(("torch", module))]
            told = probe(seconds_to_import, modules, limit_s=_IMPORT_LIMIT_S)[module]
        except NoAnswerError as error:
            told = f"cannot be imported ({error})"
        if isinstance(told, str):
            yield fails(name, f"{module} {told}; {_advice(told)}", EVERY_RUN)
        else:
            yield _timed(name, told)


def _advice(told: str) -> str:
    if "PermissionError" in told:
        return "let this user read that file and the directories above it"
    return "install rrfp anew, or raise the limit (ulimit -a) that keeps it from loading"


def _timed(name: str, seconds: float) -> Check:
    is_slow = seconds > _SLOW_S
    found = f"to import {name} {_version(name)}"
    advice = f"{found}, as every rank does; keep the environment on a local disk"
    return Check(
        name,
        State.SLOW if is_slow else State.OK,
        round(seconds, 1),
        "s",
        advice if is_slow else found,
        EVERY_RUN,
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "from a checkout"


def seconds_to_import(modules: list[str]) -> dict[str, float | str]:
    """How long each module takes, one after the other, or why it cannot be imported."""
    told: dict[str, float | str] = {}
    for module in modules:
        start_s = time.perf_counter()
        try:
            importlib.import_module(module)
        except Exception as error:
            told[module] = f"cannot be imported ({described(error)})"
        else:
            told[module] = time.perf_counter() - start_s
    return told


# Whether a run finds room for temporary files.


def temporary_files() -> Check:
    """What is free where they go."""
    try:
        where = temporary_directory()
    except UsageError as error:
        return fails("temp-dir", str(error), EVERY_RUN)
    try:
        free_gb = shutil.disk_usage(where).free / 1e9
    except OSError as error:
        return fails("temp-dir", f"{where} cannot be used ({error}); set TMPDIR", EVERY_RUN)
    return Check("temp-dir", State.OK, round(free_gb, 2), "GB", f"free in {where}", EVERY_RUN)


# What keeps others away from a run's ports: a network of its own, or the kernel's filter.


def private_network() -> Check:
    """Makes one, and takes the time."""
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
    advice = "to make a network that only a run's own ranks can reach"
    return Check("private-network", State.OK, round(taken_ms), "ms", advice)


def port_filter() -> Check:
    """Attaches a filter to a socket."""
    began_s = time.perf_counter()
    if refusal := filter_refusal():
        advice = (
            f"cannot be attached to a TCP socket ({refusal}); add CAP_NET_ADMIN, or let only the "
            "hosts of a run of several hosts reach each other: its ports accept anybody"
        )
        return absent("port-filter", advice)
    taken_us = (time.perf_counter() - began_s) * 1e6
    advice = "to close a port of a run to all but its hosts"
    return Check("port-filter", State.OK, round(taken_us), "us", advice)


# How much shared memory there is, and how fast it is.


_WHERE = Path("/dev/shm")
_ENOUGH_BYTES = 1 << 30
_TRIED_BYTES = 1 << 26
_SLOW_GB_S = 1.0


def shared_memory(where: Path = _WHERE) -> Iterator[Check]:
    """What is free for the libraries that share named files, and the speed of copies into a file
    without a name, as ranks share it."""
    yield _room(where)
    yield _speed()


def _room(where: Path) -> Check:
    try:
        found = os.statvfs(where)
    except OSError as error:
        return absent("shm-room", f"{where} cannot be used ({error.strerror}); mount a tmpfs there")
    if not os.access(where, os.W_OK):
        return fails("shm-room", f"this user may not write to {where}; mount it with mode 1777")
    free_bytes = found.f_bavail * found.f_frsize
    is_little = free_bytes < _ENOUGH_BYTES
    advice = f"free in {where} for NCCL, UCX and data loaders"
    return Check(
        "shm-room",
        State.SLOW if is_little else State.OK,
        round(free_bytes / 1e9, 2),
        "GB",
        f"{advice}; start containers with --shm-size 8g" if is_little else advice,
    )


def _speed() -> Check:
    if not hasattr(os, "memfd_create"):
        return absent("shm-speed", "this system has no memfd_create, so ranks take sockets instead")
    try:
        gb_s = copied_gb_s(_TRIED_BYTES)
    except OSError as error:
        told = f"ranks get no shared memory ({described(error)}) and take sockets instead"
        is_full = error.errno in (errno.ENOSPC, errno.ENOMEM)
        advice = "see how much memory is free" if is_full else "permit that call in the container"
        return fails("shm-speed", f"{told}; {advice}")
    is_slow = gb_s < _SLOW_GB_S
    advice = f"to copy {_TRIED_BYTES >> 20} MiB into shared memory"
    return Check(
        "shm-speed",
        State.SLOW if is_slow else State.OK,
        round(gb_s, 1),
        "GB/s",
        f"{advice}; see whether memory is swapped out" if is_slow else advice,
    )


def copied_gb_s(num_bytes: int) -> float:
    """The speed of the fastest of a few copies. Raises OSError if there is no room for one."""
    data = os.urandom(1 << 20) * (num_bytes >> 20)
    with os.fdopen(os.memfd_create("rrfp-doctor"), "r+b") as file:
        # A page that cannot be had would end the process where it is first written.
        os.posix_fallocate(file.fileno(), 0, len(data))
        with mmap.mmap(file.fileno(), len(data)) as mapped:
            taken_s = []
            for _ in range(_NUM_ROUNDS):
                start_s = time.perf_counter()
                mapped[:] = data
                taken_s.append(time.perf_counter() - start_s)
    return len(data) / min(taken_s) / 1e9


# Whether gloo, which carries the collectives of runs on CPUs, works where ranks meet.


_SLOW_US = 20_000.0
"""Ten times what two busy cores take."""
_NUM_GLOO_ROUNDS = 50
_TIMEOUT_S = 20.0
_GLOO_LIMIT_S = 120.0


def gloo() -> Check:
    """Two ranks of a process add up a number, again and again, in the network of a plain run."""
    try:
        with run_network(RunSettings()) as network:
            taken_us = probe(sum_us, network, limit_s=_GLOO_LIMIT_S)
    except NoAnswerError as error:
        if not error.raised:
            advice = "see whether torch can be imported, and no firewall fences loopback"
        elif error.raised in ("ImportError", "ModuleNotFoundError"):
            advice = "see what is found of torch and megatron-core"
        else:
            advice = "see what refuses that to this user"
        return fails("gloo", f"gloo does not work on {LOOPBACK} ({error}); {advice}", EVERY_RUN)
    is_slow = taken_us > _SLOW_US
    advice = f"for a sum of two ranks on {LOOPBACK}"
    return Check(
        "gloo",
        State.SLOW if is_slow else State.OK,
        round(taken_us),
        "us",
        f"{advice}; see what else runs on this machine" if is_slow else advice,
        EVERY_RUN,
    )


def sum_us(network: dict[str, str]) -> float:
    """The median time of a sum over two ranks, which are threads of this process, in the network
    that these variables name."""
    os.environ.update(network)
    enter_network()

    import torch.distributed as dist

    from rrfp.train.launch.process_groups import one_device_at

    store = dist.HashStore()
    taken_us: list[float] = []

    def rank(number: int) -> None:
        import torch

        group: Any = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=_TIMEOUT_S))
        for _ in range(_NUM_GLOO_ROUNDS):
            total = torch.ones(1)
            start_s = time.perf_counter()
            group.allreduce(total).wait()
            if number == 0:
                taken_us.append((time.perf_counter() - start_s) * 1e6)

    with one_device_at(LOOPBACK):
        other = Thread(target=rank, args=(1,), daemon=True)
        other.start()
        rank(0)
        other.join(_TIMEOUT_S)
    return statistics.median(taken_us)


_NIXL_SOURCE, _READER = "rrfp-doctor-source", "rrfp-doctor-reader"
_READ_BYTES = 1 << 26
_NUM_READS = 5
_SLOW_NIXL_GB_S = 0.5
_NIXL_LIMIT_S = 90.0
_PORTS = Path("/sys/class/infiniband")
_ENOUGH_LOCKED_BYTES = 1 << 34


def nixl() -> Check:
    """The speed of a READ of CPU memory between two agents of a process."""
    if not is_installed():
        told = f"it is not installed, and only messages between hosts gain by it; {HOW_TO_INSTALL}"
        return absent("nixl", told)
    try:
        gb_s = probe(read_gb_s, limit_s=_NIXL_LIMIT_S)
    except NoAnswerError as error:
        is_broken = error.raised in ("", "ImportError", "ModuleNotFoundError")
        advice = f"{HOW_TO_INSTALL} anew" if is_broken else "UCX_LOG_LEVEL=info says more"
        return fails("nixl", f"a READ on this host fails ({error}); {advice}")
    is_slow = gb_s < _SLOW_NIXL_GB_S
    return Check(
        "nixl",
        State.SLOW if is_slow else State.OK,
        round(gb_s, 1),
        "GB/s",
        f"to READ {_READ_BYTES >> 20} MiB on this host"
        + ("; see whether UCX_TLS leaves out shared memory" if is_slow else ""),
    )


def read_gb_s() -> float:
    """The speed of the fastest of a few READs. Raises RuntimeError if one fails.

    Keeps UCX, which otherwise listens at every address of this host, to loopback in this process.
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
    taken_s = []
    for _ in range(_NUM_READS):
        start_s = time.perf_counter()
        handle = reader.initialize_xfer("READ", local, remote, _NIXL_SOURCE)
        state = reader.transfer(handle)
        while state == "PROC" and time.perf_counter() - start_s < _TIMEOUT_S:
            state = reader.check_xfer_state(handle)
        taken_s.append(time.perf_counter() - start_s)
        if state != "DONE":
            raise RuntimeError(f"it is in state {state} after {taken_s[-1]:.1f} s")
        reader.release_xfer_handle(handle)
    if ours.raw != theirs.raw:
        raise RuntimeError("what was read is corrupt")
    return _READ_BYTES / min(taken_s) / 1e9


def fabric(ports: Path = _PORTS, locked_bytes: int | None = None) -> Check:
    """The fastest active port of InfiniBand, RoCE or EFA."""
    if locked_bytes is None:
        locked_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = sorted(ports.glob("*/ports/*"))
    if not found:
        return absent("fabric", "no InfiniBand, RoCE or EFA device; other hosts are reached by TCP")
    active = [port for port in found if "ACTIVE" in _told(port / "state").split()]
    if not active:
        down = f"none of {len(found)} ports is active; see ibstat"
        return fails("fabric", f"{down}; until then other hosts are reached by TCP")
    gbit_s = max(_rate_gbit_s(port) for port in active)
    names = ", ".join(sorted({port.parent.parent.name for port in active}))
    is_locked = locked_bytes != resource.RLIM_INFINITY and locked_bytes < _ENOUGH_LOCKED_BYTES
    return Check(
        "fabric",
        State.SLOW if is_locked else State.OK,
        gbit_s,
        "Gbit/s",
        f"{names}; memory cannot be registered with it: ulimit -l unlimited"
        if is_locked
        else names,
    )


def _told(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _rate_gbit_s(port: Path) -> float:
    """`400 Gb/sec (4X NDR)`; 0 if it does not tell."""
    rate, *_ = [*_told(port / "rate").split(), "0"]
    return float(rate)
