"""Where a call of `rrfp train` begins: which run's directory, and from which step.

Imports no torch: the launcher decides this before it starts any process. The ranks look again,
when they hold the lock of the checkpoints (`rrfp.train.checkpoints.session`).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rrfp.errors import UsageError
from rrfp.trace.rundir import RUNS, RunDir, create_run_dir, point_latest_to
from rrfp.trace.sessions import read_description
from rrfp.train.checkpoints.directory import Checkpoint, CheckpointDir
from rrfp.train.checkpoints.matching import check_continues
from rrfp.train.description import write_description
from rrfp.train.settings import TrainSettings


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a run begins or goes on."""

    run: RunDir
    first_step: int = 0


def beginning_of(settings: TrainSettings, tell: Callable[[str], None]) -> Beginning:
    """Make the run's directory, or find the one that goes on. `tell` receives sentences for people
    about what is resumed.

    Raises UsageError if checkpoints cannot be written, if there are some and nobody asked to go on
    from them, or if these settings train something else than they hold.
    """
    asked = settings.run
    if asked.save is None:
        return Beginning(_new_run(settings))
    directory = CheckpointDir(asked.save)
    directory.prepare()
    found = directory.newest(tell)
    if not asked.resume:
        if found is not None:
            raise UsageError(
                f"{asked.save} has the checkpoint of step {found.step} of another run; go on from "
                "it with --resume, or choose another directory with --save"
            )
        return Beginning(_new_run(settings))
    if found is None:
        tell(f"No checkpoint in {asked.save} is whole, so training starts anew")
        return Beginning(_run_of(settings, None) or _new_run(settings))
    check_continues(settings, found)
    run = _run_of(settings, found) or _new_run(settings)
    tell(f"Going on after step {found.step}, from {found.path}")
    return Beginning(run, found.step)


def _new_run(settings: TrainSettings) -> RunDir:
    run = create_run_dir(settings.run.out, settings.run.force, settings.hint.name)
    write_description(run, settings, ())
    return run


def _run_of(settings: TrainSettings, checkpoint: Checkpoint | None) -> RunDir | None:
    """The directory of the run that goes on: `--out`, or else where the checkpoint's run is. None
    if there is none yet. Raises UsageError if `--out` holds another run."""
    out, save = settings.run.out, settings.run.save
    assert save is not None
    if out is None:
        if checkpoint is None or not Path(checkpoint.manifest.run).is_dir():
            return None
        path = Path(os.path.relpath(checkpoint.manifest.run))
        if path.parent == RUNS:
            point_latest_to(path)
        return RunDir(path)
    if not out.exists():
        return None
    if not out.is_dir():
        raise UsageError(f"{out} is a file; choose a directory with --out")
    run = RunDir(out)
    saved = read_description(run.run_json).get("settings", {}).get("save")
    if not (saved is not None and Path(saved).resolve() == save.resolve()) and any(out.iterdir()):
        raise UsageError(
            f"{out} is not the directory of a run that saves to {save}; choose another one with "
            "--out, or leave it out to go on where the run was"
        )
    return run
