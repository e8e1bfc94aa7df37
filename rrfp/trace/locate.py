"""Finds the run that a user names, and its trace.

A run is named by a path or a short name: `NAME` is `runs/NAME`, `@-1` the newest run in `runs`,
`@-2` the one before. An existing path takes precedence.
"""

import atexit
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import rrfp
from rrfp.errors import RrfpError, UsageError, did_you_mean, reason_of
from rrfp.trace.outcome import why_without_records
from rrfp.trace.run_dir import RUNS, RunDir, runs_in
from rrfp.trace.safe_files import is_own

_COUNTED = re.compile(r"@-([1-9]\d{0,8})")


def find_run(named: Path | None) -> Path:
    """The path of a run or file, named by its path, as `NAME` in `runs`, or as `@-N` for the N-th
    newest run. None means the newest run in `runs` that recorded anything.

    Raises RrfpError if no such run exists (for a path or a name, with the most similar one, if
    any), and UsageError for any other text that begins with `@`.
    """
    if named is None:
        return _newest()
    if named.exists():
        return named
    if str(named).startswith("@"):
        return _counted(str(named))
    below = RUNS / named
    if ".." not in named.parts and below.exists():
        return below
    known = did_you_mean(str(named), _known(named)) or "; 'rrfp runs' lists the runs"
    raise RrfpError(f"there is no run or trace at {named}{known}")


def _newest() -> Path:
    """The newest run in `runs` that recorded anything; unreadable ones are skipped. Raises
    RrfpError if no run did."""
    for path in runs_in():
        with suppress(OSError):  # another user's
            if RunDir(path).sessions():
                return path
    raise RrfpError(f"there is no run yet in {RUNS}; make one with 'rrfp train'")


def _counted(text: str) -> Path:
    """The run that `@-N` names, the N-th newest in `runs`. Raises UsageError for any other text,
    and RrfpError if there are fewer runs."""
    match = _COUNTED.fullmatch(text)
    if match is None:
        raise UsageError(
            f"'{text}' counts no runs; write @-1 for the newest one in {RUNS}, @-2 for the one "
            "before"
        )
    found = runs_in()
    if not found:
        raise RrfpError(f"there is no {text}, as {RUNS} holds no run; make one with 'rrfp train'")
    if len(found) < int(match[1]):
        num = "1 run" if len(found) == 1 else f"{len(found)} runs"
        raise RrfpError(f"there is no {text} among the {num} in {RUNS}; 'rrfp runs' lists them")
    return found[int(match[1]) - 1]


def _known(named: Path) -> Iterable[str]:
    """Names to suggest instead of `named`: all runs by name and by path, and all files and
    directories next to it."""
    for path in runs_in():
        yield from (path.name, str(path))
    with suppress(OSError):
        yield from map(str, named.parent.iterdir())


def resolve_session(path: Path) -> Path:
    """The trace of the last session of the ended run in this directory. Merges the session's
    records if needed. Raises RrfpError if it recorded nothing or is still being recorded."""
    # Imported late: Perfetto's module is slow to import.
    from rrfp.trace.merge import encode_session

    sessions = RunDir(path).sessions()
    if not sessions or not encode_session(sessions[-1]):
        raise RrfpError(why_without_records(RunDir(path)))
    return sessions[-1].trace


def resolve_trace(path: Path | None) -> Path:
    """The trace of a run, given by a name for `find_run` (None: the newest) or as the trace file
    itself.

    Merges the run's records if its launcher died before it could, and joins the sessions of a
    resumed run. If others may replace files in the run's directory or its records, it writes to a
    temporary directory instead. Raises RrfpError if there is no trace, if the run is still going,
    or if sessions cannot be joined.
    """
    path = find_run(path)
    if path.is_file():
        return path
    if not path.is_dir():
        raise RrfpError(f"{path} is not a file; save the trace to one first, it is read twice")
    run = RunDir(path)
    sessions = run.sessions()
    if sessions == [run] and run.trace.exists():
        return run.trace
    if not sessions:
        raise RrfpError(why_without_records(run))
    # Imported late: Perfetto's module is slow to import, and most runs are already merged.
    from rrfp.trace.merge import encode_run

    if is_own(path) and all(is_own(each.records) for each in sessions if each.records.exists()):
        return encode_run(path)
    return encode_run(path, _elsewhere(run))


def _elsewhere(run: RunDir) -> Path:
    """Make a temporary directory with links to the run's run.json and metrics.jsonl. It is removed
    when this process ends."""
    path = Path(tempfile.mkdtemp(prefix="rrfp-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    for file in (run.run_json, run.metrics):
        (path / file.name).symlink_to(file.absolute())
    return path


def encode_apart(path: Path) -> None:
    """Make the trace of a run in a subprocess, and wait for it, for a process that must not import
    perfetto or protobuf. Raises RrfpError if it cannot start, or if it fails, with the message in
    the last line of its stderr."""
    root = str(Path(rrfp.__file__).parent.parent)
    program = (
        f"import sys; sys.path[:] = {[root, *sys.path]!r}; from pathlib import Path; "
        "from rrfp.trace.merge import encode_run; encode_run(Path(sys.argv[1]))"
    )
    # Isolated mode, so that it does not run start-up code of the job's processes.
    command = [sys.executable, "-I", "-c", program, str(path)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    except (OSError, ValueError) as error:
        raise RrfpError(f"the process that makes it cannot start: {reason_of(error)}") from None
    if done.returncode != 0:
        # The last line of a traceback has the type and the message of the exception.
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        reason = last.partition(": ")[2] or last or "it says nothing"
        raise RrfpError(
            f"the process that makes it ended with exit code {done.returncode}: {reason}"
        )
