"""Whether a training bore a fault as it must: a function of what was seen of it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from rrfp.chaos.injection import Injected
from rrfp.chaos.plan import TEMPORARY_FAULTS, Fault
from rrfp.chaos.session import metric_lines
from rrfp.trace.outcome import Ending, Outcome
from rrfp.trace.run_dir import RunDir
from rrfp.train.checkpoints.directory import LOCK, CheckpointDir
from rrfp.train.checkpoints.reading import differences, read_tensors

# What a training has learned, and where two differ.


_FIGURES = ("step", "loss", "grad_norm", "heldout_loss", "tokens")
"""Those of the metrics that do not follow the time."""


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The figures of every step, the parameters and the optimizer's state after the last one."""

    figures: list[dict[str, Any]]
    tensors: dict[str, torch.Tensor]
    unfinished: tuple[str, ...]
    """Files that a writer has left half-written."""

    def difference(self, other: "TrainingResult") -> str:
        """Where this one differs from the other, to the last bit; empty if it does not."""
        if self.figures != other.figures:
            pairs = zip(self.figures, other.figures, strict=False)
            step = next((one["step"] for one, two in pairs if one != two), len(self.figures))
            return f"the training differs from the undisturbed one from step {step} on"
        names = differences(self.tensors, other.tensors)
        if names:
            return f"{len(names)} parameters differ from the undisturbed ones, as {names[0]}"
        return f"it left {self.unfinished[0]} half-written" if self.unfinished else ""


def read_result(run: RunDir, checkpoints: CheckpointDir) -> TrainingResult:
    """What a training that has ended has learned."""
    found = checkpoints.newest()
    assert found is not None
    lines = metric_lines(run)
    unfinished = [
        str(entry)
        for directory in (run.path, checkpoints.path)
        for entry in directory.iterdir()
        if entry.name.startswith(".") and entry.name != LOCK
    ]
    return TrainingResult(
        [{name: line[name] for name in _FIGURES} for line in lines],
        read_tensors(found.path),
        tuple(unfinished),
    )


GRACE_S = 20.0
"""How much longer than its silence a run may take after a fault to end, or to show that it goes
on."""
_BUGS = ("Traceback (most recent call last)", "this is a bug")


