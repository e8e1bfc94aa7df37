"""A campaign: one undisturbed training, then the same training repeatedly under faults.

A session that a fault ends is resumed, and the next fault is injected into the new session. After
its last fault a training goes on to its end. Its result must equal that of the undisturbed one.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rrfp.chaos.disk import Disk
from rrfp.chaos.injection import Injected, Pace, inject, wait_for_moment
from rrfp.chaos.plan import Fault, FaultKind, Stage
from rrfp.chaos.session import TrainingSession, newest_step
from rrfp.chaos.verdict import (
    GRACE_S,
    Observation,
    TrainingResult,
    Verdict,
    judge,
    judge_late_end,
    last_sentence,
    read_result,
)
from rrfp.errors import RrfpError, UsageError
from rrfp.trace.run_dir import RunDir
from rrfp.train.checkpoints.directory import CheckpointDir
from rrfp.train.settings import TrainSettings

_LOOK_S = 0.05
_UNDISTURBED_S = 3600.0
"""Longest time of an undisturbed training."""
_MORE_STEPS = 2
"""Number of later steps that show that a run goes on; one step may have been almost finished."""
_MOST_TRIES = 5
"""Number of times a fault may be injected too late before the campaign fails."""
_ENDING = frozenset({FaultKind.KILL, FaultKind.STOP})


class Campaign:
    """Trains once undisturbed, then repeatedly under faults, and compares the results.

    The path of its directory must be short because sockets are made in it.
    """

    def __init__(
        self,
        settings: TrainSettings,
        directory: Path,
        disk: Disk,
        keep: Path | None,
        report: Callable[[Verdict], None],
    ) -> None:
        """Disturbed trainings write to `disk`. Trainings with a failed fault are copied to `keep`.
        `report` receives each verdict as soon as it is known, before the training has ended."""
        self._settings = settings
        self._directory = directory
        self._disk = disk
        self._temporary = directory / "t"
        self._temporary.mkdir(mode=0o700)
        self._keep = keep
        self._report = report
        self._sessions: list[Path] = []
        """The directories of the current training's sessions."""
        self._reference: TrainingResult
        self._pace: Pace

    def train_undisturbed(self) -> None:
        """Run the reference training to its end, and store its pace and result.

        Raises UsageError with the message of `rrfp train` if that refuses the settings, and
        RrfpError if it fails.
        """
        settings = self._settings_in(self._directory / "undisturbed")
        session = self._session(settings)
        try:
            self._pace = _pace_of(session, settings.num_steps)
        finally:
            session.end()
        if session.exit_code != 0:
            error = UsageError if session.exit_code == UsageError.exit_code else RrfpError
            raise error(last_sentence(session.output()).removeprefix("rrfp: "))
        self._reference = read_result(session.run, session.checkpoints)

    def disturb(self, trainings: Sequence[Sequence[Fault]]) -> Iterator[list[Verdict]]:
        """Run each training under its faults and yield the list of its verdicts.

        Faults that came too late are injected again, earlier, in a later training of their own.
        Raises RrfpError when a fault comes too late for the fifth time, and as `_train` does.
        """
        waiting = [*trainings]
        tries: dict[int, int] = {}
        while waiting:
            verdicts, missed = self._train(waiting.pop(0))
            yield verdicts
            for fault in missed:
                tries[fault.number] = tries.get(fault.number, 0) + 1
                if tries[fault.number] == _MOST_TRIES:
                    raise RrfpError(
                        f"fault {fault.number} ({fault.kind}) came too late {_MOST_TRIES} times; "
                        "give the training more --steps"
                    )
            if missed:
                waiting.append([_earlier(fault) for fault in missed])

    def _train(self, faults: Sequence[Fault]) -> tuple[list[Verdict], list[Fault]]:
        """Run one training with these faults, resuming ended sessions; compare with the reference.

        Deletes the previous training first, and copies this one to `keep` if a verdict failed.
        Returns the verdicts, and the faults that were not injected. Raises RrfpError if a session
        fails before any fault.
        """
        for directory in (self._temporary, *self._sessions, *self._disk.path.iterdir()):
            shutil.rmtree(directory)
        self._sessions.clear()
        self._temporary.mkdir(mode=0o700)
        settings = self._settings_in(self._disk.path)
        checkpoints = CheckpointDir(self._disk.path / "ck")
        verdicts: list[Verdict] = []
        pending, difference = [*faults], ""
        while not difference:
            session = self._session(settings)
            try:
                judged = self._inject_all(session, pending)
                exit_code = session.exit_code
            finally:
                session.end()
            del pending[: len(judged)]
            verdicts += judged
            if exit_code == 0 and newest_step(checkpoints) == settings.num_steps:
                break
            if not judged:
                error = last_sentence(session.output())
                difference = f"a session failed although nothing disturbed it: {error}"
                if not verdicts:
                    raise RrfpError(difference)
        if not difference:
            found = read_result(RunDir(self._disk.path / "run"), checkpoints)
            difference = found.difference(self._reference) or "; ".join(self._left_files())
        verdicts = [verdict.compared(difference) for verdict in verdicts]
        if self._keep is not None and not all(verdict.has_passed for verdict in verdicts):
            self._keep_training(self._keep / f"fault-{verdicts[0].fault.number}")
        return verdicts, pending

    def _keep_training(self, path: Path) -> None:
        """Copy a training's run directory and the output of its sessions to `path`."""
        shutil.copytree(self._disk.path / "run", path, dirs_exist_ok=True)
        for number, session in enumerate(self._sessions, start=1):
            shutil.copyfile(session / "output", path / f"session-{number}.txt")

    def _inject_all(self, session: TrainingSession, pending: Sequence[Fault]) -> list[Verdict]:
        """Inject the faults in turn until one ends the session or misses its moment.

        Returns the verdicts of those injected, each reported at once. Unless a fault ended the
        session, waits for its end, at most an hour (else RrfpError). If it failed, the last verdict
        gets a complaint (`judge_late_end`).
        """
        verdicts: list[Verdict] = []
        for fault in pending:
            if not wait_for_moment(session, fault, self._pace, _UNDISTURBED_S):
                break
            newest = newest_step(session.checkpoints)
            injected = inject(session, fault, self._disk)
            if injected is None:
                break
            verdicts.append(judge(fault, self._observe(session, fault, injected, newest)))
            self._report(verdicts[-1])
            if not verdicts[-1].observation.went_on:
                return verdicts
        if not _await_end(session, _UNDISTURBED_S):
            raise RrfpError(f"a training did not end within {_UNDISTURBED_S:.0f} s")
        if verdicts and session.exit_code != 0:
            judge_late_end(verdicts, last_sentence(session.output()))
        return verdicts

    def _observe(
        self, session: TrainingSession, fault: Fault, injected: Injected, newest: int
    ) -> Observation:
        """Watch a session after a fault until it ends, goes on for two steps, or exceeds its limit.

        Kills and stops must end it. Kills the session unless it went on. Complains about leftover
        processes, temporary files (only after exit code 0 or 1) and the loss of checkpoint
        `newest`.
        """
        limit_s, went_on = self._limit_s(fault), False
        while not (has_ended := session.has_ended):
            seconds = time.monotonic() - injected.at_s
            went_on = fault.kind not in _ENDING and (
                session.num_finished >= injected.num_finished + _MORE_STEPS
            )
            if went_on or seconds > limit_s:
                break
            time.sleep(_LOOK_S)
        seconds = time.monotonic() - injected.at_s
        exit_code = session.exit_code
        left: list[str] = []
        if not went_on:
            left += [f"it left {each}" for each in session.end()]
        # A killed launcher leaves its files for the next one to remove.
        if has_ended and exit_code in (0, 1):
            left += self._left_files()
        reached = newest_step(session.checkpoints)
        if reached < newest:
            left.append(f"the checkpoint of step {newest} is lost")
        return Observation(
            injected,
            seconds,
            limit_s,
            exit_code,
            went_on,
            ending=None if went_on else session.ending,
            output=session.output(),
            steps_lost=0 if went_on else max(0, session.num_finished - reached),
            left=tuple(left),
        )

    def _limit_s(self, fault: Fault) -> float:
        """Return the seconds within which a session must end, or go on, after a fault.

        The grace time plus `--silence`. SIGTERM, and faults other than kills and stops, also get
        the time of the start or the end if they come there; SIGTERM always gets that of the end.
        """
        limit_s = GRACE_S + self._settings.run.silence
        is_request = fault.signal == "SIGTERM"
        if fault.kind in _ENDING and not is_request:
            return limit_s
        # The rest of the start, or of the end, takes additional time.
        if fault.stage is Stage.START:
            limit_s += self._pace.start_s
        if fault.stage is Stage.CLOSE or is_request:
            limit_s += self._pace.end_s
        return limit_s

    def _left_files(self) -> list[str]:
        """Return a complaint for each remaining temporary file, except torch's cache, which is
        shared."""
        names = (entry.name for entry in self._temporary.iterdir())
        left = sorted(name for name in names if not name.startswith("torchinductor_"))
        return [f"it left the temporary file {name}" for name in left]

    def _settings_in(self, directory: Path) -> TrainSettings:
        """Return the settings that save into this directory and resume from it."""
        return self._settings.changed(out=directory / "run", save=directory / "ck", resume=True)

    def _session(self, settings: TrainSettings) -> TrainingSession:
        """Start the next session of the current training, in a new directory in `_sessions`."""
        self._sessions.append(self._directory / f"s{len(self._sessions)}")
        return TrainingSession(settings, self._sessions[-1], self._temporary)


