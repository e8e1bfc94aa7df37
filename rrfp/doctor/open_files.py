"""How many files, sockets included, a process may have open."""

from rrfp.doctor.check import EVERY_RUN, Check, State, fails
from rrfp.errors import UsageError
from rrfp.train.open_files import check_open_files, most_open_files

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
