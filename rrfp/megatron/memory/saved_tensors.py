"""The tensors that autograd keeps for a backward, found by walking the graph that a forward left.

Hooks on saved tensors would see them too, and would change what they watch. Only the innermost pair
of hooks is called, so ours would take the place of the user's (offloading). A weight that came back
from a hook has lost its attributes (`main_grad`), in-place changes are no longer noticed, and
`torch.func` refuses to run. The graph shows what is still kept at the end of the forward, so what
recomputation drops needs no rule of its own.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Storages: the memory behind tensors, which counts once however many tensors view it.


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


_SavedTensor: Any = torch._C._autograd.SavedTensor


class SavedTensors:
    """What the graph behind some tensors keeps."""

    def __init__(self, outputs: Iterable[torch.Tensor | None]) -> None:
        self.hidden: set[str] = set()
        """The kinds of nodes met that do not show what they keep: functions of C++ extensions."""
        self._roots = [tensor.grad_fn for tensor in outputs if tensor is not None]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Each saved tensor, some more than once; parameters are among them."""
        stack: list[Any] = [node for node in self._roots if node is not None]
        # A saved tensor is read through its node, and reading it from a dead one is fatal.
        seen = set(stack)
        while stack:
            node = stack.pop()
            kind: type = type(node)
            if kind.__name__ == "CppFunction":
                self.hidden.add(node.name())
            following = [each for each, _ in node.next_functions]
            for name in _saved_names(kind):
                try:
                    saved = getattr(node, name)
                except RuntimeError:
                    continue  # A backward inside the forward has freed it already.
                for each in saved if isinstance(saved, tuple) else (saved,):
                    yield from self._unpacked(each, following)
            # What a Python function puts on its context by other ways than `save_for_backward`.
            yield from tensors_in(getattr(node, "__dict__", ()))
            for each in following:
                if each is not None and each not in seen:
                    seen.add(each)
                    stack.append(each)

    def _unpacked(self, saved: Any, following: list[Any]) -> Iterator[torch.Tensor]:
        """What a saved tensor keeps, without calling a hook: it may fetch from another memory, or
        recompute."""
        yield from tensors_in(saved.data)
        if saved.unpack_hook is None:
            return
        yield from tensors_in(getattr(saved.data, "__dict__", ()))
        # torch's checkpoint, in its form that is not reentrant, has the inputs of its forward here.
        for cell in getattr(saved.unpack_hook, "__closure__", None) or ():
            frame = cell.cell_contents
            for each in getattr(frame, "saved_args", ()):
                yield from tensors_in(each.data if isinstance(each, _SavedTensor) else each)
            following.append(getattr(frame, "input_saver", None))


@cache
def _saved_names(kind: type) -> tuple[str, ...]:
    """The attributes of a kind of node that have what it saved."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples, sets and dictionaries; other objects are left alone."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors_in(value)
    elif isinstance(thing, (list, tuple, set, frozenset)):
        for value in thing:
            yield from tensors_in(value)
