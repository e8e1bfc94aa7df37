"""The tables of a trace, kept beside it, so that the second look is instant.

They lie in `<trace>.frames/<digest of the trace>/` as Parquet files, some of each table, with the
replays of its steps; a trace that has changed has another digest, and new tables replace the old
ones. Where nothing can be written beside a trace they are made anew each time.
"""

import hashlib
import json
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from rrfp.analyze.frames import Frames
from rrfp.analyze.parquet import read_tables, write_tables
from rrfp.errors import RrfpError

_LAYOUT = 1
"""Part of the folder's name; another number makes every table anew."""

_temporary: list[tempfile.TemporaryDirectory[str]] = []
"""Folders of traces beside which nothing can be written; removed when the process ends."""


def load_frames(trace: Path, steps: range | None = None) -> Frames:
    """The tables of a trace; of these steps, None being all.

    Raises RrfpError for a file that is missing, empty, cut off, foreign, or not of a run, and
    UsageError when the run has none of the steps asked for.
    """
    return CachedTrace(trace).frames(steps)


class CachedTrace:
    """A trace whose tables lie beside it; they are made where they do not.

    Raises RrfpError as `load_frames` does.
    """

    def __init__(self, trace: Path) -> None:
        self._folder = _folder_of(trace)

    def frames(self, steps: range | None = None) -> Frames:
        """The tables of these steps, None being all.

        Raises UsageError when the run has none of them.
        """
        frames = read_tables(self._folder)
        return frames if steps is None else frames.of_steps(steps)

    def structural(self, steps: range | None = None) -> tuple[list[float], str]:
        """The structural part of the bubble by pipeline rank, as shares of the window; none where
        the run cannot be replayed, and then why."""
        chosen = "" if steps is None else f"-{steps.start}-{steps.stop}"
        path = self._folder / f"structural{chosen}.json"
        if path.exists():
            shares, why = json.loads(path.read_text())
            return shares, why
        # The second look does without the simulator, which is slow to import.
        from rrfp.analyze.structural import structural_of

        try:
            shares = [part.structural for part in structural_of(self.frames(steps)).ranks]
            why = ""
        except RrfpError as error:
            shares, why = [], str(error)
        with suppress(OSError):
            path.write_text(json.dumps([shares, why]))
        return shares, why


def _folder_of(trace: Path) -> Path:
    """The folder of a trace's tables, which are made where they are not there yet."""
    try:
        with trace.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:32]
    except OSError as error:
        raise RrfpError(f"the trace {trace} could not be read: {error.strerror}") from error
    folder = trace.with_name(f"{trace.name}.frames") / f"{digest}-{_LAYOUT}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=folder.parent))
    except OSError:
        _temporary.append(tempfile.TemporaryDirectory(prefix="rrfp-"))
        partial = folder = Path(_temporary[-1].name)
    # The second look needs no reader of traces either.
    from rrfp.trace.perfetto_reader import TraceReader

    try:
        write_tables(TraceReader(trace), partial)
        if partial != folder:
            _put(partial, folder)
    except OSError as error:
        raise RrfpError(
            f"the tables of {trace} could not be written to {partial}: {error.strerror}"
        ) from error
    finally:
        if partial != folder:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _put(partial: Path, folder: Path) -> None:
    """Let the new tables take the place of those of an earlier trace."""
    for old in folder.parent.iterdir():
        if old not in (partial, folder):
            shutil.rmtree(old, ignore_errors=True)
    if not folder.is_dir():
        partial.replace(folder)
