"""The work of one rank of a training run, from introducing itself to its last step."""

import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from rrfp.errors import RrfpError
from rrfp.megatron.adapters.groups import data_parallel_group
from rrfp.megatron.dropin import ForwardBackward, get_forward_backward_func
from rrfp.megatron.job.transport_log import TransportLog
from rrfp.megatron.native.schedule import CudaTimer, NativeSchedule
from rrfp.megatron.pipeline import discard
from rrfp.megatron.settings import DispatchSettings
from rrfp.megatron.step_report import StepReport
from rrfp.planning.candidates import describe_choice
from rrfp.runtime import rendezvous as introduction
from rrfp.runtime.net.transport import make_device
from rrfp.runtime.pace import Delays, Pace
from rrfp.runtime.protocols import Clock, StepSummary, monotonic
from rrfp.runtime.recorder import Recorder
from rrfp.runtime.rendezvous import default_store
from rrfp.schedule.policy import Dispatch
from rrfp.trace.records import NS_PER_S, BegunRecord, Doing, Phase, PhaseRecord, RankInfo, Record
from rrfp.trace.run_dir import RunDir
from rrfp.trace.run_json import PolicyLog
from rrfp.trace.safe_files import ReportFile
from rrfp.trace.spill import records_bytes
from rrfp.train.checkpoints.run_start import write_description
from rrfp.train.checkpoints.saving import Session, session_of
from rrfp.train.data.batches import Batch, open_data
from rrfp.train.launch.process_groups import Layout
from rrfp.train.launch.rank_status import enter
from rrfp.train.launch.watchdog import C_CALL
from rrfp.train.models.model import ModelChunks, build_model
from rrfp.train.ordered_batches import OrderedBatches
from rrfp.train.pacing import PaceTally, StepPacer, pace_of
from rrfp.train.settings import DeviceKind, TrainSettings

if TYPE_CHECKING:
    from rrfp.train.checkpoints.saving import RunCheckpoints


# One rank's training step, under any schedule function with Megatron's signature.


_NUM_WARMUP_STEPS = 10
"""The learning rate rises to its full value over these steps. Without that, Adam's first updates,
all of one size, destabilize a fresh model."""


class Schedule(Protocol):
    """A schedule function like those of Megatron's `get_forward_backward_func`."""

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: list[Iterator[Any]],
        model: list[Any],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        forward_only: bool = False,
    ) -> list[Any]: ...


def run_schedule(
    schedule: Schedule,
    settings: TrainSettings,
    model: ModelChunks,
    batches: Sequence[Batch],
    *,
    forward_only: bool = False,
) -> list[Any]:
    """Copy the microbatches to the model's device and run a step of a schedule on them, in their
    order. Return the losses on the last stage's rank, and an empty list on others."""
    on_device = [_on_device(batch, model.device) for batch in batches]
    return schedule(
        forward_step_func=model.forward_step,
        data_iterator=[iter(on_device) for _ in model.chunks],
        model=model.chunks,
        num_microbatches=len(batches),
        seq_length=settings.data.seq_length,
        micro_batch_size=settings.data.micro_batch_size,
        forward_only=forward_only,
    )


def _on_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy the tensors of a batch to a device."""
    return {name: tensor.to(device) for name, tensor in batch.items()}


class StepResult(NamedTuple):
    """The outcome of a step, the same on every rank."""

    loss: float
    """Mean over the microbatches, in their order, and over the replicas, in theirs."""
    grad_norm: float
    """Norm of the whole model's gradient before clipping."""
    tokens: int
    """Labels that counted, over all replicas."""
    heldout_loss: float | None = None
    """Mean over the held-out labels; None if there was no evaluation after this step."""


