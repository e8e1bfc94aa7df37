"""Simulated gain of planned admission orders: `python -m benchmarks.run_planned [--quick]`.

The `multimodal` costs with lognormal noise of 0.1 on top, 8 ranks, 32 microbatches: time over the
load. A plan knows the costs and how large the noise is; the noise that the step then meets it never
saw. `--in-time` plans as a run does by default, in a tenth of the step's time, on one core. The
figures of docs/performance.md, "Planned entry".
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rrfp.planning.modeled_costs import forecast_step
from rrfp.planning.order_search import NoisySteps, Plan, StepForecast, plan_all, plan_order
from rrfp.planning.trials import Setting, run_settings
from rrfp.schedule.admission import Admission, Admit, ListedOrders
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import Bytes, Hold, Policy
from rrfp.schedule.rehearsal import fitted
from rrfp.schedule.shape import Placement, Shape
from rrfp.simulate.costs.toml_files import preset
from rrfp.simulate.jitter import parse_jitter
from rrfp.simulate.memory_budgets import peak_of_1f1b
from rrfp.trace.records import NS_PER_S

COSTS = preset("multimodal")
JITTER = parse_jitter("lognormal:0.1")
V, ONE_CHUNK = Shape(8, 32, 2, Placement.V), Shape(8, 32)


@dataclass(frozen=True, slots=True)
class Question:
    """A row of the table."""

    told: str
    hint: str
    shape: Shape
    num_seeds: int
    in_bytes: bool
    """Bounded by each step's own peak under 1F1B, instead of 8 microbatches."""


QUESTIONS = (
    Question("V, hold 8", "zb-v", V, 40, in_bytes=False),
    Question("one chunk, hold 8", "zb-h1", ONE_CHUNK, 20, in_bytes=False),
    Question("V, 1F1B's bytes", "zb-v", V, 20, in_bytes=True),
    Question("V, 1F1B's bytes, v-half", "v-half", V, 20, in_bytes=True),
    Question("one chunk, 1F1B's bytes", "zb-h1", ONE_CHUNK, 20, in_bytes=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="100 simulations of a quarter of it")
    parser.add_argument("--sims", type=int, nargs="*", default=[400, 1600])
    parser.add_argument("--in-time", action="store_true", help="in a tenth of each step's time")
    given = parser.parse_args()
    quick = given.quick
    budgets = [None] if given.in_time else [100] if quick else given.sims
    told = ", ".join(f"planned by {number or 'time'}" for number in budgets)
    print(f"row, pyramid, {told}")
    for question in QUESTIONS:
        seeds = range(question.num_seeds // 4 if quick else question.num_seeds)
        start_s = time.monotonic()
        cells = [f"{over_load(question, seeds, Admit.PYRAMID):.4f}"]
        cells += [f"{over_load(question, seeds, Admit.PLAN, number):.4f}" for number in budgets]
        seconds = time.monotonic() - start_s
        print(
            f"{question.told} ({question.hint}), {', '.join(cells)}  [{seconds:.0f} s]", flush=True
        )


def over_load(
    question: Question, seeds: Sequence[int], admit: Admission, num_simulations: int | None = None
) -> float:
    """The mean time of the steps over their mean load. Without a number of simulations, a plan
    takes what it gets done in time."""
    settings = [_setting(question, seed, admit) for seed in seeds]
    if admit is Admit.PLAN:
        forecasts = [
            forecast_step(COSTS, JITTER, setting.policy, setting.shape, seed, 0)
            for setting, seed in zip(settings, seeds, strict=True)
        ]
        plans = (
            [planned_in_time(each) for each in forecasts]
            if num_simulations is None
            else plan_all(forecasts, num_simulations)
        )
        settings = [
            replace(setting, admit=ListedOrders("plan", (plan.order,)))
            for setting, plan in zip(settings, plans, strict=True)
        ]
    trials = [
        run_settings([setting], [seed])[0].trials[0]
        for setting, seed in zip(settings, seeds, strict=True)
    ]
    return fmean(each.makespan_ns for each in trials) / fmean(each.load_ns for each in trials)


def planned_in_time(forecast: StepForecast) -> Plan:
    """The plan that a tenth of the step's time allows, of processor time as in a run."""
    step_ns = NoisySteps(forecast).makespan_ns(forecast.pyramid, 0)
    end_s = time.process_time() + step_ns / 10 / NS_PER_S
    return plan_order(forecast, 10**6, lambda: time.process_time() > end_s)


def _setting(question: Question, seed: int, admit: Admission) -> Setting:
    hold: Hold = 8
    if question.in_bytes:
        peak = peak_of_1f1b(COSTS, question.shape, seed, 0)
        assert peak is not None
        hold = Bytes(peak)
    policy, shape = fitted(
        Policy(HINTS[question.hint], hold=hold), question.shape, counts_places=False
    )
    return Setting(shape=shape, policy=policy, costs=COSTS, jitter=JITTER, admit=admit)


if __name__ == "__main__":
    main()
