"""What stands in a job for Megatron's schedule functions, and our own that does.

Imports no torch: a script may have things to do before torch is loaded.
"""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol

from rrfp.megatron import installation
from rrfp.megatron.compatibility import check_for_drop_in
from rrfp.megatron.installation import GETTER, NO_PIPELINING, SCHEDULES, megatrons
from rrfp.megatron.job.after_import import after_import
from rrfp.megatron.job.request import RecordingRequest
from rrfp.megatron.settings import DispatchSettings

if TYPE_CHECKING:
    from rrfp.megatron.job.recording import JobRecording


class StandIn(Protocol):
    """Replaces functions of Megatron's."""

    was_called: bool
    """Whether the job has asked for a schedule so far."""

    def check(self) -> None:
        """Raise UsageError for a Megatron-Core that rrfp does not know."""

    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions, by the names of those that they replace."""


def put_now(stand_in: StandIn, asker: str) -> None:
    """Put it in place. Raises UsageError, replacing nothing, if Megatron's schedule has been
    replaced already, and for a Megatron-Core that rrfp does not know."""
    installation.check_free(asker)
    stand_in.check()
    installation.put(stand_in.functions(), asker)


def put_after_import(stand_in: StandIn, asker: str) -> None:
    """Put it in place once the process has imported Megatron's schedules.

    At that time most of Megatron is still to be imported, so Megatron-Core is checked when the job
    asks for a schedule.
    """
    after_import(installation.HOME, lambda: installation.put(stand_in.functions(), asker))


class DropIn:
    """Our schedule, recorded if that is requested."""

    def __init__(self, settings: DispatchSettings, request: RecordingRequest | None) -> None:
        self.was_called = False
        self._settings = settings
        self._request = request
        self._recording: JobRecording | None = None

    def check(self) -> None:
        check_for_drop_in(self._settings, installs=True)

    def functions(self) -> dict[str, Callable[..., Any]]:
        return {GETTER: self.get} | {name: self._named(name) for name in SCHEDULES}

    def get(
        self,
        pp_size: int | None = None,
        vp_size: int | None = None,
        schedule_pg_collection: object = None,
    ) -> Callable[..., Any]:
        """Like Megatron's `get_forward_backward_func`."""
        self.was_called = True
        check_for_drop_in(self._settings)
        # After the check, because they import names that another Megatron-Core may not have.
        from rrfp.megatron import dropin

        sizes = pp_size, vp_size, schedule_pg_collection
        if self._request is None:
            return dropin.get_forward_backward_func(*sizes, settings=self._settings)
        if self._recording is None:
            from rrfp.megatron.job.description import dispatched
            from rrfp.megatron.job.recording import JobRecording

            self._recording = JobRecording(self._request, dispatched(self._settings))
        schedule = dropin.get_forward_backward_func(
            *sizes, settings=self._settings, record=self._recording.record
        )
        return self._recording.of(schedule)

    def _named(self, name: str) -> Callable[..., Any]:
        own = megatrons(name)

        @wraps(own)
        def schedule(**arguments: Any) -> Any:
            if name == NO_PIPELINING and _is_pipelined(arguments.get("pg_collection")):
                # A model that is not the pipeline's, such as a teacher that each rank has whole.
                return own(**arguments)
            return self.get()(**arguments)

        return schedule


def _is_pipelined(groups: Any) -> bool:
    """Whether this rank's pipeline has several ranks."""
    if groups is not None:
        return bool(groups.pp.size() > 1)
    from megatron.core import parallel_state

    return bool(parallel_state.get_pipeline_model_parallel_world_size() > 1)
