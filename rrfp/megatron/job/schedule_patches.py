"""What stands in a job for Megatron's schedule functions, and our own that does.

Imports no torch: a script may have things to do before torch is loaded.
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
"""Runs a step, called as Megatron calls its schedule functions."""


class SchedulePatch(Protocol):
    """Replaces functions of Megatron's."""

    @property
    def was_called(self) -> bool:
        """Whether the job has run a step so far, or tried to."""

    def check(self) -> None:
        """Raise UsageError for a Megatron-Core that rrfp does not know."""

    def functions(self) -> dict[str, Schedule]:
        """The functions, by the names of those that they replace."""

    def on_bypass(self, sentence: str) -> None:
        """Megatron's own function is about to run a step, because the job has fetched it before
        ours was put in its place; `sentence` says where. May raise UsageError."""


def install_now(stand_in: SchedulePatch, asker: str) -> None:
    """Put it in place. Raises UsageError, replacing nothing, if Megatron's schedule has been
    replaced already, and for a Megatron-Core that rrfp does not know."""
    installation.check_not_replaced(asker)
    stand_in.check()
    _put(stand_in, asker)


def install_after_import(stand_in: SchedulePatch, asker: str) -> None:
    """Put it in place once the process has imported Megatron's schedules; that import, or this call
    if it came before, raises UsageError if something has replaced them already.

    At that time most of Megatron is still to be imported, so Megatron-Core is checked when the job
    asks for a schedule.
    """

    def put() -> None:
        installation.check_not_replaced(asker)
        _put(stand_in, asker)

    call_after_import(installation.HOME, put)


def _put(stand_in: SchedulePatch, asker: str) -> None:
    def on_bypass(name: str, where: str, arguments: dict[str, Any]) -> None:
        if not _is_other_pipelines(name, arguments):
            stand_in.on_bypass(
                f"{where} calls Megatron's {name}, which it has fetched before {asker} replaced "
                f"it; call {asker} before the loop calls {GETTER}()"
            )

    installation.put(stand_in.functions(), asker, on_bypass)
    at_end.register(_tell_of_end)


def _tell_of_end() -> None:
    if "torch.distributed" in sys.modules:
        from rrfp.runtime.rendezvous import publish_early_end

        publish_early_end()


def patched_schedule(
    name: str, check: Callable[[], None], run: Callable[[Schedule, dict[str, Any]], Any]
) -> Schedule:
    """Stands for Megatron's schedule function of this name. `check` raises UsageError for a
    Megatron-Core that rrfp does not know; then `run` gets Megatron's own and its arguments. A model
    that is not the pipeline's, such as a teacher that each rank has whole, Megatron runs as
    ever."""
    own = original_function(name)

    @wraps(own)
    def schedule(**arguments: Any) -> Any:
        check()
        if _is_other_pipelines(name, arguments):
            return own(**arguments)
        return run(own, arguments)

    return schedule


def _is_other_pipelines(name: str, arguments: dict[str, Any]) -> bool:
    """Whether a call is about a model that the rank has whole, beside that of its pipeline."""
    from rrfp.megatron.adapters.groups import pipeline_group

    if name != NO_PIPELINING:
        return False
    pipeline = pipeline_group(arguments.get("pg_collection"))
    return pipeline is None or pipeline.size() > 1


class DropInPatch:
    """Our schedule, recorded if that is requested."""

    def __init__(self, settings: DispatchSettings, request: RecordingRequest | None) -> None:
        self._settings = settings
        self._request = request
        self._recording: JobRecording | None = None
        self._own: ForwardBackward | None = None

    @property
    def was_called(self) -> bool:
        return self._own is not None and self._own.was_called

    def check(self) -> None:
        check_for_drop_in(self._settings, installs=True)

    def functions(self) -> dict[str, Schedule]:
        def check() -> None:
            check_for_drop_in(self._settings)

        def run(own: Schedule, arguments: dict[str, Any]) -> Any:
            return self.get()(**arguments)

        return {GETTER: self.get} | {name: patched_schedule(name, check, run) for name in SCHEDULES}

    def on_bypass(self, sentence: str) -> None:
        raise UsageError(sentence)

    def get(
        self,
        pp_size: int | None = None,
        vp_size: int | None = None,
        schedule_pg_collection: object = None,
        **newer: object,
    ) -> Schedule:
        """Like Megatron's `get_forward_backward_func`."""
        refuse_unknown_arguments(GETTER, newer)
        check_for_drop_in(self._settings)
        # After the check, because they import names that another Megatron-Core may not have.
        from rrfp.megatron import dropin

        sizes = pp_size, vp_size, schedule_pg_collection
        if self._request is None:
            self._own = dropin.get_forward_backward_func(*sizes, settings=self._settings)
            return self._own
        if self._recording is None:
            from rrfp.megatron.job.description import describe_dispatch
            from rrfp.megatron.job.recording import JobRecording

            self._recording = JobRecording(self._request, describe_dispatch(self._settings))
        self._own = dropin.get_forward_backward_func(
            *sizes,
            settings=self._settings,
            record=self._recording.record,
            observer=self._recording,
        )
        return self._own
