"""How far each rank departed from its hint's order.

A dispatch deviates by its *displacement*: the number of unfinished tasks that the hint ranks above
it. Hints that rank in rounds have the order that they give when all times are equal. Each pair of
tasks that ran the other way round than in the hint's order is counted once, so the displacements
sum to Kendall's distance between the two orders.
"""

import polars as pl

from rrfp.analyze.frames import Frames
from rrfp.errors import RrfpError

DEVIATIONS = {
    "pp_rank": pl.Int32,
    "dispatches": pl.Int64,
    "deviating_fraction": pl.Float64,
    "mean_displacement": pl.Float64,
    "max_displacement": pl.Int64,
    "kendall_tau_distance": pl.Float64,
}


def deviations(frames: Frames, stage: int | None = None, *, by_rank: bool = False) -> pl.DataFrame:
    """A row a pipeline rank, or only that of a stage, over replicas and the steps that every rank
    finished. Members of a group run the same tasks and count once. The distance is a share of all
    pairs of a step's tasks, as the mean over steps. With `by_rank` each replica has a row, with
    `rank` the first of its group's ranks.

    Raises UsageError for a stage that the run does not have, and RrfpError when no step was
    finished by every rank or the run recorded no places in a hint's order.
    """
    finished = frames.windows
    if finished.is_empty():
        raise RrfpError("the trace has no step that every rank finished; see 'rrfp trace check'")
    if stage is not None:
        frames = frames.of_stage(stage)
    leads = frames.tasks.join(finished, on="step", how="semi").filter(
        pl.col("tp_rank") == pl.col("tp_rank").min().over("pp_rank")
    )
    if leads.is_empty() or leads["skipped"].min() < 0:  # type: ignore[operator]
        raise RrfpError(
            "the trace has no places of its tasks in a hint's order; record one with 'rrfp train'"
        )
    key = ["pp_rank", "rank"] if by_rank else ["pp_rank"]
    by_step = leads.group_by("pp_rank", "rank", "step").agg(
        pl.len().alias("num"), pl.col("skipped").sum().alias("inversions")
    )
    num_pairs = pl.col("num") * (pl.col("num") - 1) / 2
    # A single task has no pair, whatever number a damaged trace says it skipped.
    distance = pl.when(num_pairs > 0).then(pl.col("inversions") / num_pairs).otherwise(0)
    distances = by_step.group_by(key).agg(distance.mean().alias("kendall_tau_distance"))
    return (
        leads.group_by(key)
        .agg(
            pl.len().alias("dispatches"),
            (pl.col("skipped") > 0).mean().alias("deviating_fraction"),
            pl.col("skipped").mean().alias("mean_displacement"),
            pl.col("skipped").max().alias("max_displacement"),
        )
        .join(distances, on=key)
        .sort(key)
        .cast(DEVIATIONS)  # type: ignore[arg-type]
    )


def as_json(report: pl.DataFrame) -> dict[str, object]:
    """The object that `rrfp analyze deviations --format json` prints."""
    return {"ranks": report.to_dicts()}
