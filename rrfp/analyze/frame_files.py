"""The cache of a trace's tables beside it, so that the second command on a trace is instant.

The tables are Parquet files in `<trace>.frames/<digest of the trace>/`, with notes of the results
of replays. A changed trace has another digest, and its tables replace the old ones. Damaged tables
and notes do not match their seals and are replaced. If the directory is not writable, the tables
are made for each command.
"""

import hashlib
import json
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import polars as pl
from polars.exceptions import PolarsError

import rrfp
from rrfp.analyze.frames import PLACE, SCHEMAS, Frames, choose_steps, run_frame
from rrfp.errors import RrfpError
from rrfp.strict_json import parsed
from rrfp.trace.perfetto.format import FIELDS
from rrfp.trace.perfetto.protobuf import foreign
from rrfp.trace.records import EVALUATION, STEP, evaluation_step
from rrfp.trace.safe_files import (
    create_new,
    is_own,
    make_directory,
    open_regular,
    open_whole,
    read_small,
    write_whole,
)

if TYPE_CHECKING:
    from rrfp.analyze.findings import Diagnosis
    from rrfp.trace.perfetto.reader import Table, TraceReader


# The tables of a run as Parquet files in a folder, one or more files for each table.


_NUM_ROWS_OF_A_FILE = 500_000
_RUN = "run.parquet"
PARQUET_FILES = "*.parquet"
"""The pattern of all files of tables."""


def read_tables(folder: Path) -> Frames:
    """Return the tables that `write_tables` wrote to a folder; only that of the ranks is read now.

    The others are read on first use. May raise OSError and PolarsError.
    """
    # A path may contain wildcard characters, which have no meaning here.
    run = pl.read_parquet(folder / _RUN, glob=False, hive_partitioning=False)
    sources = run.lazy().select("source", *PLACE)
    return Frames(
        run.drop("source"),
        {
            name: pl.scan_parquet(
                sorted(folder.glob(f"{name}-*.parquet")), glob=False, hive_partitioning=False
            )
            .join(sources, on="source", maintain_order="left")
            .select(*schema)
            for name, schema in SCHEMAS.items()
        },
    )


def write_tables(reader: "TraceReader", folder: Path) -> None:
    """Convert a trace into files of tables, with a bounded number of rows in memory.

    Raises RrfpError for a file that is not a complete trace, FileExistsError if the folder has such
    files, and OSError.
    """
    writers = {name: _TableWriter(name, folder, reader) for name in SCHEMAS}
    for tables in reader.tables():
        for name, table in tables.items():
            writers[name].add(table)
    reader.check_whole()
    for writer in writers.values():
        writer.write()
    run = run_frame(iter(reader.infos.values()), reader.settings).with_columns(
        pl.Series("source", list(reader.infos), pl.Int64)
    )
    with create_new(folder / _RUN) as file:
        run.write_parquet(file)


def _file(folder: Path, name: str, number: int) -> Path:
    """Path of a file of a table: `task-00003.parquet`."""
    return folder / f"{name}-{number:05}.parquet"


class _TableWriter:
    """Writes the rows of one table to one or more files."""

    def __init__(self, name: str, folder: Path, reader: "TraceReader") -> None:
        self._name = name
        self._folder = folder
        self._reader = reader
        self._schema = {"source": pl.Int64} | {
            column: dtype for column, dtype in SCHEMAS[name].items() if column not in PLACE
        }
        self._tables: list[Table] = []
        self._num_rows = 0
        self._num_files = 0

    def add(self, table: "Table") -> None:
        """Add rows; write a file as soon as 500,000 are pending."""
        self._tables.append(table)
        self._num_rows += len(table["source"])
        if self._num_rows >= _NUM_ROWS_OF_A_FILE:
            self.write()

    def write(self) -> None:
        """Write the pending rows to a new file.

        Without rows only the first file is written, empty.
        """
        if not self._tables and self._num_files:
            return
        texts = pl.Series(self._reader.texts, dtype=pl.String)
        frame = pl.concat(
            [pl.DataFrame(table) for table in self._tables]
            or [pl.DataFrame(schema=dict.fromkeys(self._schema, pl.Int64))]
        )
        for name, is_text in FIELDS[self._name]:
            if is_text:
                frame = frame.with_columns(texts.gather(frame[name]).alias(name))
        with create_new(_file(self._folder, self._name, self._num_files)) as file:
            frame.select(*self._schema).write_parquet(file, compression="lz4")
        self._num_files += 1
        self._tables, self._num_rows = [], 0


