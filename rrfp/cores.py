"""How many cores this process has."""

import os


def num_cores() -> int:
    """On which this process may run: fewer than the machine's under taskset, or as a batch system
    gives them out."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
