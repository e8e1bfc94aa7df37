"""Groups: one order among the ranks that share a collective inside a task, decided by a leader,
also ahead of the running task's end."""

import pytest

from rrfp.schedule.dispatcher import Dispatcher, DispatchError, Group
from rrfp.schedule.named_hints import HINTS, hint_named
from rrfp.schedule.policy import AgreementRule, Dispatch, Policy
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Cause, InputArrived, RunTask, TaskAgreed, Waited
from tests.decisions import arrive, ask, ask_ahead, run_on, task, turns

LEADER_OF_2 = Group(num_members=2, leads=True)
FOLLOWER_OF_2 = Group(num_members=2, leads=False)


def test_a_leader_runs_only_what_every_member_reported() -> None:
    dispatcher = Dispatcher(Shape(3, 4), 1, Policy(HINTS["bf"]), group=LEADER_OF_2)
    arrive(dispatcher, "1F0 1F1")
    assert ask(dispatcher) == "warmup"
    arrive(dispatcher, "1F1", member=1)
    assert run_on(dispatcher) == "1F1"
    assert ask(dispatcher) == "coordination"
    arrive(dispatcher, "1F0", member=1)
    assert run_on(dispatcher) == "1F0"


def test_a_leader_that_lacks_the_input_itself_does_not_blame_the_group() -> None:
    dispatcher = Dispatcher(Shape(3, 4), 1, Policy(HINTS["bf"]), group=LEADER_OF_2)
    arrive(dispatcher, "1F0")
    arrive(dispatcher, "1F0 1F1", member=1)
    assert run_on(dispatcher) == "1F0"
    assert ask(dispatcher) == "forward_input"


def test_a_leader_of_the_first_stage_needs_no_reports_to_admit() -> None:
    dispatcher = Dispatcher(Shape(2, 2), 0, Policy(HINTS["bf"]), group=LEADER_OF_2)
    assert run_on(dispatcher).startswith("0F0 0F1")


def test_a_follower_runs_what_was_agreed_and_nothing_else() -> None:
    dispatcher = turns_of_follower()
    arrive(dispatcher, "1F0 1F1")
    assert ask(dispatcher) == "warmup"
    (waited, run) = dispatcher.handle(7, TaskAgreed(task("1F1")))
    assert waited == Waited(Cause.WARMUP, 0, 7)
    assert isinstance(run, RunTask)
    assert (run.task, run.ready, run.depth) == (task("1F1"), 2, 1)
    assert ask(dispatcher) == "coordination"


def test_a_follower_at_the_limit_waits_for_the_limit() -> None:
    dispatcher = turns_of_follower(limit=1)
    arrive(dispatcher, "1F0 1F1")
    dispatcher.handle(0, TaskAgreed(task("1F0")))
    assert ask(dispatcher) == "limit"
    arrive(dispatcher, "1B0")
    assert ask(dispatcher) == "coordination"


def turns_of_follower(limit: int | None = None) -> Dispatcher:
    return Dispatcher(Shape(3, 4), 1, Policy(HINTS["bf"], limit=limit), group=FOLLOWER_OF_2)


@pytest.mark.parametrize("group", [LEADER_OF_2, FOLLOWER_OF_2])
def test_fixed_dispatch_in_a_group_tells_the_order_from_the_group(group: Group) -> None:
    shape = Shape(3, 4)
    order = hint_named("1f1b").on(shape)
    dispatcher = Dispatcher(shape, 1, Policy(order, dispatch=Dispatch.FIXED), group=group)
    for text in ("1F0", "1F1"):
        arrive(dispatcher, text)
        if group.leads:
            arrive(dispatcher, text, member=1)
            assert ask(dispatcher) == text
        else:
            assert len(dispatcher.handle(0, TaskAgreed(task(text)))) == 1
    arrive(dispatcher, "1F2")
    assert ask(dispatcher) == "order"
    arrive(dispatcher, "1B0")
    assert ask(dispatcher) == "coordination"