# Seals of cached files: a damaged file counts as missing.
#
# A seal holds digests, not secrets. It detects that a disk, a copy or an editor changed a file, and
# that a file was moved. It does not authenticate the writer.


_SEAL = "seal.json"


def seal(folder: Path, place: str) -> None:
    """Write the digests of all files in a folder to `seal.json`; `place` is its final name.

    May raise OSError.
    """
    digests = {file.name: _digest(file) for file in folder.iterdir()}
    write_whole(folder / _SEAL, sealed(place, json.dumps(digests).encode()))


def is_sealed(folder: Path, place: str, pattern: str) -> bool:
    """Return whether the files that match the pattern are exactly the sealed ones, unchanged.

    False for a missing or damaged seal, or one of another place.
    """
    try:
        digests = parsed(unsealed(place, read_small(folder / _SEAL)))
        found = {file.name: _digest(file) for file in folder.glob(pattern)}
    except (OSError, ValueError):
        return False
    return bool(found == digests)


def sealed(place: str, content: bytes) -> bytes:
    """Return content with its seal in front."""
    return f"{_digest_of(place, content)}\n".encode() + content


def unsealed(place: str, data: bytes) -> bytes:
    """Return content without its seal. Raises ValueError if the seal does not match."""
    digest, _, content = data.partition(b"\n")
    if digest != _digest_of(place, content).encode():
        raise ValueError("the seal does not fit")
    return content


