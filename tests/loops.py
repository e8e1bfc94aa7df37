"""Training loops' own data on one rank: loaders that draw from the loop's random states, and items
in hand that reach the model as Megatron-LM hands them on."""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from rrfp.train.data.batches import Batch
from tests.rigs import Outcome, Rig, three_value_step

NUM = 6
NUM_STEPS = 2
NUM_SAMPLES = 8
"""Fewer than the steps take: the loader begins again in mid-step."""


class Trained(NamedTuple):
    """What some steps came to on one rank."""

    losses: list[list[float]]
    gradients: list[str]
    drawn: list[int]
    """The samples in the order in which they were drawn."""
    states: list[str]
    """The digest of the loop's random states after each step."""


class Samples:
    """A dataset whose samples are known by their numbers."""

    def __init__(self, rig: Rig) -> None:
        self._items = []
        for number in range(NUM_SAMPLES):
            batch = rig.batches.batch(0, number)
            batch["loss_mask"][:, : 3 * number] = 0
            self._items.append({**batch, "number": number})

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self._items[number]


def shuffled(samples: Samples, num_workers: int = 0) -> Iterator[Any]:
    """A loader that shuffles by the loop's own random state, epoch after epoch."""
    loader: Any = DataLoader(
        samples,  # type: ignore[arg-type]
        batch_size=None,
        shuffle=True,
        num_workers=num_workers,
    )
    while True:
        yield from loader


def of_workers(samples: Samples) -> Iterator[Any]:
    return shuffled(samples, num_workers=1)


def of_generators(samples: Samples) -> Iterator[Any]:
    """Draws from Python's, numpy's and torch's generators, for each item."""
    while True:
        number = random.randrange(3) + np.random.randint(3) + int(torch.randint(4, ()))
        yield samples[number % NUM_SAMPLES]


KINDS: dict[str, Callable[[Samples], Iterator[Any]]] = {
    each.__name__: each for each in (shuffled, of_workers, of_generators)
}


def set_off() -> None:
    """The same random states on every rank, as loops seed them; Megatron's tracker, too."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)


def states() -> str:
    numpys: Any = np.random.get_state()
    found = (random.getstate(), numpys[1].tobytes(), numpys[2:], torch.get_rng_state().tolist())
    return hashlib.sha256(repr(found).encode()).hexdigest()


class Saved(NamedTuple):
    """What a checkpoint holds of the random states."""

    python: Any
    numpy: Any
    torch: torch.Tensor
    named: dict[str, torch.Tensor]

    @classmethod
    def now(cls) -> "Saved":
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        named = {name: s.clone() for name, s in get_cuda_rng_tracker().get_states().items()}
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), named)

    def restore(self) -> None:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        get_cuda_rng_tracker().set_states(dict(self.named))


class Loop:
    """A training loop on one rank, with iterators of its own for every chunk."""

    def __init__(self, rig: Rig, schedule: Callable[..., list[Any]], kind: str) -> None:
        self._rig = rig
        self._schedule = schedule
        samples = Samples(rig)
        self.iterators = [KINDS[kind](samples) for _ in rig.gpt.chunks]
        self.found = Trained([], [], [], [])

    def step(self, arrange: Callable[[list[Any]], list[Any]] | None = None) -> None:
        """One step; `arrange` puts its items in another order."""
        iterators: list[Any] = list(self.iterators)
        if arrange is not None:
            iterators = [iter(arrange([next(each) for _ in range(NUM)])) for each in self.iterators]

        def with_data(**given: Any) -> list[Any]:
            return self._schedule(**{**given, "data_iterator": iterators})

        def forward_step(data_iterator: Iterator[Any], model: Any) -> Any:
            item = next(data_iterator)
            self.found.drawn.append(item["number"])
            return three_value_step(iter([item]), model)

        outcome = self._rig.run(with_data, forward_step, num_microbatches=NUM)
        self.found.losses.append(outcome.losses)
        self.found.gradients.append(outcome.gradients_sha256)
        self.found.states.append(states())


def train(rig: Rig, schedule: Callable[..., Any], kind: str, **arrangement: Any) -> Trained:
    set_off()
    loop = Loop(rig, schedule, kind)
    for _ in range(NUM_STEPS):
        loop.step(**arrangement)
    if hasattr(schedule, "close"):
        schedule.close()
    return loop.found


# Items in hand.


def run_on_items(
    rig: Rig,
    schedule: Callable[..., list[Any]],
    items: Sequence[Any],
    step: Callable[..., Any] = three_value_step,
    **arguments: Any,
) -> Outcome:
    """A step on iterators of their own for every chunk, where this rank is given data at all."""
    layout = rig.layout
    is_given = step is not megatron_lm_step or (
        layout.pp_rank in (0, layout.last_stage_pp_rank) and layout.tp_rank == 0
    )

    def called(**given: Any) -> list[Any]:
        iterators = [iter(items) if is_given else None for _ in rig.gpt.chunks]
        return schedule(**{**given, "data_iterator": iterators, **arguments})

    return rig.run(called, step, num_microbatches=NUM)


def megatron_lm_step(data_iterator: Iterator[Batch] | None, model: Any) -> tuple[torch.Tensor, Any]:
    """As in Megatron-LM: the first and the last stage have data, on the first rank of a
    tensor-parallel group, which tells the others."""
    from megatron.core import parallel_state

    if not (model.module.pre_process or model.module.post_process):
        return model(None, None, None), None
    group = parallel_state.get_tensor_model_parallel_group()
    told: list[Any] = [None if data_iterator is None else next(data_iterator)]
    dist.broadcast_object_list(told, dist.get_global_rank(group, 0), group=group)
    return three_value_step(iter(told), model)


class FirstRankKnows:
    """A cost that only the first rank of a replica tells rightly."""

    def __init__(self, layout: Any) -> None:
        self._knows = layout.pp_rank == layout.tp_rank == 0

    def __call__(self, item: Batch) -> torch.Tensor:
        return torch.tensor(item["tokens"].numel() if self._knows else 0)
