"""The masks that a forward fills attention scores with.

Where no fused kernel does it, Megatron fills them in place, in a view. The node that autograd makes
of it does not show what it keeps, so the masks are noted as they are used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax

from rrfp.megatron.memory.storages import StorageRef, storage_refs


class Masks:
    """The layers of a model chunk that use masks."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._device = device
        self._users: list[Any] = [
            module for module in model.modules() if isinstance(module, FusedScaleMaskSoftmax)
        ]

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
