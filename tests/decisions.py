"""Single decisions, written as text: what arrives, and what the rank answers."""

from collections.abc import Iterable, Sequence
from fractions import Fraction

from rrfp.replay.measured import decisions
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.order import Order
from rrfp.schedule.policy import Policy
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import (
    Cause,
    ComputeIdle,
    DecideAhead,
    InputArrived,
    Instruction,
    RunTask,
    StepDone,
    Task,
    Wait,
    parse_task,
)
from rrfp.trace.records import StimulusRecord


def task(text: str) -> Task:
    return parse_task(text)[0]


def an_order(shape: Shape, *rows: str) -> Order:
    return Order("mine", shape, tuple(tuple(task(cell) for cell in row.split()) for row in rows))


def turns(
    name: str, shape: Shape, rank: int, *, limit: int | None = None, hold: int | None = None
) -> Dispatcher:
    """A dispatcher under a named hint; `hold` in slots of one chunk and one microbatch."""
    hint = HINTS[name]
    order = order_of(hint, shape)
    order = order if order.shape == shape else order.forwards()
    slots = None if hold is None else Fraction(hold, shape.num_chunks)
    return Dispatcher(shape, rank, Policy(hint, order, limit=limit, hold=slots), validate=True)


def arrive(dispatcher: Dispatcher, texts: str, *, now_ns: int = 0, member: int = 0) -> None:
    for text in texts.split():
        assert dispatcher.handle(now_ns, InputArrived(task(text), member)) == ()


def ask(dispatcher: Dispatcher, now_ns: int = 0) -> str:
    """What the rank does now: a task, the cause of its wait, or `done`."""
    return _answer(dispatcher.handle(now_ns, ComputeIdle()))


def ask_ahead(dispatcher: Dispatcher) -> str:
    """What the rank does once the running task has ended, `nothing` when that is still open."""
    instructions = dispatcher.handle(0, DecideAhead())
    return _answer(instructions) if instructions else "nothing"


def run_on(dispatcher: Dispatcher) -> str:
    """The tasks that the rank runs until it waits or is done."""
    ran = []
    while (answer := ask(dispatcher)) not in [*Cause, "done"]:
        ran.append(answer)
    return " ".join(ran)


def _answer(instructions: Sequence[Instruction]) -> str:
    match instructions[-1]:
        case RunTask() as run:
            return str(run.task)
        case Wait(cause):
            return cause
        case StepDone():
            return "done"
        case other:
            raise AssertionError(other)


def replayed(stimuli: Iterable[StimulusRecord], dispatcher: Dispatcher) -> list[Task]:
    """The tasks that a fresh dispatcher runs when it takes in one step's stimuli again."""
    return [task for _, task in decisions(stimuli, dispatcher) if task is not None]
