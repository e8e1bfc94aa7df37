"""The run directory that an import makes."""

from pathlib import Path
from tempfile import TemporaryDirectory

from rrfp.errors import RrfpError
from rrfp.trace.records import Recording
from rrfp.trace.run_files import write_run_files
from rrfp.trace.rundir import RunDir, create_run_dir, update_latest

_HINT = "imported"


def check_run_dir(out: Path, *, force: bool) -> None:
    """Raise UsageError when a run cannot go there. With `force` it may replace another run."""
    if out.exists() and not (force and out.is_dir()):
        create_run_dir(out, force, _HINT)


def write_run(out: Path, recording: Recording, *, force: bool) -> None:
    """Write a recording as a run, whole or not at all; a run that it replaces stays until then.

    Raises RrfpError when the run cannot be written.
    """
    try:
        _write(out, recording, force=force)
    except OSError as error:
        raise RrfpError(f"the run {out} could not be written: {error.strerror}") from error


def _write(out: Path, recording: Recording, *, force: bool) -> None:
    is_new = not out.exists()
    run = create_run_dir(out, force, _HINT) if is_new else RunDir(out)
    try:
        with TemporaryDirectory(prefix=".import-", dir=out) as directory:
            part = RunDir(Path(directory))
            write_run_files(part, recording)
            create_run_dir(out, force=True, hint=_HINT)
            part.run_json.replace(run.run_json)
            part.trace.replace(run.trace)
            update_latest(out.parent)
    finally:
        if is_new and not any(out.iterdir()):
            out.rmdir()
