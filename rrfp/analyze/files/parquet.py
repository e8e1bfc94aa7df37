"""The tables of a run as Parquet files: in one folder, one or more files a table."""

from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from rrfp.analyze.frames import PLACE, SCHEMAS, Frames, run_frame
from rrfp.trace.files.whole_file import create_new
from rrfp.trace.perfetto.format import FIELDS

if TYPE_CHECKING:
    from rrfp.trace.perfetto.reader import Table, TraceReader

_NUM_ROWS_OF_A_FILE = 500_000
_RUN = "run.parquet"
TABLES = "*.parquet"
"""All files of the tables in their folder."""


def read_tables(folder: Path) -> Frames:
    """The tables that `write_tables` has written there; each is read when it is first asked for.

    May raise OSError and PolarsError.
    """
    # A path may hold any character; none of them is a wildcard.
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
    """Read a trace into files of tables, with a bounded number of rows in memory."""
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
    return folder / f"{name}-{number:05}.parquet"


class _TableWriter:
    """Writes the rows of one table, several files if there are many."""

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
        self._tables.append(table)
        self._num_rows += len(table["source"])
        if self._num_rows >= _NUM_ROWS_OF_A_FILE:
            self.write()

    def write(self) -> None:
        """Write what was added since the last file; the first file is written even if empty."""
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
