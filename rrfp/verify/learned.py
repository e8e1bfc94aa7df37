"""The files between the launcher and the ranks of a layout: what to train, and what each rank
learned."""

import json
from dataclasses import dataclass
from pathlib import Path

from rrfp.errors import RrfpError
from rrfp.trace.rundir import RunDir


@dataclass(frozen=True, slots=True)
class Learned:
    """What one rank learned in one run."""

    losses: list[float]
    grad_norms: list[float]
    parameters_sha256: str
    gradients_sha256: dict[str, str]
    """Of the first step, by the parameter's name in the whole model."""

    def difference(self, other: "Learned") -> str | None:
        """The first difference to `other`, in a few words; None if equal to the last bit."""
        for name, ours, theirs in (
            ("loss", self.losses, other.losses),
            ("gradient norm", self.grad_norms, other.grad_norms),
        ):
            for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                if a != b:
                    return f"{name} of step {step}: {b!r}, not {a!r}"
        for name, digest in self.gradients_sha256.items():
            if digest != other.gradients_sha256.get(name):
                return f"gradient of {name}"
        return None if self.parameters_sha256 == other.parameters_sha256 else "final parameters"


def variants_file(run: RunDir) -> Path:
    return run.path / "variants.jsonl"


def learned_file(run: RunDir, rank: int) -> Path:
    return run.path / f"learned-{rank}.jsonl"


def read_learned(run: RunDir, rank: int, num_variants: int) -> list[Learned]:
    lines = learned_file(run, rank).read_text(encoding="utf-8").splitlines()
    if len(lines) != num_variants:
        raise RrfpError(
            f"rank {rank} finished {len(lines)} of {num_variants} runs; see {run.rank_log(rank)}"
        )
    return [Learned(**json.loads(line)) for line in lines]
