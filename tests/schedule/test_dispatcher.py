"""Tests of single decisions of a rank or a group, with whole and split backwards."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.agreement_rules import measure
from rrfp.schedule.dispatcher import Dispatcher, DispatchError, Group
from rrfp.schedule.hints import WeightGradients
from rrfp.schedule.named_hints import HINTS, hint_named
from rrfp.schedule.policy import AgreementRule, Dispatch, Policy
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import FORWARD_ONLY, SPLIT_BACKWARD, WHOLE_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import (
    Cause,
    ComputeIdle,
    InputArrived,
    Kind,
    RunTask,
    StepDone,
    Stimulus,
    Task,
    TaskAgreed,
    Wait,
    Waited,
)
from tests.properties.cases import (
    an_order,
    arrive,
    ask,
    ask_ahead,
    hint_dispatcher,
    random_case,
    run_on,
    task,
)
from tests.properties.naive_dispatcher import NaiveDispatcher

# Rounds and strict priorities, on rank 1 of 3. Four forwards have arrived, and three gradients
# arrive once their forwards have run.


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bf", "1B0 1F3 1B1 1F4 1B2 1F5"),
        ("fb", "1F3 1B0 1F4 1B1 1F5 1B2"),
        ("b-first", "1B0 1B1 1B2 1F3 1F4 1F5"),
        ("f-first", "1F3 1F4 1F5 1B0 1B1 1B2"),
    ],
)
def test_round_hints_rank_the_two_directions(name: str, expected: str) -> None:
    dispatcher = hint_dispatcher(name, Shape(3, 8), 1)
    arrive(dispatcher, "1F0 1F1 1F2")
    assert run_on(dispatcher) == "1F0 1F1 1F2"
    arrive(dispatcher, "1F3 1F4 1F5 1B0 1B1 1B2")
    assert run_on(dispatcher) == expected


def test_bf_skips_a_direction_with_nothing_ready_immediately() -> None:
    dispatcher = hint_dispatcher("bf", Shape(3, 8), 1)
    arrive(dispatcher, "1F0 1F1")
    assert ask(dispatcher) == "1F0"
    assert ask(dispatcher) == "1F1"
    arrive(dispatcher, "1B0 1B1")
    assert ask(dispatcher) == "1B0"
    assert ask(dispatcher) == "1B1"


def test_bf_continues_with_f_after_b() -> None:
    dispatcher = hint_dispatcher("bf", Shape(3, 8), 1)
    arrive(dispatcher, "1F0 1F1 1F2")
    ask(dispatcher)
    ask(dispatcher)
    arrive(dispatcher, "1B0 1B1")
    assert ask(dispatcher) == "1B0"
    assert ask(dispatcher) == "1F2"
    assert ask(dispatcher) == "1B1"


@pytest.mark.parametrize(
    ("name", "ran_first", "expected"), [("bf", "1B0", "1B1"), ("fb", "1F2", "1F3")]
)
def test_a_round_restarts_after_a_wait(name: str, ran_first: str, expected: str) -> None:
    dispatcher = hint_dispatcher(name, Shape(3, 8), 1)
    arrive(dispatcher, "1F0 1F1")
    assert run_on(dispatcher) == "1F0 1F1"
    arrive(dispatcher, ran_first)
    assert run_on(dispatcher).split()[0] == ran_first
    arrive(dispatcher, "1F3 1B1")
    assert ask(dispatcher) == expected


def test_a_direction_runs_the_smallest_microbatch_first_in_any_arrival_order() -> None:
    dispatcher = hint_dispatcher("b-first", Shape(3, 8), 1)
    arrive(dispatcher, "1F5 1F2 1F7")
    assert run_on(dispatcher) == "1F2 1F5 1F7"
    arrive(dispatcher, "1B7 1B5 1B2")
    assert run_on(dispatcher) == "1B2 1B5 1B7"


def test_a_backward_also_needs_its_local_forward() -> None:
    dispatcher = hint_dispatcher("b-first", Shape(3, 8), 1)
    arrive(dispatcher, "1B0")
    assert ask(dispatcher) == "warmup"
    arrive(dispatcher, "1F0")
    assert run_on(dispatcher) == "1F0 1B0"


def test_first_stage_admits_and_last_stage_needs_no_message() -> None:
    alone = hint_dispatcher("bf", Shape(1, 2), 0)
    assert run_on(alone) == "0F0 0B0 0F1 0B1"
    assert ask(alone) == "done"
    first = hint_dispatcher("bf", Shape(2, 2), 0)
    assert run_on(first) == "0F0 0F1"
    last = hint_dispatcher("bf", Shape(2, 2), 1)
    arrive(last, "1F0 1F1")
    assert run_on(last) == "1F0 1B0 1F1 1B1"
    assert ask(last) == "done"


def test_a_finished_step_stays_finished() -> None:
    dispatcher = hint_dispatcher("bf", Shape(1, 1), 0)
    assert run_on(dispatcher) == "0F0 0B0"
    assert ask(dispatcher) == "done"
    assert dispatcher.handle(9, ComputeIdle()) == (StepDone(),)


# Orders as hints and as binding.


def test_an_order_as_a_hint_runs_its_first_ready_entry() -> None:
    shape = Shape(2, 3)
    order = an_order(shape, "0F2 0F0 0F1 0B2 0B0 0B1", "1F2 1B2 1F0 1B0 1F1 1B1")
    dispatcher = Dispatcher(shape, 1, Policy(order))
    arrive(dispatcher, "1F0 1F1")
    assert ask(dispatcher) == "1F0"
    arrive(dispatcher, "1F2")
    assert run_on(dispatcher) == "1F2 1B2 1B0 1F1 1B1"
    assert ask(dispatcher) == "done"


def test_an_order_under_fixed_dispatch_waits_for_its_next_entry() -> None:
    shape = Shape(2, 2)
    order = an_order(shape, "0F0 0F1 0B0 0B1", "1F0 1F1 1B1 1B0")
    last = Dispatcher(shape, 1, Policy(order, dispatch=Dispatch.FIXED))
    arrive(last, "1F1")
    assert ask(last) == "warmup"
    arrive(last, "1F0")
    assert run_on(last) == "1F0 1F1 1B1 1B0"
    assert ask(last) == "done"

    first = Dispatcher(shape, 0, Policy(order, dispatch=Dispatch.FIXED))
    assert run_on(first) == "0F0 0F1"
    assert ask(first) == "backward_input"
    arrive(first, "0B1")
    assert ask(first) == "order"
    arrive(first, "0B0")
    assert run_on(first) == "0B0 0B1"
    assert ask(first) == "done"


def test_fixed_dispatch_names_the_input_that_its_next_entry_lacks() -> None:
    shape = Shape(3, 3)
    dispatcher = Dispatcher(
        shape, 1, Policy(hint_named("1f1b").for_shape(shape), dispatch=Dispatch.FIXED)
    )
    arrive(dispatcher, "1F0")
    assert run_on(dispatcher) == "1F0"
    assert ask(dispatcher) == "forward_input"
    arrive(dispatcher, "1F1")
    assert run_on(dispatcher) == "1F1"
    assert ask(dispatcher) == "backward_input"
    arrive(dispatcher, "1F2")
    assert ask(dispatcher) == "order"


def test_fixed_dispatch_binds_to_the_order_that_a_round_based_hint_gives() -> None:
    shape = Shape(2, 3)
    order = order_of(HINTS["bf"], shape)
    dispatcher = Dispatcher(shape, 1, Policy(HINTS["bf"], dispatch=Dispatch.FIXED, order=order))
    arrive(dispatcher, "1F2 1F1 1F0")
    assert run_on(dispatcher) == "1F0 1B0 1F1 1B1 1F2 1B2"
    assert ask(dispatcher) == "done"


# Waits.


def test_an_idle_rank_names_the_missing_input_of_its_best_unfinished_task() -> None:
    dispatcher = hint_dispatcher("bf", Shape(3, 4), 1)  # 1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3
    arrive(dispatcher, "1F0")
    assert run_on(dispatcher) == "1F0"
    assert ask(dispatcher) == "forward_input"
    arrive(dispatcher, "1F1 1F2")
    assert run_on(dispatcher) == "1F1 1F2"
    assert ask(dispatcher) == "backward_input"
    arrive(dispatcher, "1B0")
    assert run_on(dispatcher) == "1B0"
    assert ask(dispatcher) == "forward_input"


def test_a_backward_whose_forward_did_not_run_waits_for_the_activation() -> None:
    shape = Shape(2, 2)
    order = an_order(shape, "0F0 0F1 0B0 0B1", "1F1 1B0 1F0 1B1")
    dispatcher = Dispatcher(shape, 1, Policy(order))
    arrive(dispatcher, "1F1")
    assert ask(dispatcher) == "1F1"
    assert ask(dispatcher) == "1B1"
    assert ask(dispatcher) == "forward_input"


def test_an_idle_interval_is_recorded_when_it_ends() -> None:
    dispatcher = hint_dispatcher("bf", Shape(3, 4), 1)
    assert dispatcher.handle(100, ComputeIdle()) == (Wait(Cause.WARMUP),)
    assert dispatcher.handle(150, ComputeIdle()) == (Wait(Cause.WARMUP),)
    arrive(dispatcher, "1F0", now_ns=180)
    waited, run = dispatcher.handle(200, ComputeIdle())
    assert waited == Waited(Cause.WARMUP, 100, 200)
    assert isinstance(run, RunTask)


def test_an_idle_interval_is_split_when_its_cause_changes() -> None:
    dispatcher = hint_dispatcher("bf", Shape(3, 4), 1, limit=1)
    arrive(dispatcher, "1F0")
    assert ask(dispatcher) == "1F0"
    assert dispatcher.handle(10, ComputeIdle()) == (Wait(Cause.FORWARD_INPUT),)
    arrive(dispatcher, "1F1", now_ns=15)
    assert dispatcher.handle(15, ComputeIdle()) == (
        Waited(Cause.FORWARD_INPUT, 10, 15),
        Wait(Cause.LIMIT),
    )
    arrive(dispatcher, "1B0", now_ns=40)
    waited, run = dispatcher.handle(40, ComputeIdle())
    assert waited == Waited(Cause.LIMIT, 15, 40)
    assert isinstance(run, RunTask)


# Reported counts.


def test_a_dispatch_reports_its_position_in_the_order_and_skipped_tasks() -> None:
    shape = Shape(2, 3)
    dispatcher = Dispatcher(
        shape, 1, Policy(hint_named("1f1b").for_shape(shape))
    )  # 1F0 1B0 1F1 1B1 1F2 1B2
    arrive(dispatcher, "1F2 1F1")
    runs = [dispatcher.handle(0, ComputeIdle())[-1] for _ in range(4)]
    assert runs == [
        RunTask(task("1F1"), 0, 2, 2, 2, 1, 1, 2, 0),
        RunTask(task("1B1"), 0, 3, 2, 2, 0, 0, 1, 1),
        RunTask(task("1F2"), 0, 4, 1, 2, 1, 1, 1, 0),
        RunTask(task("1B2"), 0, 5, 1, 2, 0, 0, 0, 1),
    ]
    arrive(dispatcher, "1F0")
    runs = [dispatcher.handle(0, ComputeIdle())[-1] for _ in range(2)]
    assert runs == [
        RunTask(task("1F0"), 0, 0, 1, 0, 1, 1, 1, 0),
        RunTask(task("1B0"), 0, 1, 1, 0, 0, 0, 0, 1),
    ]


def test_without_an_order_a_dispatch_reports_no_position() -> None:
    dispatcher = Dispatcher(Shape(1, 1), 0, Policy(HINTS["bf"]))
    assert dispatcher.handle(0, ComputeIdle()) == (RunTask(task("0F0"), 0, -1, 1, -1, 1, 1, 1, 0),)


# Impossible stimuli.


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ([InputArrived(task("1F0"))], InputArrived(task("1F0"))),
        ([InputArrived(task("1F0")), ComputeIdle()], InputArrived(task("1F0"))),
        ([], InputArrived(task("0F0"))),
        ([], InputArrived(task("2B0"))),
        ([], InputArrived(task("1F4"))),
        ([], InputArrived(task("1W0"))),
        ([], InputArrived(task("1F0"), member=1)),
    ],
    ids=["twice", "after it ran", "left", "right", "microbatch", "kind", "member"],
)
def test_an_input_that_no_task_needs_is_an_error(first: list[Stimulus], then: Stimulus) -> None:
    dispatcher = hint_dispatcher("bf", Shape(3, 4), 1)
    for stimulus in first:
        dispatcher.handle(0, stimulus)
    with pytest.raises(DispatchError, match="which does not lack it"):
        dispatcher.handle(0, then)


def test_the_input_of_the_first_stage_never_arrives() -> None:
    with pytest.raises(DispatchError, match="which does not lack it"):
        hint_dispatcher("bf", Shape(3, 4), 0).handle(0, InputArrived(task("0F0")))


def test_fixed_dispatch_without_an_order_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs the order"):
        Dispatcher(Shape(2, 2), 0, Policy(HINTS["bf"], dispatch=Dispatch.FIXED))


def test_an_order_of_another_shape_is_an_error() -> None:
    with pytest.raises(ValueError, match="order 1f1b is for"):
        Dispatcher(Shape(2, 2), 0, Policy(hint_named("1f1b").for_shape(Shape(2, 3))))


# The status that a stalled rank reports.


def best_waiting(dispatcher: Dispatcher) -> tuple[str, list[str]] | None:
    """Return the hint's best task that lacks an input, and its missing inputs."""
    best = dispatcher.status().best_waiting
    return None if best is None else (str(best.task), [str(needed) for needed in best.lacks])


