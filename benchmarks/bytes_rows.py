"""Simulated rows under a bound in bytes, on the `multimodal` costs: 8 ranks, 32 microbatches."""

from collections.abc import Sequence

from rrfp.planning.trials import Row, Setting, run_settings
from rrfp.schedule.admission import Admit
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import Dispatch, Hold, Policy
from rrfp.schedule.rehearsal import fitted
from rrfp.schedule.shape import Placement, Shape
from rrfp.simulate.costs.toml_files import preset

COSTS = preset("multimodal")
V = Shape(8, 32, 2, Placement.V)
SEEDS = range(1234, 1244)
OTHER_SEEDS = range(5000, 5200)
BUDGETS = (14_700_000_000, 12_000_000_000)


def row_of(
    hint: str,
    shape: Shape,
    seeds: Sequence[int],
    admit: Admit = Admit.GIVEN,
    hold: Hold | None = None,
    dispatch: Dispatch = Dispatch.READY,
) -> Row:
    """One row, over these seeds."""
    policy, shape = fitted(Policy(HINTS[hint], None, dispatch, None, hold), shape)
    setting = Setting(shape=shape, policy=policy, costs=COSTS, admit=admit)
    return run_settings([setting], seeds)[0]


def time_over_load(
    hint: str, shape: Shape, seeds: Sequence[int], admit: Admit, hold: Hold
) -> float:
    return row_of(hint, shape, seeds, admit, hold).ratio_to_load
