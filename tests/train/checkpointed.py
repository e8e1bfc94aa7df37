"""Runs of `rrfp train` that save, on ranks that are forked, and what their checkpoints hold."""

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rrfp.megatron.cpu.patches import prepare_cpu
from rrfp.trace.run_dir import RunDir
from rrfp.train.checkpoints.directory import (
    FILE,
    METRICS,
    Checkpoint,
    CheckpointDir,
    Manifest,
    digest_of,
)
from rrfp.train.checkpoints.reading import read_tensors
from rrfp.train.checkpoints.run_start import start_or_resume
from rrfp.train.checks import check_settings
from rrfp.train.data.sources import data_contents
from rrfp.train.settings import TrainSettings
from tests.e2e.ranks import run_ranks
from tests.train.trained import TINY

SMALL: dict[str, Any] = {
    "pp": 2,
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "seq_length": 32,
    "microbatches": 4,
    "save_every": 2,
    "no_trace": True,
}

FLAGS = ("--pp=2", *TINY)
"""The command line of such a run."""

CUT_SHORT = 17
"""The exit code of a rank that ends in the middle of something."""


def train(directory: Path, steps: int, **flags: Any) -> RunDir:
    """Train to the end, as `rrfp train` does, on ranks of the test."""
    settings = settings_in(directory, steps=steps, **flags)
    run = start_or_resume(settings, report=lambda _: None).run
    run_ranks(settings.layout.world_size, work, run, settings.to_json(), None, timeout_s=120)
    return run


def train_prepared(directory: Path, steps: int, prepare: Callable[[], None], **flags: Any) -> None:
    """Train as `train` does, with ranks that call `prepare` first, for example to end early."""
    settings = settings_in(directory, steps=steps, **flags)
    run = start_or_resume(settings, report=lambda _: None).run
    run_ranks(settings.layout.world_size, work, run, settings.to_json(), prepare, timeout_s=120)


def settings_in(directory: Path, **flags: Any) -> TrainSettings:
    """Settings of a run in this directory, which saves to `ck` in it."""
    files = {"save": directory / "ck", "out": directory / "run"}
    settings = TrainSettings(**{**SMALL, **files, **flags})
    check_settings(settings)
    return settings


def work(run: RunDir, settings: str, prepare: Callable[[], None] | None) -> None:
    """The process of a rank, as `rrfp.train.launch.rank_process` has it."""
    prepare_cpu()
    from rrfp.train.launch.collectives import no_object_collectives
    from rrfp.train.launch.process_groups import parallel_groups
    from rrfp.train.loop import work as train

    # Nothing may depend on what these were before.
    random.seed(os.getpid())
    np.random.seed(os.getpid())
    if prepare is not None:
        prepare()
    told = TrainSettings.from_json(settings)
    with parallel_groups(told) as layout, no_object_collectives():
        train(run, told, layout)


def newest(directory: Path) -> Checkpoint:
    """The newest whole checkpoint of a run."""
    found = CheckpointDir(directory / "ck").newest()
    assert found is not None
    return found


def tensors_of(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by name."""
    return read_tensors(checkpoint.path)


def made_up(directory: Path, *steps: int, **flags: Any) -> CheckpointDir:
    """Checkpoints as far as a launcher looks at them."""
    settings = settings_in(directory, steps=99, **flags)
    found = CheckpointDir(directory / "ck")
    found.prepare()
    for step in steps:
        saving = found.begin(step)
        (saving / "tensors").write_bytes(b"x" * 100)
        (saving / METRICS).write_text("".join(f'{{"step": {n}}}\n' for n in range(step)))
        run = str((directory / "run").resolve())
        told = settings.described()
        found.finish(saving, Manifest(step, told, run, {}, {}, data_contents(settings)))
    return found


def describe(checkpoint: Path, **changed: Any) -> None:
    """Rewrite a checkpoint's manifest, with the digests of its files as they are now."""
    manifest = Manifest.read(checkpoint)
    digests = {name: digest_of(checkpoint / name) for name in manifest.files}
    manifest = replace(manifest, digests=digests, **changed)
    (checkpoint / FILE).write_text(manifest.to_json())


def forget_digests(checkpoint: Path, *lost: str) -> None:
    """Rewrite a checkpoint's manifest as an older version wrote it, without these entries."""
    told = {**json.loads((checkpoint / FILE).read_text()), "version": 1}
    for name in ("digests", "sha256", *lost):
        del told[name]
    (checkpoint / FILE).write_text(json.dumps(told))