class Trainer:
    """Trains one rank's chunks, a step at a time."""

    def __init__(
        self,
        settings: TrainSettings,
        layout: Layout,
        model: ModelChunks,
        batches: OrderedBatches,
        schedule: Schedule,
        record: Callable[[Record], None],
        clock: Clock = monotonic,
        pace: StepPacer | None = None,
    ) -> None:
        """`record` receives the step's data and optimizer phases; the schedule records its own.
        `pace` is the schedule's; it is prepared before each step."""
        self._settings = settings
        self._layout = layout
        self._model = model
        self._batches = batches
        self._schedule = schedule
        self._record = record
        self._clock = clock
        self._pace = pace

    def train_step(self, step: int) -> StepResult:
        """Run one step with the optimizer's update, every rank at once; return the loss, gradient
        norm and tokens, the same on all ranks. The learning rate warms up over the first 10 steps.
        Raise RrfpError, after the update, if the loss or the gradient norm is not finite."""
        settings, model = self._settings, self._model
        start_ns = self._begin_phase(Phase.DATA, step)
        batches = self._batches.batches(step)
        if self._pace is not None:
            self._pace.prepare(step)
        self._finish_phase(Phase.DATA, start_ns, step)

        self._begin_phase(Phase.SCHEDULE, step)
        losses = run_schedule(self._schedule, settings, model, batches)

        enter(f"in the optimizer of step {step}")
        start_ns = self._begin_phase(Phase.OPTIMIZER, step)
        for group in model.optimizer.param_groups:
            group["lr"] = settings.run.lr * min(1.0, (step + 1) / _NUM_WARMUP_STEPS)
        _, grad_norm, _ = model.optimizer.step()
        for chunk in model.chunks:
            chunk.zero_grad_buffer()
        model.optimizer.zero_grad()
        tokens = sum(float(batch["loss_mask"].sum()) for batch in batches)
        loss, tokens = self._shared(losses, tokens)
        self._finish_phase(Phase.OPTIMIZER, start_ns, step)
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            raise RrfpError(
                f"step {step} has a loss of {loss:g} and a gradient norm of {grad_norm:g}, which "
                "further steps cannot fix; try a smaller --lr"
            )
        return StepResult(loss, float(grad_norm), int(tokens))

    def _begin_phase(self, phase: Phase, step: int) -> int:
        """Record that a phase of the step begins now, and return this time in ns."""
        start_ns = self._clock()
        self._record(BegunRecord(start_ns, start_ns, step, phase))
        return start_ns

    def _finish_phase(self, phase: Phase, start_ns: int, step: int) -> None:
        """Record a phase of the step that began at `start_ns` and ends now."""
        self._record(PhaseRecord(start_ns, self._clock(), step, phase))

    def _shared(self, losses: list[dict[str, torch.Tensor]], tokens: float) -> tuple[float, float]:
        """Return the step's loss and tokens on every rank: the last stage's ranks average the
        losses and sum the tokens over the replicas, and one of them broadcasts both."""
        layout = self._layout
        shared = torch.zeros(2, dtype=torch.float64)
        if layout.pp_rank == layout.last_stage_pp_rank:
            loss = sum(item["loss"].item() for item in losses) / len(losses)
            own = torch.tensor([loss, tokens], dtype=torch.float64)
            replicas = [torch.empty_like(own) for _ in range(layout.dp)]
            dist.all_gather(replicas, own, group=data_parallel_group(None))
            shared[0] = sum(replica[0].item() for replica in replicas) / layout.dp
            shared[1] = sum(replica[1].item() for replica in replicas)
        dist.broadcast(shared, layout.first_rank(layout.last_stage_pp_rank))
        return shared[0].item(), shared[1].item()


# The files of the run that describe its steps.


