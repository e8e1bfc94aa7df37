"""Tests that the replay of a recorded run repeats its decisions and its step times."""

from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.errors import RrfpError, UsageError
from rrfp.replay.change import Change, replay, task_times
from rrfp.replay.cost_sources import costs_of
from rrfp.replay.measured import StepSample, measure, redispatch
from rrfp.replay.recorded import RecordedRun, read_run
from rrfp.schedule.hints import Order
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.shape import SPLIT_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.engine import StepConditions
from rrfp.trace.perfetto.reader import read_trace
from rrfp.trace.records import Recording, task_of
from tests.analyze.simulated_runs import MEGATRONS, OURS, policy_of, random_times, simulated_run
from tests.properties.cases import examples
from tests.train.trained import rrfp


def errors(run: RecordedRun) -> list[float]:
    """Return the relative error of each step's replayed time."""
    return [
        abs(replay(run, step).makespan_ns - step.window_ns) / step.window_ns
        for step in measure(run)
    ]


def check_decisions(run: RecordedRun) -> int:
    """Check that every rank's stimuli reproduce its tasks; return the number of checked ranks of
    steps."""
    num_checked = 0
    for step in run.steps:
        for replica in step.replicas:
            for members in replica:
                for member, rank in enumerate(members):
                    ran = [task_of(record) for record in rank.tasks]
                    decided = [task for _, task in redispatch(run, members, member)]
                    assert list(filter(None, decided)) == ran
                    num_checked += 1
    return num_checked


def check_error(run: RecordedRun) -> None:
    """Check the median error of the replayed step times. It is larger for Megatron's schedule,
    whose recording has waits but no messages and delays."""
    assert median(errors(run)) <= (0.05 if run.is_blocking else 1e-3)


# The sample traces.


def test_the_stimuli_of_a_real_run_reproduce_its_dispatch_sequence() -> None:
    assert check_decisions(read_run(read_trace(OURS))) == 4 * 4


def test_a_run_with_other_decisions_is_refused() -> None:
    recording = read_trace(OURS)
    recording.settings["settings"]["hint"] = "f-first"  # type: ignore[index]
    run = read_run(recording)
    said = r"rank [0-3] took in leads to [0-3][FB]\d where it ran [0-3][FB]\d in step 0: .*again"
    with pytest.raises(RrfpError, match=said):
        check_decisions(run)
    with pytest.raises(RrfpError, match=said):
        measure(run)


def test_a_member_with_other_decisions_is_refused() -> None:
    policy, shape = policy_of("bf", Shape(2, 4), limit=32)
    conditions = StepConditions(random_times(Random(1), shape), num_members=2)
    recording = simulated_run(policy, shape, [conditions])
    follower = next(rank for rank in recording.ranks if rank.info.tp_rank == 1)
    tasks = follower.tasks
    tasks[0], tasks[1] = tasks[1], tasks[0]
    said = f"rank {follower.info.rank} took in leads to 0F0 where it ran 0F1 in step 0"
    with pytest.raises(RrfpError, match=said):
        measure(read_run(recording))


@pytest.mark.parametrize("path", [OURS, MEGATRONS])
def test_a_real_run_replays_in_its_measured_time(path: Path) -> None:
    check_error(read_run(read_trace(path)))


def test_megatrons_run_is_read_as_blocking_and_has_no_decisions() -> None:
    run = read_run(read_trace(MEGATRONS))
    assert run.is_blocking
    assert run.policy.dispatch is Dispatch.FIXED
    assert run.policy.limit is None
    with pytest.raises(RrfpError, match="replay a run of --dispatch ready or fixed"):
        list(redispatch(run, run.steps[0].replicas[0][0]))


