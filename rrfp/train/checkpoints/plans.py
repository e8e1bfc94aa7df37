"""Lets ranks exchange the plans of a checkpoint as JSON.

`dist_checkpointing` plans who writes and reads what by torch's object collectives. These pickle,
and whoever can write to a connection could make a rank that unpickles run any code, so our ranks
disable them (`rrfp.train.launch.collectives`). While a checkpoint is planned they carry JSON
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
"""The rank that plans for all."""

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
"""Types of torch's constants, each of which is written as its name."""


@contextmanager
def plans_exchanged() -> Iterator[None]:
    """Let torch's object collectives carry the plans of a checkpoint among all ranks."""
    # torch declares none of these names as assignable.
    module: Any = dist
    own = {name: getattr(dist, name) for name in _COLLECTIVES}
    for name, collective in _COLLECTIVES.items():
        setattr(module, name, collective)
    try:
        yield
    finally:
        for name, collective in own.items():
            setattr(module, name, collective)


def _all_gather(object_list: list[Any], obj: Any, group: Any = None) -> None:
    _check(group)
    object_list[:] = all_gather_json(encoded(obj), decoded)


def _gather(
    obj: Any, object_gather_list: list[Any] | None = None, dst: int = 0, group: Any = None, **_: Any
) -> None:
    _check(group, dst)
    found = all_gather_json(encoded(obj), decoded)
    if object_gather_list is not None:
        object_gather_list[:] = found


def _scatter(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int = 0,
    group: Any = None,
    **_: Any,
) -> None:
    _check(group, src)
    values = scatter_object_input_list or []
    mine = broadcast_json([encoded(each) for each in values], items)[dist.get_rank()]
    scatter_object_output_list[0] = decoded(mine)


def _broadcast(object_list: list[Any], src: int = 0, group: Any = None, **_: Any) -> None:
    _check(group, src)
    values = [encoded(each) for each in object_list] if dist.get_rank() == src else []
    object_list[:] = [decoded(each) for each in broadcast_json(values, items)]


_COLLECTIVES = {
    "all_gather_object": _all_gather,
    "gather_object": _gather,
    "scatter_object_list": _scatter,
    "broadcast_object_list": _broadcast,
}


def _check(group: Any, rank: int | None = _COORDINATOR) -> None:
    is_whole = group is None or dist.get_world_size(group) == dist.get_world_size()
    if not is_whole or rank not in (None, _COORDINATOR):
        raise RrfpError(
            "a checkpoint is planned among some ranks only, which this version cannot; report this "
            "as a bug"
        )


def encoded(value: Any) -> object:
    """A value of a plan as JSON. Raises RrfpError for what plans do not hold."""
    is_plain = isinstance(value, bool | int | float | str) and not isinstance(value, Enum)
    if value is None or is_plain:
        return value
    name = type(value).__name__
    if _CLASSES.get(name) is type(value):
        parts = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return {name: [[key, encoded(part)] for key, part in parts.items()]}
    if _CHOICES.get(name) is type(value):
        return {name: value.name}
    if isinstance(value, _OF_TORCH):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, dict):
        return {"dict": [[encoded(key), encoded(part)] for key, part in value.items()]}
    if isinstance(value, torch.Size):
        return {"Size": list(value)}
    if isinstance(value, traceback.StackSummary):
        return {"stack": None}  # it is in the log of the rank that failed
    if isinstance(value, tuple | list):
        return {"tuple" if isinstance(value, tuple) else "list": [encoded(part) for part in value]}
    if isinstance(value, CheckpointException):
        failures = value.failures.items()
        return {"failures": [[rank, _told(error)] for rank, (error, _) in failures]}
    if isinstance(value, BaseException):
        return {"error": _told(value)}
    raise RrfpError(
        f"the plan of a checkpoint holds a {type(value).__module__}.{name}, which ranks do not "
        "exchange; report this as a bug"
    )


def decoded(value: object) -> Any:
    """What was encoded. Raises ValueError for anything else."""
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("it has a list without its kind")
        return value
    if len(value) != 1:
        raise ValueError("it has a value of several kinds")
    ((kind, content),) = value.items()
    if kind in _CLASSES:
        parts = {
            str(key): decoded(part) for key, part in (items(each, 2) for each in items(content))
        }
        return _made(_CLASSES[kind], parts)
    if kind in _CHOICES:
        return _named(_CHOICES[kind].__members__, content)
    if kind == "torch":
        found = getattr(torch, content, None) if isinstance(content, str) else None
        if not isinstance(found, _OF_TORCH):
            raise ValueError("it has a constant that torch does not have")
        return found
    if kind == "dict":
        return {decoded(key): decoded(part) for key, part in (items(e, 2) for e in items(content))}
    if kind == "Size":
        return torch.Size(_integers(content))
    if kind == "stack":
        return traceback.StackSummary()
    if kind == "failures":
        pairs = (items(each, 2) for each in items(content))
        return _of_ranks({integer(rank): text(told) for rank, told in pairs})
    if kind == "error":
        return RuntimeError(text(content))
    if kind not in ("tuple", "list"):
        raise ValueError("it has a value of an unknown kind")
    made = [decoded(part) for part in items(content)]
    return tuple(made) if kind == "tuple" else made


def reason_of(error: BaseException) -> str:
    """Why saving or loading failed; torch gathers the failures of all ranks in an exception of its
    own."""
    if not isinstance(error, CheckpointException):
        return _told(error)
    rank, (of_rank, _) = min(error.failures.items())
    # That of another rank came as text.
    told = str(of_rank) if type(of_rank) is RuntimeError else _told(of_rank)
    return f"on rank {rank}: {told}"


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(str(error))}"


def _of_ranks(failures: dict[int, str]) -> CheckpointException:
    if not failures:
        raise ValueError("it has a failure of no rank")
    nowhere = traceback.StackSummary()
    return CheckpointException(
        "", {rank: (RuntimeError(told), nowhere) for rank, told in failures.items()}
    )


def _made(of: Any, parts: dict[str, Any]) -> Any:
    try:
        return of(**parts)
    except (TypeError, ValueError, AttributeError, mapping.CheckpointingException) as error:
        raise ValueError(f"its {of.__name__} is wrong") from error


def _named(members: Any, name: object) -> Any:
    if name not in members:
        raise ValueError("it has a choice that does not exist")
    return members[name]


def _integers(value: object) -> list[int]:
    found = items(value)
    if not all(type(each) is int for each in found):
        raise ValueError("it has a size that is not of integers")
    return found  # type: ignore[return-value]
