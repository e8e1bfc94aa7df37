"""Single decisions of a lone rank: rounds and priorities, orders, waits, counts, and errors."""

from collections.abc import Callable
from typing import Any

import pytest

from rrfp.schedule.dispatcher import Dispatcher, DispatchError, Group
from rrfp.schedule.named_hints import HINTS, hint_named
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import (
    Cause,
    ComputeIdle,
    InputArrived,
    RunTask,
    StepDone,
    Stimulus,
    Wait,
    Waited,
)
from tests.decisions import an_order, arrive, ask, run_on, task, turns

# Rounds and strict priorities. Rank 1 of 3; four forwards are here, and three gradients once
# their forwards have run.


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bf", "1B0 1F3 1B1 1F4 1B2 1F5"),
        ("fb", "1F3 1B0 1F4 1B1 1F5 1B2"),
        ("b-first", "1B0 1B1 1B2 1F3 1F4 1F5"),
        ("f-first", "1F3 1F4 1F5 1B0 1B1 1B2"),
    ],
)
def test_turns_rank_the_two_directions(name: str, expected: str) -> None:
    dispatcher = turns(name, Shape(3, 8), 1)
    arrive(dispatcher, "1F0 1F1 1F2")
    assert run_on(dispatcher) == "1F0 1F1 1F2"
    arrive(dispatcher, "1F3 1F4 1F5 1B0 1B1 1B2")
    assert run_on(dispatcher) == expected


def test_bf_passes_over_a_direction_with_nothing_ready_at_once() -> None:
    dispatcher = turns("bf", Shape(3, 8), 1)
    arrive(dispatcher, "1F0 1F1")
    assert ask(dispatcher) == "1F0"
    assert ask(dispatcher) == "1F1"
    arrive(dispatcher, "1B0 1B1")
    assert ask(dispatcher) == "1B0"
    assert ask(dispatcher) == "1B1"


def test_bf_goes_on_with_f_after_b() -> None:
    dispatcher = turns("bf", Shape(3, 8), 1)
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
def test_after_a_wait_a_round_starts_at_its_top(name: str, ran_first: str, expected: str) -> None:
    dispatcher = turns(name, Shape(3, 8), 1)
    arrive(dispatcher, "1F0 1F1")
    assert run_on(dispatcher) == "1F0 1F1"
    arrive(dispatcher, ran_first)
    assert run_on(dispatcher).split()[0] == ran_first
    arrive(dispatcher, "1F3 1B1")
    assert ask(dispatcher) == expected


def test_a_direction_runs_the_smallest_microbatch_whatever_came_first() -> None:
    dispatcher = turns("b-first", Shape(3, 8), 1)
    arrive(dispatcher, "1F5 1F2 1F7")
    assert run_on(dispatcher) == "1F2 1F5 1F7"
    arrive(dispatcher, "1B7 1B5 1B2")
    assert run_on(dispatcher) == "1B2 1B5 1B7"


def test_a_backward_needs_its_local_forward_as_well() -> None:
    dispatcher = turns("b-first", Shape(3, 8), 1)
    arrive(dispatcher, "1B0")
    assert ask(dispatcher) == "warmup"
    arrive(dispatcher, "1F0")
    assert run_on(dispatcher) == "1F0 1B0"


def test_the_first_stage_admits_and_the_last_hands_over_locally() -> None:
    alone = turns("bf", Shape(1, 2), 0)
    assert run_on(alone) == "0F0 0B0 0F1 0B1"
    assert ask(alone) == "done"
    first = turns("bf", Shape(2, 2), 0)
    assert run_on(first) == "0F0 0F1"
    last = turns("bf", Shape(2, 2), 1)
    arrive(last, "1F0 1F1")
    assert run_on(last) == "1F0 1B0 1F1 1B1"
    assert ask(last) == "done"


def test_a_step_that_is_done_stays_done() -> None:
    dispatcher = turns("bf", Shape(1, 1), 0)
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
    dispatcher = Dispatcher(shape, 1, Policy(hint_named("1f1b").on(shape), dispatch=Dispatch.FIXED))
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


def test_nothing_ready_names_what_the_best_unfinished_task_lacks() -> None:
    dispatcher = turns("bf", Shape(3, 4), 1)  # 1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3
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


def test_an_idle_interval_is_accounted_when_it_ends() -> None:
    dispatcher = turns("bf", Shape(3, 4), 1)
    assert dispatcher.handle(100, ComputeIdle()) == (Wait(Cause.WARMUP),)
    assert dispatcher.handle(150, ComputeIdle()) == (Wait(Cause.WARMUP),)
    arrive(dispatcher, "1F0", now_ns=180)
    waited, run = dispatcher.handle(200, ComputeIdle())
    assert waited == Waited(Cause.WARMUP, 100, 200)
    assert isinstance(run, RunTask)


