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
    return [
        _sheet(
            f"B over A, medians of {a} and {b} steps",
            "B over A",
            there,
            {name: _ratios(each) for name, each in there.items()},
            1.0,
        ),
        _sheet(
            "What B has more of in a step than A, mean over ranks",
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
        mark_told=_NO_NOISE if notes else "",
    )


def _ratios(each: "Estimate") -> list[str]:
    return [f"{value:.3f}" for value in (each.median, each.low, each.high)]


def _signed(times: Times, seconds: float) -> str:
    told = times.tell(abs(seconds) * NS_PER_S)
    return told if told == "0" else f"{'-' if seconds < 0 else '+'}{told}"
