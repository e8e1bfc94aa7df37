"""The collectives by which ranks prepare a step.

They broadcast decisions, gather weights, orders and measured times, and exchange items between
data-parallel replicas. `groups` are a step's process groups `pp`, `tp` and `cp`. `replicas` is the
group of the ranks with the same place in all replicas.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rrfp.errors import RrfpError, UsageError
from rrfp.planning.forecast import NUM_ROWS, Numbers
from rrfp.runtime.protocols import PeerLostError
from rrfp.schedule.admission import Assignment
from rrfp.schedule.shape import Shape
from rrfp.strict_json import integers, items, parsed, text

# Decisions of one rank.
#
# One rank decides, and the others take over its decision. So it does not matter if some ranks get
# no data, if a user's function returns other numbers elsewhere, or if another host has a different
# file of the same name.


_UNDECIDED = -1


def is_first_rank(groups: Any) -> bool:
    """True on the rank that decides for its replica: rank 0 of its `tp`, `cp` and `pp` groups."""
    return all(group.rank() == 0 for group in (groups.tp, groups.cp, groups.pp))


def broadcast_decision(
    decide: Callable[[], torch.Tensor],
    like: torch.Tensor,
    groups: Any,
    device: torch.device,
    task: str,
) -> torch.Tensor:
    """Call `decide` on the replica's first rank and return its result on all ranks of the replica,
    which call this together.

    The result, on the CPU, has the shape and type of `like`, and its first entry is not negative.
    If `decide` raises, so does the first rank, and the others raise PeerLostError: it could not do
    its `task`.
    """
    # First to the ranks of the first stage, then from each of them down its pipeline.
    sharing = (groups.cp, groups.tp) if groups.pp.rank() == 0 else ()
    path = [group for group in (*sharing, groups.pp) if group.size() > 1]
    failed = f"the first rank of this replica could not {task}; its own error says why"
    return _broadcast(decide if is_first_rank(groups) else None, like, path, device, failed)


def broadcast_order(
    decide: Callable[[], Sequence[int]], num_microbatches: int, groups: Any, device: torch.device
) -> list[int]:
    """Return, on all ranks of the replica, the admission order that `decide` returns on its first
    rank. Raises as `broadcast_decision` does."""
    order: list[int] = broadcast_decision(
        lambda: torch.tensor(decide()),
        torch.empty(num_microbatches, dtype=torch.int64),
        groups,
        device,
        "order the step's microbatches",
    ).tolist()
    return order


def broadcast_over_replicas(
    decide: Callable[[], torch.Tensor],
    like: torch.Tensor,
    replicas: Any,
    device: torch.device,
    task: str,
) -> torch.Tensor:
    """Call `decide` in the first replica and return its result in all replicas, as
    `broadcast_decision` does. The first ranks of all replicas call this together."""
    path = [replicas] if replicas.size() > 1 else []
    failed = f"the first rank of the first replica could not {task}; its own error says why"
    return _broadcast(decide if replicas.rank() == 0 else None, like, path, device, failed)


def _broadcast(
    decide: Callable[[], torch.Tensor] | None,
    like: torch.Tensor,
    path: Sequence[Any],
    device: torch.device,
    failed: str,
) -> torch.Tensor:
    """Broadcast the result of `decide`, which only the deciding rank has, over one group after the
    other, and return it on the CPU. If it fails, the deciding rank raises its error after the
    broadcasts, and the others raise PeerLostError with the text `failed`."""
    decision = torch.full_like(like, _UNDECIDED)
    failure: Exception | None = None
    if decide is not None:
        try:
            decision = decide()
        except Exception as error:
            failure = error
    decision = decision.to(device)
    for group in path:
        dist.broadcast(decision, dist.get_global_rank(group, 0), group=group)
    if failure is not None:
        raise failure
    if decision.flatten()[0] == _UNDECIDED:
        raise PeerLostError(failed)
    return decision.cpu()


# Numbers of all replicas, and of all ranks of a pipeline.


def gather_weights(
    weigh: Callable[[], Sequence[float]], num_microbatches: int, replicas: Any, device: torch.device
) -> torch.Tensor:
    """Return the weights of all items of a step, a row per replica. The first ranks of all
    replicas call this together, and `weigh` returns the weights of a replica's own items.

    A rank whose `weigh` fails, or returns a negative weight, raises that error after the
    collective; the others raise PeerLostError then.
    """
    own = torch.full((num_microbatches,), math.nan, dtype=torch.float64)
    failure: Exception | None = None
    try:
        weights = weigh()
        _check_weights(weights)
        own = torch.tensor(weights, dtype=torch.float64)
    except Exception as error:
        failure = error
    rows = [torch.empty_like(own, device=device) for _ in range(replicas.size())]
    dist.all_gather(rows, own.to(device), group=replicas)
    if failure is not None:
        raise failure
    for replica, row in enumerate(rows):
        if row.isnan().any():
            raise PeerLostError(
                f"the first rank of replica {replica} could not weigh the step's microbatches; its "
                "own error says why"
            )
    return torch.stack(rows).cpu()


def _check_weights(weights: Sequence[float]) -> None:
    """Raise UsageError for a negative weight."""
    lightest = min(weights)
    if lightest < 0:
        raise UsageError(
            f"the cost of a microbatch is {lightest:g}, and --admit-across adds costs up; give "
            "numbers from 0 on"
        )


def gather_orders(order: Sequence[int], replicas: Any) -> list[list[int]]:
    """Return the admission order of each replica. All ranks of `replicas` call this together."""
    own = torch.tensor(order)
    orders = [torch.empty_like(own) for _ in range(replicas.size())]
    dist.all_gather(orders, own, group=replicas)
    return [each.tolist() for each in orders]


class TableGather:
    """An asynchronous gather of the measured tables of a pipeline's ranks on its first rank."""

    def __init__(self, own: Numbers, shape: Shape, groups: Any, device: torch.device) -> None:
        """Start to send this rank's table (`MeasuredTasks.table`). All ranks of the pipeline call
        this together, and none waits."""
        self._shape = shape
        table = torch.from_numpy(own).to(device)
        pipeline = groups.pp
        self._tables = [table]
        self._work: Any = None
        if pipeline.size() > 1:
            if pipeline.rank() == 0:
                self._tables = [torch.empty_like(table) for _ in range(pipeline.size())]
            self._work = dist.gather(
                table,
                self._tables if pipeline.rank() == 0 else None,
                dst=dist.get_global_rank(pipeline, 0),
                group=pipeline,
                async_op=True,
            )

    def result(self) -> tuple[Numbers, tuple[int, ...]] | None:
        """Wait for the gather. Returns the table of all stages, `[row][stage][microbatch]`, and the
        bounds in bytes by pipeline rank (empty unless every rank has one). None on other ranks than
        the first, and if some rank has not measured the step."""
        if self._work is not None:
            self._work.wait()
        shape = self._shape
        if len(self._tables) != shape.num_ranks:
            return None
        rows = np.zeros((NUM_ROWS, shape.num_stages, shape.num_microbatches))
        budgets = []
        for rank, table in enumerate(self._tables):
            numbers = table.cpu().numpy()
            rank_rows = numbers[:-1].reshape(NUM_ROWS, shape.num_chunks, shape.num_microbatches)
            if not rank_rows[0].all():
                return None
            rows[:, list(shape.stages_of(rank))] = rank_rows
            budgets.append(int(numbers[-1]))
        return rows, tuple(budgets) if all(budgets) else ()


