"""Items of a data iterator as bytes and back: their structure as JSON, then their tensors' numbers.

What is read back is never executed. Tensors arrive contiguous, and take nothing else of their
storage along: a row of a table would take the whole table.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rrfp.errors import RrfpError, UsageError
from rrfp.runtime.protocols import PeerLostError
from rrfp.schedule.balance import Hands
from rrfp.strict_json import integers, items, parsed, text

# What the first rank of a replica decides about a real step's data, on all of its ranks: the
# admission order, for one.
#
# The first rank decides, and the others take over what it says. So it does not matter if some ranks
# get no data, if a user's function returns other numbers elsewhere, or if another host has a
# different file of the same name.


_UNDECIDED = -1


def agreed_order(
    decide: Callable[[], Sequence[int]], num_microbatches: int, groups: Any, device: torch.device
) -> list[int]:
    """The admission order that `decide` returns on the replica's first rank, on all of its ranks.

    Raises as `told_by_first` does.
    """
    told = told_by_first(
        lambda: torch.tensor(decide()),
        torch.empty(num_microbatches, dtype=torch.int64),
        groups,
        device,
        "order the step's microbatches",
    )
    order: list[int] = told.tolist()
    return order


def told_by_first(
    decide: Callable[[], torch.Tensor],
    like: torch.Tensor,
    groups: Any,
    device: torch.device,
    task: str,
) -> torch.Tensor:
    """What `decide` returns on the replica's first rank, on all of its ranks: a tensor of the shape
    and type of `like`, whose first entry is not negative.

    `groups` are the step's process groups; all of their ranks call this together. If `decide`
    raises, so does the first rank, and the others raise PeerLostError: it could not do its `task`.
    """
    told = torch.full_like(like, _UNDECIDED)
    failure: Exception | None = None
    if all(group.rank() == 0 for group in (groups.tp, groups.cp, groups.pp)):
        try:
            told = decide()
        except Exception as error:
            failure = error
    told = told.to(device)
    # First to the ranks of the first stage, then from each of them down its pipeline.
    sharing = (groups.cp, groups.tp) if groups.pp.rank() == 0 else ()
    for group in (*sharing, groups.pp):
        if group.size() > 1:
            dist.broadcast(told, dist.get_global_rank(group, 0), group=group)
    if failure is not None:
        raise failure
    if told.flatten()[0] == _UNDECIDED:
        raise PeerLostError(
            f"the first rank of this replica could not {task}; its own error says why"
        )
    return told.cpu()


_LENGTH_BYTES = 8


def packed(value: object) -> bytes:
    """Raises UsageError for a value with anything but tensors, numbers and text in dicts, lists and
    tuples."""
    tensors: list[torch.Tensor] = []
    tree = _told(value, tensors)
    forms = [[str(each.dtype), [*each.shape], each.is_cuda] for each in tensors]
    header = json.dumps([tree, forms]).encode()
    numbers = b"".join(map(_numbers, tensors))
    return len(header).to_bytes(_LENGTH_BYTES, "big") + header + numbers


def unpacked(parcel: bytes, device: torch.device) -> Any:
    """The value, its tensors on the CPU or, where they were on a GPU, on `device`. Raises
    ValueError for bytes that `packed` did not make."""
    end = _LENGTH_BYTES + int.from_bytes(parcel[:_LENGTH_BYTES], "big")
    tree, forms = items(parsed(parcel[_LENGTH_BYTES:end]), 2)
    tensors = []
    for form in items(forms):
        name, shape, was_on_gpu = items(form, 3)
        dtype = getattr(torch, text(name).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} is not a type of numbers")
        start, end = end, end + math.prod(integers(shape)) * dtype.itemsize
        numbers = bytearray(parcel[start:end])
        if len(numbers) != end - start:
            raise ValueError("a tensor is cut short")
        flat = torch.frombuffer(numbers, dtype=torch.uint8) if numbers else torch.empty(0)
        tensor = (flat.view(dtype) if numbers else flat.to(dtype)).reshape(integers(shape))
        tensors.append(tensor.to(device) if was_on_gpu else tensor)
    return _value(tree, iter(tensors))


def _told(value: object, tensors: list[torch.Tensor]) -> object:
    """The value as JSON, with a letter for what JSON has no word for; tensors go into the list."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        tensors.append(value.detach())
        return ["tensor"]
    if isinstance(value, dict) and type(value) is dict:
        pairs = [[_told(key, tensors), _told(each, tensors)] for key, each in value.items()]
        return ["dict", pairs]
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return [type(value).__name__, [_told(each, tensors) for each in value]]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise UsageError(
        f"a {type(value).__name__} in an item of the data iterator cannot be sent to another "
        "replica, as admit_across would; give tensors, numbers and text, in dicts, lists or "
        "tuples, or leave admit_across out"
    )


def _value(tree: object, tensors: Iterator[torch.Tensor]) -> Any:
    if not isinstance(tree, list):
        return tree
    match tree:
        case ["tensor"] if (tensor := next(tensors, None)) is not None:
            return tensor
        case ["dict", pairs]:
            told = [items(pair, 2) for pair in items(pairs)]
            return {_value(key, tensors): _value(each, tensors) for key, each in told}
        case ["list", members]:
            return [_value(each, tensors) for each in items(members)]
        case ["tuple", members]:
            return tuple(_value(each, tensors) for each in items(members))
        case ["bytes", digits]:
            return bytes.fromhex(text(digits))
    raise ValueError(f"{tree!r:.40} is not of this form")


def _numbers(tensor: torch.Tensor) -> bytes:
    flat = tensor.cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


# Hands the items of a step to the replicas that they are dealt to.
#
# Only ranks that have data send anything, each to those with its own place in the other replicas.


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