def ready(dispatcher: Dispatcher) -> list[str]:
    return [str(each) for each in dispatcher.status().ready]


def test_status_lists_ready_tasks_and_the_missing_inputs_of_the_best_waiting_task() -> None:
    dispatcher = hint_dispatcher("bf", Shape(3, 3), 1, limit=1)  # 1F0 1F1 1B0 1F2 1B1 1B2
    assert best_waiting(dispatcher) == ("1F0", ["0F0"])
    arrive(dispatcher, "1F0 1F2")
    assert ready(dispatcher) == ["1F0 may run", "1F2 may run"]
    assert ask(dispatcher) == "1F0"
    assert ready(dispatcher) == ["1F2 is here, withheld by limit"]
    assert best_waiting(dispatcher) == ("1F1", ["0F1"])
    arrive(dispatcher, "1F1")
    assert best_waiting(dispatcher) == ("1B0", ["2B0"])


def test_a_waiting_backward_lacks_its_forward_too() -> None:
    shape = Shape(2, 1)
    dispatcher = hint_dispatcher("bf", shape, 1)
    arrive(dispatcher, "1F0")
    assert best_waiting(dispatcher) == ("1B0", ["1F0"])
    assert run_on(dispatcher) == "1F0 1B0"
    assert best_waiting(dispatcher) is None


