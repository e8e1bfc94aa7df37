"""The sheets of a comparison of two runs: how much longer B takes, and for what."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rrfp.analyze.units import Times
from rrfp.cli.tables.sheet import Column, Sheet
from rrfp.trace.records import NS_PER_S

if TYPE_CHECKING:
    from rrfp.analyze.compare import Comparison, Estimate

_NO_NOISE = "more than noise: the interval, which holds 95 of 100 bootstrap medians, is on one side"


def compared_sheets(report: "Comparison", told: Sequence[str]) -> list[Sheet]:
    """The ratios, that for the same work first; then the seconds of each cause."""
    ratios = {
        "step time, for the same work": report.same_work_ratio,
        "step time": report.step_time_ratio,
        "work": report.work_ratio,
    }
    there = {name: each for name, each in ratios.items() if each is not None}
    times = Times(
        ns * NS_PER_S for each in report.causes_s.values() for ns in (each.low, each.high)
    )
    a, b = report.num_steps
    has_clear_cause = any(each.leaves_out(0.0) for each in report.causes_s.values())
    return [
        _sheet(
            f"B over A, medians of {a} and {b} steps",
            "B over A",
            there,
            {name: _ratios(each) for name, each in there.items()},
            1.0,
            # Said once, below the last table that has a mark.
            mark_told="" if has_clear_cause else _NO_NOISE,
        ),
        _sheet(
            f"What B has more of in a step than A, mean over {report.ranks_told}",
            "B less A",
            report.causes_s,
            {
                name: [_signed(times, s) for s in (each.median, each.low, each.high)]
                for name, each in report.causes_s.items()
            },
            0.0,
            [each for each in told if each],
        ),
    ]


def _sheet(
    title: str,
    heading: str,
    estimates: "dict[str, Estimate]",
    rows: dict[str, list[str]],
    nothing: float,
    notes: Sequence[str] = (),
    mark_told: str = _NO_NOISE,
) -> Sheet:
    clear = [row for row, each in enumerate(estimates.values()) if each.leaves_out(nothing)]
    medians, lows, highs = zip(*rows.values(), strict=True)
    return Sheet(
        title,
        [
            Column("", list(rows), is_text=True),
            Column(heading, medians, marked=clear),
            Column("from", lows),
            Column("to", highs),
        ],
        notes,
        mark_told=mark_told,
    )


def _ratios(each: "Estimate") -> list[str]:
    return [f"{value:.3f}" for value in (each.median, each.low, each.high)]


def _signed(times: Times, seconds: float) -> str:
    told = times.tell(abs(seconds) * NS_PER_S)
    if told == "0" or told.startswith("<"):
        return told
    return f"{'-' if seconds < 0 else '+'}{told}"