# Items of a data iterator as bytes: their structure as JSON, then the numbers of their tensors.
#
# Decoding executes nothing. Tensors arrive contiguous and without the rest of their storage: with
# pickle, a row of a table would take the whole table along.


_LENGTH_BYTES = 8


def encode_items(value: object) -> bytes:
    """Encode a value as bytes: its structure as JSON, then the numbers of its tensors. Raises
    UsageError for a value with anything but tensors, numbers, text and bytes in dicts, lists and
    tuples."""
    tensors: list[torch.Tensor] = []
    tree = _tree_of(value, tensors)
    forms = [[str(each.dtype), [*each.shape], each.is_cuda] for each in tensors]
    header = json.dumps([tree, forms]).encode()
    numbers = b"".join(map(_bytes_of, tensors))
    return len(header).to_bytes(_LENGTH_BYTES, "big") + header + numbers


def decode_items(payload: bytes, device: torch.device) -> Any:
    """Decode a value. Its tensors are on the CPU or, if they were on a GPU, on `device`. Raises
    ValueError for bytes that `encode_items` did not make."""
    end = _LENGTH_BYTES + int.from_bytes(payload[:_LENGTH_BYTES], "big")
    tree, forms = items(parsed(payload[_LENGTH_BYTES:end]), 2)
    tensors = []
    for form in items(forms):
        name, shape, was_on_gpu = items(form, 3)
        dtype = getattr(torch, text(name).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} is not a type of numbers")
        start, end = end, end + math.prod(integers(shape)) * dtype.itemsize
        numbers = bytearray(payload[start:end])
        if len(numbers) != end - start:
            raise ValueError("a tensor is cut short")
        flat = torch.frombuffer(numbers, dtype=torch.uint8) if numbers else torch.empty(0)
        tensor = (flat.view(dtype) if numbers else flat.to(dtype)).reshape(integers(shape))
        tensors.append(tensor.to(device) if was_on_gpu else tensor)
    return _value_of(tree, iter(tensors))


