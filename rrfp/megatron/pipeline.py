"""One rank's part of its pipeline: its links, the agreement in its group, and its worker."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.distributed import Store

from rrfp.errors import RrfpError, first_line
from rrfp.megatron.look_ahead import AheadIterators
from rrfp.megatron.memory.bound import MemoryBound, StepMemory
from rrfp.megatron.settings import DispatchSettings
from rrfp.megatron.step.microbatch_data import DataHabits
from rrfp.megatron.step_groups import Place, coupled_pipelines
from rrfp.planning.hint_chooser import HintChooser
from rrfp.planning.order_planner import OrderPlanner
from rrfp.runtime.agreement import GroupAgreement
from rrfp.runtime.net.transport import SocketTransport, TransportFactory, make_planes
from rrfp.runtime.pace import Delays, StepPace
from rrfp.runtime.planes.selection import AcceptedPlanes
from rrfp.runtime.protocols import Compute, Inbox, StepSummary
from rrfp.runtime.rendezvous import Rendezvous
from rrfp.runtime.stall import StallBoard
from rrfp.runtime.worker import make_worker
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.named_hints import AutoHint
from rrfp.schedule.policy import Auto, Bytes, Dispatch, Policy
from rrfp.schedule.rehearsal import StepPolicy
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import whole_number
from rrfp.trace.records import Record, evaluation_step

_MIN_STALL_S = 600.0


class Pipeline:
    """This rank's links and worker, from open to close."""

    transport: ClassVar[TransportFactory] = SocketTransport
    """Constructor of the transport."""

    def __init__(
        self,
        settings: DispatchSettings,
        place: Place,
        shape: Shape,
        record: Callable[[Record], None],
        store: Store,
        name: str,
        device: torch.device,
        *,
        num_credits: int,
        timeout_s: float,
        delays: Delays | None = None,
    ) -> None:
        """Connect to the neighbors and the ranks of the agreement; all ranks of the run call it.

        Of `shape`, only ranks, chunks and placement are used. `name` distinguishes this opening
        from others of the same run. Messages carry tensors on `device`, and a link holds up to
        `num_credits` of them. `timeout_s`, the timeout of the pipeline's process group, is the
        default of `connect_s` and, raised to at least 600 s, of `stall_s`. Raises PeerLostError
        naming a rank that did not come in time, and UsageError if coupled ranks are on different
        stages.
        """
        self.place = place
        prefix = _prefix(name)
        connect_s = settings.connect_s or timeout_s
        pipelines = [place.pipeline]
        # With a fixed order there is nothing to agree on.
        if settings.policy.dispatch is Dispatch.READY:
            rendezvous = Rendezvous(store, prefix, place.rank, connect_s)
            pipelines = coupled_pipelines(place, rendezvous)
        members = [pipeline[place.pp_rank] for pipeline in pipelines]
        neighbors = {place.pipeline[rank] for rank in shape.neighbors(place.pp_rank)}
        neighbors |= _star(place.rank, members)
        inbox = Inbox()
        self._planes = make_planes(device, settings.transport, settings.outbox_mb)
        self._transport = type(self).transport(
            place.rank,
            store,
            neighbors,
            neighbors,
            inbox,
            num_credits=num_credits,
            prefix=prefix,
            record=record,
            connect_s=connect_s,
            silence_s=settings.silence_s,
            delays=delays,
            planes=self._planes,
            tls=settings.tls,
        )
        self._transport.open()
        self._agreement = GroupAgreement(place.rank, members, self._transport, record)
        self._worker = make_worker(
            place.pipeline,
            inbox,
            self._transport,
            self._agreement,
            record,
            StallBoard(store, prefix, itertools.chain.from_iterable(pipelines)),
            delays=delays,
            stall_s=settings.stall_s or max(timeout_s, _MIN_STALL_S),
            device=self._planes.device,
        )
        self._worker.open()

    @property
    def planes(self) -> AcceptedPlanes:
        """The data planes of the links from this rank."""
        return self._planes.accepted

    def grant(self, num_credits: int) -> None:
        """Raise each link's capacity to at least `num_credits` messages."""
        self._transport.grant(num_credits)

    def run_step(
        self,
        step: int,
        step_policy: StepPolicy,
        memory: StepMemory,
        compute: Compute,
        pace: StepPace | None,
    ) -> StepSummary:
        """Run every task of one step on this rank, delayed to `pace` if given. Raises UsageError
        for a hold with which the rank could deadlock."""
        dispatcher = Dispatcher(
            step_policy.shape,
            self.place.pp_rank,
            step_policy.policy,
            self._agreement.group,
            sizes=memory.sizes,
            budget=memory.budget,
        )
        return self._worker.run_step(step, dispatcher, compute, pace)

    def close(self, *, farewell: bool) -> None:
        """Close the worker and the links. Without a farewell, the neighbors treat this rank as
        lost."""
        self._worker.close()
        self._transport.close(farewell=farewell)


