"""Divides a step's time into work, idle time by cause, and overhead.

The window of a step runs from the first rank's entry into the schedule to the last rank's return,
on a common clock, and is the same for all ranks. A rank is busy while it runs a task. The rest of
the window is its bubble, and every nanosecond of the bubble has one cause:

- `warmup`: the time before the rank's first task, including a late entry, whatever was recorded;
- between two tasks: the cause of the recorded wait, or `overhead` without one;
- after the last task: a recorded `gradient_sync`, or `drain` without one, to the end of the window.

Work and causes therefore sum exactly to the window. Of overlapping waits the earlier one counts.

If a device runs asynchronously to its host, launches of tasks are recorded. They divide a rank's
overhead into `launch`, while the host launched a task, and `decision`, the rest.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import polars as pl

from rrfp.analyze.colors import CAUSE_COLORS
from rrfp.analyze.frames import NOT_REPLAYED, Frames, numbers_of, recording_of
from rrfp.analyze.table import TENTHS, TEXT, Column, Table, apportioned, format_tenths, outliers
from rrfp.errors import RrfpError
from rrfp.replay.bottlenecks import BubbleParts, Structural, structural
from rrfp.replay.measured import StepSample, measure
from rrfp.replay.recorded import read_run
from rrfp.schedule.tasks import Cause
from rrfp.trace.records import (
    NS_PER_S,
    Phase,
    format_step_counts,
    is_evaluation,
    split_step,
    step_name,
    steps_in_order,
)

OVERHEAD = "overhead"
CAUSES = (*(cause.value for cause in Cause), OVERHEAD)
"""All causes of a bubble, in the order of reports."""
LAUNCH = Phase.LAUNCH.value
DECISION = "decision"
"""The host noticed that the device was idle and chose the next task."""
OVERHEAD_PARTS = (LAUNCH, DECISION)

CAUSE_HEADINGS = {
    "warmup": "warm-\nup",
    "forward_input": "fwd\ninput",
    "backward_input": "bwd\ninput",
    "patience": "pa-\ntience",
    "coordination": "coordi-\nnation",
    "transfer": "trans-\nfer",
    "gradient_sync": "grad\nsync",
    "overhead": "over-\nhead",
}
"""Headings of causes whose names are too wide for a column of figures."""

_KEY = ("step", "rank")


@dataclass(frozen=True, slots=True)
class RankBubbles:
    """The time of one rank, summed over steps."""

    rank: int
    pp_rank: int
    stages: tuple[int, ...]
    window_ns: int
    busy_ns: int
    causes_ns: dict[str, int]
    """Idle time for each of `CAUSES`; with `busy_ns` they sum to `window_ns`."""
    overhead_parts_ns: dict[str, int] = field(default_factory=dict)
    """The `OVERHEAD_PARTS`, which sum to the overhead; empty if the run has no launches."""
    structural_ns: int | None = None
    """The bubble with every task at its mean time; None if the run cannot be replayed."""

    @property
    def bubble_ns(self) -> int:
        """Time in which the rank ran no task."""
        return self.window_ns - self.busy_ns

    @property
    def bubble_fraction(self) -> float:
        """Share of the window in which the rank ran no task."""
        return 1 - self.busy_ns / self.window_ns

    @property
    def excess_ns(self) -> int | None:
        """Bubble beyond the structural part; may be negative. None without replay."""
        return None if self.structural_ns is None else self.bubble_ns - self.structural_ns


@dataclass(frozen=True, slots=True)
class Bubbles:
    """The time of all ranks, summed over steps."""

    steps: tuple[int, ...]
    """The steps that all ranks finished."""
    dropped_steps: tuple[int, ...]
    """The steps that some rank did not finish, which are not counted."""
    window_ns: int
    ranks: tuple[RankBubbles, ...]

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all ranks' time."""
        return 1 - sum(rank.busy_ns for rank in self.ranks) / (self.window_ns * len(self.ranks))

    @property
    def causes_ns(self) -> dict[str, int]:
        """Idle time by cause, over all ranks."""
        return {cause: sum(rank.causes_ns[cause] for rank in self.ranks) for cause in CAUSES}

    @property
    def overhead_parts_ns(self) -> dict[str, int]:
        """The parts of the overhead over all ranks; empty if the run has no launches."""
        return {
            part: sum(rank.overhead_parts_ns[part] for rank in self.ranks)
            for part in self.ranks[0].overhead_parts_ns
        }

    @property
    def parts(self) -> BubbleParts | None:
        """Structural part and excess, as shares of all ranks' time; None without replay."""
        whole_ns = self.window_ns * len(self.ranks)
        parts_ns = [(rank.structural_ns, rank.excess_ns) for rank in self.ranks]
        structural_ns, excess_ns = (
            [ns for ns in each if ns is not None] for each in zip(*parts_ns, strict=True)
        )
        if not structural_ns:
            return None
        return BubbleParts(sum(structural_ns) / whole_ns, sum(excess_ns) / whole_ns)

    def with_structural(self, shares: Sequence[float]) -> "Bubbles":
        """Return a copy with the structural part of each rank's bubble.

        `shares` has it by pipeline rank, as shares of the window. If it is empty (the run cannot be
        replayed), nothing changes.
        """
        if not shares:
            return self
        return replace(
            self,
            ranks=tuple(
                replace(rank, structural_ns=round(shares[rank.pp_rank] * rank.window_ns))
                for rank in self.ranks
            ),
        )

    def of_rank(self, pp_rank: int) -> "Bubbles":
        """Return a copy with only the ranks of one pipeline rank."""
        return replace(self, ranks=tuple(rank for rank in self.ranks if rank.pp_rank == pp_rank))


