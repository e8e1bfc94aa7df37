"""Verdicts: whether a training detected, attributed and survived a fault as required."""

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

_FIGURES = ("step", "loss", "grad_norm", "heldout_loss", "tokens")
"""The metrics that do not depend on timing."""


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The result of a training: its metrics, and its parameters and optimizer state at the end."""

    figures: list[dict[str, Any]]
    tensors: dict[str, torch.Tensor]
    unfinished: tuple[str, ...]
    """Files that are still incomplete."""

    def difference(self, other: "TrainingResult") -> str:
        """Return a sentence about the first difference from another result; empty without any.

        Compares metrics, then tensors, bit by bit. A file that this training left half-written is
        the last difference.
        """
        if self.figures != other.figures:
            pairs = zip(self.figures, other.figures, strict=False)
            step = next((one["step"] for one, two in pairs if one != two), len(self.figures))
            return f"the training differs from the undisturbed one from step {step} on"
        names = differences(self.tensors, other.tensors)
        if names:
            return f"{len(names)} parameters differ from the undisturbed ones, as {names[0]}"
        return f"it left {self.unfinished[0]} half-written" if self.unfinished else ""


def read_result(run: RunDir, checkpoints: CheckpointDir) -> TrainingResult:
    """Read metrics, newest checkpoint and half-written files of a training that has ended."""
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
"""Time beyond `--silence` within which a run must end after a fault, or show that it goes on."""
_BUGS = ("Traceback (most recent call last)", "this is a bug")


@dataclass(frozen=True, slots=True)
class Observation:
    """A session as observed after a fault."""

    injected: Injected
    seconds: float
    """Time from the fault to the end of the last process, or until later steps were finished."""
    limit_s: float
    """Upper limit for `seconds`."""
    exit_code: int | None
    """Exit code of the launcher; None if it went on, or did not end."""
    went_on: bool
    """True if later steps were finished."""
    ending: Ending | None
    """Content of `outcome.json` of a session that has ended."""
    output: str
    """Text that the launcher printed."""
    steps_lost: int = 0
    """Number of finished steps that no checkpoint has."""
    left: tuple[str, ...] = ()
    """Complaints about lost checkpoints and about processes and files left behind."""

    @property
    def sentence(self) -> str:
        """Last error that the launcher printed, or else its last line."""
        return last_sentence(self.output)

    @property
    def outcome(self) -> Outcome | None:
        return None if self.ending is None else self.ending.outcome


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a training's reaction to one fault."""

    fault: Fault
    observation: Observation
    has_survived: bool
    found_by: str
    """The detector of the fault; empty if the run went on."""
    named_right: bool | None
    """True if the run named the right rank, link or disk; None if it had nothing to name."""
    complaints: tuple[str, ...]
    """Violated requirements, one sentence each."""
    is_same: bool | None = None
    """True if the result equals that of the undisturbed training; None until the end."""

    @property
    def has_passed(self) -> bool:
        """True if no requirement is violated and the result equals the undisturbed one."""
        return not self.complaints and self.is_same is True

    def compared(self, difference: str) -> "Verdict":
        """Return the verdict with `is_same` set; a nonempty `difference` is one more complaint."""
        complaints = (*self.complaints, difference) if difference else self.complaints
        return replace(self, is_same=not difference, complaints=complaints)


def judge(fault: Fault, seen: Observation) -> Verdict:
    """Judge a session's reaction to a fault, without comparing its result.

    It survived if it went on, or finished with exit code 0; only otherwise is it judged how the
    fault was found and named.
    """
    has_survived = seen.went_on or (seen.exit_code == 0 and seen.outcome is Outcome.FINISHED)
    named_right = None if has_survived else _is_named_right(fault, seen)
    found_by = "" if has_survived else _found_by(fault, seen)
    complaints = tuple(_complaints(fault, seen, has_survived, named_right))
    return Verdict(fault, seen, has_survived, found_by, named_right, complaints)


def _complaints(
    fault: Fault, seen: Observation, has_survived: bool, named_right: bool | None
) -> Iterator[str]:
    """Yield a sentence for each violated requirement.

    These are an end in time, survival of temporary faults, the named target, the exit code, no
    traceback, and nothing lost or left behind.
    """
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
    """Return the exit codes allowed for a failed session: 1, or None if it was ended from here.

    A killed launcher may have its own, and a run that SIGTERM ended properly has 0.
    """
    if _is_launcher_killed(fault, seen):
        return (seen.exit_code,)
    return (0,) if _ended_on_request(fault, seen) else (1, None)


def _is_launcher_killed(fault: Fault, seen: Observation) -> bool:
    """Return whether the launcher itself was killed, so that nothing could report the fault."""
    of_launcher = seen.injected.rank is None and bool(fault.signal)
    return of_launcher and seen.exit_code is not None and seen.exit_code < 0


def _ended_on_request(fault: Fault, seen: Observation) -> bool:
    """Return whether the run ended properly because SIGTERM requested it."""
    return fault.signal == "SIGTERM" and seen.exit_code == 0


def _is_named_right(fault: Fault, seen: Observation) -> bool | None:
    """Return whether a failed run named the fault's disk, link (in either direction) or rank.

    None if SIGTERM ended it properly or the launcher was killed, so that it had nothing to name.
    """
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
    """Add a complaint to the last verdict of a session that survived its faults and failed later.

    Changes `verdicts`. An error that names a disk that was filled adds none.
    """
    # A failed save is accepted if the disk was full when the last checkpoint was due.
    if not any(_names_disk(verdict.observation.injected, sentence) for verdict in verdicts):
        late = f"it ended later: {sentence}"
        verdicts[-1] = replace(verdicts[-1], complaints=(*verdicts[-1].complaints, late))


def _names_disk(injected: Injected, sentence: str) -> bool:
    """Return whether an error contains the path of the filled disk. Paths of logs, which all errors
    contain, do not count."""
    path = injected.path
    return path is not None and path in sentence.replace(f"{path}/run/logs", "")


def _found_by(fault: Fault, seen: Observation) -> str:
    """Name what detected the fault of a run that ended.

    The recorded culprit's detector, `request` for SIGTERM, `its ranks` for a killed launcher,
    `output` for an unrecorded full disk, or `nobody`.
    """
    if _ended_on_request(fault, seen):
        return "request"
    if _is_launcher_killed(fault, seen):
        return "its ranks"
    culprit = None if seen.ending is None else seen.ending.culprit
    if culprit is not None:
        return str(culprit.found_by)
    # A full disk has no room for an outcome, so only the output can name it.
    return "output" if seen.injected.path is not None else "nobody"


def last_sentence(output: str) -> str:
    """Return the last line of an output that begins with `rrfp: `, or its last line, or
    `nothing`."""
    lines = [line for line in output.splitlines() if line]
    errors = [line for line in lines if line.startswith("rrfp: ")]
    return next(reversed(errors or lines), "nothing")
