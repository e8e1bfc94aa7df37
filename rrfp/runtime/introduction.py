"""How ranks introduce themselves to each other, with their clocks compared, through the store."""

import json
from dataclasses import asdict, replace
from functools import partial

from torch.distributed import Store

from rrfp.runtime.decoding import instance
from rrfp.runtime.device.device import Device
from rrfp.runtime.rendezvous import Rendezvous, clock_offset, exchange_hosts
from rrfp.trace.records import RankInfo


def introduce(
    store: Store, prefix: str, own: RankInfo, num_ranks: int, device: Device, *, timeout_s: float
) -> RankInfo:
    """Publish who this rank is; all ranks call it. Returns `own` with its clock's offset to rank
    0's host, and with how far times may be off that its device tells. Raises PeerLostError naming a
    rank that does not appear by the one deadline, and as soon as a rank reports below the prefix
    that it has failed."""
    rank = own.rank
    rendezvous = Rendezvous(store, prefix, rank, timeout_s)
    hosts = exchange_hosts(store, prefix, rank, num_ranks, timeout_s=timeout_s)
    offset = clock_offset(store, prefix, rank, hosts, timeout_s=rendezvous.remaining_s)
    device.relate_clocks()
    error_ns = offset.error_ns + device.clock_error_ns
    own = replace(own, clock_offset_ns=offset.offset_ns, clock_error_ns=error_ns)
    rendezvous.publish(f"info/{rank}", json.dumps(asdict(own)))
    return own


def introduced(
    store: Store, prefix: str, rank: int, num_ranks: int, *, timeout_s: float
) -> list[RankInfo]:
    """Who all ranks are, by rank. Raises PeerLostError naming a rank that has not introduced itself
    in time, and RrfpError naming one whose introduction cannot be read."""
    rendezvous = Rendezvous(store, prefix, rank, timeout_s)
    rendezvous.awaited = range(num_ranks)
    return [
        rendezvous.wait_json(f"info/{peer}", peer, partial(_info, peer))
        for peer in range(num_ranks)
    ]


def _info(rank: int, told: object) -> RankInfo:
    info = instance(RankInfo, told)
    if info.rank != rank:
        raise ValueError(f"it belongs to rank {info.rank}")
    return info
