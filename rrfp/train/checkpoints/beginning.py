"""Where a call of `rrfp train` begins: which run's directory, and from which step.

Imports no torch: the launcher decides this before it starts any process. The ranks look again,
when they hold the lock of the checkpoints (`rrfp.train.checkpoints.session`).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rrfp.errors import UsageError
from rrfp.trace.files.whole_file import unfinished
from rrfp.trace.rundir import RunDir, create_run_dir, own_run_dir
from rrfp.trace.sessions import read_description
from rrfp.train.checkpoints.directory import Checkpoint, CheckpointDir
from rrfp.train.checkpoints.manifest import METRICS
from rrfp.train.checkpoints.matching import check_continues, check_unused
from rrfp.train.data.contents import data_contents
from rrfp.train.description import write_description
from rrfp.train.settings import TrainSettings


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a run begins or goes on."""

    run: RunDir
    first_step: int = 0
    checkpoint: Checkpoint | None = None
    """What it goes on from."""

    @property
    def metrics(self) -> Path:
        """The metrics of the steps before: the run's, or the checkpoint's if that run is gone."""
        if self.checkpoint is None or self.run.metrics.exists():
            return self.run.metrics
        return self.checkpoint.path / METRICS


def beginning_of(settings: TrainSettings, tell: Callable[[str], None]) -> Beginning:
    """Make the run's directory, or find the one that goes on; none is made if all steps are
    trained. `tell` receives sentences for people about what is resumed.

    Raises UsageError if checkpoints cannot be written, if there are some and nobody asked to go on
    from them, or if these settings train something else than they hold.
    """
    asked = settings.run
    if asked.save is None:
        return Beginning(_new_run(settings))
    directory = CheckpointDir(asked.save)
    _check_apart(asked.save, asked.out)
    is_new = asked.out is not None and not asked.out.exists()
    if not asked.resume:
        check_unused(asked.save, directory.newest(tell, with_content=False))
        if asked.out is not None and not is_new and not asked.force:
            _new_run(settings)  # is refused before the checkpoints make anything in there
    directory.prepare()
    directory.remove_abandoned()
    # The checkpoints may be in the run's directory, which is then there by now.
    is_made = is_new and asked.out is not None and asked.out.exists()
    if not asked.resume:
        return Beginning(_new_run(settings, is_made=is_made))
    found = directory.newest(tell)
    if found is None:
        tell(f"No checkpoint in {asked.save} is whole, so training starts anew")
        run = None if is_made else _run_at(settings, asked.out)
        return Beginning(run or _new_run(settings, is_made=is_made))
    check_continues(settings, data_contents(settings), found)
    run = _run_of(settings, found, tell)
    if found.step >= settings.num_steps:
        return Beginning(run or RunDir(Path(found.manifest.run)), found.step, found)
    run = run or _new_run(settings)
    tell(f"Going on after step {found.step}, from {found.path}")
    return Beginning(run, found.step, found)


def has_trained_all(settings: TrainSettings) -> bool:
    """Whether `--resume` finds no step left to train, so that host 0 waits for no other host.
    Raises UsageError if these settings train something else than the checkpoint holds."""
    if settings.run.save is None or not settings.run.resume:
        return False
    directory = CheckpointDir(settings.run.save)
    found = directory.newest(with_content=False)
    if found is None or found.step < settings.num_steps:
        return False
    # Host 0 goes on from an earlier one if this one is damaged.
    found = directory.newest()
    if found is None or found.step < settings.num_steps:
        return False
    check_continues(settings, data_contents(settings), found)
    return True


def _check_apart(save: Path, out: Path | None) -> None:
    """Raise UsageError if a run would remove its checkpoints among its own files, or the other way
    round."""
    if out is None:
        return
    checkpoints, run = save.resolve(), out.resolve()
    if run in checkpoints.parents:
        name = checkpoints.relative_to(run).parts[0]
        if RunDir(run).owns(name):
            raise UsageError(
                f"--save {save} lies in {name}, which the run in {out} makes and removes; choose "
                f"another name, such as {out / 'checkpoints'}"
            )
    elif checkpoints in run.parents:
        name = run.relative_to(checkpoints).parts[0]
        if CheckpointDir(checkpoints).owns(name):
            raise UsageError(
                f"--out {out} lies in {name}, which is the name of a checkpoint in {save}; choose "
                f"another one, such as {save / 'run'}"
            )


def _new_run(settings: TrainSettings, *, is_made: bool = False) -> RunDir:
    """`is_made` says that the directory is there because this call has made it."""
    run = create_run_dir(settings.run.out, settings.run.force or is_made, settings.hint.name)
    write_description(run, settings, ())
    return run


def _run_of(
    settings: TrainSettings, checkpoint: Checkpoint, tell: Callable[[str], None]
) -> RunDir | None:
    """The directory of the run that goes on: `--out`, or else where the checkpoint's run is. None
    if there is none yet, or no longer. Raises UsageError if `--out` holds another run."""
    if settings.run.out is not None:
        return _run_at(settings, settings.run.out)
    path = Path(checkpoint.manifest.run)
    if not path.is_dir():
        tell(f"The directory of the run, {path}, is gone")
        return None
    path = Path(os.path.relpath(path))
    if not _saves_to(settings, path):
        # The checkpoints were copied or moved, and that run may go on as well.
        tell(f"The run in {path} saves to another directory, so a new one is made for this run")
        return None
    return own_run_dir(path)


def _run_at(settings: TrainSettings, out: Path | None) -> RunDir | None:
    """The directory that `--out` names, if it exists. Raises UsageError if it holds another run."""
    if out is None or not out.exists():
        return None
    if not out.is_dir():
        raise UsageError(f"{out} is a file; choose a directory with --out")
    if not _saves_to(settings, out):
        raise UsageError(
            f"{out} is not the directory of a run that saves to {settings.run.save}; choose "
            "another one with --out, or leave it out to go on where the run was"
        )
    return own_run_dir(out)


def _saves_to(settings: TrainSettings, run: Path) -> bool:
    """Whether a directory is that of a run with these checkpoints. An empty one may become it, and
    one whose launcher was killed before it had described its run. Its checkpoints may be there."""
    assert settings.run.save is not None
    description, save = RunDir(run).run_json, settings.run.save.resolve()
    told = read_description(description).get("settings", {}).get("save")
    if told is None:
        if save == run.resolve():
            return not any(RunDir(run).owns(each.name) for each in run.iterdir())
        within = {each for each in run.iterdir() if each.resolve() in (save, *save.parents)}
        return {*run.iterdir()} - within <= {*unfinished(description)}
    return Path(told).resolve() == save
