"""`rrfp analyze compare`: two runs side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rrfp.cli.options import Evaluations, Format, FrameFormat, Stage, Steps, parse_steps
from rrfp.cli.output import print_frame, tell_evaluations, tell_missing_records
from rrfp.errors import GateError

if TYPE_CHECKING:
    from rrfp.analyze.compare import Comparison


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A run's directory or its trace.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The run to hold against it.")],
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

    Medians over steps, with intervals that hold 95 of 100 bootstrap medians.
    Causes are seconds a step that B has more than A, the mean over ranks, or
    those that hold --stage.
    """
    asked = None if steps is None else parse_steps(steps)

    from rrfp.analyze.cache import load_frames
    from rrfp.analyze.compare import compare as relate
    from rrfp.trace.locate import resolve_trace

    a, b = (
        load_frames(resolve_trace(path), asked, evaluations=evaluations) for path in (first, second)
    )
    tell_missing_records(a, "A: ")
    tell_missing_records(b, "B: ")
    report = relate(a, b, stage)
    if output_format is Format.TABLE:
        tell_evaluations(a, whose="A: ")
        tell_evaluations(b, whose="B: ")
    as_json = report.as_json() | {"evaluations_left_out": [a.num_left_out, b.num_left_out]}
    print_frame(report.frame, as_json, output_format)
    if output_format is Format.TABLE:
        told = _verdict(report, "An evaluation" if evaluations else "A step")
        Console(highlight=False).print(told)
    ratio = report.step_time_ratio
    if fail_above is not None and ratio.low > fail_above:
        raise GateError(
            f"B takes {ratio.median:.3f} times as long as A ({ratio.low:.3f} to {ratio.high:.3f}), "
            f"above the {fail_above:g} of --fail-above"
        )


def _verdict(report: "Comparison", a_step: str) -> str:
    """What the figures say, in a sentence."""
    ratio = report.step_time_ratio
    a_s, b_s = report.step_s
    told = f"{a_step} takes {a_s:.4g} s in A and {b_s:.4g} s in B"
    if not ratio.leaves_out(1):
        return (
            f"{told}: no difference that stands out from the noise of these steps."
            f"{_on_work(report)}"
        )
    faster = "faster" if ratio.median < 1 else "slower"
    return f"{told}: B is {faster}, by {abs(1 - ratio.median):.1%}.{_on_work(report)}"


def _on_work(report: "Comparison") -> str:
    """That the tasks themselves differ, and what remains for the same work."""
    work, same_work = report.work_ratio, report.same_work_ratio
    if work is None or same_work is None or not work.leaves_out(1):
        return ""
    longer = "longer" if work.median > 1 else "less time"
    told = f" Its tasks themselves take {abs(1 - work.median):.1%} {longer}; for the same work"
    if not same_work.leaves_out(1):
        return f"{told} no difference stands out."
    faster = "faster" if same_work.median < 1 else "slower"
    return f"{told} B is {faster}, by {abs(1 - same_work.median):.1%}."
