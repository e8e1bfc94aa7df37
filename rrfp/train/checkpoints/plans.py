"""Exchanges the plans of a checkpoint between ranks as JSON.

`dist_checkpointing` assigns writes and reads to ranks through torch's object collectives. These
pickle, so anybody who can write to a connection could make a rank run arbitrary code. Ranks of rrfp
disable them (`rrfp.train.launch.collectives`). While a checkpoint is planned they exchange JSON
instead: plain values, and the data classes of plans by their names.
"""

import dataclasses
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import mapping
from torch.distributed.checkpoint import filesystem, metadata, planner, storage
from torch.distributed.checkpoint.api import CheckpointException

from rrfp.errors import RrfpError, first_line
from rrfp.strict_json import integer, items, text
from rrfp.train.launch.collectives import all_gather_json, broadcast_json

_COORDINATOR = 0
"""The rank that makes the global plan."""

_CLASSES: dict[str, Any] = {
    each.__name__: each
    for each in (
        filesystem._StorageInfo,
        filesystem._StoragePrefix,
        mapping.ShardedObject,
        mapping.ShardedTensor,
        metadata.ChunkStorageMetadata,
        metadata.MetadataIndex,
        metadata.TensorProperties,
        planner.BytesIOWriteData,
        planner.LoadPlan,
        planner.ReadItem,
        planner.SavePlan,
        planner.TensorWriteData,
        planner.WriteItem,
        storage.WriteResult,
    )
}
"""The data classes of plans, by name."""

_CHOICES: dict[str, Any] = {
    each.__name__: each for each in (planner.LoadItemType, planner.WriteItemType)
}

_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
"""Types of torch's constants, which are encoded by name."""


@contextmanager
def exchanging_plans() -> Iterator[None]:
    """Replace torch's object collectives in the block by functions that exchange plans as JSON,
    among all ranks and without pickling."""
    # torch declares none of these names as assignable.
    module: Any = dist
    originals = {name: getattr(dist, name) for name in _COLLECTIVES}
    for name, collective in _COLLECTIVES.items():
        setattr(module, name, collective)
    try:
        yield
    finally:
        for name, collective in originals.items():
            setattr(module, name, collective)


def _all_gather(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """Gather the plans of all ranks as JSON, in place of `all_gather_object`. Raise RrfpError for a
    group of some ranks only."""
    _check(group)
    object_list[:] = all_gather_json(encode_plan(obj), decode_plan)


def _gather(
    obj: Any, object_gather_list: list[Any] | None = None, dst: int = 0, group: Any = None, **_: Any
) -> None:
    """Gather the plans of all ranks as JSON, in place of `gather_object`: every rank receives them,
    and one that gives a list keeps them. Raise RrfpError for a group of some ranks or a `dst` other
    than 0."""
    _check(group, dst)
    found = all_gather_json(encode_plan(obj), decode_plan)
    if object_gather_list is not None:
        object_gather_list[:] = found


def _scatter(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int = 0,
    group: Any = None,
    **_: Any,
) -> None:
    """Broadcast rank 0's list of plans as JSON and keep this rank's item, in place of
    `scatter_object_list`. Raise RrfpError for a group of some ranks or a `src` other than 0."""
    _check(group, src)
    values = scatter_object_input_list or []
    own = broadcast_json([encode_plan(each) for each in values], items)[dist.get_rank()]
    scatter_object_output_list[0] = decode_plan(own)


def _broadcast(object_list: list[Any], src: int = 0, group: Any = None, **_: Any) -> None:
    """Broadcast rank 0's list of plans as JSON into every rank's list, in place of
    `broadcast_object_list`. Raise RrfpError for a group of some ranks or a `src` other than 0."""
    _check(group, src)
    values = [encode_plan(each) for each in object_list] if dist.get_rank() == src else []
    object_list[:] = [decode_plan(each) for each in broadcast_json(values, items)]


_COLLECTIVES = {
    "all_gather_object": _all_gather,
    "gather_object": _gather,
    "scatter_object_list": _scatter,
    "broadcast_object_list": _broadcast,
}


def _check(group: Any, rank: int | None = _COORDINATOR) -> None:
    """Raise RrfpError unless the group has all ranks and `rank` is the coordinator, rank 0, or
    None."""
    is_whole = group is None or dist.get_world_size(group) == dist.get_world_size()
    if not is_whole or rank not in (None, _COORDINATOR):
        raise RrfpError(
            "a checkpoint is planned among some ranks only, which this version cannot; report this "
            "as a bug"
        )


def encode_plan(value: Any) -> object:
    """Convert a value of a plan to JSON. An exception keeps its type's name and first line only (a
    CheckpointException those of each rank's), and stacks are dropped. Raise RrfpError for a type
    that plans do not have."""
    is_plain = isinstance(value, bool | int | float | str) and not isinstance(value, Enum)
    if value is None or is_plain:
        return value
    name = type(value).__name__
    if _CLASSES.get(name) is type(value):
        parts = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return {name: [[key, encode_plan(part)] for key, part in parts.items()]}
    if _CHOICES.get(name) is type(value):
        return {name: value.name}
    if isinstance(value, _OF_TORCH):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, dict):
        return {"dict": [[encode_plan(key), encode_plan(part)] for key, part in value.items()]}
    if isinstance(value, torch.Size):
        return {"Size": list(value)}
    if isinstance(value, traceback.StackSummary):
        return {"stack": None}  # it is in the log of the rank that failed
    if isinstance(value, tuple | list):
        return {
            "tuple" if isinstance(value, tuple) else "list": [encode_plan(part) for part in value]
        }
    if isinstance(value, CheckpointException):
        failures = value.failures.items()
        return {"failures": [[rank, _describe(error)] for rank, (error, _) in failures]}
    if isinstance(value, BaseException):
        return {"error": _describe(value)}
    raise RrfpError(
        f"the plan of a checkpoint holds a {type(value).__module__}.{name}, which ranks do not "
        "exchange; report this as a bug"
    )


