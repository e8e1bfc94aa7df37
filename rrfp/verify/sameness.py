"""The check of `rrfp verify`: the order of tasks does not change the result of training.

Each layout is one launch. Its ranks train a small model repeatedly from the same initial state:
with the reference, then with every hint and agreement rule that the layout supports. Random delays
before each task and each message give every run its own timing. Losses, gradient norms and final
parameters must be bit-identical to the reference's on every rank.

The reference is Megatron's own schedule. Two cases have another one: ranks that share a GPU, where
Megatron's transfers do not work, use its order as a fixed order; the V placement, which Megatron
lacks, uses `zb-v` as a fixed order. Megatron draws dropout in its own order of execution, so runs
with dropout are compared with the first rrfp run with dropout.
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

# Files between the launcher and the ranks of a layout: the variants to train, and the results.


@dataclass(frozen=True, slots=True)
class RankResult:
    """The result of one run on one rank."""

    losses: list[float]
    grad_norms: list[float]
    parameters_sha256: str
    gradients_sha256: dict[str, str]
    """Digests of the first step's gradients, by the parameter's name in the whole model."""

    def difference(self, other: "RankResult") -> str | None:
        """Describe the first difference from `other`: a loss, a gradient norm, a gradient of the
        first step or the final parameters. None if the results are bit-identical; all NaNs count as
        one value."""
        for name, ours, theirs in (
            ("loss", self.losses, other.losses),
            ("gradient norm", self.grad_norms, other.grad_norms),
        ):
            for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                if repr(a) != repr(b):  # Unlike with !=, 0.0 is not -0.0, and NaN is NaN.
                    return f"{name} of step {step}: {b!r}, not {a!r}"
        for name, digest in self.gradients_sha256.items():
            if digest != other.gradients_sha256.get(name):
                return f"gradient of {name}"
        return None if self.parameters_sha256 == other.parameters_sha256 else "final parameters"


def variants_file(run: RunDir) -> Path:
    """The file with the settings of the variants to train, one JSON per line."""
    return run.path / "variants.jsonl"


def learned_file(run: RunDir, rank: int) -> Path:
    """The file with the results of a rank, one JSON per variant and line."""
    return run.path / f"learned-{rank}.jsonl"


def read_learned(run: RunDir, rank: int, num_variants: int) -> list[RankResult]:
    """Read a rank's results, one per variant. Raise RrfpError, naming the rank's log, if their
    number is another."""
    lines = learned_file(run, rank).read_text(encoding="utf-8").splitlines()
    if len(lines) != num_variants:
        raise RrfpError(
            f"rank {rank} finished {len(lines)} of {num_variants} runs; see {run.rank_log(rank)}"
        )
    return [RankResult(**json.loads(line)) for line in lines]


# The runs to compare, by layout.


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
"""The `TrainSettings` of each layout, by its name."""

RANDOM = "random"
"""Name of a hint that shuffles each rank's tasks, including weight gradients."""

