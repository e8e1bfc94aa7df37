"""The tables of a trace, kept beside it, so that the second command on it is instant.

They lie in `<trace>.frames/<digest of the trace>/` as Parquet files, with notes of what was found
in replays. A trace that has changed has another digest, and its new tables replace the old ones;
tables and notes that were damaged no longer fit their seals, and are made anew. If nothing can be
written beside a trace, the tables are made anew each time.
"""

import hashlib
import json
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from polars.exceptions import PolarsError

import rrfp
from rrfp.analyze.chosen import choose
from rrfp.analyze.files.parquet import TABLES, read_tables, write_tables
from rrfp.analyze.files.seal import is_sealed, seal, sealed, unsealed
from rrfp.analyze.frames import Frames
from rrfp.errors import RrfpError
from rrfp.json_text import parsed
from rrfp.trace.files.reading import open_regular, read_small
from rrfp.trace.files.whole_file import is_own, make_directory, write_whole
from rrfp.trace.perfetto.event_columns import foreign

if TYPE_CHECKING:
    from rrfp.analyze.findings.diagnosis import Diagnosis

T = TypeVar("T")

_LAYOUT = 7
"""Part of the folder's name; a new number makes every table anew."""
_NOTES = 6
"""Part of the notes' names; to be raised when the same trace would get other notes."""
_FOLDER = re.compile(r"[0-9a-f]{32}-\d+")

_TRACE_BEGINS = b"\n"
"""The tag of a trace's first packet."""

_temporary: list[tempfile.TemporaryDirectory[str]] = []
"""Folders of traces beside which nothing can be written; removed when the process ends."""


def load_frames(
    trace: Path,
    steps: range | None = None,
    *,
    evaluations: bool = False,
    with_warm_up: bool = False,
) -> Frames:
    """The tables of a trace's steps that train, or of its evaluations. `steps` chooses among these
    by number; None takes all but the warm-up (`rrfp.analyze.chosen.warm_up_of`), or with
    `with_warm_up` all.

    Raises RrfpError for a file that is missing, empty, cut off, or not a trace of a run, and
    UsageError when the run has none of the steps asked for.
    """
    whole = CachedTrace(trace).frames()
    return choose(whole, steps, evaluations=evaluations, with_warm_up=with_warm_up)


class CachedTrace:
    """A trace whose tables lie beside it; they are made if they do not yet.

    Raises RrfpError as `load_frames` does.
    """

    def __init__(self, trace: Path) -> None:
        self._folder = _folder_of(trace)

    def frames(self) -> Frames:
        """The tables of all steps, evaluations among them."""
        return read_tables(self._folder)

    def structural(self, steps: range | None = None) -> tuple[list[float], str]:
        """The structural part of the bubble of these steps that train: by pipeline rank, as shares
        of the window. Empty when the run cannot be replayed; the text then says why."""

        def find() -> tuple[list[float], str]:
            # The simulator is slow to import, and a trace needs it once.
            from rrfp.analyze.structural_steps import structural_of

            try:
                frames = choose(self.frames(), steps)
                return [part.structural for part in structural_of(frames).ranks], ""
            except RrfpError as error:
                return [], str(error)

        def read(note: Any) -> tuple[list[float], str]:
            shares, why = note
            return shares, why

        return self._noted(f"structural{_told(steps)}", find, read, list)

    def diagnosis(self, steps: range | None = None, *, evaluations: bool = False) -> "Diagnosis":
        """What makes these steps long. Raises RrfpError as `diagnose` does."""
        from rrfp.analyze.findings.diagnosis import Diagnosis, diagnose

        name = f"findings{'-evaluations' if evaluations else ''}{_told(steps)}"

        def find() -> Diagnosis:
            return diagnose(choose(self.frames(), steps, evaluations=evaluations))

        return self._noted(name, find, Diagnosis.of_note, Diagnosis.as_note)

    def _noted(
        self,
        name: str,
        find: Callable[[], T],
        read: Callable[[Any], T],
        write: Callable[[T], object],
    ) -> T:
        """What was found before, from its note beside the tables, or what is found and noted now.
        A note that cannot be read is made anew."""
        path = self._folder / f"{name}-{rrfp.__version__}-{_NOTES}.json"
        place = f"{self._folder.name}/{path.name}"
        # A note of another's making may hold anything under its seal.
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            return read(parsed(unsealed(place, read_small(path))))
        found = find()
        with suppress(OSError):
            write_whole(path, sealed(place, json.dumps(write(found)).encode()))
        return found


def _told(steps: range | None) -> str:
    return "" if steps is None else f"-{steps.start}-{steps.stop}"


def _folder_of(trace: Path) -> Path:
    """The folder of a trace's tables, which are made if they are not there yet."""
    try:
        with open_regular(trace) as file:
            if file.read(1) not in (_TRACE_BEGINS, b""):
                # Before its digest: the file may be of any size.
                raise foreign(trace)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:32]
    except OSError as error:
        raise RrfpError(f"the trace {trace} could not be read: {error.strerror}") from error
    folder = trace.with_name(f"{trace.name}.frames") / f"{digest}-{_LAYOUT}"
    if is_own(trace.parent) and (is_own(folder.parent) or not folder.parent.exists()):
        if _is_whole(folder):
            return folder
        with suppress(OSError, PolarsError):
            return _make_beside(trace, folder)
    _temporary.append(tempfile.TemporaryDirectory(prefix="rrfp-"))
    elsewhere = Path(_temporary[-1].name)
    try:
        _make(trace, elsewhere)
    except (OSError, PolarsError) as error:
        raise RrfpError(
            f"the tables of {trace} could be written neither to {folder.parent} nor to "
            f"{elsewhere}: {error}"
        ) from error
    return elsewhere


def _make_beside(trace: Path, folder: Path) -> Path:
    """Make the tables in their folder, in the place of those of an earlier trace."""
    make_directory(folder.parent)
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    partial.mkdir()
    try:
        _make(trace, partial)
        seal(partial, folder.name)
        for old in folder.parent.iterdir():
            if _FOLDER.fullmatch(old.name) and (old != folder or not _is_whole(folder)):
                shutil.rmtree(old, ignore_errors=True)
        try:
            partial.replace(folder)
        except OSError:
            # Another process may have made them meanwhile.
            if not _is_whole(folder):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _make(trace: Path, folder: Path) -> None:
    # So is the reader of traces.
    from rrfp.trace.perfetto.reader import TraceReader

    write_tables(TraceReader(trace), folder)


def _is_whole(folder: Path) -> bool:
    """Whether all tables are there, as they were made."""
    return is_sealed(folder, folder.name, TABLES)
