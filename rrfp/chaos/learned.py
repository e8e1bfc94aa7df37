"""What a training has learned, and where two differ."""

from dataclasses import dataclass
from typing import Any

import torch

from rrfp.chaos.session import metric_lines
from rrfp.trace.rundir import RunDir
from rrfp.train.checkpoints.directory import LOCK, CheckpointDir
from rrfp.train.checkpoints.reading import differences, read_tensors

_FIGURES = ("step", "loss", "grad_norm", "heldout_loss", "tokens")
"""Those of the metrics that do not follow the time."""


@dataclass(frozen=True, slots=True)
class Learned:
    """The figures of every step, the parameters and the optimizer's state after the last one."""

    figures: list[dict[str, Any]]
    tensors: dict[str, torch.Tensor]
    unfinished: tuple[str, ...]
    """Files that a writer has left half-written."""

    def difference(self, other: "Learned") -> str:
        """Where this one differs from the other, to the last bit; empty if it does not."""
        if self.figures != other.figures:
            pairs = zip(self.figures, other.figures, strict=False)
            step = next((one["step"] for one, two in pairs if one != two), len(self.figures))
            return f"the training differs from the undisturbed one from step {step} on"
        names = differences(self.tensors, other.tensors)
        if names:
            return f"{len(names)} parameters differ from the undisturbed ones, as {names[0]}"
        return f"it left {self.unfinished[0]} half-written" if self.unfinished else ""


def learned(run: RunDir, checkpoints: CheckpointDir) -> Learned:
    """What a training that has ended has learned."""
    found = checkpoints.newest()
    assert found is not None
    lines = metric_lines(run)
    unfinished = [
        str(entry)
        for directory in (run.path, checkpoints.path)
        for entry in directory.iterdir()
        if entry.name.startswith(".") and entry.name != LOCK
    ]
    return Learned(
        [{name: line[name] for name in _FIGURES} for line in lines],
        read_tensors(found.path),
        tuple(unfinished),
    )
