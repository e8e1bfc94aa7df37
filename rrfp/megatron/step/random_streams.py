"""Random states by task, so that dropout does not depend on the order in which tasks run.

Every forward has its own **streams** for torch's default generators and for the named states of
Megatron's tracker, seeded by the step, the stage and the microbatch. They are active while the
model runs. Data are always drawn under the **caller's** random states, which thus advance as under
Megatron's own schedule; `rrfp.megatron.step.microbatch_data` says what else uses those.

A step's seeds are digests of the tracker's named states, which belong to the model alone. Each
advances by one draw per training step, so a checkpoint that saves them resumes with the same masks.
Streams of the default generators are seeded from the state `data-parallel-rng`, which Megatron
seeds like those generators, and which is equal on all ranks of a tensor-parallel group. The
generators themselves may differ there, if one rank loads the data for all. If a loop never seeded
the tracker, a seed is a digest of the generator's own state, which advances by one draw after a
step in which a task drew from it.

A GPU's states lie on the host, as do all seeds: nothing here waits for a GPU.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from rrfp.megatron.adapters.global_state import (
    named_states,
    set_named_states,
    shared_state_name,
)

Generators = Mapping[str, torch.Generator]


class RandomStreams:
    """The random streams of one rank's tasks."""

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
        """Choose this step's seeds. An evaluation does not advance any state, so that training does
        not depend on it."""
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
        """Advance the default generators whose streams are seeded by their own states."""
        for name in self._to_advance:
            _advance(self._defaults[name])

    @contextmanager
    def task(self, stage: int, microbatch: int) -> Iterator["TaskStreams"]:
        """The streams of a task; the caller's states stay active until the task switches."""
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
    """The random streams of one task, which it can switch in and out."""

    def __init__(
        self,
        generators: Generators,
        defaults: Mapping[str, torch.Tensor],
        named: Mapping[str, torch.Tensor],
    ) -> None:
        self._generators = generators
        # The states that are not active: the task's or the caller's.
        self._defaults = dict(defaults)
        self._named = dict(named)
        self._is_in_force = False

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Draw from the task's streams, which continue where they were left."""
        with self._switched(is_in_force=True):
            yield

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Draw from the caller's random states."""
        with self._switched(is_in_force=False):
            yield

    @contextmanager
    def active_in_calls_of(self, model: Any) -> Iterator[None]:
        """Draw from the task's streams whenever the model, or a module it wraps, is called."""
        calls: list[ExitStack] = []

        def enter(*_: object) -> None:
            calls.append(ExitStack())
            calls[-1].enter_context(self.inside())

        def leave(*_: object) -> None:
            calls.pop().close()

        with ExitStack() as hooks:
            while isinstance(model, torch.nn.Module):
                # Outermost, so that a user's own hooks draw from the same streams as the model.
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
        """The default streams that are no longer in these states; call while they are inactive."""
        return {name for name, state in defaults.items() if not state.equal(self._defaults[name])}

    @contextmanager
    def _switched(self, *, is_in_force: bool) -> Iterator[None]:
        if self._is_in_force == is_in_force:
            yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, generator in self._generators.items():
            state = generator.get_state()
            generator.set_state(self._defaults[name])
            self._defaults[name] = state
        named = named_states()
        set_named_states(self._named)
        self._named = named
        self._is_in_force = not self._is_in_force


def advance_named_states(num_steps: int, device: torch.device) -> None:
    """Advance Megatron's named states on this device as so many training steps do."""
    scratch = torch.Generator(device)
    for _ in range(num_steps):
        _, states = _drawn_seeds(scratch)
        set_named_states(states)


def _drawn_seeds(scratch: torch.Generator) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """A step's seed from each named state, and the states one draw later."""
    seeds, states = {}, {}
    for name, state in named_states().items():
        seeds[name] = _digest(state)
        scratch.set_state(state)
        _advance(scratch)
        states[name] = scratch.get_state()
    return seeds, states


def _advance(generator: torch.Generator) -> None:
    """Draw once. What a GPU draws nobody waits for."""
    torch.randint(2**62, (), generator=generator, device=generator.device)


def _digest(state: torch.Tensor) -> int:
    return _hashed(state.numpy().tobytes())


def _task_seed(seed: int, name: str, stage: int, microbatch: int) -> int:
    # Includes the name, because Megatron starts several states from one seed.
    return _hashed(f"{seed} {name} {stage} {microbatch}".encode())


def _hashed(key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
