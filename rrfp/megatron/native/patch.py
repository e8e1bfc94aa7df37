"""The patch that records a job's own Megatron schedule. Imports no torch."""

from functools import partial
from typing import TYPE_CHECKING, Any

from rrfp.interchange.range_names import ScheduleRange, schedule_range
from rrfp.megatron.adapters.compatibility import check_for_trace
from rrfp.megatron.installation import SCHEDULES
from rrfp.megatron.job.request import RecordingRequest, print_to_stderr
from rrfp.megatron.job.schedule_patches import Schedule, patched_schedule
from rrfp.trace.records import RankInfo

if TYPE_CHECKING:
    from rrfp.megatron.job.recording import JobRecording
    from rrfp.megatron.native.schedule import CudaTimer, NativeSchedule


class NativePatch:
    """Replaces Megatron's schedule functions by recorded ones. Its getter stays and chooses among
    these."""

    def __init__(self, request: RecordingRequest) -> None:
        self.was_called = False
        self._is_checked = False
        self._has_warned_of_bypass = False
        self._request = request
        self._recording: JobRecording | None = None
        self._schedule: NativeSchedule | None = None
        self._cuda_timer: CudaTimer | None = None

    def check(self) -> None:
        """Raise UsageError if `trace_native()` does not support the installed Megatron-Core."""
        check_for_trace()

    def functions(self) -> dict[str, Schedule]:
        """Return recorded versions of Megatron's three schedule functions, keyed by name."""
        return {name: patched_schedule(name, self._check_once, self.run) for name in SCHEDULES}

    def on_bypass(self, sentence: str) -> None:
        """Print this sentence to stderr at the first call, adding that such steps are not recorded.
        The step otherwise runs as requested."""
        if not self._has_warned_of_bypass:
            self._has_warned_of_bypass = True
            print_to_stderr(f"{sentence}; this step and others called so are not recorded")

    def _check_once(self) -> None:
        """Check Megatron-Core at the first call only, because during a step the checked functions
        are wrapped."""
        if not self._is_checked:
            self.check()
            self._is_checked = True

    def run(self, own: Schedule, arguments: dict[str, Any]) -> Any:
        """Run one step with Megatron's function `own`, and record it if its step is to be recorded.
        Return the function's result. The first call starts the recording; a failure of the
        recording does not affect the step."""
        self.was_called = True
        if self._recording is None:
            # Imported after the check, because another Megatron-Core may lack names they import.
            from rrfp.megatron.job.description import describe_native_dispatch
            from rrfp.megatron.job.recording import JobRecording

            self._recording = JobRecording(self._request, describe_native_dispatch())
        recording = self._recording
        step = recording.begin(arguments)
        if step is None:
            data = own(**arguments)
            recording.end(None)
            return data
        if self._schedule is None:
            self._schedule = recording.safely(lambda: self._open(recording))
        if self._schedule is None:
            return own(**arguments)
        if self._cuda_timer is not None:
            # Most scripts read the loss between steps, which leaves the GPU idle for a moment.
            recording.safely(self._cuda_timer.compare_clocks)
        data = self._schedule.run(partial(own, **arguments), step, arguments)
        recording.safely(self._schedule.settle)
        recording.end(step)
        return data

    def _open(self, recording: "JobRecording") -> "NativeSchedule":
        """Create the recorder of steps, timed with CUDA events on a GPU. It records late times
        before the recording closes."""
        from torch.profiler import record_function

        from rrfp.megatron.native.schedule import CudaTimer, HostTimer, NativeSchedule

        info = recording.info
        assert info is not None, "a step has begun"
        if recording.is_on_gpu:
            self._cuda_timer = CudaTimer()
        found = NativeSchedule(
            info.pp_rank,
            recording.record,
            self._cuda_timer or HostTimer(),
            record_function,
            partial(_range_of, info),
            num_ranks=recording.num_pipeline_ranks,
        )
        recording.before_close = partial(found.settle, wait=True)
        return found


def _range_of(info: RankInfo, step: int) -> str:
    """The name of a step's range in a profile, with this rank's place."""
    return schedule_range(
        ScheduleRange(step, info.rank, info.pp_rank, info.tp_rank, info.dp_rank, info.stages)
    )
