"""Patches Megatron-Core's `dist_checkpointing` for the ranks of `rrfp train`.

- On the CPU: its modules use CUDA for scalar tensors and for synchronization. They get the copy of
  torch's namespace that `rrfp.megatron.cpu.patches` makes; without that patch, torch itself.
- Megatron's writer forks a process per file, so that training continues, and another process for
  the results. A rank has threads and sockets, which a fork would copy, and the forked processes
  outlive a killed rank. So the rank itself writes, in a thread if training is to continue.
  Megatron-Core 0.19 also writes in threads.
- Staging copies tensors to the CPU. If they are on the CPU already, Megatron makes no copy, and
  training would change the data while it is written.
- Rank 0 writes the last files while the other ranks wait for it in a collective. They would wait
  indefinitely if it failed, and count as stalled if it took long. So these writes are deferred.
- The digest of every file is computed as it is written, so that the file need not be read again.

Modules and functions that a version of Megatron-Core lacks are skipped.
"""

import hashlib
import importlib
import io
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from megatron.core import utils as _core_utils

_PACKAGE = "megatron.core.dist_checkpointing"

_MODULES = (
    "exchange_utils",
    "strategies.async_utils",
    "strategies.filesystem_async",
    "strategies.fully_parallel",
    "strategies.state_dict_saver",
    "tensor_aware_state_dict",
)
"""Modules that use ``torch.cuda`` or ``device="cuda"``."""

_RESULTS_QUEUES = ("_get_write_results_queue", "get_write_results_queue")
"""The functions that return a writer's queue of results, under the names of several versions."""

Bucket = tuple[Any, Any, tuple[Any, list[tuple[Any, torch.Tensor]]]]
"""The content of a file: its path, its name, and its objects and tensors."""


def prepare_checkpoints() -> None:
    """Patch Megatron's `dist_checkpointing` so that the rank itself writes files, without forking,
    and tensors are copied before they are written. Its modules get the CPU's copy of torch's
    namespace, if `prepare_cpu` has run; on the CPU, call that first. Also disables multi-storage
    clients. Idempotent."""
    cpu_torch: ModuleType = _core_utils.torch
    for name in _MODULES:
        module = _module(name)
        if module is not None:
            module.torch = cpu_torch
    # With this package for remote storage, Megatron would read and write by other functions.
    storage = _imported("megatron.core.msc_utils")
    if storage is not None:
        storage.MultiStorageClientFeature.disable()
    files = _module("strategies.filesystem_async")
    if files is None or not hasattr(files, "FileSystemWriterAsync"):
        return
    for name in _RESULTS_QUEUES:
        if hasattr(files, name):
            setattr(files, name, lambda *_: queue.Queue())
    # Without psutil it raises, and Megatron only logs its result.
    files._process_memory = lambda: 0
    files.FileSystemWriterAsync.get_save_function_and_args = _save_function_and_args


@contextmanager
def deferred_writes() -> Iterator[list[Callable[[], None]]]:
    """Defer the files that Megatron writes while ranks finalize a checkpoint in the block. Gives a
    list that gets this rank's writes; call them once no rank waits for this one. They
    raise OSError if a file cannot be written."""
    deferred: list[Callable[[], None]] = []

    def defer(write: Callable[..., None]) -> Callable[..., None]:
        return lambda *args, **kwargs: deferred.append(partial(write, *args, **kwargs))

    writer = getattr(_module("strategies.filesystem_async"), "FileSystemWriterAsync", None)
    places = ((writer, "finish"), (_module("serialization"), "save_config"))
    own = [(at, name, getattr(at, name)) for at, name in places if hasattr(at, name)]
    for at, name, write in own:
        setattr(at, name, defer(write))
    try:
        yield deferred
    finally:
        for at, name, write in own:
            setattr(at, name, write)


@contextmanager
def digested_writes() -> Iterator[dict[str, Callable[[], str]]]:
    """Compute the SHA-256 of the data of each file that Megatron's checkpoint writer writes in the
    block. Gives a dict from file name to a function that returns the digest, which is complete once
    the file is closed. A file must not exist yet."""
    found: dict[str, Callable[[], str]] = {}

    def opened(path: str, _mode: str) -> _DigestedFile:
        file = _DigestedFile(path)
        found[Path(path).name] = file.digest.hexdigest
        return file

    files = _module("strategies.filesystem_async")
    files.open = opened
    try:
        yield found
    finally:
        del files.open


class _DigestedFile(io.BufferedWriter):
    """A new file, written sequentially, with the digest of its data."""

    def __init__(self, path: str) -> None:
        super().__init__(io.FileIO(path, "x"))
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        """Write data and add them to the digest. Return the number of bytes."""
        self.digest.update(data)
        return super().write(data)


def _module(name: str) -> Any:
    """Import a module of `dist_checkpointing`; None if it cannot be imported."""
    return _imported(f"{_PACKAGE}.{name}")


def _imported(name: str) -> Any:
    """Import a module; None if it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _save_function_and_args(writer: Any) -> tuple[Callable[..., None] | None, Any, list[Any]]:
    """Replaces the writer's method: return the function that writes, the one that stages, and the
    arguments; (None, None, []) if there is nothing to write."""
    if not writer.write_buckets:
        return None, None, []
    transforms = [writer.transforms] if hasattr(writer, "transforms") else []
    return (
        partial(_write, type(writer), transforms),
        partial(_staged, writer.write_buckets),
        [torch.distributed.get_rank(), writer.write_buckets, writer.results_queue],
    )


def _write(
    writer: Any, transforms: list[Any], _rank: int, buckets: list[Bucket], results: Any
) -> None:
    """Write a rank's files in this thread, one after another, and release their tensors. Put the
    results of all in `results`. Raise the error of a failed write."""
    written = {}
    for index, bucket in enumerate(buckets):
        own: queue.Queue[Any] = queue.Queue()
        count: queue.Queue[int] = queue.Queue()
        count.put(index)
        writer.write_preloaded_data(transforms, index, bucket, own, count, True)
        _, found = own.get_nowait()
        if isinstance(found, Exception):
            raise found
        written[index] = found
        _, _, (_, tensors) = bucket
        tensors.clear()
    results.put(written)


def _staged(buckets: list[Bucket]) -> list[Bucket]:
    """Replace every tensor to be written, in place, by a copy on the CPU, one by one, and return
    the buckets. This releases tensors that are themselves copies, such as gathered ones."""
    for _, _, (_, tensors) in buckets:
        for index, (item, tensor) in enumerate(tensors):
            tensors[index] = item, tensor.to("cpu", copy=True)
    return buckets
