"""`rrfp analyze compare`: two runs side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.analyze.number_format import Times
from rrfp.cli.declared_options import run_names
from rrfp.cli.options import Evaluations, Format, FrameFormat, Stage, Steps, parse_steps
from rrfp.cli.output import (
    check_page,
    check_report_extra,
    print_frame,
    tell_evaluations,
    tell_missing_records,
    tell_warm_up,
)
from rrfp.cli.progress import working
from rrfp.cli.tables import Column, Sheet
from rrfp.errors import GateError
from rrfp.trace.records import NS_PER_S

if TYPE_CHECKING:
    from rrfp.analyze.compare import Comparison, Estimate


# The sheets of a comparison of two runs: how much longer B takes, and for what.


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


def compare(
    first: Annotated[
        Path,
        typer.Argument(
            metavar="A", help="A run, as rrfp analyze takes it.", autocompletion=run_names
        ),
    ],
    second: Annotated[
        Path,
        typer.Argument(metavar="B", help="The run to hold against it.", autocompletion=run_names),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="Write a page too, with both runs on one axis."
        ),
    ] = None,
    steps: Steps = None,
    stage: Stage = None,
    evaluations: Evaluations = False,
    output_format: FrameFormat = Format.TABLE,
    fail_above: Annotated[
        float | None,
        typer.Option(
            min=0, help="Exit with 3 when B takes more than this times A, and that is no noise."
        ),
    ] = None,
) -> None:
    """Compare run B with run A: how long its steps take, and which causes moved.

    For the same work first: a busier machine makes tasks long, for which no
    schedule answers. Medians over steps, with intervals that hold 95 of 100
    bootstrap medians. Causes are seconds a step that B has more than A, the mean
    over ranks, or those that hold --stage.
    """
    asked = None if steps is None else parse_steps(steps)

    if out is not None:
        check_page(out)
        check_report_extra()

    from rrfp.analyze.compare import compare as relate
    from rrfp.analyze.compare import differences, verdict, warning
    from rrfp.analyze.frame_files import load_frames
    from rrfp.trace.locate import resolve_trace

    with working("Reading the traces"):
        traces = [resolve_trace(path) for path in (first, second)]
        a, b = (load_frames(trace, asked, evaluations=evaluations) for trace in traces)
    for whose, frames in (("A: ", a), ("B: ", b)):
        tell_missing_records(frames, whose)
        tell_warm_up(frames, whose)
        if output_format in (Format.TABLE, Format.MD):
            tell_evaluations(frames, whose=whose)
    with working("Comparing the runs"):
        report = relate(a, b, stage)
    unlike = differences(a, b)
    as_json = report.as_json() | {
        "differences": unlike,
        "evaluations_left_out": [a.num_left_out, b.num_left_out],
    }
    if a.warm_up or b.warm_up:
        as_json["warm_up_left_out"] = [list(a.warm_up), list(b.warm_up)]
    told = verdict(report, "An evaluation" if evaluations else "A step")

    def sheets() -> "list[Sheet]":

        return compared_sheets(report, [*told, report.told_memory, warning(unlike)])

    print_frame(report.frame, as_json, output_format, sheets)
    if out is not None:
        from rrfp.analyze.charts.export import write_file
        from rrfp.analyze.report import comparison_page, report_of

        names = [report_of(trace) for trace in traces]
        said = [*told, *filter(None, [report.told_memory])]
        write_file(out, comparison_page(names, [a, b], report, unlike, said).encode())
        typer.echo(f"The page is {out}", err=True)
    ratio = report.step_time_ratio
    if fail_above is not None and ratio.low > fail_above:
        raise GateError(
            f"B takes {ratio.median:.3f} times as long as A ({ratio.low:.3f} to {ratio.high:.3f}), "
            f"above the {fail_above:g} of --fail-above"
        )
