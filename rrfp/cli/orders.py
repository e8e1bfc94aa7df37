"""`rrfp analyze deviations`, `misalignment` and `critical-path`: how a run's order came about."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.cli.options import (
    Evaluations,
    Format,
    FrameFormat,
    Stage,
    Steps,
    TracePath,
    check_threshold,
    parse_steps,
    print_frame,
    step_asked,
    tell_evaluations,
    tell_lacking,
    tell_left_out,
)
from rrfp.trace.records import NS_PER_S
from rrfp.trace.steps import step_name

if TYPE_CHECKING:
    import polars as pl

    from rrfp.analyze.frames import Frames


def deviations(
    path: TracePath = None,
    steps: Steps = None,
    stage: Stage = None,
    evaluations: Evaluations = False,
    output_format: FrameFormat = Format.TABLE,
    fail_above: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Exit with 1 when a rank deviates more often than this."),
    ] = None,
) -> None:
    """Show how far each pipeline rank departed from its hint's order.

    A dispatch deviates by the unfinished tasks that the hint ranks above it.
    The distance is the share of a step's pairs of tasks that ran the other
    way round.
    """
    from rrfp.analyze import deviations as module
    from rrfp.analyze.frames import windows

    frames = _frames(path, steps, evaluations)
    report = module.deviations(frames, stage)
    unfinished = set(frames.steps) - set(windows(frames)["step"])
    tell_left_out(tuple(unfinished), "not every rank finished them")
    _print(frames, report, module.as_json(report), output_format)
    check_threshold(fail_above, report["deviating_fraction"].max(), "a rank's deviating fraction")


def misalignment(
    path: TracePath = None,
    steps: Steps = None,
    stage: Stage = None,
    evaluations: Evaluations = False,
    output_format: FrameFormat = Format.TABLE,
    fail_above: Annotated[
        float | None,
        typer.Option(min=0, help="Exit with 1 when a link's p95 of seconds starved is above this."),
    ] = None,
) -> None:
    """Show on each link how long messages lay ready, and how long stages idled for them."""
    from rrfp.analyze import misalignment as module

    frames = _frames(path, steps, evaluations)
    report = module.misalignment(frames if stage is None else frames.of_stage(stage))
    _print(frames, report, module.as_json(report), output_format)
    check_threshold(fail_above, report["starved_s_p95"].max(), "a link's p95 of seconds starved")


def critical_path(
    path: TracePath = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="The step to look at; the slowest one without it.")
    ] = None,
    steps: Steps = None,
    stage: Stage = None,
    evaluations: Evaluations = False,
    output_format: FrameFormat = Format.TABLE,
    fail_above: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Exit with 1 when links and waits own more of the step than this."
        ),
    ] = None,
) -> None:
    """Show which tasks, links and waits made a step as long as it was.

    The chain goes from the end of the step back to its start, each time to
    what came last of the things that a task needed.
    """
    from rrfp.analyze.critical_path import critical_path as walk

    frames = _frames(path, steps, evaluations)
    report = walk(frames, step_asked(frames, step, evaluations=evaluations))
    if stage is not None:
        report = report.of_rank(frames.rank_of(stage))
    if output_format is Format.TABLE:
        name = step_name(report.step).capitalize()
        typer.echo(f"{name} took {report.length_ns / NS_PER_S:.4g} s, of which")
    _print(frames, report.frame, report.as_json(), output_format)
    check_threshold(fail_above, report.idle_fraction, "what links and waits own of the step")


def _frames(path: Path | None, steps: str | None, evaluations: bool) -> "Frames":
    """The tables of a run, of the steps or the evaluations that are asked for."""
    asked = None if steps is None else parse_steps(steps)

    from rrfp.analyze.cache import load_frames
    from rrfp.trace.rundir import resolve_trace

    frames = load_frames(resolve_trace(path), asked, evaluations=evaluations)
    tell_lacking(frames)
    return frames


def _print(
    frames: "Frames", report: "pl.DataFrame", as_json: dict[str, object], output_format: Format
) -> None:
    """Print a report of these tables, and what they leave out."""
    if output_format is Format.TABLE:
        tell_evaluations(frames)
    as_json |= {"evaluations_left_out": frames.num_left_out}
    print_frame(report, as_json, output_format)
