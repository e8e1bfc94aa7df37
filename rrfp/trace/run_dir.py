"""Run directories: the names of their files, and how to make, check, list and empty them."""

import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rrfp.errors import UsageError
from rrfp.trace.perfetto.format import MOST_OF_A_KIND
from rrfp.trace.safe_files import link_whole, why_not_own

RUNS = Path("runs")
"""The default parent directory of runs, in the working directory."""
LATEST = RUNS / "latest"
"""A link to the newest run in `RUNS` that has a trace."""
_LONGEST_PATH, _LONGEST_NAME = 4095, 128
"""The longest path on Linux, and the longest name of a file below a run's directory, in bytes."""
_OTHERS, _OTHERS_WRITE = 0o077, 0o022
"""The mode bits of group and others, and those that let them write."""
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
        """The path of run.json: the settings, versions and ranks of the run, as one JSON object."""
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        """The path of metrics.jsonl: one JSON object per line, one line per finished step."""
        return self.path / "metrics.jsonl"

    @property
    def admission(self) -> Path:
        """The path of admission.csv: the planned orders of the microbatches, a line per finished
        step."""
        return self.path / "admission.csv"

    @property
    def assignments(self) -> Path:
        """The path of dealing.csv: each replica's part of the global batches, a line per finished
        step."""
        return self.path / "dealing.csv"

    @property
    def outcome(self) -> Path:
        """The path of outcome.json: how the run ended (`rrfp.trace.outcome`)."""
        return self.path / "outcome.json"

    @property
    def trace(self) -> Path:
        """The path of this session's trace: `trace.pftrace`, `trace-2.pftrace` and so on."""
        return self.path / f"trace{self._suffix}.pftrace"

    @property
    def joined_trace(self) -> Path:
        """The path of the traces of all sessions joined into one, made when it is first needed."""
        return self.path / "trace-joined.pftrace"

    @property
    def records(self) -> Path:
        """The directory of the ranks' spill files of this session; merged into the trace, then
        removed."""
        return self.path / f"records{self._suffix}"

    @property
    def _suffix(self) -> str:
        """The end of the names of this session's files: empty for the first session, then `-2` and
        so on."""
        return "" if self.session == 1 else f"-{self.session}"

    def sessions(self) -> list["RunDir"]:
        """The sessions that have a trace or records, in their order. May raise OSError."""
        found = {1} if self._has_recorded(1) else set()
        for entry in self.path.iterdir():
            match = _OF_SESSION.fullmatch(entry.name)
            if match is not None:
                found.add(int(match[1] or match[2]))
        return [RunDir(self.path, session) for session in sorted(found)]

    def owns(self, name: str) -> bool:
        """True if a run creates or removes an entry of this name in its directory: its fixed files,
        `logs`, and every name that begins with `trace` or `records`."""
        files = (
            *(self.run_json, self.metrics, self.admission, self.assignments, self.outcome),
            self.logs,
        )
        return name in {file.name for file in files} or name.startswith(("trace", "records"))

    def has_trace(self) -> bool:
        """True if any session has a trace. May raise OSError."""
        return any(session.trace.exists() for session in self.sessions())

    def _has_recorded(self, session: int) -> bool:
        """True if this session of the run has a trace or a directory of records."""
        of = RunDir(self.path, session)
        return of.trace.exists() or of.records.is_dir()

    @property
    def logs(self) -> Path:
        """The directory of the ranks' logs."""
        return self.path / "logs"

    def rank_log(self, rank: int) -> Path:
        """The path of the log of one rank's stdout and stderr."""
        return self.logs / f"rank-{rank}.log"

    def rank_records(self, rank: int) -> Path:
        """The path of the (first) spill file of one rank."""
        return self.records / f"rank-{rank}.jsonl"


def create_run_dir(out: Path | None, force: bool, hint: str, runs: Path = RUNS) -> RunDir:
    """Make the directory of a new run: `out`, or else `<time>-<hint>/` in `runs`.

    If `out` exists, `force` removes the files of the run in it, and no other files. Raises
    UsageError if it exists without `force`, is a file or another user's, has too long a path, or
    cannot be made.
    """
    length = len(os.fsencode((runs if out is None else out).absolute()))
    if length + _LONGEST_NAME > _LONGEST_PATH:
        raise UsageError(
            f"the path of the run's directory has {length} bytes, and its files need "
            f"{_LONGEST_NAME} of the {_LONGEST_PATH} that a path may have; choose a shorter --out"
        )
    try:
        return _create_dated(runs, hint) if out is None else _create_at(out, force)
    except OSError as error:
        raise UsageError(
            f"the run's directory {error.filename} cannot be made ({error.strerror}); choose "
            f"another one with --out"
        ) from error


@contextmanager
def own_files(*, shared: bool = False) -> Iterator[None]:
    """In the block, set the umask of this process and its children so that new files and
    directories are for this user only (modes 0600 and 0700). With `shared`, only deny others to
    write."""
    before = os.umask(_OTHERS)
    if shared:
        os.umask(before | _OTHERS_WRITE)
    try:
        yield
    finally:
        os.umask(before)


