"""The drop-in: Megatron's forward-backward function, with tasks dispatched by readiness.

`get_forward_backward_func` returns a function with the signature and the contract of
`megatron.core.pipeline_parallel.get_forward_backward_func()`. It opens links at its first call, and
runs every step through the runtime's worker. Losses, gradients and gradient norms are those of
Megatron's own schedule, bit for bit.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist

from rrfp.errors import UsageError
from rrfp.megatron.adapters.groups import (
    expert_parallel_of,
    refuse_multi_module,
    virtual_pipeline_size,
)
from rrfp.megatron.adapters.models import config_of, may_have_experts
from rrfp.megatron.adapters.schedules import start_embedding_gradients
from rrfp.megatron.installation import NO_PIPELINING, refuse_newer
from rrfp.megatron.look_ahead import LookAhead
from rrfp.megatron.memory.bound import StepMemory
from rrfp.megatron.pipeline import LayoutLinks, Pipeline, discard, tell_of_failure
from rrfp.megatron.refusals import refuse, refuse_data
from rrfp.megatron.settings import DispatchSettings
from rrfp.megatron.step.microbatch_data import StepData, data_of
from rrfp.megatron.step.random_streams import RandomStreams
from rrfp.megatron.step.stage import RankStep, StepArguments
from rrfp.megatron.step_groups import (
    Place,
    device_of,
    place_in,
    sharing_groups,
    step_groups,
    timeout_s_of,
)
from rrfp.megatron.step_policy import StepPolicies, StepPolicy
from rrfp.runtime.exit_hooks import at_end
from rrfp.runtime.pace import Delays, Pace, StepPace
from rrfp.runtime.planes.negotiation import Taken
from rrfp.runtime.protocols import StepSummary, monotonic
from rrfp.runtime.rendezvous import default_store, tell_of_end
from rrfp.schedule.knobs import counts_microbatches
from rrfp.schedule.shape import Placement, Shape
from rrfp.schedule.tasks import Cause
from rrfp.trace.records import Phase, PhaseRecord, Record, WaitRecord


def get_forward_backward_func(
    pp_size: int | None = None,
    vp_size: int | None = None,
    schedule_pg_collection: Any = None,
    *,
    settings: DispatchSettings | None = None,
    record: Callable[[Record], None] | None = None,
    delays: Delays | None = None,
    pace: Pace | None = None,
) -> "ForwardBackward":
    """The function that a Megatron training loop calls once per step.

    Megatron's own arguments come first. Each call passes the ranks and chunks, so `vp_size` is only
    checked against the placement. `record` receives every trace record of this rank's first
    pipeline, from several threads. `delays` delays tasks and messages, to show that the result does
    not depend on timing; `pace` holds those of training steps to modelled times. Raises UsageError
    for chunks that the placement does not allow, and a `schedule_pg_collection` of several modules.
    """
    refuse_multi_module(schedule_pg_collection)
    settings = settings or DispatchSettings()
    if pp_size is None and vp_size is None:
        vp_size = virtual_pipeline_size()
    if settings.placement is Placement.V and vp_size not in (None, 2):
        raise UsageError(
            f"placement v takes 2 chunks per rank, not a virtual pipeline size of {vp_size}; "
            "choose 2, or placement loop"
        )
    # Megatron's loops call this again for training and every evaluation: all share the links.
    asked = (settings, record or discard, delays, pace)
    if asked not in _schedules:
        _schedules[asked] = ForwardBackward(*asked)
    return _schedules[asked]


_schedules: dict[object, "ForwardBackward"] = {}
"""The functions of this process, by their arguments. Each closes its links as the process ends."""

_names = itertools.count()


class ForwardBackward:
    """Runs the tasks of a step on this rank, dispatched by readiness."""

    def __init__(
        self,
        settings: DispatchSettings,
        record: Callable[[Record], None],
        delays: Delays | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._settings = settings
        self._record = record
        self._delays = delays
        self._pace = pace
        self.look_ahead = LookAhead(settings)
        self._holds_bytes = not counts_microbatches(settings.policy.hold)
        # Equal on every rank, because all ranks make their functions in the same order.
        self._name = next(_names)
        self._num_openings: Counter[str] = Counter()
        self._links: defaultdict[tuple[Place, int], LayoutLinks] = defaultdict(LayoutLinks)
        """By this rank's place and number of chunks: an actor and a critic in one process may
        differ in both."""
        self._recorded: LayoutLinks | None = None
        """The links whose records are taken: a recording has one pipeline, the first one opened."""
        self._step_policies = StepPolicies(settings.policy)
        at_end.call(self.close)
        at_end.call(tell_of_end)
        self.was_called = False
        """Whether a step has begun, on any links."""
        self.last_step: StepSummary | None = None
        """The figures of the last step on this rank."""
        self.last_steering: StepPolicy | None = None
        self.last_order: Sequence[int] | None = None
        """The order of entry of the last step that was planned."""
        self.planes: Taken | None = None
        """What carries the tensors of the recorded links from this rank; None before these are."""

    def start_at(self, step: int) -> None:
        """Number the first training step so, as a run that goes on from a checkpoint does. Call it
        before the first step, on all ranks."""
        self._links.default_factory = partial(LayoutLinks, num_trained=step)

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        num_microbatches: SupportsIndex,
        seq_length: object,
        micro_batch_size: object,
        decoder_seq_length: object = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
        **newer: Any,
    ) -> list[Any]:
        """Run one step, by Megatron's contract. Returns what the loss function returned for each
        microbatch, in microbatch order, or in admission order with `admit` (empty except on the
        rank of the last stage).

        If a rank has several chunks, `model` and `data_iterator` are lists by chunk;
        `rrfp.megatron.step.microbatch_data` says which objects work as data iterators.
        `seq_length`, `micro_batch_size`, `decoder_seq_length` and `adjust_tensor_shapes_fn` are
        ignored: messages carry their shapes. Raises UsageError for what cannot run out of order,
        PeerLostError and StallError. After any error the links are closed and the neighbours
        notified, and so are ranks that wait for links to open.
        """
        refuse_newer(NO_PIPELINING, newer)
        self.was_called = True
        at_end.note(None)
        models: list[Any] = [*model] if isinstance(model, list | tuple) else [model]
        config = config_of(models[0])
        groups = step_groups(p2p_communicator, pg_collection)
        has_experts = may_have_experts(models[0])
        place = place_in(groups, has_experts=has_experts)
        links = self._links[place, len(models)]
        step = links.count_step(forward_only=forward_only)
        opening = None if links.pipeline is not None else self._next_opening(place, len(models))
        look_ahead = self.look_ahead
        admits_given = forward_only or look_ahead.admits_given
        try:
            given = data_of(data_iterator, len(models))
            device = device_of(models, groups)
            shape = Shape(
                len(place.pipeline), num_microbatches, len(models), self._settings.placement
            )
            num_microbatches = shape.num_microbatches
            chooser = links.chooser_of(self._settings.policy)
            if chooser is None or forward_only:
                steering = self._step_policies.of(shape, forward_only=forward_only)
            else:
                steering = chooser.steering(step, shape, config, groups, device, has_experts)
            if not forward_only:
                self.last_steering = steering
                if place.rank == 0:
                    self._step_policies.warn_once(shape)
            # What the step's microbatches keep by the model that paces them.
            paced_by = None if forward_only else self._pace
            sizes = None if paced_by is None else paced_by.sizes(step, steering.shape)
            measures = self._holds_bytes and sizes is None and not forward_only
            looks_ahead = measures or not admits_given
            keeps_order = steering.keeps_microbatch_order and not looks_ahead
            refuse_data(given, steering, look_ahead.reason, keeps_order=keeps_order)
            refuse(config, models, steering, place.pp_rank)
            plans = look_ahead.plans and not forward_only
            data = StepData(
                links.ahead.put_in(given) if plans else given,
                num_microbatches,
                links.habits[forward_only, tuple(map(id, models))],
                keeps_order=keeps_order,
                group_size=getattr(config, "microbatch_group_size_per_vp_stage", None)
                or len(place.pipeline),
            )
            streams = RandomStreams(device)
            links.timeout_s = timeout_s_of(groups.pp)
            self._connect(links, opening, place, steering, device, forward_only=forward_only)
        except BaseException as error:
            at_end.note(error)
            if opening is not None:
                tell_of_failure(default_store(), opening, place.rank, error)
            # With a farewell: the neighbours may still be in the step before.
            links.close()
            raise
        memory = StepMemory(sizes)
        order: Sequence[int] = range(num_microbatches)
        looks_from_ns = monotonic()
        # If looking ahead fails, all ranks of the replica learn of it, and their links stay open.
        if links.planner is not None and plans:
            order = look_ahead.planned_order(
                links.planner, step, steering, data, groups, streams.device
            )
            self.last_order = order
        elif not admits_given:
            order = look_ahead.order(step, data, num_microbatches, groups, streams.device)
        if measures:
            features = look_ahead.features(data, order, groups, streams.device)
            bound = links.bound_of(models, self._settings.policy.hold, streams.device)
            memory = bound.plan(
                features,
                sharing_groups(groups, has_experts=has_experts),
                expert_parallel_of(groups) if has_experts else None,
            )
        if looks_ahead:
            links.record(PhaseRecord(looks_from_ns, monotonic(), step, Phase.DATA))
        arguments = StepArguments(
            forward_step_func,
            data,
            order,
            num_microbatches,
            forward_only,
            collect_non_loss_data,
            first_val_step,
            force_all_reduce,
        )
        try:
            pace = None if paced_by is None else paced_by.start_step(step, steering.shape)
            return self._run_step(
                links, step, steering, memory, models, config, groups, arguments, streams, pace
            )
        except BaseException as error:
            at_end.note(error)
            links.close(farewell=False)
            raise

    def _run_step(
        self,
        links: LayoutLinks,
        step: int,
        steering: StepPolicy,
        memory: StepMemory,
        models: list[Any],
        config: Any,
        groups: Any,
        arguments: StepArguments,
        streams: RandomStreams,
        pace: StepPace | None,
    ) -> list[Any]:
        start_ns = monotonic()
        pipeline, record = links.pipeline, links.record
        assert pipeline is not None
        forward_only = arguments.forward_only
        shape, pp_rank = steering.shape, pipeline.place.pp_rank
        last_stage_rank = shape.rank_of(shape.num_stages - 1)
        has_last_stage = pp_rank == last_stage_rank
        finalizes = config.finalize_model_grads_func is not None and not forward_only
        if finalizes:
            finish_embedding = start_embedding_gradients(
                config, models, groups, has_last_stage=has_last_stage
            )
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(
                barrier=config.barrier_with_L1_time
            )
        compute = RankStep(
            models,
            config,
            arguments,
            shape,
            pp_rank,
            streams,
            grad_order=self._settings.grad_order,
            cp_size=groups.cp.size(),
            # W adds gradients itself, without triggering hooks.
            follows_hooks=steering.is_the_same_on_replicas and not shape.splits_backward,
            measures_memory=memory.measures or self._settings.measure_memory,
        )
        try:
            summary = pipeline.run_step(step, steering, memory, compute, pace)
        except BaseException:
            compute.abandon()
            raise

        sync_start_ns = monotonic()
        if finalizes:
            finish_embedding()
        compute.finish()
        if memory.bound is not None:
            memory.bound.leave_room_for(compute.peak_waiting_gradient_bytes)
            if memory.measures:
                memory.bound.learn(compute.kept_bytes())
        if finalizes:
            per_token = getattr(config, "calculate_per_token_loss", False)
            num_tokens = compute.num_tokens if per_token else None
            if num_tokens is not None and last_stage_rank != shape.num_ranks - 1:
                # Megatron takes it from the last rank.
                source = pipeline.place.pipeline[last_stage_rank]
                dist.broadcast(num_tokens, source, group=groups.pp)
            reduces_all = arguments.force_all_reduce
            config.finalize_model_grads_func(
                models, num_tokens, pg_collection=groups, force_all_reduce=reduces_all
            )
        if config.timers is not None:
            config.timers("forward-backward").stop()
        end_ns = monotonic()
        record(WaitRecord(sync_start_ns, end_ns, step, Cause.GRADIENT_SYNC))
        budget = 0 if forward_only else memory.budget or steering.policy.hold_bytes or 0
        num_unknown = memory.unknown_sizes
        record(PhaseRecord(start_ns, end_ns, step, Phase.SCHEDULE, budget, num_unknown))
        self.last_step = replace(summary, start_ns=start_ns, end_ns=end_ns)
        return compute.forward_data()

    def _connect(
        self,
        links: LayoutLinks,
        opening: str | None,
        place: Place,
        steering: StepPolicy,
        device: torch.device,
        *,
        forward_only: bool,
    ) -> None:
        """Have the pipeline of these links, with enough credit for this step; `opening` is its name
        if it must be opened first."""
        shape = steering.shape
        num_credits = steering.policy.num_in_flight(
            shape.num_microbatches, shape.num_chunks, forward_only=forward_only
        )
        if links.pipeline is None:
            assert opening is not None
            record = self._record if self._recorded is None else links.record
            if links.planner is None and self.look_ahead.plans:
                links.planner = self.look_ahead.planner(record)
                record = links.record = links.planner.record
            if links.chooser is not None:
                record = links.record = links.chooser.watched(record)
            links.pipeline = Pipeline(
                self._settings,
                place,
                shape,
                record,
                default_store(),
                opening,
                device,
                num_credits=num_credits,
                timeout_s=links.timeout_s,
                delays=self._delays,
            )
            if self._recorded is None:
                self._recorded, links.record = links, record
                self.planes = links.pipeline.planes
        else:
            links.pipeline.grant(num_credits)

    def _next_opening(self, place: Place, num_chunks: int) -> str:
        """The name under which the ranks of a layout meet. Each meeting has its own, the same on
        all ranks, because they open their links in the same order."""
        layout = f"{len(place.pipeline)}x{num_chunks}"
        self._num_openings[layout] += 1
        return f"{self._name}/{layout}/{self._num_openings[layout]}"

    def close(self) -> None:
        """Say farewell to the neighbours and close all links, as at exit. Call it between two
        steps, on all ranks; the next step opens them again."""
        for links in self._links.values():
            links.close()
