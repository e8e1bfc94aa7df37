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
from rrfp.train.data.tokens import cached_tokens
from rrfp.train.launch.private_network import describe_network
from rrfp.train.settings import DECLARED, ModelKind, TrainSettings, num_vision_stages


def write_description(
    run: RunDir, settings: TrainSettings, ranks: Sequence[RankInfo], first_step: int = 0
) -> None:
    """Write `run.json` for a session that starts at `first_step`: settings, policy, `ranks` (empty
    while unknown), network, tokenizer and, from the second session on, the earlier ones. With a
    tokenizer, text that is not in the cache is encoded first."""
    # The launcher, which writes the file first, has not created the network yet.
    network = describe_network()
    tokenizer = None if settings.data.tokenizer is None else cached_tokens(settings.data).tokenizer
    describe_run(
        run.run_json,
        settings.described(),
        settings.effective_policy.described(),
        settings.layout.world_size,
        ranks,
        {
            **({"network": network} if network else {}),
            **({} if tokenizer is None else {"tokenizer": tokenizer}),
            **describe_session(run, first_step),
        },
    )


# Settings and data that a resumed run must share with its checkpoint.


_MAY_CHANGE = ("recompute", "microbatches", "data", "tokenizer", "end_of_document")
"""Settings of the model and the data that a resumed run may change. The last three name contents,
which are compared instead."""

_SAME = tuple(
    flag
    for flag, declared in DECLARED.items()
    if (declared.group in ("model", "data") and flag not in _MAY_CHANGE) or flag in ("lr", "seed")
)
"""Settings that a resumed run must not change."""

_CONTENTS = {
    "data": "the content of --data",
    "tokenizer": "the content of --tokenizer",
    "end_of_document": "the token that ends a document",
}

_SHA256_DIGITS, _SHOWN_DIGITS = 64, 12


def check_unused(save: Path, found: Checkpoint | None) -> None:
    """Raise UsageError if `found`, a checkpoint in the --save directory of a new run, is not
    None."""
    if found is not None:
        raise UsageError(
            f"{save} has the checkpoint of step {found.step} of another run; go on from it with "
            "--resume, or choose another directory with --save"
        )


def check_continues(
    settings: TrainSettings, contents: Mapping[str, str], checkpoint: Checkpoint
) -> None:
    """Raise UsageError if these settings or the content of their data cannot continue the training
    of the checkpoint, naming the first difference, if they have fewer steps than it has, or if its
    manifest lacks digests of its data or is damaged. Settings that it does not state may differ.
    The microbatches may change if all replicas together keep their number."""
    current, saved = settings.described(), checkpoint.manifest.settings
    where = f"the checkpoint {checkpoint.path}"
    for flag in _SAME:
        if flag in saved and saved[flag] != current[flag]:
            raise UsageError(
                f"--{DECLARED[flag].spelled} is {_shown(current[flag])} and was "
                f"{_shown(saved[flag])} for {where}, which --resume cannot change; give the same, "
                "or start a new run with another --save"
            )
    saved_contents = checkpoint.manifest.contents
    if not saved_contents:
        raise UsageError(
            f"{where} does not say what its data were, so --resume cannot compare them; start a "
            "new run with another --save"
        )
    for flag, name in _CONTENTS.items():
        was, now = saved_contents.get(flag), contents.get(flag)
        if was != now:
            raise UsageError(
                f"{name} is {_shown(now)} and was {_shown(was)} for {where}, which --resume "
                "cannot change; give the same, or start a new run with another --save"
            )
    problem = _problem_of_settings(saved)
    if problem:
        raise UsageError(f"{where} is damaged ({problem}); start a new run with another --save")
    for name, compute, advice in _COMPUTED:
        if compute(current) != compute(saved):
            raise UsageError(
                f"{name} is {compute(current)} and was {compute(saved)} for {where}, which "
                f"--resume cannot change; {advice}"
            )
    if settings.num_steps < checkpoint.step:
        raise UsageError(
            f"--steps is {settings.num_steps} and {where} has {checkpoint.step}; ask for more, or "
            "start a new run with another --save"
        )


def _problem_of_settings(saved: Mapping[str, Any]) -> str:
    """Describe the first invalid or missing setting of a checkpoint that `_COMPUTED` needs; empty
    if none."""
    for flag in ("dp", "microbatches", "pp", "chunks", "layers"):
        if type(saved.get(flag)) is not int:
            return f"its {flag} is {saved.get(flag)!r:.40}"
    return "" if "model" in saved else "it names no model"


def _global_batch(settings: Mapping[str, Any]) -> int:
    """Return the number of microbatches of all replicas together."""
    return int(settings["dp"] * settings["microbatches"])


