"""The tables of a run as files for other programs."""

from collections.abc import Iterator
from pathlib import Path

import polars as pl

from rrfp.analyze.frames import Frames
from rrfp.trace.files.whole_file import open_whole
from rrfp.trace.steps import EVALUATION, STEP, evaluation_step

TABLES = ("tasks", "waits", "messages", "agreements", "phases", "counters", "run")
"""The tables that are exported, by their names in `rrfp.analyze.frames.Frames`."""


def export_tables(frames: Frames, folder: Path) -> Iterator[tuple[Path, int]]:
    """Write each table as a Parquet file, and yield the file with its number of rows.

    Beside `step` a table gets `evaluation`: the number of the evaluation, null in training steps.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in TABLES:
        file = folder / f"{name}.parquet"
        frame = _with_evaluations(getattr(frames, name))
        with open_whole(file) as out:
            frame.write_parquet(out)
        yield file, len(frame)


def _with_evaluations(frame: pl.DataFrame) -> pl.DataFrame:
    if STEP not in frame.columns:
        return frame
    number = evaluation_step(0) - pl.col(STEP)
    evaluation = pl.when(number >= 0).then(number).alias(EVALUATION)
    return frame.insert_column(frame.columns.index(STEP) + 1, frame.select(evaluation).to_series())
