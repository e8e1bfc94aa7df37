"""The worker's loop, with scripted arrivals: what it does, in which order, and what it leaves."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from rrfp.errors import RrfpError
from rrfp.runtime.agreement import StarAgreement
from rrfp.runtime.protocols import (
    Arrived,
    Decided,
    Event,
    Failed,
    Forecast,
    Inbox,
    Left,
    Message,
    PeerLostError,
    Reported,
    StallError,
    StepSummary,
)
from rrfp.runtime.stall import GATHER_S, LOOK_S, StoreStallBoard
from rrfp.runtime.transport.memory import MemoryNetwork
from rrfp.runtime.worker import Worker
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.hints.orders import ORDERS
from rrfp.schedule.hints.table import HINTS
from rrfp.schedule.patience.setting import IMPATIENT, Patience
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import FORWARD_ONLY, SPLIT_BACKWARD, WHOLE_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import Task, parse_task
from rrfp.trace.records import (
    NS_PER_S,
    AgreementRecord,
    Record,
    StimulusRecord,
    TaskRecord,
    WaitRecord,
)
from rrfp.trace.steps import evaluation_step, is_evaluation
from tests.decisions import replayed
from tests.rank_rig import RankRig, Work, run_in_memory

TICK_NS = 10
STALL_S = 5.0
PATIENCE_S = 10.0


def task(text: str) -> Task:
    return parse_task(text)[0]


F0 = task("1F0")


def arrived(text: str, step: int = 0, peer: int = 0) -> Arrived:
    """The input of a task, which says in its tensor whose it is."""
    wanted = task(text)
    return Arrived(peer, Message(step, wanted, (torch.tensor([float(wanted.microbatch)]),)))


class ScriptedInbox(Inbox):
    """Gives one batch of the script whenever the worker waits; with none left, time runs out."""

    def __init__(self, script: list[list[Event]]) -> None:
        super().__init__()
        self._script = script
        self.waited_s = 0.0
        self.timeouts_s: list[float] = []

    def take(self, timeout_s: float = 0.0) -> Sequence[Event]:
        self.waited_s += timeout_s
        self.timeouts_s.append(timeout_s)
        if timeout_s > 0 and self._script:
            for event in self._script.pop(0):
                self.put(event)
        return super().take(0.0)

    def wait_until_taken(self) -> None:
        """Wait until another thread has taken everything."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self._events:
            assert time.monotonic() < deadline_s, "nobody decides ahead"
            time.sleep(0.001)