# Fresh runs.


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--pp=2", "--tp=2", "--hint=bfw"), id="group", marks=pytest.mark.slow),
        pytest.param(
            ("--pp=2", "--chunks=2", "--placement=v", "--hint=zb-v", "--hold=3"),
            id="chunks",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--pp=2", "--dp=2", "--dispatch=fixed", "--hint=1f1b"),
            id="fixed",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--pp=2", "--tp=2", "--hint=gpipe", "--dispatch=fixed"),
            id="fixed group",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--pp=2", "--dp=2", "--ep=2", "--experts=2"),
            id="experts",
            marks=pytest.mark.slow,
        ),
        pytest.param(("--pp=4", "--dispatch=megatron"), id="megatron", marks=pytest.mark.slow),
        pytest.param(
            ("--pp=4", "--chunks=2", "--layers=8", "--dispatch=megatron"),
            id="megatron's chunks",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_fresh_run_is_replayed(tmp_path: Path, flags: tuple[str, ...]) -> None:
    tiny = ("--layers=4", "--hidden=32", "--heads=4", "--seq-length=32", "--microbatches=4")
    done = rrfp(tmp_path, "train", "--out=run", "--steps=10", *tiny, *flags)
    assert done.returncode == 0, done.stderr
    recording = read_trace(tmp_path / "run" / "trace.pftrace")
    run = read_run(recording)
    assert len(run.steps) == 10
    check_error(run)
    if not run.is_blocking:
        assert check_decisions(run) == 10 * len(recording.ranks)


# Simulated runs, whose times are known.


@st.composite
def runs(draw: st.DrawFn) -> tuple[Policy, Shape, list[StepConditions]]:
    """Draw a policy, a shape, and the conditions of its replicas."""
    num_ranks = draw(st.integers(1, 4))
    num_chunks = draw(st.sampled_from([1, 1, 2]))
    placement = draw(st.sampled_from(list(Placement))) if num_chunks == 2 else Placement.LOOP
    shape = Shape(num_ranks, draw(st.integers(1, 8)), num_chunks, placement)
    fixed = draw(st.booleans())
    hint = draw(st.sampled_from(["bf", "bfw", "f-first", "bfw-deep", "gpipe"]))
    if fixed:
        policy, shape = policy_of(hint, shape, dispatch=Dispatch.FIXED)
    elif draw(st.booleans()):
        policy, shape = policy_of(hint, shape, hold=draw(st.integers(1, 4)))
    else:
        policy, shape = policy_of(hint, shape, limit=draw(st.integers(1, 6)))
    rng = Random(draw(st.integers(0, 10**6)))
    way_ns = {
        Task(stage, kind, m): rng.randrange(80)
        for stage in range(shape.num_stages)
        for kind in Kind
        for m in range(shape.num_microbatches)
    }
    num_members = draw(st.sampled_from([1, 1, 2]))
    conditions_by_replica = [
        StepConditions(
            random_times(rng, shape),
            lambda sender, receiver, task: way_ns[task],
            num_members=num_members,
        )
        for _ in range(draw(st.integers(1, 2)))
    ]
    return policy, shape, conditions_by_replica


@given(runs())
@examples(quick=40, thorough=1000)
def test_a_simulated_run_is_replayed_to_the_ns(
    made: tuple[Policy, Shape, list[StepConditions]],
) -> None:
    policy, shape, conditions_by_replica = made
    run = read_run(simulated_run(policy, shape, conditions_by_replica, num_steps=2))
    assert run.shape.kinds == shape.kinds
    assert (run.policy.limit, run.policy.hold) == (policy.limit, policy.hold)
    assert run.num_members == conditions_by_replica[0].num_members
    check_decisions(run)
    assert errors(run) == [0, 0]
    for step in measure(run):
        for replica, conditions in zip(step.replicas, conditions_by_replica, strict=True):
            assert set(replica.overheads_ns.values()) <= {0}
            assert task_times(replica.durations_ns, shape, 0.4).forward == conditions.times.forward


@pytest.mark.parametrize(
    ("hint", "whole"),
    [
        ("1f1b", Shape(4, 8)),
        ("zb-h1", Shape(4, 8)),
        ("interleaved", Shape(4, 8, 2)),
        # Some ranks run all of their forwards as warm-up.
        ("interleaved", Shape(4, 4, 2)),
    ],
)
def test_a_simulated_run_over_blocking_links_is_replayed(hint: str, whole: Shape) -> None:
    policy, shape = policy_of(hint, whole, dispatch=Dispatch.FIXED)
    times = random_times(Random(5), shape)
    conditions = StepConditions(times, lambda sender, receiver, task: 30, blocking=True)
    run = read_run(simulated_run(policy, shape, [conditions], links="blocking"))
    assert run.is_blocking
    assert max(errors(run)) <= 0.01


def test_the_order_of_a_file_is_reconstructed_from_recorded_positions() -> None:
    policy, shape = policy_of("zb-h1", Shape(3, 6), limit=32)
    assert isinstance(policy.hint, Order)
    times = random_times(Random(1), shape)
    run = read_run(simulated_run(policy, shape, [StepConditions(times)], hint="mine.csv"))
    assert isinstance(run.policy.hint, Order)
    assert run.policy.hint.rows == policy.hint.rows
    assert run.policy.hint.name == run.hint_name == "mine.csv"


def test_only_a_simulated_run_can_be_unbounded() -> None:
    policy, shape = policy_of("f-first", Shape(2, 40))
    recording = simulated_run(policy, shape, [StepConditions(random_times(Random(1), shape))])
    run = read_run(recording)
    assert run.policy_description == "f-first ready"
    assert errors(run) == [0]
    assert run.bounds_under(Dispatch.READY) == run.bounds_under(Dispatch.FIXED) == (None, None)
    trained = read_run(replace(recording, settings=recording.settings | {"simulated": False}))
    assert trained.policy_description == "f-first ready, limit 32"
    # The default limit does not apply to a binding order.
    assert trained.bounds_under(Dispatch.FIXED) == (None, None)
    # A run with a binding order gets the usual limit under ready dispatch.
    policy, shape = policy_of("1f1b", Shape(2, 4), dispatch=Dispatch.FIXED)
    run = read_run(simulated_run(policy, shape, [StepConditions(random_times(Random(1), shape))]))
    assert Change(dispatch=Dispatch.READY).policy(run)[0].limit == 32
    wide, shape = policy_of("1f1b", Shape(20, 24), dispatch=Dispatch.FIXED)
    run = read_run(simulated_run(wide, shape, [StepConditions(random_times(Random(1), shape))]))
    assert Change(dispatch=Dispatch.READY).policy(run)[0].limit == 40
    assert Change(hint=HINTS["bf"], unbound=True).policy(run)[0].limit is None


@pytest.mark.parametrize("bounds", [{"limit": 5}, {"hold": 4}])
def test_a_binding_order_respects_the_given_bound(bounds: dict[str, int]) -> None:
    policy, shape = policy_of("1f1b", Shape(2, 4), dispatch=Dispatch.FIXED, **bounds)
    run = read_run(simulated_run(policy, shape, [StepConditions(random_times(Random(1), shape))]))
    given = bounds.get("limit"), bounds.get("hold")
    assert run.bounds_under(Dispatch.READY) == run.bounds_under(Dispatch.FIXED) == given


def one_step() -> Recording:
    policy, shape = policy_of("bf", Shape(2, 3), limit=32)
    return simulated_run(
        policy, shape, [StepConditions(random_times(Random(2), shape))], num_steps=3
    )


def test_an_incomplete_step_is_left_out() -> None:
    recording = one_step()
    last = recording.ranks[1].tasks.pop()
    run = read_run(recording)
    assert [records.step for records in run.steps] == [0, 1]
    assert run.left_out == (last.step,)
    assert [records.step for records in read_run(recording, range(1, 2)).steps] == [1]
    with pytest.raises(UsageError, match="it has those from 0 to 2"):
        read_run(recording, range(7, 9))
    with pytest.raises(RrfpError, match="no step of the trace has all of its tasks"):
        read_run(recording, range(2, 3))


def test_missing_or_invalid_contents_of_a_trace_are_refused() -> None:
    recording = one_step()
    recording.ranks[0].stimuli = recording.ranks[0].stimuli[:4]
    with pytest.raises(RrfpError, match="rank 0 took in leads to 3 of the 6 tasks"):
        measure(read_run(recording))
    settings = recording.settings["settings"]
    assert isinstance(settings, dict)
    for name, value, said in (
        ("limit", -1, "limit = -1"),
        ("limit", "much", "limit = 'much'"),
        ("dispatch", "never", "dispatch = 'never'"),
        ("hint", None, "hint = None"),
        ("hint", "bfw", "tasks of the trace are F B and its hint, bfw, has F B W"),
    ):
        broken = replace(recording, settings={"settings": settings | {name: value}})
        with pytest.raises(RrfpError, match=said):
            read_run(broken)
    with pytest.raises(RrfpError, match="does not tell the settings"):
        read_run(replace(recording, settings={}))
    with pytest.raises(RrfpError, match="lacks ranks"):
        read_run(replace(recording, ranks=recording.ranks[1:]))
    with pytest.raises(RrfpError, match="no ranks"):
        read_run(replace(recording, ranks=[]))


def test_steps_without_backward_are_refused() -> None:
    recording = one_step()
    for rank in recording.ranks:
        rank.tasks = [task for task in rank.tasks if task.kind == "F"]
    for read in (read_run, costs_of):
        with pytest.raises(RrfpError, match="have no backward; choose a run that trains"):
            read(recording)


# Costs.


def test_costs_are_the_recorded_times_step_by_step() -> None:
    recording = read_trace(OURS)
    costs = costs_of(recording)
    shape = Shape(4, 8)
    for seed in range(6):
        times = costs.step(shape, seed, 0).times
        for records in recording.ranks:
            for task in records.tasks:
                if task.step != seed % 4:
                    continue
                time_ns = task.end_ns - task.start_ns
                if task.kind == "F":
                    assert times.forward[task.stage][task.microbatch] == time_ns
                else:
                    part = times.weight_gradient[task.stage][task.microbatch]
                    assert part == round(0.4 * time_ns)
                    assert times.input_gradient[task.stage][task.microbatch] == time_ns - part
    assert costs.step(shape, 1, 0) == costs.step(replace(shape, kinds=SPLIT_BACKWARD), 1, 0)
    assert costs.step(shape, 1, 0).links.latency_ns > 0


def test_drawn_costs_are_recorded_times_of_the_same_stage_and_kind() -> None:
    recording = read_trace(OURS)
    costs = costs_of(recording, drawn=True)
    forwards = {
        stage: {
            task.end_ns - task.start_ns for task in recording.ranks[stage].tasks if task.kind == "F"
        }
        for stage in range(4)
    }
    drawn = costs.step(Shape(4, 50), 3, 0)
    for stage, row in enumerate(drawn.times.forward):
        assert len(row) == 50
        assert set(row) <= forwards[stage]
        assert len(set(row)) > 10
    assert drawn == costs.step(Shape(4, 50), 3, 0)
    assert drawn != costs.step(Shape(4, 50), 4, 0)
    assert drawn.times.forward != costs.step(Shape(4, 50), 3, 1).times.forward
    # A longer step begins with the same draws as a shorter one.
    assert costs.step(Shape(4, 5), 3, 0).times.forward[2] == drawn.times.forward[2][:5]


@pytest.mark.parametrize(
    ("shape", "flag"),
    [
        (Shape(2, 8), "--pp 4"),
        (Shape(4, 8, 2), "--chunks 1"),
        (Shape(4, 9), "--microbatches 8"),
    ],
)
def test_costs_fit_only_their_own_shape(shape: Shape, flag: str) -> None:
    with pytest.raises(UsageError, match=f"choose {flag} or other costs"):
        costs_of(read_trace(OURS)).step(shape, 0, 0)


def test_a_hint_without_split_backward_gets_the_whole_backward() -> None:
    policy, shape = policy_of("bf", Shape(2, 3), limit=32)
    times = random_times(Random(4), shape)
    (step,) = measure(read_run(simulated_run(policy, shape, [StepConditions(times)])))
    for w_share in (0, 0.25, 1):
        found = task_times(step.replicas[0].durations_ns, shape, w_share)
        assert found.by_kind(split=False) == times.by_kind(split=False)
    assert HINTS["bf"] == policy.hint


def test_a_sample_is_spread_over_the_affordable_steps() -> None:
    sample = StepSample(num_tasks=100, most_tasks_of_a_step=50)
    assert sample.choose(range(9), 40) == [2, 6]
    assert sample.choose(range(9), 50) == [2, 6]
    assert sample.choose(range(9), 1) == list(range(9))
    assert sample.choose([], 1) == []
    with pytest.raises(RrfpError, match="a step has 51 tasks, more than the 50"):
        sample.choose(range(9), 51)