def _tree_of(value: object, tensors: list[torch.Tensor]) -> object:
    """Convert a value to JSON, with tagged lists for types that JSON lacks. Its tensors are
    appended to `tensors` in the order in which they occur. Raises UsageError for any other type."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        tensors.append(value.detach())
        return ["tensor"]
    if isinstance(value, dict) and type(value) is dict:
        pairs = [[_tree_of(key, tensors), _tree_of(each, tensors)] for key, each in value.items()]
        return ["dict", pairs]
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return [type(value).__name__, [_tree_of(each, tensors) for each in value]]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise UsageError(
        f"a {type(value).__name__} in an item of the data iterator cannot be sent to another "
        "replica, as admit_across would; give tensors, numbers and text, in dicts, lists or "
        "tuples, or leave admit_across out"
    )


def _value_of(tree: object, tensors: Iterator[torch.Tensor]) -> Any:
    """Convert the JSON of `_tree_of` back; tensors are taken from the iterator. Raises ValueError
    for a list of another form, and for more tensors than the iterator has."""
    if not isinstance(tree, list):
        return tree
    match tree:
        case ["tensor"] if (tensor := next(tensors, None)) is not None:
            return tensor
        case ["dict", pairs]:
            entries = [items(pair, 2) for pair in items(pairs)]
            return {_value_of(key, tensors): _value_of(each, tensors) for key, each in entries}
        case ["list", members]:
            return [_value_of(each, tensors) for each in items(members)]
        case ["tuple", members]:
            return tuple(_value_of(each, tensors) for each in items(members))
        case ["bytes", digits]:
            return bytes.fromhex(text(digits))
    raise ValueError(f"{tree!r:.40} is not of this form")


def _bytes_of(tensor: torch.Tensor) -> bytes:
    """The numbers of a tensor on any device, as bytes."""
    flat = tensor.cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


# Items that change replicas. Only ranks that have data send any, to the ranks with their own place
# in the other replicas.


_FAILED = -1

Items = dict[int, list[Any]]
"""By chunk: an item for each microbatch."""

_MISSING = object()
_DIFFER = (
    "this rank draws data for other model chunks than those with its place in other replicas do, "
    "and admit_across exchanges microbatches among them; give all of them data or none"
)


def exchange_items(
    draw: Callable[[], Items], assignment: Assignment, replicas: Any, device: torch.device
) -> Items:
    """Return the items that are assigned to this replica, in the order of its assignment; `draw`
    returns the items of its own data. All ranks of `replicas` call this together.

    If `draw` raises, so does this rank after the collective, and the others raise PeerLostError.
    The same holds for UsageError about an item that cannot be sent. Raises UsageError if the ranks
    draw data for different chunks, and RrfpError for bytes that cannot be decoded.
    """
    own_replica, num_each = replicas.rank(), len(assignment[0])
    assigned: Items = {}
    failure: Exception | None = None
    payloads = [b""] * len(assignment)
    try:
        given = draw()
        assigned = {chunk: [_MISSING] * num_each for chunk in given}
        for replica, numbers in enumerate(assignment):
            found = [
                (chunk, place, items[number % num_each])
                for chunk, items in given.items()
                for place, number in enumerate(numbers)
                if number // num_each == own_replica
            ]
            if replica == own_replica:
                _put(found, assigned)
            elif found:
                payloads[replica] = encode_items(found)
    except Exception as error:
        failure = error
    for replica, payload in enumerate(_all_to_all(payloads, failure, replicas, device)):
        try:
            _put(decode_items(payload, device) if payload else [], assigned)
        except ValueError as error:
            raise RrfpError(
                f"the items that replica {replica} sent to this one cannot be read ({error}); see "
                "whether all ranks run the same rrfp"
            ) from error
    if any(item is _MISSING for items in assigned.values() for item in items):
        raise UsageError(_DIFFER)
    return assigned


def _put(found: Sequence[tuple[int, int, Any]], assigned: Items) -> None:
    """Store items in `assigned`, at their chunk and their place in it. Raises UsageError for a
    chunk that it lacks, as this rank draws no data for it."""
    for chunk, place, item in found:
        if chunk not in assigned:
            raise UsageError(_DIFFER)
        assigned[chunk][place] = item


def _all_to_all(
    payloads: Sequence[bytes], failure: Exception | None, replicas: Any, device: torch.device
) -> list[bytes]:
    """Send a payload to each replica and return those from all replicas; an empty list if no
    replica sends anything. A rank with a `failure` raises it after all have learned of it, and the
    others raise PeerLostError."""
    sizes = [_FAILED] * len(payloads) if failure is not None else list(map(len, payloads))
    own = torch.tensor(sizes, dtype=torch.int64, device=device)
    all_sizes = [torch.empty_like(own) for _ in payloads]
    dist.all_gather(all_sizes, own, group=replicas)
    if failure is not None:
        raise failure
    incoming = [int(each[replicas.rank()]) for each in all_sizes]
    if _FAILED in incoming:
        raise PeerLostError(
            f"rank {dist.get_global_rank(replicas, incoming.index(_FAILED))} could not send the "
            "microbatches that are assigned to other replicas; its own error says why"
        )
    if not any(map(sum, all_sizes)):
        return []
    sent = torch.frombuffer(bytearray(b"".join(payloads)) or bytearray(1), dtype=torch.uint8)
    received = torch.empty(sum(incoming), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, sent[: sum(sizes)].to(device), incoming, sizes, group=replicas)
    return [each.numpy().tobytes() for each in torch.split(received.cpu(), incoming)]
