"""Tests of patience: decisions about announced tasks, the statistics that ranks keep of
announcements, and simulated steps. `properties/test_steps.py` tests random steps."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.errors import UsageError
from rrfp.schedule.dispatcher import Dispatcher, DispatchError, Group
from rrfp.schedule.hints import WeightGradients, kinds_of
from rrfp.schedule.named_hints import HINTS, hint_named
from rrfp.schedule.policy import (
    LONGEST_NS,
    AutoPatience,
    Dispatch,
    Hold,
    Patience,
    Policy,
    parse_patience,
    patience_as_json,
)
from rrfp.schedule.punctuality import (
    RISK,
    TRUST_IN_ORDERS,
    TRUST_IN_RULES,
    JustInTime,
    Punctuality,
    Trust,
    new_punctuality,
)
from rrfp.schedule.rehearsal import fitted
from rrfp.schedule.shape import SPLIT_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import (
    Announced,
    ComputeIdle,
    DecideAhead,
    InputArrived,
    Kind,
    RunTask,
    Task,
    Wait,
    Waited,
)
from rrfp.simulate.costs.model import Links
from rrfp.simulate.engine import StepConditions, TaskTimes
from rrfp.simulate.jitter import parse_jitter
from rrfp.simulate.step import new_recording, play, simulate_step
from rrfp.trace.records import Recording, StimulusRecord, stimulus_of, stimulus_record
from tests.analyze.simulated_runs import equal_times
from tests.properties.cases import an_order, arrive, ask, hint_dispatcher, replayed, task

MS = 10**6
AUTO = AutoPatience.AUTO


# The setting.


@pytest.mark.parametrize(
    ("text", "patience"),
    [("auto", AUTO), ("0", 0), ("5ms", 5 * MS), ("0.5ms", MS // 2), ("7ns", 7), ("1s", 1000 * MS)],
)
def test_a_patience_is_read(text: str, patience: Patience) -> None:
    assert parse_patience(text) == patience
    assert parse_patience(patience_as_json(patience)) == patience


@given(st.integers(0, LONGEST_NS))
def test_a_formatted_patience_is_read_back(patience: int) -> None:
    assert parse_patience(patience_as_json(patience)) == patience


@pytest.mark.parametrize(
    "text", ["", "5", "-1ms", "5 m", "61s", "1e3ms", "never", "5min", "9" * 40]
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write auto, 0"):
        parse_patience(text, "--patience")


@pytest.mark.parametrize("patience", [-1, 1.5, True, None, LONGEST_NS + 1])
def test_another_value_is_refused(patience: object) -> None:
    with pytest.raises(UsageError, match="the patience is"):
        Policy(hint_named("bf"), patience=patience)  # type: ignore[arg-type]


def test_a_binding_order_refuses_patience() -> None:
    shape = Shape(2, 2)
    order = an_order(shape, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    with pytest.raises(UsageError, match="leave --patience out"):
        Policy(order, dispatch=Dispatch.FIXED, patience=AUTO)


# Single decisions, on rank 1 of 2 or 3.


def announce(
    dispatcher: Dispatcher, text: str, expected_ns: int, patience_ns: int, *, now_ns: int = 0
) -> None:
    assert dispatcher.handle(now_ns, Announced(task(text), expected_ns, patience_ns)) == ()


def by_order(*rows: str, num_microbatches: int = 3, **policy: object) -> Dispatcher:
    order = an_order(Shape(2, num_microbatches), *rows)
    return Dispatcher(order.shape, 1, Policy(order, **policy), validate=True)  # type: ignore[arg-type]


def last_of_three() -> Dispatcher:
    """Return the dispatcher of rank 1 after 1F0, with 1F2 ready; its order has 1F1 before 1F2."""
    dispatcher = by_order("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2")
    arrive(dispatcher, "1F0 1F2")
    assert ask(dispatcher) == "1F0"
    return dispatcher


@pytest.mark.parametrize(
    ("now_ns", "answer"),
    [(89, "1F2"), (90, "patience"), (100, "patience"), (109, "patience"), (110, "1F2")],
)
def test_a_rank_waits_for_a_better_task_that_is_due_within_its_patience(
    now_ns: int, answer: str
) -> None:
    dispatcher = last_of_three()
    announce(dispatcher, "1F1", 100, 10)
    assert ask(dispatcher, now_ns) == answer


def test_a_patient_wait_has_a_deadline_and_a_cause_and_ends_on_arrival() -> None:
    dispatcher = last_of_three()
    announce(dispatcher, "1F1", 100, 10)
    assert dispatcher.handle(95, ComputeIdle()) == (Wait("patience", 110),)  # type: ignore[arg-type]
    assert dispatcher.handle(97, ComputeIdle()) == (Wait("patience", 110),)  # type: ignore[arg-type]
    arrive(dispatcher, "1F1", now_ns=103)
    waited, run = dispatcher.handle(103, ComputeIdle())
    assert waited == Waited("patience", 95, 103)  # type: ignore[arg-type]
    assert isinstance(run, RunTask)
    assert run.task == task("1F1")


def test_a_late_task_is_not_waited_for_again() -> None:
    dispatcher = last_of_three()
    announce(dispatcher, "1F1", 100, 10)
    assert ask(dispatcher, 100) == "patience"
    waited, run = dispatcher.handle(110, ComputeIdle())
    assert waited == Waited("patience", 100, 110)  # type: ignore[arg-type]
    assert isinstance(run, RunTask)
    assert run.task == task("1F2")
    # A second announcement does not make the rank wait again.
    announce(dispatcher, "1F1", 200, 100)
    assert ask(dispatcher, 150) == "1B0"


def test_a_rank_does_not_wait_for_tasks_that_its_hint_ranks_later() -> None:
    dispatcher = by_order("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1B0 1F2 1B1 1B2")
    arrive(dispatcher, "1F0 1F1")
    assert [ask(dispatcher), ask(dispatcher)] == ["1F0", "1F1"]
    announce(dispatcher, "1F2", 100, 10)
    assert ask(dispatcher, 95) == "1B0"
    # Now it is next, before 1B1, which is ready.
    assert ask(dispatcher, 96) == "patience"


def test_a_rank_with_nothing_ready_waits_as_without_patience() -> None:
    dispatcher = by_order("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2")
    announce(dispatcher, "1F0", 100, 10)
    assert dispatcher.handle(95, ComputeIdle()) == (Wait("warmup"),)  # type: ignore[arg-type]
    arrive(dispatcher, "1F1", now_ns=96)
    # Before a rank's first task the cause of every wait is the warm-up, also with patience.
    assert dispatcher.handle(96, ComputeIdle()) == (Wait("warmup", 110),)  # type: ignore[arg-type]


def test_a_wait_keeps_the_round() -> None:
    dispatcher = hint_dispatcher("bf", Shape(3, 8), 1)
    arrive(dispatcher, "1F0 1F1")
    assert [ask(dispatcher), ask(dispatcher)] == ["1F0", "1F1"]
    arrive(dispatcher, "1B0 1B1")
    assert ask(dispatcher) == "1B0"
    # After a backward, bf prefers a forward, also while it waits for one.
    announce(dispatcher, "1F2", 50, 10)
    assert ask(dispatcher, 45) == "patience"
    arrive(dispatcher, "1F2", now_ns=50)
    assert ask(dispatcher, 50) == "1F2"
    assert ask(dispatcher, 60) == "1B1"


@pytest.mark.parametrize("w", WeightGradients)
def test_a_weight_gradient_is_postponed_only_by_an_order_that_ranks_it(w: WeightGradients) -> None:
    shape = Shape(2, 2, kinds=SPLIT_BACKWARD)
    order = an_order(shape, "0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1W0 1I1 1W1")
    dispatcher = Dispatcher(shape, 1, Policy(order, w=w), validate=True)
    arrive(dispatcher, "1F0")
    assert [ask(dispatcher), ask(dispatcher)] == ["1F0", "1B0"]
    announce(dispatcher, "1F1", 100, 10)
    assert ask(dispatcher, 95) == ("patience" if w is WeightGradients.RANKED else "1W0")


def test_a_rank_does_not_wait_for_tasks_that_its_bound_withholds() -> None:
    dispatcher = hint_dispatcher("f-first", Shape(3, 8), 1, hold=2)
    arrive(dispatcher, "1F0 1F1")
    assert [ask(dispatcher), ask(dispatcher)] == ["1F0", "1F1"]
    arrive(dispatcher, "1B0")
    announce(dispatcher, "1F2", 100, 10)
    assert ask(dispatcher, 95) == "1B0"


def test_a_leader_waits_on_behalf_of_its_followers() -> None:
    shape = Shape(2, 3)
    order = an_order(shape, "0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2")
    leader, follower = (
        Dispatcher(shape, 1, Policy(order), Group(2, leads=leads)) for leads in (True, False)
    )
    arrive(leader, "1F2")
    arrive(leader, "1F2", member=1)
    arrive(follower, "1F2")
    for member in (leader, follower):
        announce(member, "1F1", 100, 10)
    assert ask(follower, 95) == "warmup"
    # It also decides nothing ahead of the end of a task.
    assert leader.handle(95, DecideAhead()) == ()
    arrive(leader, "1F1", now_ns=99)
    assert leader.handle(99, ComputeIdle()) == (Wait("warmup", 110),)  # type: ignore[arg-type]
    arrive(leader, "1F1", now_ns=104, member=1)
    assert ask(leader, 104) == "1F1"


def test_an_announcement_to_the_wrong_rank_is_an_error() -> None:
    dispatcher = hint_dispatcher("bf", Shape(3, 2), 1)
    for text in ("2F0", "1F7"):
        with pytest.raises(DispatchError, match="went to the wrong rank"):
            dispatcher.handle(0, Announced(task(text), 10, 10))
    with pytest.raises(DispatchError, match="went to the wrong rank"):
        hint_dispatcher("bf", Shape(3, 2), 0).handle(0, Announced(task("0F0"), 10, 10))


# Statistics of announcements.


def punctuality_after(
    errors: Sequence[float], patience: Patience = AUTO, trust: Trust = TRUST_IN_ORDERS
) -> Punctuality:
    """Return a rank's punctuality after one announced 100 ns task per error, each late by that
    fraction of 100 ns."""
    punctuality = Punctuality(patience, trust)
    for number, error in enumerate(errors):
        wanted, announced_ns = Task(1, Kind.F, number), 1000 * number
        punctuality.announced(wanted, announced_ns, 100)
        punctuality.arrived(wanted, announced_ns + 100 + round(100 * error))
    return punctuality


def test_auto_waits_half_a_task_if_announcements_are_accurate() -> None:
    assert Punctuality(AUTO, TRUST_IN_ORDERS).patience_ns == 0
    assert punctuality_after([0.0] * 50).patience_ns == 50
    assert punctuality_after([0.0] * 50, trust=TRUST_IN_RULES).patience_ns == 25


def test_auto_does_not_wait_if_announcements_are_inaccurate() -> None:
    assert punctuality_after([0.6, -0.6] * 50).patience_ns == 0
    assert 0 < punctuality_after([0.3, -0.3] * 50).patience_ns < 50
    assert punctuality_after([0.3, -0.3] * 50, trust=TRUST_IN_RULES).patience_ns == 0


def test_a_fixed_patience_does_not_depend_on_earlier_announcements() -> None:
    assert punctuality_after([0.6, -0.6] * 50, 7).patience_ns == 7


def test_one_stop_has_no_lasting_effect() -> None:
    punctuality = punctuality_after([0.0] * 100 + [1e6] + [0.0] * 200)
    assert punctuality.noise < TRUST_IN_ORDERS.noisy


def test_the_latency_of_messages_is_learned() -> None:
    punctuality = punctuality_after([0.3] * 100)
    assert punctuality.announced(Task(1, Kind.F, 0), 0, 100).expected_ns == 130
    assert punctuality.noise < 0.1
    # The other stage has no announcements yet.
    assert punctuality.announced(Task(2, Kind.F, 0), 0, 100).expected_ns == 100


def test_an_unannounced_input_changes_nothing() -> None:
    punctuality = punctuality_after([0.0] * 50)
    before = punctuality.noise
    punctuality.arrived(Task(1, Kind.B, 0), 12345)
    assert punctuality.noise == before


@pytest.mark.parametrize(
    ("name", "num_chunks", "waits"),
    [("zb-v", 2, True), ("bf", 1, True), ("bf-deep", 2, True), ("bf", 2, False)],
)
def test_auto_never_waits_under_rules_that_put_shallow_chunks_first(
    name: str, num_chunks: int, waits: bool
) -> None:
    hint = hint_named(name)
    assert (new_punctuality(Policy(hint, patience=AUTO), num_chunks) is not None) is waits
    assert new_punctuality(Policy(hint, patience=5), num_chunks) is not None
    assert new_punctuality(Policy(hint), num_chunks) is None


# Simulated steps.

HOP = Links(latency_ns=MS // 2)


def policy_and_shape(
    name: str, shape: Shape, hold: Hold, patience: Patience, w: str = "idle"
) -> tuple[Policy, Shape]:
    policy = Policy(hint_named(name), hold=hold, w=WeightGradients(w), patience=patience)
    return fitted(policy, shape)


def jittered(shape: Shape, sigma: float, seed: int) -> tuple[TaskTimes, TaskTimes]:
    """Return equal times, before and after jitter."""
    shape = replace(shape, kinds=SPLIT_BACKWARD)
    times = equal_times(shape, 10 * MS, 10 * MS, 10 * MS)
    return times, parse_jitter(f"lognormal:{sigma}").times(times, shape, seed, 0)


def ratio(name: str, w: str, sigma: float, patience: Patience, num_seeds: int = 4) -> float:
    """Return the mean step time of a V of eight ranks, divided by the load."""
    shape = Shape(8, 32, 2, Placement.V)
    policy, shape = policy_and_shape(name, shape, 8, patience, w)
    total_ns = load_ns = 0
    for seed in range(num_seeds if sigma else 1):
        expected, times = jittered(shape, sigma, seed)
        done = play(shape, policy, StepConditions(times, HOP, expected=expected))
        total_ns += done.makespan_ns
        load_ns += max(done.busy_ns)
    return total_ns / load_ns


def test_patience_helps_if_task_times_are_predictable() -> None:
    assert ratio("zb-v", "ranked", 0.0, 0) > 1.09
    assert ratio("zb-v", "ranked", 0.0, AUTO) < 1.05
    assert ratio("zb-v", "ranked", 0.1, AUTO) < 1.06


def test_auto_costs_nothing_if_task_times_are_unpredictable() -> None:
    assert ratio("zb-v", "ranked", 1.0, AUTO, 2) == ratio("zb-v", "ranked", 1.0, 0, 2)


def test_ranks_that_know_only_measured_times_also_wait() -> None:
    shape = Shape(4, 16, 2, Placement.V)
    policy, shape = policy_and_shape("zb-v", shape, 4, AUTO, "ranked")
    times = equal_times(shape, 10 * MS, 10 * MS, 10 * MS)
    with_forecast = play(shape, policy, StepConditions(times, HOP, expected=times))
    assert play(shape, policy, StepConditions(times, HOP)) == with_forecast
    assert (
        with_forecast.makespan_ns
        < play(shape, replace(policy, patience=0), StepConditions(times, HOP)).makespan_ns
    )


def a_recording(patience: Patience, num_members: int = 1) -> tuple[Recording, Policy, Shape]:
    shape = Shape(4, 8, 2, Placement.V)
    policy, shape = policy_and_shape("zb-v", shape, 4, patience, "ranked")
    expected, times = jittered(shape, 0.1, 5)
    conditions = StepConditions(
        times, HOP, num_members=num_members, expected=expected, agreement_ns=MS // 10
    )
    recording = new_recording(shape, num_members, 1, {})
    simulate_step(shape, policy, [conditions], recording=recording)
    return recording, policy, shape


@pytest.mark.parametrize("num_members", [1, 2])
def test_a_recorded_step_is_replayed_exactly_on_any_clock(num_members: int) -> None:
    recording, policy, shape = a_recording(AUTO, num_members)
    num_waits = 0
    for rank in recording.ranks:
        group = Group(num_members, rank.info.tp_rank == 0) if num_members > 1 else None
        num_waits += sum(wait.cause == "patience" for wait in rank.waits)
        names = [stimulus.name for stimulus in rank.stimuli]
        assert ("Announced" in names) is (rank.info.tp_rank == 0)
        for moved_ns in (0, 10**12):
            stimuli = [each._replace(time_ns=each.time_ns + moved_ns) for each in rank.stimuli]
            dispatcher = Dispatcher(shape, rank.info.pp_rank, policy, group)
            assert replayed(stimuli, dispatcher) == [
                Task(run.stage, Kind(run.kind), run.microbatch) for run in rank.tasks
            ]
    assert num_waits > 0


def test_without_patience_nothing_is_announced() -> None:
    recording, _, _ = a_recording(0)
    names = {stimulus.name for rank in recording.ranks for stimulus in rank.stimuli}
    assert names == {"ComputeIdle", "InputArrived"}


def test_an_announcement_is_recorded_and_read_back() -> None:
    announced = Announced(task("1F3"), 90, 25)
    record = stimulus_record(100, 7, announced)
    assert record == StimulusRecord(100, 7, "Announced", "F", 1, 3, 0, -10, 25)
    assert stimulus_of(record) == announced
    moved = record._replace(time_ns=1100)
    assert stimulus_of(moved) == announced._replace(expected_ns=1090)


def test_an_arrival_before_its_announcement_is_not_waited_for() -> None:
    dispatcher = last_of_three()
    dispatcher.handle(0, InputArrived(task("1F1")))
    announce(dispatcher, "1F1", 100, 10)
    assert ask(dispatcher, 95) == "1F1"


def test_every_hint_respects_its_hold_with_patience() -> None:
    for name in ("bf", "bfw", "zb-h1", "1f1b"):
        shape = Shape(4, 8)
        hint = hint_named(name).for_shape(shape)
        policy, shape = policy_and_shape(name, replace(shape, kinds=kinds_of(hint)), 3, 5 * MS)
        expected, times = jittered(shape, 0.3, 1)
        done = play(shape, policy, StepConditions(times, HOP, expected=expected))
        assert max(done.peak_held) <= 3


# The time at which a rank decides on its next task while its device runs one.


def trained_just_in_time(
    noise: float, launch_ns: int, risk: float = RISK, mean_ns: int = 20 * MS
) -> JustInTime:
    """Return a rank's statistics after 2,000 tasks of this mean time, with lognormal noise."""
    draw = Random(0)
    just_in_time = JustInTime(risk)
    for _ in range(2000):
        factor = draw.lognormvariate(-(noise**2) / 2, noise)
        just_in_time.ran(Kind.F, 0, round(mean_ns * factor), known_ns=mean_ns)
        just_in_time.launched(Kind.F, 0, launch_ns)
    return just_in_time


