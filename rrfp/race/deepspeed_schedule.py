"""DeepSpeed's pipeline engine, which runs 1F1B with blocking transfers.

The engine's gradient reduction and optimizer step are skipped: gradients are in Megatron's buffers
and are reduced there, as for every other system.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

# Before the import, which chooses the device.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe import schedule as instructions

from rrfp.race.peer_schedules import ChunkModule, PeerSchedule, Tally
from rrfp.schedule.tasks import Kind, Task
from rrfp.train.data.batches import Batch

Wrap = Callable[[], AbstractContextManager[None]]
"""Makes the context in which the next instruction of a kind runs."""


class DeepSpeedSchedule(PeerSchedule):
    """Runs one rank's steps with DeepSpeed's `PipelineEngine`."""

    _engine: Any = None
    _built_for: tuple[int, tuple[int, ...]] | None = None

    def prepare(self, num_microbatches: int, batch_shape: tuple[int, ...]) -> None:
        """Build DeepSpeed's engine for steps of this size, unless the last one was built for it.
        Also initializes DeepSpeed's communication, over torch's process groups."""
        if self._built_for == (num_microbatches, batch_shape):
            return
        (stage,) = self.layout.stages
        (chunk,) = self.model.chunks
        num_stages = self.layout.pp
        self._stage = _Stage(ChunkModule(chunk, self.model, is_last=stage == num_stages - 1))
        layers: list[torch.nn.Module] = [torch.nn.Identity() for _ in range(num_stages)]
        layers[stage] = self._stage
        # DeepSpeed uses the existing groups of torch.distributed.
        deepspeed.init_distributed(auto_mpi_discovery=False)
        module = PipelineModule(
            layers,
            num_stages=num_stages,
            # Megatron has already divided the loss; this cancels DeepSpeed's own division.
            loss_fn=lambda loss, _: loss * num_microbatches,
            partition_method="uniform",
        )
        self._engine, *_ = deepspeed.initialize(
            model=module,
            # The optimizer never steps, but the engine's backward requires one.
            optimizer=torch.optim.SGD(chunk.parameters(), lr=0.0),
            config={
                "train_micro_batch_size_per_gpu": batch_shape[0],
                "gradient_accumulation_steps": num_microbatches,
                "steps_per_print": None,
            },
        )
        self._built_for = num_microbatches, batch_shape

    def run_tasks(self, batches: Sequence[Batch], tally: Tally) -> list[Any]:
        """Run a step of DeepSpeed's engine, with paced and recorded instructions. Returns the
        losses as `PeerSchedule.run_tasks` does."""
        self._stage.begin(batches)
        engine = self._engine
        engine._INSTRUCTION_MAP = self._instructions(tally)
        engine.train_batch((index, index) for index in torch.arange(len(batches)))
        return self._stage.losses()

    def close(self) -> None:
        """Do nothing: DeepSpeed's transfers block, so none is in flight."""

    def _instructions(self, tally: Tally) -> dict[type, Callable[..., None]]:
        """Return DeepSpeed's instructions, paced and recorded for this step. Its gradient reduction
        and optimizer step do nothing."""
        (stage,) = self.layout.stages
        originals = type(self._engine)._INSTRUCTION_MAP
        wraps: dict[type, Wrap] = {
            instructions.ForwardPass: _wrap_next(tally.task, _tasks(stage, Kind.F)),
            instructions.BackwardPass: _wrap_next(tally.task, _tasks(stage, Kind.B)),
            # A message is identified by the task that receives it.
            instructions.RecvActivation: _wrap_next(tally.blocking, _tasks(stage, Kind.F)),
            instructions.SendActivation: _wrap_next(tally.blocking, _tasks(stage + 1, Kind.F)),
            instructions.RecvGrad: _wrap_next(tally.blocking, _tasks(stage, Kind.B)),
            instructions.SendGrad: _wrap_next(tally.blocking, _tasks(stage - 1, Kind.B)),
        }
        left_out = dict.fromkeys(
            (instructions.ReduceGrads, instructions.ReduceTiedGrads, instructions.OptimizerStep),
            lambda _: None,
        )
        wrapped = {kind: _wrapped(originals[kind], wrap) for kind, wrap in wraps.items()}
        return {**originals, **wrapped, **left_out}


def _tasks(stage: int, kind: Kind) -> Iterator[Task]:
    """Yield a stage's tasks of a kind in 1F1B's order, by microbatch, without end."""
    return (Task(stage, kind, microbatch) for microbatch in count())


def _wrap_next(wrap: Callable[[Task], AbstractContextManager[None]], tasks: Iterator[Task]) -> Wrap:
    """Return a function that makes `wrap`'s context for the next one of the tasks."""
    return lambda: wrap(next(tasks))


def _wrapped(execute: Callable[..., None], wrap: Wrap) -> Callable[..., None]:
    """Return an instruction's function that calls `execute` in the context of `wrap`."""

    def wrapped(engine: Any, **of_instruction: Any) -> None:
        with wrap():
            execute(engine, **of_instruction)

    return wrapped


class _Stage(torch.nn.Module):
    """A stage as DeepSpeed calls it: with the activation alone, in order of the microbatches."""

    def __init__(self, module: ChunkModule) -> None:
        super().__init__()
        self._module = module

    def begin(self, batches: Sequence[Batch]) -> None:
        """Set the microbatches of the next step, and begin with the first one."""
        self._module.begin(batches)
        self._indices = iter(torch.arange(len(batches)))

    def losses(self) -> list[Any]:
        """The loss function's results of this step, in microbatch order."""
        return self._module.losses()

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        """Run the next microbatch. The first stage gets the microbatch's number instead of an
        activation, and reads the microbatch from its data."""
        inputs = (activation,) if activation.is_floating_point() else ()
        output: torch.Tensor = self._module(*inputs, microbatch=next(self._indices))
        return output
