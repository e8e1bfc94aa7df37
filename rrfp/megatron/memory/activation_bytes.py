"""Counts the activation bytes of a microbatch on a model chunk, from F until B and from B until W.

Each storage counts once. Parameters, buffers and gradients do not count. Neither do saved tensors
that outlive the step (the loop's own batches, caches of masks and positions), because no B or W
frees them.

Saved tensors are found by walking the graph that a forward made. Hooks on saved tensors would see
them too, but would interfere: torch calls only the innermost pair of hooks, so they would replace
the user's (offloading). A weight that comes back from a hook has lost its attributes (`main_grad`),
in-place changes go unnoticed, and `torch.func` refuses to run. The graph also shows only tensors
that still exist after the forward, so recomputation needs no special case.
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
"""The granularity of torch's CUDA allocator, in bytes."""


class StorageRef:
    """A weak reference to a storage, with its address and size in bytes."""

    __slots__ = ("_reference", "address", "size")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.address = storage.data_ptr()
        self.size = storage.nbytes()
        if storage.device.type == "cuda":
            self.size = -(-self.size // _CUDA_BLOCK) * _CUDA_BLOCK
        self._reference: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    @property
    def is_alive(self) -> bool:
        """True while the storage exists."""
        return not self._reference.expired()


def storage_refs(
    tensors: Iterable[torch.Tensor | None], device: torch.device
) -> dict[int, StorageRef]:
    """Weak references to the storages that the tensors use on devices of the type of `device`, by
    address. None among the tensors is skipped."""
    found: dict[int, StorageRef] = {}
    for tensor in tensors:
        if tensor is None:
            continue
        for storage in _storages_of(tensor):
            if storage.device.type == device.type and storage.data_ptr() not in found:
                found[storage.data_ptr()] = StorageRef(storage)
    return found


def _storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor: several for a subclass made of other tensors, and none for a
    sparse tensor, which no layer of Megatron saves."""
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        names, _ = wrapper.__tensor_flatten__()
        for name in names:
            yield from _storages_of(getattr(wrapper, name))
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()


_SavedTensor: Any = torch._C._autograd.SavedTensor


class SavedTensors:
    """Iterates over the tensors that autograd saved in the graph of some outputs."""

    def __init__(self, outputs: Iterable[torch.Tensor | None]) -> None:
        self.opaque_nodes: set[str] = set()
        """Names of visited nodes whose saved tensors cannot be read (functions of C++
        extensions)."""
        self._roots = [tensor.grad_fn for tensor in outputs if tensor is not None]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield each saved tensor, some of them repeatedly. Parameters are included."""
        stack: list[Any] = [node for node in self._roots if node is not None]
        # Keeps the nodes alive: reading a saved tensor through a dead node crashes.
        seen = set(stack)
        while stack:
            node = stack.pop()
            kind: type = type(node)
            if kind.__name__ == "CppFunction":
                self.opaque_nodes.add(node.name())
            following = [each for each, _ in node.next_functions]
            for name in _saved_names(kind):
                try:
                    saved = getattr(node, name)
                except RuntimeError:
                    continue  # a backward inside the forward has freed it
                for each in saved if isinstance(saved, tuple) else (saved,):
                    yield from self._unpacked(each, following)
            # Tensors that a Python function stored on its context without `save_for_backward`.
            yield from tensors_in(getattr(node, "__dict__", ()))
            for each in following:
                if each is not None and each not in seen:
                    seen.add(each)
                    stack.append(each)

    def _unpacked(self, saved: Any, following: list[Any]) -> Iterator[torch.Tensor]:
        """Yield the tensors that a saved tensor keeps alive, without calling its unpack hook, which
        may copy from another device or recompute. For a checkpoint, add the node that saved its
        inputs to `following`."""
        yield from tensors_in(saved.data)
        if saved.unpack_hook is None:
            return
        yield from tensors_in(getattr(saved.data, "__dict__", ()))
        # torch's non-reentrant checkpoint stores the inputs of its forward here.
        for cell in getattr(saved.unpack_hook, "__closure__", None) or ():
            frame = cell.cell_contents
            for each in getattr(frame, "saved_args", ()):
                yield from tensors_in(each.data if isinstance(each, _SavedTensor) else each)
            following.append(getattr(frame, "input_saver", None))


@cache
def _saved_names(kind: type) -> tuple[str, ...]:
    """The attributes of a node type that hold saved tensors."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples, sets and dicts (their values). Other objects are
    skipped."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors_in(value)
    elif isinstance(thing, (list, tuple, set, frozenset)):
        for value in thing:
            yield from tensors_in(value)


class MaskTracker:
    """Tracks the attention masks that a model chunk's forward uses.

    Without a fused kernel, Megatron applies a mask to the scores in place, in a view. The autograd
    node of this operation does not show its saved tensors, so masks are tracked as they are used.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._device = device
        self._users = masked_softmaxes(model)

    @contextmanager
    def tracking(self) -> Iterator[dict[int, StorageRef]]:
        """Wrap a forward, in which the softmaxes' `mask_func` is replaced. The dict that it gives
        has, after the block, the masks still alive, by address."""
        used: list[StorageRef] = []
        alive: dict[int, StorageRef] = {}
        functions = [user.mask_func for user in self._users]

        def tracked(function: Any) -> Any:
            def fill(scores: Any, mask: Any) -> Any:
                used.extend(storage_refs([mask], self._device).values())
                return function(scores, mask)

            return fill

        for user, function in zip(self._users, functions, strict=True):
            user.mask_func = tracked(function)
        try:
            yield alive
        finally:
            for user, function in zip(self._users, functions, strict=True):
                user.mask_func = function
            alive.update({mask.address: mask for mask in used if mask.is_alive})


Tensors = Iterable[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """The activation bytes of one microbatch on one chunk."""

    until_b: int
    """Bytes from the end of F until B."""
    until_w: int
    """Bytes from the end of B until W: the operands of W's matrix products; 0 if the backward is
    whole. They include gradients, so there may be more of them than of `until_b`."""


@dataclass(frozen=True, slots=True)
class _Forward:
    """The memory of a microbatch after its F."""

    message_bytes: int
    """Bytes of the chunk's inputs and outputs that stay in memory."""
    saved: list[StorageRef]


class ActivationCounter:
    """Counts the activation bytes of the microbatches of one chunk in one step."""

    def __init__(self, model: torch.nn.Module, fixed: frozenset[int], device: torch.device) -> None:
        """`fixed` are the `fixed_storages` of all chunks of the rank. Only memory on `device`
        counts."""
        self._fixed = fixed
        self._device = device
        self._mask_tracker = MaskTracker(model, device)
        self._masks: dict[int, StorageRef] = {}
        self._forwards: dict[int, _Forward] = {}
        self._until_w: dict[int, int] = {}
        self._now: dict[int, int] = {}
        self.opaque_nodes: set[str] = set()
        """Names of autograd nodes whose saved tensors cannot be read."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Wrap a forward to track its masks. Call `count_forward` next."""
        with self._mask_tracker.tracking() as self._masks:
            yield

    def count_forward(
        self, microbatch: int, inputs: Tensors, outputs: Tensors, sent: Tensors = ()
    ) -> None:
        """Count the memory of a microbatch after its F: its inputs and outputs, the tensors that
        autograd saved, and masks, each storage once. A tensor that was `sent` counts only if
        autograd saved it, because a link may keep it beyond the step."""
        outputs = list(outputs)
        graph = SavedTensors(outputs)
        messages = self._storages((*inputs, *outputs))
        saved = self._storages(graph)
        messages |= {
            address: saved[address] for address in self._storages(sent) if address in saved
        }
        saved |= {
            address: mask for address, mask in self._masks.items() if address not in self._fixed
        }
        forward = self._forwards[microbatch] = _Forward(
            sum(each.size for each in messages.values()),
            [each for address, each in saved.items() if address not in messages],
        )
        self.opaque_nodes |= graph.opaque_nodes
        self._now[microbatch] = forward.message_bytes + sum(each.size for each in forward.saved)

    def count_backward(self, microbatch: int, operands: Tensors) -> None:
        """Count the memory of a microbatch after its B: only the operands of its W."""
        operand_bytes = sum(each.size for each in self._storages(operands).values())
        self._until_w[microbatch] = self._now[microbatch] = operand_bytes

    def remove(self, microbatch: int) -> None:
        """Stop counting a microbatch in `held_bytes`, after its last task."""
        del self._now[microbatch]

    @property
    def held_bytes(self) -> int:
        """The bytes of all microbatches now, including tensors that outlive the step."""
        return sum(self._now.values())

    def results(self) -> list[ActivationBytes]:
        """The bytes of each microbatch, in microbatch order. Saved tensors that still exist do not
        count, because they outlive the step. Call it after the step's last task."""
        return [
            ActivationBytes(
                forward.message_bytes
                + sum(each.size for each in forward.saved if not each.is_alive),
                self._until_w.get(microbatch, 0),
            )
            for microbatch, forward in sorted(self._forwards.items())
        ]

    def _storages(self, tensors: Tensors) -> dict[int, StorageRef]:
        """The storages that the tensors use on the device, by address, without the fixed ones."""
        found = storage_refs(tensors, self._device)
        return {address: each for address, each in found.items() if address not in self._fixed}


def fixed_storages(models: Sequence[Any], device: torch.device) -> frozenset[int]:
    """The addresses, on `device`, of these models' parameters, buffers and gradients (also
    `main_grad`), which exist outside of any step."""
    return frozenset(
        storage_refs(
            (
                tensor
                for model in models
                # Megatron's DistributedDataParallel has an attribute `buffers` of another meaning.
                for held in (*model.parameters(), *torch.nn.Module.buffers(model))
                for tensor in (held, held.grad, getattr(held, "main_grad", None))
            ),
            device,
        )
    )
