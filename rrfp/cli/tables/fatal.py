"""The sheet of a run's last moments, a row a rank."""

from typing import TYPE_CHECKING

from rrfp.analyze.units import tell
from rrfp.cli.tables.sheet import Column, Sheet
from rrfp.trace.records import NS_PER_S
from rrfp.trace.steps import step_name

if TYPE_CHECKING:
    from rrfp.analyze.fatal import Fatal, LastMoments

MOST_RANKS = 10
"""Rows that fit a screen of 24 lines."""


def fatal_sheet(fatal: "Fatal", *, is_whole: bool) -> Sheet:
    """What each rank did last, what it was in and what it waited for, up to the end of the run. If
    it is not to be whole and ranks are many, those that waited for nobody come first, then those
    that waited longest."""
    ranks = list(fatal.ranks)
    left = 0
    if not is_whole and len(ranks) > MOST_RANKS:
        ranks.sort(key=lambda each: (each.awaited_rank is not None, -(each.amid_s or 0.0)))
        left = len(ranks) - MOST_RANKS
        ranks = ranks[:MOST_RANKS]
    return Sheet(
        f"{fatal.sentence[:1].upper()}{fatal.sentence[1:]}\n"
        f"What each rank did when it ended, in {step_name(fatal.step)}",
        [
            Column("rank", [str(each.rank) for each in ranks]),
            Column("ended last", [each.last or "-" for each in ranks], is_text=True),
            Column("before\nthe end", [_told(each.last_ended_s) for each in ranks]),
            Column("was in", [_amid(each, fatal.step) for each in ranks], is_text=True),
            Column("for", [_told(each.amid_s) for each in ranks]),
            Column("waited for", [_awaited(each) for each in ranks], is_text=True),
        ],
        [f"{left} more ranks waited for others: --format json" if left else ""],
    )


def _amid(each: "LastMoments", step: int) -> str:
    if each.amid is None:
        return "-"
    elsewhere = "" if each.step in (step, None) else f" of {step_name(each.step)}"
    return f"{each.amid}{elsewhere}"


def _awaited(each: "LastMoments") -> str:
    whom = None if each.awaited_rank is None else f"rank {each.awaited_rank}"
    return " of ".join(filter(None, (each.awaited_task, whom))) or "-"


def _told(seconds: float | None) -> str:
    return "-" if seconds is None else tell(seconds * NS_PER_S)
