"""The directory of a run: the names of its files, and how to make one and find it again."""

import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rrfp.errors import UsageError
from rrfp.trace.perfetto.format import MOST_OF_A_KIND

RUNS = Path("runs")
"""Where runs go by default, below the working directory."""
LATEST = RUNS / "latest"
"""A link to the newest run in `RUNS`."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run's directory and the files in it."""

    path: Path

    @property
    def run_json(self) -> Path:
        """The settings, versions and ranks of the run, as one JSON object."""
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        """One JSON object per line, one line per finished step."""
        return self.path / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        return self.path / "trace.pftrace"

    @property
    def records(self) -> Path:
        """What the ranks record while they train; merged into the trace, then removed."""
        return self.path / "records"

    @property
    def logs(self) -> Path:
        """The output of the ranks' processes."""
        return self.path / "logs"

    def rank_log(self, rank: int) -> Path:
        """The log of one rank."""
        return self.logs / f"rank-{rank}.log"

    def rank_records(self, rank: int) -> Path:
        """The spill file of one rank."""
        return self.records / f"rank-{rank}.jsonl"


def create_run_dir(out: Path | None, force: bool, hint: str) -> RunDir:
    """Make the directory of a new run: `out`, or else `runs/<time>-<hint>/`, and point
    `runs/latest` to it.

    If `out` exists, `force` removes the files of the run in it, and nothing else. Raises UsageError
    if it exists without `force`, or cannot be made.
    """
    try:
        return _create_dated(hint) if out is None else _create_at(out, force)
    except OSError as error:
        raise UsageError(
            f"the run's directory {error.filename} cannot be made ({error.strerror}); choose "
            f"another one with --out"
        ) from error


def expected_ranks(settings: Mapping[str, object]) -> set[int]:
    """The ranks that a run had by its settings; empty if the settings do not say."""
    expected: set[int] = set()
    world = settings.get("world")
    if isinstance(world, int) and world <= MOST_OF_A_KIND:
        expected.update(range(world))
    listed = settings.get("ranks")
    if isinstance(listed, list):
        expected.update(
            entry["rank"]
            for entry in listed
            if isinstance(entry, dict) and isinstance(entry.get("rank"), int)
        )
    return expected


def _create_at(out: Path, force: bool) -> RunDir:
    run = RunDir(out)
    try:
        out.mkdir(parents=True)
    except FileExistsError:
        if not out.is_dir():
            raise UsageError(f"{out} is a file; choose a directory with --out") from None
        if not force:
            raise UsageError(
                f"{out} exists; choose another directory with --out, or replace the run in it "
                f"with --force"
            ) from None
        for file in (run.run_json, run.metrics, run.trace):
            file.unlink(missing_ok=True)
        for directory in (run.records, run.logs):
            if directory.exists():
                shutil.rmtree(directory)
    return run


def _create_dated(hint: str) -> RunDir:
    RUNS.mkdir(exist_ok=True)
    # A hint may be an order file; use its name, made fit for a directory.
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(hint).stem) or "run"
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{label}"
    path = RUNS / name
    attempt = 1
    while True:
        try:
            path.mkdir()
            break
        except FileExistsError:
            attempt += 1
            path = RUNS / f"{name}-{attempt}"
    _point_latest_to(path)
    return RunDir(path)


def _point_latest_to(path: Path) -> None:
    if LATEST.exists() and not LATEST.is_symlink():
        raise UsageError(f"{LATEST} is not a link; move it away, it has to link to the newest run")
    link = RUNS / f".latest-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(path.name, target_is_directory=True)
    link.replace(LATEST)
