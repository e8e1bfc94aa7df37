"""The plan of a campaign: faults with their targets and moments, determined by the seed alone.

A campaign runs several trainings and injects a few faults into each, one after the other. The
moment of a fault is a stage of the training plus a fraction of that stage's time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from random import Random

PER_TRAINING = 5
"""Number of faults per training."""


class FaultKind(StrEnum):
    """Kind of fault."""

    KILL = "kill"
    """A process gets a signal that ends it."""
    STOP = "stop"
    """A rank is stopped permanently (SIGSTOP)."""
    CONT = "cont"
    """A process is stopped and continued (SIGCONT) after some seconds."""
    DROP = "drop"
    """A connection between two ranks is closed."""
    DELAY = "delay"
    """A connection between two ranks carries nothing for some seconds."""
    CORRUPT = "corrupt"
    """A bit in the header of a frame between two ranks is flipped."""
    DISK = "disk"
    """The file system of the run and its checkpoints is full for some seconds."""


LINK_FAULTS = frozenset({FaultKind.DROP, FaultKind.DELAY, FaultKind.CORRUPT})
"""Faults of rrfp's own links, which Megatron's own schedule does not use."""
TEMPORARY_FAULTS = LINK_FAULTS | {FaultKind.CONT}
"""Faults that end by themselves and that a training must survive."""
_ENDING_FAULTS = frozenset({FaultKind.KILL, FaultKind.STOP})
_PROCESS_FAULTS = _ENDING_FAULTS | {FaultKind.CONT}
_FAULTS_WITH_DURATION = frozenset({FaultKind.CONT, FaultKind.DELAY, FaultKind.DISK})


class Stage(StrEnum):
    """Stage of a training session at which a fault is injected."""

    START = "start"
    """Before its first step is finished."""
    STEP = "step"
    """During a step: its tasks, optimizer or evaluation."""
    SAVE = "save"
    """While a checkpoint is written."""
    CLOSE = "close"
    """After the last step."""


ENDING_SIGNALS = ("SIGKILL", "SIGSEGV", "SIGTERM")
"""Signals of `FaultKind.KILL`. A run that saves treats SIGTERM as a request to save and end."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned fault."""

    number: int
    """Number within the campaign, from 1."""
    kind: FaultKind
    stage: Stage
    after_step: int
    """Number of training steps finished before it."""
    share: float
    """Moment within the stage, from 0 to 1."""
    rank: int | None = None
    """Rank whose process gets the signal; None for the launcher, and for other kinds of fault."""
    signal: str = ""
    """Name of the signal of a kill."""
    link: int = 0
    """Index of the disturbed link, modulo the number of links."""
    draw: int = 0
    """Random number that selects the bit to flip."""
    hold_s: float = 0.0
    """Duration in seconds of a fault that ends by itself."""


@dataclass(frozen=True, slots=True)
class DisturbedTraining:
    """Size of the trainings of a campaign, and the faults that they allow."""

    num_ranks: int
    num_steps: int
    save_every: int
    kinds: Sequence[FaultKind] = tuple(FaultKind)
    """The kinds of fault that can be injected here."""
    most_hold_s: float = 3.0
    """Longest duration of a temporary fault."""


def plan_faults(seed: int, num_faults: int, training: DisturbedTraining) -> list[list[Fault]]:
    """Plan the faults of each training, in order, from the seed.

    All kinds are about equally frequent. A training gets at most five faults, and at most one a
    step.
    """
    draw = Random(seed)
    kinds = _shuffled_kinds(training.kinds, num_faults, draw)
    per_training = min(PER_TRAINING, training.num_steps)
    return [
        _faults_of(number, kinds[number : number + per_training], training, draw)
        for number in range(0, num_faults, per_training)
    ]


def _shuffled_kinds(kinds: Sequence[FaultKind], num_faults: int, draw: Random) -> list[FaultKind]:
    """Return `num_faults` kinds, made of random permutations of all kinds."""
    shuffled: list[FaultKind] = []
    while len(shuffled) < num_faults:
        shuffled += draw.sample(kinds, len(kinds))
    return shuffled[:num_faults]


def _faults_of(
    number: int, kinds: Sequence[FaultKind], training: DisturbedTraining, draw: Random
) -> list[Fault]:
    """Draw the faults of one training, numbered from `number` + 1.

    Each has its own part of the steps, so that a fault that ends a session does so before the
    moment of the next fault.
    """
    edges = [training.num_steps * index // len(kinds) for index in range(len(kinds) + 1)]
    parts = [range(first, after) for first, after in pairwise(edges)]
    faults: list[Fault] = []
    for index, (kind, part) in enumerate(zip(kinds, parts, strict=True)):
        is_at_start = index == 0 or kinds[index - 1] in _ENDING_FAULTS
        stages = [*_stages(kind, part, training, is_at_start, index == len(kinds) - 1)]
        stage = draw.choice(stages)
        faults.append(_fault(number + index + 1, kind, stage, part, training, draw))
    return faults


def _stages(
    kind: FaultKind, part: range, training: DisturbedTraining, is_at_start: bool, is_last: bool
) -> Iterator[Stage]:
    """Yield the stages at which a fault of this kind may come in its part of the steps.

    STEP always; SAVE if the part has a save; for processes, START `is_at_start` of a session, and
    CLOSE for the last fault of a training.
    """
    yield Stage.STEP
    if _saves(part, training):
        yield Stage.SAVE
    if kind in _PROCESS_FAULTS:
        if is_at_start:
            yield Stage.START
        if is_last:
            yield Stage.CLOSE


def _saves(part: range, training: DisturbedTraining) -> list[int]:
    """The steps after which a checkpoint is written, except the last, which belongs to `CLOSE`."""
    return [step for step in part if step and step % training.save_every == 0]


def _fault(
    number: int,
    kind: FaultKind,
    stage: Stage,
    part: range,
    training: DisturbedTraining,
    draw: Random,
) -> Fault:
    """Draw step, moment, target, signal and duration of a fault of this kind and stage.

    Only kills and CONT faults may hit the launcher. Fields of other kinds get their defaults.
    """
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
    # No process watches the launcher, so a permanent stop of it would go undetected.
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
