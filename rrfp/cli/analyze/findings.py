"""`rrfp analyze` and `rrfp analyze findings`: what makes a run's steps long, in one screen."""

import json
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding

from rrfp.cli.options import Evaluations, Steps, TextFormat, TracePath, parse_steps
from rrfp.cli.output import tell_missing_records

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
    asked = None if steps is None else parse_steps(steps)

    from rrfp.analyze.cache import CachedTrace
    from rrfp.analyze.chosen import choose
    from rrfp.analyze.findings.findings import NUM_FINDINGS
    from rrfp.trace.locate import resolve_trace

    trace = resolve_trace(path)
    cached = CachedTrace(trace)
    tell_missing_records(choose(cached.frames(), asked, evaluations=evaluations))
    found = cached.diagnosis(asked, evaluations=evaluations)
    name = str(trace.parent if trace.name == "trace.pftrace" else trace)
    if output_format is TextFormat.JSON:
        typer.echo(json.dumps(found.as_json(name, steps), indent=2))
        return
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(f"{found.headline} Ranks idle {found.bubble_fraction:.0%} of the time.")
    for number, each in enumerate(found.findings[:NUM_FINDINGS], start=1):
        _print(console, number, each, each.command(name, steps))
    if found.why_not_replayed:
        console.print(f"\nWhat mending would save is not known: {found.why_not_replayed}.")
    elif not found.findings:
        console.print("\nMending any one thing would save less than 1% of a step.")
    chosen = "" if steps is None else f" --steps {steps}"
    chosen += " --evaluations" if evaluations else ""
    console.print(
        f"\nNext: rrfp analyze report {quote(name)}{chosen} -o report.html", soft_wrap=True
    )


def _print(console: Console, number: int, finding: "Finding", command: str) -> None:
    part = (
        f"owns {finding.share:.0%} of a step"
        if finding.saving is None
        else f"mending it saves {finding.saving:.0%}"
    )
    console.print(f"\n{number}. {finding.title}: {part}")
    console.print(Padding(f"{finding.told} {finding.advice}", (0, 0, 0, 3)))
    # On one line, to be copied.
    console.print(f"   {command}", soft_wrap=True)