def _pace_of(session: TrainingSession, num_steps: int) -> Pace:
    """Wait for the end of an undisturbed training and return its pace.

    The pace is meaningless if the training fails or takes more than an hour.
    """
    session.wait_until(lambda: session.num_finished > 0, _UNDISTURBED_S)
    start_s = time.monotonic() - session.began_s
    session.wait_until(lambda: session.num_finished >= num_steps, _UNDISTURBED_S)
    trained_s = time.monotonic()
    while session.exit_code is None and any(each.rank is not None for each in session.processes):
        time.sleep(_LOOK_S)
    close_s = time.monotonic() - trained_s
    _await_end(session, _UNDISTURBED_S)
    end_s = time.monotonic() - trained_s
    return Pace(start_s, (trained_s - session.began_s - start_s) / num_steps, close_s, end_s)


def _await_end(session: TrainingSession, timeout_s: float) -> bool:
    """Wait until no process of the session is left; returns False on timeout."""
    deadline_s = time.monotonic() + timeout_s
    while not session.has_ended:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_LOOK_S)
    return True


def _earlier(fault: Fault) -> Fault:
    """Return the fault with half its step number and half its share.

    A fault during a save becomes one during a step; one after the last step keeps its step.
    """
    after_step = fault.after_step if fault.stage is Stage.CLOSE else fault.after_step // 2
    stage = Stage.STEP if fault.stage is Stage.SAVE else fault.stage
    return replace(fault, stage=stage, after_step=after_step, share=fault.share / 2)
