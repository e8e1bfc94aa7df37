"""`rrfp analyze` and `rrfp analyze findings`: what makes a run's steps long, in one screen."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding

from rrfp.cli.analyze.frames import read_frames
from rrfp.cli.options import Evaluations, Steps, TextFormat, TracePath

if TYPE_CHECKING:
    from rrfp.analyze.findings.findings import Finding


def findings(
    path: TracePath = None,
    steps: Steps = None,
    evaluations: Evaluations = False,
    output_format: Annotated[
        TextFormat, typer.Option("--format", help="How to print the findings.")
    ] = TextFormat.TEXT,
) -> None:
    """Show what makes a run's steps long, by what mending it would save.

    Every suspect is mended in a replay of the run: a slow stage, rank, replica or
    link, uneven microbatches, a binding order, a bound. What no replay can mend
    follows with what it owns of a step.
    """
    import json

    from rrfp.analyze.bubbles import bubbles
    from rrfp.analyze.findings.blame import blame
    from rrfp.analyze.findings.findings import NUM_FINDINGS
    from rrfp.analyze.findings.findings import findings as find
    from rrfp.analyze.findings.replays import replays
    from rrfp.analyze.findings.shares import headline
    from rrfp.replay.culprits import LEAST_SAVING
    from rrfp.trace.locate import resolve_trace
    from rrfp.trace.records import NS_PER_S

    frames = read_frames(path, steps, evaluations)
    name = _name(resolve_trace(path))
    found = blame(frames)
    replayed = replays(frames)
    worth_telling = find(frames, found, replayed.run, replayed.culprits)
    fraction = bubbles(frames).bubble_fraction
    if output_format is TextFormat.JSON:
        told = [each.as_json(name) for each in worth_telling if each.saving is not None]
        as_json = {
            "run": name,
            "step_time_s": found.step_ns / NS_PER_S,
            "bubble_fraction": fraction,
            "findings": told,
        }
        typer.echo(json.dumps(as_json, indent=2))
        return
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(f"{headline(frames, found)} Ranks idle {fraction:.0%} of the time.")
    for number, each in enumerate(worth_telling[:NUM_FINDINGS], start=1):
        _print(console, number, each, name)
    if not worth_telling:
        console.print(f"\nMending any one thing would save less than {LEAST_SAVING:.0%} of a step.")
    if replayed.why_not:
        console.print(f"\nWhat mending would save is not known: {replayed.why_not}.")
    console.print(f"\nNext: rrfp analyze report {name} -o report.html", soft_wrap=True)


def _print(console: Console, number: int, finding: "Finding", run: str) -> None:
    part = (
        f"owns {finding.share:.0%} of a step"
        if finding.saving is None
        else f"mending it saves {finding.saving:.0%}"
    )
    console.print(f"\n{number}. {finding.title}: {part}")
    console.print(Padding(f"{finding.told} {finding.advice}", (0, 0, 0, 3)))
    # On one line, to be copied.
    console.print(f"   {finding.command(run)}", soft_wrap=True)


def _name(trace: Path) -> str:
    """The run as the next command takes it."""
    return str(trace.parent if trace.name == "trace.pftrace" else trace)
