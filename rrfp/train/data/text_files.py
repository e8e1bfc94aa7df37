"""Reads texts: plain text, JSONL, Parquet, folders of them, and Python's standard library.

A text is a stream, so that a long file does not have to fit in memory.
"""

import io
import json
import os
import re
import sysconfig
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from rrfp.errors import UsageError, first_line
from rrfp.system import is_of_too_many

_MAX_LIBRARY_BYTES = 8_000_000
"""The most that is read of the standard library, so that a run starts at once."""

_LIBRARY_SKIPS = frozenset(
    {"__pycache__", "dist-packages", "idlelib", "site-packages", "test", "tests", "turtledemo"}
)

_DEFINITION = re.compile(rb"\n\n+(?=[ \t]*(?:async def|def|class|@))")
"""Separates the definitions of a Python file. Each is a document, so that lengths vary as in real
text."""

_IMAGE_SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)

_ROWS = 1000
"""Rows of Parquet in memory at once, besides those that polars reads ahead."""


class Text(NamedTuple):
    """The text of a document."""

    place: str
    """The file with the line or row, for errors."""
    stream: BinaryIO
    """The bytes of the text; valid until the next document is read."""


def text_files(path: Path | None) -> list[Path]:
    """List the files of --data, in the same order on every machine; None means Python's standard
    library. Hidden files of a folder are skipped. Raise UsageError for a pipe or a device, and in a
    folder for images, .bin/.idx files and links to outside of it. A single missing file is
    listed."""
    if path is None:
        return list(_library_files())
    if not path.is_dir():
        check_regular_file(path)
        return [path]
    files = []
    for file in files_under(path):
        check_link_inside(file, path)
        if file.is_dir():
            continue
        if file.suffix in (".bin", ".idx"):
            raise UsageError(
                f"the folder {path} holds {file.name}; give --data the .bin/.idx pair itself"
            )
        if file.suffix.lower() in _IMAGE_SUFFIXES:
            raise UsageError(
                f"the folder {path} holds the image {file.name} and the model takes text; add "
                "--model vlm"
            )
        check_regular_file(file)
        files.append(file)
    return files


def read_texts(path: Path | None, text_key: str) -> Iterator[Text]:
    """Yield the documents of `text_files`, some perhaps empty: a line of JSONL, a row of Parquet, a
    definition of the standard library, else a file. `text_key` is the field of JSONL and the column
    of Parquet. Raise UsageError, naming the place, for a document that cannot be read."""
    for file in text_files(path):
        try:
            if path is None:
                yield from _definitions(file)
            elif file.suffix == ".jsonl":
                yield from _json_texts(file, text_key)
            elif file.suffix == ".parquet":
                yield from _parquet_texts(file, text_key)
            else:
                with file.open("rb") as stream:
                    yield Text(str(file), stream)
        except OSError as error:
            raise UsageError(
                f"cannot read the data {file}: {error.strerror or error}; check --data"
            ) from None


def check_regular_file(path: Path) -> None:
    """Raise UsageError for anything but a regular file: a pipe or a device may never end and can be
    read only once. A missing file passes."""
    if path.exists() and not path.is_file():
        raise UsageError(f"the data {path} is not a regular file; save its text to one first")


def check_link_inside(path: Path, folder: Path) -> None:
    """Raise UsageError for a link to a file outside of the user's folder, which may be no data.
    Anything but a link passes."""
    if not path.is_symlink():
        return
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(os.path.realpath(folder)):
        raise UsageError(
            f"the folder {folder} holds the link {path.relative_to(folder)} to {target}, which is "
            "outside of it; copy it into the folder, or remove the link"
        )


