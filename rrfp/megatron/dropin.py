"""The drop-in: Megatron's forward-backward function, with tasks dispatched by readiness.

`get_forward_backward_func` returns a function with the signature and the contract of
`megatron.core.pipeline_parallel.get_forward_backward_func()`. It asks Megatron for the process
groups, opens the links at its first call, and then runs every step through the runtime's worker.
Losses, gradients and gradient norms are those of Megatron's own schedule, bit for bit.
"""

import atexit
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import (
    clear_embedding_activation_buffer,
    finish_embedding_wgrad_compute,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from rrfp.errors import UsageError
from rrfp.hint_files import resolve_hint
from rrfp.megatron.dispatching import DispatchSettings
from rrfp.megatron.stage import StageStep, StepArguments
from rrfp.runtime.agreement import StarAgreement
from rrfp.runtime.protocols import Inbox, monotonic
from rrfp.runtime.socket_transport import SocketTransport
from rrfp.runtime.worker import StepSummary, Worker
from rrfp.schedule.causes import Cause
from rrfp.schedule.dispatcher import Dispatch, Dispatcher
from rrfp.schedule.hints import Hint
from rrfp.schedule.order import Order
from rrfp.schedule.rehearsal import check_binding, order_of
from rrfp.schedule.shape import FORWARD_ONLY, WHOLE_BACKWARD, Shape
from rrfp.trace.records import Phase, PhaseRecord, Record, WaitRecord


def get_forward_backward_func(
    pp_size: int | None = None,
    vp_size: int | None = None,
    *,
    settings: DispatchSettings | None = None,
    record: Callable[[Record], None] | None = None,
) -> "ForwardBackward":
    """The function that a Megatron training loop calls once a step.

    Megatron's own arguments come first; `pp_size` and `vp_size` only check that this process has
    one model chunk. `record` receives every trace record of this rank, from several threads.
    Raises UsageError for several model chunks a rank.
    """
    if pp_size is None and vp_size is None:
        vp_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if vp_size is not None and vp_size > 1:
        raise UsageError(
            f"{vp_size} model chunks a rank are more than this version dispatches; "
            "leave the virtual pipeline size out"
        )
    # Megatron's loops ask again for training and for every evaluation: all share the links.
    return _shared(settings or DispatchSettings(), record or _discard)


@cache
def _shared(settings: DispatchSettings, record: Callable[[Record], None]) -> "ForwardBackward":
    return ForwardBackward(settings, record)


def _discard(_: Record) -> None:
    pass


_names = itertools.count()


class ForwardBackward:
    """Runs the forwards and backwards of a step on this rank, by readiness."""

    def __init__(self, settings: DispatchSettings, record: Callable[[Record], None]) -> None:
        self._settings = settings
        self._record = record
        # The same on every rank, for all of them make their functions in the same sequence.
        self._name = next(_names)
        self._num_openings = 0
        self._pipeline: _Pipeline | None = None
        self._step = 0
        atexit.register(self.close)
        self.last_step: StepSummary | None = None
        """What the last step came to on this rank."""

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Iterator[Any] | Sequence[Iterator[Any]] | None,
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
        microbatch order (empty but on the last stage). `seq_length`, `micro_batch_size`,
        `decoder_seq_length` and `adjust_tensor_shapes_fn` are not needed: messages carry their
        shapes. Raises UsageError for what cannot run out of order, PeerLostError and StallError.
        When anything is raised after the links are open, they close, and the neighbours are told.
        """
        chunk = _only(model, "model chunks")
        iterator = None if data_iterator is None else _only(data_iterator, "data iterators")
        config = get_model_config(chunk)
        groups = _groups(p2p_communicator, pg_collection)
        _refuse(config, groups)
        arguments = StepArguments(
            forward_step_func,
            iterator,
            num_microbatches,
            forward_only,
            collect_non_loss_data,
            first_val_step,
        )
        pipeline = self._connected(groups, num_microbatches, forward_only)
        try:
            return self._run_step(pipeline, chunk, config, groups, arguments, force_all_reduce)
        except BaseException:
            self.close(farewell=False)
            raise

    def _run_step(
        self,
        pipeline: "_Pipeline",
        chunk: Any,
        config: Any,
        groups: Any,
        arguments: StepArguments,
        force_all_reduce: bool | None,
    ) -> list[Any]:
        start_ns = monotonic()
        forward_only = arguments.forward_only
        is_last_stage = pipeline.rank == pipeline.num_ranks - 1
        plan = pipeline.plan(arguments.num_microbatches, forward_only)
        if config.defer_embedding_wgrad_compute and not plan.keeps_microbatch_order:
            raise UsageError(
                f"defer_embedding_wgrad_compute cannot follow the order {plan.order.name}: it "
                "pairs forwards and backwards by their sequence; switch it off"
            )
        finalizes = config.finalize_model_grads_func is not None and not forward_only
        if finalizes:
            embedding = clear_embedding_activation_buffer(config, chunk, is_last_stage)
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(
                barrier=config.barrier_with_L1_time
            )
        compute = StageStep(
            chunk,
            arguments,
            is_first_stage=pipeline.rank == 0,
            is_last_stage=is_last_stage,
            cp_size=groups.cp.size(),
            overlaps_reduction=plan.is_the_same_on_replicas,
        )
        summary = pipeline.worker.run_step(self._step, pipeline.dispatcher(plan), compute)

        sync_start_ns = monotonic()
        if not forward_only:
            compute.finish()
        if finalizes:
            finish_embedding_wgrad_compute(config, embedding, is_last_stage, groups.tp)
            config.finalize_model_grads_func(
                [chunk],
                compute.num_tokens if config.calculate_per_token_loss else None,
                pg_collection=groups,
                force_all_reduce=force_all_reduce,
            )
        if config.timers is not None:
            config.timers("forward-backward").stop()
        end_ns = monotonic()
        self._record(WaitRecord(sync_start_ns, end_ns, self._step, Cause.GRADIENT_SYNC))
        self._record(PhaseRecord(start_ns, end_ns, self._step, Phase.SCHEDULE))
        self.last_step = replace(summary, start_ns=start_ns, end_ns=end_ns)
        self._step += 1
        return compute.forward_data()

    def _connected(self, groups: Any, num_microbatches: int, forward_only: bool) -> "_Pipeline":
        """The links, with credit enough for this step."""
        num_credits = self._settings.num_credits(num_microbatches, forward_only=forward_only)
        pipeline = self._pipeline
        if pipeline is None:
            # A name serves one meeting of the ranks; the next one takes another.
            name = f"{self._name}/{self._num_openings}"
            self._num_openings += 1
            pipeline = _Pipeline(self._settings, self._record, groups, num_credits, name)
            self._pipeline = pipeline
        elif pipeline.places != _places(groups):
            raise UsageError(
                f"the process groups of this step (pipeline and tensor ranks {_places(groups)}) "
                f"are not those of the first ({pipeline.places}); pass the same in every call"
            )
        else:
            pipeline.transport.grant(num_credits)
        return pipeline

    def close(self, *, farewell: bool = True) -> None:
        """Say farewell to the neighbours and close the links, on all ranks between two steps; a
        later call opens them anew. Also done at exit. Without a farewell, for a rank that fails,
        the neighbours take this rank for lost."""
        if self._pipeline is not None:
            self._pipeline.transport.close(farewell=farewell)
            self._pipeline = None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What steers the steps of one shape."""

    shape: Shape
    hint: Hint
    order: Order
    keeps_microbatch_order: bool
    """Forwards and backwards each run in microbatch order, whatever the timing: every rank prefers
    the smallest one that is there, and first-in-first-out links keep that order."""
    is_the_same_on_replicas: bool
    """Data-parallel replicas run their backwards in one order."""


class _Pipeline:
    """This rank's place in its pipeline and group, its links, and the hints it has worked out."""

    def __init__(
        self,
        settings: DispatchSettings,
        record: Callable[[Record], None],
        groups: Any,
        num_credits: int,
        name: str,
    ) -> None:
        """`num_credits` messages fit on each link; `name` tells this pipeline's links from those
        of an earlier one of the same run."""
        self._settings = settings
        self.places = pp_ranks, tp_ranks = _places(groups)
        rank = dist.get_rank()
        self.rank = pp_ranks.index(rank)
        self.num_ranks = len(pp_ranks)
        # A fixed order is one order for the whole group already.
        is_ready = settings.dispatch is Dispatch.READY
        members = tp_ranks if is_ready else [rank]
        neighbours = {*pp_ranks[max(self.rank - 1, 0) : self.rank + 2], *_star(rank, members)}
        neighbours.discard(rank)
        inbox = Inbox()
        self.transport = SocketTransport(
            rank,
            dist.distributed_c10d._get_default_store(),  # torch has no public name for it
            neighbours,
            neighbours,
            inbox,
            num_credits=num_credits,
            prefix=f"rrfp/{name}",
            record=record,
            connect_s=settings.connect_s,
        )
        self._agreement = StarAgreement(rank, members, self.transport, record)
        self.worker = Worker(
            pp_ranks, inbox, self.transport, self._agreement, record, stall_s=settings.stall_s
        )
        self._plans: dict[Shape, _Plan] = {}

    def plan(self, num_microbatches: int, forward_only: bool) -> _Plan:
        """The plan of a step, worked out once for each shape."""
        shape = Shape(
            self.num_ranks,
            num_microbatches,
            kinds=FORWARD_ONLY if forward_only else WHOLE_BACKWARD,
        )
        if shape not in self._plans:
            self._plans[shape] = _plan(self._settings, shape)
        return self._plans[shape]

    def dispatcher(self, plan: _Plan) -> Dispatcher:
        """The dispatcher of one step."""
        return Dispatcher(
            plan.shape,
            self.rank,
            plan.hint,
            dispatch=self._settings.dispatch,
            limit=self._settings.effective_limit,
            order=plan.order,
            group=self._agreement.group,
        )


def _plan(settings: DispatchSettings, shape: Shape) -> _Plan:
    """The hint and the order that it gives, checked where it binds, cut to the step's kinds."""
    whole = replace(shape, kinds=WHOLE_BACKWARD)
    hint = resolve_hint(settings.hint, whole)
    order = order_of(hint, whole)
    if settings.dispatch is Dispatch.FIXED:
        check_binding(order, settings.limit)
    if shape.kinds == FORWARD_ONLY:
        order = order.forwards()
    keeps_microbatch_order = all(
        microbatches == sorted(microbatches)
        for row in order.rows
        for kind in shape.kinds
        for microbatches in [[task.microbatch for task in row if task.kind is kind]]
    )
    return _Plan(
        shape,
        order if isinstance(hint, Order) else hint,
        order,
        keeps_microbatch_order,
        keeps_microbatch_order or settings.dispatch is Dispatch.FIXED,
    )


def _places(groups: Any) -> tuple[list[int], list[int]]:
    """The global ranks of this rank's pipeline and of its tensor-parallel group."""
    return dist.get_process_group_ranks(groups.pp), dist.get_process_group_ranks(groups.tp)


def _star(rank: int, members: Sequence[int]) -> Sequence[int]:
    """Whom a rank is linked with for agreement: the leader with all, the others with the leader."""
    return members if rank == members[0] else members[:1]


def _only(given: Any, what: str) -> Any:
    """The one element of what Megatron passes bare or in a list."""
    if not isinstance(given, list):
        return given
    if len(given) != 1:
        raise UsageError(
            f"{len(given)} {what} are more than this version dispatches; use one chunk a rank"
        )
    return given[0]


def _groups(p2p_communicator: Any, pg_collection: Any) -> Any:
    """The process groups of the step, from the caller or from Megatron's parallel state."""
    # As Megatron has it: without pipelining there is no communicator to pass.
    needs_both = pg_collection is None or pg_collection.pp.size() > 1
    if needs_both and (p2p_communicator is None) != (pg_collection is None):
        raise UsageError(
            "p2p_communicator and pg_collection come together or not at all; pass both or neither"
        )
    if pg_collection is not None:
        return pg_collection
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=False
    )
    return groups


_REFUSED = {
    "overlap_moe_expert_parallel_comm": "overlapped expert communication pairs tasks by a schedule",
    "hybrid_context_parallel": "hybrid context parallelism orders microbatches itself",
    "num_microbatches_with_partial_activation_checkpoints": (
        "partial checkpointing counts microbatches in schedule order"
    ),
    "fine_grained_activation_offloading": "activation offloading follows the schedule's order",
    "num_moe_experts": "experts need an agreement across replicas that this version lacks",
}


def _refuse(config: Any, groups: Any) -> None:
    """Raise UsageError, before the first task, for what does not work out of order."""
    for name, reason in _REFUSED.items():
        value = getattr(config, name, None)
        # A number of zero is a setting too.
        if value is not None and value is not False:
            raise UsageError(f"{name} cannot run readiness-first: {reason}; switch it off")
    if getattr(config, "cuda_graph_impl", "none") != "none":
        raise UsageError(
            f"cuda_graph_impl {config.cuda_graph_impl} cannot run readiness-first: graphs are "
            "captured in one order; set it to none"
        )
    if groups.cp.size() > 1:
        raise UsageError(
            f"a context-parallel size of {groups.cp.size()} needs an agreement that this version "
            "lacks; set it to 1"
        )
