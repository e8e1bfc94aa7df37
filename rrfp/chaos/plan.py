"""Which faults a campaign injects, of whom and when: a function of its seed alone.

A campaign disturbs training after training, each with a few faults, one after the other. A fault
comes at a stage of the training, and by a share of that stage's time into it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from random import Random

PER_TRAINING = 5
"""Faults that one training has to come through."""


class FaultKind(StrEnum):
    """What can be done to a training."""

    KILL = "kill"
    """A process gets a signal that ends it."""
    STOP = "stop"
    """A rank is stopped (SIGSTOP), for good."""
    CONT = "cont"
    """A process is stopped, and goes on (SIGCONT) after some seconds."""
    DROP = "drop"
    """A connection between two ranks is closed under them."""
    DELAY = "delay"
    """A connection between two ranks carries nothing for some seconds."""
    CORRUPT = "corrupt"
    """A bit in the header of a frame between two ranks is flipped."""
    DISK = "disk"
    """The file system of the run and its checkpoints is full for some seconds."""


LINK_FAULTS = frozenset({FaultKind.DROP, FaultKind.DELAY, FaultKind.CORRUPT})
"""Faults of our links, which Megatron's own schedule does not use."""
TEMPORARY_FAULTS = LINK_FAULTS | {FaultKind.CONT}
"""Faults that are over by themselves, and that a training must survive."""
_ENDING_FAULTS = frozenset({FaultKind.KILL, FaultKind.STOP})
_PROCESS_FAULTS = _ENDING_FAULTS | {FaultKind.CONT}
_FAULTS_WITH_DURATION = frozenset({FaultKind.CONT, FaultKind.DELAY, FaultKind.DISK})


class Stage(StrEnum):
    """When in a session of training a fault comes."""

    START = "start"
    """Before its first step is finished."""
    STEP = "step"
    """While a step is under way: its tasks, its optimizer, its evaluation."""
    SAVE = "save"
    """While a checkpoint is written."""
    CLOSE = "close"
    """After the last step."""


ENDING_SIGNALS = ("SIGKILL", "SIGSEGV", "SIGTERM")
"""What a kill sends. A run that saves takes SIGTERM as a request to save and end."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, as planned."""

    number: int
    """From 1 on, over the campaign."""
    kind: FaultKind
    stage: Stage
    after_step: int
    """How many steps of the training are finished by then."""
    share: float
    """How far into the stage, of 1."""
    rank: int | None = None
    """Whose process; None: the launcher's, or the fault is none of processes."""
    signal: str = ""
    """What a kill sends."""
    link: int = 0
    """Which link, counted round all that there are."""
    draw: int = 0
    """Which bit is flipped."""
    hold_s: float = 0.0
    """How long it lasts, if it passes."""


@dataclass(frozen=True, slots=True)
class DisturbedTraining:
    """What the trainings of a campaign look like."""

    num_ranks: int
    num_steps: int
    save_every: int
    kinds: Sequence[FaultKind] = tuple(FaultKind)
    """Those that can be injected here."""
    most_hold_s: float = 3.0
    """How long what passes may last."""


def plan_faults(seed: int, num_faults: int, training: DisturbedTraining) -> list[list[Fault]]:
    """The faults of each training, in their order. All kinds are about equally frequent."""
    draw = Random(seed)
    kinds = _shuffled_kinds(training.kinds, num_faults, draw)
    per_training = min(PER_TRAINING, training.num_steps)
    return [
        _faults_of(number, kinds[number : number + per_training], training, draw)
        for number in range(0, num_faults, per_training)
    ]


def _shuffled_kinds(kinds: Sequence[FaultKind], num_faults: int, draw: Random) -> list[FaultKind]:
    """As from a deck that is shuffled anew each time that it is used up."""
    dealt: list[FaultKind] = []
    while len(dealt) < num_faults:
        dealt += draw.sample(kinds, len(kinds))
    return dealt[:num_faults]


def _faults_of(
    number: int, kinds: Sequence[FaultKind], training: DisturbedTraining, draw: Random
) -> list[Fault]:
    """The faults of one training. Each has a part of the steps to itself, so that whatever ends a
    session does so before the next one's moment."""
    parts = _parts(training.num_steps, len(kinds))
    faults: list[Fault] = []
    for index, (kind, part) in enumerate(zip(kinds, parts, strict=True)):
        is_at_start = index == 0 or kinds[index - 1] in _ENDING_FAULTS
        stages = [*_stages(kind, part, training, is_at_start, index == len(kinds) - 1)]
        stage = draw.choice(stages)
        faults.append(_fault(number + index + 1, kind, stage, part, training, draw))
    return faults


def _parts(num_steps: int, num_parts: int) -> list[range]:
    edges = [num_steps * index // num_parts for index in range(num_parts + 1)]
    return [range(first, after) for first, after in pairwise(edges)]


def _stages(
    kind: FaultKind, part: range, training: DisturbedTraining, is_at_start: bool, is_last: bool
) -> Iterator[Stage]:
    yield Stage.STEP
    if _saves(part, training):
        yield Stage.SAVE
    if kind in _PROCESS_FAULTS:
        if is_at_start:
            yield Stage.START
        if is_last:
            yield Stage.CLOSE


def _saves(part: range, training: DisturbedTraining) -> list[int]:
    """The steps after which a checkpoint is written; the one after the last step is `CLOSE`'s."""
    return [step for step in part if step and step % training.save_every == 0]


def _fault(
    number: int,
    kind: FaultKind,
    stage: Stage,
    part: range,
    training: DisturbedTraining,
    draw: Random,
) -> Fault:
    match stage:
        case Stage.START:
            after_step = part[0]
        case Stage.STEP:
            after_step = draw.choice(part)
        case Stage.SAVE:
            after_step = draw.choice(_saves(part, training))
        case Stage.CLOSE:
            after_step = training.num_steps
    rank: int | None = draw.randrange(training.num_ranks)
    # Nobody watches over the launcher: one that is stopped for good is not found.
    if kind in (FaultKind.KILL, FaultKind.CONT) and draw.randrange(training.num_ranks + 1) == 0:
        rank = None
    return Fault(
        number,
        kind,
        stage,
        after_step,
        share=draw.random(),
        rank=rank if kind in _PROCESS_FAULTS else None,
        signal=draw.choice(ENDING_SIGNALS) if kind is FaultKind.KILL else "",
        link=draw.randrange(2**16) if kind in LINK_FAULTS else 0,
        draw=draw.randrange(2**16) if kind is FaultKind.CORRUPT else 0,
        hold_s=draw.uniform(0.5, training.most_hold_s) if kind in _FAULTS_WITH_DURATION else 0.0,
    )
