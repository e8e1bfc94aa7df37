"""Limits and services of the operating system: open files, cores, C calls, temporary files."""

import ctypes
import errno
import os
import resource
import tempfile
from contextlib import suppress
from pathlib import Path

from rrfp.errors import UsageError

# How many cores this process has.


def num_cores() -> int:
    """Return the number of cores on which this process may run. It can be less than the machine's,
    under taskset or a batch system; quotas of containers do not count."""
    with suppress(AttributeError, OSError):  # the system may lack the call, or refuse it
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# Calls of the C library for which Python has no function.


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library that returns 0 if all is well. Raises OSError with the C
    library's errno if not, and AttributeError if this system's library has none of that name."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


FILES_OF_A_RANK = 64
"""A rank of a plain run has 40 open."""
_FILES_OF_A_PEER = 16
"""The files that a rank needs for each peer, with connections to all peers in each of its
groups."""
_MOST_DESCRIPTORS = 2**31 - 1
"""Without a limit: a descriptor is an int of C."""
_ADVICE = "raise the limit: ulimit -n 4096"


def most_open_files() -> int:
    """Return how many files this process may let itself open: its hard limit, not the current one.
    Without a limit it is 2**31 - 1."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_DESCRIPTORS if most == resource.RLIM_INFINITY else most


def check_open_files() -> None:
    """Raise UsageError if the hard limit on open files is below the 64 that any rank needs."""
    most = most_open_files()
    if most < FILES_OF_A_RANK:
        raise UsageError(
            f"a process may have {most} files open here and a rank needs {FILES_OF_A_RANK}; "
            f"{_ADVICE}"
        )


def allow_open_files(num_ranks: int) -> None:
    """Raise this process's soft limit on open files to 64 and 16 per rank, which a rank of such a
    run may need, but not above the hard limit. Processes that it starts inherit it. The limit is
    never lowered."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_OF_A_RANK + _FILES_OF_A_PEER * num_ranks
    if most != resource.RLIM_INFINITY:
        needed = min(needed, most)
    if 0 <= allowed < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))


def is_of_too_many(error: BaseException) -> bool:
    """Return True if an error means that no more files can be opened: EMFILE or ENFILE, or the bare
    RuntimeError in which torch says so."""
    if isinstance(error, OSError):
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return isinstance(error, RuntimeError) and "Too many open files" in str(error)


def describe_too_many_files() -> str:
    """Describe, for an error, that this process has reached its soft limit on open files."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"it needs more than the {allowed} files that it may have open; {_ADVICE}"


# Where a run keeps what only it uses while it lasts.


def temporary_directory() -> Path:
    """Return the directory for temporary files. Raises UsageError if none can be written to."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        raise UsageError(
            "no directory for temporary files can be written to; set TMPDIR to one that can"
        ) from None
