"""Reads a checkpoint's tensors as a whole, in one process, whatever layout saved them."""

import warnings
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
