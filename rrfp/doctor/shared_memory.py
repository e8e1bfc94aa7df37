"""How much shared memory there is, and how fast it is."""

import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rrfp.doctor.check import Check, State, absent, fails

_WHERE = Path("/dev/shm")
_ENOUGH_BYTES = 1 << 30
_TRIED_BYTES = 1 << 26
_SLOW_GB_S = 1.0
_NUM_ROUNDS = 5


def shared_memory(where: Path = _WHERE) -> Iterator[Check]:
    """What is free, and the speed of copies into it."""
    try:
        found = os.statvfs(where)
    except OSError as error:
        told = f"{where} cannot be used ({error.strerror}); mount a tmpfs there"
        yield absent("shm-room", told)
        return
    free_bytes = found.f_bavail * found.f_frsize
    is_little = free_bytes < _ENOUGH_BYTES
    yield Check(
        "shm-room",
        State.SLOW if is_little else State.OK,
        round(free_bytes / 1e9, 2),
        "GB",
        f"free in {where}; start containers with --shm-size 8g"
        if is_little
        else f"free in {where}",
    )
    try:
        gb_s = copied_gb_s(where, min(_TRIED_BYTES, free_bytes // 2))
    except OSError as error:
        told = f"{where} cannot be written to ({error.strerror}); mount a tmpfs there"
        yield fails("shm-speed", told)
        return
    is_slow = gb_s < _SLOW_GB_S
    yield Check(
        "shm-speed",
        State.SLOW if is_slow else State.OK,
        round(gb_s, 1),
        "GB/s",
        f"to copy {_TRIED_BYTES >> 20} MiB into shared memory"
        + ("; see whether it is a tmpfs, and not swapped out" if is_slow else ""),
    )


def copied_gb_s(where: Path, num_bytes: int) -> float:
    """The speed of the fastest of a few copies. Raises OSError if there is no room for one."""
    data = os.urandom(1 << 20) * max(1, num_bytes >> 20)
    with tempfile.TemporaryFile(dir=where) as file:
        # A page that cannot be had would end the process where it is first written.
        os.posix_fallocate(file.fileno(), 0, len(data))
        with mmap.mmap(file.fileno(), len(data)) as mapped:
            taken_s = []
            for _ in range(_NUM_ROUNDS):
                start_s = time.perf_counter()
                mapped[:] = data
                taken_s.append(time.perf_counter() - start_s)
    return len(data) / min(taken_s) / 1e9
