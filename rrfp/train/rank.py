"""The work of one rank of a training run, from introducing itself to its last step."""

import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from rrfp.megatron.dropin import ForwardBackward, get_forward_backward_func
from rrfp.megatron.native.schedule import NativeSchedule
from rrfp.megatron.native.timing import CudaTimer
from rrfp.megatron.settings import DispatchSettings
from rrfp.megatron.step_policy import StepPolicy
from rrfp.megatron.transport_log import TransportLog
from rrfp.runtime import introduction
from rrfp.runtime.delays import Delays
from rrfp.runtime.pace import Pace
from rrfp.runtime.recorder import Recorder
from rrfp.runtime.rendezvous import default_store
from rrfp.runtime.transport.factory import device_at
from rrfp.schedule.policy import Dispatch
from rrfp.simulate.choice.candidates import in_words
from rrfp.trace.description import PolicyLog
from rrfp.trace.records import Doing, RankInfo, Record
from rrfp.trace.rundir import RunDir
from rrfp.trace.spills.room import records_bytes
from rrfp.train.admission import AdmissionFile, run_planner
from rrfp.train.checkpoints.session import Session, session_of
from rrfp.train.data.batches import Batch
from rrfp.train.data.open import open_data
from rrfp.train.dealing import dealing_file, run_dealing
from rrfp.train.description import write_description
from rrfp.train.evaluation import Evaluation
from rrfp.train.metrics import Metrics
from rrfp.train.models.model import ModelChunks, build_model
from rrfp.train.pacing import pace_of
from rrfp.train.ranks.liveness.heartbeat import enter
from rrfp.train.ranks.liveness.vigil import C_CALL
from rrfp.train.ranks.parallel import Layout
from rrfp.train.setting_groups import DeviceKind
from rrfp.train.settings import TrainSettings
from rrfp.train.training import Trainer

if TYPE_CHECKING:
    from rrfp.train.checkpoints.run_checkpoints import RunCheckpoints

_MEETING_S = 60.0
_INTRODUCTIONS = "rrfp/ranks"
_LATER_S = 5.0
"""How much later than the launcher a rank gives up a silent neighbour: that one can say more."""


def work(run: RunDir, settings: TrainSettings, layout: Layout) -> None:
    """Train this rank's chunks through all remaining steps. Raises whatever training raises."""
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
    run, step = session.run, session.first_step
    recorder.begin(step, Doing.SETTING_UP)
    metrics = Metrics(
        run.metrics,
        layout,
        info,
        is_traced=not settings.run.no_trace,
        is_needed=settings.run.save is None,
    )
    pace = pace_of(settings, layout)
    planner = run_planner(settings, recorder.record, pace)
    record = recorder.record if planner is None else planner.record
    schedule = schedule_of(settings, layout.pp_rank, record, pace=pace)
    schedule.start_at(session.first_step)
    data = open_data(settings)
    model = build_model(settings, layout, data)
    dealing = run_dealing(settings, layout, data, pace)
    trainer = Trainer(
        settings,
        layout,
        model,
        data.batches(layout.dp_rank),
        schedule,
        recorder.record,
        pace=pace,
        planner=planner,
        dealing=dealing,
    )
    dealt = None
    if dealing is not None:
        dealt = dealing_file(run, settings, layout, session.first_step)
    orders = None
    if planner is not None:
        num_microbatches = settings.data.microbatches
        orders = AdmissionFile(run.admission, layout, num_microbatches, session.first_step)
    every = range(layout.world_size) if layout.rank == 0 else ()
    transport = TransportLog(default_store(), "train", run, layout.rank, every)
    policies = PolicyLog(run.run_json) if layout.rank == 0 else None
    evaluation = evaluation_of(settings, layout, model, data.heldout)
    checkpoints = checkpoints_of(session, settings, layout, model, metrics)
    for step in range(session.first_step, settings.num_steps):
        enter(f"in step {step}")
        start_s = time.monotonic()
        result = trainer.train_step(step)
        seconds = time.monotonic() - start_s
        if isinstance(schedule, NativeSchedule):
            # A GPU tells the times of its work once that is done.
            schedule.settle(wait=True)
        assert schedule.last_step is not None
        if evaluation is not None and evaluation.is_due(step):
            enter(f"in the evaluation after step {step}")
            recorder.begin(step, Doing.EVALUATION)
            result = result._replace(heldout_loss=evaluation.loss())
        _tell_transport(transport, schedule)
        # Writing metrics waits for every rank, so a step in them is in the records of all ranks.
        recorder.flush(step)
        recorder.begin(step, Doing.METRICS)
        tally = pace.tally if pace is not None and pace.has_costs else None
        plan = None if planner is None else planner.described()
        steering = getattr(schedule, "last_steering", None)
        if steering is not None and planner is not None:
            planner.follow(steering)
        if steering is not None and policies is not None:
            policies.steered(step, steering.policy.described())
        hint, choice = _told(settings, steering)
        metrics.write(step, result, schedule.last_step, seconds, tally, plan, hint, choice)
        if planner is not None and orders is not None:
            orders.write(planner.order_of_step)
        if dealing is not None and dealt is not None:
            dealt.write(dealing.hands)
        if checkpoints is not None:
            enter(f"in the checkpoint after step {step}")
            recorder.begin(step, Doing.CHECKPOINT)
            if checkpoints.finish_step(step):
                break
    enter("after the last step")
    recorder.begin(step, Doing.CLOSING)
    # Every rank has told by now.
    _tell_transport(transport, schedule)
    if checkpoints is not None:
        checkpoints.close()
    if evaluation is not None:
        evaluation.close()
    schedule.close()
    if planner is not None and orders is not None:
        planner.close()
        orders.close()
    if dealt is not None:
        dealt.close()
    metrics.close()


