"""The worker in a group: its leader decides, also ahead while a task runs, and followers report."""

import pytest

from rrfp.errors import RrfpError
from rrfp.runtime.protocols import (
    Decided,
    Event,
    Failed,
    Inbox,
    Left,
    PeerLostError,
    Reported,
    StallError,
)
from rrfp.schedule.shape import FORWARD_ONLY, Shape
from rrfp.trace.records import AgreementRecord, StimulusRecord, TaskRecord, evaluation_step
from tests.decisions import replayed
from tests.worker_world import F0, World, arrived, task

# Groups: ranks 1 (leader) and 4 share every task of this stage.


def test_a_group_may_be_ahead_by_a_step_of_either_sort() -> None:
    evaluation, training = evaluation_step(0), 1
    # Of a leader the follower may be ahead, and the other way round.
    for ahead, now in ((evaluation, 0), (training, evaluation)):
        leader = World(members=(1, 4), script=[[arrived("1F0", now), Reported(4, now, F0)]])
        leader.inbox.put(Reported(4, ahead, F0))
        leader.inbox.put(arrived("1F0", ahead))
        follower = World(members=(4, 1), script=[[arrived("1F0", now), Decided(4, now, 0, F0)]])
        follower.inbox.put(arrived("1F0", ahead))
        follower.inbox.put(Decided(4, ahead, 0, F0))
        for world in (leader, follower):
            for step in (now, ahead):
                world.run_step(Shape(3, 1, kinds=FORWARD_ONLY), step)
            runs = [record.step for record in world.records if isinstance(record, TaskRecord)]
            assert runs == [now, ahead]
        assert leader.calls.count("decide 0 1F0 to 4") == 2


def test_a_leader_decides_when_all_members_have_the_input() -> None:
    world = World(members=(1, 4), script=[[arrived("1F0"), arrived("1F1")]])
    world.script += [[Reported(4, 0, task("1F1"))], [Reported(4, 0, task("1F0"))]]
    world.run_step(Shape(3, 2, kinds=FORWARD_ONLY))
    assert world.calls[:4] == [
        "decide 0 1F1 to 4",
        "consumed from 0 in 0",
        "run 1F1 on [1.0]",
        "send 101.0 to 2 for 2F1",
    ]
    assert world.calls[4] == "decide 1 1F0 to 4"
    agreements = [record for record in world.records if isinstance(record, AgreementRecord)]
    assert [(record.microbatch, record.position) for record in agreements] == [(1, 0), (0, 1)]
    assert world.causes() == ["warmup", "coordination"]


def test_a_leader_says_which_members_owe_reports() -> None:
    world = World(members=(1, 4), script=[[arrived("1F0")]])
    with pytest.raises(StallError, match="rank 4 owes reports of what has arrived there") as raised:
        world.run_step(Shape(3, 1, kinds=FORWARD_ONLY))
    assert "rank 0" not in str(raised.value).splitlines()[0]
    # In the grid too, though the rank has run nothing yet and is called warming up.
    assert "warmup" in str(raised.value)
    assert "lacks: for 1F0 reports of what has arrived there from rank 4" in str(raised.value)


def test_a_leader_does_not_blame_a_member_that_reported() -> None:
    world = World(members=(1, 4), script=[[Reported(4, 0, task("1F0"))]])
    with pytest.raises(StallError, match="rank 0 owes the output of 0F0") as raised:
        world.run_step(Shape(3, 1, kinds=FORWARD_ONLY))
    assert "rank 4" not in str(raised.value)


def test_a_follower_reports_and_runs_what_is_decided() -> None:
    world = World(members=(4, 1), script=[[arrived("1F0"), arrived("1F1")]])
    world.script += [[Decided(4, 0, 0, task("1F1"))], [Decided(4, 0, 1, task("1F0"))]]
    world.run_step(Shape(3, 2, kinds=FORWARD_ONLY))
    assert world.calls == [
        *("report 1F0 to 4", "report 1F1 to 4"),
        *("consumed from 0 in 0", "run 1F1 on [1.0]", "send 101.0 to 2 for 2F1"),
        *("consumed from 0 in 0", "run 1F0 on [0.0]", "send 100.0 to 2 for 2F0"),
    ]
    assert world.causes() == ["warmup", "coordination"]