def bubbles(frames: Frames, steps: range | None = None) -> Bubbles:
    """Divide the time of a run's finished steps, summed over them; None means all steps.

    Raises UsageError if the run has none of `steps`, and RrfpError if no step was finished by all
    ranks, if the steps take no time, or if a rank waited for an unknown cause.
    """
    if not frames.steps:
        raise RrfpError("the trace has no steps; the run ended before its first one did")
    if steps is not None:
        frames = frames.of_steps(steps)
    divided = divide(frames)
    if divided.is_empty():
        raise RrfpError(f"none of the {_span(frames.steps)} was finished by every rank")
    finished = steps_in_order(divided["step"].unique())
    totals = divided.group_by("rank").agg(pl.all().exclude("step").sum())
    window_ns = int(totals["window_ns"][0])
    if window_ns <= 0:
        raise RrfpError(f"the {_span(finished)} take no time in this trace")
    overhead_parts = OVERHEAD_PARTS if _has_launches(frames) else ()
    places = frames.run.select("rank", "pp_rank", "stages")
    return Bubbles(
        steps=tuple(finished),
        dropped_steps=tuple(steps_in_order(set(frames.steps) - set(finished))),
        window_ns=window_ns,
        ranks=tuple(
            RankBubbles(
                row["rank"],
                row["pp_rank"],
                tuple(row["stages"]),
                row["window_ns"],
                row["busy_ns"],
                {cause: row[cause] for cause in CAUSES},
                {part: row[part] for part in overhead_parts},
            )
            for row in places.join(totals, on="rank", maintain_order="left").iter_rows(named=True)
        ),
    )


def divide(frames: Frames) -> pl.DataFrame:
    """Return a row for each finished step and rank, in nanoseconds.

    The columns are `step`, `rank`, `window_ns`, `busy_ns`, `CAUSES` and `OVERHEAD_PARTS`. Without
    launches all overhead is `decision`. Raises RrfpError if a rank waited for an unknown cause.
    """
    return pl.concat([_divide(piece) for piece in frames.piecewise()])


