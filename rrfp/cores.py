"""How many cores this process has."""

import os
from contextlib import suppress


def num_cores() -> int:
    """On which this process may run: fewer than the machine's under taskset, or as a batch system
    gives them out."""
    with suppress(AttributeError, OSError):  # the system may lack the call, or refuse it
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
