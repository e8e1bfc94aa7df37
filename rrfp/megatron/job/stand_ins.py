"""What stands in a job for Megatron's schedule functions, and our own that does.

Imports no torch: a script may have things to do before torch is loaded.
"""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol

from rrfp.megatron import installation
from rrfp.megatron.compatibility import check_for_drop_in
from rrfp.megatron.installation import GETTER, NO_PIPELINING, SCHEDULES, megatrons, refuse_newer
from rrfp.megatron.job.after_import import after_import
from rrfp.megatron.job.request import RecordingRequest
from rrfp.megatron.settings import DispatchSettings

if TYPE_CHECKING:
    from rrfp.megatron.dropin import ForwardBackward
    from rrfp.megatron.job.recording import JobRecording

Schedule = Callable[..., Any]
"""Runs a step, called as Megatron calls its schedule functions."""


class StandIn(Protocol):
    """Replaces functions of Megatron's."""

    @property
    def was_called(self) -> bool:
        """Whether the job has run a step so far, or tried to."""

    def check(self) -> None:
        """Raise UsageError for a Megatron-Core that rrfp does not know."""

    def functions(self) -> dict[str, Schedule]:
        """The functions, by the names of those that they replace."""


def put_now(stand_in: StandIn, asker: str) -> None:
    """Put it in place. Raises UsageError, replacing nothing, if Megatron's schedule has been
    replaced already, and for a Megatron-Core that rrfp does not know."""
    installation.check_free(asker)
    stand_in.check()
    installation.put(stand_in.functions(), asker)


def put_after_import(stand_in: StandIn, asker: str) -> None:
    """Put it in place once the process has imported Megatron's schedules; that import, or this call
    if it came before, raises UsageError if something has replaced them already.

    At that time most of Megatron is still to be imported, so Megatron-Core is checked when the job
    asks for a schedule.
    """

    def put() -> None:
        installation.check_free(asker)
        installation.put(stand_in.functions(), asker)

    after_import(installation.HOME, put)


def schedule_named(
    name: str, check: Callable[[], None], run: Callable[[Schedule, dict[str, Any]], Any]
) -> Schedule:
    """Stands for Megatron's schedule function of this name. `check` raises UsageError for a
    Megatron-Core that rrfp does not know; then `run` gets Megatron's own and its arguments. A model
    that is not the pipeline's, such as a teacher that each rank has whole, Megatron runs as
    ever."""
    own = megatrons(name)

    @wraps(own)
    def schedule(**arguments: Any) -> Any:
        check()
        if name == NO_PIPELINING and not _is_whole_pipeline(arguments.get("pg_collection")):
            return own(**arguments)
        return run(own, arguments)

    return schedule


def _is_whole_pipeline(groups: Any) -> bool:
    """Whether this rank alone is the pipeline of these groups."""
    from rrfp.megatron.adapters.group_collections import pipeline_of

    pipeline = pipeline_of(groups)
    return pipeline is not None and pipeline.size() == 1


class DropIn:
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

        return {GETTER: self.get} | {name: schedule_named(name, check, run) for name in SCHEDULES}

    def get(
        self,
        pp_size: int | None = None,
        vp_size: int | None = None,
        schedule_pg_collection: object = None,
        **newer: object,
    ) -> Schedule:
        """Like Megatron's `get_forward_backward_func`."""
        refuse_newer(GETTER, newer)
        check_for_drop_in(self._settings)
        # After the check, because they import names that another Megatron-Core may not have.
        from rrfp.megatron import dropin
        from rrfp.megatron.job.recorded_schedule import RecordedSchedule

        sizes = pp_size, vp_size, schedule_pg_collection
        if self._request is None:
            self._own = dropin.get_forward_backward_func(*sizes, settings=self._settings)
            return self._own
        if self._recording is None:
            from rrfp.megatron.job.description import dispatched
            from rrfp.megatron.job.recording import JobRecording

            self._recording = JobRecording(self._request, dispatched(self._settings))
        self._own = dropin.get_forward_backward_func(
            *sizes, settings=self._settings, record=self._recording.record
        )
        return RecordedSchedule(self._own, self._recording)
