"""The Megatron floor: the drop-in schedule, a recorder for Megatron's own, the CPU host, a GPT, its
data and its training.

Megatron-Core is imported when a function is called, not before: the launcher and the command line
read settings from here and have no use for it.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rrfp.megatron.compatibility import check_for_drop_in, check_for_trace
from rrfp.megatron.installation import megatrons_own, put
from rrfp.megatron.settings import DispatchSettings
from rrfp.trace.records import Record

if TYPE_CHECKING:
    from rrfp.megatron.dropin import ForwardBackward

__all__ = ["DispatchSettings", "get_forward_backward_func", "install", "trace_native"]


def get_forward_backward_func(
    pp_size: int | None = None,
    vp_size: int | None = None,
    *,
    settings: DispatchSettings | None = None,
    record: Callable[[Record], None] | None = None,
) -> "ForwardBackward":
    """In place of `megatron.core.pipeline_parallel.get_forward_backward_func`: the function that a
    training loop calls once a step; `rrfp.megatron.dropin` says what it promises. Raises
    UsageError for a Megatron-Core that it does not know."""
    check_for_drop_in(settings or DispatchSettings())
    # Below the check, for it imports names that another Megatron-Core may not have.
    from rrfp.megatron import dropin

    return dropin.get_forward_backward_func(pp_size, vp_size, settings=settings, record=record)


def install(settings: DispatchSettings | None = None) -> None:
    """Put `get_forward_backward_func` where Megatron's training loop looks it up.

    Call it once in a training script, before the loop starts. Modules that have imported the name
    by then get it too. Raises UsageError when the schedule is not Megatron's own any more, with who
    has replaced it, and for a Megatron-Core that rrfp does not know; nothing is replaced then.
    """
    megatrons_own("install()")
    check_for_drop_in(settings or DispatchSettings(), installs=True)
    put(partial(get_forward_backward_func, settings=settings))


def trace_native(out: Path | str | None = None) -> None:
    """Record Megatron's own schedule, and leave it as it is: losses and gradients stay the same.

    Call it once in a training script, on every rank, before or after Megatron is initialised and
    before the training loop starts. From the first step on every rank records its tasks and waits
    into the run's directory: `out`, or `runs/<time>-native/`. A profile that torch.profiler takes
    meanwhile carries them too, as ranges. When no step has passed by it, it says so as the process
    ends. Raises UsageError as `install` does.
    """
    original = megatrons_own("trace_native()")
    check_for_trace()
    from rrfp.megatron.native.trace import NativeTrace

    put(NativeTrace(original, None if out is None else Path(out)).get)
