"""Tasks, and the text form in which people read and write them.

A task is one unit of work that a stage runs without interruption. Its text form is that of
torch.distributed.pipelining: ``2F0`` is the forward of microbatch 0 on stage 2. torch's letters
distinguish a whole backward (``B``) from a split one (``I`` for the input gradient, ``W`` for the
weight gradient). Here ``B`` and ``I`` are both kind ``B``, and the pipeline's `Shape` says which
of the two it is.
"""

import re
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What a task computes."""

    F = "F"
    """Forward."""
    B = "B"
    """Backward: all of it, or only the input gradient when W is split off."""
    W = "W"
    """Weight gradient, where it is split off the backward."""


class Task(NamedTuple):
    """One forward, backward or weight gradient of one microbatch on one stage."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


_MAX_QUOTED = 30
"""How many characters of a text an error quotes."""

_TASK = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)


def parse_task(text: str) -> tuple[Task, bool]:
    """Read ``2F0``; also return whether the letter belongs to a split backward (``I`` or ``W``).

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
    """Write a task in torch's letters; `split` means that backwards leave W to another task."""
    letter = "I" if split and task.kind is Kind.B else task.kind
    return f"{task.stage}{letter}{task.microbatch}"
