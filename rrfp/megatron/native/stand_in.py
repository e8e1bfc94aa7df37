"""What stands in a job for Megatron's schedule functions to record them. Imports no torch."""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from rrfp.megatron.compatibility import check_for_trace
from rrfp.megatron.installation import SCHEDULES, megatrons
from rrfp.megatron.job.request import RecordingRequest

if TYPE_CHECKING:
    from rrfp.megatron.native.trace import NativeTrace


class RecordedNative:
    """Megatron's own schedule, recorded. Its getter stays: it chooses from the recorded ones."""

    def __init__(self, request: RecordingRequest) -> None:
        self.was_called = False
        self._request = request
        self._trace: NativeTrace | None = None

    def check(self) -> None:
        check_for_trace()

    def functions(self) -> dict[str, Callable[..., Any]]:
        return {name: self._named(name) for name in SCHEDULES}

    def _named(self, name: str) -> Callable[..., Any]:
        own = megatrons(name)

        @wraps(own)
        def schedule(**arguments: Any) -> Any:
            self.was_called = True
            if self._trace is None:
                self.check()
                from rrfp.megatron.native.trace import NativeTrace

                self._trace = NativeTrace(self._request)
            return self._trace.run(own, arguments)

        return schedule
