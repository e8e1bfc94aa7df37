"""Start or resume a run: its directory, its `run.json`, and the step at which it begins.

Imports no torch: the launcher decides this before it starts any process. The ranks check again
when they hold the lock of the checkpoints (`rrfp.train.checkpoints.saving`).
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rrfp.errors import UsageError
from rrfp.trace.records import RankInfo
from rrfp.trace.run_dir import RunDir, create_run_dir, own_run_dir
from rrfp.trace.run_json import describe_run, describe_session, read_description
from rrfp.trace.safe_files import unfinished
from rrfp.train.checkpoints.directory import METRICS, Checkpoint, CheckpointDir
from rrfp.train.data.sources import data_contents
from rrfp.train.data.tokens import encoded
from rrfp.train.launch.private_network import told_network
from rrfp.train.settings import DECLARED, ModelKind, TrainSettings, num_vision_stages

# The description of a run.


def write_description(
    run: RunDir, settings: TrainSettings, ranks: Sequence[RankInfo], first_step: int = 0
) -> None:
    """Describe a run, of which this session begins with `first_step`; `ranks` is empty as long as
    they are unknown. A tokenizer is stated with its digest and vocabulary."""
    policy = settings.effective_policy.described()
    describe_run(
        run.run_json,
        settings.described(),
        policy,
        settings.layout.world_size,
        ranks,
        {**_network(), **_tokenizer(settings), **describe_session(run, first_step)},
    )


def _network() -> dict[str, object]:
    """The launcher, which describes the run first, has not made it yet."""
    told = told_network()
    return {"network": told} if told else {}


def _tokenizer(settings: TrainSettings) -> dict[str, object]:
    return (
        {} if settings.data.tokenizer is None else {"tokenizer": encoded(settings.data).tokenizer}
    )


# Whether a checkpoint can go on under given settings: they must train the same thing.
#
# Imports no torch: the launcher looks before it starts any process.


_MAY_CHANGE = ("recompute", "microbatches", "data", "tokenizer", "end_of_document")
"""Settings of the model and the data that do not decide by themselves what is trained. The last
three name contents, which are compared instead."""

_SAME = tuple(
    flag
    for flag, declared in DECLARED.items()
    if (declared.group in ("model", "data") and flag not in _MAY_CHANGE) or flag in ("lr", "seed")
)
"""The settings that decide what is trained, besides those that are computed from several."""

_CONTENTS = {
    "data": "the content of --data",
    "tokenizer": "the content of --tokenizer",
    "end_of_document": "the token that ends a document",
}

_SHA256_DIGITS, _SHOWN_DIGITS = 64, 12


def check_unused(save: Path, found: Checkpoint | None) -> None:
    """Raise UsageError if the directory of a new run has a checkpoint."""
    if found is not None:
        raise UsageError(
            f"{save} has the checkpoint of step {found.step} of another run; go on from it with "
            "--resume, or choose another directory with --save"
        )


def check_continues(
    settings: TrainSettings, contents: Mapping[str, str], checkpoint: Checkpoint
) -> None:
    """Raise UsageError, naming the setting and both values, if these settings and data train
    something else than the checkpoint holds, or for fewer steps than it has."""
    asked, saved = settings.described(), checkpoint.manifest.settings
    where = f"the checkpoint {checkpoint.path}"
    for flag in _SAME:
        if flag in saved and saved[flag] != asked[flag]:
            raise UsageError(
                f"--{DECLARED[flag].spelled} is {_told(asked[flag])} and was "
                f"{_told(saved[flag])} for {where}, which --resume cannot change; give the same, "
                "or start a new run with another --save"
            )
    then = checkpoint.manifest.contents
    if not then:
        raise UsageError(
            f"{where} does not say what its data were, so --resume cannot compare them; start a "
            "new run with another --save"
        )
    for flag, name in _CONTENTS.items():
        if then.get(flag) != contents.get(flag):
            raise UsageError(
                f"{name} is {_told(contents.get(flag))} and was {_told(then.get(flag))} for "
                f"{where}, which --resume cannot change; give the same, or start a new run with "
                "another --save"
            )
    problem = _not_settings(saved)
    if problem:
        raise UsageError(f"{where} is damaged ({problem}); start a new run with another --save")
    for name, of, advice in _COMPUTED:
        if of(asked) != of(saved):
            raise UsageError(
                f"{name} is {of(asked)} and was {of(saved)} for {where}, which --resume cannot "
                f"change; {advice}"
            )
    if settings.num_steps < checkpoint.step:
        raise UsageError(
            f"--steps is {settings.num_steps} and {where} has {checkpoint.step}; ask for more, or "
            "start a new run with another --save"
        )


def _not_settings(saved: Mapping[str, Any]) -> str:
    """What a checkpoint's settings lack of what is computed from several; empty if nothing."""
    for flag in ("dp", "microbatches", "pp", "chunks", "layers"):
        if type(saved.get(flag)) is not int:
            return f"its {flag} is {saved.get(flag)!r:.40}"
    return "" if "model" in saved else "it names no model"


def _global_batch(told: Mapping[str, Any]) -> int:
    return int(told["dp"] * told["microbatches"])


def _vision_layers(told: Mapping[str, Any]) -> int:
    if told["model"] != ModelKind.VLM:
        return 0
    num_stages = told["pp"] * told["chunks"]
    return int(num_vision_stages(num_stages) * told["layers"] // num_stages)


_COMPUTED: tuple[tuple[str, Callable[[Mapping[str, Any]], int], str], ...] = (
    (
        "the number of microbatches of all replicas (--dp x --microbatches)",
        _global_batch,
        "change --microbatches with --dp so that their product stays",
    ),
    (
        "the number of vision layers (a share of the stages, --pp x --chunks)",
        _vision_layers,
        "choose --pp and --chunks that divide the layers in the same place",
    ),
)


def _told(value: object) -> str:
    if isinstance(value, str) and len(value) == _SHA256_DIGITS:
        return f"{value[:_SHOWN_DIGITS]}..."
    return "not given" if value is None else str(value)


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