def publish_failure(store: Store, name: str, rank: int, error: BaseException) -> None:
    """Publish that this rank has failed, with the error's first line, to the ranks that wait for it
    in the opening `name`."""
    reason = first_line(str(error))
    sentence = reason if isinstance(error, RrfpError) else f"{type(error).__name__}: {reason}"
    Rendezvous(store, _prefix(name), rank, 0.0).fail(sentence)


def _prefix(name: str) -> str:
    """The prefix of an opening's keys in the store."""
    return f"rrfp/{name}"


def _star(rank: int, members: list[int]) -> set[int]:
    """The ranks to which this rank needs links for the agreement of `members`: all others for the
    leader, which is the first member; the leader for the others."""
    return set(members if rank == members[0] else members[:1]) - {rank}


def discard(_: Record) -> None:
    """Ignore a record: the recording function of a step that is not recorded."""


@dataclass(slots=True)
class LayoutLinks:
    """The state shared by all calls of one layout: models with the same process groups and number
    of chunks."""

    record: Callable[[Record], None] = discard
    pipeline: Pipeline | None = None
    """None before the first step, and after a failure or a close."""
    timeout_s: float = 0.0
    """The timeout of the pipeline's process group."""
    num_trained: int = 0
    num_evaluated: int = 0
    data_habits: defaultdict[tuple[bool, tuple[int, ...]], DataHabits] = field(
        default_factory=lambda: defaultdict(DataHabits)
    )
    """Keyed by (is an evaluation, ids of the models): several models may have the same groups."""

    chooser: HintChooser | None = None
    """Chooses the hint of each step, with hint `auto`."""
    planner: OrderPlanner | None = None
    """Plans the order of entry, with `admit plan`."""
    ahead: AheadIterators = field(default_factory=AheadIterators)
    """The data iterators whose next items the planner looks at."""

    bounds: dict[tuple[int, ...], MemoryBound] = field(default_factory=dict)
    """Memory bounds, by the ids of the models."""

    def __post_init__(self) -> None:
        self.num_trained = whole_number(self.num_trained, "the first step")

    def hint_chooser(self, policy: Policy) -> HintChooser | None:
        """The chooser of training steps' hints, created at the first call with hint `auto`; None
        with another hint."""
        if self.chooser is None and isinstance(policy.hint, AutoHint):
            self.chooser = HintChooser(policy)
        return self.chooser

    def memory_bound_of(
        self, models: Sequence[Any], hold: object, device: torch.device
    ) -> MemoryBound:
        """The memory bound of these models' steps, created at their first call. `hold` is a number
        of bytes or `auto`."""
        assert isinstance(hold, Bytes | Auto)
        key = tuple(map(id, models))
        if key not in self.bounds:
            self.bounds[key] = MemoryBound(hold, len(models), device)
        return self.bounds[key]

    def count_step(self, *, forward_only: bool) -> int:
        """Count a training step or an evaluation, separately, and return its number in records and
        on links. A failed step counts too, because it may have failed on some ranks only."""
        if forward_only:
            self.num_evaluated += 1
            return evaluation_step(self.num_evaluated - 1)
        self.num_trained += 1
        return self.num_trained - 1

    def close(self, *, farewell: bool = True) -> None:
        """Close the hint chooser and the links; the next step opens new links. Without a farewell,
        after a failure, the neighbors treat this rank as lost."""
        if self.chooser is not None:
            self.chooser.close()
        if self.pipeline is not None:
            self.pipeline.close(farewell=farewell)
            self.pipeline = None
