"""Storages: the memory behind tensors, which counts once however many tensors view it."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_CUDA_BLOCK = 512
"""CUDA's allocator hands out multiples of so many bytes."""


class StorageRef:
    """A storage, its address and its size in bytes, without keeping it alive."""

    __slots__ = ("_reference", "address", "size")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.address = storage.data_ptr()
        self.size = storage.nbytes()
        if storage.device.type == "cuda":
            self.size = -(-self.size // _CUDA_BLOCK) * _CUDA_BLOCK
        self._reference: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    @property
    def is_alive(self) -> bool:
        return not self._reference.expired()


def storage_refs(
    tensors: Iterable[torch.Tensor | None], device: torch.device
) -> dict[int, StorageRef]:
    """The storages on `device` behind the tensors, by address."""
    found: dict[int, StorageRef] = {}
    for tensor in tensors:
        if tensor is None:
            continue
        for storage in _storages_of(tensor):
            if storage.device.type == device.type and storage.data_ptr() not in found:
                found[storage.data_ptr()] = StorageRef(storage)
    return found


def _storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Several if the tensor is a subclass made of others. A sparse tensor counts as empty; no layer
    of Megatron saves one."""
    made_of: Any = tensor
    if is_traceable_wrapper_subclass(made_of):
        names, _ = made_of.__tensor_flatten__()
        for name in names:
            yield from _storages_of(getattr(made_of, name))
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
