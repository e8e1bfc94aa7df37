"""How the ranks of a job that is recorded find each other, and the directory of their run.

Not every process of a job need be in a pipeline. So the ranks of a recording are those that share
process groups with each other, directly or by way of others.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import torch
from torch.distributed import Store

from rrfp.errors import RrfpError, first_line
from rrfp.megatron.job.request import RecordingRequest, num_restarts, tell
from rrfp.runtime.net.transport import make_device
from rrfp.runtime.protocols import PeerLostError
from rrfp.runtime.rendezvous import Rendezvous, publish_rank_info, wait_for_rank_infos
from rrfp.strict_json import instance
from rrfp.trace.records import RankInfo
from rrfp.trace.run_dir import RunDir, create_run_dir, own_files

T = TypeVar("T")

_PREFIX = "rrfp/recording"
_USED_STORE = (
    "the job's store holds what an earlier start of the job left there; set "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on every node, so that each start has a "
    "store of its own"
)


@dataclass(frozen=True, slots=True)
class _Presence:
    """What a rank says when it comes, or instead of coming."""

    linked: tuple[int, ...] = ()
    """The ranks that share a process group with it."""
    num_restarts: int = 0
    failure: str = ""
    """Why it cannot record; empty if it can."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What a rank knows once it has read the presence of all others."""

    ranks: tuple[int, ...]
    num_restarts: int
    """Of all of them together."""


class Meeting:
    """The meeting of a recording's ranks, as one of them sees it; all of them call it together.

    One deadline holds for all of it. As a context manager, it tells the other ranks of an exception
    raised inside, so that none of them waits for this one.
    """

    def __init__(self, store: Store, rank: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._prefix = _PREFIX
        self._rendezvous = Rendezvous(store, _PREFIX, rank, timeout_s)
        self._num_restarts = 0
        self.ranks: Sequence[int] = ()
        """Those of the recording, once they are known."""
        self.is_leader = False
        """Whether this rank does what is done once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        failure = first_line(str(error))
        if self.ranks:
            self._rendezvous.fail(failure)
        else:
            # Only those linked to this rank learn of it; another pipeline may go on meeting.
            with suppress(RrfpError):
                self._say(_Presence(failure=failure))

    def gather(self, linked: Iterable[int]) -> None:
        """Find the ranks of the recording. `linked` are those that share a process group with this
        one. Raises PeerLostError naming a rank that does not come in time or cannot record, and
        RrfpError if an earlier start of the job has used the store: torchrun keeps its own."""
        if self._rendezvous.has(f"presence/{self._rank}"):
            raise self._used_store()
        self._say(_Presence(tuple(sorted(linked)), num_restarts()))
        found: set[int] = set()
        num_started_again = 0
        new = {self._rank}
        while new:
            self._rendezvous.awaited = sorted(new)
            told = [self._presence_of(rank) for rank in self._rendezvous.awaited]
            num_started_again += sum(each.num_restarts for each in told)
            found |= new
            new = {rank for each in told for rank in each.linked} - found
        self._confirm(_Found(tuple(sorted(found)), num_started_again))
        self._num_restarts = num_started_again
        self.ranks = sorted(found)
        self.is_leader = self._rank == self.ranks[0]
        # From here on a failure concerns these ranks only.
        self._prefix = f"{_PREFIX}/{self.ranks[0]}"
        remaining_s = self._rendezvous.remaining_s
        self._rendezvous = Rendezvous(self._store, self._prefix, self._rank, remaining_s)

    def run(self, request: RecordingRequest, label: str) -> RunDir:
        """The run's directory, which the leader makes. Raises RrfpError if it cannot, or if another
        pipeline of the job is recorded already: a recording has one."""
        if self.is_leader:
            self._rendezvous.publish("run", str(self._make(request, label).path))
        return RunDir(Path(self._rendezvous.wait_text("run", self.ranks[0])))

    def introduce(self, own: RankInfo, device: torch.device) -> RankInfo:
        """Introduce this rank to the others; returns it with its clocks, that of its device too,
        compared to the leader's."""
        placed = publish_rank_info(
            self._store,
            self._prefix,
            replace(own, rank=self._index),
            len(self.ranks),
            make_device(device),
            timeout_s=self._rendezvous.remaining_s,
        )
        return replace(placed, rank=self._rank)

    def introduced(self) -> list[RankInfo]:
        """All ranks, once they have introduced themselves."""
        found = wait_for_rank_infos(
            self._store,
            self._prefix,
            self._index,
            len(self.ranks),
            timeout_s=self._rendezvous.remaining_s,
        )
        return [replace(info, rank=rank) for info, rank in zip(found, self.ranks, strict=True)]

    def settle(self) -> None:
        """The leader calls this when all that it does once is done; the others wait for it. Raises
        PeerLostError with the reason if a rank has failed before."""
        if self.is_leader:
            self._rendezvous.publish("settled", "")
        self._rendezvous.wait("settled", self.ranks[0])

    def share(self, name: str, value: object) -> None:
        """Publish a JSON value about this rank."""
        self._rendezvous.publish(f"{name}/{self._rank}", json.dumps(value))

    def shared(self, name: str, decode: Callable[[object], T]) -> list[T]:
        """What all ranks have published under this name, by rank."""
        return [self._rendezvous.wait_json(f"{name}/{rank}", rank, decode) for rank in self.ranks]

    @property
    def _index(self) -> int:
        return self.ranks.index(self._rank)

    def _say(self, presence: _Presence) -> None:
        self._rendezvous.publish(f"presence/{self._rank}", json.dumps(asdict(presence)))

    def _presence_of(self, rank: int) -> _Presence:
        found = self._rendezvous.wait_json(f"presence/{rank}", rank, partial(instance, _Presence))
        if found.failure:
            raise PeerLostError(f"rank {rank} cannot record: {found.failure}")
        return found

    def _confirm(self, own: _Found) -> None:
        """See that all ranks have found the same.

        A presence may be left from an earlier start in which this rank did not come so far. What
        others have found cannot: if it names this rank, they have read the presence that this rank
        published just now.
        """
        self._rendezvous.publish(f"found/{self._rank}", json.dumps(asdict(own)))
        for rank in own.ranks:
            decode = partial(instance, _Found)
            if self._rendezvous.wait_json(f"found/{rank}", rank, decode) != own:
                raise self._used_store()

    def _used_store(self) -> RrfpError:
        """The error to raise. Told to every rank of the job: none can trust what it reads."""
        self._rendezvous.fail(_USED_STORE)
        return RrfpError(_USED_STORE)

    def _make(self, request: RecordingRequest, label: str) -> RunDir:
        own = str(self._rank)
        first = self._store.compare_set(f"{_PREFIX}/leader", "", own).decode()
        if first != own:
            raise RrfpError(
                f"rank {first} and others record a pipeline, and a run has one; record this one in "
                "a job of its own"
            )
        out, force = request.out, request.force
        if self._num_restarts and out is not None and out.exists():
            out, force = _free_beside(out), False
            tell(
                f"{request.out} holds the run of an earlier start of this job, so this one is "
                f"recorded in {out}"
            )
        with own_files():
            return create_run_dir(out, force, label, request.runs)


def _free_beside(out: Path) -> Path:
    """The first of `OUT-restart-1`, `OUT-restart-2` and so on that does not exist."""
    candidates = (out.with_name(f"{out.name}-restart-{number}") for number in itertools.count(1))
    return next(path for path in candidates if not path.exists())