def test_status_names_the_cause_that_withholds_a_task() -> None:
    held = hint_dispatcher("bf", Shape(2, 2, num_chunks=2), 0, hold=2)
    ask(held)
    assert ready(held) == ["0F1 is here, withheld by hold"]
    draining = hint_dispatcher("bf", Shape(2, 2, num_chunks=2), 0, limit=1)
    ask(draining)
    arrive(draining, "2F0")
    assert ready(draining) == ["0F1 is here, withheld by limit", "2F0 may run"]
    shape = Shape(2, 2)
    order = an_order(shape, "0F0 0F1 0B0 0B1", "1F0 1F1 1B1 1B0")
    fixed = Dispatcher(shape, 1, Policy(order, dispatch=Dispatch.FIXED))
    arrive(fixed, "1F1")
    assert ready(fixed) == ["1F1 is here, withheld by order"]
    leader = Dispatcher(shape, 1, Policy(HINTS["bf"]), Group(2, leads=True))
    arrive(leader, "1F1")
    assert ready(leader) == ["1F1 is here, withheld by coordination"]


def test_an_error_message_ends_with_the_state_and_the_last_stimuli() -> None:
    dispatcher = hint_dispatcher("bf", Shape(3, 4), 1)
    arrive(dispatcher, "1F0", now_ns=5)
    ask(dispatcher, 7)
    with pytest.raises(DispatchError) as raised:
        arrive(dispatcher, "1F0", now_ns=9)
    sentence, _, story = str(raised.value).partition("\n")
    assert sentence.endswith("a message was sent twice or to the wrong rank")
    assert story.splitlines() == [
        "pipeline rank 1 has 7 tasks left, D 1, 1 held",
        "  1F1 lacks 0F1",
        "  1F2 lacks 0F2",
        "  1F3 lacks 0F3",
        "  1B0 lacks 2B0",
        "  1B1 lacks 1F1, 2B1",
        "  1B2 lacks 1F2, 2B2",
        "  and 1 more",
        "  it last took in",
        "    5 ns: InputArrived 1F0 0",
        "    7 ns: ComputeIdle",
        "    9 ns: InputArrived 1F0 0",
    ]


