"""Tasks, and the text form in which people read and write them.

A task is one unit of work that a stage runs without interruption. Its text form is that of
torch.distributed.pipelining: ``2F0`` is the forward of microbatch 0 on stage 2. torch's letters
tell a whole backward (``B``) from one whose weight gradient is split off (``I`` for the input
gradient, ``W`` for the weight gradient); here both are kind ``B``, and the pipeline's `Shape`
says which of the two it is.
"""

import re
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What a task computes."""

    F = "F"
    """Forward."""
    B = "B"
    """Backward: the whole of it, or the input gradient only when W is split off."""
    W = "W"
    """Weight gradient, when it is split off the backward."""


class Task(NamedTuple):
    """One forward, backward or weight gradient of one microbatch on one stage."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


_LONGEST_TOLD = 30
"""Letters of a text that is no task, in the error that says so."""

_TASK = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)


def parse_task(text: str) -> tuple[Task, bool]:
    """Read ``2F0``; also tell whether the letter belongs to a split backward (``I`` or ``W``).

    Raises ValueError when the text is not a task.
    """
    match = _TASK.fullmatch(text)
    if match is None:
        told = text if len(text) <= _LONGEST_TOLD else f"{text[:_LONGEST_TOLD]}..."
        raise ValueError(f"'{told}' is not a task such as 2F0 (stage, one of F B I W, microbatch)")
    stage, letter, microbatch = match.groups()
    kind = Kind.B if letter == "I" else Kind(letter)
    return Task(int(stage), kind, int(microbatch)), letter in "IW"


def format_task(task: Task, *, split: bool = False) -> str:
    """Write a task in torch's letters; `split` says that its backward leaves W to another task."""
    letter = "I" if split and task.kind is Kind.B else task.kind
    return f"{task.stage}{letter}{task.microbatch}"
