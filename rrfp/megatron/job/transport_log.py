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
    """Publishes the data planes of this rank's links; one rank writes those of all ranks."""

    def __init__(
        self, store: Store, name: str, run: RunDir, rank: int, ranks: Sequence[int] = ()
    ) -> None:
        """`name` identifies the run in the store; its directory may have other names on other
        hosts. `ranks` are the run's ranks on the writing rank, and empty on the others."""
        self._store = store
        self._name = name
        self._run = run
        self._rank = rank
        self._ranks = ranks
        self._is_published = False

    def publish(self, planes: AcceptedPlanes) -> None:
        """Publish this rank's planes in the store at the first call. The writing rank writes those
        of all ranks to `run.json`, once, at the first call after all have published; so call this
        after each step. Never waits. A failed write is logged, not raised."""
        if not self._is_published:
            self._is_published = True
            links = {peer: choice.to_json() for peer, choice in sorted(planes.links.items())}
            own = {"links": links, "outbox_bytes": planes.outbox_bytes}
            self._store.set(self._key(self._rank), json.dumps(own))
        if self._ranks and self._store.check([self._key(rank) for rank in self._ranks]):
            try:
                self._write(planes)
            except (RrfpError, OSError) as error:
                _log.warning(
                    "%s does not say what carries the tensors of each link (%s)",
                    self._run.run_json,
                    reason_of(error),
                )
            self._ranks = ()

    def _write(self, own: AcceptedPlanes) -> None:
        """Read from the store what all ranks have published, and write it to `run.json`. The
        requested transport and `outbox_mb` are this rank's, because they are the same on every
        rank."""
        links: list[dict[str, object]] = []
        outbox_bytes = {}
        for rank in self._ranks:
            published = parsed(bytes(self._store.get(self._key(rank))))
            of_rank = member(published, "links")
            assert isinstance(of_rank, dict)
            links += [
                {"from": rank, "to": int(peer), **PlaneChoice.decode(each).to_json()}
                for peer, each in of_rank.items()
            ]
            outbox_bytes[str(rank)] = integer(member(published, "outbox_bytes"))
        transport = {
            "asked": str(own.requested),
            "outbox_mb": own.outbox_mb,
            "links": links,
            "outbox_bytes": outbox_bytes,
        }
        describe_transport(self._run.run_json, transport)

    def _key(self, rank: int) -> str:
        """The store's key of a rank's planes."""
        return f"rrfp/transport-of/{self._name}/{rank}"