def _digest(file: Path) -> str:
    """Return the SHA-256 of a file's content in hex. May raise OSError."""
    with open_regular(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest_of(place: str, content: bytes) -> str:
    """Return the SHA-256 of content and its place in hex."""
    return hashlib.sha256(f"{place}\n".encode() + content).hexdigest()


T = TypeVar("T")

_LAYOUT = 7
"""The version of tables, in the folder's name; a new number invalidates all tables."""
_NOTES = 7
"""The version of notes, in their names; raise it when the same trace would get other notes."""
_FOLDER = re.compile(r"[0-9a-f]{32}-\d+")

_TRACE_BEGINS = b"\n"
"""The first byte of a trace: the tag of its first packet."""

_temporary: list[tempfile.TemporaryDirectory[str]] = []
"""Folders for traces in directories that are not writable; removed at exit."""


def load_frames(
    trace: Path,
    steps: range | None = None,
    *,
    evaluations: bool = False,
    with_warm_up: bool = False,
) -> Frames:
    """Load the cached tables of a trace for the steps that `frames.choose_steps` selects.

    Missing tables are made. Raises RrfpError for a file that is missing, empty, truncated or not a
    trace of a run, or if tables cannot be written, and UsageError as `choose_steps` does.
    """
    whole = CachedTrace(trace).frames()
    return choose_steps(whole, steps, evaluations=evaluations, with_warm_up=with_warm_up)


class CachedTrace:
    """A trace with cached tables, which are made if they are missing.

    Raises RrfpError as `load_frames` does.
    """

    def __init__(self, trace: Path) -> None:
        self._folder = _folder_of(trace)

    def frames(self) -> Frames:
        """Return the tables of all steps, including evaluations."""
        return read_tables(self._folder)

    def structural(self, steps: range | None = None) -> tuple[list[float], str]:
        """Return the structural part of the bubble by pipeline rank, as shares of the window.

        If it has none of `steps` or cannot be replayed, the list is empty and the text is the
        reason. Cached in a note.
        """

        def find() -> tuple[list[float], str]:
            # The simulator is slow to import and needed only once for a trace.
            from rrfp.analyze.bubbles import structural_of

            try:
                frames = choose_steps(self.frames(), steps)
                return [part.structural for part in structural_of(frames).ranks], ""
            except RrfpError as error:
                return [], str(error)

        def read(note: Any) -> tuple[list[float], str]:
            shares, why = note
            return shares, why

        return self._noted(f"structural{_suffix_of(steps)}", find, read, list)

    def diagnosis(self, steps: range | None = None, *, evaluations: bool = False) -> "Diagnosis":
        """Return the causes of long steps, cached in a note.

        Raises RrfpError as `diagnose` does.
        """
        from rrfp.analyze.findings import Diagnosis, diagnose

        name = f"findings{'-evaluations' if evaluations else ''}{_suffix_of(steps)}"

        def find() -> Diagnosis:
            return diagnose(choose_steps(self.frames(), steps, evaluations=evaluations))

        return self._noted(name, find, Diagnosis.of_note, Diagnosis.as_note)

    def _noted(
        self,
        name: str,
        find: Callable[[], T],
        read: Callable[[Any], T],
        write: Callable[[T], object],
    ) -> T:
        """Return a result from its note beside the tables, or compute it and write the note.

        An unreadable note is replaced; if no note can be written, that is ignored.
        """
        path = self._folder / f"{name}-{rrfp.__version__}-{_NOTES}.json"
        place = f"{self._folder.name}/{path.name}"
        # A foreign file with a valid seal may have any content.
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            return read(parsed(unsealed(place, read_small(path))))
        found = find()
        with suppress(OSError):
            write_whole(path, sealed(place, json.dumps(write(found)).encode()))
        return found


def _suffix_of(steps: range | None) -> str:
    """Format a range of steps for the name of a note: `-3-10`; empty for None."""
    return "" if steps is None else f"-{steps.start}-{steps.stop}"


def _folder_of(trace: Path) -> Path:
    """Return the folder of a trace's tables, after making them if they are missing or damaged.

    It is beside the trace, or temporary (removed at exit) if that directory is not this user's own
    or not writable. Raises RrfpError if the file is not a complete readable trace, or tables cannot
    be written.
    """
    try:
        with open_regular(trace) as file:
            if file.read(1) not in (_TRACE_BEGINS, b""):
                # Checked before the digest, because the file may have any size.
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
    """Make and seal the tables in their folder, and remove those of an earlier trace.

    Files appear all at once. Tables that another process made meanwhile are kept.
    """
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
            # Another process may have made them in the meantime.
            if not _is_whole(folder):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _make(trace: Path, folder: Path) -> None:
    """Convert a trace into files of tables in an existing folder."""
    # The reader of traces is also slow to import.
    from rrfp.trace.perfetto.reader import TraceReader

    write_tables(TraceReader(trace), folder)


def _is_whole(folder: Path) -> bool:
    """Return whether all tables exist and match their seal."""
    return is_sealed(folder, folder.name, PARQUET_FILES)


# The tables of a run as files for other programs.


TABLES = ("tasks", "waits", "messages", "agreements", "phases", "counters", "run")
"""The exported tables, by attribute of `rrfp.analyze.frames.Frames`."""


def export_tables(frames: Frames, folder: Path) -> Iterator[tuple[Path, int]]:
    """Write each table as a Parquet file, and yield the file with its number of rows.

    Makes the folder and replaces files. After `step` comes a column `evaluation`: the number of the
    evaluation, null in training steps.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in TABLES:
        file = folder / f"{name}.parquet"
        frame = _with_evaluations(getattr(frames, name))
        with open_whole(file) as out:
            frame.write_parquet(out)
        yield file, len(frame)


def _with_evaluations(frame: pl.DataFrame) -> pl.DataFrame:
    """Return a copy with the number of the evaluation in a column after `step`.

    A table without steps is returned as it is.
    """
    if STEP not in frame.columns:
        return frame
    number = evaluation_step(0) - pl.col(STEP)
    evaluation = pl.when(number >= 0).then(number).alias(EVALUATION)
    place = frame.columns.index(STEP) + 1
    return frame.clone().insert_column(place, frame.select(evaluation).to_series())