def test_repr_of_a_dispatcher_is_one_line() -> None:
    assert repr(hint_dispatcher("bf", Shape(3, 4), 1)) == (
        "<Dispatcher of pipeline rank 1: bf ready, 8 of 8 tasks left>"
    )


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (
            lambda tracker: setattr(tracker, "num_ready_here", [9] * 3),
            "the counts of tasks ready here",
        ),
        (
            lambda tracker: setattr(tracker, "num_ready", [9] * 3),
            "the counts of ready tasks",
        ),
        (lambda tracker: tracker.unmet.__setitem__(4, 0), "a task's unmet prerequisites"),
        (
            lambda tracker: tracker.ready_sets[0].heaps[0].clear(),
            "a ready task that is not in its heap",
        ),
        (lambda tracker: setattr(tracker, "num_unfinished", 3), "the count of unfinished tasks"),
    ],
)
def test_inconsistent_tracker_state_is_detected(spoil: Callable[[Any], object], what: str) -> None:
    dispatcher = hint_dispatcher("bf", Shape(3, 4), 1)
    arrive(dispatcher, "1F0 1F1")
    spoil(dispatcher._tracker)
    with pytest.raises(DispatchError, match=f"the dispatcher's state is inconsistent: {what}"):
        arrive(dispatcher, "1F2")


