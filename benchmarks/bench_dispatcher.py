"""The dispatcher with 256 ready forwards: its whole work for one task, and the decision alone.

A middle rank in its steady state: forwards and gradients arrive in turn, and each arrival is
answered by one dispatch, so that 256 forwards stay ready. Times are of one task.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from rrfp.schedule.dispatcher import Dispatcher, Group
from rrfp.schedule.hints import kinds_of
from rrfp.schedule.named_hints import HINTS, ORDERS, hint_named
from rrfp.schedule.policy import Policy
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import ComputeIdle, InputArrived, Kind, Task

NUM_READY = 256
NUM_TASKS = 4000
SHAPE = Shape(num_ranks=4, num_microbatches=NUM_READY + NUM_TASKS)
RANK = 1
IDLE = ComputeIdle()
NAMES = [name for name in HINTS if name not in ORDERS or ORDERS[name].fits(SHAPE)]


def forward_input(microbatch: int) -> InputArrived:
    return InputArrived(Task(RANK, Kind.F, microbatch))


def backward_input(microbatch: int) -> InputArrived:
    return InputArrived(Task(RANK, Kind.B, microbatch))


def loaded_dispatcher(name: str, group: Group | None = None) -> Dispatcher:
    """A dispatcher under that hint, its order given, with 256 forwards ready."""
    hint = hint_named(name).for_shape(SHAPE)
    shape = replace(SHAPE, kinds=kinds_of(hint))
    dispatcher = Dispatcher(shape, RANK, Policy(hint, order=order_of(hint, shape)), group=group)
    for microbatch in range(NUM_READY):
        for member in range(1 if group is None else group.num_members):
            dispatcher.handle(0, forward_input(microbatch)._replace(member=member))
    return dispatcher


def arrivals() -> Iterator[InputArrived]:
    for microbatch in range(NUM_TASKS // 2):
        yield forward_input(NUM_READY + microbatch)
        yield backward_input(microbatch)


def measure(
    benchmark: BenchmarkFixture,
    dispatcher: Dispatcher,
    function: Callable[[Sequence[InputArrived]], None],
    prepare: Callable[[], Sequence[InputArrived]],
) -> None:
    """Time `function` on what `prepare` gives, once a task."""
    # pytest-benchmark annotates only a part of itself.
    benchmark.pedantic(  # type: ignore[no-untyped-call]
        function, setup=lambda: ((prepare(),), {}), rounds=NUM_TASKS
    )
    num_tasks = dispatcher.shape.num_tasks_of_a_rank
    assert len(dispatcher.unfinished()) == num_tasks - NUM_TASKS


@pytest.mark.parametrize("name", NAMES)
def test_whole_work_for_one_task(benchmark: BenchmarkFixture, name: str) -> None:
    dispatcher = loaded_dispatcher(name)
    stimuli = arrivals()

    def one_task(arrived: Sequence[InputArrived]) -> None:
        for arrival in arrived:
            dispatcher.handle(0, arrival)
        dispatcher.handle(0, IDLE)

    measure(benchmark, dispatcher, one_task, lambda: [next(stimuli)])


@pytest.mark.parametrize("name", NAMES)
def test_decision_alone(benchmark: BenchmarkFixture, name: str) -> None:
    dispatcher = loaded_dispatcher(name)
    stimuli = arrivals()

    def take_in() -> Sequence[InputArrived]:
        dispatcher.handle(0, next(stimuli))
        return ()

    def decide(_arrived: Sequence[InputArrived]) -> None:
        dispatcher.handle(0, IDLE)

    measure(benchmark, dispatcher, decide, take_in)


def test_whole_work_of_a_leader_of_4(benchmark: BenchmarkFixture) -> None:
    dispatcher = loaded_dispatcher("bf", Group(4, leads=True))
    stimuli = arrivals()

    def one_task(reports: Sequence[InputArrived]) -> None:
        for report in reports:
            dispatcher.handle(0, report)
        dispatcher.handle(0, IDLE)

    def reports_of_all() -> Sequence[InputArrived]:
        arrival = next(stimuli)
        return [arrival._replace(member=member) for member in range(4)]

    measure(benchmark, dispatcher, one_task, reports_of_all)
