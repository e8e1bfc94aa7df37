"""Simulated gain of balancing the global batch: `python -m benchmarks.run_batch_balance`.

Simulated on the `multimodal` costs with lognormal 0.1 on top, 8 ranks, 32 microbatches a replica,
two chunks in a V, a hold of 8, on seeds that nothing was chosen by. The figures of
docs/performance.md.
"""

import sys
from fractions import Fraction

from benchmarks.bytes_rows import COSTS, V
from rrfp.planning.modeled_costs import BalancedCosts
from rrfp.planning.trials import Row, Setting, run_settings
from rrfp.schedule.admission import Admit
from rrfp.schedule.hints import WeightGradients
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.rehearsal import fitted
from rrfp.simulate.jitter import parse_jitter

_SEEDS = range(20_000, 20_040)
_REPLICAS = (2, 4, 8)
_ROWS = [(dealt, admit) for dealt in (False, True) for admit in (Admit.GIVEN, Admit.PYRAMID)]


def main(num_seeds: int = len(_SEEDS)) -> None:
    print("given + pyramid over each row; the load of the same replicas in parentheses")
    print(
        "| | " + " | ".join(f"DP{num}, W {w}" for num in _REPLICAS for w in WeightGradients) + " |"
    )
    columns = [_column(num, w, _SEEDS[:num_seeds]) for num in _REPLICAS for w in WeightGradients]
    for number, (dealt, admit) in enumerate(_ROWS):
        cells = []
        for rows in columns:
            row, reference = rows[number], rows[1]
            cells.append(f"{reference.mean_s / row.mean_s:.3f} ({row.ratio_to_load:.3f})")
        print(f"| {'dealt' if dealt else 'given'}, {admit} | " + " | ".join(cells) + " |")


def _column(num_replicas: int, w: WeightGradients, seeds: range) -> list[Row]:
    policy = Policy(HINTS["zb-v"], None, Dispatch.READY, None, Fraction(8), w)
    policy, shape = fitted(policy, V)
    settings = [
        Setting(
            shape=shape,
            policy=policy,
            costs=BalancedCosts(COSTS, num_replicas) if dealt else COSTS,
            jitter=parse_jitter("lognormal:0.1"),
            admit=admit,
            num_replicas=num_replicas,
        )
        for dealt, admit in _ROWS
    ]
    return run_settings(settings, seeds)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