def files_under(folder: Path, skips: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield all files and links below a folder, except hidden ones and those in a hidden folder or
    one named in `skips`, in the same order on every machine. Links to folders are yielded, not
    followed. Raise UsageError for a folder that cannot be read."""
    for where, folders, files in os.walk(folder, onerror=_refuse):
        links = {name for name in folders if Path(where, name).is_symlink()}
        folders[:] = sorted(
            name for name in folders if name not in skips and not name.startswith(".")
        )
        for name in sorted({*files, *links}):
            if not name.startswith("."):
                yield Path(where, name)


def _refuse(error: OSError) -> NoReturn:
    """Raise UsageError for a folder that cannot be read, or `error` itself if too many files are
    open."""
    if is_of_too_many(error):
        raise error
    raise UsageError(f"cannot read the data {error.filename}: {error.strerror}; check --data")


def parse_json_line(
    line: bytes, place: str, text_key: str = "text", *, names_key: bool = False
) -> tuple[dict[str, Any], bytes]:
    """Return the fields of a line of JSON, and the bytes of its text. Raise UsageError, naming the
    place, if it is not UTF-8 or not JSON, or if the text is missing; then the error lists up to 12
    existing fields, and with `names_key` its advice mentions --text-key."""
    try:
        value = json.loads(line)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{place}: not UTF-8 text ({error.reason} at byte {error.start}); convert the file"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: not JSON ({error}); correct or remove the line") from None
    text = value.get(text_key) if isinstance(value, dict) else None
    if not isinstance(text, str):
        names = [*value][:12] if isinstance(value, dict) else []
        fields = ", ".join(f"'{name:.40}'" for name in names)
        has = f", and it has {fields}" if fields else ""
        other = "name another with --text-key, or " if names_key and has else ""
        raise UsageError(f"{place}: no string field '{text_key}'{has}; {other}give each line one")
    return value, text.encode("utf-8", errors="surrogatepass")


def _json_texts(path: Path, text_key: str) -> Iterator[Text]:
    """Yield the texts of a JSONL file's lines; blank lines are skipped. Raise UsageError for an
    invalid line."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                place = f"{path}, line {number}"
                yield Text(
                    place, io.BytesIO(parse_json_line(line, place, text_key, names_key=True)[1])
                )


def _parquet_texts(path: Path, text_key: str) -> Iterator[Text]:
    """Yield the texts of a Parquet file's rows. Raise UsageError if the column is missing or not
    text, a row has none, or the file is invalid or claims more rows than bytes."""
    # Imported late: only Parquet needs it.
    import polars as pl

    try:
        table = pl.scan_parquet(path, glob=False, hive_partitioning=False)
        columns = table.collect_schema()
        if text_key not in columns:
            raise UsageError(
                f"{path} has no column '{text_key}'; name one of {', '.join(columns)} with "
                "--text-key"
            )
        if columns[text_key] != pl.String:
            raise UsageError(
                f"the column '{text_key}' of {path} holds {columns[text_key]} and not text; name "
                "another with --text-key"
            )
        num_rows, num_bytes = table.select(pl.len()).collect().item(), path.stat().st_size
        # A small file can claim billions of equal rows.
        if num_rows > num_bytes:
            raise UsageError(
                f"{path} claims {num_rows} rows in {num_bytes} bytes, so nearly all would be the "
                "same text; give --data another file"
            )
        batches = table.select(text_key).collect_batches(chunk_size=_ROWS)
        rows = chain.from_iterable(batch[text_key] for batch in batches)
        for number, text in enumerate(rows, start=1):
            place = f"{path}, row {number}"
            if text is None:
                raise UsageError(f"{place}: no text; fill it in or remove the row")
            yield Text(place, io.BytesIO(text.encode()))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise UsageError(
            f"{path} cannot be read as Parquet ({first_line(str(error))}); write it again"
        ) from None


def _library_files() -> Iterator[Path]:
    """Yield Python files of the standard library, without tests and installed packages, up to the
    first that would make them more than 8 MB in all."""
    num_bytes = 0
    for file in files_under(Path(sysconfig.get_path("stdlib")), _LIBRARY_SKIPS):
        if file.suffix != ".py":
            continue
        num_bytes += file.stat().st_size
        if num_bytes > _MAX_LIBRARY_BYTES:
            return
        yield file


def _definitions(file: Path) -> Iterator[Text]:
    """Yield the parts of a Python file, split at the blank lines before each definition, as
    documents."""
    for text in _DEFINITION.split(file.read_bytes()):
        yield Text(str(file), io.BytesIO(text))