# Split-off weight gradients, and ranks that hold several chunks.


# Split backwards.


def test_a_weight_gradient_runs_only_when_neither_direction_is_ready() -> None:
    shape = Shape(3, 4, kinds=SPLIT_BACKWARD)
    dispatcher = hint_dispatcher("bfw", shape, 1)
    arrive(dispatcher, "1F0 1F1 1F2")
    ask(dispatcher)
    arrive(dispatcher, "1B0")
    assert run_on(dispatcher) == "1B0 1F1 1F2 1W0"


def test_after_a_weight_gradient_a_new_round_starts() -> None:
    dispatcher = hint_dispatcher("bfw", Shape(3, 4, kinds=SPLIT_BACKWARD), 1)
    arrive(dispatcher, "1F0 1F1 1B0 1B1")
    assert run_on(dispatcher) == "1F0 1B0 1F1 1B1 1W0 1W1"
    arrive(dispatcher, "1F2 1B2")
    ask(dispatcher)
    assert ask(dispatcher) == "1B2"
    assert ask(dispatcher) == "1W2"
    arrive(dispatcher, "1F3")
    assert ask(dispatcher) == "1F3"


def test_activations_are_held_until_a_split_off_weight_gradient() -> None:
    def held(kinds: tuple[Kind, ...]) -> list[int]:
        name = "bfw" if kinds == SPLIT_BACKWARD else "bf"
        dispatcher = hint_dispatcher(name, Shape(1, 2, kinds=kinds), 0)
        runs = [dispatcher.handle(0, ComputeIdle())[-1] for _ in range(2 * len(kinds))]
        return [run.held for run in runs if isinstance(run, RunTask)]

    assert held(WHOLE_BACKWARD) == [1, 0, 1, 0]
    assert held(SPLIT_BACKWARD) == [1, 1, 2, 2, 1, 0]
    assert held(FORWARD_ONLY) == [0, 0]


def test_an_order_as_a_hint_runs_weight_gradients_in_idle_time() -> None:
    shape = Shape(1, 2, kinds=SPLIT_BACKWARD)
    order = an_order(shape, "0F0 0B0 0W0 0F1 0B1 0W1")
    assert run_on(Dispatcher(shape, 0, Policy(order))) == "0F0 0B0 0F1 0B1 0W0 0W1"
    fixed = Dispatcher(shape, 0, Policy(order, dispatch=Dispatch.FIXED))
    assert run_on(fixed) == "0F0 0B0 0W0 0F1 0B1 0W1"
    assert ask(fixed) == "done"


def test_an_order_ranks_weight_gradients_by_position_with_w_ranked() -> None:
    shape = Shape(2, 2, kinds=SPLIT_BACKWARD)
    order = an_order(shape, "0F0 0F1 0B0 0W0 0B1 0W1", "1F0 1B0 1W0 1F1 1B1 1W1")
    first = Dispatcher(shape, 0, Policy(order, w=WeightGradients.RANKED))
    assert run_on(first) == "0F0 0F1"
    arrive(first, "0B1")
    assert ask(first) == "0B1"
    arrive(first, "0B0")
    assert run_on(first) == "0B0 0W0 0W1"
    last = Dispatcher(shape, 1, Policy(order, w=WeightGradients.RANKED))
    arrive(last, "1F0 1F1")
    assert run_on(last) == "1F0 1B0 1W0 1F1 1B1 1W1"


