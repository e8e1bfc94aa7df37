"""Tasks, and the text form in which people read and write them.

A task is one unit of work that a stage runs without interruption. Its text form is that of
torch.distributed.pipelining: ``2F0`` is the forward of microbatch 0 on stage 2. torch's letters
distinguish a whole backward (``B``) from a split one (``I`` for the input gradient, ``W`` for the
weight gradient). Here ``B`` and ``I`` are both kind ``B``, and the pipeline's `Shape` says which
of the two it is.
"""

import re
from dataclasses import fields
from enum import StrEnum
from operator import index
from typing import Any, NamedTuple, SupportsFloat, SupportsIndex

from rrfp.errors import UsageError

# The base class of values, and conversions of numbers.


class Value:
    """The base of frozen dataclasses in compiled modules. It makes them picklable and copyable, by
    their constructors' arguments."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        value: Any = self
        names = [each.name for each in fields(value) if each.init]
        return type(self), tuple([getattr(self, name) for name in names])


def whole_number(value: SupportsIndex, name: str) -> int:
    """Convert a whole number of any library, such as numpy's or a tensor of one element, to an int;
    booleans count as 0 and 1. Raises UsageError, which calls it `name`, for anything else, such as
    a float."""
    try:
        return index(value)
    except TypeError:
        raise UsageError(f"{name} is {value!r:.50}; it must be a whole number") from None


def plain_integer(value: Any) -> object:
    """Convert a whole number of any library to an int; return anything else as it is, booleans
    included."""
    if isinstance(value, bool):  # in a conditional expression, compiled, it would be a number
        return value
    try:
        return index(value)
    except TypeError:
        return value


def plain_real(value: object) -> object:
    """Convert a number of any library to an int or a float; return anything else as it is, such as
    a boolean, a text, or an array of several numbers."""
    if isinstance(plain_integer(value), int) or not isinstance(value, SupportsFloat):
        return plain_integer(value)
    try:
        return float(value)
    except (TypeError, ValueError):  # several numbers
        return value


class Kind(StrEnum):
    """The kind of a task: the computation that it does."""

    F = "F"
    """Forward."""
    B = "B"
    """Backward: all of it, or only the input gradient when W is split off."""
    W = "W"
    """Weight gradient, if it is split off the backward."""


class Task(NamedTuple):
    """One forward, backward or weight gradient of one microbatch on one stage."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


_MAX_QUOTED = 30
"""The number of characters of a text that an error quotes."""

_TASK = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)


def parse_task(text: str) -> tuple[Task, bool]:
    """Parse ``2F0`` (stage, kind, microbatch). Also return whether the letter belongs to a split
    backward (``I``, read as kind B, or ``W``).

    Raises ValueError when the text is not a task.
    """
    match = _TASK.fullmatch(text)
    if match is None:
        quoted = text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}..."
        raise ValueError(
            f"'{quoted}' is not a task such as 2F0 (stage, one of F B I W, microbatch)"
        )
    stage, letter, microbatch = match.groups()
    kind = Kind.B if letter == "I" else Kind(letter)
    return Task(int(stage), kind, int(microbatch)), letter in "IW"


def format_task(task: Task, *, split: bool = False) -> str:
    """Format a task in torch's letters. With `split` a backward is written as I, else as B; F and W
    do not depend on it."""
    letter = "I" if split and task.kind is Kind.B else task.kind
    return f"{task.stage}{letter}{task.microbatch}"


# The reasons why a rank is idle: every idle interval has exactly one of these causes.


class Cause(StrEnum):
    """The cause of a wait."""

    WARMUP = "warmup"
    """Before the rank's first task of the step."""
    FORWARD_INPUT = "forward_input"
    """No task is ready; the hint's best unfinished task waits for an activation."""
    BACKWARD_INPUT = "backward_input"
    """No task is ready; the hint's best unfinished task waits for a gradient."""
    LIMIT = "limit"
    """A task had all inputs, but the limit on D withheld it."""
    HOLD = "hold"
    """A forward had its input, but the bound on held activations withheld it."""
    PATIENCE = "patience"
    """A task could run, but a better one was announced and will be here soon."""
    COORDINATION = "coordination"
    """A task was ready here, but the group had not agreed on it yet."""
    ORDER = "order"
    """Fixed dispatch: a task was ready, but the order put another one first."""
    TRANSFER = "transfer"
    """Issuing or waiting for a blocking send or receive (Megatron's own schedule)."""
    GRADIENT_SYNC = "gradient_sync"
    """Data-parallel reduction not hidden behind work."""
    DRAIN = "drain"
    """After the rank's last task of the step."""


# Stimuli: the inputs of a dispatcher.


class InputArrived(NamedTuple):
    """A task's input from a neighboring stage has arrived: on this rank (`member` 0), or on that
    member of the group that this rank leads."""

    task: Task
    member: int = 0


class Announced(NamedTuple):
    """Another rank has begun the task whose output this one consumes."""

    task: Task
    expected_ns: int
    """The expected arrival of the input, on the clock of `Dispatcher.handle`."""
    patience_ns: int
    """The time that this rank would wait for it beyond that."""


class ComputeIdle(NamedTuple):
    """The compute thread is free, and the dispatcher has been given everything that arrived."""


class DecideAhead(NamedTuple):
    """A task is running; decide on the next one now, if a task is ready."""


class TaskAgreed(NamedTuple):
    """The compute thread is free, and the group's leader has decided on this task."""

    task: Task


Stimulus = InputArrived | Announced | ComputeIdle | DecideAhead | TaskAgreed


# Instructions: the outputs of a dispatcher.


class RunTask(NamedTuple):
    """Run this task now. Counts are as of the decision."""

    task: Task
    chunk: int
    hint_position: int
    """The task's position in the hint's order; -1 if the dispatcher has no order."""
    ready: int
    """The number of ready tasks, this one included. A task that a bound withholds is not ready."""
    skipped: int
    """The number of unfinished tasks before it in the hint's order; -1 without an order."""
    depth: int
    """D (chunk-forwards minus chunk-backwards run), this task included."""
    held: int
    """Activations held, this task included, in slots of one chunk."""
    ready_forwards: int
    """The forwards among `ready`."""
    ready_backwards: int
    """The backwards among `ready`."""
    held_bytes: int = 0
    """The sizes of the activations held, this task included; 0 where sizes are not known."""


class Wait(NamedTuple):
    """Run nothing, and ask again when a message arrives."""

    cause: Cause
    deadline_ns: int | None = None
    """The latest time to ask again, because a task may run then. None: no task may run before a
    message arrives."""


class Waited(NamedTuple):
    """An idle interval that has ended, and its cause."""

    cause: Cause
    start_ns: int
    end_ns: int


class StepDone(NamedTuple):
    """Every task of the step has been dispatched."""


Instruction = RunTask | Wait | Waited | StepDone
