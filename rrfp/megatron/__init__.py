"""The drop-in for Megatron-Core's schedule function.

`rrfp.megatron.native` records and paces Megatron's own schedule, and `rrfp.megatron.cpu` makes
Megatron-Core run on the CPU. Megatron-Core is imported only when a function is called, because the
launcher and the command line only read settings from here.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rrfp.errors import UsageError
from rrfp.megatron.adapters.compatibility import check_for_drop_in
from rrfp.megatron.installation import GETTER, refuse_unknown_arguments
from rrfp.megatron.job.request import RecordingRequest, StepWindow
from rrfp.megatron.job.schedule_patches import (
    DropInPatch,
    SchedulePatch,
    install_after_import,
    install_now,
)
from rrfp.megatron.native.patch import NativePatch
from rrfp.megatron.settings import DispatchSettings
from rrfp.runtime.exit_hooks import at_end
from rrfp.trace.records import Record

if TYPE_CHECKING:
    from rrfp.megatron.dropin import ForwardBackward

_log = logging.getLogger(__name__)

__all__ = ["DispatchSettings", "get_forward_backward_func", "install", "trace_native"]


def get_forward_backward_func(
    pp_size: int | None = None,
    vp_size: int | None = None,
    schedule_pg_collection: object = None,
    *,
    settings: DispatchSettings | None = None,
    record: Callable[[Record], None] | None = None,
    **newer: object,
) -> "ForwardBackward":
    """Replaces `megatron.core.pipeline_parallel.get_forward_backward_func`: returns the function
    that a training loop calls once per step. `rrfp.megatron.dropin` says what that function
    promises. Raises UsageError for a Megatron-Core that rrfp does not know."""
    check_for_drop_in(settings or DispatchSettings())
    refuse_unknown_arguments(GETTER, newer)
    # After the check, because it imports names that another Megatron-Core may not have.
    from rrfp.megatron import dropin

    return dropin.get_forward_backward_func(
        pp_size, vp_size, schedule_pg_collection, settings=settings, record=record
    )


def install(
    settings: DispatchSettings | None = None,
    *,
    out: Path | str | None = None,
    steps: str | None = None,
    at_import: bool = False,
) -> None:
    """Put our schedule where Megatron's training loops look it up.

    Call it once in a training script, before the loop starts. Modules that have already imported
    `get_forward_backward_func`, or a function that it chooses from, get ours too. If the loop holds
    a schedule function that it has fetched before, its next step raises UsageError.

    With `out`, every rank records its steps from the first one on, in the run's directory `out`;
    `steps` chooses some, as `"20:40"` (training steps 20 to 39, and the evaluations between them).
    With `at_import`, Megatron is left alone until the process imports it: for code that every
    process of a job runs, whether it trains or not.

    Raises UsageError, replacing nothing, if something else has replaced Megatron's schedule (the
    message says what), and for a Megatron-Core that rrfp does not know; with `at_import` the latter
    comes when the job asks for a schedule.
    """
    if out is None and steps is not None:
        raise UsageError(f"steps {steps} are to be recorded nowhere; say where with out=DIRECTORY")
    request = None if out is None else _request("install()", out, steps)
    stand_in = DropInPatch(settings or DispatchSettings(), request)
    _put(stand_in, "install()", at_import=at_import, is_recorded=request is not None)


def trace_native(
    out: Path | str | None = None, *, steps: str | None = None, at_import: bool = False
) -> None:
    """Record Megatron's own schedule without changing it: losses and gradients stay the same.

    Call it once in a training script, on every rank, before or after Megatron is initialised and
    before the training loop starts. From the first step on, every rank records its tasks and waits
    in the run's directory: `out`, or `runs/<time>-native/`; `steps` and `at_import` are as in
    `install`. A torch.profiler profile of that time has them too, as ranges. If it saw no step, it
    warns as the process ends, unless `at_import`. Raises UsageError as `install` does.
    """
    stand_in = NativePatch(_request("trace_native()", out, steps))
    _put(stand_in, "trace_native()", at_import=at_import, is_recorded=True)


def _request(by: str, out: Path | str | None, steps: str | None) -> RecordingRequest:
    return RecordingRequest(by, None if out is None else Path(out), StepWindow.of(steps))


def _put(stand_in: SchedulePatch, asker: str, *, at_import: bool, is_recorded: bool) -> None:
    """Put it in place; a recording warns as the process ends if it has seen no step."""
    if at_import:
        install_after_import(stand_in, asker)
        return
    install_now(stand_in, asker)

    def warn_if_unused() -> None:
        if not stand_in.was_called:
            _log.warning(
                "%s saw no step and recorded nothing; call it before the training loop starts",
                asker,
            )

    if is_recorded:
        at_end.register(warn_if_unused)