CHOICES = (*HINTS, RANDOM)
"""Values of `--hint`."""

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
    """One run of a layout: its policy and dropout."""

    hint: str
    """A hint's name, or `RANDOM`."""
    dispatch: Dispatch
    agreement: AgreementRule | None
    """None if no ranks share a collective inside a task."""
    dropout: float = 0.0
    bound: str = ""
    """Memory bound such as `limit 1` or `hold 2`; empty for the default."""

    @property
    def name(self) -> str:
        """The dispatch and the hint, such as `ready bf`. The agreement rule, dropout and bound are
        left out."""
        return f"{self.dispatch} {self.hint}"

    @property
    def settings(self) -> dict[str, Any]:
        """The `TrainSettings` of the variant; without `hint` if that is `RANDOM`, and without
        agreement rule and bound if it has none."""
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
    """All valid combinations of these hints and agreement rules on a layout, without and with
    dropout; one with dropout alone is left out. The first is the reference: Megatron's own
    schedule, or a fixed order with the V placement or `shares_gpu`. `full` adds fixed orders and
    tight memory bounds, without dropout.

    Raise UsageError for an unknown layout or hint.
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
    # A single variant with dropout would have nothing to compare with.
    return [reference, *ours, *(with_dropout if len(with_dropout) > 1 else ())]


def layout_settings(layout: str, others: Mapping[str, Any]) -> TrainSettings:
    """The settings of a small run on this layout, with `others` added."""
    return TrainSettings(**SMALL, **LAYOUTS[layout], **others)


def _reference(layout: str) -> Variant:
    """The variant that all others without dropout are compared with: Megatron's own schedule (1F1B,
    or interleaved with several chunks) or, with the V placement, `zb-v` as a fixed order."""
    if LAYOUTS[layout].get("placement") == Placement.V:
        return Variant("zb-v", Dispatch.FIXED, None)
    hint = "interleaved" if "chunks" in LAYOUTS[layout] else "1f1b"
    return Variant(hint, Dispatch.MEGATRON, None)


def _variants_of_hint(layout: str, hint: str, *, full: bool) -> Iterator[Variant]:
    """Yield the variants of a hint, without dropout: one per agreement rule if ranks share
    collectives, else one. `full` adds tight memory bounds and, unless the hint is random, a fixed
    order."""
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
    """True if `rrfp train` accepts the variant's settings and the hint supports the layout's
    shape."""
    try:
        settings = layout_settings(layout, variant.settings)
        check_settings(settings)
        settings.hint.for_shape(settings.shape)
    except UsageError:
        return False
    return True


RANK_MODULE = "rrfp.verify.rank"
"""The module that each rank runs."""

_SEED = 1234


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of a variant with its reference."""

    layout: str
    variant: Variant
    reference: Variant
    difference: str | None
    """The first difference; None if all ranks' results are bit-identical."""


def verify(
    layout: str,
    variants: list[Variant],
    directory: Path,
    *,
    steps: int,
    launch: Callable[[TrainSettings, RunDir], None],
    device: Mapping[str, Any],
) -> list[Verdict]:
    """Train all variants on the layout in one launch and compare them with their reference.

    Files go to `directory`. `launch` runs the ranks to their end (`rrfp.train.launch.launcher`);
    `device` has the settings of the device. Raises RrfpError if a rank fails.
    """
    base = layout_settings(layout, device).changed(steps=steps, seed=_SEED)
    random_order = OrderFile(RANDOM, format_order(_random_order(base.shape)))
    # A variant's settings contain no hint only if its hint is the random one.
    chosen = [base.changed(**{"hint": random_order, **variant.settings}) for variant in variants]
    return list(_verdicts(layout, variants, learn(base, chosen, directory, launch)))


def learn(
    base: TrainSettings,
    chosen: Sequence[TrainSettings],
    directory: Path,
    launch: Callable[[TrainSettings, RunDir], None],
) -> list[list[RankResult]]:
    """Train the chosen settings, which share the layout of `base`, in one launch, after writing
    them to a file for the ranks. Return the results by rank, then by settings. Raise RrfpError if a
    rank fails."""
    run = RunDir(directory)
    lines = "".join(f"{settings.to_json()}\n" for settings in chosen)
    write_whole(variants_file(run), lines.encode())
    launch(base, run)
    return [read_learned(run, rank, len(chosen)) for rank in range(base.layout.world_size)]


def _random_order(shape: Shape) -> Order:
    """An order with each rank's tasks shuffled, backward split. The same in every run, from a
    constant seed."""
    shape = replace(shape, kinds=SPLIT_BACKWARD)
    rows = []
    for rank in range(shape.num_ranks):
        row = list(shape.tasks_of(rank))
        random.Random(f"{_SEED} {rank}").shuffle(row)
        rows.append(tuple(row))
    return Order(RANDOM, shape, tuple(rows))


def _verdicts(
    layout: str, variants: list[Variant], learned: list[list[RankResult]]
) -> Iterator[Verdict]:
    """Compare each variant with the first one of equal dropout, on every rank, and yield a verdict;
    none for these references themselves. `learned` is by rank, then by variant."""
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
