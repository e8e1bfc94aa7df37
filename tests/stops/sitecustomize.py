"""Stops a rank (SIGSTOP) as it calls a function for the nth time: `RRFP_STOP=RANK:FILE:FUNCTION:N`.

On the path of a run under test, so that it is imported before anything else.
"""

import os
import signal
import sys
from types import FrameType

_rank, _, _where = os.environ.get("RRFP_STOP", "").partition(":")


def _stop_at(where: str) -> None:
    file, function, nth = where.rsplit(":", 2)
    left = int(nth)

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        code = frame.f_code
        if event == "call" and code.co_name == function and code.co_filename.endswith(file):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                os.kill(os.getpid(), signal.SIGSTOP)

    sys.setprofile(look)


# The planner's process, for one, inherits the variables of its rank.
if _rank and os.environ.get("RANK") == _rank and "rrfp.train.ranks.process" in sys.orig_argv:
    _stop_at(_where)
