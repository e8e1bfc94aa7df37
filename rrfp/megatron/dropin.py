"""The drop-in: Megatron's forward-backward function, with tasks dispatched by readiness.

`get_forward_backward_func` returns a function with the signature and the contract of
`megatron.core.pipeline_parallel.get_forward_backward_func()`. It asks Megatron for the process
groups, opens the links at its first call, and then runs every step through the runtime's worker.
Losses, gradients and gradient norms are those of Megatron's own schedule, bit for bit.
"""

import atexit
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import (
    clear_embedding_activation_buffer,
    finish_embedding_wgrad_compute,
)
from megatron.core.utils import get_model_config

from rrfp.admission_files import resolve_admission
from rrfp.errors import UsageError
from rrfp.megatron.admission import agreed_order
from rrfp.megatron.dispatching import DispatchSettings
from rrfp.megatron.groups import Place, place_in, step_groups
from rrfp.megatron.item_costs import resolve_cost
from rrfp.megatron.microbatch_data import MicrobatchData
from rrfp.megatron.pipeline import Pipeline
from rrfp.megatron.plans import Plan, make_plan
from rrfp.megatron.random_streams import RandomStreams
from rrfp.megatron.refusals import refuse
from rrfp.megatron.stage import RankStep, StepArguments
from rrfp.runtime.delays import Delays
from rrfp.runtime.pace import Pace, StepPace
from rrfp.runtime.protocols import monotonic
from rrfp.runtime.worker import StepSummary
from rrfp.schedule.admission import Admit, admission_order
from rrfp.schedule.causes import Cause
from rrfp.schedule.shape import Placement, Shape
from rrfp.trace.records import Phase, PhaseRecord, Record, WaitRecord


def get_forward_backward_func(
    pp_size: int | None = None,
    vp_size: int | None = None,
    *,
    settings: DispatchSettings | None = None,
    record: Callable[[Record], None] | None = None,
    delays: Delays | None = None,
    pace: Pace | None = None,
) -> "ForwardBackward":
    """The function that a Megatron training loop calls once a step.

    Megatron's own arguments come first; how many ranks and chunks there are is what each call
    passes, so `vp_size` is only checked against the placement. `record` receives every trace record
    of this rank, from several threads. `delays` makes tasks and messages late, to show that the
    result does not depend on them; `pace` gives those of training steps a model's times. Raises
    UsageError for chunks that the placement has no room for.
    """
    settings = settings or DispatchSettings()
    if pp_size is None and vp_size is None:
        vp_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if settings.placement is Placement.V and vp_size not in (None, 2):
        raise UsageError(
            f"placement v takes 2 chunks a rank, not a virtual pipeline size of {vp_size}; "
            "choose 2, or placement loop"
        )
    # Megatron's loops ask again for training and for every evaluation: all share the links.
    return _shared(settings, record or _discard, delays, pace)


@cache
def _shared(
    settings: DispatchSettings,
    record: Callable[[Record], None],
    delays: Delays | None,
    pace: Pace | None,
) -> "ForwardBackward":
    return ForwardBackward(settings, record, delays, pace)


def _discard(_: Record) -> None:
    pass


_names = itertools.count()


