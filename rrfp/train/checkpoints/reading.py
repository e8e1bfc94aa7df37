"""Reads a checkpoint without executing anything that its files say; compares the tensors of two.

torch and Megatron read `.metadata` by `pickle.load`, and a rank's random states by `torch.load`
with `weights_only=False`: either runs any command that a pickle names.
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

from rrfp.train.checkpoints.directory import no_digests, whole_checkpoint

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
"""What `.metadata` is made of, besides plain values and torch's constants."""

_ALLOWED = {
    **{(each.__module__, each.__qualname__): each for each in _CLASSES},
    # Finds a constant of torch by its name.
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}

_DATA_ONLY = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}
"""Variables by which every `torch.load` refuses classes and functions, whatever its caller asks."""


class _MetadataUnpickler(pickle.Unpickler):
    """Makes nothing but the metadata of a checkpoint."""

    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name))
        if found is None and module == "torch" and name.isidentifier():
            found = getattr(torch, name, None)
            found = found if isinstance(found, torch.dtype) else None
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata does")
        return found


def _load_metadata(file: IO[bytes]) -> Metadata:
    """What `pickle.load` returns for the metadata of a checkpoint, and nothing else. Raises
    UnpicklingError."""
    found = _MetadataUnpickler(file).load()
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise pickle.UnpicklingError("it is not the metadata of a checkpoint")
    for place in found.storage_data.values():
        name = getattr(place, "relative_path", None)
        if not isinstance(name, str) or Path(name).name != name:
            raise pickle.UnpicklingError(f"it names {name!r:.100}, which is no file beside it")
    return found


@contextmanager
def executing_nothing() -> Iterator[None]:
    """Let torch and Megatron read a checkpoint's files in the block as data only."""
    module: Any = filesystem
    own_pickle, before = module.pickle, {name: os.environ.get(name) for name in _DATA_ONLY}
    module.pickle = SimpleNamespace(load=_load_metadata)
    os.environ.update(_DATA_ONLY)
    try:
        yield
    finally:
        module.pickle = own_pickle
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every parameter and every tensor of the optimizer's state, by its name in the whole model
    (`rrfp.train.checkpoints.tensors`). Two runs have trained the same if these are equal to the
    last bit. Raises RrfpError for a checkpoint that is not whole, and what torch raises for files
    that cannot be read."""
    if not whole_checkpoint(path).manifest.digests:
        _log.warning(no_digests(path))
    reader = FileSystemReader(path)
    # torch warns that there are no ranks.
    with executing_nothing(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        tensors: dict[str, torch.Tensor] = {
            key: torch.empty(told.size, dtype=told.properties.dtype)
            for key, told in reader.read_metadata().state_dict_metadata.items()
            if isinstance(told, TensorStorageMetadata)
        }
        checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def differences(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of the tensors that are not the same to the last bit."""
    return sorted(
        name
        for name in first.keys() | second.keys()
        if name not in first or name not in second or not _same_bits(first[name], second[name])
    )


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(*(each.contiguous().view(torch.uint8) for each in (first, second)))
