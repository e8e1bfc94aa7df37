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
_OF_SESSION = re.compile(r"trace-(\d+)\.pftrace|records-(\d+)")


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run's directory and the files in it.

    A run that was resumed has several **sessions**, each with a trace and records of its own.
    """

    path: Path
    session: int = 1

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
        """What this session recorded: `trace.pftrace`, `trace-2.pftrace` and so on."""
        return self.path / f"trace{self._suffix}.pftrace"

    @property
    def joined_trace(self) -> Path:
        """The traces of all sessions in one, made when it is first asked for."""
        return self.path / "trace-joined.pftrace"

    @property
    def records(self) -> Path:
        """What the ranks record while they train; merged into the trace, then removed."""
        return self.path / f"records{self._suffix}"

    @property
    def _suffix(self) -> str:
        return "" if self.session == 1 else f"-{self.session}"

    def sessions(self) -> list["RunDir"]:
        """The sessions that recorded something, in their order."""
        found = {1} if self._has_recorded(1) else set()
        for entry in self.path.iterdir():
            match = _OF_SESSION.fullmatch(entry.name)
            if match is not None:
                found.add(int(match[1] or match[2]))
        return [RunDir(self.path, session) for session in sorted(found)]

    def _has_recorded(self, session: int) -> bool:
        of = RunDir(self.path, session)
        return of.trace.exists() or of.records.is_dir()

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


def create_run_dir(out: Path | None, force: bool, hint: str, runs: Path = RUNS) -> RunDir:
    """Make the directory of a new run: `out`, or else `<time>-<hint>/` in `runs`, and point
    `latest` there to it.

    If `out` exists, `force` removes the files of the run in it, and nothing else. Raises UsageError
    if it exists without `force`, or cannot be made.
    """
    try:
        return _create_dated(runs, hint) if out is None else _create_at(out, force)
    except OSError as error:
        raise UsageError(
            f"the run's directory {error.filename} cannot be made ({error.strerror}); choose "
            f"another one with --out"
        ) from error


def expected_ranks(settings: Mapping[str, object]) -> set[int]:
    """The ranks that a run had by its settings; empty if the settings do not say."""
    listed = settings.get("ranks")
    expected = {
        entry["rank"]
        for entry in (listed if isinstance(listed, list) else [])
        if isinstance(entry, dict) and isinstance(entry.get("rank"), int)
    }
    world = settings.get("world")
    # If all are listed, they need not be the first ones: some ranks of a job are in no pipeline.
    if isinstance(world, int) and len(expected) < world <= MOST_OF_A_KIND:
        expected.update(range(world))
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
        for file in (run.run_json, run.metrics, run.joined_trace):
            file.unlink(missing_ok=True)
        for directory in (run.logs, *(session.records for session in run.sessions())):
            if directory.exists():
                shutil.rmtree(directory)
        for session in run.sessions():
            session.trace.unlink(missing_ok=True)
    return run


def _create_dated(runs: Path, hint: str) -> RunDir:
    runs.mkdir(exist_ok=True)
    # A hint may be an order file; use its name, made fit for a directory.
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(hint).stem) or "run"
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{label}"
    path = runs / name
    attempt = 1
    while True:
        try:
            path.mkdir()
            break
        except FileExistsError:
            attempt += 1
            path = runs / f"{name}-{attempt}"
    point_latest_to(path)
    return RunDir(path)


def point_latest_to(path: Path) -> None:
    """Make `latest`, beside a run, a link to it. Raises UsageError if it is something else."""
    latest = path.with_name(LATEST.name)
    if latest.exists() and not latest.is_symlink():
        raise UsageError(f"{latest} is not a link; move it away, it has to link to the newest run")
    link = path.with_name(f".latest-{os.getpid()}")
    link.unlink(missing_ok=True)
    link.symlink_to(path.name, target_is_directory=True)
    link.replace(latest)
