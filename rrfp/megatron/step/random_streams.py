"""Random states per task, so that dropout does not depend on the order of tasks.

Every forward has its own **streams** for torch's default generators and for the named states of
Megatron's tracker, seeded by step, stage and microbatch. They are active while the model runs. Data
are always drawn under the training loop's random states, which thus advance as under Megatron's own
schedule (see `rrfp.megatron.step.microbatch_data`).

The seeds of a step are digests of the tracker's named states, which only the model uses. Each named
state advances by one draw per training step, so a checkpoint with these states resumes with the
same dropout masks. Streams of the default generators are seeded from the state `data-parallel-rng`.
Megatron seeds it like those generators, and it is equal on all ranks of a tensor-parallel group,
where the generators themselves may differ if one rank loads the data for all. If the loop never
seeded the tracker, the seed is a digest of the generator's own state, which advances by one draw
after each step in which a task drew from it.

All states and seeds are on the host, so this module never waits for a GPU.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from rrfp.megatron.adapters.global_state import (
    named_states,
    set_named_states,
    shared_state_name,
)

Generators = Mapping[str, torch.Generator]


class RandomStreams:
    """Creates the random streams of one rank's tasks."""

    def __init__(self, device: torch.device) -> None:
        """`device` is the model's."""
        self.device = device
        self._defaults = {"default": torch.default_generator}
        if device.type == "cuda":
            self._defaults["cuda default"] = torch.cuda.default_generators[device.index]
        self._scratch = torch.Generator(device)
        self._default_seeds: dict[str, int] = {}
        self._named_seeds: dict[str, int] = {}
        self._to_advance: set[str] = set()
        self._watches_draws = False

    def start_step(self, *, advances: bool = True) -> None:
        """Compute this step's seeds from Megatron's named states or, if these were never seeded,
        from the default generators' states. With `advances`, advance the named states. Evaluations
        do not, so that training does not depend on them."""
        self._named_seeds, states = _drawn_seeds(self._scratch)
        if advances:
            set_named_states(states)
        shared = self._named_seeds.get(shared_state_name())
        self._default_seeds = {
            name: _digest(generator.get_state()) if shared is None else shared
            for name, generator in self._defaults.items()
        }
        self._watches_draws = advances and shared is None
        self._to_advance.clear()

    def finish_step(self) -> None:
        """Advance, by one draw, the default generators that tasks drew from, if their own states
        seed the streams."""
        for name in self._to_advance:
            _advance(self._defaults[name])

    @contextmanager
    def task(self, stage: int, microbatch: int) -> Iterator["TaskStreams"]:
        """Create the streams of a task, which depend only on the step's seeds, stage and
        microbatch. The loop's states stay active until the task switches. After the block, note
        from which default generators it drew, for `finish_step`, if their states seed streams."""
        named = {}
        for name, seed in self._named_seeds.items():
            self._scratch.manual_seed(_task_seed(seed, name, stage, microbatch))
            named[name] = self._scratch.get_state()
        defaults = {}
        for name, seed in self._default_seeds.items():
            generator = torch.Generator(self._defaults[name].device)
            generator.manual_seed(_task_seed(seed, name, stage, microbatch))
            defaults[name] = generator.get_state()
        streams = TaskStreams(self._defaults, defaults, named)
        yield streams
        if self._watches_draws:
            self._to_advance |= streams.moved_from(defaults)


class TaskStreams:
    """The random streams of one task, which can be made active and inactive."""

    def __init__(
        self,
        generators: Generators,
        defaults: Mapping[str, torch.Tensor],
        named: Mapping[str, torch.Tensor],
    ) -> None:
        self._generators = generators
        # The inactive states: the task's, or the loop's while the task's are active.
        self._defaults = dict(defaults)
        self._named = dict(named)
        self._is_active = False

    def active(self) -> AbstractContextManager[None]:
        """Draw from the task's streams in the block; they continue from their last use."""
        return self._switched(is_active=True)

    def inactive(self) -> AbstractContextManager[None]:
        """Draw from the training loop's random states in the block."""
        return self._switched(is_active=False)

    @contextmanager
    def active_in_calls_of(self, model: Any) -> Iterator[None]:
        """Draw from the task's streams during each call of the model, or of a module it wraps. Uses
        forward hooks, which are removed after the block."""
        calls: list[ExitStack] = []

        def enter(*_: object) -> None:
            calls.append(ExitStack())
            calls[-1].enter_context(self.active())

        def leave(*_: object) -> None:
            calls.pop().close()

        with ExitStack() as hooks:
            while isinstance(model, torch.nn.Module):
                # The outermost hooks, so that a user's hooks draw from the same streams as the
                # model.
                for handle in (
                    model.register_forward_pre_hook(enter, prepend=True),
                    model.register_forward_hook(leave, always_call=True),
                ):
                    hooks.callback(handle.remove)
                model = getattr(model, "module", None)
            try:
                yield
            finally:
                while calls:
                    leave()

    def moved_from(self, defaults: Mapping[str, torch.Tensor]) -> set[str]:
        """The names of the default streams whose states differ from these. Call it while the task's
        streams are inactive."""
        return {name for name, state in defaults.items() if not state.equal(self._defaults[name])}

    @contextmanager
    def _switched(self, *, is_active: bool) -> Iterator[None]:
        """Make the task's streams active or inactive in the block, and switch back after it. Do
        nothing if they are so already."""
        if self._is_active == is_active:
            yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        """Exchange the stored states with those of the generators and of Megatron's tracker."""
        for name, generator in self._generators.items():
            state = generator.get_state()
            generator.set_state(self._defaults[name])
            self._defaults[name] = state
        named = named_states()
        set_named_states(self._named)
        self._named = named
        self._is_active = not self._is_active


def advance_named_states(num_steps: int, device: torch.device) -> None:
    """Advance Megatron's named states on this device as `num_steps` training steps do."""
    scratch = torch.Generator(device)
    for _ in range(num_steps):
        _, states = _drawn_seeds(scratch)
        set_named_states(states)


def _drawn_seeds(scratch: torch.Generator) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """Return the seed of a step from each named state, and the states advanced by one draw.
    Megatron's tracker does not change."""
    seeds, states = {}, {}
    for name, state in named_states().items():
        seeds[name] = _digest(state)
        scratch.set_state(state)
        _advance(scratch)
        states[name] = scratch.get_state()
    return seeds, states


def _advance(generator: torch.Generator) -> None:
    """Draw one number to advance the generator, without waiting for a GPU."""
    torch.randint(2**62, (), generator=generator, device=generator.device)


def _digest(state: torch.Tensor) -> int:
    """A seed of 64 bits from the state of a generator."""
    return _hashed(state.numpy().tobytes())


def _task_seed(seed: int, name: str, stage: int, microbatch: int) -> int:
    """The seed of a task's stream, hashed from the step's seed, the stream's name, stage and
    microbatch. The name is included because Megatron seeds several states alike."""
    return _hashed(f"{seed} {name} {stage} {microbatch}".encode())


def _hashed(key: bytes) -> int:
    """The 64-bit BLAKE2b hash of a key, as an integer."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
