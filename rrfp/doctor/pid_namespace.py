"""Which processes can import each other's CUDA memory: those of one PID namespace."""

import re
from pathlib import Path

from rrfp.doctor.check import Check, State, absent

_OWN = Path("/proc/self/ns/pid")
_OF_THE_HOST = 0xEFFFFFFC
"""The kernel's number of the first namespace, the same on every host."""


def pid_namespace(own: Path = _OWN) -> Check:
    """The number of this process' namespace, to be compared between containers."""
    try:
        found = re.search(r"\d+", str(own.readlink()))
    except OSError:
        found = None
    if found is None:
        return absent("pid-namespace", f"{own} cannot be read; mount /proc")
    number = int(found[0])
    advice = (
        "that of the host"
        if number == _OF_THE_HOST
        else "of a container: ranks of a host that show another cannot use CUDA IPC with these; "
        "start containers with --pid=host"
    )
    return Check("pid-namespace", State.OK, number, "", advice)
