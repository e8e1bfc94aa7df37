"""How many files, sockets included, a process may have open."""

import resource

from rrfp.doctor.check import EVERY_RUN, Check, State
from rrfp.train.ranks.open_files import FILES_OF_A_RANK

_ENOUGH = 1024


def open_files(allowed: int | None = None) -> Check:
    """The soft limit, unless another is given."""
    if allowed is None:
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_OF_A_RANK
    state = State.FAILS if allowed < needed else State.SLOW if allowed < _ENOUGH else State.OK
    advice = {
        State.OK: "may be open in a process",
        State.SLOW: "may be open in a process, too few with many peers; raise it: ulimit -n 4096",
        State.FAILS: f"a process may have {allowed} files open and a rank needs {FILES_OF_A_RANK}; "
        "raise it: ulimit -n 4096",
    }
    return Check("open-files", state, allowed, "files", advice[state], EVERY_RUN)