def _makes_own_files() -> bool:
    """True if the current umask denies others all access (`own_files`)."""
    mask = os.umask(_OTHERS)
    os.umask(mask)
    return mask & _OTHERS == _OTHERS


def expected_ranks(settings: Mapping[str, object]) -> set[int]:
    """The ranks that a run had: those listed in its settings and, if these are fewer than the world
    size, all ranks of the world. Invalid entries are skipped; empty if nothing is stated."""
    listed = settings.get("ranks")
    expected = {
        entry["rank"]
        for entry in (listed if isinstance(listed, list) else [])
        if isinstance(entry, dict) and isinstance(entry.get("rank"), int)
    }
    world = settings.get("world")
    # A complete list may have gaps, because some ranks of a job are in no pipeline.
    if isinstance(world, int) and len(expected) < world <= MOST_OF_A_KIND:
        expected.update(range(world))
    return expected


def own_run_dir(path: Path) -> RunDir:
    """Prepare an existing directory for writing a run: revoke other users' permission to write.
    Raises UsageError if the directory belongs to another user."""
    try:
        path.chmod(path.stat().st_mode & ~_OTHERS_WRITE & 0o7777)
        why = why_not_own(path)
    except PermissionError:
        why = f"belongs to user {path.stat().st_uid}"
    if why:
        raise UsageError(
            f"{path} {why}, who could replace the run's files; choose another directory with --out"
        )
    return RunDir(path)


def _create_at(out: Path, force: bool) -> RunDir:
    """Make `out`, or with `force` revoke others' permission to write (all permissions within
    `own_files`) and remove the files of the run in it. Raises UsageError if it is a file, belongs
    to another user, or exists without `force`."""
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
        own_run_dir(out)
        if _makes_own_files():
            out.chmod(out.stat().st_mode & ~_OTHERS & 0o7777)
        empty(run)
    return run


def empty(run: RunDir) -> None:
    """Remove all files of a run, and no other files in its directory, and update the link `latest`
    beside it. May raise OSError."""
    for file in (
        *(run.run_json, run.metrics, run.admission, run.assignments),
        *(run.outcome, run.joined_trace),
    ):
        file.unlink(missing_ok=True)
    for directory in (run.logs, *(session.records for session in run.sessions())):
        if directory.exists():
            shutil.rmtree(directory)
    for session in run.sessions():
        session.trace.unlink(missing_ok=True)
    update_latest(run.path.parent)


def _create_dated(runs: Path, hint: str) -> RunDir:
    """Make `<time>-<hint>/` in `runs`, numbered if it exists; of a hint that is a path, only the
    file's name is used. Raises UsageError if `latest` in `runs` is not a link."""
    runs.mkdir(exist_ok=True)
    latest = runs / LATEST.name
    if latest.exists() and not latest.is_symlink():
        raise UsageError(f"{latest} is not a link; move it away, it has to link to the newest run")
    # A hint may be the path of an order file; use its name without special characters.
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(hint).stem) or "run"
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{label}"
    path = runs / name
    attempt = 1
    while True:
        try:
            path.mkdir()
            return RunDir(path)
        except FileExistsError:
            attempt += 1
            path = runs / f"{name}-{attempt}"


def runs_in(directory: Path = RUNS) -> list[Path]:
    """The run directories in a directory, the one that began or was resumed last first. Empty
    without such a directory; `latest` and directories without a run are left out. May raise
    OSError."""
    try:
        with os.scandir(directory) as entries:
            names = [each.name for each in entries if each.name != LATEST.name and _is_dir(each)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    began = {path: ns for name in names if (ns := began_ns(path := directory / name)) is not None}
    return sorted(began, key=lambda path: (began[path], path.name), reverse=True)


def _is_dir(entry: "os.DirEntry[str]") -> bool:
    """True if an entry is a directory or a link to one; False if it cannot be examined, for example
    a link to itself."""
    with suppress(OSError):  # for example a link to itself
        return entry.is_dir()
    return False


def began_ns(path: Path) -> int | None:
    """The time at which a run began or was last resumed, in ns since 1970: the mtime of run.json,
    or else of its trace or records. None if the path has none of these."""
    run = RunDir(path)
    for file in (run.run_json, run.trace, run.records):
        with suppress(OSError):
            return file.stat().st_mtime_ns
    return None


def update_latest(runs: Path) -> None:
    """Point the link `latest` to the newest run that has a trace, or remove it without such a run.
    Does nothing unless the directory's name is `runs`, or if `latest` is no link. Errors are
    ignored, so that no run fails because of the link."""
    latest = runs / LATEST.name
    if runs.absolute().name != RUNS.name or (latest.exists() and not latest.is_symlink()):
        return
    with suppress(OSError):
        newest = next((path for path in runs_in(runs) if _has_trace(path)), None)
        if newest is None:
            latest.unlink(missing_ok=True)
            return
        link_whole(latest, newest.name)


def _has_trace(path: Path) -> bool:
    """True if any session of the run has a trace; False if another user's directory cannot be
    read."""
    with suppress(OSError):  # another user's
        return RunDir(path).has_trace()
    return False
