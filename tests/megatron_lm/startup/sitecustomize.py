"""Python imports this by itself at the start of every process that has this folder on its path:
in a rank's, Megatron for the CPU and the recorder are put in before the script runs."""

import os
import sys
import traceback


def _prepare() -> None:
    ours = os.environ["RRFP_LM_TESTS"]
    sys.path.insert(0, ours)
    from tests.megatron_lm import rank

    # From here on the package named `tests` is Megatron's.
    sys.path.remove(ours)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    rank.prepare_megatron()
    rank.begin()


# Python's own helper of a rank that starts processes, as for a checkpoint, needs nothing.
if "RANK" in os.environ and not any("resource_tracker" in word for word in sys.orig_argv):
    try:
        _prepare()
    except BaseException:  # Python would say so and go on.
        traceback.print_exc()
        os._exit(1)