@dataclass(slots=True)
class World:
    """One rank's worker between fakes that note down what it asks of them."""

    rank: int = 1
    num_ranks: int = 3
    script: list[list[Event]] = field(default_factory=list)
    during: dict[Task, list[Event]] = field(default_factory=dict)
    """What arrives while a task runs."""
    members: tuple[int, ...] | None = None
    calls: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    fails_at: Task | None = None
    task_ns: int = 0
    """How long a task takes on this rank's clock, after what arrives while it runs."""
    ahead_during: Task | None = None
    """A task that runs until what arrives meanwhile was taken in for a decision ahead."""
    now_ns: int = 0
    patience: Patience = IMPATIENT
    stall_s: float = STALL_S
    inbox: ScriptedInbox = field(init=False)
    agreement: StarAgreement = field(init=False)
    worker: Worker = field(init=False)

    def __post_init__(self) -> None:
        self.inbox = ScriptedInbox(self.script)
        members = self.members or (self.rank,)
        self.agreement = StarAgreement(self.rank, members, self, self.records.append, self.clock)
        self.worker = Worker(
            range(self.num_ranks),
            self.inbox,
            self,
            self.agreement,
            self.records.append,
            StoreStallBoard(HashStore(), "test", range(self.num_ranks)),
            stall_s=self.stall_s,
            decides_ahead=self.ahead_during is not None,
            clock=self.clock,
        )
        self.worker.open()

    def clock(self) -> int:
        self.now_ns += TICK_NS
        return self.now_ns

    def run_step(self, shape: Shape, step: int = 0, limit: int | None = None) -> StepSummary:
        return self.worker.run_step(step, self.dispatcher(shape, limit), self)

    def dispatcher(self, shape: Shape, limit: int | None = None) -> Dispatcher:
        hint = HINTS["bf"]
        order = order_of(hint, replace(shape, kinds=WHOLE_BACKWARD))
        return Dispatcher(
            shape,
            self.rank,
            Policy(
                hint,
                limit=limit,
                order=order if shape.kinds == WHOLE_BACKWARD else order.forwards(),
                patience=self.patience,
            ),
            group=self.agreement.group,
        )

    def causes(self) -> list[str]:
        return [record.cause for record in self.records if isinstance(record, WaitRecord)]

    # As the worker's compute.

    held_bytes = 0
    waiting_gradient_bytes = 0

    def run(
        self, task: Task, inputs: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        if task == self.fails_at:
            raise ZeroDivisionError
        values = [tensor.item() for tensor in inputs if tensor is not None]
        self.calls.append(f"run {task} on {values}")
        for event in self.during.get(task, ()):
            self.inbox.put(event)
        self.now_ns += self.task_ns
        if task == self.ahead_during:
            self.inbox.wait_until_taken()
        return (torch.tensor([100.0 * task.stage + task.microbatch]),)

    # As its transport.

    def send(self, peer: int, message: Message) -> None:
        (tensor,) = message.tensors
        assert tensor is not None
        self.calls.append(f"send {tensor.item()} to {peer} for {message.task}")

    def consumed(self, peer: int, step: int) -> None:
        self.calls.append(f"consumed from {peer} in {step}")

    def forecast(self, peer: int, step: int, task: Task, left_ns: int) -> None:
        self.calls.append(f"forecast {task} to {peer} in {left_ns}")

    def report(self, peer: int, step: int, task: Task) -> None:
        self.calls.append(f"report {task} to {peer}")

    def decide(self, peer: int, step: int, position: int, task: Task) -> None:
        self.calls.append(f"decide {position} {task} to {peer}")


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
    # A wait asks anew once something has come; the last one finds the step done.
    assert [stimulus.name for stimulus in stimuli] == [
        *("ComputeIdle", "InputArrived", "ComputeIdle"),
        *("ComputeIdle", "InputArrived", "ComputeIdle"),
        "ComputeIdle",
    ]
    assert not any(isinstance(record, AgreementRecord) for record in world.records)


def test_messages_of_the_next_step_wait_for_it() -> None:
    """A neighbour may be a step ahead; even then nothing is lost or mixed up."""
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


# Patience: bf on the middle one of three stages, which runs 1B0 before 1F1.


def forecast(text: str, heard_ns: int, left_ns: int, step: int = 0, peer: int = 0) -> Forecast:
    return Forecast(peer, step, task(text), heard_ns, left_ns)


def patient_world(*after_1f0: Event, patience: Patience = 10_000) -> World:
    """Runs 1F0 while 1F1 arrives, and then what is given; all else comes when it waits."""
    world = World(script=[[arrived("1F0")]], patience=patience)
    world.during[F0] = [arrived("1F1"), *after_1f0]
    world.script += [[arrived("1B0", peer=2)], [arrived("1B1", peer=2)]]
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
    world.script += [[arrived("1F0", step=1)], [arrived("1B0", step=1, peer=2)]]
    world.script += [[arrived("1B1", step=1, peer=2)]]
    world.during[F0] = [arrived("1F1", step=1), forecast("1B0", world.now_ns, 900, 1, 2)]
    world.run_step(shape, 1)
    stimuli = [r for r in world.records if isinstance(r, StimulusRecord) and r.step == 1]
    assert [r.name for r in stimuli][:1] == ["Announced"]


def test_a_group_s_follower_announces_nothing_and_takes_no_notice() -> None:
    world = World(members=(4, 1), patience=10_000)
    world.inbox.put(forecast("1F0", 0, 500))
    world.script += [[arrived("1F0"), Decided(4, 0, 0, F0)]]
    world.run_step(Shape(3, 1, kinds=FORWARD_ONLY))
    names = {record.name for record in world.records if isinstance(record, StimulusRecord)}
    assert names == {"ComputeIdle", "InputArrived", "TaskAgreed"}
    assert not any("forecast" in call for call in world.calls)


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
def test_a_neighbour_may_be_ahead_by_a_step_of_either_sort(step: int, next_step: int) -> None:
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


def test_a_stall_in_an_evaluation_says_so() -> None:
    with pytest.raises(StallError, match=r"waited 5 s in evaluation 2 and nothing arrived"):
        World().run_step(Shape(3, 1, kinds=FORWARD_ONLY), evaluation_step(2))
    world = World(script=[[Left(0)]])
    with pytest.raises(PeerLostError, match="waited in evaluation 2 for"):
        world.run_step(Shape(3, 1, kinds=FORWARD_ONLY), evaluation_step(2))


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


def test_a_failure_is_raised_as_it_came() -> None:
    error = RrfpError("rank 2 broke")
    with pytest.raises(RrfpError) as raised:
        World(script=[[arrived("1F0"), Failed(error)]]).run_step(Shape(3, 1))
    assert raised.value is error


def test_a_failure_during_a_task_ends_the_step_before_the_next_one() -> None:
    world = World(rank=0)
    world.during[task("0F0")] = [Failed(RrfpError("rank 1 broke"))]
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
def test_a_stall_says_who_owes_what(script: list[list[Event]], owed: list[str]) -> None:
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
def test_a_stall_is_told_in_time_and_the_others_are_asked_before(
    stall_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    called_after_s: list[float] = []
    call = StoreStallBoard.call

    def noted(board: StoreStallBoard, step: int) -> int:
        called_after_s.append(world.inbox.waited_s)
        return call(board, step)

    monkeypatch.setattr(StoreStallBoard, "call", noted)
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
    order = ORDERS["gpipe"].on(shape)
    dispatcher = Dispatcher(shape, 1, Policy(order, dispatch=Dispatch.FIXED))
    with pytest.raises(StallError, match="rank 0 owes the output of 0F0, which 1F0 needs"):
        world.worker.run_step(0, dispatcher, world)


def _at_step(event: Event, step: int) -> Event:
    assert isinstance(event, Arrived)
    return Arrived(event.peer, Message(step, event.message.task, event.message.tensors))


def test_a_peer_that_leaves_owing_is_told_at_once() -> None:
    world = World(script=[[arrived("1F0"), Left(0)]])
    with pytest.raises(PeerLostError, match=r"rank 0 left .* for the output of 0F1, which 1F1"):
        world.run_step(Shape(3, 2))
    assert "run 1F0 on [0.0]" in world.calls


def test_a_peer_that_leaves_after_its_last_message_is_let_go() -> None:
    world = World(script=[[arrived("1F0"), Left(0)], [arrived("1B0", peer=2), Left(2)]])
    world.run_step(Shape(3, 1))
    assert len([call for call in world.calls if call.startswith("run")]) == 2


# Groups: ranks 1 (leader) and 4 share every task of this stage.


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


# Whole pipelines, in memory: workers, agreement and the links' protocol together.


@given(
    seed=st.integers(0, 2**32),
    num_pp_ranks=st.integers(1, 4),
    num_chunks=st.integers(1, 2),
    hint_name=st.sampled_from(["bf", "fb", "bfw", "bf-deep"]),
)
def test_a_pipeline_runs_every_task_of_every_step(
    seed: int, num_pp_ranks: int, num_chunks: int, hint_name: str
) -> None:
    """Tasks and messages take their time, and evaluations stand between the training steps."""
    draws = random.Random(seed)
    kinds = SPLIT_BACKWARD if hint_name == "bfw" else WHOLE_BACKWARD
    training = Shape(num_pp_ranks, 4, num_chunks, kinds=kinds)
    steps = {0: training, evaluation_step(0): replace(training, kinds=FORWARD_ONLY), 1: training}

    def run(rig: RankRig) -> list[TaskRecord]:
        work = Work(lambda _: rig.sleep(draws.uniform(0, 1e-3)))
        for step, shape in steps.items():
            rig.run_step(step, shape, work, hint_name)
        return [record for record in rig.records if isinstance(record, TaskRecord)]

    ranks = run_in_memory(run, num_pp_ranks, seed=seed, longest_delay_ns=1_000_000)
    for rank, records in enumerate(ranks):
        assert [*dict.fromkeys(record.step for record in records)] == [*steps]
        for step, shape in steps.items():
            ran = [(run.stage, run.kind, run.microbatch) for run in records if run.step == step]
            assert sorted(ran) == sorted((*task,) for task in shape.tasks_of(rank))


def test_the_same_seed_gives_the_same_records() -> None:
    def run(rig: RankRig) -> list[Record]:
        rig.run_step(0, Shape(3, 4), Work(lambda _: rig.sleep(1e-3)))
        return rig.records

    def records(seed: int) -> list[list[Record]]:
        return run_in_memory(run, 3, seed=seed, longest_delay_ns=1_000_000)

    assert records(1) == records(1)
    assert records(1) != records(2)


def test_a_link_that_is_cut_fails_both_of_its_ranks() -> None:
    network = MemoryNetwork()

    def run(rig: RankRig) -> str:
        def act(task: Task) -> None:
            rig.sleep(1e-3)
            if task == parse_task("1F2")[0]:
                network.cut(0, 1)

        with pytest.raises(PeerLostError) as lost:
            rig.run_step(0, Shape(2, 4), Work(act))
        return str(lost.value)

    told = run_in_memory(run, 2, network=network)
    assert "rank 1 closed its connection without a farewell (seen by rank 0)" in told[0]
    assert "rank 0 closed its connection without a farewell (seen by rank 1)" in told[1]


def test_a_rank_whose_process_is_stopped_is_missed_and_does_not_blame_the_others() -> None:
    """The others lose it after 20 s; when it goes on, they have closed without a farewell."""
    network = MemoryNetwork()

    def run(rig: RankRig) -> tuple[str, float]:
        def act(task: Task) -> None:
            if task == parse_task("1F2")[0]:
                network.stop(1)
                rig.sleep(60)
                network.resume(1)

        with pytest.raises(PeerLostError) as lost:
            rig.run_step(0, Shape(3, 4), Work(act))
        told = str(lost.value), rig.clock() / NS_PER_S
        # As the drop-in does after a failure.
        rig.transport.close(farewell=False)
        return told

    (first, first_s), (stopped, stopped_s), (last, last_s) = run_in_memory(
        run, 3, network=network, stall_s=600.0
    )
    for told, at_s in ((first, first_s), (last, last_s)):
        assert "rank 1 was silent for 20 s" in told
        assert at_s == pytest.approx(20, abs=1.1)
    assert "closed its connection without a farewell" in stopped
    assert stopped_s == pytest.approx(60, abs=1.1)
