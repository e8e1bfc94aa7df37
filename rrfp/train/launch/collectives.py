"""Exchanges JSON and named tensors between ranks through collectives, never pickled objects.

torch's object collectives pickle their data, so anybody who can write to a connection could make a
rank run arbitrary code. Ranks of rrfp disable them (`no_object_collectives`).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from rrfp.errors import RrfpError
from rrfp.strict_json import integer, integers, items, parsed, text

T = TypeVar("T")


def broadcast_json(value: object, decode: Callable[[object], T]) -> T:
    """Broadcast rank 0's value as JSON and return `decode` of it on every rank; the values of other
    ranks are ignored. Raise RrfpError if it cannot be decoded (`decode` raises ValueError)."""
    is_source = dist.get_rank() == 0
    data = json.dumps(value).encode() if is_source else b""
    size = torch.tensor([len(data)])
    dist.broadcast(size, 0)
    buffer = _as_tensor(data) if is_source else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(buffer, 0)
    return _read(buffer, 0, decode)


def all_gather_json(value: object, decode: Callable[[object], T]) -> list[T]:
    """Gather the values of all ranks as JSON and return `decode` of each, by rank. Raise what
    `broadcast_json` does."""
    own = _as_tensor(json.dumps(value).encode())
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([own.numel()]))
    most = max(int(size) for size in sizes)
    buffers = [torch.empty(most, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(buffers, torch.nn.functional.pad(own, (0, most - own.numel())))
    return [
        _read(buffer[: int(size)], rank, decode)
        for rank, (buffer, size) in enumerate(zip(buffers, sizes, strict=True))
    ]


def gather_tensors(own: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Gather the fp32 CPU tensors of all ranks on rank 0, by rank and name; return [] on the
    others. Every rank calls this."""
    shapes = all_gather_json(
        [[name, list(tensor.shape)] for name, tensor in own.items()], _decode_shapes
    )
    flat = torch.cat([torch.empty(0), *(tensor.reshape(-1) for tensor in own.values())])
    if dist.get_rank() > 0:
        dist.send(flat, 0)
        return []
    found = []
    for rank, of_rank in enumerate(shapes):
        sizes = [torch.Size(shape).numel() for shape in of_rank.values()]
        if rank > 0:
            flat = torch.empty(sum(sizes))
            dist.recv(flat, rank)
        found.append(
            {
                name: part.reshape(shape)
                for (name, shape), part in zip(
                    of_rank.items(), torch.split(flat, sizes), strict=True
                )
            }
        )
    return found


@contextmanager
def no_object_collectives() -> Iterator[None]:
    """Make torch's collectives raise RrfpError in the block instead of unpickling.
    `all_gather_object`, which Megatron's optimizer uses while it is built, exchanges plain values
    of all ranks as JSON instead, and raises RrfpError for a group of some ranks only."""
    # torch declares neither name as assignable.
    module: Any = dist.distributed_c10d
    originals = dist.all_gather_object, module._unpickler

    def all_gather_plain(object_list: list[Any], obj: Any, group: Any = None) -> None:
        if group is not None and dist.get_world_size(group) != dist.get_world_size():
            _refuse()
        object_list[:] = all_gather_json(_plain(obj), _from_plain)

    dist.all_gather_object, module._unpickler = all_gather_plain, _refuse
    try:
        yield
    finally:
        dist.all_gather_object, module._unpickler = originals


def _refuse(*_: object) -> NoReturn:
    """Raise RrfpError, in place of unpickling an object."""
    raise RrfpError(
        "a collective of torch tried to unpickle an object, which could run any command; exchange "
        "tensors or JSON (rrfp.train.launch.collectives)"
    )


def _plain(value: object) -> object:
    """Convert plain values to JSON that distinguishes tuples from lists. Raise RrfpError for other
    values."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return {type(value).__name__: [_plain(item) for item in value]}
    _refuse()


def _from_plain(value: object) -> object:
    """Convert the JSON of `_plain` back to plain values, tuples and lists."""
    if not isinstance(value, dict):
        return value
    ((kind, parts),) = value.items()
    values = [_from_plain(part) for part in items(parts)]
    return tuple(values) if kind == "tuple" else values


def _decode_shapes(value: object) -> dict[str, tuple[int, ...]]:
    """Read the shapes of a rank's tensors by name. Raise ValueError for anything else."""
    shapes = {}
    for entry in items(value):
        name, shape = items(entry, 2)
        shapes[text(name)] = integers(shape)
        if any(integer(size) < 0 for size in items(shape)):
            raise ValueError(f"{shape} is not a shape")
    return shapes


def _as_tensor(data: bytes) -> torch.Tensor:
    """Copy bytes into a tensor of uint8."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _read(buffer: torch.Tensor, rank: int, decode: Callable[[object], T]) -> T:
    """Decode a buffer that a rank has sent. Raise RrfpError, naming the rank, if `decode` raises
    ValueError."""
    try:
        return decode(parsed(buffer.numpy().tobytes()))
    except ValueError as error:
        raise RrfpError(
            f"what rank {rank} sent to the others cannot be read ({error}); see whether every rank "
            "runs the same rrfp"
        ) from None
