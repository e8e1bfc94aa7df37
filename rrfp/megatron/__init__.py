"""The drop-in for Megatron-Core's schedule function.

`rrfp.megatron.native` records and paces Megatron's own schedule, and `rrfp.megatron.cpu` makes
Megatron-Core run on the CPU. Megatron-Core is imported only when a function is called, because the
launcher and the command line only read settings from here.
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
    """Replaces `megatron.core.pipeline_parallel.get_forward_backward_func`: returns the function
    that a training loop calls once per step. `rrfp.megatron.dropin` says what that function
    promises. Raises UsageError for a Megatron-Core that rrfp does not know."""
    check_for_drop_in(settings or DispatchSettings())
    # After the check, because it imports names that another Megatron-Core may not have.
    from rrfp.megatron import dropin

    return dropin.get_forward_backward_func(pp_size, vp_size, settings=settings, record=record)


def install(settings: DispatchSettings | None = None) -> None:
    """Put `get_forward_backward_func` where Megatron's training loop looks it up.

    Call it once in a training script, before the loop starts. Modules that have already imported
    the name get it too. Raises UsageError, replacing nothing, if something else has replaced
    Megatron's schedule (the message says what), and for a Megatron-Core that rrfp does not know.
    """
    megatrons_own("install()")
    check_for_drop_in(settings or DispatchSettings(), installs=True)
    put(partial(get_forward_backward_func, settings=settings))


def trace_native(out: Path | str | None = None) -> None:
    """Record Megatron's own schedule without changing it: losses and gradients stay the same.

    Call it once in a training script, on every rank, before or after Megatron is initialised and
    before the training loop starts. From the first step on, every rank records its tasks and waits
    in the run's directory: `out`, or `runs/<time>-native/`. A torch.profiler profile of that time
    has them too, as ranges. If it saw no step, it warns as the process ends. Raises UsageError as
    `install` does.
    """
    original = megatrons_own("trace_native()")
    check_for_trace()
    from rrfp.megatron.native.trace import NativeTrace

    put(NativeTrace(original, None if out is None else Path(out)).get)
