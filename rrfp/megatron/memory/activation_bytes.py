"""Counts the bytes that a microbatch keeps on a model chunk: from its F until its B, and until its
W.

Each storage counts once. Parameters, buffers and gradients do not count, nor does what outlives the
step though autograd saved it (the loop's own batches, caches of masks and positions): no B or W
would free it.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rrfp.megatron.adapters.layers import masked_softmaxes

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


# The masks that a forward fills attention scores with.
#
# Where no fused kernel does it, Megatron fills them in place, in a view. The node that autograd
# makes of it does not show what it keeps, so the masks are noted as they are used.


class Masks:
    """The layers of a model chunk that use masks."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._device = device
        self._users = masked_softmaxes(model)

    @contextmanager
    def noted(self) -> Iterator[dict[int, StorageRef]]:
        """Wrap a forward; gives the masks that are still there, by address, once it has ended."""
        used: list[StorageRef] = []
        alive: dict[int, StorageRef] = {}
        functions = [user.mask_func for user in self._users]

        def noting(function: Any) -> Any:
            def fill(scores: Any, mask: Any) -> Any:
                used.extend(storage_refs([mask], self._device).values())
                return function(scores, mask)

            return fill

        for user, function in zip(self._users, functions, strict=True):
            user.mask_func = noting(function)
        try:
            yield alive
        finally:
            for user, function in zip(self._users, functions, strict=True):
                user.mask_func = function
            alive.update({mask.address: mask for mask in used if mask.is_alive})


Tensors = Iterable[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """What one microbatch kept on one chunk."""

    until_b: int
    """From the end of its F on."""
    until_w: int
    """From the end of its B on: the operands of the products that W computes; 0 if the backward is
    whole. Gradients are among them, so it may be more than what the F kept."""
    allocated: int | None
    """By how much its F let the device's allocated memory grow; None on the CPU. Only a check: it
    includes the output on its way to the next rank, and what other threads receive meanwhile."""


@dataclass(frozen=True, slots=True)
class _Forward:
    """What a microbatch keeps after its F."""

    message_bytes: int
    """Of the chunk's inputs and outputs, as far as they are kept."""
    saved: list[StorageRef]
    allocated: int | None


class ActivationCounter:
    """Counts for the microbatches of one chunk in one step."""

    def __init__(self, model: torch.nn.Module, fixed: frozenset[int], device: torch.device) -> None:
        """`fixed` are the `fixed_storages` of all chunks of the rank. Only memory of `device`
        counts."""
        self._fixed = fixed
        self._device = device
        self._masks = Masks(model, device)
        self._noted: dict[int, StorageRef] = {}
        self._allocated: int | None = None
        self._forwards: dict[int, _Forward] = {}
        self._until_w: dict[int, int] = {}
        self._now: dict[int, int] = {}
        self.hidden: set[str] = set()
        """The kinds of autograd nodes met that do not show what they keep."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Wrap a forward; `count_forward` comes next."""
        before = self._num_allocated()
        with self._masks.noted() as self._noted:
            yield
        after = self._num_allocated()
        self._allocated = None if before is None or after is None else after - before

    def count_forward(
        self, microbatch: int, inputs: Tensors, outputs: Tensors, sent: Tensors = ()
    ) -> None:
        """Count what a microbatch keeps after its F: its inputs and outputs, and what autograd
        saved in their graph. What was `sent` counts only if it was saved; a link may hold on to it
        beyond the step."""
        outputs = list(outputs)
        graph = SavedTensors(outputs)
        messages = self._storages((*inputs, *outputs))
        saved = self._storages(graph)
        messages |= {
            address: saved[address] for address in self._storages(sent) if address in saved
        }
        saved |= {
            address: mask for address, mask in self._noted.items() if address not in self._fixed
        }
        self._forwards[microbatch] = _Forward(
            sum(each.size for each in messages.values()),
            [each for address, each in saved.items() if address not in messages],
            self._allocated,
        )
        self.hidden |= graph.hidden
        forward = self._forwards[microbatch]
        self._now[microbatch] = forward.message_bytes + sum(each.size for each in forward.saved)

    def count_backward(self, microbatch: int, operands: Tensors) -> None:
        """Count what a microbatch keeps after its B, for its W."""
        operand_bytes = sum(each.size for each in self._storages(operands).values())
        self._until_w[microbatch] = self._now[microbatch] = operand_bytes

    def freed(self, microbatch: int) -> None:
        """Its last task has run."""
        del self._now[microbatch]

    @property
    def held_bytes(self) -> int:
        """What all microbatches keep now, with whatever outlives the step."""
        return sum(self._now.values())

    def found(self) -> list[ActivationBytes]:
        """By microbatch, once the step's last task has run."""
        return [
            ActivationBytes(
                forward.message_bytes
                + sum(each.size for each in forward.saved if not each.is_alive),
                self._until_w.get(microbatch, 0),
                forward.allocated,
            )
            for microbatch, forward in sorted(self._forwards.items())
        ]

    def _storages(self, tensors: Tensors) -> dict[int, StorageRef]:
        found = storage_refs(tensors, self._device)
        return {address: each for address, each in found.items() if address not in self._fixed}

    def _num_allocated(self) -> int | None:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else None


def fixed_storages(models: Sequence[Any], device: torch.device) -> frozenset[int]:
    """The addresses of parameters, buffers and gradients, which are there whatever a step runs."""
    return frozenset(
        storage_refs(
            (
                tensor
                for model in models
                # Megatron's DistributedDataParallel has a `buffers` of another meaning.
                for held in (*model.parameters(), *torch.nn.Module.buffers(model))
                for tensor in (held, held.grad, getattr(held, "main_grad", None))
            ),
            device,
        )
    )
