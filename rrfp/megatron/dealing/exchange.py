"""Hands the items of a step to the replicas that they are dealt to.

Only ranks that have data send anything, each to those with its own place in the other replicas.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rrfp.errors import RrfpError, UsageError
from rrfp.megatron.dealing.parcels import packed, unpacked
from rrfp.runtime.protocols import PeerLostError
from rrfp.schedule.dealing import Hands

_FAILED = -1

Items = dict[int, list[Any]]
"""By chunk: an item for each microbatch."""


def exchanged(given: Items, hands: Hands, replicas: Any, device: torch.device) -> Items:
    """The items that this replica is dealt, in the order of its hand; `given` are those that its
    data gave it. All ranks of `replicas` call this together.

    Raises UsageError for an item that cannot be sent; the others raise PeerLostError then.
    """
    own_replica, num_each = replicas.rank(), len(hands[0])
    dealt: Items = {chunk: [_MISSING] * num_each for chunk in given}
    failure: Exception | None = None
    parcels = [b""] * len(hands)
    try:
        for replica, hand in enumerate(hands):
            found = [
                (chunk, place, items[number % num_each])
                for chunk, items in given.items()
                for place, number in enumerate(hand)
                if number // num_each == own_replica
            ]
            if replica == own_replica:
                _put(found, dealt)
            elif found:
                parcels[replica] = packed(found)
    except Exception as error:
        failure = error
    for replica, parcel in enumerate(_swapped(parcels, failure, replicas, device)):
        try:
            _put(unpacked(parcel, device) if parcel else [], dealt)
        except ValueError as error:
            raise RrfpError(
                f"what replica {replica} dealt to this one cannot be read ({error}); see whether "
                "all ranks run the same rrfp"
            ) from error
    if any(item is _MISSING for items in dealt.values() for item in items):
        raise UsageError(_DIFFER)
    return dealt


_MISSING = object()
_DIFFER = (
    "this rank draws data for other model chunks than those with its place in other replicas do, "
    "and admit_across deals among them; give all of them data or none"
)


def _put(found: Sequence[tuple[int, int, Any]], dealt: Items) -> None:
    for chunk, place, item in found:
        if chunk not in dealt:
            raise UsageError(_DIFFER)
        dealt[chunk][place] = item


def _swapped(
    parcels: Sequence[bytes], failure: Exception | None, replicas: Any, device: torch.device
) -> list[bytes]:
    """What the other replicas have for this one; `parcels` are what it has for them."""
    sizes = [_FAILED] * len(parcels) if failure is not None else list(map(len, parcels))
    own = torch.tensor(sizes, dtype=torch.int64, device=device)
    of_all = [torch.empty_like(own) for _ in parcels]
    dist.all_gather(of_all, own, group=replicas)
    if failure is not None:
        raise failure
    coming = [int(each[replicas.rank()]) for each in of_all]
    if _FAILED in coming:
        raise PeerLostError(
            f"rank {dist.get_global_rank(replicas, coming.index(_FAILED))} could not send the "
            "microbatches that it deals away; its own error says why"
        )
    if not any(map(sum, of_all)):
        return []
    sent = torch.frombuffer(bytearray(b"".join(parcels)) or bytearray(1), dtype=torch.uint8)
    received = torch.empty(sum(coming), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, sent[: sum(sizes)].to(device), coming, sizes, group=replicas)
    return [each.numpy().tobytes() for each in torch.split(received.cpu(), coming)]
