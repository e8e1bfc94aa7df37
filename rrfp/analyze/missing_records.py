"""What is missing from a trace, so that nobody takes figures of a part for those of the whole."""

from collections.abc import Iterator

import polars as pl

from rrfp.analyze.frames import Frames
from rrfp.errors import numbered
from rrfp.trace.rundir import expected_ranks


def missing_records(frames: Frames) -> Iterator[str]:
    """A sentence for each thing that is missing; `rrfp trace check` looks much closer."""
    missing = sorted(expected_ranks(frames.settings) - set(frames.run["rank"]))
    if missing:
        told = numbered("rank", missing)
        yield f"{told} left no records; figures are of the other {frames.run.height}"
    for rank, num_lost in (
        frames.table("loss").group_by("rank").agg(pl.col("num_lost").sum()).sort("rank").iter_rows()
    ):
        yield f"rank {rank} lost {num_lost} records, and its steps that lack them are left out"
    num_sent, num_received = (
        frames.scan(name).select(pl.len()).collect().item() for name in ("send", "receive")
    )
    if num_sent != num_received:
        yield (
            f"{num_sent} messages were sent and {num_received} received; those that lack an end "
            "are left out"
        )