@pytest.mark.parametrize(("limit", "hold"), [(1, None), (None, 2)])
def test_weight_gradients_run_when_a_bound_withholds_the_forwards(
    limit: int | None, hold: int | None
) -> None:
    shape = Shape(2, 3, kinds=SPLIT_BACKWARD)
    dispatcher = hint_dispatcher("bfw", shape, 1, limit=limit, hold=hold)
    arrive(dispatcher, "1F0")
    assert run_on(dispatcher) == "1F0 1B0 1W0"
    first = hint_dispatcher("bfw", shape, 0, limit=limit, hold=hold)
    assert run_on(first).split() == ["0F0", "0F1"][: limit or hold]
    arrive(first, "0B0")
    assert run_on(first).startswith("0B0 0F1" if limit else "0B0 0W0 0F2")


# Chunks.


def test_forwards_prefer_the_smallest_chunk_and_backwards_the_largest() -> None:
    shape = Shape(2, 2, num_chunks=2)  # rank 0 holds stages 0 and 2
    dispatcher = hint_dispatcher("bf", shape, 0)
    arrive(dispatcher, "2F0")
    assert run_on(dispatcher) == "0F0 0F1 2F0"
    arrive(dispatcher, "2F1 0B0 2B0")
    assert run_on(dispatcher) == "2B0 2F1 0B0"


def test_the_deep_hints_prefer_the_deepest_chunk_in_both_directions() -> None:
    shape = Shape(2, 3, num_chunks=2)
    dispatcher = hint_dispatcher("bf-deep", shape, 0)  # stages 0 and 2
    assert ask(dispatcher) == "0F0"
    arrive(dispatcher, "2F0")
    assert ask(dispatcher) == "2F0"
    assert ask(dispatcher) == "0F1"
    arrive(dispatcher, "2F1 2B0")
    assert [ask(dispatcher) for _ in range(2)] == ["2B0", "2F1"]
    arrive(dispatcher, "0B0 2B1")
    assert run_on(dispatcher) == "2B1 0F2 0B0"


def test_a_deep_hint_in_a_v_finishes_a_microbatch_first() -> None:
    shape = Shape(2, 3, num_chunks=2, placement=Placement.V)
    dispatcher = hint_dispatcher("bf-deep", shape, 1)  # stages 1 and 2
    arrive(dispatcher, "1F0 1F1")
    assert run_on(dispatcher) == "1F0 2F0 1F1 2F1"


def test_the_turn_of_a_v_needs_no_message() -> None:
    shape = Shape(2, 1, num_chunks=2, placement=Placement.V)  # rank 1 holds stages 1 and 2
    dispatcher = hint_dispatcher("bf", shape, 1)
    arrive(dispatcher, "1F0")
    assert run_on(dispatcher) == "1F0 2F0"
    arrive(dispatcher, "2B0")
    assert run_on(dispatcher) == "2B0 1B0"
    assert ask(dispatcher) == "done"


def test_the_end_of_a_v_starts_its_backward_without_a_message() -> None:
    shape = Shape(2, 1, num_chunks=2, placement=Placement.V)  # rank 0 holds stages 0 and 3
    dispatcher = hint_dispatcher("bf", shape, 0)
    assert run_on(dispatcher) == "0F0"
    arrive(dispatcher, "3F0")
    assert run_on(dispatcher) == "3F0 3B0"


def test_chunks_on_one_rank_need_no_messages() -> None:
    dispatcher = hint_dispatcher("bf", Shape(1, 1, num_chunks=3), 0)
    assert run_on(dispatcher) == "0F0 1F0 2F0 2B0 1B0 0B0"
    assert ask(dispatcher) == "done"


# Groups: the ranks that share a collective inside a task run one order. A leader decides it, also
# ahead of the running task's end.


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