# The paper's rule: a task runs only if it is every member's own first pick.


def test_unanimous_members_run_what_each_of_them_would_pick() -> None:
    dispatcher = Dispatcher(
        Shape(3, 4), 1, Policy(HINTS["bf"], agreement=AgreementRule.UNANIMOUS), group=LEADER_OF_2
    )
    for member in range(2):
        arrive(dispatcher, "1F0 1F1", member=member)
    assert run_on(dispatcher) == "1F0 1F1"


def test_unanimous_members_with_different_first_picks_run_nothing() -> None:
    def agrees_by(rule: AgreementRule) -> str:
        dispatcher = Dispatcher(
            Shape(3, 4), 1, Policy(HINTS["bf"], agreement=rule), group=LEADER_OF_2
        )
        arrive(dispatcher, "1F0 1F1")
        arrive(dispatcher, "1F1", member=1)
        return ask(dispatcher)

    assert agrees_by(AgreementRule.INTERSECTION) == "1F1"
    assert agrees_by(AgreementRule.UNANIMOUS) == "warmup"


def test_a_first_pick_of_a_member_counts_the_bounds_and_the_round_of_the_group() -> None:
    dispatcher = Dispatcher(
        Shape(3, 4),
        1,
        Policy(HINTS["bf"], limit=1, agreement=AgreementRule.UNANIMOUS),
        group=LEADER_OF_2,
    )
    for member in range(2):
        arrive(dispatcher, "1F0", member=member)
    assert ask(dispatcher) == "1F0"
    arrive(dispatcher, "1F1")  # withheld on member 0
    assert ask(dispatcher) == "limit"
    arrive(dispatcher, "1B0")
    assert ask(dispatcher) == "coordination"  # member 1 has nothing to pick
    arrive(dispatcher, "1B0", member=1)
    assert ask(dispatcher) == "1B0"
    assert ask(dispatcher) == "coordination"
    arrive(dispatcher, "1F1", member=1)
    assert ask(dispatcher) == "1F1"


def test_unanimous_members_need_no_report_for_what_comes_from_their_own_rank() -> None:
    dispatcher = Dispatcher(
        Shape(1, 2), 0, Policy(HINTS["bf"], agreement=AgreementRule.UNANIMOUS), group=LEADER_OF_2
    )
    assert run_on(dispatcher) == "0F0 0B0 0F1 0B1"


# Deciding ahead: everything advances by position in the sequence, nothing by completion.


def test_a_decision_ahead_counts_what_the_running_task_makes_ready() -> None:
    dispatcher = turns("bf", Shape(1, 2), 0)
    assert ask(dispatcher) == "0F0"
    assert ask_ahead(dispatcher) == "0B0"
    assert ask_ahead(dispatcher) == "0F1"


def test_a_decision_ahead_counts_the_running_task_in_d_and_what_is_held() -> None:
    for bound in ("limit", "hold"):
        dispatcher = turns("f-first", Shape(3, 4), 1, **{bound: 2})
        arrive(dispatcher, "1F0 1F1 1F2")
        assert [ask(dispatcher), ask_ahead(dispatcher), ask_ahead(dispatcher)] == [
            "1F0",
            "1F1",
            "nothing",
        ]
        assert ask(dispatcher) == bound


def test_the_round_goes_on_over_a_decision_ahead() -> None:
    dispatcher = turns("bf", Shape(3, 8), 1)
    arrive(dispatcher, "1F0 1F1 1F2")
    assert run_on(dispatcher) == "1F0 1F1 1F2"
    arrive(dispatcher, "1B0 1B1 1F3 1F4")
    assert [ask(dispatcher), ask_ahead(dispatcher), ask(dispatcher)] == ["1B0", "1F3", "1B1"]