class StepReports:
    """Writes the steps that have ended: a line of `metrics.jsonl` with figures of all ranks, the
    policies and the transport in `run.json`, and the orders of their microbatches."""

    def __init__(
        self,
        session: Session,
        settings: TrainSettings,
        layout: Layout,
        info: RankInfo,
        batches: OrderedBatches,
        pace: StepPacer | None,
    ) -> None:
        """Open the files on rank 0. Without checkpoints, the run ends if its directory is
        removed."""
        self._settings = settings
        self._layout = layout
        self._offset_ns = info.clock_offset_ns
        self._batches = batches
        self._pace = None if pace is None or pace.modeled is None else pace
        run, is_first = session.run, layout.rank == 0
        is_needed = settings.run.save is None
        self._metrics = ReportFile(run.metrics, is_needed=is_needed) if is_first else None
        self._policies = PolicyLog(run.run_json) if is_first else None
        batches.open_file(run, session.first_step)
        ranks = range(layout.world_size) if is_first else ()
        self._transport = TransportLog(default_store(), "train", run, layout.rank, ranks)

    def log_transport(self, report: StepReport) -> None:
        """Publish the data planes that carry this rank's tensors, once; rank 0 writes those of all
        ranks to `run.json` when all have published. Do nothing for Megatron's own schedule, which
        has no planes."""
        if report.planes is not None:
            self._transport.publish(report.planes)

    def write(self, step: int, result: StepResult, report: StepReport, seconds: float) -> None:
        """Gather a finished step's figures from all ranks and write its files on rank 0: a line of
        metrics, its microbatch order if planned or balanced, and its policy if that has changed.
        Later steps are planned under its policy. Every rank calls this; `seconds` is the time of
        the whole step, without an evaluation."""
        plan, policy = self._batches.plan_figures(), report.policy
        hint, choice = f"{self._settings.hint.name} {self._settings.policy.dispatch}", None
        if policy is not None:
            self._batches.follow(policy)
            if self._policies is not None:
                self._policies.record(step, policy.policy.described())
            hint = describe_choice(policy.policy)
            choice = None if policy.choice is None else policy.choice.described()
        ranks = self._gather(report.summary)
        if self._metrics is not None:
            line = {
                "step": step,
                "loss": result.loss,
                "heldout_loss": result.heldout_loss,
                "grad_norm": result.grad_norm,
                "step_time_s": seconds,
                "tokens": result.tokens,
                **self._figures(ranks),
                "plan": plan,
                "hint": hint,
                "choice": choice,
                "over_pace": None
                if self._pace is None
                else {
                    "tasks": int(ranks[:, 6].sum()),
                    "of": int(ranks[:, 5].sum()),
                    "worst_s": float(ranks[:, 7].max()) / NS_PER_S,
                },
            }
            self._metrics.write(json.dumps(line, allow_nan=False) + "\n")
        self._batches.write_step()

    def _gather(self, summary: StepSummary) -> torch.Tensor:
        """All-gather the figures of a step, a row of float64 numbers for each rank, with times on
        rank 0's clock. Resets the peak of this rank's GPU memory."""
        tally = PaceTally() if self._pace is None else self._pace.tally
        # Float64 represents nanoseconds exactly for the first hundred days after a host's boot.
        own = torch.tensor(
            [
                summary.start_ns + self._offset_ns,
                summary.end_ns + self._offset_ns,
                summary.busy_ns,
                summary.peak_held,
                summary.peak_held_bytes or 0,
                tally.num_tasks,
                tally.num_over,
                tally.worst_over_ns,
                *_bytes_on_gpu(self._layout.device),
            ],
            dtype=torch.float64,
        )
        ranks = [torch.empty_like(own) for _ in range(self._layout.world_size)]
        dist.all_gather(ranks, own)
        return torch.stack(ranks)

    def _figures(self, ranks: torch.Tensor) -> dict[str, object]:
        """Compute the entries of `metrics.jsonl` that summarize all ranks: the bubble fraction
        (None with --no-trace) and, per pipeline rank, the busy share of the step's window, peaks of
        held activations, and current and peak GPU bytes. Bytes that no rank reports are None."""
        pp = self._layout.pp
        window_ns = float(ranks[:, 1].max() - ranks[:, 0].min())
        # Pipeline rank varies slowest in the numbering of ranks.
        busy = (ranks[:, 2] / window_ns).reshape(pp, -1)
        peak_held = ranks[:, 3].reshape(pp, -1).amax(dim=1)
        peak_bytes = ranks[:, 4].reshape(pp, -1).amax(dim=1)
        on_gpu = ranks[:, 8:].reshape(pp, -1, 2).amax(dim=1)
        is_traced = not self._settings.run.no_trace
        return {
            "bubble_fraction": 1.0 - float(busy.mean()) if is_traced else None,
            "peak_held": peak_held.tolist(),
            "peak_held_bytes": [int(each) for each in peak_bytes] if peak_bytes.any() else None,
            "allocated_bytes": on_gpu[:, 0].long().tolist() if on_gpu.any() else None,
            "peak_allocated_bytes": on_gpu[:, 1].long().tolist() if on_gpu.any() else None,
            "busy_fraction": busy.mean(dim=1).tolist(),
        }

    def copy_metrics_to(self, path: Path) -> None:
        """Write all lines of `metrics.jsonl` so far into a new file, on rank 0; do nothing on
        others. May raise OSError."""
        if self._metrics is not None:
            self._metrics.copy_to(path)

    def close(self) -> None:
        """Close the files after writing pending lines, and end the planner's process. Raise
        RrfpError if the run's directory was removed and there are no checkpoints."""
        self._batches.close()
        if self._metrics is not None:
            self._metrics.close()


