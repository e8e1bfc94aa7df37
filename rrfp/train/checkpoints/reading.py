"""Reads a checkpoint's tensors as a whole, in one process, whatever layout saved them; compares."""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every parameter and every tensor of the optimizer's state, by its name in the whole model
    (`rrfp.train.checkpoints.tensors`). Two runs have trained the same if these are equal to the
    last bit. Raises what torch raises for files that cannot be read."""
    reader = FileSystemReader(path)
    tensors: dict[str, torch.Tensor] = {
        key: torch.empty(told.size, dtype=told.properties.dtype)
        for key, told in reader.read_metadata().state_dict_metadata.items()
        if isinstance(told, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        # torch warns that there are no ranks.
        warnings.simplefilter("ignore", UserWarning)
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
