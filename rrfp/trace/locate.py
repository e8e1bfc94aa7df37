"""Finds the trace of a run that a user names."""

from pathlib import Path

from rrfp.errors import RrfpError
from rrfp.trace.rundir import LATEST, RunDir


def resolve_trace(path: Path | None) -> Path:
    """The trace of a run, given its directory or the trace file itself; None means the newest run.

    Merges the run's records if its launcher died before it could. Raises RrfpError if there is no
    trace.
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
    if run.trace.exists():
        return run.trace
    if not run.records.is_dir():
        raise RrfpError(f"{path} has no {run.trace.name}; was it trained with --no-trace?")
    # Imported late: Perfetto's module is slow to import, and most runs are already merged.
    from rrfp.trace.merge import encode_run

    return encode_run(path)
