"""One rank's end of its pipeline: its place, its links, its group's agreement, and its worker."""

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
from rrfp.planning.step_policy import StepPolicy
from rrfp.runtime.agreement import GroupAgreement
from rrfp.runtime.net.transport import SocketTransport, TransportFactory, make_planes
from rrfp.runtime.pace import Delays, StepPace
from rrfp.runtime.planes.selection import AcceptedPlanes
from rrfp.runtime.protocols import Compute, Inbox, StepSummary
from rrfp.runtime.rendezvous import Rendezvous
from rrfp.runtime.stall import StallBoard
from rrfp.runtime.worker import make_worker
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.knobs import Auto, Bytes
from rrfp.schedule.named_hints import AutoHint
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import whole_number
from rrfp.trace.records import Record, evaluation_step

_LEAST_STALL_S = 600.0


class Pipeline:
    """This rank's links, from their opening to their close."""

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
        """Connect to the ranks that this one works with; all ranks of the run call it together.

        `shape` is that of any step; only its ranks, chunks and placement are used. `name`
        distinguishes this opening from others of the same run. Messages carry tensors on `device`,
        and `num_credits` of them fit on each link. `timeout_s` is how long the pipeline's process
        group waits, for settings that leave that open. Raises PeerLostError naming a rank that did
        not come in time.
        """
        self.place = place
        prefix = _prefix(name)
        connect_s = settings.connect_s or timeout_s
        pipelines = [place.pipeline]
        # With a fixed order there is nothing to agree on.
        if settings.policy.dispatch is Dispatch.READY:
            meeting = Rendezvous(store, prefix, place.rank, connect_s)
            pipelines = coupled_pipelines(place, meeting)
        members = [pipeline[place.pp_rank] for pipeline in pipelines]
        neighbours = {place.pipeline[rank] for rank in shape.neighbours(place.pp_rank)}
        neighbours |= _star(place.rank, members)
        inbox = Inbox()
        self._planes = make_planes(device, settings.transport, settings.outbox_mb)
        self._transport = type(self).transport(
            place.rank,
            store,
            neighbours,
            neighbours,
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
            stall_s=settings.stall_s or max(timeout_s, _LEAST_STALL_S),
            device=self._planes.device,
        )
        self._worker.open()

    @property
    def planes(self) -> AcceptedPlanes:
        """What carries the tensors of the links from this rank."""
        return self._planes.accepted

    def grant(self, num_credits: int) -> None:
        """Let each link hold at least `num_credits` messages."""
        self._transport.grant(num_credits)

    def run_step(
        self,
        step: int,
        steering: StepPolicy,
        memory: StepMemory,
        compute: Compute,
        pace: StepPace | None,
    ) -> StepSummary:
        """Run every task of one step on this rank, paced if `pace` is given. Raises UsageError for
        a hold with which the rank could get stuck."""
        dispatcher = Dispatcher(
            steering.shape,
            self.place.pp_rank,
            steering.policy,
            self._agreement.group,
            sizes=memory.sizes,
            budget=memory.budget,
        )
        return self._worker.run_step(step, dispatcher, compute, pace)

    def close(self, *, farewell: bool) -> None:
        """Close the links; without a farewell the neighbours consider this rank lost."""
        self._worker.close()
        self._transport.close(farewell=farewell)


def publish_failure(store: Store, name: str, rank: int, error: BaseException) -> None:
    """Tell the ranks that wait for this one in the opening called `name` that it has failed."""
    reason = first_line(str(error))
    sentence = reason if isinstance(error, RrfpError) else f"{type(error).__name__}: {reason}"
    Rendezvous(store, _prefix(name), rank, 0.0).fail(sentence)


def _prefix(name: str) -> str:
    return f"rrfp/{name}"


def _star(rank: int, members: list[int]) -> set[int]:
    """The ranks that a rank needs links to for agreement: the leader to all, others to it."""
    return set(members if rank == members[0] else members[:1]) - {rank}


# The links of one layout: of all models with the same process groups and number of chunks.


def discard(_: Record) -> None:
    """Record nothing."""


@dataclass(slots=True)
class LayoutLinks:
    """State shared by all calls of a layout."""

    record: Callable[[Record], None] = discard
    pipeline: Pipeline | None = None
    """None before the first step, and after a failure or a close."""
    timeout_s: float = 0.0
    """How long the pipeline's process group waits."""
    num_trained: int = 0
    num_evaluated: int = 0
    habits: defaultdict[tuple[bool, tuple[int, ...]], DataHabits] = field(
        default_factory=lambda: defaultdict(DataHabits)
    )
    """By whether a step is an evaluation, and by the ids of the models: several models may have the
    same groups."""

    chooser: HintChooser | None = None
    """What chooses the hint, with `auto`."""
    planner: OrderPlanner | None = None
    """What plans the order of entry, with `admit plan`."""
    ahead: AheadIterators = field(default_factory=AheadIterators)
    """The iterators whose next items it looks at."""

    bounds: dict[tuple[int, ...], MemoryBound] = field(default_factory=dict)
    """By the ids of the models."""

    def __post_init__(self) -> None:
        self.num_trained = whole_number(self.num_trained, "the first step")

    def hint_chooser(self, policy: Policy) -> HintChooser | None:
        """What chooses the policies of training steps; None if they have the one that they were
        given."""
        if self.chooser is None and isinstance(policy.hint, AutoHint):
            self.chooser = HintChooser(policy)
        return self.chooser

    def memory_bound_of(
        self, models: Sequence[Any], hold: object, device: torch.device
    ) -> MemoryBound:
        """What bounds these models' steps in bytes; `hold` is in bytes or `auto`."""
        assert isinstance(hold, Bytes | Auto)
        key = tuple(map(id, models))
        if key not in self.bounds:
            self.bounds[key] = MemoryBound(hold, len(models), device)
        return self.bounds[key]

    def count_step(self, *, forward_only: bool) -> int:
        """The number of a step that begins, in records and on links. A failed step counts too: it
        may have failed on some ranks only."""
        if forward_only:
            self.num_evaluated += 1
            return evaluation_step(self.num_evaluated - 1)
        self.num_trained += 1
        return self.num_trained - 1

    def close(self, *, farewell: bool = True) -> None:
        """Close the links. Without a farewell, for a rank that fails, the neighbours consider this
        rank lost."""
        if self.chooser is not None:
            self.chooser.close()
        if self.pipeline is not None:
            self.pipeline.close(farewell=farewell)
            self.pipeline = None
