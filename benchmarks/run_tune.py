"""Holds the first proposal of `rrfp tune` against the best that a plain random search finds, and
against a real paced run: `python -m benchmarks.run_tune [--seed N] [--only NAME] [--real]`. With
`--slower 8` all times are eight times as long: a machine with few cores keeps the pace of that.

The plain search shares the costs and the simulator with `rrfp tune`, and none of the code that
searches. Both are judged on steps that neither has seen.
"""

import argparse
import json
import random
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from statistics import fmean

from benchmarks.tune_cases import Case, cases
from rrfp.errors import RrfpError
from rrfp.inputs import parse_layout
from rrfp.planning.trials import Setting, run_settings
from rrfp.replay.cost_sources import resolve_costs
from rrfp.schedule.admission import Admit
from rrfp.schedule.hints import WeightGradients
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import Bytes, Dispatch, Hold, Policy, parse_hold, parse_patience
from rrfp.schedule.rehearsal import fitted
from rrfp.schedule.shape import Placement, Shape
from rrfp.simulate.costs.language_models import FlopCosts
from rrfp.simulate.costs.layer_costs import CutCosts, even_cut, layered_of
from rrfp.simulate.costs.model import Costs, Uneven
from rrfp.simulate.costs.unit_costs import Layered
from rrfp.simulate.jitter import parse_jitter

WIDE, AGAIN, AGAIN_SEEDS = 7000, 150, 20
"""Candidates on one step, and the best of them on more: 10,000 simulations in all."""
_COSTS_ALONE = ("--per-task-ms", "0", "--per-message-ms", "0")
"""Without the runtime's own time."""
JUDGED = range(900_000, 900_040)
"""Steps that neither search has seen."""


