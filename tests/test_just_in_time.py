"""When a rank decides on its next task while its device runs one."""

from dataclasses import replace
from itertools import pairwise
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.schedule.hints import kinds_of
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.patience import RISK, JustInTime
from rrfp.schedule.policy import Policy
from rrfp.schedule.shape import Placement, Shape
from rrfp.schedule.tasks import Kind
from rrfp.simulate.recording import new_recording
from rrfp.simulate.step import play, simulate_step
from rrfp.simulate.world import TaskTimes, World

MS = 1_000_000


def taught(noise: float, launch_ns: int, risk: float = RISK, mean_ns: int = 20 * MS) -> JustInTime:
    """What a rank knows after many tasks of this mean, with so much noise."""
    draw = Random(0)
    known = JustInTime(risk)
    for _ in range(2000):
        factor = draw.lognormvariate(-(noise**2) / 2, noise)
        known.ran(Kind.F, 0, round(mean_ns * factor), known_ns=mean_ns)
        known.launched(Kind.F, 0, launch_ns)
    return known


def test_nothing_known_decides_at_once() -> None:
    assert JustInTime().due_ns(Kind.F, 0, 7) == 7


def test_tasks_that_take_what_is_expected_are_launched_upon_just_in_time() -> None:
    due_ns = taught(0.0, 5 * MS).due_ns(Kind.F, 0, 100, known_ns=20 * MS)
    assert due_ns is not None
    # A search in steps of a 64th of the task.
    assert 100 + 14 * MS <= due_ns <= 100 + 15 * MS


def test_a_launch_that_takes_no_time_waits_for_the_end() -> None:
    assert taught(0.5, 0).due_ns(Kind.F, 0, 0, known_ns=20 * MS) is None


def test_no_risk_decides_at_once_and_any_risk_at_the_end() -> None:
    assert taught(0.5, MS, risk=0.0).due_ns(Kind.F, 0, 9, known_ns=20 * MS) == 9
    assert taught(0.5, MS, risk=inf).due_ns(Kind.F, 0, 9, known_ns=20 * MS) is None


@pytest.mark.parametrize("noise", [0.1, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("launch_ns", [MS, 5 * MS])
def test_the_chance_is_that_of_drawn_times(noise: float, launch_ns: int) -> None:
    """Among many drawn times, those that end within a launch of the decision are as many as risked,
    of those that have not ended by then."""
    known = taught(noise, launch_ns)
    due_ns = known.due_ns(Kind.F, 0, 0, known_ns=20 * MS)
    assert due_ns is not None
    draw = Random(1)
    mean_ns, sigma = 20 * MS, known.noise
    times = [mean_ns * draw.lognormvariate(-(sigma**2) / 2, sigma) for _ in range(200_000)]

    def chance(at_ns: float) -> float:
        left = [time for time in times if time > at_ns]
        return sum(time <= at_ns + launch_ns for time in left) / len(left)

    assert chance(due_ns) >= RISK * 0.9
    step_ns = mean_ns / 64
    if due_ns > 0:
        assert chance(due_ns - step_ns) <= RISK * 1.1


def test_the_longest_launch_counts_as_it_is_not_known_which_will_come() -> None:
    known = taught(0.0, MS)
    for _ in range(50):
        known.launched(Kind.B, 0, 6 * MS)
    assert known.launch_ns == 6 * MS


def test_a_launch_that_compiles_is_forgotten_with_the_next() -> None:
    known = JustInTime()
    known.launched(Kind.F, 0, 3_000 * MS)
    assert known.launch_ns == 3_000 * MS
    known.launched(Kind.F, 0, MS)
    assert known.launch_ns == MS
    for _ in range(20):
        known.launched(Kind.F, 0, MS)
    known.launched(Kind.F, 0, 500 * MS)
    assert known.launch_ns == MS
    for _ in range(9):
        known.launched(Kind.F, 0, 4 * MS)
    assert known.launch_ns == 4 * MS


# Simulated steps.


def world_of(shape: Shape, seed: int, launch_ns: int, risk: float = RISK) -> World:
    draw = Random(seed)

    def rows() -> list[list[int]]:
        return [
            [draw.randrange(MS, 30 * MS) for _ in range(shape.num_microbatches)]
            for _ in range(shape.num_stages)
        ]

    return World(TaskTimes(rows(), rows(), rows()), launch_ns=launch_ns, launch_risk=risk)


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
    world = world_of(shape, seed, launch_ns, risk)
    step = simulate_step(shape, policy, [world], recording=recording)
    assert play(shape, policy, world_of(shape, seed, launch_ns, risk)).makespan_ns == (
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


def test_a_rank_with_enough_to_do_hides_its_launches() -> None:
    """One rank, equal times: after the first launch, and a task of each kind to learn from, the
    device is never idle; deciding at the end leaves it idle each time."""
    shape = Shape(1, 40)
    rows = [[20 * MS] * 40]
    times = TaskTimes(rows, rows, rows)
    policy = Policy(HINTS["bf"])
    work_ns, launch_ns = 40 * 60 * MS, 5 * MS
    run = play(shape, policy, World(times, launch_ns=launch_ns))
    assert run.makespan_ns == work_ns + launch_ns
    late = play(shape, policy, World(times, launch_ns=launch_ns, launch_risk=inf))
    assert late.makespan_ns == work_ns + 80 * launch_ns
