"""What carries the tensors of each link, told in `run.json`."""

import json
from collections.abc import Mapping

from torch.distributed import Store

from rrfp.runtime.decoding import member, parsed
from rrfp.runtime.planes.settling import Settled
from rrfp.trace.description import describe_transport
from rrfp.trace.rundir import RunDir
from rrfp.train.ranks.parallel import Layout
from rrfp.train.settings import TrainSettings

_KEY = "rrfp/planes"


def publish_planes(store: Store, layout: Layout, planes: Mapping[int, Settled]) -> None:
    """Tell rank 0 what the links from this rank took."""
    told = {str(peer): settled.described() for peer, settled in sorted(planes.items())}
    store.set(f"{_KEY}/{layout.rank}", json.dumps(told))


def describe_planes(run: RunDir, store: Store, layout: Layout, settings: TrainSettings) -> None:
    """Write them into `run.json`, on rank 0; every rank has published by now."""
    links: list[dict[str, object]] = []
    for rank in range(layout.world_size):
        told = parsed(bytes(store.get(f"{_KEY}/{rank}")))
        assert isinstance(told, dict)
        links += [
            {"from": rank, "to": int(peer), **Settled.decode(member(told, peer)).described()}
            for peer in told
        ]
    described = {
        "asked": str(settings.layout.transport),
        "outbox_mb": settings.layout.outbox_mb,
        "links": links,
    }
    describe_transport(run.run_json, described)
