"""`--hint auto` against orders that bind, at the same bytes: `python -m benchmarks.run_auto`.

200 cells, drawn from all of ranks x microbatches x profiles x budgets. In each, a run of two chunks
in a V is given `--hint auto` and a hold in bytes. Its peers are 1F1B (one chunk), interleaved 1F1B
(two chunks in a loop) and ZBV (two in a V), each in its own shape, its order binding, with messages
beside the work as ours. A peer takes part in a cell if it keeps to the same bytes in all of its
steps. The choice is made from steps under other seeds than those that are compared. Of these there
are 20, and in a cell where luck decides more, up to 200: until the standard error of the gain over
the best peer is at most a quarter of a percent, or of the gain's distance from 1.
"""

import argparse
import os
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from math import sqrt
from statistics import fmean, geometric_mean, stdev

from rrfp.errors import UsageError
from rrfp.planning.candidates import describe_choice
from rrfp.planning.trials import Row, Setting, run_settings, with_budget, with_choice
from rrfp.schedule.named_hints import AUTO, HINTS
from rrfp.schedule.policy import Dispatch, Policy, ShareOf1F1B
from rrfp.schedule.rehearsal import fitted
from rrfp.schedule.shape import Placement, Shape
from rrfp.simulate.costs.model import Costs, Links, StepCosts
from rrfp.simulate.costs.toml_files import preset
from rrfp.simulate.jitter import parse_jitter

RANKS = (2, 4, 8, 12, 16)
MICROBATCHES = (4, 8, 16, 32, 64)
PROFILES = {
    "uniform": ("uniform", "none"),
    "language": ("language", "lognormal:0.1"),
    "multimodal": ("multimodal", "lognormal:0.1"),
    "slow stage": ("uniform", "slow-stage:1:1.3+lognormal:0.5"),
}
"""Costs and jitter."""
HOP_NS = 500_000
"""A message takes this long; a rank's F, B and W take 20 ms each."""
BUDGETS = ("1", "1.5", "2")
"""Multiples of the most bytes that 1F1B keeps in the steps of the cell."""
NUM_CELLS = 200
SEEDS = range(1234, 1434)
AT_ONCE = 20
"""Seeds that are played before the error is looked at, and again."""
LARGEST_ERROR = 0.0025
CLEAR = 4
"""Errors from 1: so far off a gain needs no closer look."""

LOOP, V = Placement.LOOP, Placement.V
PEERS = (("1f1b", 1, LOOP), ("interleaved", 2, LOOP), ("zb-v", 2, V))


@dataclass(frozen=True)
class WithHops:
    """A `Costs`: others, over links that take time."""

    costs: Costs

    def step(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        return replace(self.costs.step(shape, seed, replica), links=Links(latency_ns=HOP_NS))


@dataclass(frozen=True)
class Cell:
    ranks: int
    microbatches: int
    profile: str
    budget: str

    def setting(self, hint: str, chunks: int, placement: Placement) -> Setting:
        """A peer's; raises UsageError for a shape that it does not fit."""
        shape = Shape(self.ranks, self.microbatches, chunks, placement)
        policy, shape = fitted(Policy(HINTS[hint], None, Dispatch.FIXED), shape)
        costs, jitter = PROFILES[self.profile]
        return Setting(
            shape=shape,
            policy=policy,
            costs=WithHops(preset(costs)),
            jitter=parse_jitter(jitter),
        )


@dataclass(frozen=True)
class Outcome:
    cell: Cell
    chosen: str
    over_load: float
    best: str
    """The best peer within the same bytes."""
    gain: float
    """How many times as long that takes."""
    error: float
    """The standard error of the gain."""
    num_steps: int


def run_cell(cell: Cell) -> Outcome:
    own = replace(
        cell.setting("zb-v", 2, V), policy=Policy(AUTO, hold=ShareOf1F1B(Fraction(cell.budget)))
    )
    own = with_choice(with_budget(own, SEEDS), SEEDS)
    bounding = own.policy if own.unbound is None else own.unbound
    num_bytes = bounding.hold_bytes
    assert num_bytes is not None
    settings = {"auto": own}
    for hint, chunks, placement in PEERS:
        with suppress(UsageError):  # interleaved: microbatches in whole rounds
            settings[hint] = cell.setting(hint, chunks, placement)
    rows: dict[str, Row] = {}
    for first in range(0, len(SEEDS), AT_ONCE):
        seeds = SEEDS[first : first + AT_ONCE]
        played = run_settings([*settings.values()], seeds)
        for name, row in zip([*settings], played, strict=True):
            if name in rows:
                row = Row(rows[name].trials + row.trials, row.num_chunks)
            rows[name] = row
            if _most(row) > num_bytes:
                assert name != "auto", "a choice exceeds its memory"
                del settings[name], rows[name]
        auto = rows["auto"]
        best = min(rows.keys() - {"auto"}, key=lambda name: rows[name].mean_s)
        error = _error(auto, rows[best])
        gain = rows[best].mean_s / auto.mean_s
        if error <= max(LARGEST_ERROR, abs(gain - 1) / CLEAR):
            break
    num_steps = len(auto.trials)
    return Outcome(
        cell, describe_choice(own.policy), auto.ratio_to_load, best, gain, error, num_steps
    )


def _error(auto: Row, peer: Row) -> float:
    """The standard error of the peer's mean over that of `auto`, whose steps are the same."""
    gain = peer.mean_s / auto.mean_s
    rests = [p - gain * a for p, a in zip(peer.makespans_s, auto.makespans_s, strict=True)]
    return stdev(rests) / sqrt(len(rests)) / auto.mean_s


def _most(row: Row) -> int:
    assert row.peak_held_bytes is not None
    return max(row.peak_held_bytes)


def cells(num: int) -> Sequence[Cell]:
    every = [Cell(*each) for each in product(RANKS, MICROBATCHES, PROFILES, BUDGETS)]
    return random.Random(20).sample(every, num)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=NUM_CELLS)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    given = parser.parse_args()
    outcomes = []
    with ProcessPoolExecutor(given.processes) as pool:
        for outcome in pool.map(run_cell, cells(given.cells)):
            outcomes.append(outcome)
            print(_format_outcome(outcome), flush=True)
    gains = [each.gain for each in outcomes]
    worst = min(outcomes, key=lambda each: each.gain)
    print(f"\n{len(outcomes)} cells, against the best peer of each:")
    print(f"mean gain {fmean(gains):.3f}x, geometric {geometric_mean(gains):.3f}x")
    print(f"slower than the best peer in {sum(gain < 1 for gain in gains)} cells, by more than 1% ")
    print(f"in {sum(gain < 0.99 for gain in gains)}; worst cell: {_format_outcome(worst)}")
    for profile in PROFILES:
        of_profile = [each.gain for each in outcomes if each.cell.profile == profile]
        if of_profile:
            print(f"{profile:<12} {fmean(of_profile):.3f}x, worst {min(of_profile):.3f}x")


def _format_outcome(outcome: Outcome) -> str:
    cell = outcome.cell
    return (
        f"{cell.ranks:>2} x {cell.microbatches:<2} {cell.profile:<10} {cell.budget:>3}x  "
        f"{outcome.chosen:<26} {outcome.over_load:.3f} over load  "
        f"{outcome.gain:.3f}x of {outcome.best} (+-{outcome.error:.3f}, {outcome.num_steps} steps)"
    )


if __name__ == "__main__":
    main()
