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

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rrfp.inputs.hint_files import OrderFile
from rrfp.schedule.order import Order, format_order
from rrfp.schedule.shape import SPLIT_BACKWARD, Shape
from rrfp.trace.files.whole_file import write_whole
from rrfp.trace.rundir import RunDir
from rrfp.train.settings import TrainSettings
from rrfp.verify.learned import Learned, read_learned, variants_file
from rrfp.verify.variants import RANDOM, Variant, layout_settings

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

    `launch` runs the ranks to their end (`rrfp.train.ranks.launch`), and `device` has the settings
    of where. Raises RrfpError if a rank fails.
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
