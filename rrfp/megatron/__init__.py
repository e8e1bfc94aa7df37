"""The drop-in replacement for Megatron-Core's schedule function.

`rrfp.megatron.native` records and paces Megatron's own schedule, and `rrfp.megatron.cpu` patches
Megatron-Core for the CPU. Only function calls import Megatron-Core, because the launcher and the
command line need just the settings.
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
    """Return the function that a training loop calls once per step. Replaces
    `megatron.core.pipeline_parallel.get_forward_backward_func`; `ForwardBackward` documents the
    result. Raises UsageError if rrfp does not support the installed Megatron-Core, these arguments,
    or a value in `newer` other than Megatron's default; TypeError for a name unknown to both."""
    check_for_drop_in(settings or DispatchSettings())
    refuse_unknown_arguments(GETTER, newer)
    # Imported after the check, because another Megatron-Core may lack names that it imports.
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
    """Replace Megatron's schedule by rrfp's in every module that has it.

    Call it once in a training script, before the loop starts. Modules that have already imported
    `get_forward_backward_func`, or a function that it chooses from, are patched too. If the loop
    holds a schedule function that it fetched earlier, its next step raises UsageError.

    With `out`, every rank records its steps, from the first one on, in the run directory `out`.
    `steps` selects some of them, such as `"20:40"` (training steps 20 to 39, and the evaluations
    between them). With `at_import`, the patch is applied when the process imports Megatron, for
    code that also runs in processes that do not train.

    Raises UsageError, replacing nothing, if something else has replaced Megatron's schedule (the
    message names it), or if rrfp does not support the installed Megatron-Core. With `at_import`,
    the former is raised once Megatron is imported, the latter when the job fetches a schedule.
    Also raises UsageError for invalid `steps`, and for `steps` without `out`.
    """
    if out is None and steps is not None:
        raise UsageError(f"steps {steps} are to be recorded nowhere; say where with out=DIRECTORY")
    request = None if out is None else _request("install()", out, steps)
    patch = DropInPatch(settings or DispatchSettings(), request)
    _install(patch, "install()", at_import=at_import, is_recorded=request is not None)


def trace_native(
    out: Path | str | None = None, *, steps: str | None = None, at_import: bool = False
) -> None:
    """Record Megatron's own schedule without changing it: losses and gradients stay the same.

    Call it once in a training script, on every rank, before or after Megatron is initialized and
    before the training loop starts. From the first step on, every rank records its tasks and waits
    in the run directory: `out`, or `runs/<time>-native/`. `steps` and `at_import` are as in
    `install`. A torch.profiler profile taken meanwhile contains them as ranges. If the process ends
    without a step, a warning says so, unless `at_import` is set. Raises UsageError as `install`
    does; with `at_import`, an unsupported Megatron-Core is found at the first step.
    """
    patch = NativePatch(_request("trace_native()", out, steps))
    _install(patch, "trace_native()", at_import=at_import, is_recorded=True)


def _request(by: str, out: Path | str | None, steps: str | None) -> RecordingRequest:
    """Return the request to record a job in `out` (None: a new dated directory). Raise UsageError
    for an invalid or empty range of `steps`."""
    return RecordingRequest(by, None if out is None else Path(out), StepWindow.of(steps))


def _install(patch: SchedulePatch, asker: str, *, at_import: bool, is_recorded: bool) -> None:
    """Install a patch, or with `at_import` once Megatron is imported. A recording patch that is
    installed now also warns at exit if it has seen no step."""
    if at_import:
        install_after_import(patch, asker)
        return
    install_now(patch, asker)

    def warn_if_unused() -> None:
        if not patch.was_called:
            _log.warning(
                "%s saw no step and recorded nothing; call it before the training loop starts",
                asker,
            )

    if is_recorded:
        at_end.register(warn_if_unused)