def _has_launches(frames: Frames) -> bool:
    """Return whether the run recorded launches of tasks."""
    launches = frames.scan("phase").filter(pl.col("phase") == LAUNCH)
    return not launches.head(1).collect().is_empty()


def _divide(frames: Frames) -> pl.DataFrame:
    """Divide the time of steps that fit into memory, as `divide` does."""
    spans = frames.windows.join(frames.run.select("rank"), how="cross")
    work = _work(frames, spans)
    ends = work.group_by(_KEY).agg(
        pl.col("start_ns").min().alias("first_ns"), pl.col("end_ns").max().alias("last_ns")
    )
    # The whole window of a rank without work is warmup.
    spans = spans.join(ends, on=_KEY, how="left").with_columns(
        pl.col("first_ns", "last_ns").fill_null(pl.col("end_ns"))
    )
    waits, gaps = _waits(frames), _gaps(work)
    idle = pl.concat(
        [
            _part(spans, Cause.WARMUP, pl.col("first_ns") - pl.col("start_ns")),
            *_explained(_between(waits, gaps), OVERHEAD),
            _part(gaps, OVERHEAD, pl.col("gap_ns")),
            *_launching(frames, waits, gaps),
            *_explained(_behind(waits, spans), Cause.DRAIN),
            _part(spans, Cause.DRAIN, pl.col("end_ns") - pl.col("last_ns")),
        ]
    )
    causes = (
        idle.group_by(*_KEY, "cause")
        .agg(pl.col("ns").sum())
        .group_by(_KEY)
        .agg(
            pl.col("ns").filter(pl.col("cause") == cause).sum().alias(cause)
            for cause in (*CAUSES, LAUNCH)
        )
    )
    return (
        spans.select(*_KEY, (pl.col("end_ns") - pl.col("start_ns")).alias("window_ns"))
        .join(causes, on=_KEY)
        .select(
            *_KEY,
            "window_ns",
            (pl.col("window_ns") - pl.sum_horizontal(CAUSES)).alias("busy_ns"),
            *CAUSES,
            LAUNCH,
            (pl.col(OVERHEAD) - pl.col(LAUNCH)).alias(DECISION),
        )
        .sort(_KEY)
    )


def _work(frames: Frames, spans: pl.DataFrame) -> pl.DataFrame:
    """Return the tasks of finished steps in order of time, clipped to the window.

    Those outside of it are dropped. `until_ns` is the latest end of the rank's earlier tasks in the
    step, null for the first.
    """
    return (
        frames.scan("task")
        .select(*_KEY, "start_ns", "end_ns")
        .collect()
        .join(spans, on=_KEY, suffix="_window")
        .select(
            *_KEY,
            pl.max_horizontal("start_ns", "start_ns_window").alias("start_ns"),
            pl.min_horizontal("end_ns", "end_ns_window").alias("end_ns"),
        )
        .filter(pl.col("start_ns") < pl.col("end_ns"))
        .sort(*_KEY, "start_ns")
        .with_columns(pl.col("end_ns").cum_max().shift(1).over(_KEY).alias("until_ns"))
    )


def _gaps(work: pl.DataFrame) -> pl.DataFrame:
    """Return start and length of each gap between two tasks of a rank.

    `before` is the sum of the earlier gaps of the rank in the step.
    """
    return (
        work.select(
            *_KEY,
            pl.col("until_ns").alias("gap_start_ns"),
            (pl.col("start_ns") - pl.col("until_ns")).alias("gap_ns"),
        )
        .filter(pl.col("gap_ns") > 0)
        .with_columns(pl.col("gap_ns").cum_sum().shift(1, fill_value=0).over(_KEY).alias("before"))
    )


def _waits(frames: Frames) -> pl.DataFrame:
    """Return the waits of all steps. Raises RrfpError for an unknown cause."""
    waits = frames.scan("wait").select(*_KEY, "start_ns", "end_ns", "cause").collect()
    strange = waits.filter(~pl.col("cause").is_in(CAUSES))
    if not strange.is_empty():
        step, rank, *_, cause = strange.row(0)
        raise RrfpError(
            f"rank {rank} waited in {step_name(step)} for '{cause}', which is none of "
            f"{', '.join(CAUSES)}"
        )
    return waits


