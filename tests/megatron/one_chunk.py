"""One model chunk on its ranks, run task by task by hand: no dispatcher and no transport."""

import gc
import hashlib
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from rrfp.train.settings import TrainSettings

MICROBATCHES = 4
TIMEOUT_S = 230.0
"""For a test that takes ten seconds on a quiet machine."""

VOCABULARY = 61

SMALL: dict[str, Any] = {
    "pp": 1,
    "layers": 2,
    "hidden": 16,
    "heads": 2,
    "seq_length": 16,
    "micro_batch_size": 2,
}

Task = tuple[str, int]
"""A kind of task and its microbatch."""


def in_groups(layout: dict[str, Any], work: Callable[..., Any], *args: object) -> Any:
    """Run `work(layout, *args)` on this rank, in Megatron's groups; in a process of its own."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from rrfp.train.launch.process_groups import parallel_groups

    with parallel_groups(TrainSettings(**{**SMALL, **layout}), timeout_s=100.0) as joined:
        return work(joined, *args)


class Chunk:
    """A GPT as one chunk, its microbatches, and what forwards keep for backwards."""

    def __init__(self, layout: Any, settings: dict[str, Any], **ddp: Any) -> None:
        """`ddp` has DistributedDataParallel's own settings, where they are not the run's."""
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )

        from rrfp.train.models.model import build_model

        chosen = TrainSettings(**{**SMALL, **settings})
        built = build_model(chosen, layout, SimpleNamespace(vocab_size=VOCABULARY))  # pyright: ignore[reportArgumentType]
        self.config = built.config
        (self.model,) = built.chunks
        if ddp:
            self.model.grad_accs.clear()  # With them go the hooks of the first.
            self.model = DistributedDataParallel(
                self.config,
                DistributedDataParallelConfig(grad_reduce_in_fp32=True, **ddp),
                self.model.module,
            )
        shape = (MICROBATCHES, 2, chosen.data.micro_batch_size, chosen.data.seq_length)
        self._data = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(7))
        self._positions = torch.arange(chosen.data.seq_length).expand(shape[2:])
        self._losses: dict[int, torch.Tensor] = {}

    def forward(self, microbatch: int) -> None:
        tokens, labels = self._data[microbatch]
        losses = self.model(tokens, self._positions, None, labels=labels)
        self._losses[microbatch] = losses.mean()

    def backward(self, microbatch: int) -> None:
        self._losses.pop(microbatch).backward()  # type: ignore[no-untyped-call]

    def gradients_in_order(self) -> dict[str, str]:
        """The digests of a step that Megatron runs alone."""
        self.model.zero_grad_buffer()
        for microbatch in range(MICROBATCHES):
            self.forward(microbatch)
            self.backward(microbatch)
        return digests(self.model)


def digests(model: torch.nn.Module) -> dict[str, str]:
    """Digests of the gradients, by parameter name."""
    found = {}
    parameter: Any
    for name, parameter in model.named_parameters():
        gradient = getattr(parameter, "main_grad", parameter.grad)
        if gradient is not None:
            found[name] = hashlib.sha256(gradient.view(torch.uint8).numpy().tobytes()).hexdigest()
    return found


def num_tensors() -> int:
    """Tensors that anything in this process keeps; what only the collector frees counts too."""
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def are_left(num_before: int) -> bool:
    """Whether more tensors than before stay. gloo's own thread drops what it has carried a moment
    after it says that this is done."""
    deadline_s = time.monotonic() + 5
    while num_tensors() > num_before:
        if time.monotonic() > deadline_s:
            return True
        time.sleep(0.01)
    return False


def some_order(seed: int, kinds: str) -> list[Task]:
    """A random order of the tasks of a step in which each microbatch's kinds keep theirs."""
    generator = random.Random(seed)
    left = {microbatch: list(kinds) for microbatch in range(MICROBATCHES)}
    order: list[Task] = []
    while left:
        microbatch = generator.choice(sorted(left))
        order.append((left[microbatch].pop(0), microbatch))
        if not left[microbatch]:
            del left[microbatch]
    return order
