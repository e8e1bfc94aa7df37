"""The drop-in: Megatron's forward-backward function, with tasks dispatched by readiness.

`get_forward_backward_func` returns a function with the signature and the contract of the one that
Megatron's `get_forward_backward_func` returns. It opens links at its first call and runs every step
on the runtime's worker. Losses, gradients and gradient norms equal those of Megatron's own schedule
bit for bit.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Self, SupportsIndex

import torch
import torch.distributed as dist

from rrfp.errors import UsageError
from rrfp.megatron.adapters.groups import (
    data_parallel_group,
    expert_parallel_group,
    refuse_multi_module,
    replica_group,
    virtual_pipeline_size,
)
from rrfp.megatron.adapters.models import chunks_of, config_of, may_have_experts
from rrfp.megatron.adapters.schedules import start_embedding_gradients
from rrfp.megatron.installation import NO_PIPELINING, refuse_unknown_arguments
from rrfp.megatron.look_ahead import StepDataItems, reason_to_look
from rrfp.megatron.memory.bound import StepMemory
from rrfp.megatron.pipeline import LayoutLinks, Pipeline, discard, publish_failure
from rrfp.megatron.refusals import refuse, refuse_data
from rrfp.megatron.settings import DispatchSettings
from rrfp.megatron.step.microbatch_data import StepData, data_per_chunk
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
from rrfp.megatron.step_report import StepObserver, StepReport
from rrfp.planning.collectives import exchange_items
from rrfp.planning.step_admission import StepAdmission
from rrfp.runtime.exit_hooks import at_end
from rrfp.runtime.pace import Delays, Pace
from rrfp.runtime.planes.selection import AcceptedPlanes
from rrfp.runtime.protocols import monotonic
from rrfp.runtime.rendezvous import default_store, publish_early_end
from rrfp.schedule.policy import counts_microbatches
from rrfp.schedule.rehearsal import StepPolicy, step_policy
from rrfp.schedule.shape import Placement, Shape
from rrfp.schedule.tasks import Cause
from rrfp.simulate.memory_budgets import BoundWarning
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
    observer: StepObserver | None = None,
) -> "ForwardBackward":
    """Return the function that a Megatron training loop calls once per step. Calls with equal
    keyword arguments return the same function, whose links all its steps share.

    The positional arguments are Megatron's. `vp_size` is only checked against the placement,
    because each call passes its chunks; if both sizes are None, it is that of Megatron's parallel
    state. `record` receives every trace record of this rank's first
    pipeline, from several threads. `delays` delays tasks and messages at random, to test that the
    result does not depend on timing. `pace` delays those of training steps to modeled times.
    `observer` is called for every step. Raise UsageError if placement `v` comes with another
    `vp_size` than 2, and for a `schedule_pg_collection` of several modules.
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
    # Megatron's loops call this for training and for every evaluation; all share the links.
    key = (settings, record or discard, delays, pace, observer)
    if key not in _schedules:
        _schedules[key] = ForwardBackward(*key)
    return _schedules[key]


_schedules: dict[object, "ForwardBackward"] = {}
"""The functions of this process, by their arguments. Each closes its links at exit."""

_names = itertools.count()


# A step before it runs: the training loop's call, and the plan of the step.


@dataclass(frozen=True, slots=True)
class StepCall:
    """The arguments of a training loop's call that say where and on which models to run."""

    models: list[Any]
    """The chunks of this rank, in model order."""
    config: Any
    """Megatron's configuration of the models."""
    groups: Any
    """The process groups of the step."""
    place: Place
    has_experts: bool
    forward_only: bool

    @classmethod
    def of(
        cls, models: list[Any], p2p_communicator: Any, pg_collection: Any, *, forward_only: bool
    ) -> Self:
        """Return the call of these chunks, in the groups that `step_groups` finds for Megatron's
        two arguments. The configuration, and whether there are experts, come from the first chunk.
        Raise UsageError as `step_groups` does."""
        config, has_experts = config_of(models[0]), may_have_experts(models[0])
        groups = step_groups(p2p_communicator, pg_collection)
        place = place_in(groups, has_experts=has_experts)
        return cls(models, config, groups, place, has_experts, forward_only)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How a step is to run on this rank. It is made before the step and does not change."""

    step: int
    """The number of the step in records and on links."""
    call: StepCall
    policy: StepPolicy
    data: StepData
    streams: RandomStreams
    memory: StepMemory
    order: Sequence[int]
    """By microbatch: the number of its item in the data's own order."""
    admits_given: bool
    """True if items enter in the data's own order."""
    plans_order: bool
    """True if a search plans the order in which items enter."""
    measures_memory: bool
    """True if the sizes of microbatches are predicted from measured ones."""


