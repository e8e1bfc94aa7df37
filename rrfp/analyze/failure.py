"""The last moments of a crashed run: the task or wait of each rank, and what it waited for."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import polars as pl

from rrfp.analyze.frames import Frames
from rrfp.analyze.table import TEXT, Column, Table, format_time
from rrfp.trace.check import ending_sentence
from rrfp.trace.records import NS_PER_S, Doing, Phase, is_evaluation, step_name, steps_in_order

BETWEEN = "between tasks"
"""The rank was neither in a task nor in a wait: it chose a task or received messages."""


@dataclass(frozen=True, slots=True)
class LastMoments:
    """A rank at the end of its run. Times count back from the last record of the run."""

    rank: int
    pp_rank: int
    step: int | None
    """The step of the rank; None if unknown."""
    last: str | None
    """The last finished task or phase: `F3`, `B0 of step 7`, `optimizer`."""
    last_ended_s: float | None
    amid: str | None
    """The unfinished task, wait or phase: `F3`, the cause of a wait, `optimizer`."""
    amid_s: float | None
    """How long that lasted."""
    awaited_task: str | None
    """The task whose output it waited for."""
    awaited_rank: int | None
    """The rank that it waited for."""


@dataclass(frozen=True, slots=True)
class Fatal:
    """The end of a crashed run, rank by rank."""

    sentence: str
    """The reason why it ended, if it is recorded."""
    step: int
    ranks: tuple[LastMoments, ...]

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def fatal_of(frames: Frames) -> Fatal | None:
    """Describe how the run ended; None if no rank ended in a task, wait or phase.

    The step is the last training step among theirs, or the last evaluation without one.
    """
    begun = {row["rank"]: row for row in frames.table("begun").iter_rows(named=True)}
    if not begun:
        return None
    end_ns = max(row["end_ns"] for row in begun.values())
    steps = steps_in_order(row["step"] for row in begun.values())
    trained = [step for step in steps if not is_evaluation(step)]
    ended = _last_ended(frames)
    return Fatal(
        ending_sentence(frames.settings) or "the run did not come to its end",
        (trained or steps)[-1],
        tuple(
            _moments(rank, pp_rank, begun.get(rank), ended.get(rank), end_ns)
            for rank, pp_rank in frames.run.select("rank", "pp_rank").sort("rank").iter_rows()
        ),
    )


def _last_ended(frames: Frames) -> dict[int, Mapping[str, Any]]:
    """Return the last finished task, data phase or optimizer phase of each rank that has one."""
    columns = ("rank", "end_ns", "step", "kind", "microbatch")
    tasks = frames.scan("task").select(*columns)
    phases = (
        frames.scan("phase")
        .filter(pl.col("phase").is_in([Phase.DATA, Phase.OPTIMIZER]))
        .select("rank", "end_ns", "step", kind="phase", microbatch=pl.lit(-1, pl.Int64))
    )
    last = pl.concat([tasks, phases]).sort("end_ns").group_by("rank").last().collect()
    return {row["rank"]: row for row in last.iter_rows(named=True)}


def _moments(
    rank: int,
    pp_rank: int,
    begun: Mapping[str, Any] | None,
    ended: Mapping[str, Any] | None,
    end_ns: int,
) -> LastMoments:
    """Make the last moments of a rank from its unfinished and its last finished record, if any.

    Times count back from `end_ns`. A rank in the schedule whose last finished record is of the same
    step is `between tasks` since then.
    """
    last = last_s = None
    step = None if begun is None else begun["step"]
    if ended is not None:
        last = _named(ended)
        if step is None:
            step = ended["step"]
        if ended["step"] != step:
            last = f"{last} of {step_name(ended['step'])}"
        last_s = (end_ns - ended["end_ns"]) / NS_PER_S
    if begun is None:
        return LastMoments(rank, pp_rank, step, last, last_s, None, None, None, None)
    amid, task = begun["doing"], _named(begun) if begun["kind"] else None
    if amid == Doing.TASK:
        amid, task = task, None
    elif amid == Phase.SCHEDULE and ended is not None and ended["step"] == step:
        amid = BETWEEN
    return LastMoments(
        rank,
        pp_rank,
        step,
        last,
        last_s,
        amid,
        (end_ns - begun["start_ns"]) / NS_PER_S if amid != BETWEEN else last_s,
        task,
        begun["peer"] if begun["peer"] >= 0 else None,
    )


def _named(row: Mapping[str, Any]) -> str:
    """Format a task or phase: `F3` or `optimizer`."""
    return f"{row['kind']}{row['microbatch']}" if row["microbatch"] >= 0 else row["kind"]


MOST_RANKS = 10
"""The number of rows that fit a screen of 24 lines."""


def fatal_table(fatal: Fatal, *, is_whole: bool) -> Table:
    """Make the table of the task or wait of each rank at the end of the run.

    Unless `is_whole`, more than ten ranks are cut to ten: first those that waited for no other
    rank, then those that did, each the longest first; a note counts the rest.
    """
    ranks = list(fatal.ranks)
    left = 0
    if not is_whole and len(ranks) > MOST_RANKS:
        ranks.sort(key=lambda each: (each.awaited_rank is not None, -(each.amid_s or 0.0)))
        left = len(ranks) - MOST_RANKS
        ranks = ranks[:MOST_RANKS]
    return Table(
        f"{fatal.sentence[:1].upper()}{fatal.sentence[1:]}\n"
        f"What each rank did when it ended, in {step_name(fatal.step)}",
        [
            Column("rank", [each.rank for each in ranks]),
            Column("ended last", [each.last or "-" for each in ranks], TEXT),
            Column("before\nthe end", [_time(each.last_ended_s) for each in ranks]),
            Column("was in", [_amid(each, fatal.step) for each in ranks], TEXT),
            Column("for", [_time(each.amid_s) for each in ranks]),
            Column("waited for", [_awaited(each) for each in ranks], TEXT),
        ],
        [f"{left} more ranks waited for others: --format json" if left else ""],
    )


def _amid(each: LastMoments, step: int) -> str:
    """Format a rank's unfinished task, wait or phase, with its step if that differs; `-` without
    one."""
    if each.amid is None:
        return "-"
    elsewhere = "" if each.step in (step, None) else f" of {step_name(each.step)}"
    return f"{each.amid}{elsewhere}"


def _awaited(each: LastMoments) -> str:
    """Format the task and rank that a rank waited for, `F3 of rank 1`, as far as known; `-` if
    neither is."""
    rank = None if each.awaited_rank is None else f"rank {each.awaited_rank}"
    return " of ".join(filter(None, (each.awaited_task, rank))) or "-"


def _time(seconds: float | None) -> str:
    """Format seconds in a suitable unit; `-` for None."""
    return "-" if seconds is None else format_time(seconds * NS_PER_S)
