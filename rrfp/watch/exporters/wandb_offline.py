"""Weights & Biases: a run on the disk, which `wandb sync` uploads when somebody wants it to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb

from rrfp.errors import UsageError
from rrfp.watch.alarms import Measure


def open_at(where: str, run: str) -> "WandbOffline":
    return WandbOffline(Path(where), run)


class WandbOffline:
    """Every measure under its path, over the step. Nothing is sent to any host."""

    def __init__(self, directory: Path, run: str) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{directory} cannot be made ({error.strerror}); give --export wandb a directory "
                "that can be written"
            ) from error
        # Its own figures of this machine are those of the machine that watches.
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
        self._run: Any = wandb.init(
            project="rrfp", name=run, dir=str(directory), mode="offline", settings=settings
        )
        self._run.define_metric("*", step_metric="step")

    def take(self, step: int, source: str, measures: Sequence[Measure]) -> None:
        del source
        self._run.log({"step": step, **{each.path: each.value for each in measures}})

    def flush(self) -> None:
        """Its own process writes as it goes."""

    def close(self) -> None:
        self._run.finish()
