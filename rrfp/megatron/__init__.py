"""The Megatron floor: the drop-in schedule, the CPU host, a GPT, its data and its training.

Megatron-Core is imported when a function is called, not before: the launcher and the command line
read settings from here and have no use for it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rrfp.megatron.dispatching import DispatchSettings
from rrfp.trace.records import Record

if TYPE_CHECKING:
    from rrfp.megatron.dropin import ForwardBackward

__all__ = ["DispatchSettings", "get_forward_backward_func", "install"]


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

    Call it once in a training script, before the loop starts. Megatron-LM's loop imports the name
    into `megatron.training.training`; it is replaced there too, where that was imported already.
    """
    import sys
    from functools import partial

    import megatron.core.pipeline_parallel.schedules  # noqa: F401 (to be found below)

    function = partial(get_forward_backward_func, settings=settings)
    for name in (
        "megatron.core.pipeline_parallel",
        "megatron.core.pipeline_parallel.schedules",
        "megatron.training.training",
    ):
        if name in sys.modules:
            sys.modules[name].get_forward_backward_func = function  # type: ignore[attr-defined]
