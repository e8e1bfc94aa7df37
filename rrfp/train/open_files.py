"""How many files, sockets included, the processes of a run may have open."""

import errno
import resource

from rrfp.errors import UsageError

FILES_OF_A_RANK = 64
"""A rank of a plain run has 40 open."""
_FILES_OF_A_PEER = 16
"""Of a rank with connections to all others, in each of its groups."""
_MOST_DESCRIPTORS = 2**31 - 1
"""Without a limit: a descriptor is an int of C."""
_ADVICE = "raise the limit: ulimit -n 4096"


def most_open_files() -> int:
    """As many files as this process may ever have open: ranks raise their own limit that far."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_DESCRIPTORS if most == resource.RLIM_INFINITY else most


def check_open_files() -> None:
    """Raise UsageError if no rank could run with so few."""
    most = most_open_files()
    if most < FILES_OF_A_RANK:
        raise UsageError(
            f"a process may have {most} files open here and a rank needs {FILES_OF_A_RANK}; "
            f"{_ADVICE}"
        )


def allow_open_files(num_ranks: int) -> None:
    """Let this process, and those that it starts, have as many files open as a rank of such a run
    may need, as far as the system allows."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_OF_A_RANK + _FILES_OF_A_PEER * num_ranks
    if most != resource.RLIM_INFINITY:
        needed = min(needed, most)
    if 0 <= allowed < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))


def is_of_too_many(error: BaseException) -> bool:
    """Whether this process could open no more files. torch says so in a bare RuntimeError."""
    if isinstance(error, OSError):
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return isinstance(error, RuntimeError) and "Too many open files" in str(error)


def told_of_too_many() -> str:
    """What a process says that has come to its limit."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"it needs more than the {allowed} files that it may have open; {_ADVICE}"