def _disjoint(waits: pl.DataFrame) -> pl.DataFrame:
    """Sort each rank's waits by time and clip each to the time after the earlier ones.

    Waits without time left are dropped.
    """
    return (
        waits.sort(*_KEY, "start_ns", "end_ns", "cause")
        .with_columns(pl.max_horizontal("start_ns", pl.col("end_ns").cum_max().shift(1).over(_KEY)))
        .filter(pl.col("start_ns") < pl.col("end_ns"))
    )


def _between(waits: pl.DataFrame, gaps: pl.DataFrame) -> pl.DataFrame:
    """Return how much of the gaps each wait explains.

    This is the gap time before its end minus the gap time before its start. Overlapping waits are
    made disjoint first.
    """

    def gaps_until(waits: pl.DataFrame, time: str) -> pl.DataFrame:
        passed_ns = pl.min_horizontal(pl.col(time) - pl.col("gap_start_ns"), "gap_ns")
        return (
            waits.sort(time)
            .join_asof(
                gaps.sort("gap_start_ns"),
                left_on=time,
                right_on="gap_start_ns",
                by=_KEY,
                check_sortedness=False,
            )
            .with_columns((pl.col("before") + passed_ns).fill_null(0).alias(f"until_{time}"))
            .drop("gap_start_ns", "gap_ns", "before")
        )

    return gaps_until(gaps_until(_disjoint(waits), "start_ns"), "end_ns").select(
        *_KEY, "cause", (pl.col("until_end_ns") - pl.col("until_start_ns")).alias("ns")
    )


def _launching(frames: Frames, waits: pl.DataFrame, gaps: pl.DataFrame) -> Sequence[pl.DataFrame]:
    """Return how much of the gaps is launch, as rows to sum: waits and launches less waits alone.

    Empty without launches.
    """
    launches = frames.phases.filter(pl.col("phase") == LAUNCH).select(
        *_KEY, "start_ns", "end_ns", pl.col("phase").alias("cause")
    )
    if launches.is_empty():
        return ()
    together, alone = _between(pl.concat([waits, launches]), gaps), _between(waits, gaps)
    return _part(together, LAUNCH, pl.col("ns")), _part(alone, LAUNCH, -pl.col("ns"))


