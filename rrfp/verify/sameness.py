"""The check of `rrfp verify`: the order of tasks does not change what a model learns.

Each layout is one launch. Its ranks train a small model again and again from the same start: with
the reference, then under every hint that the layout supports and every rule of agreement. Random
delays before each task and each message give every run its own timing. Losses, gradient norms and
final parameters must equal the reference's on every rank, to the last bit.

The reference is Megatron's own schedule; where ranks share a GPU, over which its transfers do not
go, its order as a fixed one; and for the V, which Megatron lacks, `zb-v` as a fixed order. Megatron
draws dropout in its own order of execution, so with dropout our runs are compared among themselves,
with the first one as the reference.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rrfp.errors import RrfpError, UsageError
from rrfp.schedule.hints import Order, OrderFile, format_order
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import AgreementRule, Dispatch
from rrfp.schedule.shape import SPLIT_BACKWARD, Placement, Shape
from rrfp.trace.run_dir import RunDir
from rrfp.trace.safe_files import write_whole
from rrfp.train.checks import check_settings
from rrfp.train.settings import TrainSettings

# The files between the launcher and the ranks of a layout: what to train, and what each rank
# learned.


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


# The runs that `rrfp verify` compares, layout by layout.


LAYOUTS: dict[str, dict[str, Any]] = {
    "pp4": {"pp": 4},
    "pp2-tp2-sp": {"pp": 2, "tp": 2, "sequence_parallel": True},
    "pp4-c2-loop": {"pp": 4, "chunks": 2},
    "pp2-c2-v": {"pp": 2, "chunks": 2, "placement": Placement.V},
    "pp2-dp2-distopt": {"pp": 2, "dp": 2, "distributed_optimizer": True},
    "moe-pp2-ep2": {"model": "moe", "pp": 2, "dp": 2, "ep": 2},
    "vlm-pp4": {"model": "vlm", "pp": 4},
    "vlm-pp2-c2-v": {"model": "vlm", "pp": 2, "chunks": 2, "placement": Placement.V},
}
"""By name of a layout: the `TrainSettings` that it sets."""

RANDOM = "random"
"""The hint that puts each rank's tasks, weight gradients included, in a random order."""

CHOICES = (*HINTS, RANDOM)
"""What `--hint` takes."""

SMALL: dict[str, Any] = {
    "microbatches": 8,
    "seq_length": 32,
    "layers": 8,
    "hidden": 32,
    "heads": 4,
    "no_trace": True,
}
_DROPOUT = 0.1


@dataclass(frozen=True, slots=True)
class Variant:
    """One run of a layout: its policy, and whether it has dropout."""

    hint: str
    """A hint's name, or `RANDOM`."""
    dispatch: Dispatch
    agreement: AgreementRule | None
    """None if no ranks share a collective inside a task."""
    dropout: float = 0.0
    bound: str = ""
    """The bound on memory unless it is the default: `limit 1`, `hold 2`."""

    @property
    def name(self) -> str:
        return f"{self.dispatch} {self.hint}"

    @property
    def settings(self) -> dict[str, Any]:
        """The `TrainSettings` that it sets, except a random hint."""
        chosen: dict[str, Any] = {"dispatch": self.dispatch, "dropout": self.dropout}
        if self.hint != RANDOM:
            chosen["hint"] = self.hint
        if self.agreement is not None:
            chosen["agreement"] = self.agreement
        if self.bound:
            name, number = self.bound.split()
            chosen[name] = int(number)
        return chosen


def variants_of(
    layout: str, hints: tuple[str, ...] = CHOICES, *, full: bool = False, shares_gpu: bool = False
) -> list[Variant]:
    """Every valid combination of hint and agreement on a layout, without and with dropout; the
    first is the reference: Megatron's own schedule, or the same order of ours where ranks share a
    GPU, over which Megatron's transfers do not go. `full` adds binding orders and tight bounds on
    memory.

    Raises UsageError for an unknown layout or hint.
    """
    if layout not in LAYOUTS:
        raise UsageError(f"'{layout}' is not a layout ({', '.join(LAYOUTS)})")
    for hint in hints:
        if hint not in CHOICES:
            raise UsageError(f"'{hint}' is not a hint ({', '.join(CHOICES)})")
    reference = _reference(layout)
    if shares_gpu:
        reference = replace(reference, dispatch=Dispatch.FIXED)
    ours = [
        variant
        for hint in dict.fromkeys(hints)
        for variant in _variants_of_hint(layout, hint, full=full)
        if _is_valid(layout, variant)
    ]
    with_dropout = [
        replace(variant, dropout=_DROPOUT)
        for variant in ours
        if variant.dispatch is Dispatch.READY and not variant.bound
    ]
    # A single variant has nothing to be compared with.
    return [reference, *ours, *(with_dropout if len(with_dropout) > 1 else ())]