def _vision_layers(settings: Mapping[str, Any]) -> int:
    """Return the number of layers on vision stages; 0 unless the model is `vlm`."""
    if settings["model"] != ModelKind.VLM:
        return 0
    num_stages = settings["pp"] * settings["chunks"]
    return int(num_vision_stages(num_stages) * settings["layers"] // num_stages)


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


def _shown(value: object) -> str:
    """Format a value for messages: a SHA-256 is cut to 12 digits, and None is 'not given'."""
    if isinstance(value, str) and len(value) == _SHA256_DIGITS:
        return f"{value[:_SHOWN_DIGITS]}..."
    return "not given" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class RunStart:
    """The start of a new or resumed run."""

    run: RunDir
    first_step: int = 0
    checkpoint: Checkpoint | None = None
    """The checkpoint from which it resumes."""

    @property
    def metrics(self) -> Path:
        """The file with the metrics of earlier steps: the run's, or, if that is missing and the run
        resumes, the checkpoint's copy."""
        if self.checkpoint is None or self.run.metrics.exists():
            return self.run.metrics
        return self.checkpoint.path / METRICS


def start_or_resume(settings: TrainSettings, report: Callable[[str], None]) -> RunStart:
    """Create the run's directory and its `run.json`. With --resume use an existing one instead:
    --out, or else that of the newest whole checkpoint's run; create none if no steps remain.
    Without a whole checkpoint training starts anew. With --save, create that directory too and
    remove unfinished checkpoints there. `report` receives sentences about the resumption.

    Raise UsageError if checkpoints cannot be written, if a whole one exists without --resume, if
    these settings cannot continue it, if --out exists without --force (resumed: if its run saves
    elsewhere), or if --out and --save lie in each other's entries.
    """
    save, out, resumes = settings.run.save, settings.run.out, settings.run.resume
    if save is None:
        return RunStart(_new_run(settings))
    directory = CheckpointDir(save)
    _check_separate(save, out)
    is_new = out is not None and not out.exists()
    if not resumes:
        check_unused(save, directory.newest(report, with_content=False))
        if out is not None and not is_new and not settings.run.force:
            _new_run(settings)  # refuses, before checkpoints create anything in there
    directory.prepare()
    directory.remove_abandoned()
    # Checkpoints inside of the run's directory have created it.
    is_made = is_new and out is not None and out.exists()
    if not resumes:
        return RunStart(_new_run(settings, is_made=is_made))
    found = directory.newest(report)
    if found is None:
        report(f"No checkpoint in {save} is whole, so training starts anew")
        run = None if is_made else _run_at(settings, out)
        return RunStart(run or _new_run(settings, is_made=is_made))
    check_continues(settings, data_contents(settings), found)
    run = _run_of(settings, found, report)
    if found.step >= settings.num_steps:
        return RunStart(run or RunDir(Path(found.manifest.run)), found.step, found)
    run = run or _new_run(settings)
    report(f"Going on after step {found.step}, from {found.path}")
    return RunStart(run, found.step, found)


def has_trained_all(settings: TrainSettings) -> bool:
    """True if --resume finds no step left to train, so that host 0 waits for no other host; always
    False without it. Raise UsageError if these settings cannot continue the checkpoint."""
    if settings.run.save is None or not settings.run.resume:
        return False
    directory = CheckpointDir(settings.run.save)
    found = directory.newest(with_content=False)
    if found is None or found.step < settings.num_steps:
        return False
    # If this one is damaged, host 0 resumes from an earlier one.
    found = directory.newest()
    if found is None or found.step < settings.num_steps:
        return False
    check_continues(settings, data_contents(settings), found)
    return True


def _check_separate(save: Path, out: Path | None) -> None:
    """Raise UsageError if --save lies in an entry of --out that the run creates and removes, or
    --out in an entry of --save that is a checkpoint's. Without --out nothing is checked."""
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
    """Create the run's directory and its `run.json`. Raise UsageError if --out exists, unless
    `is_made` states that this call has created it. With --force, remove the run's files in it
    first."""
    run = create_run_dir(settings.run.out, settings.run.force or is_made, settings.hint.name)
    write_description(run, settings, ())
    return run


def _run_of(
    settings: TrainSettings, checkpoint: Checkpoint, report: Callable[[str], None]
) -> RunDir | None:
    """Return the directory of the resumed run: --out, or else that of the checkpoint's run; None if
    it does not exist. A checkpoint's run that saves elsewhere counts as missing; if --out is such a
    run, raise UsageError. `report` receives the reason why the checkpoint's run is not used."""
    if settings.run.out is not None:
        return _run_at(settings, settings.run.out)
    path = Path(checkpoint.manifest.run)
    if not path.is_dir():
        report(f"The directory of the run, {path}, is gone")
        return None
    path = Path(os.path.relpath(path))
    if not _saves_to(settings, path):
        # The checkpoints were copied or moved, and that run may be resumed as well.
        report(f"The run in {path} saves to another directory, so a new one is made for this run")
        return None
    return own_run_dir(path)


def _run_at(settings: TrainSettings, out: Path | None) -> RunDir | None:
    """Return the existing directory of --out, where others may no longer write; None if it is not
    given or does not exist. Raise UsageError if it is a file, holds a run that saves elsewhere, or
    belongs to another user."""
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
    """True if a directory is that of a run that saves to --save, by its `run.json`. If that is
    missing or names no --save, the directory counts if it has nothing but checkpoints, as after a
    launcher was killed early."""
    assert settings.run.save is not None
    description, save = RunDir(run).run_json, settings.run.save.resolve()
    described_save = read_description(description).get("settings", {}).get("save")
    if described_save is None:
        if save == run.resolve():
            return not any(RunDir(run).owns(each.name) for each in run.iterdir())
        within = {each for each in run.iterdir() if each.resolve() in (save, *save.parents)}
        return {*run.iterdir()} - within <= {*unfinished(description)}
    return Path(described_save).resolve() == save
