"""Reads a checkpoint as data only, without executing its pickles, and compares two checkpoints.

torch and Megatron read `.metadata` by `pickle.load`, and a rank's random states by `torch.load`
with `weights_only=False`: both would run any command that a pickle names.
"""

import logging
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from rrfp.train.checkpoints.directory import no_digests_warning, whole_checkpoint

_log = logging.getLogger(__name__)

_CLASSES: tuple[Any, ...] = (
    filesystem._StorageInfo,
    metadata._MEM_FORMAT_ENCODING,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    planner.BytesIOWriteData,
    planner.SavePlan,
    planner.TensorWriteData,
    planner.WriteItem,
    planner.WriteItemType,
    torch.Size,
)
"""The classes of `.metadata`, besides plain values and torch's constants."""

_ALLOWED = {
    **{(each.__module__, each.__qualname__): each for each in _CLASSES},
    # Looks up a constant of torch by name.
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}

_DATA_ONLY = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}
"""Variables that make every `torch.load` refuse classes and functions, whatever its arguments."""


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles the metadata of a checkpoint and refuses all other classes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function that checkpoint metadata may name, or a dtype of torch. Raise
        UnpicklingError for any other name."""
        found = _ALLOWED.get((module, name))
        if found is None and module == "torch" and name.isidentifier():
            found = getattr(torch, name, None)
            found = found if isinstance(found, torch.dtype) else None
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata does")
        return found


def _load_metadata(file: IO[bytes]) -> Metadata:
    """Unpickle the metadata of a checkpoint, as data only, in place of `pickle.load`. Raise
    UnpicklingError for other classes and values, and for metadata that names a file not directly in
    its directory."""
    found = _MetadataUnpickler(file).load()
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise pickle.UnpicklingError("it is not the metadata of a checkpoint")
    for place in found.storage_data.values():
        name = getattr(place, "relative_path", None)
        if not isinstance(name, str) or Path(name).name != name:
            raise pickle.UnpicklingError(f"it names {name!r:.100}, which is no file beside it")
    return found


@contextmanager
def loading_data_only() -> Iterator[None]:
    """Make torch and Megatron read a checkpoint's files in the block as data only, by a patch of
    torch and environment variables, both restored afterwards."""
    module: Any = filesystem
    original, before = module.pickle, {name: os.environ.get(name) for name in _DATA_ONLY}
    module.pickle = SimpleNamespace(load=_load_metadata)
    os.environ.update(_DATA_ONLY)
    try:
        yield
    finally:
        module.pickle = original
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read every parameter and every tensor of the optimizer's state, by its name in the whole
    model (see `rrfp.train.checkpoints.tensors`). Warn if the checkpoint has no digests. Raise
    RrfpError if it is not whole, and torch's errors for unreadable files."""
    if not whole_checkpoint(path).manifest.digests:
        _log.warning(no_digests_warning(path))
    reader = FileSystemReader(path)
    # torch warns that there is no process group.
    with loading_data_only(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        tensors: dict[str, torch.Tensor] = {
            key: torch.empty(stored.size, dtype=stored.properties.dtype)
            for key, stored in reader.read_metadata().state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def differences(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the sorted names of the tensors that are missing on one side or not bitwise equal. Two
    runs without differences have trained the same."""
    return sorted(
        name
        for name in first.keys() | second.keys()
        if name not in first or name not in second or not _is_same(first[name], second[name])
    )


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if two tensors have the same shape, type and bits."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(*(each.contiguous().view(torch.uint8) for each in (first, second)))
