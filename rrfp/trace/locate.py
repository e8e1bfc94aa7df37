"""Finds the trace of a run that a user names."""

from pathlib import Path

from rrfp.errors import RrfpError
from rrfp.trace.rundir import LATEST, RunDir


def resolve_session(path: Path) -> Path:
    """The trace of the last session of a run that has ended, given its directory. Merges the
    session's records. Raises RrfpError if it recorded nothing."""
    # Imported late: Perfetto's module is slow to import.
    from rrfp.trace.merge import encode_session

    sessions = RunDir(path).sessions()
    if not sessions or not encode_session(sessions[-1]):
        raise RrfpError(f"no rank of the run in {path} has recorded anything")
    return sessions[-1].trace


def resolve_trace(path: Path | None) -> Path:
    """The trace of a run, given its directory or the trace file itself; None means the newest run.

    Merges the run's records if its launcher died before it could, and joins the sessions of a run
    that was resumed. Raises RrfpError if there is no trace, or sessions cannot be joined.
    """
    if path is None:
        if not LATEST.exists():
            raise RrfpError(
                f"there is no run yet ({LATEST} is missing); make one with 'rrfp train'"
            )
        path = LATEST
    if not path.exists():
        raise RrfpError(f"there is no run or trace at {path}")
    if path.is_file():
        return path
    if not path.is_dir():
        raise RrfpError(f"{path} is not a file; save the trace to one first, it is read twice")
    run = RunDir(path)
    sessions = run.sessions()
    if sessions == [run] and run.trace.exists():
        return run.trace
    if not sessions:
        raise RrfpError(f"{path} has no {run.trace.name}; was it trained with --no-trace?")
    # Imported late: Perfetto's module is slow to import, and most runs are already merged.
    from rrfp.trace.merge import encode_run

    return encode_run(path)