def decode_plan(value: object) -> Any:
    """Convert the result of `encode_plan` back. Exceptions become RuntimeErrors with their text; a
    CheckpointException becomes one with a RuntimeError per rank. Raise ValueError for anything
    else."""
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("it has a list without its kind")
        return value
    if len(value) != 1:
        raise ValueError("it has a value of several kinds")
    ((kind, content),) = value.items()
    if kind in _CLASSES:
        parts = {
            str(key): decode_plan(part) for key, part in (items(each, 2) for each in items(content))
        }
        return _construct(_CLASSES[kind], parts)
    if kind in _CHOICES:
        members = _CHOICES[kind].__members__
        if content not in members:
            raise ValueError("it has a choice that does not exist")
        return members[content]
    if kind == "torch":
        found = getattr(torch, content, None) if isinstance(content, str) else None
        if not isinstance(found, _OF_TORCH):
            raise ValueError("it has a constant that torch does not have")
        return found
    if kind == "dict":
        return {
            decode_plan(key): decode_plan(part)
            for key, part in (items(e, 2) for e in items(content))
        }
    if kind == "Size":
        return torch.Size(_decode_integers(content))
    if kind == "stack":
        return traceback.StackSummary()
    if kind == "failures":
        pairs = (items(each, 2) for each in items(content))
        return _checkpoint_exception({integer(rank): text(reason) for rank, reason in pairs})
    if kind == "error":
        return RuntimeError(text(content))
    if kind not in ("tuple", "list"):
        raise ValueError("it has a value of an unknown kind")
    values = [decode_plan(part) for part in items(content)]
    return tuple(values) if kind == "tuple" else values


def reason_of(error: BaseException) -> str:
    """Describe why saving or loading failed. For torch's CheckpointException, which has the
    failures of several ranks, describe that of the lowest rank."""
    if not isinstance(error, CheckpointException):
        return _describe(error)
    rank, (of_rank, _) = min(error.failures.items())
    # The error of another rank arrived as text.
    reason = str(of_rank) if type(of_rank) is RuntimeError else _describe(of_rank)
    return f"on rank {rank}: {reason}"


def _describe(error: BaseException) -> str:
    """Format an error as the name of its type and its first line."""
    return f"{type(error).__name__}: {first_line(str(error))}"


def _checkpoint_exception(failures: dict[int, str]) -> CheckpointException:
    """Make torch's exception with the failures of ranks, given as text. Raise ValueError without
    any."""
    if not failures:
        raise ValueError("it has a failure of no rank")
    stack = traceback.StackSummary()
    return CheckpointException(
        "", {rank: (RuntimeError(reason), stack) for rank, reason in failures.items()}
    )


def _construct(kind: Any, parts: dict[str, Any]) -> Any:
    """Construct a data class. Raise ValueError for parts that it does not accept."""
    try:
        return kind(**parts)
    except (TypeError, ValueError, AttributeError, mapping.CheckpointingException) as error:
        raise ValueError(f"its {kind.__name__} is wrong") from error


def _decode_integers(value: object) -> list[int]:
    """Read a list of integers. Raise ValueError for anything else."""
    found = items(value)
    if not all(type(each) is int for each in found):
        raise ValueError("it has a size that is not of integers")
    return found  # type: ignore[return-value]
