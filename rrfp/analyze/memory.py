"""The peak of activation bytes of each rank, its time, and the headroom.

Bytes are those of activations from F until their last task: measured, or estimated by the
dispatcher under a bound in bytes. Steps in which it knew no sizes yet, so that a microbatch counted
as the whole bound, are ignored if there are others. Without a bound in bytes, the headroom of a
rank is its distance to the largest peak of any rank, which assumes equal devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from rrfp.analyze.frames import Frames, numbers_of
from rrfp.analyze.table import BYTES, COMPACT, TEXT, Column, Table, outliers, seconds
from rrfp.errors import RrfpError
from rrfp.schedule.policy import format_bytes
from rrfp.schedule.tasks import Kind
from rrfp.trace.records import NS_PER_S, Phase, step_name

_IN_STEP = ("rank", "step")
_NOT_KNOWN = (
    "the trace has no activation bytes; record the run again with --measure-memory or a hold in "
    "bytes such as --hold 40GiB, or simulate it with costs that have bytes"
)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The activation memory of one rank."""

    rank: int
    pp_rank: int
    stages: tuple[int, ...]
    peak_held_bytes: int
    peak_held: float
    """The largest number of held microbatches, over all chunks; not always at the peak in bytes."""
    peak_step: int
    peak_after_s: float
    """The time of the peak after the start of that step."""
    budget_bytes: int | None
    """The bound in force, the largest over the steps; None without one."""
    headroom_bytes: int
    """How many more bytes it could have held."""
    largest_microbatch_bytes: int
    """The size of the largest microbatch, over all chunks of the rank."""
    mean_microbatch_bytes: float
    outbox_bytes: int
    """The peak memory of messages that waited for their receivers, not part of the peak above."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The activation memory of a run's ranks."""

    ranks: tuple[RankMemory, ...]

    @property
    def worst(self) -> RankMemory:
        """The rank with the largest peak."""
        return max(self.ranks, key=lambda each: (each.peak_held_bytes, -each.rank))

    @property
    def freest(self) -> RankMemory:
        """The rank with the largest headroom."""
        return max(self.ranks, key=lambda each: (each.headroom_bytes, -each.rank))

    def by_stage(self) -> "Memory":
        """Return only the rank with the largest peak of each pipeline rank."""
        most: dict[int, RankMemory] = {}
        for each in self.ranks:
            known = most.get(each.pp_rank)
            if known is None or each.peak_held_bytes > known.peak_held_bytes:
                most[each.pp_rank] = each
        return Memory(tuple(most[pp_rank] for pp_rank in sorted(most)))

    def of_rank(self, pp_rank: int) -> "Memory":
        """Return only the ranks of one pipeline rank."""
        return Memory(tuple(each for each in self.ranks if each.pp_rank == pp_rank))


def memory_table(memory: Memory) -> Table:
    """Make the table: peak of each rank, its time, bound, headroom and sizes of microbatches."""
    ranks = memory.ranks
    peaks = [each.peak_held_bytes for each in ranks]
    budgets = [each.budget_bytes for each in ranks]
    outboxes = [each.outbox_bytes for each in ranks]
    means = [each.mean_microbatch_bytes for each in ranks]
    after_s = [each.peak_after_s for each in ranks]
    return Table(
        "How many bytes of activations each rank held",
        [
            Column("rank", [each.rank for each in ranks], key="rank"),
            Column("stage", [numbers_of(each.stages) for each in ranks], TEXT),
            Column(None, [each.pp_rank for each in ranks], key="pp_rank"),
            Column(None, [each.stages for each in ranks], key="stages"),
            Column("held\nat most", peaks, BYTES, "peak_held_bytes", marked=outliers(peaks)),
            Column("micro-\nbatches", [each.peak_held for each in ranks], COMPACT, "peak_held"),
            Column("in", [step_name(each.peak_step) for each in ranks], TEXT),
            Column(None, [each.peak_step for each in ranks], key="peak_step"),
            Column("after", after_s, seconds(after_s), "peak_after_s"),
            Column(
                "bound" if any(each is not None for each in budgets) else None,
                pl.Series(budgets, dtype=pl.Int64),
                BYTES,
                "budget_bytes",
            ),
            Column("head-\nroom", [each.headroom_bytes for each in ranks], BYTES, "room_bytes"),
            Column(
                "largest\nmicrob.",
                [each.largest_microbatch_bytes for each in ranks],
                BYTES,
                "largest_microbatch_bytes",
            ),
            Column(None, means, key="mean_microbatch_bytes"),
            Column("outbox" if any(outboxes) else None, outboxes, BYTES, "outbox_bytes"),
            Column("mean\nmicrob.", means, BYTES),
        ],
        [_conclusion(memory)],
        num_names=2,
        dispensable=("after", "mean\nmicrob."),
        caption="Bytes of activations that each rank held at most",
        facts={"peak_held_bytes": memory.worst.peak_held_bytes},
        rows_key="ranks",
    )


