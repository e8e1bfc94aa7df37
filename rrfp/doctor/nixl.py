"""Whether NIXL works, and over what it would reach other hosts."""

import ctypes
import os
import resource
import time
from pathlib import Path

from rrfp.doctor.check import Check, State, absent, fails
from rrfp.runtime.planes.nixl_package import HOW_TO_INSTALL, is_installed, nixl_api
from rrfp.runtime.probe import NoAnswerError, probe

_SOURCE, _READER = "rrfp-doctor-source", "rrfp-doctor-reader"
_READ_BYTES = 1 << 26
_NUM_READS = 5
_SLOW_GB_S = 0.5
_PATIENCE_S = 20.0
_LIMIT_S = 90.0
_PORTS = Path("/sys/class/infiniband")
_ENOUGH_LOCKED_BYTES = 1 << 34


def nixl() -> Check:
    """The speed of a READ of CPU memory between two agents of a process."""
    if not is_installed():
        told = f"it is not installed, and only messages between hosts gain by it; {HOW_TO_INSTALL}"
        return absent("nixl", told)
    try:
        gb_s = probe(read_gb_s, limit_s=_LIMIT_S)
    except NoAnswerError as error:
        is_broken = error.raised in ("", "ImportError", "ModuleNotFoundError")
        advice = f"{HOW_TO_INSTALL} anew" if is_broken else "UCX_LOG_LEVEL=info says more"
        return fails("nixl", f"a READ on this host fails ({error}); {advice}")
    is_slow = gb_s < _SLOW_GB_S
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
    source, reader = api.nixl_agent(_SOURCE), api.nixl_agent(_READER)
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
        handle = reader.initialize_xfer("READ", local, remote, _SOURCE)
        state = reader.transfer(handle)
        while state == "PROC" and time.perf_counter() - start_s < _PATIENCE_S:
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
