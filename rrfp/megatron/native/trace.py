"""Records a user's own training script under Megatron's own schedule.

Recording begins at the first step, when Megatron is certainly initialised, and ends with the
process. If anything fails here, training goes on.
"""

import logging
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch.profiler import record_function

from rrfp.errors import RrfpError
from rrfp.interchange.ranges import ScheduleRange, schedule_range
from rrfp.megatron.native.schedule import NativeSchedule
from rrfp.megatron.native.timing import CudaTimer, HostTimer
from rrfp.runtime.at_end import at_end
from rrfp.runtime.introduction import introduce, introduced
from rrfp.runtime.recorder import Recorder
from rrfp.runtime.rendezvous import Rendezvous, default_store
from rrfp.schedule.policy import Dispatch
from rrfp.trace.description import describe_run
from rrfp.trace.merge import encode_run
from rrfp.trace.records import RankInfo
from rrfp.trace.run_policy import unbound_policy
from rrfp.trace.rundir import RunDir, create_run_dir
from rrfp.trace.spill import is_being_written

_MEETING_S = 60.0
_END_S = 60.0
"""How long rank 0 waits for the other ranks to close their records."""
_LOOK_S = 0.05

_NOT_RECORDED = "the run is not recorded, the training goes on: %s"
_log = logging.getLogger(__name__)


class NativeTrace:
    """Replaces Megatron's `get_forward_backward_func`, and returns its functions recorded."""

    def __init__(self, original: Callable[..., Any], out: Path | None) -> None:
        self._original = original
        self._out = out
        self._rank: _Rank | None = None
        self._has_begun = False
        at_end.call(self._warn_if_unused)

    def get(self, *args: Any, **kwargs: Any) -> Callable[..., list[Any]]:
        """Like Megatron's `get_forward_backward_func`."""
        return partial(self._run, self._original(*args, **kwargs))

    def _run(self, schedule: Callable[..., list[Any]], **arguments: Any) -> list[Any]:
        if not self._has_begun:
            self._has_begun = True
            try:
                self._rank = _Rank(arguments, self._out)
            except Exception as error:  # whatever it is, the training goes on
                _log.warning(_NOT_RECORDED, error)
        if self._rank is None:
            return schedule(**arguments)
        return self._rank.run(schedule, arguments)

    def _warn_if_unused(self) -> None:
        if not self._has_begun:
            _log.warning(
                "trace_native() saw no step and recorded nothing; call it before the script calls "
                "get_forward_backward_func()"
            )


class _Rank:
    """This rank's part of the run, from its first step on."""

    def __init__(self, arguments: dict[str, Any], out: Path | None) -> None:
        model = arguments["model"]
        chunks = model if isinstance(model, list) else [model]
        is_cuda = any(parameter.is_cuda for parameter in chunks[0].parameters())
        info = _info(len(chunks))
        path = None
        try:
            run, info = _meet(info, out)
            path = run.rank_records(info.rank)
            if info.rank == 0:
                settings = _settings(chunks, arguments["num_microbatches"], is_cuda)
                _describe(run, settings, info)
        except Exception as error:  # whatever it is, the training goes on
            _log.warning(_NOT_RECORDED, error)
            path = None
        self._info = info
        self._recorder = Recorder(path, info)
        self._timer = CudaTimer() if is_cuda else HostTimer()
        self._schedule = NativeSchedule(
            info.pp_rank,
            self._recorder.record,
            self._timer,
            record_function,
            lambda step: schedule_range(
                ScheduleRange(
                    step, info.rank, info.pp_rank, info.tp_rank, info.dp_rank, info.stages
                )
            ),
        )
        self._is_off = False
        self._directory = None if path is None else path.parent.parent
        at_end.call(self.close)

    def run(self, schedule: Callable[..., list[Any]], arguments: dict[str, Any]) -> list[Any]:
        """Run one step."""
        if self._is_off:
            return schedule(**arguments)
        if isinstance(self._timer, CudaTimer):
            # Most scripts read the loss between steps, which leaves the GPU idle for a moment.
            self._safely(self._timer.look_at_clock)
        data = self._schedule.run(schedule, **arguments)
        self._safely(self._schedule.settle)
        self._safely(self._flush)
        return data

    def _flush(self) -> None:
        step = self._schedule.step
        assert step is not None, "a step was run"
        self._recorder.flush(step)

    def _safely(self, record: Callable[[], object]) -> None:
        """Do a part of the recording; if it fails, training goes on."""
        if self._is_off:
            return
        try:
            record()
        except Exception as error:
            self._is_off = True
            if self._directory is not None:  # else the one warning was given at the first step
                _log.warning("recording is switched off, the training goes on: %s", error)

    def close(self) -> None:
        """Write the remaining records; rank 0 makes the trace once every rank has done so."""
        self._safely(self._schedule.close)
        directory, self._directory = self._directory, None
        try:
            self._recorder.close()
            if directory is not None and self._info.rank == 0:
                _merge(RunDir(directory))
        except Exception as error:  # the process ends well all the same
            _log.warning("the trace is made when 'rrfp analyze' opens the run: %s", error)


