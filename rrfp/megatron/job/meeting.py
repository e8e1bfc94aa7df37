"""How the ranks of a job that is recorded find each other, and the directory of their run.

Not every process of a job need be in a pipeline. So the ranks of a recording are those that share
process groups with each other, directly or by way of others.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from torch.distributed import Store

from rrfp.errors import RrfpError
from rrfp.megatron.job.request import RecordingRequest
from rrfp.runtime.decoding import integers
from rrfp.runtime.introduction import introduce, introduced
from rrfp.runtime.rendezvous import Rendezvous
from rrfp.trace.records import RankInfo
from rrfp.trace.rundir import RunDir, create_run_dir

T = TypeVar("T")

_MEETING_S = 60.0
_PREFIX = "rrfp/recording"


class Meeting:
    """The meeting of a recording's ranks, as one of them sees it; all of them call it together."""

    def __init__(self, store: Store, own: RankInfo, linked: Iterable[int]) -> None:
        """`linked` are the ranks that share a process group with this one. Raises PeerLostError
        naming a rank that does not come."""
        self._store = store
        self._own = own
        rendezvous = Rendezvous(store, _PREFIX, own.rank, _MEETING_S)
        rendezvous.publish(f"linked/{own.rank}", json.dumps(sorted(linked)))
        found: set[int] = set()
        new = {own.rank}
        while new:
            told = [rendezvous.wait_json(f"linked/{rank}", rank, integers) for rank in sorted(new)]
            found |= new
            new = {rank for ranks in told for rank in ranks} - found
        self.ranks: Sequence[int] = sorted(found)
        """Those of the recording."""
        self.is_leader = own.rank == self.ranks[0]
        """Whether this rank does what is done once."""

        self._prefix = f"{_PREFIX}/{self.ranks[0]}"

    def run(self, request: RecordingRequest, label: str) -> RunDir:
        """The run's directory, which the leader makes. Raises RrfpError if it cannot, or if another
        pipeline of the job is recorded already: a recording has one."""
        leader = self.ranks[0]
        rendezvous = Rendezvous(self._store, self._prefix, self._own.rank, _MEETING_S)
        if self.is_leader:
            made = ""
            try:
                made = str(self._make(request, label).path.absolute())
            finally:
                rendezvous.publish("run", made)
        told = rendezvous.wait_text("run", leader)
        if not told:
            raise RrfpError(
                f"rank {leader} could not make the directory of the run; see its own warning"
            )
        return RunDir(Path(told))

    def _make(self, request: RecordingRequest, label: str) -> RunDir:
        own = str(self._own.rank)
        first = self._store.compare_set(f"{_PREFIX}/leader", "", own).decode()
        if first != own:
            raise RrfpError(
                f"rank {first} and others record a pipeline, and a run has one; record this one in "
                "a job of its own"
            )
        return create_run_dir(request.out, force=request.force, hint=label)

    def introduce(self) -> RankInfo:
        """Introduce this rank to the others; returns it with its clock compared to the leader's."""
        index = self.ranks.index(self._own.rank)
        own = introduce(
            self._store,
            self._prefix,
            replace(self._own, rank=index),
            len(self.ranks),
            timeout_s=_MEETING_S,
        )
        return replace(own, rank=self._own.rank)

    def introduced(self) -> list[RankInfo]:
        """All ranks, once they have introduced themselves."""
        index = self.ranks.index(self._own.rank)
        found = introduced(self._store, self._prefix, index, len(self.ranks), timeout_s=_MEETING_S)
        return [replace(info, rank=rank) for info, rank in zip(found, self.ranks, strict=True)]

    def share(self, name: str, value: object) -> None:
        """Publish a JSON value about this rank."""
        Rendezvous(self._store, self._prefix, self._own.rank, _MEETING_S).publish(
            f"{name}/{self._own.rank}", json.dumps(value)
        )

    def shared(self, name: str, decode: Callable[[object], T]) -> list[T]:
        """What all ranks have published under this name, by rank."""
        rendezvous = Rendezvous(self._store, self._prefix, self._own.rank, _MEETING_S)
        return [rendezvous.wait_json(f"{name}/{rank}", rank, decode) for rank in self.ranks]