@dataclass(frozen=True, slots=True)
class Plain:
    """The search space of a random search, which simulates its draws."""

    case: Case
    layered: Layered
    own: tuple[int, ...]
    memory: int

    def drawn(self, draw: random.Random) -> Setting | None:
        """A candidate with everything drawn; None for one that cannot be."""
        case = self.case
        chunks, placement = draw.choice(
            [
                (1, Placement.LOOP),
                (2, Placement.LOOP),
                (2, Placement.V),
                (3, Placement.LOOP),
                (4, Placement.LOOP),
            ]
        )
        stages = case.pp * chunks
        if stages > self.layered.num_layers:
            return None
        split = list(self.own if chunks == 1 else even_cut(self.layered.num_layers, stages))
        for _ in range(draw.randrange(5)):
            giver, taker = draw.sample(range(stages), 2)
            if split[giver] > (0 if giver in (0, stages - 1) else 1):
                split[giver] -= 1
                split[taker] += 1
        hint = HINTS[draw.choice(list(HINTS))]
        dispatch = draw.choice([Dispatch.READY, Dispatch.READY, Dispatch.FIXED])
        holds: list[Hold] = [Bytes(self.memory), Bytes(self.memory), case.pp, 2 * case.pp]
        hold = draw.choice(holds)
        sizes = [1] if self.layered.fixed_ns is None else [1, 1, 2, 4]
        joined = draw.choice(sizes)
        shape = Shape(case.pp, case.microbatches // joined, chunks, placement)
        try:
            policy, shape = fitted(
                Policy(
                    hint,
                    None,
                    dispatch,
                    None,
                    hold if dispatch is Dispatch.READY else None,
                    draw.choice([*WeightGradients])
                    if dispatch is Dispatch.READY and hint.ranks_weight_gradients
                    else WeightGradients.IDLE,
                ),
                shape,
                counts_places=False,
            )
        except RrfpError:
            return None
        return Setting(
            shape=shape,
            policy=policy,
            costs=CutCosts(self.layered, tuple(split), joined),
            jitter=parse_jitter(case.jitter),
            admit=draw.choice([Admit.GIVEN, Admit.PYRAMID]),
        )

    def mean_s(self, setting: Setting, seeds: range, *, is_bound: bool = True) -> float:
        """Infinite for one that does not stay within the memory, if it `is_bound` to."""
        found = []
        for seed in seeds:
            try:
                (row,) = run_settings([setting], [seed])
            except RrfpError:
                return float("inf")
            if is_bound and max(row.peak_held_bytes or (0,)) > self.memory:
                return float("inf")
            found.append(row.mean_s)
        return fmean(found)

    def best(self, seed: int) -> Setting:
        """The best that 10,000 simulations find."""
        draw = random.Random(seed)
        wide: list[tuple[float, int, Setting]] = []
        while len(wide) < WIDE:
            setting = self.drawn(draw)
            if setting is not None:
                wide.append((self.mean_s(setting, range(seed, seed + 1)), len(wide), setting))
        again = sorted(wide)[:AGAIN]
        seeds = range(seed + 1, seed + 1 + AGAIN_SEEDS)
        return min((self.mean_s(setting, seeds), number, setting) for _, number, setting in again)[
            2
        ]


def plain_of(case: Case, path: Path) -> Plain:
    costs: Costs = resolve_costs(str(path))
    shape = Shape(case.pp, case.microbatches)
    if isinstance(costs, FlopCosts):
        layered: Layered = costs
        own = costs.split_over(case.pp)
    else:
        assert case.layers is not None
        own = even_cut(case.layers, case.pp)
        layered = layered_of(costs, shape, own, Uneven(case.uneven))
    share = parse_hold(case.memory)
    factor = getattr(share, "factor", Fraction(1))
    return Plain(case, layered, own, int(factor * _peak_of_1f1b(CutCosts(layered, own), shape)))


def _peak_of_1f1b(costs: Costs, shape: Shape) -> int:
    """The most that any rank keeps in 1F1B: of neighbours in a row, as many as ranks follow."""
    most = 0
    for seed in (*range(1234, 1260), *JUDGED):
        sizes = costs.step(shape, seed, 0).sizes
        assert sizes is not None
        for rank, row in enumerate(sizes.activations):
            width = shape.num_ranks - rank
            most = max(most, *(sum(row[i : i + width]) for i in range(len(row))))
    return most


def tuned(case: Case, path: Path, memory: int, *more: str) -> dict[str, object]:
    """The answer of `rrfp tune`."""
    layers = () if case.layers is None else ("--layers", str(case.layers), "--uneven", case.uneven)
    command = [
        *(sys.executable, "-m", "rrfp", "tune", str(path), "--memory", f"{memory}B"),
        *("--pp", str(case.pp), "--microbatches", str(case.microbatches)),
        *(*layers, "--format", "json", *more),
    ]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def as_setting(plain: Plain, flags: str, layers: list[int]) -> Setting:
    """The settings in the flags of a proposal, parsed independently of rrfp."""
    parser = argparse.ArgumentParser()
    for name in ("hint", "hold", "layout", "microbatches", "pp", "layers", "micro-batch-size"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--dispatch", default="ready")
    parser.add_argument("--placement", default="loop")
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--w", default="idle")
    parser.add_argument("--admit", default="given")
    parser.add_argument("--patience", default="0")
    told = parser.parse_args(shlex.split(flags))
    if told.layout is not None:
        assert list(parse_layout(told.layout, "--layout")) == layers
    joined = plain.case.microbatches // int(told.microbatches)
    shape = Shape(plain.case.pp, int(told.microbatches), told.chunks, Placement(told.placement))
    hold = None if told.hold is None else parse_hold(told.hold)
    policy, shape = fitted(
        Policy(
            HINTS[told.hint],
            None,
            Dispatch(told.dispatch),
            None,
            hold,
            WeightGradients(told.w),
            patience=parse_patience(told.patience),
        ),
        shape,
        counts_places=False,
    )
    return Setting(
        shape=shape,
        policy=policy,
        costs=CutCosts(plain.layered, tuple(layers), joined),
        jitter=parse_jitter(plain.case.jitter),
        admit=Admit(told.admit),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--real", action="store_true", help="Run the first proposal, paced.")
    parser.add_argument("--slower", type=float, default=1.0, help="Factor of all times.")
    asked = parser.parse_args()
    print("costs | predicted | tuned | plain | tuned / plain | real | predicted / real")
    with tempfile.TemporaryDirectory() as directory:
        for case in cases(asked.seed):
            if asked.only not in case.name:
                continue
            case = case.slower(asked.slower)
            path = Path(directory) / f"{case.name.replace(' ', '-')}.toml"
            path.write_text(case.document, encoding="utf-8")
            plain = plain_of(case, path)
            own = () if asked.real and case.jitter == "none" else ("--jitter", case.jitter)
            more = (*own, *(("--try", "1") if asked.real else _COSTS_ALONE))
            found = tuned(case, path, plain.memory, *more)
            first = found["proposals"][0]  # type: ignore[index]
            ours = plain.mean_s(
                as_setting(plain, first["flags"], first["layers"]), JUDGED, is_bound=False
            )
            told = f"{case.name} | {first['predicted_s']:.4f} | {ours:.4f}"
            if asked.real:
                off = first["predicted_for_real_s"] / first["real_s"]
                print(f"{told} | | | {first['real_s']:.4f} | {off:.3f}", flush=True)
            else:
                theirs = plain.mean_s(plain.best(asked.seed), JUDGED, is_bound=False)
                print(f"{told} | {theirs:.4f} | {ours / theirs:.4f} | |", flush=True)


if __name__ == "__main__":
    main()
