"""Records a job's steps on one rank, whoever's schedule runs them.

Recording begins at the first step, when the job has certainly set up its process groups, and ends
with the process. If anything fails here, the training goes on.
"""

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist
from megatron.core.utils import get_model_config

from rrfp.errors import RrfpError
from rrfp.megatron.groups import Place, place_in, step_groups
from rrfp.megatron.job.description import (
    Steering,
    layout_of,
    model_of,
    num_parameters,
    program,
)
from rrfp.megatron.job.meeting import Meeting
from rrfp.megatron.job.request import RecordingRequest
from rrfp.megatron.job.telling import tell
from rrfp.runtime.at_end import at_end
from rrfp.runtime.decoding import integers
from rrfp.runtime.protocols import monotonic
from rrfp.runtime.recorder import Recorder
from rrfp.runtime.rendezvous import default_store
from rrfp.schedule.shape import Shape
from rrfp.trace.description import describe_run
from rrfp.trace.merge import encode_run
from rrfp.trace.records import Phase, PhaseRecord, RankInfo, Record
from rrfp.trace.rundir import RunDir
from rrfp.trace.spill import is_being_written
from rrfp.trace.steps import count_of, evaluation_step, is_evaluation

T = TypeVar("T")

_END_S = 60.0
"""How long the leader waits for the other ranks to close their records."""
_LOOK_S = 0.05

_log = logging.getLogger(__name__)


