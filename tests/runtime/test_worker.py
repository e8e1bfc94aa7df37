"""The worker's loop, with scripted arrivals: what it does, in which order, and what it leaves."""

from itertools import pairwise

import pytest

from rrfp.errors import RrfpError
from rrfp.runtime.protocols import (
    Event,
    Inbox,
    InputForecast,
    InputReported,
    LinkFailed,
    Message,
    MessageArrived,
    PeerLeft,
    PeerLostError,
    StallError,
    TaskDecided,
)
from rrfp.runtime.stall import GATHER_S, LOOK_S, StallBoard
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.named_hints import ORDERS
from rrfp.schedule.policy import IMPATIENT, Dispatch, Patience, Policy
from rrfp.schedule.shape import FORWARD_ONLY, WHOLE_BACKWARD, Placement, Shape
from rrfp.trace.records import (
    NS_PER_S,
    AgreementRecord,
    StimulusRecord,
    TaskRecord,
    WaitRecord,
    evaluation_step,
    is_evaluation,
)
from tests.properties.cases import replayed
from tests.runtime.rank_rig import F0, TICK_NS, World, arrived, task


def test_a_middle_stage_takes_runs_and_passes_on() -> None:
    world = World(script=[[arrived("1F1"), arrived("1F0")], [arrived("1B1", peer=2)]])
    world.during[task("1B1")] = [arrived("1B0", peer=2)]
    summary = world.run_step(Shape(3, 2))
    assert world.calls == [
        *("consumed from 0 in 0", "run 1F0 on [0.0]", "send 100.0 to 2 for 2F0"),
        *("consumed from 0 in 0", "run 1F1 on [1.0]", "send 101.0 to 2 for 2F1"),
        *("consumed from 2 in 0", "run 1B1 on [1.0]", "send 101.0 to 0 for 0B1"),
        *("consumed from 2 in 0", "run 1B0 on [0.0]", "send 100.0 to 0 for 0B0"),
    ]
    assert summary.peak_held == 2
    assert summary.busy_ns == 4 * TICK_NS
    assert summary.start_ns < summary.end_ns


def test_a_step_is_recorded() -> None:
    world = World(script=[[arrived("1F0")], [arrived("1B0", peer=2)]])
    world.run_step(Shape(3, 1))
    assert world.causes() == ["warmup", "backward_input"]
    spans = [record for record in world.records if isinstance(record, WaitRecord | TaskRecord)]
    assert [type(span) for span in spans] == [WaitRecord, TaskRecord] * 2
    assert all(before.end_ns < after.start_ns for before, after in pairwise(spans))
    tasks = [record for record in spans if isinstance(record, TaskRecord)]
    assert [(run.kind, run.stage, run.chunk, run.microbatch) for run in tasks] == [
        ("F", 1, 0, 0),
        ("B", 1, 0, 0),
    ]
    assert [(run.hint_position, run.ready, run.skipped, run.depth) for run in tasks] == [
        (0, 1, 0, 1),
        (1, 1, 0, 0),
    ]
    stimuli = [record for record in world.records if isinstance(record, StimulusRecord)]
    # A wait asks again once something has come; the last one finds the step done.
    assert [stimulus.name for stimulus in stimuli] == [
        *("ComputeIdle", "InputArrived", "ComputeIdle"),
        *("ComputeIdle", "InputArrived", "ComputeIdle"),
        "ComputeIdle",
    ]
    assert not any(isinstance(record, AgreementRecord) for record in world.records)


def test_messages_of_the_next_step_wait_for_it() -> None:
    """A neighbor may be a step ahead; even then nothing is lost or mixed up."""
    shape = Shape(3, 1, kinds=FORWARD_ONLY)
    early = arrived("1F0", step=1)
    world = World(script=[[early, arrived("1F0", step=0), arrived("1F0", step=2)]])
    for step in range(3):
        world.run_step(shape, step)
    assert world.calls == [
        call
        for step in range(3)
        for call in (
            f"consumed from 0 in {step}",
            "run 1F0 on [0.0]",
            "send 100.0 to 2 for 2F0",
        )
    ]


