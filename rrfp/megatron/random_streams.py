"""Random states by task, so that dropout does not depend on the order in which tasks run.

Each step draws one seed from every random state that a model may draw from: torch's default
generators and the named states of Megatron's tracker. A task runs with each of them set to a stream
derived from its seed, the stage and the microbatch. The states themselves advance by one draw a
step, so that saving and restoring them with a checkpoint works as ever, and ranks whose states
agreed (those of a tensor-parallel group, for what they do alike) go on agreeing.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    is_graph_safe_cuda_rng_tracker,
)

from rrfp.errors import UsageError


class RandomStreams:
    """The random streams of one rank's tasks."""

    def __init__(self, device: torch.device) -> None:
        """`device` is the model's. Raises UsageError for a tracker of Transformer Engine or for
        CUDA graphs, whose states are generators that a captured graph holds on to."""
        if is_graph_safe_cuda_rng_tracker(get_cuda_rng_tracker()):
            raise UsageError(
                f"the random states of {type(get_cuda_rng_tracker()).__name__} cannot be set for "
                "each task; leave te_rng_tracker and use_cudagraphable_rng off"
            )
        self._defaults = {"default": torch.default_generator}
        if device.type == "cuda":
            index = torch.cuda.current_device()
            self._defaults["cuda default"] = torch.cuda.default_generators[index]
        self._scratch = torch.Generator(device)
        self._default_seeds: dict[str, int] = {}
        self._named_seeds: dict[str, int] = {}

    def start_step(self, *, advances: bool = True) -> None:
        """Draw this step's seeds; on every rank of a tensor-parallel group alike. An evaluation
        draws without advancing the states, so that training does not depend on it."""
        kept = {name: generator.get_state() for name, generator in self._defaults.items()}
        self._default_seeds = {name: _draw(generator) for name, generator in self._defaults.items()}
        self._named_seeds = {}
        states = {}
        for name, state in _named_states().items():
            self._scratch.set_state(state)
            self._named_seeds[name] = _draw(self._scratch)
            states[name] = self._scratch.get_state()
        if advances:
            _set_named_states(states)
        else:
            for name, state in kept.items():
                self._defaults[name].set_state(state)

    @contextmanager
    def task(self, stage: int, microbatch: int) -> Iterator[None]:
        """Run a task inside, with streams of its own; afterwards the states are as before."""
        kept = {name: generator.get_state() for name, generator in self._defaults.items()}
        kept_named = _named_states()
        for name, seed in self._default_seeds.items():
            self._defaults[name].manual_seed(_task_seed(seed, name, stage, microbatch))
        streams = {}
        for name, seed in self._named_seeds.items():
            self._scratch.manual_seed(_task_seed(seed, name, stage, microbatch))
            streams[name] = self._scratch.get_state()
        _set_named_states(streams)
        try:
            yield
        finally:
            for name, state in kept.items():
                self._defaults[name].set_state(state)
            _set_named_states(kept_named)


def _named_states() -> dict[str, torch.Tensor]:
    states: dict[str, torch.Tensor] = get_cuda_rng_tracker().get_states()
    return states


def _set_named_states(states: dict[str, torch.Tensor]) -> None:
    # A tracker that is given states, even none, takes itself for initialized.
    if states:
        get_cuda_rng_tracker().set_states(states)


def _draw(generator: torch.Generator) -> int:
    drawn = torch.randint(2**62, (), generator=generator, device=generator.device)
    return int(drawn.item())


def _task_seed(seed: int, name: str, stage: int, microbatch: int) -> int:
    # By name, for Megatron starts several states from one seed.
    key = f"{seed} {name} {stage} {microbatch}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
