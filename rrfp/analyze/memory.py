"""The most that each rank kept in memory, when, and how much more it could have kept.

Bytes are those of activations from F until their last task: measured, or under a bound in bytes as
dispatchers reckoned with them. Steps in which these knew no size yet, so that each microbatch took
all of the bound, do not count if there are others. Where no bound in bytes was in force, the room
of a rank is what the rank that held most held beyond it: so much memory was there, if the devices
are alike.
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
    "the trace does not tell how many bytes its microbatches kept; record the run anew with "
    "--measure-memory or a hold in bytes such as --hold 40GiB, or simulate it with costs that have "
    "bytes"
)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory that one rank kept."""

    rank: int
    pp_rank: int
    stages: tuple[int, ...]
    peak_held_bytes: int
    peak_held: float
    """The most microbatches of the whole rank; not always at the peak in bytes."""
    peak_step: int
    peak_after_s: float
    """The time of the peak, from the start of that step."""
    budget_bytes: int | None
    """The bound in force, the largest over the steps; None without one."""
    room_bytes: int
    """How much more it could have held."""
    largest_microbatch_bytes: int
    """The most that one microbatch kept, over all chunks of the rank."""
    mean_microbatch_bytes: float
    outbox_bytes: int
    """The most memory that messages took besides, which wait for their receivers."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that a run's ranks kept."""

    ranks: tuple[RankMemory, ...]

    @property
    def worst(self) -> RankMemory:
        """The rank that held most."""
        return max(self.ranks, key=lambda each: (each.peak_held_bytes, -each.rank))

    @property
    def roomiest(self) -> RankMemory:
        """The rank that could have held most more."""
        return max(self.ranks, key=lambda each: (each.room_bytes, -each.rank))

    def by_stage(self) -> "Memory":
        """Keep the rank that held most of those at one place of the pipeline."""
        most: dict[int, RankMemory] = {}
        for each in self.ranks:
            known = most.get(each.pp_rank)
            if known is None or each.peak_held_bytes > known.peak_held_bytes:
                most[each.pp_rank] = each
        return Memory(tuple(most[pp_rank] for pp_rank in sorted(most)))

    def of_rank(self, pp_rank: int) -> "Memory":
        """Keep the ranks at one place of the pipeline."""
        return Memory(tuple(each for each in self.ranks if each.pp_rank == pp_rank))


def memory_table(memory: Memory) -> Table:
    """The most that each rank held, when, its bound, and what its microbatches kept."""
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
            Column("room", [each.room_bytes for each in ranks], BYTES, "room_bytes"),
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
    worst, roomy = memory.worst, memory.roomiest
    most = f"{format_bytes(worst.peak_held_bytes)} in {step_name(worst.peak_step)}"
    if worst.budget_bytes is None:
        said = f"Rank {worst.rank} held most, {most}"
        beyond = " before it held as much"
    else:
        said = f"Rank {worst.rank} held most, {most}, of {format_bytes(worst.budget_bytes)}"
        beyond = ""
    if not roomy.room_bytes:
        return f"{said}; no rank could have held more."
    return (
        f"{said}; rank {roomy.rank} could have held {format_bytes(roomy.room_bytes)} more{beyond}."
    )


def memory(frames: Frames) -> Memory:
    """Find out what each rank kept in the steps that every rank finished.

    Raises RrfpError when there is no such step, or the trace does not tell any bytes.
    """
    windows = frames.windows
    if windows.is_empty():
        raise RrfpError("the trace has no step that every rank finished; see 'rrfp trace check'")
    tasks = kept_changes(frames).join(
        windows.select("step", pl.col("start_ns").alias("from_ns")), on="step"
    )
    if not knows_bytes(tasks):
        raise RrfpError(_NOT_KNOWN)
    tasks = _with_sizes(frames, tasks)
    peaks = (
        tasks.sort("held_bytes", "start_ns", descending=[True, False])
        .group_by("rank")
        .agg(
            pl.col("held_bytes", "step", "start_ns", "from_ns").first(),
            pl.col("held").max(),
        )
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
    """By rank, as its `run.json` tells; empty where it does not."""
    transport = settings.get("transport")
    told = transport.get("outbox_bytes") if isinstance(transport, dict) else None
    if not isinstance(told, dict):
        return {}
    return {
        int(rank): each for rank, each in told.items() if rank.isdigit() and isinstance(each, int)
    }


def _with_sizes(frames: Frames, tasks: pl.DataFrame) -> pl.DataFrame:
    """The tasks of the steps whose sizes were known; all where none were."""
    guessed = frames.phases.filter(pl.col("unknown_sizes") > 0)
    known = tasks.join(guessed, on="step", how="anti")
    return tasks if known.is_empty() else known


def peak_bytes(frames: Frames) -> int | None:
    """The most bytes that any rank kept, as `memory` counts; None where the trace does not tell."""
    whole = frames.scan("task").select("step", "held_bytes").collect()
    if not knows_bytes(whole.join(frames.windows, on="step", how="semi")):
        return None
    return memory(frames).worst.peak_held_bytes


def knows_bytes(tasks: pl.DataFrame) -> bool:
    """Whether any of these tasks tells what was kept."""
    return bool((tasks["held_bytes"] != 0).any())


def kept_changes(frames: Frames) -> pl.DataFrame:
    """The tasks of each rank in order of time, with two more columns: `change`, the bytes that a
    task added to those held, and `for_w`, the bytes that then waited for weight gradients alone."""
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
    """The bound in bytes of each rank and step, 0 without one: `rank`, `step`, `budget_bytes`."""
    return frames.phases.filter(pl.col("phase") == Phase.SCHEDULE).select(*_IN_STEP, "budget_bytes")
