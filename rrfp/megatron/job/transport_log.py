"""The data planes that carry the tensors of each link, written to `run.json` by one rank."""

import json
import logging
from collections.abc import Sequence

from torch.distributed import Store

from rrfp.errors import RrfpError, reason_of
from rrfp.runtime.planes.selection import AcceptedPlanes, PlaneChoice
from rrfp.strict_json import integer, member, parsed
from rrfp.trace.run_dir import RunDir
from rrfp.trace.run_json import describe_transport

_log = logging.getLogger(__name__)


class TransportLog:
    """One rank's part of it: it tells what its links take, and one rank writes what all tell."""

    def __init__(
        self, store: Store, name: str, run: RunDir, rank: int, ranks: Sequence[int] = ()
    ) -> None:
        """`name` tells this run from others in the store; its directory need not have the same name
        on all hosts. `ranks` are those of the run, on the rank that writes."""
        self._store = store
        self._name = name
        self._run = run
        self._rank = rank
        self._ranks = ranks
        self._has_told = False

    def publish(self, taken: AcceptedPlanes) -> None:
        """Call it after each step until the last rank has told; it waits for nobody."""
        if not self._has_told:
            self._has_told = True
            links = {peer: settled.to_json() for peer, settled in sorted(taken.links.items())}
            told = {"links": links, "outbox_bytes": taken.outbox_bytes}
            self._store.set(self._key(self._rank), json.dumps(told))
        if self._ranks and self._store.check([self._key(rank) for rank in self._ranks]):
            try:
                self._write(taken)
            except (RrfpError, OSError) as error:
                _log.warning(
                    "%s does not say what carries the tensors of each link (%s)",
                    self._run.run_json,
                    reason_of(error),
                )
            self._ranks = ()

    def _write(self, own: AcceptedPlanes) -> None:
        """All ranks were asked for the same."""
        links: list[dict[str, object]] = []
        outbox_bytes = {}
        for rank in self._ranks:
            told = parsed(bytes(self._store.get(self._key(rank))))
            of_rank = member(told, "links")
            assert isinstance(of_rank, dict)
            links += [
                {"from": rank, "to": int(peer), **PlaneChoice.decode(each).to_json()}
                for peer, each in of_rank.items()
            ]
            outbox_bytes[str(rank)] = integer(member(told, "outbox_bytes"))
        described = {
            "asked": str(own.requested),
            "outbox_mb": own.outbox_mb,
            "links": links,
            "outbox_bytes": outbox_bytes,
        }
        describe_transport(self._run.run_json, described)

    def _key(self, rank: int) -> str:
        return f"rrfp/transport-of/{self._name}/{rank}"
