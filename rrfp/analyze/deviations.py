"""How far each rank departed from its hint's order.

The *displacement* of a dispatch is the number of unfinished tasks that the hint ranks above it. For
hints that alternate, the order is the one that they produce with equal times. Each pair of tasks
that ran in the opposite order counts once, so that the displacements sum to Kendall's distance
between the two orders.
"""

from collections.abc import Mapping, Sequence

import polars as pl

from rrfp.analyze.frames import Frames, label_of, numbers_of
from rrfp.analyze.table import PERCENT, TEXT, Column, Table, figure, outliers
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
    """Return a row for each pipeline rank, over replicas and finished steps.

    With `stage` only its rank has a row. With `by_rank` each replica has a row, and `rank` is the
    first rank of its group. Members of a group run the same tasks and count once. The distance is
    the mean over steps and replicas of the share of pairs of tasks that ran in the opposite order.

    Raises UsageError for an unknown stage, and RrfpError if no step was finished by all ranks or
    the run recorded no positions in a hint's order.
    """
    finished = frames.finished_windows()
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
    # A single task has no pair, even if a damaged trace claims that it skipped tasks.
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


def deviation_table(
    report: pl.DataFrame, stages: Mapping[int, Sequence[int]], *, by_rank: bool = False
) -> Table:
    """Make the table of departures of each stage, or of each rank, from its hint's order.

    `report` is a result of `deviations`.
    """
    fractions = report["deviating_fraction"].to_list()
    names = [Column("stage", [numbers_of(stages[each]) for each in report["pp_rank"]], TEXT)]
    if by_rank:
        names.insert(0, Column("rank", report["rank"].to_list()))
    programs = [Column(None, report[name], key=name) for name in report.columns[: len(names)]]
    return Table(
        "How far each stage departed from its hint's order",
        [
            *names,
            *programs,
            Column("dispatches", report["dispatches"], key="dispatches"),
            Column(
                "deviating\n%",
                report["deviating_fraction"],
                PERCENT,
                "deviating_fraction",
                marked=outliers(fractions),
            ),
            Column(
                "tasks passed\nover, mean",
                report["mean_displacement"],
                figure(".2f"),
                "mean_displacement",
            ),
            Column("most", report["max_displacement"], key="max_displacement"),
            Column(
                "pairs the other\nway round, %",
                report["kendall_tau_distance"],
                PERCENT,
                "kendall_tau_distance",
            ),
        ],
        [_conclusion(report, stages)],
        num_names=len(names),
        rows_key="ranks",
    )


def _conclusion(report: pl.DataFrame, stages: Mapping[int, Sequence[int]]) -> str:
    """Name the stage that departs most and its share of dispatches, or state that none departs."""
    rows = report.to_dicts()
    worst = max(rows, key=lambda row: row["deviating_fraction"], default=None)
    if worst is None or not worst["deviating_fraction"]:
        return "Every stage ran its tasks in its hint's order."
    return (
        f"{label_of(stages[worst['pp_rank']]).capitalize()} departs most: in "
        f"{worst['deviating_fraction']:.0%} of its dispatches the hint ranks another unfinished "
        "task higher. Under ready dispatch that is no fault by itself."
    )
