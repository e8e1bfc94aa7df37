"""Planned orders of entry: the search, its processes, and what it plans by."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from rrfp.errors import RrfpError, UsageError
from rrfp.planning import process_pool as many
from rrfp.planning.order_search import Known, NoisySteps, known_of, noise_of, plan_entry
from rrfp.planning.process_pool import PlannerProcess
from rrfp.planning.trials import Setting, num_plans, run_settings
from rrfp.schedule.admission import Admit
from rrfp.schedule.knobs import Bytes
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import Policy
from rrfp.schedule.rehearsal import fitted
from rrfp.schedule.shape import Placement, Shape
from rrfp.simulate.costs.toml_files import preset
from rrfp.simulate.jitter import NO_JITTER, parse_jitter

COSTS = preset("multimodal")
JITTER = parse_jitter("lognormal:0.1")
POLICY, SHAPE = fitted(
    Policy(HINTS["zb-v"], hold=4), Shape(4, 12, 2, Placement.V), counts_places=False
)


def known(seed: int, **changes: object) -> Known:
    found = known_of(COSTS, JITTER, POLICY, SHAPE, seed, 0)
    return replace(found, **changes)  # type: ignore[arg-type]


def setting(admit: Admit = Admit.PLAN, num: int = 60) -> Setting:
    return Setting(
        shape=SHAPE,
        policy=POLICY,
        costs=COSTS,
        jitter=JITTER,
        admit=admit,
        num_plan_simulations=num,
    )


def test_a_plan_depends_on_nothing_else() -> None:
    plan = plan_entry(known(1), 60)
    assert plan == plan_entry(known(1), 60)
    assert sorted(plan.order) == list(range(12))
    assert plan != plan_entry(known(1, key=(2, 0)), 60)
    assert plan_entry(known(1), 1).order == known(1).pyramid


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_is_never_worse_by_its_own_estimate(seed: int) -> None:
    plan = plan_entry(known(seed), 40)
    assert plan.predicted_ns <= plan.pyramid_ns
    if plan.order == known(seed).pyramid:
        assert plan.predicted_ns == plan.pyramid_ns


def test_plans_gain_on_noise_that_they_never_saw() -> None:
    seeds = range(100, 106)
    pyramid, plan = run_settings([setting(Admit.PYRAMID), setting(num=120)], seeds)
    assert fmean(plan.makespans_s) < 0.985 * fmean(pyramid.makespans_s)
    assert num_plans([setting(Admit.PYRAMID), setting()], seeds) == 6


def test_without_noise_a_plan_predicts_what_is_played() -> None:
    quiet = replace(setting(), jitter=NO_JITTER)
    (row,) = run_settings([quiet], [7])
    plan = plan_entry(known_of(COSTS, NO_JITTER, POLICY, SHAPE, 7, 0), 60)
    assert row.trials[0].makespan_ns == plan.predicted_ns < plan.pyramid_ns


def test_one_microbatch_has_one_order() -> None:
    asked = Policy(HINTS["zb-v"], hold=4)
    policy, shape = fitted(asked, Shape(4, 1, 2, Placement.V), counts_places=False)
    plan = plan_entry(known_of(COSTS, JITTER, policy, shape, 1, 0), 60)
    assert (plan.order, plan.num_candidates) == ((0,), 1)


def test_draws_are_of_no_step_that_is_played() -> None:
    step = known(3)
    drawn = NoisySteps(step).makespan_ns(step.pyramid, 0)
    given = run_settings([setting(Admit.PYRAMID)], [3])[0].trials[0].makespan_ns
    assert drawn != given


@pytest.mark.parametrize(
    ("jitter", "noise"),
    [("none", 0.0), ("lognormal:0.1", 0.1), ("lognormal:0.5", 0.5), ("slow-stage:1:2", 0.0)],
)
def test_the_noise_is_that_of_the_jitter(jitter: str, noise: float) -> None:
    assert noise_of(parse_jitter(jitter), Shape(4, 64)) == pytest.approx(noise, rel=0.1)


def test_processes_plan_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "_LEAST_SIMULATIONS", 1)
    steps = [known(seed) for seed in range(3)]
    ended: list[int] = []
    assert many.plan_all(steps, 20, lambda: ended.append(1), num_processes=2) == many.plan_all(
        steps, 20, num_processes=1
    )
    assert len(ended) == 3
    stuck = known(0, policy=replace(POLICY, hold=Bytes(1)))
    with pytest.raises(UsageError, match="is below the"):
        many.plan_all([stuck, stuck], 20, num_processes=2)


def test_costs_that_are_not_known_are_not_planned() -> None:
    class Drawn:
        def step(self, shape: Shape, seed: int, replica: int) -> object:
            return replace(COSTS.step(shape, seed, replica), is_known=False)

    with pytest.raises(UsageError, match="--admit plan plans by what is known before the step"):
        run_settings([replace(setting(), costs=Drawn())], [1])  # type: ignore[arg-type]


def test_a_process_that_is_stopped_is_named() -> None:
    process = PlannerProcess("rrfp.planning.order_search_main")
    try:
        os.kill(process.pid, signal.SIGSTOP)
        assert process.send((known(1), 10))
        with pytest.raises(RrfpError, match=f"process {process.pid} has not answered in 0.2 s"):
            process.wait(0.2)
        # The pipe takes what fits, and nobody waits for room.
        assert not all(process.send(np.zeros(2**15)) for _ in range(8))
    finally:
        process.close()
    assert not _is_there(process.pid)


def test_a_process_ends_with_its_parent() -> None:
    program = (
        "import os, time\n"
        "from rrfp.planning.process_pool import PlannerProcess\n"
        "process = PlannerProcess('rrfp.planning.order_search_main', niceness=5)\n"
        # Another process that holds the pipe open.
        "if os.fork() == 0: time.sleep(20); os._exit(0)\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.5)
    assert _is_there(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until_s = time.monotonic() + 20
    while _is_there(pid):
        assert time.monotonic() < until_s
        time.sleep(0.1)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