class JobRecording:
    """This process' recording of its job.

    A recording has one pipeline, that of the first call. A second model, such as a critic, may have
    other groups or chunks; its steps are left out.
    """

    def __init__(self, request: RecordingRequest, steering: Steering) -> None:
        self._request = request
        self._window = request.window
        self._steering = steering
        self._layout: tuple[Place, int] | None = None
        self._recorder: Recorder | None = None
        self._run: RunDir | None = None
        self._is_off = False
        self._has_given_up = False
        self._num_trained = 0
        self._num_evaluated = 0
        self._num_recorded = 0
        self._evaluations: set[int] = set()
        """Steps of the evaluations in the window."""
        self._early: deque[Record] = deque()
        """Records of evaluations that have begun on other ranks only: what they sent."""
        self._left: tuple[int, int] | None = None
        """The last recorded step, and when its call returned, until the next call."""
        self.info: RankInfo | None = None
        """Who this rank is; None before the first step."""
        self.is_on_gpu = False
        """Whether calls return before their work is done; known from the first step on."""
        self.before_close: Callable[[], object] = lambda: None
        """Called before the records are closed, for those that come late."""
        # Registered before the links of a drop-in are, and so called after their end.
        at_end.call(self.close)

    def of(self, schedule: Callable[..., Any]) -> "RecordedSchedule":
        """The schedule function of a drop-in whose records come to `record`."""
        return RecordedSchedule(schedule, self)

    def record(self, record: Record) -> None:
        """Take a record if its step is in the window. Any thread may call this."""
        recorder, step = self._recorder, record.step
        if recorder is None:
            return
        if is_evaluation(step):
            if step in self._evaluations:
                recorder.record(record)
            elif step < evaluation_step(self._num_evaluated - 1):
                self._early.append(record)
        elif self._window.has_step(step):
            recorder.record(record)

    @property
    def num_pipeline_ranks(self) -> int:
        """Of the recorded pipeline; known from the first step on."""
        assert self._layout is not None
        return len(self._layout[0].pipeline)

    def begin(self, arguments: dict[str, Any]) -> int | None:
        """A call of the schedule with these arguments begins. Returns the number of its step; None
        if that is not recorded."""
        return self.safely(lambda: self._begin(arguments))

    def end(self, step: int | None) -> None:
        """The call for which `begin` gave this step has returned."""
        if step is not None:
            self.safely(lambda: self._end(step))

    def safely(self, record: Callable[[], T]) -> T | None:
        """Do a part of the recording. If it fails, recording ends and the training goes on."""
        if self._is_off:
            return None
        try:
            return record()
        except Exception as error:  # whatever it is
            self._is_off = True
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        recorder, self._recorder = self._recorder, None
        if not self._has_given_up:
            self._has_given_up = True
            what = "the run is not recorded" if recorder is None else "recording is switched off"
            _log.warning("%s, the training goes on: %s", what, error)
        if recorder is not None:
            # Whoever reads the run is told by the file that this rank writes no more.
            with suppress(Exception):
                recorder.close()

    def close(self) -> None:
        """Write the remaining records; the leader makes the trace once every rank has done so."""
        self.safely(self._close_records)
        run, self._run = self._run, None
        if run is None:
            return
        try:
            self._conclude(run)
        except Exception as error:  # the process ends well all the same
            _log.warning("the trace is made when 'rrfp analyze' opens the run: %s", error)

    def _begin(self, arguments: dict[str, Any]) -> int | None:
        now_ns = monotonic()
        model = arguments["model"]
        chunks = [*model] if isinstance(model, list | tuple) else [model]
        has_experts = getattr(get_model_config(chunks[0]), "num_moe_experts", None) is not None
        groups = step_groups(arguments.get("p2p_communicator"), arguments.get("pg_collection"))
        layout = place_in(groups, has_experts=has_experts), len(chunks)
        if self._layout is None:
            self._layout = layout
            self.is_on_gpu = any(each.is_cuda for chunk in chunks for each in chunk.parameters())
            self.info = self._identify(layout[0], groups, arguments["num_microbatches"])
            settings = self._described(chunks, groups, arguments, has_experts=has_experts)
            try:
                self._open(self.info, layout[0], groups, settings, chunks)
            except Exception as error:  # whatever it is
                self._give_up(error)
        if layout != self._layout:
            return None
        if self._left is not None:
            step, left_ns = self._left
            self._left = None
            self.record(PhaseRecord(left_ns, now_ns, step, Phase.SCRIPT))
        if self._window.is_over(self._num_trained):
            self._close_records()
            self._is_off = True
            return None
        return self._next_step(forward_only=bool(arguments.get("forward_only", False)))

    def _take_early(self) -> None:
        """Take what came too early to be told by then whether it is in the window."""
        for _ in range(len(self._early)):
            self.record(self._early.popleft())

    def _end(self, step: int) -> None:
        self._take_early()
        if self._recorder is not None:
            self._recorder.flush(step)
        if not self.is_on_gpu:
            self._left = step, monotonic()

    def _next_step(self, *, forward_only: bool) -> int | None:
        # Counted as the drop-in counts: a call that fails counts too.
        if forward_only:
            step = evaluation_step(self._num_evaluated)
            is_recorded = self._window.has_evaluation(self._num_trained)
            if is_recorded:
                self._evaluations.add(step)
            # Last, because other threads tell by it that this has been decided.
            self._num_evaluated += 1
            self._take_early()
            if not is_recorded:
                return None
        else:
            step = self._num_trained
            self._num_trained += 1
            if not self._window.has_step(step):
                return None
            self._num_recorded += 1
        return step

    def _identify(self, place: Place, groups: Any, num_microbatches: int) -> RankInfo:
        assert self._layout is not None
        num_chunks = self._layout[1]
        shape = Shape(len(place.pipeline), num_microbatches, num_chunks, self._steering.placement)
        return RankInfo(
            rank=place.rank,
            pp_rank=place.pp_rank,
            tp_rank=groups.tp.rank(),
            # Ranks that share a sequence run the same tasks, like replicas.
            dp_rank=groups.dp_cp.rank(),
            stages=shape.stages_of(place.pp_rank),
            host=socket.gethostname(),
            pid=os.getpid(),
        )

    def _described(
        self, chunks: Sequence[Any], groups: Any, arguments: dict[str, Any], *, has_experts: bool
    ) -> dict[str, object]:
        return {
            **self._steering.settings(chunks, groups.pp.size()),
            **layout_of(groups, len(chunks), has_experts=has_experts),
            **model_of(chunks, arguments),
            "recorded_by": self._request.by,
            "recorded_steps": str(self._window),
            **program(),
        }

    def _open(
        self,
        own: RankInfo,
        place: Place,
        groups: Any,
        settings: dict[str, object],
        chunks: Sequence[Any],
    ) -> None:
        """Meet the other ranks and open the records. Raises RrfpError if they do not come, and if
        the run's directory cannot be made."""
        replicas = dist.get_process_group_ranks(groups.dp_cp)
        meeting = Meeting(default_store(), own, {*place.pipeline, *place.sharers, *replicas})
        run = meeting.run(self._request, self._steering.label)
        own = meeting.introduce()
        meeting.share("parameters", num_parameters(chunks))
        self._recorder = Recorder(run.rank_records(own.rank), own)
        if meeting.is_leader:
            self._run = run
            ranks = meeting.introduced()
            settings["parameters"] = _by_stage(ranks, meeting.shared("parameters", integers))
            policy = self._steering.policy(settings)
            describe_run(run.run_json, settings, policy, len(ranks), ranks)

    def _close_records(self) -> None:
        recorder = self._recorder
        if recorder is not None:
            self.before_close()
            self._recorder = None
            recorder.close()

    def _conclude(self, run: RunDir) -> None:
        """Make the trace, once every rank has closed its records, and say where it is."""
        if not self._num_recorded and not self._evaluations:
            tell(
                f"{run.path} has no steps: the job made {count_of(range(self._num_trained))}, and "
                f"steps {self._window} were to be recorded"
            )
            return
        deadline_s = time.monotonic() + _END_S
        while any(is_being_written(spill) for spill in run.records.glob("rank-*.jsonl")):
            if time.monotonic() > deadline_s:
                raise RrfpError(f"some rank still writes in {run.records}")
            time.sleep(_LOOK_S)
        # Where the window ended before the job, another command may have made the trace.
        if run.records.is_dir():
            encode_run(run.path)
        steps = [*range(self._num_recorded), *self._evaluations]
        tell(f"{count_of(steps)} recorded in {run.path}; open it with: rrfp trace view {run.path}")


class RecordedSchedule:
    """A schedule function of a drop-in, recorded. Its other attributes are those of the drop-in."""

    def __init__(self, schedule: Callable[..., Any], recording: JobRecording) -> None:
        self._schedule = schedule
        self._recording = recording

    def __call__(self, **arguments: Any) -> Any:
        step = self._recording.begin(arguments)
        data = self._schedule(**arguments)
        self._recording.end(step)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)


def _by_stage(ranks: Sequence[RankInfo], parameters: Sequence[Sequence[int]]) -> list[int]:
    """How many parameters each stage has, on a rank that holds it."""
    found = {
        stage: number
        for info, numbers in zip(ranks, parameters, strict=True)
        for stage, number in zip(info.stages, numbers, strict=True)
    }
    return [found[stage] for stage in sorted(found)]