@dataclass(frozen=True, slots=True)
class Observation:
    """What was seen of a session after a fault."""

    injected: Injected
    seconds: float
    """From the fault to the end of the last process, or until later steps were finished."""
    limit_s: float
    """The most that this may be."""
    exit_code: int | None
    """The launcher's; None if it went on, or did not end."""
    went_on: bool
    """Whether later steps were finished."""
    ending: Ending | None
    """What `outcome.json` tells of a session that has ended."""
    output: str
    """That of the launcher."""
    steps_lost: int = 0
    """Finished steps that no checkpoint has."""
    left: tuple[str, ...] = ()
    """Checkpoints, processes and files that were lost or left, in words."""

    @property
    def sentence(self) -> str:
        """With which it ended."""
        return last_sentence(self.output)

    @property
    def outcome(self) -> Outcome | None:
        return None if self.ending is None else self.ending.outcome


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a training made of a fault."""

    fault: Fault
    observation: Observation
    has_survived: bool
    found_by: str
    """Empty if the run went on."""
    named_right: bool | None
    """Whether it named whose fault it was; None if there was nothing to name."""
    complaints: tuple[str, ...]
    """What was not as it must be."""
    is_same: bool | None = None
    """Whether the training came out as the undisturbed one; None while it is not over."""

    @property
    def has_passed(self) -> bool:
        return not self.complaints and self.is_same is True

    def compared(self, difference: str) -> "Verdict":
        """The same once the training is over; no `difference` means that it came out the same."""
        complaints = (*self.complaints, difference) if difference else self.complaints
        return replace(self, is_same=not difference, complaints=complaints)


def judge(fault: Fault, seen: Observation) -> Verdict:
    """What a session made of a fault."""
    has_survived = seen.went_on or (seen.exit_code == 0 and seen.outcome is Outcome.FINISHED)
    named_right = None if has_survived else _is_named_right(fault, seen)
    found_by = "" if has_survived else _found_by(fault, seen)
    complaints = tuple(_complaints(fault, seen, has_survived, named_right))
    return Verdict(fault, seen, has_survived, found_by, named_right, complaints)


def _complaints(
    fault: Fault, seen: Observation, has_survived: bool, named_right: bool | None
) -> Iterator[str]:
    if not has_survived and seen.exit_code is None:
        yield f"it neither ended nor went on in {seen.seconds:.0f} s"
    elif seen.seconds > seen.limit_s:
        yield f"it took {seen.seconds:.0f} s, above the limit of {seen.limit_s:.0f} s"
    if not has_survived and fault.kind in TEMPORARY_FAULTS:
        yield f"it should have survived: {seen.sentence}"
    if named_right is False:
        yield f"it did not name {seen.injected.victim}: {seen.sentence}"
    if not has_survived and seen.exit_code not in _right_exit_codes(fault, seen):
        yield f"it ended with exit code {seen.exit_code}"
    if any(bug in seen.output for bug in _BUGS):
        yield f"it met a bug: {seen.sentence}"
    yield from seen.left


def _right_exit_codes(fault: Fault, seen: Observation) -> tuple[int | None, ...]:
    if _is_launcher_killed(fault, seen):
        return (seen.exit_code,)
    return (0,) if _ended_on_request(fault, seen) else (1, None)


def _is_launcher_killed(fault: Fault, seen: Observation) -> bool:
    """Whether nobody was left to say anything."""
    of_launcher = seen.injected.rank is None and bool(fault.signal)
    return of_launcher and seen.exit_code is not None and seen.exit_code < 0


def _ended_on_request(fault: Fault, seen: Observation) -> bool:
    """Whether the run ended well because a signal asked it to."""
    return fault.signal == "SIGTERM" and seen.exit_code == 0


def _is_named_right(fault: Fault, seen: Observation) -> bool | None:
    injected = seen.injected
    culprit = None if seen.ending is None else seen.ending.culprit
    if _ended_on_request(fault, seen) or _is_launcher_killed(fault, seen):
        return None
    if injected.path is not None:
        return _names_disk(injected, seen.sentence)
    if injected.link is not None:
        named = None if culprit is None else culprit.link
        return named is not None and {*named} == {*injected.link}
    return culprit is not None and culprit.rank == injected.rank


def judge_late_end(verdicts: list[Verdict], sentence: str) -> None:
    """Add to the last verdict of a session that had gone on after its faults, and then failed."""
    # The last checkpoint may be due before a full disk has room again.
    if not any(_names_disk(verdict.observation.injected, sentence) for verdict in verdicts):
        late = f"it ended later: {sentence}"
        verdicts[-1] = replace(verdicts[-1], complaints=(*verdicts[-1].complaints, late))


def _names_disk(injected: Injected, sentence: str) -> bool:
    """Whether an error names the disk that was filled. Every failure names the log, too."""
    path = injected.path
    return path is not None and path in sentence.replace(f"{path}/run/logs", "")


def _found_by(fault: Fault, seen: Observation) -> str:
    if _ended_on_request(fault, seen):
        return "request"
    if _is_launcher_killed(fault, seen):
        return "its ranks"
    culprit = None if seen.ending is None else seen.ending.culprit
    if culprit is not None:
        return str(culprit.found_by)
    # Of a full disk nobody can take note on it.
    return "output" if seen.injected.path is not None else "nobody"


def last_sentence(output: str) -> str:
    """The error with which a launcher ended, or else its last line."""
    lines = [line for line in output.splitlines() if line]
    errors = [line for line in lines if line.startswith("rrfp: ")]
    return next(reversed(errors or lines), "nothing")