def test_without_measurements_a_rank_decides_immediately() -> None:
    assert JustInTime().due_ns(Kind.F, 0, 7) == 7


def test_a_rank_decides_one_launch_before_the_end_of_a_predictable_task() -> None:
    due_ns = trained_just_in_time(0.0, 5 * MS).due_ns(Kind.F, 0, 100, known_ns=20 * MS)
    assert due_ns is not None
    # The search has a step of 1/64 of the task.
    assert 100 + 14 * MS <= due_ns <= 100 + 15 * MS


def test_with_an_instant_launch_a_rank_decides_at_the_end() -> None:
    assert trained_just_in_time(0.5, 0).due_ns(Kind.F, 0, 0, known_ns=20 * MS) is None


def test_zero_risk_decides_immediately_and_infinite_risk_at_the_end() -> None:
    assert trained_just_in_time(0.5, MS, risk=0.0).due_ns(Kind.F, 0, 9, known_ns=20 * MS) == 9
    assert trained_just_in_time(0.5, MS, risk=inf).due_ns(Kind.F, 0, 9, known_ns=20 * MS) is None


@pytest.mark.parametrize("noise", [0.1, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("launch_ns", [MS, 5 * MS])
def test_the_risk_matches_drawn_times(noise: float, launch_ns: int) -> None:
    """The risk is the share of drawn times that end within one launch after the decision, among
    those that have not ended before."""
    just_in_time = trained_just_in_time(noise, launch_ns)
    due_ns = just_in_time.due_ns(Kind.F, 0, 0, known_ns=20 * MS)
    assert due_ns is not None
    draw = Random(1)
    mean_ns, sigma = 20 * MS, just_in_time.noise
    times = [mean_ns * draw.lognormvariate(-(sigma**2) / 2, sigma) for _ in range(200_000)]

    def chance(at_ns: float) -> float:
        left = [time for time in times if time > at_ns]
        return sum(time <= at_ns + launch_ns for time in left) / len(left)

    assert chance(due_ns) >= RISK * 0.9
    step_ns = mean_ns / 64
    if due_ns > 0:
        assert chance(due_ns - step_ns) <= RISK * 1.1


def test_the_longest_launch_of_all_kinds_counts() -> None:
    just_in_time = trained_just_in_time(0.0, MS)
    for _ in range(50):
        just_in_time.launched(Kind.B, 0, 6 * MS)
    assert just_in_time.launch_ns == 6 * MS


def test_a_launch_that_compiles_is_forgotten_with_the_next() -> None:
    just_in_time = JustInTime()
    just_in_time.launched(Kind.F, 0, 3_000 * MS)
    assert just_in_time.launch_ns == 3_000 * MS
    just_in_time.launched(Kind.F, 0, MS)
    assert just_in_time.launch_ns == MS
    for _ in range(20):
        just_in_time.launched(Kind.F, 0, MS)
    just_in_time.launched(Kind.F, 0, 500 * MS)
    assert just_in_time.launch_ns == MS
    for _ in range(9):
        just_in_time.launched(Kind.F, 0, 4 * MS)
    assert just_in_time.launch_ns == 4 * MS


# Simulated steps.


def conditions_of(shape: Shape, seed: int, launch_ns: int, risk: float = RISK) -> StepConditions:
    draw = Random(seed)

    def rows() -> list[list[int]]:
        return [
            [draw.randrange(MS, 30 * MS) for _ in range(shape.num_microbatches)]
            for _ in range(shape.num_stages)
        ]

    return StepConditions(TaskTimes(rows(), rows(), rows()), launch_ns=launch_ns, launch_risk=risk)


SHAPES = (Shape(1, 3), Shape(3, 6), Shape(2, 5, 2), Shape(3, 7, 2, Placement.V))


@given(
    hint_name=st.sampled_from(["bf", "bfw", "f-first", "bfw-deep"]),
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 1000),
    launch_ns=st.sampled_from([1, MS, 50 * MS]),
    risk=st.sampled_from([0.0, RISK, inf]),
    hold=st.none() | st.integers(1, 4),
)
def test_every_task_runs_once_and_launches_take_their_time(
    hint_name: str, shape: Shape, seed: int, launch_ns: int, risk: float, hold: int | None
) -> None:
    hint = HINTS[hint_name]
    shape = replace(shape, kinds=kinds_of(hint))
    policy = Policy(hint, hold=hold)
    recording = new_recording(shape, 1, 1, {})
    conditions = conditions_of(shape, seed, launch_ns, risk)
    step = simulate_step(shape, policy, [conditions], recording=recording)
    assert play(shape, policy, conditions_of(shape, seed, launch_ns, risk)).makespan_ns == (
        step.makespan_ns
    )
    for rank in recording.ranks:
        tasks = sorted(rank.tasks)
        assert len({task[3:7] for task in tasks}) == shape.num_tasks_of_a_rank
        assert tasks[0].start_ns >= launch_ns
        for before, after in pairwise(tasks):
            assert after.start_ns >= before.end_ns
            if risk == inf:
                assert after.start_ns >= before.end_ns + launch_ns


def test_a_rank_with_enough_work_hides_its_launches() -> None:
    """On one rank with equal times, the device is never idle after the first launch and one task of
    each kind. A rank that decides at the end leaves it idle each time."""
    shape = Shape(1, 40)
    rows = [[20 * MS] * 40]
    times = TaskTimes(rows, rows, rows)
    policy = Policy(HINTS["bf"])
    work_ns, launch_ns = 40 * 60 * MS, 5 * MS
    run = play(shape, policy, StepConditions(times, launch_ns=launch_ns))
    assert run.makespan_ns == work_ns + launch_ns
    late = play(shape, policy, StepConditions(times, launch_ns=launch_ns, launch_risk=inf))
    assert late.makespan_ns == work_ns + 80 * launch_ns