def test_a_decision_ahead_that_finds_nothing_changes_nothing() -> None:
    dispatcher = turns("bf", Shape(3, 8), 1)
    arrive(dispatcher, "1F0 1F1")
    assert run_on(dispatcher) == "1F0 1F1"
    arrive(dispatcher, "1B0")
    assert ask(dispatcher) == "1B0"
    assert ask_ahead(dispatcher) == "nothing"
    arrive(dispatcher, "1B1 1F2")
    assert ask(dispatcher) == "1F2"  # the round that 1B0 began goes on


def test_a_decision_ahead_ends_no_wait() -> None:
    dispatcher = turns("bf", Shape(3, 2), 1)
    assert ask(dispatcher) == "warmup"
    arrive(dispatcher, "1F0 1F1", now_ns=5)
    assert ask(dispatcher, 5) == "1F0"
    assert ask_ahead(dispatcher) == "1F1"
    assert ask_ahead(dispatcher) == "nothing"


def test_the_last_task_may_be_decided_ahead() -> None:
    dispatcher = turns("bf", Shape(1, 1), 0)
    assert ask(dispatcher) == "0F0"
    assert ask_ahead(dispatcher) == "0B0"
    assert ask_ahead(dispatcher) == "nothing"
    assert ask(dispatcher) == "done"


def test_a_follower_decides_nothing_ahead() -> None:
    dispatcher = turns_of_follower()
    arrive(dispatcher, "1F0 1F1")
    dispatcher.handle(0, TaskAgreed(task("1F0")))
    assert ask_ahead(dispatcher) == "nothing"


# Stimuli that cannot be.


def test_a_member_that_reports_twice_is_an_error_and_not_another_member() -> None:
    dispatcher = Dispatcher(Shape(3, 4), 1, Policy(HINTS["bf"]), group=Group(3, leads=True))
    arrive(dispatcher, "1F0", member=1)
    with pytest.raises(DispatchError, match="1F0 arrived on member 1 of pipeline rank 1"):
        dispatcher.handle(0, InputArrived(task("1F0"), 1))


@pytest.mark.parametrize("agreed", ["1F1", "1B0", "0F0", "1F9"])
def test_an_agreed_task_that_is_not_ready_is_an_error(agreed: str) -> None:
    dispatcher = turns_of_follower()
    arrive(dispatcher, "1F0")
    with pytest.raises(DispatchError, match=f"agreed on {agreed}"):
        dispatcher.handle(0, TaskAgreed(task(agreed)))


def test_a_task_agreed_on_twice_is_an_error() -> None:
    dispatcher = turns_of_follower()
    arrive(dispatcher, "1F0")
    dispatcher.handle(0, TaskAgreed(task("1F0")))
    with pytest.raises(DispatchError, match="agreed on 1F0"):
        dispatcher.handle(0, TaskAgreed(task("1F0")))


@pytest.mark.parametrize("group", [None, LEADER_OF_2])
def test_a_rank_that_decides_is_told_nothing(group: Group | None) -> None:
    dispatcher = Dispatcher(Shape(2, 2), 0, Policy(HINTS["bf"]), group=group)
    with pytest.raises(DispatchError, match="agreed on 0F1"):
        dispatcher.handle(0, TaskAgreed(task("0F1")))


def test_unfinished_tells_what_is_ready_and_at_which_members_inputs_lack() -> None:
    dispatcher = Dispatcher(Shape(3, 2), 1, Policy(HINTS["bf"]), group=Group(3, leads=True))
    for member in range(3):
        arrive(dispatcher, "1F0", member=member)
    arrive(dispatcher, "1F1", member=2)
    assert dispatcher.unfinished() == [
        (task("1F0"), 0b000),
        (task("1F1"), 0b011),
        (task("1B0"), 0b111),
        (task("1B1"), 0b111),
    ]
    assert ask(dispatcher) == "1F0"
    assert dispatcher.unfinished()[0] == (task("1F1"), 0b011)
