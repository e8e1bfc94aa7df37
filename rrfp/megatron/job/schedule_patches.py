"""Patches of a job's schedule functions, and the patch that puts the drop-in there.

Imports no torch, because a script may need to run code before torch is loaded.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol

from rrfp.errors import UsageError
from rrfp.megatron import installation
from rrfp.megatron.adapters.compatibility import check_for_drop_in
from rrfp.megatron.installation import (
    GETTER,
    NO_PIPELINING,
    SCHEDULES,
    call_after_import,
    original_function,
    refuse_unknown_arguments,
)
from rrfp.megatron.job.request import RecordingRequest
from rrfp.megatron.settings import DispatchSettings
from rrfp.runtime.exit_hooks import at_end

if TYPE_CHECKING:
    from rrfp.megatron.dropin import ForwardBackward
    from rrfp.megatron.job.recording import JobRecording


Schedule = Callable[..., Any]
"""Runs a step; has the signature of Megatron's schedule functions."""


class SchedulePatch(Protocol):
    """A set of replacements for Megatron's schedule functions."""

    @property
    def was_called(self) -> bool:
        """True once the job has started a step."""

    def check(self) -> None:
        """Raise UsageError if rrfp does not support the installed Megatron-Core."""

    def functions(self) -> dict[str, Schedule]:
        """The replacements, keyed by the names of Megatron's functions."""

    def on_bypass(self, sentence: str) -> None:
        """React to a call of Megatron's own function, which the job fetched before the patch was
        installed. `sentence` describes the call. May raise UsageError."""


def install_now(patch: SchedulePatch, asker: str) -> None:
    """Install a patch in all loaded modules. Raise UsageError, replacing nothing, if Megatron's
    schedule has been replaced already, or if rrfp does not support the installed Megatron-Core."""
    installation.check_not_replaced(asker)
    patch.check()
    _install(patch, asker)


def install_after_import(patch: SchedulePatch, asker: str) -> None:
    """Install a patch when the process imports Megatron's schedules, or now if it already has. If
    something has already replaced them, that import (or this call) raises UsageError.

    At that time most of Megatron is not imported yet. The patch therefore checks Megatron-Core when
    the job fetches or calls a schedule.
    """

    def install() -> None:
        installation.check_not_replaced(asker)
        _install(patch, asker)

    call_after_import(installation.HOME, install)


def _install(patch: SchedulePatch, asker: str) -> None:
    """Install a patch without checks, and register that this process publishes its end at exit. If
    the job calls one of Megatron's own functions for this pipeline, `patch.on_bypass` gets a
    sentence that describes the call."""

    def on_bypass(name: str, where: str, arguments: dict[str, Any]) -> None:
        if not _is_other_pipelines(name, arguments):
            patch.on_bypass(
                f"{where} calls Megatron's {name}, which it has fetched before {asker} replaced "
                f"it; call {asker} before the loop calls {GETTER}()"
            )

    installation.replace_functions(patch.functions(), asker, on_bypass)
    at_end.register(_publish_end)


def _publish_end() -> None:
    """Publish to the ranks that wait for this one that its process ends, if it has published
    nothing to them before. Do nothing if torch.distributed was never imported."""
    if "torch.distributed" in sys.modules:
        from rrfp.runtime.rendezvous import publish_early_end

        publish_early_end()


def patched_schedule(
    name: str, check: Callable[[], None], run: Callable[[Schedule, dict[str, Any]], Any]
) -> Schedule:
    """Return a replacement of Megatron's schedule function `name`. Each call first calls `check`,
    and then `run` with Megatron's own function and the arguments. Calls with a model outside of the
    pipeline, such as a teacher that every rank holds whole, run Megatron's function instead of
    `run`."""
    own = original_function(name)

    @wraps(own)
    def schedule(**arguments: Any) -> Any:
        check()
        if _is_other_pipelines(name, arguments):
            return own(**arguments)
        return run(own, arguments)

    return schedule


def _is_other_pipelines(name: str, arguments: dict[str, Any]) -> bool:
    """True if a call of the schedule `name` runs a model outside of the pipeline, which the rank
    holds whole: Megatron's function without pipelining is called, and the pipeline has several
    ranks or does not exist."""
    from rrfp.megatron.adapters.groups import pipeline_group

    if name != NO_PIPELINING:
        return False
    pipeline = pipeline_group(arguments.get("pg_collection"))
    return pipeline is None or pipeline.size() > 1


class DropInPatch:
    """Replaces Megatron's schedule by the drop-in, and records it if requested."""

    def __init__(self, settings: DispatchSettings, request: RecordingRequest | None) -> None:
        self._settings = settings
        self._request = request
        self._recording: JobRecording | None = None
        self._schedule: ForwardBackward | None = None

    @property
    def was_called(self) -> bool:
        """True once the job has started a step with the drop-in."""
        return self._schedule is not None and self._schedule.was_called

    def check(self) -> None:
        """Raise UsageError if the installed Megatron-Core lacks names that the drop-in uses or
        replaces, or has them in another form. A passed check is cached."""
        check_for_drop_in(self._settings, installs=True)

    def functions(self) -> dict[str, Schedule]:
        """Return the replacements of Megatron's getter and of its three schedule functions, keyed
        by name. A replaced schedule function checks Megatron-Core and runs the step on the
        drop-in."""

        def check() -> None:
            check_for_drop_in(self._settings)

        def run(own: Schedule, arguments: dict[str, Any]) -> Any:
            return self.get()(**arguments)

        return {GETTER: self.get} | {name: patched_schedule(name, check, run) for name in SCHEDULES}

    def on_bypass(self, sentence: str) -> None:
        """Raise UsageError with this sentence, so that no step runs outside of the drop-in."""
        raise UsageError(sentence)

    def get(
        self,
        pp_size: int | None = None,
        vp_size: int | None = None,
        schedule_pg_collection: object = None,
        **newer: object,
    ) -> Schedule:
        """Return the drop-in's function for a step; replaces Megatron's
        `get_forward_backward_func`. If a recording is requested, the first call creates it and all
        functions share it. Raise UsageError for a Megatron-Core that rrfp does not support, and
        what `refuse_unknown_arguments` raises for `newer`."""
        refuse_unknown_arguments(GETTER, newer)
        check_for_drop_in(self._settings)
        # After the check, because they import names that another Megatron-Core may not have.
        from rrfp.megatron import dropin

        sizes = pp_size, vp_size, schedule_pg_collection
        if self._request is None:
            self._schedule = dropin.get_forward_backward_func(*sizes, settings=self._settings)
            return self._schedule
        if self._recording is None:
            from rrfp.megatron.job.description import describe_dispatch
            from rrfp.megatron.job.recording import JobRecording

            self._recording = JobRecording(self._request, describe_dispatch(self._settings))
        self._schedule = dropin.get_forward_backward_func(
            *sizes,
            settings=self._settings,
            record=self._recording.record,
            observer=self._recording,
        )
        return self._schedule
