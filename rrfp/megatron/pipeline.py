"""One rank's end of its pipeline: its place, its links, its group's agreement, and its worker."""

import itertools
from collections.abc import Callable

import torch
from torch.distributed import Store

from rrfp.errors import RrfpError, first_line
from rrfp.megatron.groups import Place, coupled_pipelines
from rrfp.megatron.memory.bound import StepMemory
from rrfp.megatron.settings import DispatchSettings
from rrfp.megatron.step_policy import StepPolicy
from rrfp.runtime.agreement import StarAgreement
from rrfp.runtime.delays import Delays
from rrfp.runtime.device_worker import make_worker
from rrfp.runtime.pace import StepPace
from rrfp.runtime.planes.settling import Taken
from rrfp.runtime.protocols import Compute, Inbox, StepSummary
from rrfp.runtime.rendezvous import Rendezvous
from rrfp.runtime.stall import StoreStallBoard
from rrfp.runtime.transport.factory import data_planes, transport_maker
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.shape import Shape
from rrfp.trace.records import Record

_LEAST_STALL_S = 600.0


class Pipeline:
    """This rank's links, from their opening to their close."""

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
        if settings.dispatch is Dispatch.READY:
            meeting = Rendezvous(store, prefix, place.rank, connect_s)
            pipelines = coupled_pipelines(place, meeting)
        members = [pipeline[place.pp_rank] for pipeline in pipelines]
        neighbours = {place.pipeline[rank] for rank in shape.neighbours(place.pp_rank)}
        neighbours |= _star(place.rank, members)
        inbox = Inbox()
        self._planes = data_planes(device, settings.transport, settings.outbox_mb)
        self._transport = transport_maker(device)(
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
        self._agreement = StarAgreement(place.rank, members, self._transport, record)
        self._worker = make_worker(
            place.pipeline,
            inbox,
            self._transport,
            self._agreement,
            record,
            StoreStallBoard(store, prefix, itertools.chain.from_iterable(pipelines)),
            delays=delays,
            stall_s=settings.stall_s or max(timeout_s, _LEAST_STALL_S),
            device=self._planes.device,
        )
        self._worker.open()

    @property
    def planes(self) -> Taken:
        """What carries the tensors of the links from this rank."""
        return self._planes.taken

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


def tell_of_failure(store: Store, name: str, rank: int, error: BaseException) -> None:
    """Tell the ranks that wait for this one in the opening called `name` that it has failed."""
    reason = first_line(str(error))
    sentence = reason if isinstance(error, RrfpError) else f"{type(error).__name__}: {reason}"
    Rendezvous(store, _prefix(name), rank, 0.0).fail(sentence)


def _prefix(name: str) -> str:
    return f"rrfp/{name}"


def _star(rank: int, members: list[int]) -> set[int]:
    """The ranks that a rank needs links to for agreement: the leader to all, others to it."""
    return set(members if rank == members[0] else members[:1]) - {rank}
