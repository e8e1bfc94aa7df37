"""The Megatron floor: the drop-in schedule, a recorder for Megatron's own, the CPU host, a GPT, its
data and its training.

Megatron-Core is imported when a function is called, not before: the launcher and the command line
read settings from here and have no use for it.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rrfp.errors import UsageError
from rrfp.megatron.dispatching import DispatchSettings
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
    training loop calls once a step; `rrfp.megatron.dropin` says what it promises."""
    from rrfp.megatron import dropin

    return dropin.get_forward_backward_func(pp_size, vp_size, settings=settings, record=record)


def install(settings: DispatchSettings | None = None) -> None:
    """Put `get_forward_backward_func` where Megatron's training loop looks it up.

    Call it once in a training script, before the loop starts. Modules that have imported the name
    by then get it too. Raises UsageError when the schedule is not Megatron's own any more.
    """
    _put(_megatrons_own(), partial(get_forward_backward_func, settings=settings))


def trace_native(out: Path | str | None = None) -> None:
    """Record Megatron's own schedule, and leave it as it is: losses and gradients stay the same.

    Call it once in a training script, on every rank, before or after Megatron is initialised and
    before the training loop starts. From the first step on every rank records its tasks and waits
    into the run's directory: `out`, or `runs/<time>-native/`. A profile that torch.profiler takes
    meanwhile carries them too, as ranges. When no step has passed by it, it says so as the process
    ends. Raises UsageError when the schedule is not Megatron's own any more.
    """
    original = _megatrons_own()
    from rrfp.megatron.native_trace import NativeTrace

    _put(original, NativeTrace(original, None if out is None else Path(out)).get)


def _megatrons_own() -> Callable[..., Any]:
    """Megatron's `get_forward_backward_func`."""
    import megatron.core.pipeline_parallel.schedules as schedules

    found: Callable[..., Any] = schedules.get_forward_backward_func
    if found.__module__ != schedules.__name__:
        raise UsageError(
            "rrfp has replaced Megatron's schedule in this process already; call either install() "
            "or trace_native(), and only once"
        )
    return found


def _put(original: Callable[..., Any], function: Callable[..., Any]) -> None:
    """Put a function in the place of another in every module that has it, under whatever name: a
    script may have imported it before it calls us."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is original:
                setattr(module, name, function)