@pytest.mark.parametrize(
    ("step", "next_step"),
    [
        (4, evaluation_step(0)),
        (evaluation_step(0), evaluation_step(1)),
        (evaluation_step(1), 5),
        (4, 5),
    ],
    ids=["an evaluation", "another evaluation", "training again", "training"],
)
def test_a_neighbor_may_be_ahead_by_a_step_of_either_sort(step: int, next_step: int) -> None:
    world = World(rank=2, script=[[arrived("2F0", next_step, peer=1), arrived("2F0", step, 1)]])
    world.run_step(shape_of(step), step)
    assert world.calls[:2] == [f"consumed from 1 in {step}", "run 2F0 on [0.0]"]
    assert f"consumed from 1 in {next_step}" not in world.calls
    del world.calls[:]
    world.run_step(shape_of(next_step), next_step)
    assert world.calls[:2] == [f"consumed from 1 in {next_step}", "run 2F0 on [0.0]"]
    assert {record.step for record in world.records if isinstance(record, TaskRecord)} == {
        step,
        next_step,
    }


def shape_of(step: int) -> Shape:
    return Shape(3, 1, kinds=FORWARD_ONLY if is_evaluation(step) else WHOLE_BACKWARD)


def test_adjacent_stages_on_one_rank_hand_over_without_a_message() -> None:
    world = World(rank=0, num_ranks=1)
    summary = world.run_step(Shape(1, 1, num_chunks=2, placement=Placement.V))
    assert world.calls == [
        "run 0F0 on []",
        "run 1F0 on [0.0]",
        "run 1B0 on []",
        "run 0B0 on [100.0]",
    ]
    assert summary.peak_held == 1


# What ends a worker's step: failures, stalls, which name those who owe, and peers that leave.


def test_a_stall_in_an_evaluation_says_so() -> None:
    with pytest.raises(StallError, match=r"waited 5 s in evaluation 2 and nothing arrived"):
        World().run_step(Shape(3, 1, kinds=FORWARD_ONLY), evaluation_step(2))
    world = World(script=[[PeerLeft(0)]])
    with pytest.raises(PeerLostError, match="waited in evaluation 2 for"):
        world.run_step(Shape(3, 1, kinds=FORWARD_ONLY), evaluation_step(2))


def test_a_failure_is_raised_as_it_came() -> None:
    error = RrfpError("rank 2 broke")
    with pytest.raises(RrfpError) as raised:
        World(script=[[arrived("1F0"), LinkFailed(error)]]).run_step(Shape(3, 1))
    assert raised.value is error


def test_a_failure_during_a_task_ends_the_step_before_the_next_one() -> None:
    world = World(rank=0)
    world.during[task("0F0")] = [LinkFailed(RrfpError("rank 1 broke"))]
    with pytest.raises(RrfpError, match="rank 1 broke"):
        world.run_step(Shape(3, 4))
    assert [call for call in world.calls if call.startswith("run")] == ["run 0F0 on []"]


def test_what_a_task_raises_comes_out_and_nothing_is_sent() -> None:
    world = World(rank=0, fails_at=task("0F0"))
    with pytest.raises(ZeroDivisionError):
        world.run_step(Shape(3, 4))
    assert world.calls == []


@pytest.mark.parametrize(
    ("script", "owed"),
    [
        ([], ["rank 0 owes the output of 0F0, which 1F0 needs", "rank 2 owes the output of 2B0"]),
        ([[arrived("1F1")]], ["rank 0 owes the output of 0F0"]),
        ([[arrived("1F0"), arrived("1F1")]], ["rank 2 owes the output of 2B0, which 1B0 needs"]),
    ],
)
def test_a_stall_names_the_awaited_messages_and_their_senders(
    script: list[list[Event]], owed: list[str]
) -> None:
    with pytest.raises(StallError, match="pipeline rank 1 waited 5 s in step 7") as raised:
        World(script=[[_at_step(event, 7) for event in batch] for batch in script]).run_step(
            Shape(3, 2), step=7
        )
    first_line, *_ = str(raised.value).splitlines()
    for sentence in owed:
        assert sentence in first_line
    if len(script) and len(script[0]) == 2:
        assert "rank 0" not in first_line


