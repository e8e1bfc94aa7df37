"""Tests of the search for an admission order, its cost model, and the trials of the simulator."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.errors import RrfpError, UsageError
from rrfp.planning import order_search as many
from rrfp.planning.forecast import MeasuredTasks, StepModel
from rrfp.planning.modeled_costs import forecast_step, noise_of
from rrfp.planning.order_search import NoisySteps, StepForecast, plan_order
from rrfp.planning.planner_process import PlannerProcess
from rrfp.planning.trials import Row, Setting, Trial, num_plans, run_settings
from rrfp.schedule.admission import Admit
from rrfp.schedule.hints import Hint, Order, kinds_of
from rrfp.schedule.named_hints import ALTERNATIONS, HINTS, hint_named
from rrfp.schedule.policy import Bytes, Dispatch, Policy
from rrfp.schedule.rehearsal import fitted, order_of
from rrfp.schedule.shape import SPLIT_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import Kind
from rrfp.simulate.costs.model import Links, StepCosts
from rrfp.simulate.costs.toml_files import preset
from rrfp.simulate.engine import TaskTimes
from rrfp.simulate.jitter import NO_JITTER, parse_jitter, uniforms
from rrfp.simulate.step import new_recording
from rrfp.trace.records import Phase, PhaseRecord, Record, TaskRecord, step_windows
from tests.properties.cases import examples

# Planned admission orders: the search, its processes, and its forecasts.


COSTS = preset("multimodal")
JITTER = parse_jitter("lognormal:0.1")
POLICY, SHAPE = fitted(
    Policy(HINTS["zb-v"], hold=4), Shape(4, 12, 2, Placement.V), counts_places=False
)


def forecast(seed: int, **changes: object) -> StepForecast:
    found = forecast_step(COSTS, JITTER, POLICY, SHAPE, seed, 0)
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


def test_a_plan_depends_only_on_its_inputs() -> None:
    plan = plan_order(forecast(1), 60)
    assert plan == plan_order(forecast(1), 60)
    assert sorted(plan.order) == list(range(12))
    assert plan != plan_order(forecast(1, key=(2, 0)), 60)
    assert plan_order(forecast(1), 1).order == forecast(1).pyramid


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_is_never_worse_than_a_pyramid_by_its_own_estimate(seed: int) -> None:
    plan = plan_order(forecast(seed), 40)
    assert plan.predicted_ns <= plan.pyramid_ns
    if plan.order == forecast(seed).pyramid:
        assert plan.predicted_ns == plan.pyramid_ns


def test_plans_save_time_under_noise_outside_their_search() -> None:
    seeds = range(100, 106)
    pyramid, plan = run_settings([setting(Admit.PYRAMID), setting(num=120)], seeds)
    assert fmean(plan.makespans_s) < 0.985 * fmean(pyramid.makespans_s)
    assert num_plans([setting(Admit.PYRAMID), setting()], seeds) == 6


def test_without_noise_a_plan_predicts_the_exact_makespan() -> None:
    without_jitter = replace(setting(), jitter=NO_JITTER)
    (row,) = run_settings([without_jitter], [7])
    plan = plan_order(forecast_step(COSTS, NO_JITTER, POLICY, SHAPE, 7, 0), 60)
    assert row.trials[0].makespan_ns == plan.predicted_ns < plan.pyramid_ns


def test_one_microbatch_has_one_order() -> None:
    asked = Policy(HINTS["zb-v"], hold=4)
    policy, shape = fitted(asked, Shape(4, 1, 2, Placement.V), counts_places=False)
    plan = plan_order(forecast_step(COSTS, JITTER, policy, shape, 1, 0), 60)
    assert (plan.order, plan.num_candidates) == ((0,), 1)


def test_noise_draws_differ_from_those_of_simulated_steps() -> None:
    step = forecast(3)
    drawn = NoisySteps(step).makespan_ns(step.pyramid, 0)
    given = run_settings([setting(Admit.PYRAMID)], [3])[0].trials[0].makespan_ns
    assert drawn != given


@pytest.mark.parametrize(
    ("jitter", "noise"),
    [("none", 0.0), ("lognormal:0.1", 0.1), ("lognormal:0.5", 0.5), ("slow-stage:1:2", 0.0)],
)
def test_the_noise_matches_the_jitter(jitter: str, noise: float) -> None:
    assert noise_of(parse_jitter(jitter), Shape(4, 64)) == pytest.approx(noise, rel=0.1)


def test_plans_do_not_depend_on_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "_LEAST_SIMULATIONS", 1)
    steps = [forecast(seed) for seed in range(3)]
    ended: list[int] = []
    assert many.plan_all(steps, 20, lambda: ended.append(1), num_processes=2) == many.plan_all(
        steps, 20, num_processes=1
    )
    assert len(ended) == 3
    stuck = forecast(0, policy=replace(POLICY, hold=Bytes(1)))
    with pytest.raises(UsageError, match="is below the"):
        many.plan_all([stuck, stuck], 20, num_processes=2)


def test_a_plan_of_unknown_costs_is_refused() -> None:
    class Drawn:
        def step(self, shape: Shape, seed: int, replica: int) -> object:
            return replace(COSTS.step(shape, seed, replica), is_known=False)

    with pytest.raises(UsageError, match="--admit plan plans by what is known before the step"):
        run_settings([replace(setting(), costs=Drawn())], [1])  # type: ignore[arg-type]


def test_a_stopped_process_is_named() -> None:
    process = PlannerProcess("plan_simulated_steps")
    try:
        os.kill(process.pid, signal.SIGSTOP)
        assert process.send((forecast(1), 10))
        with pytest.raises(RrfpError, match=f"process {process.pid} has not answered in 0.2 s"):
            process.wait(0.2)
        # The pipe accepts requests until it is full, and `send` does not block.
        assert not all(process.send(np.zeros(2**15)) for _ in range(8))
    finally:
        process.close()
    assert not _is_there(process.pid)


def test_a_process_ends_with_its_parent() -> None:
    program = (
        "import os, time\n"
        "from rrfp.planning.planner_process import PlannerProcess\n"
        "process = PlannerProcess('plan_simulated_steps', niceness=5)\n"
        # Another process keeps the pipe open.
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


# The cost model of a planner: measured task times from records, and a fit of them.


NUM_STAGES, NUM = 4, 16


def features_of(random: np.random.Generator) -> np.ndarray:
    tokens = random.integers(20, 200, NUM).astype(float)
    patches = random.integers(1, 60, NUM).astype(float)
    return np.column_stack([np.ones(NUM), tokens, tokens**2, patches, np.full(NUM, 3.0)])


def measured_of(features: np.ndarray, random: np.random.Generator, noise: float) -> np.ndarray:
    """Return measurements. Language stages depend on tokens and their squares, stage 0 on
    patches."""
    found = np.zeros((5, NUM_STAGES, NUM))
    for stage in range(NUM_STAGES):
        weights = [5e4, 2e3, 20, 0, 0] if stage else [1e5, 0, 0, 4e4, 0]
        for row, factor in enumerate((1.0, 1.2, 0.7, 50.0, 20.0)):
            found[row, stage] = factor * (features @ weights)
    found[:3] *= np.exp(noise * random.standard_normal((3, NUM_STAGES, NUM)))
    return found


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_model_learns_costs_from_features(noise: float) -> None:
    random, model = np.random.default_rng(7), StepModel()
    assert not model.is_fitted
    for _ in range(6):
        features = features_of(random)
        model.learn(features, measured_of(features, random, noise))
    features = features_of(random)
    expected = measured_of(features, random, 0.0)
    found = model.predict(features)
    times = np.array([found.times.forward, found.times.input_gradient, found.times.weight_gradient])
    assert np.abs(times / expected[:3] - 1).max() < 0.02 + noise
    assert found.noise == pytest.approx(noise, abs=0.03)
    assert found.sizes is not None
    assert np.allclose(found.sizes.activations, expected[3], rtol=0.02)
    assert found.sizes.pending_w is not None
    assert np.allclose(found.sizes.pending_w, expected[4], rtol=0.02)


def test_the_model_follows_a_run_that_becomes_slower() -> None:
    random, model = np.random.default_rng(3), StepModel()
    for step in range(60):
        features = features_of(random)
        model.learn(features, measured_of(features, random, 0.05) * (1 if step < 30 else 2))
    features = features_of(random)
    found = np.array(model.predict(features).times.forward)
    assert np.median(found / measured_of(features, random, 0.0)[0]) == pytest.approx(2, rel=0.1)


def test_other_features_reset_the_model() -> None:
    random, model = np.random.default_rng(3), StepModel()
    features = features_of(random)
    model.learn(features, measured_of(features, random, 0.0))
    measured = measured_of(features, random, 0.0)
    model.learn(features[:, :2], measured)
    assert len(model.predict(features[:, :2]).times.forward[0]) == NUM


def test_the_table_has_the_last_whole_step() -> None:
    shape = Shape(2, 2, kinds=SPLIT_BACKWARD)
    recorded: list[Record] = []
    measured = MeasuredTasks(recorded.append)
    assert not measured.table(shape).any()
    tasks = [
        task_of(Kind.F, 0, 10, held=100),
        task_of(Kind.F, 1, 20, held=300),
        task_of(Kind.B, 1, 30, held=180),
        task_of(Kind.W, 1, 40, held=100),
        task_of(Kind.B, 0, 50, held=60),
        task_of(Kind.W, 0, 60, held=0),
    ]
    for start_ns, task in enumerate(tasks):
        measured.record(task._replace(start_ns=100 * start_ns, end_ns=100 * start_ns + task.end_ns))
    assert not measured.table(shape).any()
    measured.record(PhaseRecord(0, 600, 0, Phase.SCHEDULE, 4096))
    measured.record(task_of(Kind.F, 0, 10, held=5)._replace(step=1))
    *numbers, budget = measured.table(shape).tolist()
    # The times of F, B and W, then the activation bytes, then the pending bytes of W.
    assert numbers == [10, 20, 50, 30, 60, 40, 100, 200, 60, 80]
    assert budget == 4096
    assert not measured.table(Shape(2, 3, kinds=SPLIT_BACKWARD)).any()
    assert len(recorded) == len(tasks) + 2


def task_of(kind: Kind, microbatch: int, time_ns: int, held: int) -> TaskRecord:
    return TaskRecord(
        *(0, time_ns, 0, kind, 0, 0, microbatch, 0, 1, 0, 1, 1, 1, 0), held_bytes=held
    )


MS = 1_000_000


@dataclass(eq=False)
class DrawnCosts:
    """Costs with times drawn for every task, which record each request for a step."""

    links: Links = field(default_factory=Links)
    agreement_ns: int = 0
    lateness_ns: int = 0
    gradient_sync_ns: int = 0
    asked: list[tuple[int, int]] = field(default_factory=list)

    def step(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        self.asked.append((seed, replica))

        def times(kind: str) -> list[list[int]]:
            return [
                [1 + int(9 * MS * u) for u in uniforms(shape.num_microbatches, seed, replica, *key)]
                for stage in range(shape.num_stages)
                for key in ((kind, stage),)
            ]

        return StepCosts(
            TaskTimes(times("F"), times("B"), times("W")),
            self.links,
            self.agreement_ns,
            self.lateness_ns,
            self.gradient_sync_ns,
        )


def setting_of(
    costs: DrawnCosts,
    hint: str = "bf",
    *,
    num_ranks: int = 3,
    num_microbatches: int = 6,
    dispatch: Dispatch = Dispatch.READY,
    num_members: int = 1,
    num_replicas: int = 1,
    blocking: bool = False,
    admit: Admit = Admit.GIVEN,
    jitter: str = "none",
    hold: int | None = None,
) -> Setting:
    shape = Shape(num_ranks, num_microbatches)
    chosen: Hint = hint_named(hint).for_shape(shape)
    shape = replace(shape, kinds=kinds_of(chosen))
    order: Order = order_of(chosen, shape)
    return Setting(
        shape=shape,
        policy=Policy(chosen, order, dispatch=dispatch, hold=hold),
        costs=costs,
        jitter=parse_jitter(jitter),
        admit=admit,
        blocking=blocking,
        num_members=num_members,
        num_replicas=num_replicas,
    )


def test_rows_of_one_shape_share_the_draws_of_a_seed_and_replica() -> None:
    costs = DrawnCosts()
    settings = [setting_of(costs, hint, num_replicas=2) for hint in ("bf", "fb", "1f1b")]
    run_settings([replace(each, jitter=settings[0].jitter) for each in settings], range(5, 8))
    assert costs.asked == [(seed, replica) for seed in range(5, 8) for replica in range(2)]


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    settings = [
        setting_of(DrawnCosts(), hint, admit=admit, jitter="lognormal:0.5")
        for hint in ("bf", "bfw", "1f1b")
        for admit in Admit
    ]
    together = run_settings(settings, range(4))
    alone = [run_settings([each], range(4))[0] for each in settings]
    assert together == alone
    assert len({row.mean_s for row in together}) > 3


def test_every_seed_is_an_independent_step() -> None:
    (row,) = run_settings([setting_of(DrawnCosts())], range(3))
    singles = [run_settings([setting_of(DrawnCosts())], [seed])[0].trials[0] for seed in range(3)]
    assert list(row.trials) == singles
    assert len(set(singles)) == 3


@pytest.mark.parametrize("hint", [*ALTERNATIONS, "1f1b", "gpipe", "zb-h1"])
@given(seed=st.integers(0, 2**32 - 1), num_ranks=st.integers(1, 4), num=st.integers(1, 6))
@examples(quick=5, thorough=100)
def test_no_step_is_shorter_than_its_floor(hint: str, seed: int, num_ranks: int, num: int) -> None:
    costs = DrawnCosts(Links(latency_ns=MS), agreement_ns=MS // 2, lateness_ns=MS)
    one = setting_of(costs, hint, num_ranks=num_ranks, num_microbatches=num)
    two = replace(one, num_members=2, num_replicas=2)
    for row in run_settings([one, two], [seed]):
        (trial,) = row.trials
        assert trial.load_ns <= trial.floor_ns <= trial.makespan_ns
        assert 0 <= trial.bubble_fraction < 1


def test_one_rank_runs_at_its_floor_and_load() -> None:
    (row,) = run_settings([setting_of(DrawnCosts(), num_ranks=1)], range(3))
    assert row.ratio_to_floor == row.ratio_to_load == 1
    assert row.bubble_fraction == 0


def test_replicas_synchronize_and_reduce_at_the_end() -> None:
    def makespan_ns(num_replicas: int, gradient_sync_ns: int) -> int:
        costs = DrawnCosts(gradient_sync_ns=gradient_sync_ns)
        (row,) = run_settings([setting_of(costs, num_replicas=num_replicas)], [7])
        return row.trials[0].makespan_ns

    # A single replica has no gradients to reduce.
    assert makespan_ns(1, MS) == makespan_ns(1, 0)
    assert makespan_ns(4, MS) == makespan_ns(4, 0) + MS
    by_count = [makespan_ns(count, 0) for count in (1, 2, 3, 4)]
    assert by_count == sorted(by_count)
    assert by_count[0] < by_count[-1]


def test_a_group_pays_for_agreement_except_under_a_binding_order() -> None:
    def makespan_ns(
        num_members: int, dispatch: Dispatch, agreement_ns: int = 0, lateness_ns: int = 0
    ) -> int:
        costs = DrawnCosts(agreement_ns=agreement_ns, lateness_ns=lateness_ns)
        asked = setting_of(costs, "1f1b", num_members=num_members, dispatch=dispatch)
        return run_settings([asked], [3])[0].trials[0].makespan_ns

    for dispatch in (Dispatch.READY, Dispatch.FIXED):
        alone = makespan_ns(1, dispatch)
        assert makespan_ns(2, dispatch) == alone
        assert makespan_ns(1, dispatch, agreement_ns=MS, lateness_ns=5 * MS) == alone
        assert makespan_ns(2, dispatch, lateness_ns=5 * MS) > alone
    bound = makespan_ns(2, Dispatch.FIXED)
    assert makespan_ns(2, Dispatch.FIXED, agreement_ns=MS) == bound
    assert makespan_ns(2, Dispatch.READY, agreement_ns=MS) > makespan_ns(2, Dispatch.READY)


def test_link_latency_delays_a_step_and_more_so_over_blocking_links() -> None:
    def makespan_ns(latency_ns: int, *, blocking: bool) -> int:
        costs = DrawnCosts(Links(latency_ns=latency_ns))
        asked = setting_of(costs, "1f1b", dispatch=Dispatch.FIXED, blocking=blocking)
        return run_settings([asked], [3])[0].trials[0].makespan_ns

    assert makespan_ns(0, blocking=False) < makespan_ns(MS, blocking=False)
    assert makespan_ns(MS, blocking=False) < makespan_ns(MS, blocking=True)


def test_a_recording_has_one_step_per_seed() -> None:
    settings = [setting_of(DrawnCosts(), hint) for hint in ("bf", "bfw")]
    recordings = [new_recording(each.shape, 1, 1, {}) for each in settings]
    rows = run_settings(settings, range(2), recordings=recordings)
    assert rows == run_settings(settings, range(2))
    for each, recording, row in zip(settings, recordings, rows, strict=True):
        for records in recording.ranks:
            assert [phase.step for phase in records.phases] == [0, 1]
            assert len(records.tasks) == 2 * each.shape.num_tasks_of_a_rank
        windows = step_windows(recording)
        assert [end_ns - start_ns for start_ns, end_ns in windows.values()] == [
            trial.makespan_ns for trial in row.trials
        ]


def test_finished_is_called_after_every_trial() -> None:
    calls: list[None] = []
    settings: Sequence[Setting] = [setting_of(DrawnCosts()) for _ in range(3)]
    run_settings(settings, range(4), finished=lambda: calls.append(None))
    assert len(calls) == 12


def test_figures_of_a_row() -> None:
    s = 1_000_000_000
    row = Row(
        (
            Trial(3 * s, 2 * s, s, 4 * s, 0.25, (4, 3), (40, 30), Policy(HINTS["bf"])),
            Trial(5 * s, 3 * s, 2 * s, 6 * s, 0.75, (3, 6), (50, 20), Policy(HINTS["bf"])),
        ),
        num_chunks=2,
    )
    assert (row.mean_s, row.min_s, row.max_s, row.spread) == (4, 3, 5, 0.5)
    assert (row.floor_s, row.ratio_to_floor) == (2.5, 1.6)
    assert (row.load_s, row.ratio_to_load) == (1.5, 4 / 1.5)
    assert (row.bubble_fraction, row.peak_held) == (0.5, (2, 3))
    assert row.peak_held_bytes == (50, 30)
    assert row.bound_s == 5
    other = Row((Trial(2 * s, s, s, None, 0, (1, 1), None, Policy(HINTS["bf"])),), 1)
    assert row.ratio_to(other) == 2
    assert other.bound_s is None
    assert other.peak_held_bytes is None