class ForwardBackward:
    """The drop-in's schedule function: runs the tasks of a step on this rank, dispatched by
    readiness."""

    def __init__(
        self,
        settings: DispatchSettings,
        record: Callable[[Record], None],
        delays: Delays | None = None,
        pace: Pace | None = None,
        observer: StepObserver | None = None,
    ) -> None:
        self._settings = settings
        self._observer = observer
        self._record = record
        self._delays = delays
        self._pace = pace
        self._admission = StepAdmission(settings)
        self._reason_to_look = reason_to_look(settings, admits_given=self._admission.admits_given)
        self._holds_bytes = not counts_microbatches(settings.policy.hold)
        # Equal on every rank, because all ranks create their functions in the same order.
        self._name = next(_names)
        self._num_openings: Counter[str] = Counter()
        self._links: defaultdict[tuple[Place, int], LayoutLinks] = defaultdict(LayoutLinks)
        """Keyed by this rank's place and number of chunks. An actor and a critic in one process may
        differ in both."""
        self._recorded: LayoutLinks | None = None
        """The recorded links. A recording has one pipeline, the first one opened."""
        self._step_policy = cache(partial(step_policy, settings.policy))
        self._bound_warning = BoundWarning(settings.policy)
        at_end.register(self.close)
        at_end.register(publish_early_end)
        self.was_called = False
        """True once a step has started, on any links."""
        self.report: StepReport | None = None
        """The report of the last finished step on this rank."""
        self._planes: AcceptedPlanes | None = None
        """The data planes of the recorded links from this rank; None before they are open."""

    def start_at(self, step: int) -> None:
        """Set the number of the first training step, for a run resumed from a checkpoint. Call it
        before the first step, on all ranks; it does not affect layouts that have run a step."""
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
        """Run one step with Megatron's arguments. Returns the loss function's result for each
        microbatch, in microbatch order or, with `admit`, in admission order. The list is empty
        except on the rank of the last stage.

        If a rank has several chunks, `model` and `data_iterator` are lists by chunk;
        `rrfp.megatron.step.microbatch_data` documents the accepted data iterators. `seq_length`,
        `micro_batch_size`, `decoder_seq_length` and `adjust_tensor_shapes_fn` are ignored, because
        messages carry their shapes. Raises UsageError if something cannot run out of order,
        PeerLostError and StallError. An error in planning or running the step closes the links, and
        notifies the neighbors and the ranks that wait for links to open. Links stay open after an
        unknown argument, unusable process groups, and a failure to order or measure the data.
        """
        refuse_unknown_arguments(NO_PIPELINING, newer)
        self.was_called = True
        at_end.note_step_error(None)
        observed = None
        if self._observer is not None:
            observed = self._observer.begin(
                {
                    "model": model,
                    "num_microbatches": num_microbatches,
                    "seq_length": seq_length,
                    "micro_batch_size": micro_batch_size,
                    "forward_only": forward_only,
                    "p2p_communicator": p2p_communicator,
                    "pg_collection": pg_collection,
                }
            )
        models = chunks_of(model)
        call = StepCall.of(models, p2p_communicator, pg_collection, forward_only=forward_only)
        links = self._links[call.place, len(models)]
        plan = self._open(links, call, data_iterator, num_microbatches)
        plan = self._plan_data(links, plan)
        arguments = StepArguments(
            forward_step_func,
            plan.data,
            plan.order,
            plan.policy.shape.num_microbatches,
            forward_only,
            collect_non_loss_data,
            first_val_step,
            force_all_reduce,
        )
        try:
            data, self.report = self._run(links, plan, arguments)
        except BaseException as error:
            at_end.note_step_error(error)
            links.close(farewell=False)
            raise
        if self._observer is not None:
            self._observer.end(observed, self.report)
        return data

    def _open(
        self,
        links: LayoutLinks,
        call: StepCall,
        data_iterator: Any,
        num_microbatches: SupportsIndex,
    ) -> StepPlan:
        """Count the step, plan it from its arguments without its data, and open its links or, if
        open, raise their capacity. After an error, publish it to the ranks that wait if links were
        to be opened, close the links with a farewell, and raise."""
        step = links.count_step(forward_only=call.forward_only)
        opening = None
        if links.pipeline is None:
            opening = self._next_opening(call.place, len(call.models))
        try:
            plan = self._plan_step(links, step, call, data_iterator, num_microbatches)
            links.timeout_s = timeout_s_of(call.groups.pp)
            self._connect(links, opening, plan)
        except BaseException as error:
            at_end.note_step_error(error)
            if opening is not None:
                publish_failure(default_store(), opening, call.place.rank, error)
            # With a farewell, because the neighbors may still be in the previous step.
            links.close()
            raise
        return plan

    def _plan_step(
        self,
        links: LayoutLinks,
        step: int,
        call: StepCall,
        data_iterator: Any,
        num_microbatches: SupportsIndex,
    ) -> StepPlan:
        """Return the plan of a step, without looking at its data. With hint `auto`, all ranks
        choose a training step's policy together. At the first training step, global rank 0 warns
        if the bound on activations is too low or missing. Raise UsageError if the data, the
        configuration or a model cannot run out of order."""
        models, config, forward_only = call.models, call.config, call.forward_only
        given = data_per_chunk(data_iterator, len(models))
        device = device_of(models, call.groups)
        shape = Shape(
            len(call.place.pipeline), num_microbatches, len(models), self._settings.placement
        )
        chooser = links.hint_chooser(self._settings.policy)
        if chooser is None or forward_only:
            policy = self._step_policy(shape, forward_only=forward_only)
        else:
            policy = chooser.policy(
                step,
                shape,
                _splits_backward(config),
                call.groups,
                data_parallel_group(call.groups),
                device,
                call.has_experts,
            )
        if not forward_only and call.place.rank == 0:
            self._bound_warning.warn_once(shape)
        # The activation sizes of the microbatches in the model that paces them.
        pace = None if forward_only else self._pace
        sizes = None if pace is None else pace.sizes(step, policy.shape)
        measures = self._holds_bytes and sizes is None and not forward_only
        admits_given = forward_only or self._admission.admits_given
        keeps_order = policy.keeps_microbatch_order and admits_given and not measures
        refuse_data(given, policy, self._reason_to_look, keeps_order=keeps_order)
        refuse(config, models, policy, call.place.pp_rank)
        plans_order = self._admission.plans and not forward_only
        data = StepData(
            links.ahead.wrap(given) if plans_order else given,
            shape.num_microbatches,
            links.data_habits[forward_only, tuple(map(id, models))],
            keeps_order=keeps_order,
            group_size=getattr(config, "microbatch_group_size_per_vp_stage", None)
            or len(call.place.pipeline),
        )
        return StepPlan(
            step,
            call,
            policy,
            data,
            RandomStreams(device),
            StepMemory(sizes),
            range(shape.num_microbatches),
            admits_given=admits_given,
            plans_order=plans_order,
            measures_memory=measures,
        )

    def _plan_data(self, links: LayoutLinks, plan: StepPlan) -> StepPlan:
        """Return the plan with the order in which the items enter, and their expected activation
        sizes. Both need the step's items, which are drawn now, in time that is recorded. If the
        batch is balanced, replace the items and keep the order. Return the plan unchanged if items
        enter as given and no sizes are predicted. If the first rank cannot decide, all ranks of the
        replica raise. Links stay open."""
        if plan.admits_given and not plan.measures_memory:
            return plan
        call, data, device = plan.call, plan.data, plan.streams.device
        groups, order, memory = call.groups, plan.order, plan.memory
        since_ns = monotonic()
        items = StepDataItems(data, len(order), f"{self._reason_to_look} looks at")
        if links.planner is not None and plan.plans_order:
            policy = plan.policy
            order = links.planner.order(
                plan.step, policy.shape, policy.policy, items, groups, device
            )
        elif self._admission.balances:
            self._balance(plan, items)
        elif not plan.admits_given:
            order = self._admission.order(
                plan.step, items, len(order), groups, lambda: replica_group(groups), device
            )
        if plan.measures_memory:
            measured = StepDataItems(data, len(order), "a hold in bytes measures")
            features = self._admission.features(measured.items, order, groups, device)
            bound = links.memory_bound_of(call.models, self._settings.policy.hold, device)
            memory = bound.plan(
                features,
                sharing_groups(groups, has_experts=call.has_experts),
                expert_parallel_group(groups) if call.has_experts else None,
            )
        links.record(PhaseRecord(since_ns, monotonic(), plan.step, Phase.DATA))
        return replace(plan, order=order, memory=memory)

    def _balance(self, plan: StepPlan, items: StepDataItems) -> None:
        """Exchange items with the other data-parallel replicas, in collectives. Then those of this
        rank's chunks that draw data have the items that are assigned to its replica, in the order
        in which they enter. If a rank's data end, its peers in other replicas raise, too."""
        groups, device, num = plan.call.groups, plan.streams.device, len(plan.order)
        replicas = data_parallel_group(groups)
        assignment = self._admission.assign(plan.step, items.items, num, groups, replicas, device)

        def draw() -> dict[int, list[Any]]:
            return {chunk: plan.data.first(chunk, num) for chunk in plan.data.drawing_chunks}

        for chunk, own in exchange_items(draw, assignment, replicas, device).items():
            plan.data.replace(chunk, own)

    def _run(
        self, links: LayoutLinks, plan: StepPlan, arguments: StepArguments
    ) -> tuple[list[Any], StepReport]:
        """Run the tasks of a step and, in training, finalize gradients as Megatron does. Records
        the times, and learns activation sizes if they are measured for the memory bound. Return the
        loss function's results and the step's report. If a task fails, leave the step's
        contexts."""
        call, memory = plan.call, plan.memory
        config, shape = call.config, plan.policy.shape
        pace = None
        if self._pace is not None and not call.forward_only:
            pace = self._pace.start_step(plan.step, shape)
        start_ns = monotonic()
        pipeline = links.pipeline
        assert pipeline is not None
        pp_rank = pipeline.place.pp_rank
        has_last_stage = pp_rank == shape.rank_of(shape.num_stages - 1)
        finish_embedding = None
        if config.finalize_model_grads_func is not None and not call.forward_only:
            finish_embedding = start_embedding_gradients(
                config, call.models, call.groups, has_last_stage=has_last_stage
            )
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(
                barrier=config.barrier_with_L1_time
            )
        compute = RankStep(
            call.models,
            config,
            arguments,
            shape,
            pp_rank,
            plan.streams,
            grad_order=self._settings.grad_order,
            cp_size=call.groups.cp.size(),
            # W adds gradients itself, without triggering hooks.
            follows_hooks=plan.policy.is_the_same_on_replicas and not shape.splits_backward,
            measures_memory=memory.measures or self._settings.measure_memory,
        )
        try:
            summary = pipeline.run_step(plan.step, plan.policy, memory, compute, pace)
        except BaseException:
            compute.abandon()
            raise
        sync_start_ns = monotonic()
        if finish_embedding is not None:
            finish_embedding()
        compute.finish()
        if memory.bound is not None:
            memory.bound.reserve_for_gradients(compute.peak_waiting_gradient_bytes)
            if memory.measures:
                memory.bound.learn(compute.activation_bytes())
        if finish_embedding is not None:
            _finalize_gradients(plan, arguments, compute, pipeline)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        end_ns = monotonic()
        links.record(WaitRecord(sync_start_ns, end_ns, plan.step, Cause.GRADIENT_SYNC))
        budget = memory.budget or plan.policy.policy.hold_bytes or 0
        links.record(
            PhaseRecord(
                start_ns,
                end_ns,
                plan.step,
                Phase.SCHEDULE,
                0 if call.forward_only else budget,
                memory.unknown_sizes,
            )
        )
        report = StepReport(
            replace(summary, start_ns=start_ns, end_ns=end_ns),
            plan.policy,
            plan.order if plan.plans_order else None,
            None if call.forward_only else self._admission.assignment,
            self._planes,
            is_evaluation=call.forward_only,
        )
        return compute.forward_data(), report

    def _connect(self, links: LayoutLinks, opening: str | None, plan: StepPlan) -> None:
        """Open the pipeline of these links under the name `opening`, with enough credits for this
        step; if it is open, only raise its credits. The first pipeline opened is the recorded one.
        The hint chooser and the order planner, if any, see the records of every pipeline."""
        shape = plan.policy.shape
        num_credits = plan.policy.policy.num_in_flight(
            shape.num_microbatches, shape.num_chunks, forward_only=plan.call.forward_only
        )
        if links.pipeline is None:
            assert opening is not None
            record = self._record if self._recorded is None else links.record
            if links.planner is None and self._admission.plans:
                links.planner = self._admission.planner(record)
                record = links.record = links.planner.record
            if links.chooser is not None:
                record = links.record = links.chooser.measured_record(record)
            links.pipeline = Pipeline(
                self._settings,
                plan.call.place,
                shape,
                record,
                default_store(),
                opening,
                plan.streams.device,
                num_credits=num_credits,
                timeout_s=links.timeout_s,
                delays=self._delays,
            )
            if self._recorded is None:
                self._recorded, links.record = links, record
                self._planes = links.pipeline.planes
        else:
            links.pipeline.grant(num_credits)

    def _next_opening(self, place: Place, num_chunks: int) -> str:
        """A new name for the rendezvous of a layout's ranks. It is the same on all ranks, because
        they open their links in the same order."""
        layout = f"{len(place.pipeline)}x{num_chunks}"
        self._num_openings[layout] += 1
        return f"{self._name}/{layout}/{self._num_openings[layout]}"

    def close(self) -> None:
        """Close all links with a farewell to the neighbors, as at exit. Call it between two steps,
        on all ranks; the next step opens the links again."""
        for links in self._links.values():
            links.close()


