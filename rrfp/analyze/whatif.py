"""The rows of a what-if report as a table."""

import polars as pl

from rrfp.replay.whatif import WhatIf


def whatif_frame(report: WhatIf) -> pl.DataFrame:
    """A row a change; times in seconds, held activations and bytes by pipeline rank. A hold is a
    text, as `--hold` takes it."""
    rows = [row.as_json() for row in report.rows]
    return pl.DataFrame(
        [row | {"hold": None if row["hold"] is None else str(row["hold"])} for row in rows],
        infer_schema_length=None,
    ).with_columns(
        pl.col("limit").cast(pl.Int64),
        pl.col("hold").cast(pl.String),
        pl.col("peak_held").list.eval(pl.element().cast(pl.String)).list.join(" "),
        pl.col("peak_held_bytes")
        .cast(pl.List(pl.Int64))
        .list.eval(pl.element().cast(pl.String))
        .list.join(" "),
    )