@pytest.mark.parametrize("stall_s", [0.2, 1.5, 1.7, 5.2])
def test_a_stall_is_reported_in_time_and_the_others_are_asked_before(
    stall_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    called_after_s: list[float] = []
    call = StallBoard.call

    def noted(board: StallBoard, step: int) -> int:
        called_after_s.append(world.inbox.waited_s)
        return call(board, step)

    monkeypatch.setattr(StallBoard, "call", noted)
    world = World(stall_s=stall_s)
    with pytest.raises(StallError, match=f"waited {stall_s} s"):
        world.run_step(Shape(3, 2))
    assert world.inbox.waited_s == pytest.approx(stall_s)
    expected_s = stall_s - GATHER_S if stall_s > GATHER_S else min(LOOK_S, stall_s)
    assert called_after_s == [pytest.approx(expected_s)]


def test_a_stall_at_the_limit_names_the_gradient_and_not_the_withheld_forward() -> None:
    world = World(script=[[arrived("1F0"), arrived("1F1")]])
    with pytest.raises(StallError, match="rank 2 owes the output of 2B0") as raised:
        world.run_step(Shape(3, 2), limit=1)
    assert "1F1" not in str(raised.value).splitlines()[0]


def test_a_stall_in_fixed_dispatch_names_what_the_order_waits_for() -> None:
    shape = Shape(3, 2)
    world = World(script=[[arrived("1F1")]])
    order = ORDERS["gpipe"].for_shape(shape)
    dispatcher = Dispatcher(shape, 1, Policy(order, dispatch=Dispatch.FIXED))
    with pytest.raises(StallError, match="rank 0 owes the output of 0F0, which 1F0 needs"):
        world.worker.run_step(0, dispatcher, world)


def _at_step(event: Event, step: int) -> Event:
    assert isinstance(event, MessageArrived)
    return MessageArrived(event.peer, Message(step, event.message.task, event.message.tensors))


def test_an_awaited_peer_that_leaves_is_reported_at_once() -> None:
    world = World(script=[[arrived("1F0"), PeerLeft(0)]])
    with pytest.raises(PeerLostError, match=r"rank 0 left .* for the output of 0F1, which 1F1"):
        world.run_step(Shape(3, 2))
    assert "run 1F0 on [0.0]" in world.calls


def test_a_peer_that_leaves_after_its_last_message_is_let_go() -> None:
    world = World(script=[[arrived("1F0"), PeerLeft(0)], [arrived("1B0", peer=2), PeerLeft(2)]])
    world.run_step(Shape(3, 1))
    assert len([call for call in world.calls if call.startswith("run")]) == 2


# The worker in a group: its leader decides, also ahead while a task runs, and followers report.


# Groups: ranks 1 (leader) and 4 share every task of this stage.


def test_a_group_may_be_ahead_by_a_step_of_either_sort() -> None:
    evaluation, training = evaluation_step(0), 1
    # Of a leader the follower may be ahead, and the other way round.
    for ahead, now in ((evaluation, 0), (training, evaluation)):
        leader = World(members=(1, 4), script=[[arrived("1F0", now), InputReported(4, now, F0)]])
        leader.inbox.put(InputReported(4, ahead, F0))
        leader.inbox.put(arrived("1F0", ahead))
        follower = World(members=(4, 1), script=[[arrived("1F0", now), TaskDecided(4, now, 0, F0)]])
        follower.inbox.put(arrived("1F0", ahead))
        follower.inbox.put(TaskDecided(4, ahead, 0, F0))
        for world in (leader, follower):
            for step in (now, ahead):
                world.run_step(Shape(3, 1, kinds=FORWARD_ONLY), step)
            runs = [record.step for record in world.records if isinstance(record, TaskRecord)]
            assert runs == [now, ahead]
        assert leader.calls.count("decide 0 1F0 to 4") == 2


def test_a_leader_decides_when_all_members_have_the_input() -> None:
    world = World(members=(1, 4), script=[[arrived("1F0"), arrived("1F1")]])
    world.script.extend([[InputReported(4, 0, task("1F1"))], [InputReported(4, 0, task("1F0"))]])
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
    world = World(members=(1, 4), script=[[InputReported(4, 0, task("1F0"))]])
    with pytest.raises(StallError, match="rank 0 owes the output of 0F0") as raised:
        world.run_step(Shape(3, 1, kinds=FORWARD_ONLY))
    assert "rank 4" not in str(raised.value)


def test_a_follower_reports_and_runs_what_is_decided() -> None:
    world = World(members=(4, 1), script=[[arrived("1F0"), arrived("1F1")]])
    world.script.extend([[TaskDecided(4, 0, 0, task("1F1"))], [TaskDecided(4, 0, 1, task("1F0"))]])
    world.run_step(Shape(3, 2, kinds=FORWARD_ONLY))
    assert world.calls == [
        *("report 1F0 to 4", "report 1F1 to 4"),
        *("consumed from 0 in 0", "run 1F1 on [1.0]", "send 101.0 to 2 for 2F1"),
        *("consumed from 0 in 0", "run 1F0 on [0.0]", "send 100.0 to 2 for 2F0"),
    ]
    assert world.causes() == ["warmup", "coordination"]


def test_a_follower_reports_while_a_task_runs() -> None:
    """The leader decides ahead, on what has arrived here by then; of a later step too."""
    world = World(members=(4, 1), script=[[arrived("1F0"), TaskDecided(4, 0, 0, task("1F0"))]])
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
    # On the first stage a leader needs no report, and may be a step ahead.
    follower = World(rank=0, members=(4, 0))
    follower.script.append([TaskDecided(4, 0, 0, task("0F0")), TaskDecided(4, 1, 0, task("0F0"))])
    for step in range(2):
        follower.run_step(shape, step)
    ran = [call for call in follower.calls if call.startswith("run")]
    assert ran == ["run 0F0 on []"] * 2

    leader = World(members=(1, 4))
    leader.script.append(
        [InputReported(4, 0, task("1F0")), InputReported(4, 1, task("1F0")), arrived("1F0")]
    )
    leader.run_step(shape, 0)
    leader.inbox.put(arrived("1F0", step=1))
    leader.run_step(shape, 1)
    assert [call for call in leader.calls if call.startswith("decide")] == ["decide 0 1F0 to 4"] * 2


def test_a_follower_whose_leader_left_does_not_wait_for_it() -> None:
    world = World(members=(4, 1), script=[[arrived("1F0"), PeerLeft(4)]])
    with pytest.raises(PeerLostError, match=r"rank 4 left .* for the group's next decision"):
        world.run_step(Shape(3, 1, kinds=FORWARD_ONLY))


# Deciding ahead: the leader decides for the next task while one runs.


def ahead_world(*during: Event) -> World:
    """A leader that has 1F0 and 1F1 to run, and gets `during` during 1F1, shortly before the end
    that it expects since 1F0."""
    world = World(members=(1, 4), task_ns=20_000_000, ahead_during=task("1F1"))
    world.script.append([arrived("1F0"), arrived("1F1"), arrived("1F2")])
    world.script.append([InputReported(4, 0, task("1F0")), InputReported(4, 0, task("1F1"))])
    world.during[task("1F1")] = [*during]
    return world


def test_a_leader_decides_on_what_arrives_while_a_task_runs() -> None:
    shape = Shape(3, 3, kinds=FORWARD_ONLY)
    world = ahead_world(InputReported(4, 0, task("1F2")))
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


def test_a_failure_of_a_decision_ahead_ends_the_step_after_the_task() -> None:
    world = ahead_world(LinkFailed(RrfpError("rank 2 broke")))
    with pytest.raises(RrfpError, match="rank 2 broke"):
        world.run_step(Shape(3, 3, kinds=FORWARD_ONLY))
    world.worker.close()
    assert [call for call in world.calls if call.startswith("run")][-1] == "run 1F1 on [1.0]"


# What a patient worker waits for, when it gives up, and what it announces to others.


# Patience: bf on the middle one of three stages, which runs 1B0 before 1F1.


def forecast(
    text: str, received_ns: int, remaining_ns: int, step: int = 0, peer: int = 0
) -> InputForecast:
    return InputForecast(peer, step, task(text), received_ns, remaining_ns)


def patient_world(*after_1f0: Event, patience: Patience = 10_000) -> World:
    """Runs 1F0 while 1F1 arrives, and then what is given; all else comes when it waits."""
    world = World(script=[[arrived("1F0")]], patience=patience)
    world.during[F0] = [arrived("1F1"), *after_1f0]
    world.script.extend([[arrived("1B0", peer=2)], [arrived("1B1", peer=2)]])
    return world


def test_a_worker_waits_for_what_was_announced_instead() -> None:
    world = patient_world(forecast("1B0", 0, 500, peer=2))
    world.run_step(Shape(3, 2))
    assert [call for call in world.calls if call.startswith("run")] == [
        *("run 1F0 on [0.0]", "run 1B0 on [0.0]", "run 1F1 on [1.0]", "run 1B1 on [1.0]"),
    ]
    assert world.causes() == ["warmup", "patience", "backward_input"]
    # It waited up to the end of its patience, and no longer.
    (wait_s,) = [each for each in world.inbox.timeouts_s if 0 < each < 1e-3]
    assert 0 < wait_s * NS_PER_S <= 500 + 10_000


def test_a_worker_without_patience_takes_no_notice_and_announces_nothing() -> None:
    world = patient_world(forecast("1B0", 0, 500, peer=2), patience=IMPATIENT)
    world.run_step(Shape(3, 2))
    assert [call for call in world.calls if call.startswith("run")][:2] == [
        *("run 1F0 on [0.0]", "run 1F1 on [1.0]"),
    ]
    assert "patience" not in world.causes()
    assert not any("forecast" in call for call in world.calls)
    names = {record.name for record in world.records if isinstance(record, StimulusRecord)}
    assert names == {"ComputeIdle", "InputArrived"}


def test_a_worker_gives_up_when_its_patience_ends() -> None:
    world = patient_world(forecast("1B0", 0, 500, peer=2))
    world.script[:] = [world.script[0]]
    # Nothing comes, and time passes with each look at the clock.
    later: list[Event] = [arrived("1B0", peer=2), arrived("1B1", peer=2)]
    world.during[task("1F1")] = later
    world.run_step(Shape(3, 2))
    assert [call for call in world.calls if call.startswith("run")] == [
        *("run 1F0 on [0.0]", "run 1F1 on [1.0]", "run 1B0 on [0.0]", "run 1B1 on [1.0]"),
    ]
    assert world.causes() == ["warmup", "patience"]


def test_a_worker_announces_what_it_begins_once_it_knows_how_long_that_takes() -> None:
    world = patient_world()
    world.task_ns = 1000
    world.run_step(Shape(3, 2))
    sent = [call for call in world.calls if not call.startswith("consumed")]
    assert sent == [
        *("run 1F0 on [0.0]", "send 100.0 to 2 for 2F0"),
        f"forecast 2F1 to 2 in {1000 + TICK_NS}",
        *("run 1F1 on [1.0]", "send 101.0 to 2 for 2F1"),
        *("run 1B0 on [0.0]", "send 100.0 to 0 for 0B0"),
        f"forecast 0B1 to 0 in {1000 + TICK_NS}",
        *("run 1B1 on [1.0]", "send 101.0 to 0 for 0B1"),
    ]


def test_what_is_announced_for_the_next_step_waits_for_it() -> None:
    world = patient_world(forecast("1B0", 0, 1, step=1, peer=2))
    shape = Shape(3, 2)
    world.run_step(shape, 0)
    assert "patience" not in world.causes()
    world.script.extend([[arrived("1F0", step=1)], [arrived("1B0", step=1, peer=2)]])
    world.script.extend([[arrived("1B1", step=1, peer=2)]])
    world.during[F0] = [arrived("1F1", step=1), forecast("1B0", world.now_ns, 900, 1, 2)]
    world.run_step(shape, 1)
    stimuli = [r for r in world.records if isinstance(r, StimulusRecord) and r.step == 1]
    assert [r.name for r in stimuli][:1] == ["Announced"]


def test_a_group_s_follower_announces_nothing_and_takes_no_notice() -> None:
    world = World(members=(4, 1), patience=10_000)
    world.inbox.put(forecast("1F0", 0, 500))
    world.script.extend([[arrived("1F0"), TaskDecided(4, 0, 0, F0)]])
    world.run_step(Shape(3, 1, kinds=FORWARD_ONLY))
    names = {record.name for record in world.records if isinstance(record, StimulusRecord)}
    assert names == {"ComputeIdle", "InputArrived", "TaskAgreed"}
    assert not any("forecast" in call for call in world.calls)
