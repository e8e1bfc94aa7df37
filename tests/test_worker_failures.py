"""What ends a worker's step: failures, stalls, which name those who owe, and peers that leave."""

import pytest

from rrfp.errors import RrfpError
from rrfp.runtime.protocols import Arrived, Event, Failed, Left, Message, PeerLostError, StallError
from rrfp.runtime.stall import GATHER_S, LOOK_S, StoreStallBoard
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.named_hints import ORDERS
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.shape import FORWARD_ONLY, Shape
from rrfp.trace.records import evaluation_step
from tests.worker_world import World, arrived, task


def test_a_stall_in_an_evaluation_says_so() -> None:
    with pytest.raises(StallError, match=r"waited 5 s in evaluation 2 and nothing arrived"):
        World().run_step(Shape(3, 1, kinds=FORWARD_ONLY), evaluation_step(2))
    world = World(script=[[Left(0)]])
    with pytest.raises(PeerLostError, match="waited in evaluation 2 for"):
        world.run_step(Shape(3, 1, kinds=FORWARD_ONLY), evaluation_step(2))


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
