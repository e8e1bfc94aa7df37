"""What stands in a job for Megatron's schedule functions to record them. Imports no torch."""

from typing import TYPE_CHECKING, Any

from rrfp.megatron.adapters.compatibility import check_for_trace
from rrfp.megatron.installation import SCHEDULES
from rrfp.megatron.job.request import RecordingRequest, tell
from rrfp.megatron.job.schedule_patches import Schedule, schedule_named

if TYPE_CHECKING:
    from rrfp.megatron.native.schedule import NativeTrace


class RecordedNative:
    """Megatron's own schedule, recorded. Its getter stays: it chooses from the recorded ones."""

    def __init__(self, request: RecordingRequest) -> None:
        self.was_called = False
        self._is_checked = False
        self._was_passed_by = False
        self._request = request
        self._trace: NativeTrace | None = None

    def check(self) -> None:
        check_for_trace()

    def functions(self) -> dict[str, Schedule]:
        return {name: schedule_named(name, self._check_once, self._run) for name in SCHEDULES}

    def is_passed_by(self, sentence: str) -> None:
        """Megatron's schedule is what was asked for: only its recording is missing."""
        if not self._was_passed_by:
            self._was_passed_by = True
            tell(f"{sentence}; this step and others called so are not recorded")

    def _check_once(self) -> None:
        """Before the first step: during one, what is checked is replaced by what records it."""
        if not self._is_checked:
            self.check()
            self._is_checked = True

    def _run(self, own: Schedule, arguments: dict[str, Any]) -> Any:
        self.was_called = True
        if self._trace is None:
            from rrfp.megatron.native.schedule import NativeTrace

            self._trace = NativeTrace(self._request)
        return self._trace.run(own, arguments)
