"""Makes Megatron-Core's `dist_checkpointing` save and load in ranks of ours.

- On the CPU: its modules refer to CUDA for tensors of one number and for synchronisation, as others
  do; they get the same copy of torch's namespace (`rrfp.megatron.cpu.patches`). Where that was not
  prepared the copy is torch itself.
- Its writer forks a process per file, so that a GPU's process goes on, and asks a further process
  for the results. A rank here has threads and sockets, which a fork would copy, and these processes
  outlive a rank that is killed. The rank itself writes instead; who wants to go on meanwhile calls
  the writing in a thread. Megatron-Core 0.19 writes in threads, too.
- Staging copies tensors to the CPU. From the CPU Megatron's would be no copy, and training would
  change what is still being written.
- Rank 0 writes the last files while the other ranks wait for it in a collective, where they would
  stay if it failed, and be taken for standing still if it took long. These writes are put off.

- Every file is digested as it is written, so that nobody has to read it again.

Modules and functions that a version of Megatron-Core lacks are passed over.
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
"""Where a writer's results go, by the names of several versions."""

Bucket = tuple[Any, Any, tuple[Any, list[tuple[Any, torch.Tensor]]]]
"""What goes into a file: its path, its name, and its objects and tensors."""


def prepare_checkpoints() -> None:
    """Patch the package, on the CPU after `prepare_cpu`. Further calls change nothing."""
    cpu_torch: ModuleType = _core_utils.torch
    for name in _MODULES:
        module = _module(name)
        if module is not None:
            module.torch = cpu_torch
    # A package for remote storage, with which Megatron would read and write by other functions.
    storage = _imported("megatron.core.msc_utils")
    if storage is not None:
        storage.MultiStorageClientFeature.disable()
    files = _module("strategies.filesystem_async")
    if files is None or not hasattr(files, "FileSystemWriterAsync"):
        return
    for name in _RESULTS_QUEUES:
        if hasattr(files, name):
            setattr(files, name, lambda *_: queue.Queue())
    # Without psutil it raises, and its answer is only logged.
    files._process_memory = lambda: 0
    files.FileSystemWriterAsync.get_save_function_and_args = _save_function_and_args


@contextmanager
def writes_put_off() -> Iterator[list[Callable[[], None]]]:
    """Put off what Megatron writes while ranks finalize a checkpoint. Gives this rank's writes, to
    be called once no rank waits for it; they raise what writing raises."""
    put_off: list[Callable[[], None]] = []

    def putting_off(write: Callable[..., None]) -> Callable[..., None]:
        return lambda *args, **kwargs: put_off.append(partial(write, *args, **kwargs))

    writer = getattr(_module("strategies.filesystem_async"), "FileSystemWriterAsync", None)
    places = ((writer, "finish"), (_module("serialization"), "save_config"))
    own = [(at, name, getattr(at, name)) for at, name in places if hasattr(at, name)]
    for at, name, write in own:
        setattr(at, name, putting_off(write))
    try:
        yield put_off
    finally:
        for at, name, write in own:
            setattr(at, name, write)


@contextmanager
def writes_digested() -> Iterator[dict[str, Callable[[], str]]]:
    """Compute the SHA-256 of each file that Megatron writes in the block, of what it asks to be
    written; by the file's name, complete once the file is closed."""
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
    """A new file that is written from its beginning to its end."""

    def __init__(self, path: str) -> None:
        super().__init__(io.FileIO(path, "x"))
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return super().write(data)


def _module(name: str) -> Any:
    return _imported(f"{_PACKAGE}.{name}")


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _save_function_and_args(writer: Any) -> tuple[Callable[..., None] | None, Any, list[Any]]:
    """In the place of the writer's own method: what writes, what stages, and the arguments."""
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
    """Write a rank's files in this thread, and let go of what was written. Raises what writing
    raises."""
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
    """Put a copy in the place of every tensor that is to be written. Some are copies already, such
    as gathered ones: these are let go of, one by one."""
    for _, _, (_, tensors) in buckets:
        for index, (item, tensor) in enumerate(tensors):
            tensors[index] = item, tensor.to("cpu", copy=True)
    return buckets