def test_a_follower_runs_only_agreed_tasks() -> None:
    dispatcher = follower_dispatcher()
    arrive(dispatcher, "1F0 1F1")
    assert ask(dispatcher) == "warmup"
    (waited, run) = dispatcher.handle(7, TaskAgreed(task("1F1")))
    assert waited == Waited(Cause.WARMUP, 0, 7)
    assert isinstance(run, RunTask)
    assert (run.task, run.ready, run.depth) == (task("1F1"), 2, 1)
    assert ask(dispatcher) == "coordination"


def test_a_follower_at_the_limit_waits_for_the_limit() -> None:
    dispatcher = follower_dispatcher(limit=1)
    arrive(dispatcher, "1F0 1F1")
    dispatcher.handle(0, TaskAgreed(task("1F0")))
    assert ask(dispatcher) == "limit"
    arrive(dispatcher, "1B0")
    assert ask(dispatcher) == "coordination"


def follower_dispatcher(limit: int | None = None) -> Dispatcher:
    return Dispatcher(Shape(3, 4), 1, Policy(HINTS["bf"], limit=limit), group=FOLLOWER_OF_2)


@pytest.mark.parametrize("group", [LEADER_OF_2, FOLLOWER_OF_2])
def test_fixed_dispatch_in_a_group_distinguishes_order_and_coordination_waits(group: Group) -> None:
    shape = Shape(3, 4)
    order = hint_named("1f1b").for_shape(shape)
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


# Unanimous agreement, the paper's rule: a task runs only if it is every member's own first pick.


def test_unanimous_members_run_their_common_first_pick() -> None:
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


def test_a_first_pick_of_a_member_respects_the_bounds_and_the_round_of_the_group() -> None:
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


def test_unanimous_members_need_no_report_for_inputs_from_their_own_rank() -> None:
    dispatcher = Dispatcher(
        Shape(1, 2), 0, Policy(HINTS["bf"], agreement=AgreementRule.UNANIMOUS), group=LEADER_OF_2
    )
    assert run_on(dispatcher) == "0F0 0B0 0F1 0B1"


# Decisions ahead: state advances with each decision of the sequence, not with completed tasks.


def test_a_decision_ahead_includes_tasks_that_the_running_task_makes_ready() -> None:
    dispatcher = hint_dispatcher("bf", Shape(1, 2), 0)
    assert ask(dispatcher) == "0F0"
    assert ask_ahead(dispatcher) == "0B0"
    assert ask_ahead(dispatcher) == "0F1"


def test_a_decision_ahead_counts_the_running_task_in_d_and_held_activations() -> None:
    for bound in ("limit", "hold"):
        dispatcher = hint_dispatcher("f-first", Shape(3, 4), 1, **{bound: 2})
        arrive(dispatcher, "1F0 1F1 1F2")
        assert [ask(dispatcher), ask_ahead(dispatcher), ask_ahead(dispatcher)] == [
            "1F0",
            "1F1",
            "nothing",
        ]
        assert ask(dispatcher) == bound


def test_the_round_continues_across_a_decision_ahead() -> None:
    dispatcher = hint_dispatcher("bf", Shape(3, 8), 1)
    arrive(dispatcher, "1F0 1F1 1F2")
    assert run_on(dispatcher) == "1F0 1F1 1F2"
    arrive(dispatcher, "1B0 1B1 1F3 1F4")
    assert [ask(dispatcher), ask_ahead(dispatcher), ask(dispatcher)] == ["1B0", "1F3", "1B1"]


def test_a_decision_ahead_that_finds_nothing_changes_nothing() -> None:
    dispatcher = hint_dispatcher("bf", Shape(3, 8), 1)
    arrive(dispatcher, "1F0 1F1")
    assert run_on(dispatcher) == "1F0 1F1"
    arrive(dispatcher, "1B0")
    assert ask(dispatcher) == "1B0"
    assert ask_ahead(dispatcher) == "nothing"
    arrive(dispatcher, "1B1 1F2")
    assert ask(dispatcher) == "1F2"  # the round that 1B0 began continues


def test_a_decision_ahead_ends_no_wait() -> None:
    dispatcher = hint_dispatcher("bf", Shape(3, 2), 1)
    assert ask(dispatcher) == "warmup"
    arrive(dispatcher, "1F0 1F1", now_ns=5)
    assert ask(dispatcher, 5) == "1F0"
    assert ask_ahead(dispatcher) == "1F1"
    assert ask_ahead(dispatcher) == "nothing"


