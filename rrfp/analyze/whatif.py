"""The rows of a what-if report as a table."""

import polars as pl

from rrfp.replay.whatif import WhatIf


def whatif_frame(report: WhatIf) -> pl.DataFrame:
    """A row a change; times in seconds, held activations by pipeline rank."""
    return pl.DataFrame(
        [row.as_json() for row in report.rows], infer_schema_length=None
    ).with_columns(
        pl.col("limit", "hold").cast(pl.Int64),
        pl.col("peak_held").list.eval(pl.element().cast(pl.String)).list.join(" "),
    )