def _bytes_on_gpu(device: torch.device) -> tuple[int, int]:
    """Return the bytes of this rank's tensors on its GPU, and their peak since the last call, which
    starts a new peak; zeros on a CPU."""
    if device.type == "cpu":
        return 0, 0
    found = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return found


# The loss on held-out data, computed by forwards alone through the same schedule.


_MIN_MICROBATCHES = 32
"""The microbatches of an evaluation, rounded up to whole steps on every replica."""


class OwnSchedule(Schedule, Protocol):
    """A schedule function that only one caller uses and closes."""

    def close(self) -> None:
        """Close the schedule's links to other ranks."""
        ...


class Evaluation:
    """Evaluates the same held-out microbatches every time, without affecting training."""

    def __init__(
        self,
        settings: TrainSettings,
        layout: Layout,
        model: ModelChunks,
        heldout: Callable[[int], Batch],
        schedule: OwnSchedule,
    ) -> None:
        """Load this replica's share of at least 32 held-out microbatches. `schedule` must not be
        the training's: its steps are numbered separately. Raises as `heldout` does."""
        self._settings = settings
        self._layout = layout
        self._model = model
        self._schedule = schedule
        num, dp = settings.data.microbatches, layout.dp
        # Load them now, so that an unreadable image ends the run before it has trained.
        self._steps = [
            [heldout((step * dp + layout.dp_rank) * num + index) for index in range(num)]
            for step in range(-(-_MIN_MICROBATCHES // (num * dp)))
        ]

    def is_due(self, step: int) -> bool:
        """True after the last step and after every `heldout_every` steps; without that setting,
        only after the last one."""
        settings = self._settings
        is_last = step + 1 == settings.num_steps
        every = settings.run.heldout_every
        return is_last or (every is not None and (step + 1) % every == 0)

    def loss(self) -> float:
        """Run forwards only on the loaded held-out microbatches of all replicas and return the mean
        loss over their labels that count, the same on every rank; all ranks call this. Raise
        RrfpError if it is not finite."""
        layout = self._layout
        for chunk in self._model.chunks:
            chunk.eval()
        with torch.no_grad():
            sums = torch.stack([self._step(batches) for batches in self._steps]).sum(dim=0)
        for chunk in self._model.chunks:
            chunk.train()
        if layout.pp_rank == layout.last_stage_pp_rank:
            dist.all_reduce(sums, group=data_parallel_group(None))
        dist.broadcast(sums, layout.first_rank(layout.last_stage_pp_rank))
        loss = (sums[0] / sums[1]).item()
        if not math.isfinite(loss):
            raise RrfpError(
                f"the held-out loss is {loss:g}, which further steps cannot fix; try a smaller --lr"
            )
        return loss

    def close(self) -> None:
        """Close the schedule's links."""
        self._schedule.close()

    def _step(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Run the forwards of some microbatches; return the sum of their label losses and the
        number of labels that count. Both are zero except on the last stage's rank."""
        losses = run_schedule(
            self._schedule, self._settings, self._model, batches, forward_only=True
        )
        sums = torch.zeros(2, dtype=torch.float64)
        # Empty except on the rank of the last stage.
        for item, batch in zip(losses, batches, strict=bool(losses)):
            count = float(batch["loss_mask"].sum())
            sums += torch.tensor([item["loss"].item() * count, count], dtype=torch.float64)
        return sums


_INTRODUCTION_S = 60.0
_INTRODUCTIONS = "rrfp/ranks"
_LATER_S = 5.0
"""The time in seconds that a rank waits longer than the launcher for a silent neighbor, because the
launcher knows more of the cause."""


def work(run: RunDir, settings: TrainSettings, layout: Layout) -> None:
    """Train this rank's chunks through all remaining steps, or with --save until SIGTERM, recording
    them unless --no-trace is set. Rank 0 writes `run.json` first. Raises as training does."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    info = introduce(layout)
    with session_of(run, settings, layout) as session:
        if layout.rank == 0:
            write_description(session.run, settings, _introduced(layout), session.first_step)
        records = None if settings.run.no_trace else session.run.rank_records(info.rank)
        most_bytes = records_bytes(settings.run.trace_mb, layout.world_size)
        with Recorder(records, info, most_bytes=most_bytes) as recorder:
            _train(session, settings, layout, info, recorder)


def _train(
    session: Session,
    settings: TrainSettings,
    layout: Layout,
    info: RankInfo,
    recorder: Recorder,
) -> None:
    """Set up this rank's training, run its remaining steps with their evaluations, metrics and
    checkpoints, and close its files and links. It ends early after the checkpoint that SIGTERM asks
    for."""
    recorder.begin(session.first_step, Doing.SETTING_UP)
    pace = pace_of(settings, layout)
    data = open_data(settings)
    batches = OrderedBatches(settings, layout, data, recorder.record, pace)
    reports = StepReports(session, settings, layout, info, batches, pace)
    schedule = schedule_of(settings, layout.pp_rank, batches.record, pace=pace)
    schedule.start_at(session.first_step)
    model = build_model(settings, layout, data)
    trainer = Trainer(settings, layout, model, batches, schedule, recorder.record, pace=pace)
    evaluation = evaluation_of(settings, layout, model, data.heldout)
    checkpoints = checkpoints_of(session, settings, layout, model, reports)
    for step in range(session.first_step, settings.num_steps):
        enter(f"in step {step}")
        start_s = time.monotonic()
        result = trainer.train_step(step)
        seconds = time.monotonic() - start_s
        if isinstance(schedule, NativeSchedule):
            # The times of a GPU's tasks are known once they are done.
            schedule.settle(wait=True)
        report = schedule.report
        assert report is not None
        if evaluation is not None and evaluation.is_due(step):
            enter(f"in the evaluation after step {step}")
            recorder.begin(step, Doing.EVALUATION)
            result = result._replace(heldout_loss=evaluation.loss())
        reports.log_transport(report)
        # Writing metrics waits for every rank, so a step in them is in the records of all ranks.
        recorder.flush(step)
        recorder.begin(step, Doing.METRICS)
        reports.write(step, result, report, seconds)
        if checkpoints is not None:
            enter(f"in the checkpoint after step {step}")
            recorder.begin(step, Doing.CHECKPOINT)
            if checkpoints.finish_step(step):
                break
    enter("after the last step")
    recorder.begin(step, Doing.CLOSING)
    # All ranks have published their transport by now.
    if schedule.report is not None:
        reports.log_transport(schedule.report)
    if checkpoints is not None:
        checkpoints.close()
    if evaluation is not None:
        evaluation.close()
    schedule.close()
    reports.close()


def checkpoints_of(
    session: Session,
    settings: TrainSettings,
    layout: Layout,
    model: ModelChunks,
    reports: StepReports,
) -> "RunCheckpoints | None":
    """Make the object that saves the run's checkpoints, or return None without --save. If the run
    resumes, load its checkpoint into the model."""
    if settings.run.save is None:
        return None
    # Imported late: Megatron's checkpoints are slow to import.
    from rrfp.train.checkpoints.saving import RunCheckpoints

    return RunCheckpoints(session, settings, layout, model, reports.copy_metrics_to)


def evaluation_of(
    settings: TrainSettings,
    layout: Layout,
    model: ModelChunks,
    heldout: Callable[[int], Batch] | None,
) -> Evaluation | None:
    """Make the evaluation of held-out data, or return None without such data. Its own schedule and
    links number its steps separately; it is neither paced nor recorded."""
    if heldout is None:
        return None
    schedule = schedule_of(settings, layout.pp_rank, discard)
    return Evaluation(settings, layout, model, heldout, schedule)


def introduce(layout: Layout) -> RankInfo:
    """Publish this rank's place in the layout, host and process number, and return them with its
    clock's offset to rank 0's host. All ranks call this. Raise PeerLostError if a rank does not
    appear within 60 s."""
    own = RankInfo(
        rank=layout.rank,
        pp_rank=layout.pp_rank,
        tp_rank=layout.tp_rank,
        dp_rank=layout.dp_rank,
        stages=layout.stages,
        host=socket.gethostname(),
        pid=os.getpid(),
    )
    return introduction.publish_rank_info(
        default_store(),
        _INTRODUCTIONS,
        own,
        layout.world_size,
        make_device(layout.device),
        timeout_s=_INTRODUCTION_S,
    )


def _introduced(layout: Layout) -> list[RankInfo]:
    """Wait up to 60 s for what all ranks have published of their places and hosts, and return it by
    rank. Raise PeerLostError naming a rank that has not."""
    return introduction.wait_for_rank_infos(
        default_store(), _INTRODUCTIONS, layout.rank, layout.world_size, timeout_s=_INTRODUCTION_S
    )


def schedule_of(
    settings: TrainSettings,
    pp_rank: int,
    record: Callable[[Record], None],
    delays: Delays | None = None,
    pace: Pace | None = None,
) -> NativeSchedule | ForwardBackward:
    """Make the function that runs this run's steps: Megatron's own schedule with --dispatch
    megatron, else rrfp's drop-in, which `delays` can slow down. Either is paced if `pace` is
    given."""
    if settings.policy.dispatch == Dispatch.MEGATRON:
        on_gpu = settings.run.device is DeviceKind.CUDA
        return NativeSchedule(pp_rank, record, CudaTimer() if on_gpu else None, pace=pace)
    # On one host the launcher finds a stopped rank, and waits longer for one that holds the
    # interpreter.
    times = C_CALL if settings.run.nnodes == 1 else 1
    dispatch = DispatchSettings(
        policy=settings.policy,
        # `OrderedBatches` admits and balances microbatches.
        hold_features=settings.step.hold_features,
        measure_memory=settings.step.measure_memory,
        grad_order=settings.step.grad_order,
        placement=settings.layout.placement,
        transport=settings.layout.transport,
        outbox_mb=settings.layout.outbox_mb,
        tls=settings.layout.tls,
        silence_s=settings.run.silence * times + _LATER_S,
    )
    return get_forward_backward_func(settings=dispatch, record=record, delays=delays, pace=pace)