def layout_settings(layout: str, others: Mapping[str, Any]) -> TrainSettings:
    """The settings of a small run on this layout, with others."""
    return TrainSettings(**SMALL, **LAYOUTS[layout], **others)


def _reference(layout: str) -> Variant:
    if LAYOUTS[layout].get("placement") == Placement.V:
        return Variant("zb-v", Dispatch.FIXED, None)
    hint = "interleaved" if "chunks" in LAYOUTS[layout] else "1f1b"
    return Variant(hint, Dispatch.MEGATRON, None)


def _variants_of_hint(layout: str, hint: str, *, full: bool) -> Iterator[Variant]:
    shares_collectives = {"tp", "cp", "ep"} & LAYOUTS[layout].keys()
    rules: tuple[AgreementRule | None, ...] = (
        tuple(AgreementRule) if shares_collectives else (None,)
    )
    for rule in rules:
        yield Variant(hint, Dispatch.READY, rule)
        if full:
            yield Variant(hint, Dispatch.READY, rule, bound="limit 1")
            yield Variant(hint, Dispatch.READY, rule, bound="hold 1")
            yield Variant(hint, Dispatch.READY, rule, bound="hold 3")
    if full and hint != RANDOM:
        yield Variant(hint, Dispatch.FIXED, None)


def _is_valid(layout: str, variant: Variant) -> bool:
    try:
        settings = layout_settings(layout, variant.settings)
        check_settings(settings)
        settings.hint.for_shape(settings.shape)
    except UsageError:
        return False
    return True


RANK_MODULE = "rrfp.verify.rank"
"""The module with each rank's work."""

_SEED = 1234


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of a variant with its reference."""

    layout: str
    variant: Variant
    reference: Variant
    difference: str | None
    """None: equal to the last bit on every rank."""


def verify(
    layout: str,
    variants: list[Variant],
    directory: Path,
    *,
    steps: int,
    launch: Callable[[TrainSettings, RunDir], None],
    device: Mapping[str, Any],
) -> list[Verdict]:
    """Train every variant on the layout in one launch of its ranks, in `directory`, and compare.

    `launch` runs the ranks to their end (`rrfp.train.launch.launcher`), and `device` has the
    settings of where. Raises RrfpError if a rank fails.
    """
    base = layout_settings(layout, device).changed(steps=steps, seed=_SEED)
    random_order = OrderFile(RANDOM, format_order(_random_order(base.shape)))
    # A variant's own hint, if it has one, overrides the random one.
    chosen = [base.changed(**{"hint": random_order, **variant.settings}) for variant in variants]
    return list(_verdicts(layout, variants, learn(base, chosen, directory, launch)))


def learn(
    base: TrainSettings,
    chosen: Sequence[TrainSettings],
    directory: Path,
    launch: Callable[[TrainSettings, RunDir], None],
) -> list[list[Learned]]:
    """What each rank of `base` learns, by rank, under each of the chosen settings, which have its
    layout; in one launch. Raises RrfpError if a rank fails."""
    run = RunDir(directory)
    lines = "".join(f"{settings.to_json()}\n" for settings in chosen)
    write_whole(variants_file(run), lines.encode())
    launch(base, run)
    return [read_learned(run, rank, len(chosen)) for rank in range(base.layout.world_size)]


def _random_order(shape: Shape) -> Order:
    shape = replace(shape, kinds=SPLIT_BACKWARD)
    rows = []
    for rank in range(shape.num_ranks):
        row = list(shape.tasks_of(rank))
        random.Random(f"{_SEED} {rank}").shuffle(row)
        rows.append(tuple(row))
    return Order(RANDOM, shape, tuple(rows))


def _verdicts(
    layout: str, variants: list[Variant], learned: list[list[Learned]]
) -> Iterator[Verdict]:
    references: dict[float, int] = {}
    for index, variant in enumerate(variants):
        reference = references.setdefault(variant.dropout, index)
        if reference == index:
            continue
        differences = (
            by_variant[reference].difference(by_variant[index]) for by_variant in learned
        )
        found = (
            f"rank {rank}, {difference}"
            for rank, difference in enumerate(differences)
            if difference is not None
        )
        yield Verdict(layout, variant, variants[reference], next(found, None))