def test_the_last_task_may_be_decided_ahead() -> None:
    dispatcher = hint_dispatcher("bf", Shape(1, 1), 0)
    assert ask(dispatcher) == "0F0"
    assert ask_ahead(dispatcher) == "0B0"
    assert ask_ahead(dispatcher) == "nothing"
    assert ask(dispatcher) == "done"


def test_a_follower_decides_nothing_ahead() -> None:
    dispatcher = follower_dispatcher()
    arrive(dispatcher, "1F0 1F1")
    dispatcher.handle(0, TaskAgreed(task("1F0")))
    assert ask_ahead(dispatcher) == "nothing"


# Impossible stimuli.


def test_a_member_that_reports_twice_is_an_error_and_not_another_member() -> None:
    dispatcher = Dispatcher(Shape(3, 4), 1, Policy(HINTS["bf"]), group=Group(3, leads=True))
    arrive(dispatcher, "1F0", member=1)
    with pytest.raises(DispatchError, match="1F0 arrived on member 1 of pipeline rank 1"):
        dispatcher.handle(0, InputArrived(task("1F0"), 1))


@pytest.mark.parametrize("agreed", ["1F1", "1B0", "0F0", "1F9"])
def test_an_agreed_task_that_is_not_ready_is_an_error(agreed: str) -> None:
    dispatcher = follower_dispatcher()
    arrive(dispatcher, "1F0")
    with pytest.raises(DispatchError, match=f"agreed on {agreed}"):
        dispatcher.handle(0, TaskAgreed(task(agreed)))


def test_a_task_agreed_on_twice_is_an_error() -> None:
    dispatcher = follower_dispatcher()
    arrive(dispatcher, "1F0")
    dispatcher.handle(0, TaskAgreed(task("1F0")))
    with pytest.raises(DispatchError, match="agreed on 1F0"):
        dispatcher.handle(0, TaskAgreed(task("1F0")))


@pytest.mark.parametrize("group", [None, LEADER_OF_2])
def test_an_agreed_task_is_an_error_on_a_rank_that_decides(group: Group | None) -> None:
    dispatcher = Dispatcher(Shape(2, 2), 0, Policy(HINTS["bf"]), group=group)
    with pytest.raises(DispatchError, match="agreed on 0F1"):
        dispatcher.handle(0, TaskAgreed(task("0F1")))


def test_unfinished_lists_tasks_and_the_members_that_lack_inputs() -> None:
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


# Agreement on the intersection of the ready sets, compared with unanimous first picks.


class Both(NaiveDispatcher):
    """Decides by the intersection, and compares each decision with the unanimous one."""

    num_deferred_by_unanimity_alone = 0

    def choice(self) -> Task | None:
        if not self.group.leads:
            return None
        common = self.first_pick(set.intersection(*self.arrived))
        unanimous = self.unanimous_pick()
        assert unanimous in (None, common)
        self.num_deferred_by_unanimity_alone += unanimous is None and common is not None
        return common

    def unanimous_pick(self) -> Task | None:
        first_picks = {self.first_pick(arrived) for arrived in self.arrived}
        return first_picks.pop() if len(first_picks) == 1 else None


def test_the_intersection_runs_more_than_unanimity() -> None:
    num_deferred = 0
    for seed in range(40):
        case = random_case(seed, num_chunks=1)
        deciders = case.deciders(Both, case.order)
        case.play(deciders)
        num_deferred += sum(
            each.num_deferred_by_unanimity_alone for of_rank in deciders for each in of_rank
        )
    assert num_deferred > 0


@pytest.mark.parametrize("num_members", [2, 4])
def test_the_intersection_defers_fewer_rounds_of_whole_steps(num_members: int) -> None:
    unanimous, intersection = (
        measure(rule, num_members, skew=3.0, seeds=range(4))
        for rule in (AgreementRule.UNANIMOUS, AgreementRule.INTERSECTION)
    )
    assert intersection.deferred < unanimous.deferred
    assert intersection.deferred_share < unanimous.deferred_share
    assert intersection.makespan_ns < unanimous.makespan_ns


@pytest.mark.parametrize("rule", AgreementRule)
def test_members_that_see_arrivals_together_defer_nothing(rule: AgreementRule) -> None:
    rounds = measure(rule, num_members=4, skew=0.0, seeds=[0])
    assert rounds.asked > 0
    assert rounds.deferred == 0