def _behind(waits: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Return how much of the time after a rank's last task each gradient sync explains, up to the
    window's end."""
    from_ns = pl.max_horizontal("start_ns", "last_ns")
    to_ns = pl.min_horizontal("end_ns", "window_end_ns")
    return (
        _disjoint(waits.filter(pl.col("cause") == Cause.GRADIENT_SYNC))
        .join(spans.select(*_KEY, "last_ns", pl.col("end_ns").alias("window_end_ns")), on=_KEY)
        .select(*_KEY, "cause", (to_ns - from_ns).clip(0).alias("ns"))
    )


def _explained(found: pl.DataFrame, rest: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the time that waits explain, and the same time subtracted from the cause `rest`."""
    return found, _part(found, rest, -pl.col("ns"))


def _part(frame: pl.DataFrame, cause: str, ns: pl.Expr) -> pl.DataFrame:
    """Return rows of step, rank, cause and time."""
    return frame.select(*_KEY, pl.lit(str(cause)).alias("cause"), ns.alias("ns"))


def _span(steps: Sequence[int]) -> str:
    """Format steps as `steps 3:10` for steps 3 to 9, or `evaluations 0:2`."""
    (sort, first), (_, last) = split_step(steps[0]), split_step(steps[-1])
    return f"{sort}s {first}:{last + 1}"


# The structural part of a run's bubble.
#
# `rrfp.replay.bottlenecks` computes it for a sample of steps, whose share stands for all steps.


_SAMPLE = StepSample(num_tasks=10_000, most_tasks_of_a_step=40_000)
"""Replaying takes about a second. A larger step would take longer than reading the trace."""


def structural_of(frames: Frames) -> Structural:
    """Divide the bubble of a run's finished training steps, or of a sample of them, by replay.

    Raises RrfpError without such steps, if the run cannot be replayed, or if a chosen step lacks
    tasks.
    """
    finished = [step for step in frames.finished_windows()["step"] if not is_evaluation(step)]
    if not finished:
        raise RrfpError(NOT_REPLAYED)
    num_tasks = frames.scan("task").select(pl.len()).collect().item()
    chosen = _SAMPLE.choose(finished, num_tasks / len(frames.steps))
    run = read_run(recording_of(frames.of_steps(chosen)))
    if run.left_out:
        raise RrfpError(
            f"{step_name(run.left_out[0])} lacks some of its tasks; see 'rrfp trace check', and "
            "choose other steps with --steps"
        )
    return structural(run, measure(run))


def structural_shares(frames: Frames) -> list[float]:
    """Return the structural part of the bubble by pipeline rank, as shares of the window.

    Empty if the run cannot be replayed.
    """
    try:
        return [part.structural for part in structural_of(frames).ranks]
    except RrfpError:
        return []


# The table of a run's bubbles.


def bubble_table(bubbles: Bubbles, why_not_replayed: str = "", *, by_rank: bool = False) -> Table:
    """Make the table of work and bubble of each pipeline rank, or of each rank, in percent.

    Work and causes of a row sum to 100.0. People do not see causes without time. If each pipeline
    rank has one rank, rows name it, too. Only a table by rank has the columns for programs.
    """
    groups: dict[int, list[RankBubbles]] = defaultdict(list)
    for rank in bubbles.ranks:
        groups[rank.rank if by_rank else rank.pp_rank].append(rank)
    rows = [*groups.values()]
    stages = [numbers_of(row[0].stages) for row in rows]
    names = [Column("stage", stages, TEXT, total="all")]
    if by_rank or len(bubbles.ranks) == len(rows):
        ranks = [row[0].rank for row in rows]
        names = [
            Column("rank", ranks, key="rank" if by_rank else "", total="all"),
            Column("stage", stages, TEXT),
        ]
    causes = [cause for cause, total_ns in bubbles.causes_ns.items() if total_ns]
    shares = [_shares_of(row, causes) for row in [*rows, bubbles.ranks]]
    columns = [*names, *_share_columns(bubbles, shares)]
    if by_rank:
        columns += _second_columns(bubbles.ranks)
    steps = bubbles.steps
    which = format_step_counts(steps) if len(steps) > 1 else step_name(steps[0])
    return Table(
        f"Where the time of {which} went, in % of it",
        columns,
        [_conclusion(bubbles, why_not_replayed), _overhead_sentence(bubbles, shares[-1])],
        num_names=len(names),
        has_total=True,
        facts={
            "bubble_fraction": bubbles.bubble_fraction,
            "window_s": bubbles.window_ns / NS_PER_S,
        },
        rows_key="ranks",
    )


_STRUCTURAL, _EXCESS = "structural", "excess"


def _shares_of(ranks: Sequence[RankBubbles], causes: Sequence[str]) -> dict[str, int]:
    """Return the parts of some ranks' time in tenths of a percent; work and causes sum to 1000.

    Also has the bubble, the structural part and the excess if known, and the parts of the overhead.
    """
    work, *idle = apportioned(
        [
            sum(rank.busy_ns for rank in ranks),
            *(sum(rank.causes_ns[cause] for rank in ranks) for cause in causes),
        ],
        1000,
    )
    shares = {"work": work, "bubble": 1000 - work, **dict(zip(causes, idle, strict=True))}
    structural_ns = [rank.structural_ns for rank in ranks if rank.structural_ns is not None]
    if structural_ns:
        structural = round(1000 * sum(structural_ns) / sum(rank.window_ns for rank in ranks))
        shares |= {_STRUCTURAL: structural, _EXCESS: 1000 - work - structural}
    parts = [*ranks[0].overhead_parts_ns]
    parts_ns = [sum(rank.overhead_parts_ns[part] for rank in ranks) for part in parts]
    divided = apportioned(parts_ns, shares.get(OVERHEAD, 0))
    return shares | dict(zip(parts, divided, strict=True))


def _share_columns(bubbles: Bubbles, shares: Sequence[dict[str, int]]) -> Iterator[Column]:
    """Yield the columns for people.

    `shares` has the parts of each row, and last those of all ranks.
    """
    *rows, total = shares

    def column(name: str, heading: str, **kwargs: Any) -> Column:
        values = [row[name] for row in rows]
        return Column(heading, values, TENTHS, total=total[name], **kwargs)

    yield column("work", "work")
    yield column("bubble", "bubble", marked=outliers([row["bubble"] for row in rows]))
    for name in (_STRUCTURAL, _EXCESS):
        if name in total:
            yield column(name, name, is_on_pages_only=True)
    for cause in CAUSES:
        if cause in total:
            yield column(cause, CAUSE_HEADINGS.get(cause, cause), color=CAUSE_COLORS[cause])
    if OVERHEAD in total:
        for part in bubbles.ranks[0].overhead_parts_ns:
            yield column(part, f"{OVERHEAD}: {part}", is_on_pages_only=True)


def _second_columns(ranks: Sequence[RankBubbles]) -> Iterator[Column]:
    """Yield the columns for programs, with times in seconds and a row for each rank."""

    def times(times_ns: Sequence[int | None], key: str, path: str | None = None) -> Column:
        times_s = [None if ns is None else ns / NS_PER_S for ns in times_ns]
        return Column(None, pl.Series(times_s, dtype=pl.Float64), key=key, path=path)

    structural_ns = [rank.structural_ns for rank in ranks]
    excess_ns = [rank.excess_ns for rank in ranks]
    yield Column(None, [rank.pp_rank for rank in ranks], key="pp_rank")
    yield Column(None, [rank.stages for rank in ranks], key="stages")
    yield Column(None, [rank.bubble_fraction for rank in ranks], key="bubble_fraction")
    yield times(structural_ns, _STRUCTURAL, path="")
    yield times(excess_ns, _EXCESS, path="")
    yield times([rank.window_ns for rank in ranks], "window_s", path="")
    yield times([rank.busy_ns for rank in ranks], "busy_s")
    for cause in CAUSES:
        yield times([rank.causes_ns[cause] for rank in ranks], cause, path=f"causes.{cause}")
    for part in ranks[0].overhead_parts_ns if ranks else ():
        yield times([rank.overhead_parts_ns[part] for rank in ranks], part)
    # In JSON these two members come last.
    yield times(structural_ns, "", path=_STRUCTURAL)
    yield times(excess_ns, "", path=_EXCESS)


def _conclusion(bubbles: Bubbles, why_not_replayed: str) -> str:
    """State the bubble, with its structural part or the reason why that is unknown."""
    if bubbles.parts is not None:
        return bubbles.parts.description
    bubble = f"{bubbles.bubble_fraction:.0%} of the ranks' time was bubble."
    if not why_not_replayed:
        return bubble
    return f"{bubble} The structural part is not known: {why_not_replayed}."


def _overhead_sentence(bubbles: Bubbles, shares: dict[str, int]) -> str:
    """Describe the parts of all ranks' overhead; empty without overhead or launches."""
    overhead = shares.get(OVERHEAD, 0)
    if not overhead or not bubbles.overhead_parts_ns:
        return ""
    launch, decision = (format_tenths(shares[part]) for part in OVERHEAD_PARTS)
    return (
        f"The overhead of {format_tenths(overhead)}% is {launch}% launch and {decision}% decision."
    )
