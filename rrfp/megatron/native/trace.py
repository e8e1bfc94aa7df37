"""Records a user's own training script under Megatron's own schedule."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.profiler import record_function

from rrfp.interchange.ranges import ScheduleRange, schedule_range
from rrfp.megatron.job.description import undispatched
from rrfp.megatron.job.recording import JobRecording
from rrfp.megatron.job.request import RecordingRequest
from rrfp.megatron.native.schedule import NativeSchedule
from rrfp.megatron.native.timing import CudaTimer, HostTimer
from rrfp.trace.records import RankInfo


class NativeTrace:
    """Runs Megatron's own schedule functions, recorded."""

    def __init__(self, request: RecordingRequest) -> None:
        self._recording = JobRecording(request, undispatched())
        self._schedule: NativeSchedule | None = None
        self._cuda_timer: CudaTimer | None = None

    def run(self, schedule: Callable[..., list[Any]], arguments: dict[str, Any]) -> list[Any]:
        """Run one step by one of Megatron's functions, with Megatron's arguments and return
        value."""
        recording = self._recording
        step = recording.begin(arguments)
        if step is None:
            data = schedule(**arguments)
            recording.end(None)
            return data
        if self._schedule is None:
            self._schedule = recording.safely(self._open)
        if self._schedule is None:
            return schedule(**arguments)
        if self._cuda_timer is not None:
            # Most scripts read the loss between steps, which leaves the GPU idle for a moment.
            recording.safely(self._cuda_timer.look_at_clock)
        data = self._schedule.run(partial(schedule, **arguments), step, arguments)
        recording.safely(self._schedule.settle)
        recording.end(step)
        return data

    def _open(self) -> NativeSchedule:
        recording = self._recording
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
    """The name of a step's range in a profile."""
    return schedule_range(
        ScheduleRange(step, info.rank, info.pp_rank, info.tp_rank, info.dp_rank, info.stages)
    )
