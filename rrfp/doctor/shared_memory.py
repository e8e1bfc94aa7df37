"""How much shared memory there is, and how fast it is."""

import errno
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

from rrfp.doctor.check import Check, State, absent, fails
from rrfp.errors import described

_WHERE = Path("/dev/shm")
_ENOUGH_BYTES = 1 << 30
_TRIED_BYTES = 1 << 26
_SLOW_GB_S = 1.0
_NUM_ROUNDS = 5


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
