"""What autograd saves, counted by hooks of the tests' own, and trainings to count it on."""

import itertools
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

GLOO_S = 0.02
"""gloo's own thread drops what it has carried a moment after it says that this is done."""


class Packed:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()


class Watched:
    """A count of this test's own, by hooks on what autograd saves."""

    def __init__(self, model: Any) -> None:
        own = [*model.parameters(), *torch.nn.Module.buffers(model)]
        own += [weight.main_grad for weight in model.parameters() if hasattr(weight, "main_grad")]
        self._own = {tensor.untyped_storage()._cdata for tensor in own}
        self._found: dict[int, dict[int, tuple[Any, int]]] = {}
        self._messages: dict[int, set[int]] = {}

    def add(self, microbatch: int, saved: Sequence[Any], messages: Sequence[Any]) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        found = self._found[microbatch] = {}
        for tensor in (*saved, *messages):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._own:
                reference: Any = StorageWeakRef
                found[storage._cdata] = reference(storage), storage.nbytes()
        self._messages[microbatch] = {each.untyped_storage()._cdata for each in messages}

    def bytes_of(self) -> list[int]:
        """By microbatch. What is still there belongs to the loader, or to a cache."""
        return [
            sum(
                size
                for address, (storage, size) in found.items()
                if address in self._messages[microbatch] or storage.expired()
            )
            for microbatch, found in sorted(self._found.items())
        ]


@contextmanager
def watched_memory(found_bytes: list[list[list[int]]]) -> Iterator[None]:
    """Fills the list with what the hooks see, by step, chunk and microbatch."""
    from rrfp.megatron.step.stage import ChunkStep, RankStep

    original: Any = ChunkStep.forward
    original_finish: Any = RankStep.finish

    def finish(self: Any) -> None:
        original_finish(self)
        watched = [each.watched for each in self._chunks if hasattr(each, "watched")]
        if watched:
            time.sleep(GLOO_S)
            found_bytes.append([each.bytes_of() for each in watched])

    def forward(self: Any, microbatch: int, inputs: Any, data: Any) -> Any:
        if self._arguments.forward_only:
            return original(self, microbatch, inputs, data)
        if not hasattr(self, "watched"):
            self.watched = Watched(self.model)
        holders: list[weakref.ref[Packed]] = []

        def pack(tensor: torch.Tensor) -> Packed:
            holder = Packed(tensor)
            holders.append(weakref.ref(holder))
            return holder

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
            found = original(self, microbatch, inputs, data)
        alive = [holder for each in holders if (holder := each()) is not None]
        kept = [each for each in itertools.chain(*self._kept[microbatch]) if each is not None]
        self.watched.add(microbatch, [holder.tensor for holder in alive], kept)
        return found

    with patch.object(ChunkStep, "forward", forward), patch.object(RankStep, "finish", finish):
        yield


GPT = {
    "pp": 2,
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "seq_length": 64,
    "microbatches": 4,
    "steps": 4,
    "variable_lengths": True,
}
ZB_V = {"hint": "zb-v", "placement": "v", "chunks": 2}
VLM = {**GPT, "model": "vlm", "variable_lengths": False}
MOE = {**GPT, "model": "moe", "experts": 4}


@pytest.fixture
def documents(tmp_path: Path) -> dict[str, Any]:
    """Texts of many lengths, as a setting."""
    lengths = np.random.default_rng(0).integers(10, 80, size=400)
    for number, length in enumerate(lengths):
        (tmp_path / f"{number}.txt").write_text("x" * int(length), encoding="utf-8")
    return {"data": str(tmp_path)}