def test_an_idle_interval_is_split_when_its_cause_changes() -> None:
    dispatcher = turns("bf", Shape(3, 4), 1, limit=1)
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


# Counts.


def test_a_dispatch_states_its_place_in_the_order_and_what_it_skipped() -> None:
    shape = Shape(2, 3)
    dispatcher = Dispatcher(
        shape, 1, Policy(hint_named("1f1b").on(shape))
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


def test_without_an_order_a_dispatch_states_no_place() -> None:
    dispatcher = Dispatcher(Shape(1, 1), 0, Policy(HINTS["bf"]))
    assert dispatcher.handle(0, ComputeIdle()) == (RunTask(task("0F0"), 0, -1, 1, -1, 1, 1, 1, 0),)


# Stimuli that cannot be.


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
def test_an_input_that_nobody_lacks_is_an_error(first: list[Stimulus], then: Stimulus) -> None:
    dispatcher = turns("bf", Shape(3, 4), 1)
    for stimulus in first:
        dispatcher.handle(0, stimulus)
    with pytest.raises(DispatchError, match="which does not lack it"):
        dispatcher.handle(0, then)


def test_the_input_of_the_first_stage_never_arrives() -> None:
    with pytest.raises(DispatchError, match="which does not lack it"):
        turns("bf", Shape(3, 4), 0).handle(0, InputArrived(task("0F0")))


def test_fixed_dispatch_without_an_order_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="needs the order"):
        Dispatcher(Shape(2, 2), 0, Policy(HINTS["bf"], dispatch=Dispatch.FIXED))


def test_an_order_of_another_shape_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="order 1f1b is for"):
        Dispatcher(Shape(2, 2), 0, Policy(hint_named("1f1b").on(Shape(2, 3))))


# What a rank tells about itself when it stalls.


def best_waiting(dispatcher: Dispatcher) -> tuple[str, list[str]] | None:
    """The hint's best task that lacks an input, and what it lacks."""
    best = dispatcher.story().best_waiting
    return None if best is None else (str(best.task), [str(needed) for needed in best.lacks])


def ready(dispatcher: Dispatcher) -> list[str]:
    return [str(each) for each in dispatcher.story().ready]


def test_a_rank_tells_what_is_ready_and_what_its_best_waiting_task_lacks() -> None:
    dispatcher = turns("bf", Shape(3, 3), 1, limit=1)  # 1F0 1F1 1B0 1F2 1B1 1B2
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
    dispatcher = turns("bf", shape, 1)
    arrive(dispatcher, "1F0")
    assert best_waiting(dispatcher) == ("1B0", ["1F0"])
    assert run_on(dispatcher) == "1F0 1B0"
    assert best_waiting(dispatcher) is None


def test_who_withholds_a_task_is_told() -> None:
    held = turns("bf", Shape(2, 2, num_chunks=2), 0, hold=2)
    ask(held)
    assert ready(held) == ["0F1 is here, withheld by hold"]
    draining = turns("bf", Shape(2, 2, num_chunks=2), 0, limit=1)
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


def test_a_story_tells_the_last_stimuli_and_an_error_has_it() -> None:
    dispatcher = turns("bf", Shape(3, 4), 1)
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


def test_a_dispatcher_is_told_in_a_line() -> None:
    assert repr(turns("bf", Shape(3, 4), 1)) == (
        "<Dispatcher of pipeline rank 1: bf ready, 8 of 8 tasks left>"
    )


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda books: setattr(books, "num_here", [9] * 3), "the counts of tasks that are here"),
        (lambda books: setattr(books, "num_ready", [9] * 3), "the counts of tasks that are ready"),
        (lambda books: books.lacks.__setitem__(4, 0), "what a task lacks here"),
        (lambda books: books.ready_sets[0].heaps[0].clear(), "a task that is ready and not in"),
        (lambda books: setattr(books, "num_left", 3), "the count of tasks left"),
    ],
)
def test_books_that_contradict_themselves_are_found(
    spoil: Callable[[Any], object], what: str
) -> None:
    dispatcher = turns("bf", Shape(3, 4), 1)
    arrive(dispatcher, "1F0 1F1")
    spoil(dispatcher._books)
    with pytest.raises(DispatchError, match=f"the dispatcher's books contradict {what}"):
        arrive(dispatcher, "1F2")
