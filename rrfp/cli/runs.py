"""`rrfp runs`: list the runs of a directory with their settings and outcomes."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from rrfp.analyze.table import NAME, TEXT, Column, Table
from rrfp.cli.console import print_rows
from rrfp.cli.options import RowFormat
from rrfp.errors import UsageError
from rrfp.strict_json import parsed
from rrfp.trace.outcome import Outcome, is_running, read_ending
from rrfp.trace.run_dir import RUNS, RunDir, began_ns, runs_in
from rrfp.trace.run_json import read_description
from rrfp.trace.safe_files import open_regular

_LAST_LINE = 2**16
"""More bytes than a line of `metrics.jsonl` has."""

_MOST_OF_ANYTHING = 10**12
"""A larger number in run.json is invalid."""
_LAYOUT = ("pp", "tp", "cp", "dp", "ep", "chunks")
_UNITS = ("B", "kB", "MB", "GB", "TB")
_NS_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class _Run:
    """A run as described by its small files; no trace is read. The fields are JSON keys."""

    run: str
    path: str
    began: str
    """The time of the start or last resume, in ISO 8601 with this machine's UTC offset."""
    kind: str
    """`train`, `job` (rrfp in a user's script), `simulate`, `import`, or empty if unknown."""
    hint: str | None
    dispatch: str | None
    pp: int | None
    tp: int | None
    cp: int | None
    dp: int | None
    ep: int | None
    chunks: int | None
    microbatches: int | None
    steps: int | None
    """The number of finished steps."""
    steps_asked: int | None
    size_bytes: int
    outcome: str
    error: str | None
    has_trace: bool
    """True if there is a trace, or records from which one is made."""


def runs(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The directory of the runs.", show_default=False)
    ] = RUNS,
    output_format: Annotated[
        RowFormat, typer.Option("--format", help="How to print the runs.")
    ] = RowFormat.TABLE,
) -> None:
    """List the runs in runs/ or another directory, the newest first.

    All commands accept the name of a run in runs/, @-1 for the newest, @-2 for
    the one before, and so on.
    """
    if not directory.is_dir() and directory != RUNS:
        raise UsageError(f"{directory} is not a directory; give one that holds runs")
    found = [_read(path) for path in runs_in(directory)]
    if not found and output_format in (RowFormat.TABLE, RowFormat.MD):
        print(f"There are no runs in {directory}; 'rrfp train' makes one.")
        return
    print_rows(_table(directory, found), output_format)


def _read(path: Path) -> _Run:
    """Read the small files of a run into a `_Run`. It never raises: invalid settings become None,
    and an unreadable run.json becomes the run's error."""
    run = RunDir(path)
    described, problem = _described(run)
    settings = described.get("settings")
    settings = settings if isinstance(settings, dict) else {}
    kind = _kind(described, settings)
    steps = _num_steps(run, kind, settings)
    outcome, error = _outcome(run, kind, steps, settings)
    return _Run(
        run=path.name,
        path=str(path),
        began=_iso_time(began_ns(path) or 0),
        kind=kind,
        hint=_text(settings.get("hint")),
        dispatch=_text(settings.get("dispatch")),
        **{name: _whole(settings.get(name)) for name in (*_LAYOUT, "microbatches")},
        steps=steps,
        steps_asked=_whole(settings.get("seeds" if kind == "simulate" else "steps")),
        size_bytes=_size_of(path),
        outcome=outcome,
        error=problem or error,
        has_trace=bool(_recorded(run)),
    )


def _iso_time(time_ns: int) -> str:
    """Format a time in ISO 8601 with this machine's UTC offset; a time outside of the calendar
    becomes the start of 1970."""
    # A file's time may be outside of the calendar.
    with suppress(ValueError, OverflowError, OSError):
        moment = datetime.fromtimestamp(time_ns / _NS_PER_S).astimezone()
        return moment.isoformat(timespec="seconds")
    return datetime.fromtimestamp(0).astimezone().isoformat(timespec="seconds")


def _described(run: RunDir) -> tuple[dict[str, Any], str | None]:
    """Read run.json. Returns its content, and an error message with empty content if it cannot be
    read."""
    try:
        return read_description(run.run_json), None
    except Exception as error:
        return {}, str(error)