def _splits_backward(config: Any) -> bool | None:
    """True if Megatron's configuration requires a split backward (`delay_wgrad_compute`), False if
    it excludes one (`defer_embedding_wgrad_compute`), None if both work."""
    if getattr(config, "delay_wgrad_compute", False):
        return True
    return False if getattr(config, "defer_embedding_wgrad_compute", False) else None


def _finalize_gradients(
    plan: StepPlan, arguments: StepArguments, compute: RankStep, pipeline: Pipeline
) -> None:
    """Call the training loop's `finalize_model_grads_func` for a step. With a loss per token, pass
    the number of tokens, else None. The rank of the last stage broadcasts the number first if it is
    not the last pipeline rank, where Megatron reads it."""
    call, shape = plan.call, plan.policy.shape
    per_token = getattr(call.config, "calculate_per_token_loss", False)
    num_tokens = compute.num_tokens if per_token else None
    last_stage_rank = shape.rank_of(shape.num_stages - 1)
    if num_tokens is not None and last_stage_rank != shape.num_ranks - 1:
        # Megatron reads it from the last rank.
        source = pipeline.place.pipeline[last_stage_rank]
        dist.broadcast(num_tokens, source, group=call.groups.pp)
    call.config.finalize_model_grads_func(
        call.models,
        num_tokens,
        pg_collection=call.groups,
        force_all_reduce=arguments.force_all_reduce,
    )