def _tell_transport(transport: TransportLog, schedule: ForwardBackward | NativeSchedule) -> None:
    """Megatron's own schedule has none of our links."""
    if isinstance(schedule, ForwardBackward) and schedule.planes is not None:
        transport.tell(schedule.planes)


def _told(
    settings: TrainSettings, steering: StepPolicy | None
) -> tuple[str, dict[str, object] | None]:
    """What steered a step, in words, and how it was chosen, if it was in this step."""
    if steering is None:
        return f"{settings.hint.name} {settings.policy.dispatch}", None
    choice = steering.choice
    return in_words(steering.policy), None if choice is None else choice.described()


def checkpoints_of(
    session: Session,
    settings: TrainSettings,
    layout: Layout,
    model: ModelChunks,
    metrics: Metrics,
) -> "RunCheckpoints | None":
    """The checkpoints of a run, or None if it saves none. A model that a session goes on with is
    loaded."""
    if settings.run.save is None:
        return None
    # Imported late: Megatron's checkpoints are slow to import.
    from rrfp.train.checkpoints.run_checkpoints import RunCheckpoints

    return RunCheckpoints(session, settings, layout, model, metrics.copy_to)


def evaluation_of(
    settings: TrainSettings,
    layout: Layout,
    model: ModelChunks,
    heldout: Callable[[int], Batch] | None,
) -> Evaluation | None:
    """The evaluation of held-out data, or None without such data. It has its own links, so that its
    steps are numbered separately; it is neither paced nor recorded."""
    if heldout is None:
        return None
    schedule = schedule_of(settings, layout.pp_rank, _forget)
    return Evaluation(settings, layout, model, heldout, schedule)


def _forget(_: Record) -> None:
    pass


def introduce(layout: Layout) -> RankInfo:
    """Publish who this rank is; all ranks call it. Returns that, with the offset of this rank's
    clock to rank 0's host."""
    own = RankInfo(
        rank=layout.rank,
        pp_rank=layout.pp_rank,
        tp_rank=layout.tp_rank,
        dp_rank=layout.dp_rank,
        stages=layout.stages,
        host=socket.gethostname(),
        pid=os.getpid(),
    )
    return introduction.introduce(
        *(default_store(), _INTRODUCTIONS, own, layout.world_size, device_at(layout.device)),
        timeout_s=_MEETING_S,
    )


def _introduced(layout: Layout) -> list[RankInfo]:
    """Who all ranks are, by rank."""
    return introduction.introduced(
        default_store(), _INTRODUCTIONS, layout.rank, layout.world_size, timeout_s=_MEETING_S
    )


def schedule_of(
    settings: TrainSettings,
    pp_rank: int,
    record: Callable[[Record], None],
    delays: Delays | None = None,
    pace: Pace | None = None,
) -> NativeSchedule | ForwardBackward:
    """The function that runs this run's steps, paced if `pace` is given: Megatron's own, or ours,
    which `delays` can slow down."""
    if settings.policy.dispatch == Dispatch.MEGATRON:
        on_gpu = settings.run.device is DeviceKind.CUDA
        return NativeSchedule(pp_rank, record, CudaTimer() if on_gpu else None, pace=pace)
    policy = settings.effective_policy
    # On one host the launcher finds whoever stops, and gives one that holds the interpreter longer.
    times = C_CALL if settings.run.nnodes == 1 else 1
    dispatch = DispatchSettings(
        hint=policy.hint,
        dispatch=policy.dispatch,
        limit=settings.policy.limit,
        hold=settings.policy.hold,
        hold_features=settings.policy.hold_features,
        measure_memory=settings.policy.measure_memory,
        w=policy.w,
        agreement=policy.agreement,
        patience=policy.patience,
        grad_order=settings.policy.grad_order,
        placement=settings.layout.placement,
        transport=settings.layout.transport,
        outbox_mb=settings.layout.outbox_mb,
        tls=settings.layout.tls,
        silence_s=settings.run.silence * times + _LATER_S,
    )
    return get_forward_backward_func(settings=dispatch, record=record, delays=delays, pace=pace)