def _kind(described: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return the kind of a run from its run.json: simulate, import, job for a user's script, else
    train, or empty without settings."""
    if described.get("simulated"):
        return "simulate"
    if "imported" in described:
        return "import"
    if "script" in settings:
        return "job"
    return "train" if settings else ""


def _num_steps(run: RunDir, kind: str, settings: Mapping[str, Any]) -> int | None:
    """Return the number of finished steps: a simulation's seeds, or one more than the last step in
    the metrics of `rrfp train` (0 without a complete line). None for other kinds and unreadable
    metrics."""
    if kind == "simulate":
        return _whole(settings.get("seeds"))
    if kind != "train":
        return None
    try:
        with open_regular(run.metrics) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_LINE))
            whole, *_ = file.read(_LAST_LINE).rpartition(b"\n")  # the last line may be incomplete
        return int(parsed(whole.splitlines()[-1])["step"]) + 1 if whole else 0
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None


def _outcome(
    run: RunDir, kind: str, steps: int | None, settings: Mapping[str, Any]
) -> tuple[str, str | None]:
    """Return the outcome of a run and the recorded error, if any: running, or the recorded ending.

    Without a record, a simulation and a training with all its steps have finished, another kind
    with a trace counts as recorded, and any other run was killed.
    """
    with suppress(OSError):
        if is_running(run):
            return Outcome.RUNNING, None
    with suppress(OSError):
        ending = read_ending(run)
        if ending is not None:
            return ending.outcome, ending.error
    asked = _whole(settings.get("steps"))
    if kind == "simulate" or (kind == "train" and asked is not None and steps == asked):
        return Outcome.FINISHED, None
    has_trace = any(each.trace.exists() for each in _recorded(run))
    return (Outcome.RECORDED if has_trace and kind != "train" else Outcome.KILLED), None


def _recorded(run: RunDir) -> list[RunDir]:
    """Return the sessions of a run that have a trace or records; empty if the directory is
    unreadable."""
    try:
        return run.sessions()
    except OSError:
        return []


def _size_of(path: Path) -> int:
    """Return the size in bytes of all files below a directory. Links are not followed, and what
    cannot be read does not count."""
    total, folders = 0, [os.fspath(path)]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
    return total


def _table(directory: Path, found: Sequence[_Run]) -> Table:
    """Make the table of runs: columns for people, and one without a heading for each field of
    `_Run`, for programs."""
    programs = [
        Column(None, [getattr(each, field.name) for each in found], key=field.name)
        for field in fields(_Run)
    ]
    people = [
        Column("run", [each.run for each in found], NAME),
        Column("began", [_time(each.began) for each in found]),
        Column("what", [_what(each) for each in found], TEXT),
        Column("steps", [_steps(each) for each in found]),
        Column("size", [_size(each.size_bytes) for each in found]),
        Column("outcome", [_outcome_in_words(each) for each in found], NAME),
    ]
    return Table(
        f"Runs in {directory}, newest first",
        [*people, *programs],
        num_names=len(people),
        dispensable=("size", "began"),
        rows_key="runs",
    )


def _time(began: str) -> str:
    """Shorten an ISO time to `MM-DD HH:MM`, or `YYYY-MM-DD` outside of this year."""
    moment = datetime.fromisoformat(began)
    is_this_year = moment.year == datetime.now().year
    return f"{moment:%m-%d %H:%M}" if is_this_year else f"{moment:%Y-%m-%d}"


def _what(run: _Run) -> str:
    """Describe a run as `bf pp 4 tp 2`: kind, dispatch, hint and sizes, without the defaults (kind
    train, dispatch ready, sizes of 1 except pp) and without the dispatch of an imported run."""
    kind = None if run.kind == "train" else run.kind
    dispatch = None if run.dispatch == "ready" or kind == "import" else run.dispatch
    sizes = (
        f"{name} {size}"
        for name in _LAYOUT
        if (size := getattr(run, name)) is not None and (name == "pp" or size > 1)
    )
    return " ".join(filter(None, (kind, dispatch, run.hint, *sizes)))


def _steps(run: _Run) -> str:
    """Format the finished steps as `20`, or `20/200` if another number was requested; empty if
    unknown."""
    if run.steps is None:
        return ""
    is_whole = run.steps_asked in (None, run.steps)
    return f"{run.steps}" if is_whole else f"{run.steps}/{run.steps_asked}"


def _size(num_bytes: float) -> str:
    """Format bytes in decimal units: `13 kB`, `1.2 MB`."""
    power = 0
    while num_bytes >= 999.5 and power < len(_UNITS) - 1:
        num_bytes /= 1000
        power += 1
    digits = 1 if power and num_bytes < 9.95 else 0
    return f"{num_bytes:.{digits}f} {_UNITS[power]}"


def _outcome_in_words(run: _Run) -> str:
    """Return the outcome, or `no trace` for a finished run without one."""
    has_nothing = run.outcome == Outcome.FINISHED and not run.has_trace
    return "no trace" if has_nothing else run.outcome


def _whole(value: object) -> int | None:
    """Return an integer below 10**12 (in absolute value) as it is, and None for any other value."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if abs(value) < _MOST_OF_ANYTHING else None


def _text(value: object) -> str | None:
    """Return a string as it is, and None for any other value."""
    return value if isinstance(value, str) else None
