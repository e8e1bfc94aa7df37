"""Runs whose waits are known by construction: what owns most names the cause, place and time."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.analyze.bubbles import bubbles
from rrfp.analyze.findings import Fault, Owner, blame, headline, shares
from rrfp.analyze.frames import Frames, frames_of
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.shape import FORWARD_ONLY, Shape
from rrfp.schedule.tasks import Cause, Task
from rrfp.simulate.world import TaskTimes, World
from rrfp.trace.perfetto.reader import read_trace
from rrfp.trace.records import PhaseRecord, ReceiveRecord, SendRecord, TaskRecord
from tests.cases import Case, cases
from tests.effort import examples
from tests.simulated import simulated, simulated_case
from tests.step_times import MEGATRONS, equal_times, policy_of, random_times
from tests.step_times import simulated as simulated_run

SHAPE = Shape(4, 8)
TIMES = equal_times(SHAPE, 10, 10, 10)


def slowed(stage: int, factor: int) -> TaskTimes:
    """One stage takes that many times as long as the others."""
    times = [[10 * factor if each == stage else 10] * 8 for each in range(4)]
    return TaskTimes(times, times, times)


def first_of(frames: Frames) -> tuple[object, ...]:
    found = shares(frames, blame(frames))[0]
    return found.what, found.pp_rank, found.sender, found.time_ns


@pytest.mark.parametrize("stage", range(4))
def test_a_slow_stage(stage: int) -> None:
    frames = frames_of(simulated("bf", SHAPE, slowed(stage, 3), num_steps=2))
    # 8 F and 8 B that take 20 and 40 ns longer.
    assert first_of(frames) == (Fault.SLOW_STAGE, stage, None, pytest.approx(480, rel=0.01))


@pytest.mark.parametrize("limit", [2, 4])
def test_a_slow_stage_is_named_also_where_a_limit_withholds_what_would_only_wait(
    limit: int,
) -> None:
    frames = frames_of(simulated("bf", SHAPE, slowed(3, 3), limit=limit))
    assert bubbles(frames).ranks[0].causes_ns[Cause.LIMIT] > 0
    assert first_of(frames)[:2] == (Fault.SLOW_STAGE, 3)


@pytest.mark.parametrize(("sender", "receiver", "every_ns"), [(1, 2, 10), (2, 1, 30), (3, 2, 30)])
def test_a_slow_link(sender: int, receiver: int, every_ns: int) -> None:
    """Its sender has a message ready every so often."""

    def transfer(a: int, b: int, task: Task) -> int:
        return 90 if (a, b) == (sender, receiver) else 0

    frames = frames_of(simulated("bf", SHAPE, TIMES, transfer=transfer))
    # The last of eight messages of 90 ns waits for those before it.
    owned_ns = pytest.approx(8 * 90 - 7 * every_ns, rel=0.01)
    assert first_of(frames) == (Fault.LINK, receiver, sender, owned_ns)


def test_a_link_that_carries_one_message_owns_all_of_it() -> None:
    found = blame(frames_of(simulated("bf", Shape(2, 1), transfer=lambda *_: 25)))
    assert found.owners_ns[Owner(Fault.LINK, 1, 0)] == 25
    assert found.owners_ns[Owner(Fault.LINK, 0, 1)] == 25
    assert found.step_ns == 2 * 25 + 2 * (10 + 20)


def test_a_limit_that_forces_backpressure() -> None:
    frames = frames_of(simulated("bf", SHAPE, TIMES, limit=1))
    withheld_ns = bubbles(frames).ranks[0].causes_ns[Cause.LIMIT]
    assert first_of(frames) == (Cause.LIMIT, 0, None, pytest.approx(withheld_ns, rel=0.01))


def test_a_binding_order_that_keeps_ready_work_waiting() -> None:
    uneven = [[10 + 20 * ((m + stage) % 2) for m in range(8)] for stage in range(4)]
    times = TaskTimes(uneven, [[10] * 8] * 4, [[10] * 8] * 4)
    frames = frames_of(simulated("1f1b", SHAPE, times, dispatch=Dispatch.FIXED))
    withheld_ns = bubbles(frames).ranks[0].causes_ns[Cause.ORDER]
    assert first_of(frames) == (Cause.ORDER, 0, None, pytest.approx(withheld_ns, rel=0.01))


@pytest.mark.parametrize("stage", [1, 2])
def test_members_of_a_group_whose_messages_come_apart(stage: int) -> None:
    frames = frames_of(
        simulated(
            "bf",
            SHAPE,
            TIMES,
            num_members=2,
            lateness=lambda member, task: 60 if member == 1 and task.stage == stage else 0,
        )
    )
    # The first F and the last B are late, and nothing covers that.
    assert first_of(frames) == (Cause.COORDINATION, stage, None, pytest.approx(120, rel=0.01))


def test_a_rank_that_enters_late() -> None:
    """The whole step is moved behind a data phase of the first rank; the others were there."""
    recording = simulated("bf", SHAPE, TIMES)
    for records in recording.ranks:
        records.tasks[:] = [
            TaskRecord(task.start_ns + 500, task.end_ns + 500, *task[2:]) for task in records.tasks
        ]
        records.sends[:] = [
            SendRecord(each.start_ns + 500, each.end_ns + 500, *each[2:]) for each in records.sends
        ]
        records.receives[:] = [
            ReceiveRecord(each.start_ns + 500, each.end_ns + 500, *each[2:])
            for each in records.receives
        ]
        records.waits.clear()
        entry_ns = 500 if records.info.rank == 0 else 0
        end_ns = records.phases[0].end_ns + 500
        records.phases[:] = [PhaseRecord(entry_ns, end_ns, 0, "schedule")]
    assert first_of(frames_of(recording)) == (Fault.ENTRY, 0, None, 500)


def test_replicas_that_sum_their_gradients() -> None:
    policy, shape = policy_of("bf", SHAPE)
    recording = simulated_run(policy, shape, [World(TIMES), World(TIMES)])
    assert sum(
        ns
        for owner, ns in blame(frames_of(recording)).owners_ns.items()
        if owner.what == Cause.GRADIENT_SYNC
    ) == 5  # fmt: skip


def test_uneven_tasks_are_no_slow_stage() -> None:
    rng = random.Random(3)
    rows = [[rng.choice([10, 10, 10, 70]) for _ in range(32)] for _ in range(4)]
    shape = Shape(4, 32)
    # Each stage has the same times in another sequence.
    rows = [rng.sample(rows[0], len(rows[0])) for _ in range(4)]
    found = blame(frames_of(simulated("bf", shape, TaskTimes(rows, rows, rows))))
    by_what = {owner.what: 0.0 for owner in found.owners_ns}
    for owner, ns in found.owners_ns.items():
        by_what[owner.what] += ns
    assert Fault.SLOW_STAGE not in by_what
    assert by_what[Fault.UNEVEN] > 0


def test_a_run_of_megatrons_own_schedule_names_its_transfers() -> None:
    frames = frames_of(read_trace(MEGATRONS))
    found = shares(frames, blame(frames))
    assert found[0].what == Cause.TRANSFER
    assert "--dispatch ready" in found[0].advice


def test_a_slow_stage_of_a_run_without_messages_is_found_by_its_work() -> None:
    policy, shape = policy_of("1f1b", SHAPE, dispatch=Dispatch.FIXED)
    worlds = [World(slowed(2, 3), blocking=True)]
    recording = simulated_run(policy, shape, worlds, links="blocking")
    for records in recording.ranks:
        records.sends.clear()
        records.receives.clear()
    assert first_of(frames_of(recording))[:2] == (Fault.SLOW_STAGE, 2)


@examples(quick=30, thorough=500)
@given(case=cases(), seed=st.integers(0, 2**16))
def test_every_nanosecond_has_an_owner(case: Case, seed: int) -> None:
    times = random_times(random.Random(seed), case.shape)
    frames = frames_of(simulated_case(case, times, transfer=lambda *_: seed % 50))
    found = blame(frames)
    assert sum(found.owners_ns.values()) == pytest.approx(found.step_ns, rel=1e-9)
    assert min(found.owners_ns.values()) > 0
    shown = shares(frames, found)
    assert [each.time_ns for each in shown] == sorted(
        (each.time_ns for each in shown), reverse=True
    )
    assert found.busiest_ns <= found.step_ns * (1 + 1e-9)
    headline(frames, found)


def test_the_advice_on_a_limit_says_the_next_one_to_try() -> None:
    policy, shape = policy_of("bf", SHAPE, limit=1)
    frames = frames_of(simulated_run(policy, shape, [World(TIMES)]))
    assert "Try --limit 2," in shares(frames, blame(frames))[0].advice


def test_a_run_of_one_rank_or_of_forwards_alone_has_nothing_to_tell() -> None:
    one = frames_of(simulated("bf", Shape(1, 4)))
    assert shares(one, blame(one)) == []
    forwards = replace(Shape(2, 4), kinds=FORWARD_ONLY)
    blame(frames_of(simulated("bf", forwards)))