def _info(num_chunks: int) -> RankInfo:
    """This rank's identity and place."""
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    num_ranks = parallel_state.get_pipeline_model_parallel_world_size()
    return RankInfo(
        rank=dist.get_rank(),
        pp_rank=pp_rank,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        # Ranks that share a sequence run the same tasks, like replicas.
        dp_rank=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        stages=tuple(chunk * num_ranks + pp_rank for chunk in range(num_chunks)),
        host=socket.gethostname(),
        pid=os.getpid(),
    )


def _meet(info: RankInfo, out: Path | None) -> tuple[RunDir, RankInfo]:
    """The run's directory, which rank 0 makes, and this rank with its clock's offset. All ranks
    call it. Raises RrfpError if a rank does not come, or if rank 0 cannot make the directory."""
    store = default_store()
    rendezvous = Rendezvous(store, "rrfp/native", info.rank, _MEETING_S)
    if info.rank == 0:
        try:
            made = create_run_dir(out, force=False, hint="native").path.absolute()
        except RrfpError:
            rendezvous.publish("run", "")
            raise
        rendezvous.publish("run", str(made))
    told = rendezvous.wait_text("run", 0)
    if not told:
        raise RrfpError("rank 0 could not make the directory of the run; see its own warning")
    info = introduce(store, "rrfp/native", info, dist.get_world_size(), timeout_s=_MEETING_S)
    return RunDir(Path(told)), info


def _describe(run: RunDir, settings: dict[str, object], own: RankInfo) -> None:
    """Write the run's description, once every rank has introduced itself."""
    store = default_store()
    world_size = dist.get_world_size()
    infos = introduced(store, "rrfp/native", own.rank, world_size, timeout_s=_MEETING_S)
    policy = unbound_policy(str(settings["hint"]), Dispatch.MEGATRON)
    describe_run(run.run_json, settings, policy, world_size, infos)


def _settings(chunks: list[Any], num_microbatches: int, is_cuda: bool) -> dict[str, object]:
    """What a replay needs to know, under the names of `rrfp train`'s settings."""
    num_ranks = parallel_state.get_pipeline_model_parallel_world_size()
    in_turn = get_model_config(chunks[0]).microbatch_group_size_per_vp_stage
    hint = "1f1b"
    if len(chunks) > 1:
        is_usual = in_turn in (None, num_ranks)
        # With an unknown hint name, a replay takes the order in which the tasks ran.
        hint = "interleaved" if is_usual else f"interleaved by {in_turn}"
    return {
        "dispatch": str(Dispatch.MEGATRON),
        "hint": hint,
        "recorded_by": "trace_native",
        "device": "cuda" if is_cuda else "cpu",
        "pp": num_ranks,
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "chunks": len(chunks),
        "placement": "loop",
        "microbatches": num_microbatches,
        "torch": torch.__version__,
    }


def _merge(run: RunDir) -> None:
    deadline_s = time.monotonic() + _END_S
    while any(is_being_written(spill) for spill in run.records.glob("rank-*.jsonl")):
        if time.monotonic() > deadline_s:
            raise RrfpError(f"some rank still writes in {run.records}")
        time.sleep(_LOOK_S)
    _log.info("the trace of the run is in %s", encode_run(run.path))