def test_a_follower_reports_while_a_task_runs() -> None:
    """The leader decides ahead, on what has arrived here by then; of a later step too."""
    world = World(members=(4, 1), script=[[arrived("1F0"), Decided(4, 0, 0, task("1F0"))]])
    world.during[task("1F0")] = [arrived("1F0", step=1)]
    world.run_step(Shape(3, 1, kinds=FORWARD_ONLY))
    ran = world.calls.index("run 1F0 on [0.0]")
    assert world.calls[ran:] == ["run 1F0 on [0.0]", "report 1F0 to 4", "send 100.0 to 2 for 2F0"]


def test_what_came_before_the_worker_is_reported_too() -> None:
    reported: list[Event] = []
    inbox = Inbox()
    before, after = arrived("1F0"), arrived("1F1")
    inbox.put(before)
    inbox.watch(reported.append)
    inbox.put(after)
    assert reported == [before, after]
    assert list(inbox.take()) == [before, after]


def test_decisions_and_reports_of_the_next_step_wait_for_it() -> None:
    shape = Shape(3, 1, kinds=FORWARD_ONLY)
    # On the first stage a leader needs nobody's report, and may be a step ahead.
    follower = World(rank=0, members=(4, 0))
    follower.script.append([Decided(4, 0, 0, task("0F0")), Decided(4, 1, 0, task("0F0"))])
    for step in range(2):
        follower.run_step(shape, step)
    ran = [call for call in follower.calls if call.startswith("run")]
    assert ran == ["run 0F0 on []"] * 2

    leader = World(members=(1, 4))
    leader.script.append([Reported(4, 0, task("1F0")), Reported(4, 1, task("1F0")), arrived("1F0")])
    leader.run_step(shape, 0)
    leader.inbox.put(arrived("1F0", step=1))
    leader.run_step(shape, 1)
    assert [call for call in leader.calls if call.startswith("decide")] == ["decide 0 1F0 to 4"] * 2


def test_a_follower_whose_leader_left_does_not_wait_for_it() -> None:
    world = World(members=(4, 1), script=[[arrived("1F0"), Left(4)]])
    with pytest.raises(PeerLostError, match=r"rank 4 left .* for the group's next decision"):
        world.run_step(Shape(3, 1, kinds=FORWARD_ONLY))


# Deciding ahead: the leader decides for the next task while one runs.


def ahead_world(*during: Event) -> World:
    """A leader that has 1F0 and 1F1 to run, and gets `during` during 1F1, shortly before the end
    that it expects since 1F0."""
    world = World(members=(1, 4), task_ns=20_000_000, ahead_during=task("1F1"))
    world.script.append([arrived("1F0"), arrived("1F1"), arrived("1F2")])
    world.script.append([Reported(4, 0, task("1F0")), Reported(4, 0, task("1F1"))])
    world.during[task("1F1")] = [*during]
    return world


def test_a_leader_decides_on_what_arrives_while_a_task_runs() -> None:
    shape = Shape(3, 3, kinds=FORWARD_ONLY)
    world = ahead_world(Reported(4, 0, task("1F2")))
    world.run_step(shape)
    world.worker.close()
    assert world.calls[world.calls.index("run 1F1 on [1.0]") :] == [
        *("run 1F1 on [1.0]", "decide 2 1F2 to 4", "send 101.0 to 2 for 2F1"),
        *("consumed from 0 in 0", "run 1F2 on [2.0]", "send 102.0 to 2 for 2F2"),
    ]
    stimuli = [record for record in world.records if isinstance(record, StimulusRecord)]
    names = [stimulus.name for stimulus in stimuli]
    # What the thread took in stands before its decision, and nobody asked for 1F2 again: the last
    # question finds the step done. During 1F2 the thread may ask once more.
    first = names.index("DecideAhead")
    assert names[first - 1] == "InputArrived"
    assert [name for name in names[first:] if name != "DecideAhead"] == ["ComputeIdle"]
    assert replayed(stimuli, world.dispatcher(shape)) == [task("1F0"), task("1F1"), task("1F2")]


def test_a_failure_that_is_met_ahead_ends_the_step_after_the_task() -> None:
    world = ahead_world(Failed(RrfpError("rank 2 broke")))
    with pytest.raises(RrfpError, match="rank 2 broke"):
        world.run_step(Shape(3, 3, kinds=FORWARD_ONLY))
    world.worker.close()
    assert [call for call in world.calls if call.startswith("run")][-1] == "run 1F1 on [1.0]"