class ForwardBackward:
    """Runs the tasks of a step on this rank, by readiness."""

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
        self._admission = resolve_admission(settings.admit)
        self._cost = resolve_cost(settings.admit_cost)
        # The same on every rank, for all of them make their functions in the same sequence.
        self._name = next(_names)
        self._num_openings = 0
        self._pipeline: Pipeline | None = None
        self._plans: dict[tuple[Shape, bool], Plan] = {}
        self._step = 0
        self._num_trained = 0
        atexit.register(self.close)
        self.last_step: StepSummary | None = None
        """What the last step came to on this rank."""

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Iterator[Any] | Sequence[Iterator[Any] | None] | None,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """One step, by Megatron's contract: what the loss function gave for each microbatch, in
        microbatch order (empty but on the rank of the last stage); with `admit`, in the order
        in which they are admitted. `model` and `data_iterator` are
        lists where a rank has several chunks, by chunk. `seq_length`, `micro_batch_size`,
        `decoder_seq_length` and `adjust_tensor_shapes_fn` are not needed: messages carry their
        shapes. Raises UsageError for what cannot run out of order, PeerLostError and StallError.
        When anything is raised once a step's tasks have begun, the links close, and the neighbours
        are told.
        """
        models: list[Any] = [*model] if isinstance(model, list | tuple) else [model]
        data = [
            None if iterator is None else MicrobatchData(iterator)
            for iterator in _iterators(data_iterator, len(models))
        ]
        config = get_model_config(models[0])
        groups = step_groups(p2p_communicator, pg_collection)
        place = place_in(groups, has_experts=getattr(config, "num_moe_experts", None) is not None)
        plan = self._plan(place, num_microbatches, len(models), forward_only)
        refuse(config, models, plan, place.pp_rank)
        device = next(models[0].parameters()).device
        streams = RandomStreams(device)
        # Neighbours may still be in the step before: when no order can be told, the links stay as
        # they are.
        order: Sequence[int] = range(num_microbatches)
        if not forward_only:
            order = self._admitted(data[0], num_microbatches, groups, device)
        arguments = StepArguments(
            forward_step_func,
            data,
            order,
            num_microbatches,
            forward_only,
            collect_non_loss_data,
            first_val_step,
        )
        try:
            pipeline = self._connected(place, plan.shape, forward_only)
            pace = None
            if self._pace is not None and not forward_only:
                pace = self._pace.start_step(self._num_trained, plan.shape)
            if not forward_only:
                self._num_trained += 1
            return self._run_step(
                pipeline, plan, models, config, groups, arguments, streams, pace, force_all_reduce
            )
        except BaseException:
            self.close(farewell=False)
            raise

    def _admitted(
        self,
        data: MicrobatchData | None,
        num_microbatches: int,
        groups: Any,
        device: torch.device,
    ) -> Sequence[int]:
        """The order in which the items of a step that trains become its microbatches."""
        admission, step = self._admission, self._num_trained
        if admission is Admit.GIVEN:
            return range(num_microbatches)

        def decide() -> Sequence[int]:
            if data is None:
                raise UsageError(
                    f"admit '{self._settings.admit}' orders the step's items and the first rank of "
                    "this replica is given no data iterator; pass one there or leave admit out"
                )
            first = data.first
            return admission_order(
                admission, step, num_microbatches, lambda: self._cost.weigh(first(num_microbatches))
            )

        start_ns = monotonic()
        order = agreed_order(decide, num_microbatches, groups, device)
        self._record(PhaseRecord(start_ns, monotonic(), self._step, Phase.DATA))
        return order

    def _run_step(
        self,
        pipeline: Pipeline,
        plan: Plan,
        models: list[Any],
        config: Any,
        groups: Any,
        arguments: StepArguments,
        streams: RandomStreams,
        pace: StepPace | None,
        force_all_reduce: bool | None,
    ) -> list[Any]:
        start_ns = monotonic()
        forward_only = arguments.forward_only
        shape, pp_rank = plan.shape, pipeline.place.pp_rank
        last_stage_rank = shape.rank_of(shape.num_stages - 1)
        has_last_stage = pp_rank == last_stage_rank
        finalizes = config.finalize_model_grads_func is not None and not forward_only
        if finalizes:
            embedding = clear_embedding_activation_buffer(config, models, has_last_stage)
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
            # W adds gradients by itself, where hooks do not see them.
            follows_hooks=plan.is_the_same_on_replicas and not shape.splits_backward,
        )
        try:
            summary = pipeline.run_step(self._step, plan, compute, pace)
        except BaseException:
            compute.abandon()
            raise

        sync_start_ns = monotonic()
        if finalizes:
            finish_embedding_wgrad_compute(config, embedding, has_last_stage, groups.tp)
        compute.finish()
        if finalizes:
            num_tokens = compute.num_tokens if config.calculate_per_token_loss else None
            if num_tokens is not None and last_stage_rank != shape.num_ranks - 1:
                # Megatron takes it from the last rank.
                source = pipeline.place.pipeline[last_stage_rank]
                dist.broadcast(num_tokens, source, group=groups.pp)
            config.finalize_model_grads_func(
                models, num_tokens, pg_collection=groups, force_all_reduce=force_all_reduce
            )
        if config.timers is not None:
            config.timers("forward-backward").stop()
        end_ns = monotonic()
        self._record(WaitRecord(sync_start_ns, end_ns, self._step, Cause.GRADIENT_SYNC))
        self._record(PhaseRecord(start_ns, end_ns, self._step, Phase.SCHEDULE))
        self.last_step = replace(summary, start_ns=start_ns, end_ns=end_ns)
        self._step += 1
        return compute.forward_data()

    def _plan(
        self, place: Place, num_microbatches: int, num_chunks: int, forward_only: bool
    ) -> Plan:
        """The plan of a step, worked out once for each shape."""
        placement = self._settings.placement
        shape = Shape(len(place.pipeline), num_microbatches, num_chunks, placement)
        key = (shape, forward_only)
        if key not in self._plans:
            self._plans[key] = make_plan(self._settings, shape, forward_only=forward_only)
        return self._plans[key]

    def _connected(self, place: Place, shape: Shape, forward_only: bool) -> Pipeline:
        """The links, with credit enough for this step."""
        num_credits = self._settings.num_credits(
            shape.num_microbatches, shape.num_chunks, forward_only=forward_only
        )
        pipeline = self._pipeline
        if pipeline is None:
            # A name serves one meeting of the ranks; the next one takes another.
            name = f"{self._name}/{self._num_openings}"
            self._num_openings += 1
            pipeline = Pipeline(
                self._settings,
                place,
                shape,
                self._record,
                dist.distributed_c10d._get_default_store(),  # torch has no public name for it
                name,
                num_credits=num_credits,
                delays=self._delays,
            )
            self._pipeline = pipeline
        elif pipeline.place != place or pipeline.num_chunks != shape.num_chunks:
            raise UsageError(
                f"the process groups and chunks of this step ({place}, {shape.num_chunks} chunks) "
                f"are not those of the first ({pipeline.place}, {pipeline.num_chunks} chunks); "
                "pass the same in every call"
            )
        else:
            pipeline.grant(num_credits)
        return pipeline

    def close(self, *, farewell: bool = True) -> None:
        """Say farewell to the neighbours and close the links, on all ranks between two steps; a
        later call opens them anew. Also done at exit. Without a farewell, for a rank that fails,
        the neighbours take this rank for lost."""
        if self._pipeline is not None:
            self._pipeline.close(farewell=farewell)
            self._pipeline = None


def _iterators(given: Any, num_chunks: int) -> list[Iterator[Any] | None]:
    """One data iterator a chunk, of what Megatron passes bare, in a list, or not at all."""
    if given is None:
        return [None] * num_chunks
    iterators = given if isinstance(given, list) else [given]
    if len(iterators) != num_chunks:
        raise UsageError(
            f"{len(iterators)} data iterators came with {num_chunks} model chunks; "
            "pass a list of one a chunk"
        )
    return iterators