def _conclusion(memory: Memory) -> str:
    """State which rank held most, and which could have held how much more."""
    worst, freest = memory.worst, memory.freest
    most = f"{format_bytes(worst.peak_held_bytes)} in {step_name(worst.peak_step)}"
    if worst.budget_bytes is None:
        peak = f"Rank {worst.rank} held most, {most}"
        beyond = " before it held as much"
    else:
        peak = f"Rank {worst.rank} held most, {most}, of {format_bytes(worst.budget_bytes)}"
        beyond = ""
    if not freest.headroom_bytes:
        return f"{peak}; no rank could have held more."
    more = format_bytes(freest.headroom_bytes)
    return f"{peak}; rank {freest.rank} could have held {more} more{beyond}."


def memory(frames: Frames) -> Memory:
    """Compute the activation memory of each rank over the finished steps.

    Headroom is the distance of a peak to the bound, or without a bound to the largest peak of any
    rank. Steps with guessed sizes are ignored if there are others. Raises RrfpError if no step was
    finished, or the trace has no bytes.
    """
    windows = frames.finished_windows()
    tasks = activation_changes(frames).join(
        windows.select("step", pl.col("start_ns").alias("from_ns")), on="step"
    )
    if not knows_bytes(tasks):
        raise RrfpError(_NOT_KNOWN)
    tasks = _with_sizes(frames, tasks)
    peaks = (
        tasks.sort("held_bytes", "start_ns", descending=[True, False])
        .group_by("rank")
        .agg(pl.col("held_bytes", "step", "start_ns", "from_ns").first(), pl.col("held").max())
    )
    of_microbatches = (
        tasks.filter(pl.col("kind") == Kind.F)
        .group_by(*_IN_STEP, "microbatch")
        .agg(pl.col("change").sum())
        .group_by("rank")
        .agg(pl.col("change").max().alias("largest"), pl.col("change").mean().alias("mean"))
    )
    rows = (
        frames.run.select("rank", "pp_rank", "stages")
        .join(peaks, on="rank")
        .join(of_microbatches, on="rank", how="left")
        .join(budgets(frames).group_by("rank").agg(pl.col("budget_bytes").max()), on="rank")
        .sort("rank")
        .to_dicts()
    )
    most = max(row["held_bytes"] for row in rows)
    outboxes = outbox_bytes(frames.settings)
    return Memory(
        tuple(
            RankMemory(
                row["rank"],
                row["pp_rank"],
                tuple(row["stages"]),
                row["held_bytes"],
                row["held"] / len(row["stages"]),
                row["step"],
                (row["start_ns"] - row["from_ns"]) / NS_PER_S,
                row["budget_bytes"] or None,
                max(0, (row["budget_bytes"] or most) - row["held_bytes"]),
                row["largest"] or 0,
                row["mean"] or 0.0,
                outboxes.get(row["rank"], 0),
            )
            for row in rows
        )
    )


def outbox_bytes(settings: Mapping[str, Any]) -> dict[int, int]:
    """Return the outbox bytes of each rank from run.json.

    Bad entries are skipped; empty if the run has no outboxes.
    """
    transport = settings.get("transport")
    by_rank = transport.get("outbox_bytes") if isinstance(transport, dict) else None
    if not isinstance(by_rank, dict):
        return {}
    return {
        int(rank): each
        for rank, each in by_rank.items()
        if rank.isdigit() and isinstance(each, int)
    }


def _with_sizes(frames: Frames, tasks: pl.DataFrame) -> pl.DataFrame:
    """Keep the tasks of steps in which no rank lacked sizes; all tasks if there are no such
    steps."""
    guessed = frames.phases.filter(pl.col("unknown_sizes") > 0)
    known = tasks.join(guessed, on="step", how="anti")
    return tasks if known.is_empty() else known


def peak_bytes(frames: Frames) -> int | None:
    """Return the largest peak of any rank as in `memory`; None if no finished step has bytes."""
    whole = frames.scan("task").select("step", "held_bytes").collect()
    if not knows_bytes(whole.join(frames.windows, on="step", how="semi")):
        return None
    return memory(frames).worst.peak_held_bytes


def knows_bytes(tasks: pl.DataFrame) -> bool:
    """Return whether any of these tasks has activation bytes."""
    return bool((tasks["held_bytes"] != 0).any())


def activation_changes(frames: Frames) -> pl.DataFrame:
    """Return the tasks of each rank in order of time with two more columns.

    `change` is the number of bytes that the task added to those held in the step, negative if it
    freed some. `for_w` is the number then held only for pending weight gradients.
    """
    change = pl.col("held_bytes") - pl.col("held_bytes").shift(1, fill_value=0).over(_IN_STEP)
    left = pl.col("change").cum_sum().over(*_IN_STEP, "stage", "microbatch")
    of_w = (
        pl.when(pl.col("kind") == Kind.B)
        .then(left)
        .when(pl.col("kind") == Kind.W)
        .then(pl.col("change"))
        .otherwise(0)
    )
    return (
        frames.tasks.sort("rank", "start_ns", maintain_order=True)
        .with_columns(change.alias("change"))
        .with_columns(of_w.cum_sum().over(_IN_STEP).alias("for_w"))
    )


def budgets(frames: Frames) -> pl.DataFrame:
    """Return the bound of each rank and step in bytes, as `rank`, `step`, `budget_bytes`; 0 means
    none."""
    return frames.phases.filter(pl.col("phase") == Phase.SCHEDULE).select(*_IN_STEP, "budget_bytes")
