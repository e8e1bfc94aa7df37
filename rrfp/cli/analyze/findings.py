"""`rrfp analyze` and `rrfp analyze findings`: what makes a run's steps long, in one screen."""

import json
from shlex import quote
from typing import TYPE_CHECKING

import typer

from rrfp.cli.analyze.screen import Part, fitted
from rrfp.cli.options import Evaluations, Format, FrameFormat, Steps, TracePath, parse_steps
from rrfp.cli.output import (
    print_frame,
    print_sheets,
    tell_evaluations,
    tell_missing_records,
    tell_warm_up,
)
from rrfp.cli.progress import working

if TYPE_CHECKING:
    import polars as pl

    from rrfp.analyze.fatal import Fatal
    from rrfp.analyze.findings.diagnosis import Diagnosis
    from rrfp.analyze.findings.findings import Finding
    from rrfp.analyze.frames import Frames

_NOTABLE_ERROR = 0.01
"""Of a replay: what fixing saves is told from 1% on."""


def findings(
    path: TracePath = None,
    steps: Steps = None,
    evaluations: Evaluations = False,
    output_format: FrameFormat = Format.TABLE,
) -> None:
    """Show what makes a run's steps long, by what fixing it would save.

    Every suspect is fixed in a replay of the run: a slow stage, rank, replica or
    link, uneven microbatches, a binding order, a bound. What no replay can fix
    follows with what it owns of a step.

    Of a run that ended before its time it shows the last moments instead: what
    each rank was in and waited for. --steps asks for the steps before.
    """
    asked = None if steps is None else parse_steps(steps)

    from rrfp.analyze.cache import CachedTrace
    from rrfp.analyze.chosen import choose
    from rrfp.analyze.fatal import fatal_of
    from rrfp.trace.locate import find_run, resolve_trace

    run = find_run(path)
    with working("Reading the trace"):
        cached = CachedTrace(resolve_trace(run))
        everything = cached.frames()
        fatal = fatal_of(everything)
    # The commands look at what this one has looked at.
    name = f"./{run}" if str(run).startswith("-") else str(run)
    if fatal is not None and asked is None and not evaluations:
        if output_format in (Format.TABLE, Format.MD):
            _print_fatal(fatal, everything, name, markdown=output_format is Format.MD)
            return
        if output_format is Format.JSON and everything.windows.is_empty():
            typer.echo(json.dumps({"run": name, "fatal": fatal.as_json()}, indent=2))
            return
    with working("Reading the trace"):
        frames = choose(everything, asked, evaluations=evaluations)
    tell_missing_records(frames)
    tell_warm_up(frames)
    with working("Replaying the run without each suspect"):
        found = cached.diagnosis(asked, evaluations=evaluations)
    if output_format in (Format.TABLE, Format.MD):
        tell_evaluations(frames)
    chosen = "" if steps is None else f" --steps {steps}"
    chosen += " --evaluations" if evaluations else ""
    following = f"rrfp analyze report {quote(name)}{chosen} -o report.html"
    match output_format:
        case Format.TABLE:
            parts = _parts(found, name, steps)
            lead, last = _lead(found), [*_rest(found, frames), f"Next: {following}"]
            from rrfp.cli.terminal.console import console

            terminal = console()
            for line in fitted(terminal, lead, parts, last):
                terminal.print(line, soft_wrap=True)
        case Format.MD:
            print(_markdown(found, _rest(found, frames), name, steps, following))
        case Format.JSON:
            as_json = found.as_json(name, steps)
            as_json["evaluations_left_out"] = frames.num_left_out
            if fatal is not None:
                as_json["fatal"] = fatal.as_json()
            if frames.warm_up:
                as_json["warm_up_left_out"] = list(frames.warm_up)
            typer.echo(json.dumps(as_json, indent=2))
        case _:
            print_frame(_frame(found, name, steps), {}, output_format, lambda: ())


def _print_fatal(fatal: "Fatal", frames: "Frames", name: str, *, markdown: bool) -> None:
    """The last moments of a run, and where to look next."""
    from rrfp.cli.tables.fatal import fatal_sheet

    print_sheets([fatal_sheet(fatal, is_whole=markdown)], markdown=markdown)
    if not frames.windows.is_empty():
        print(f"Next, its finished steps: rrfp analyze {quote(name)} --steps 0:")


def _shown(found: "Diagnosis") -> "tuple[Finding, ...]":
    from rrfp.analyze.findings.findings import NUM_FINDINGS

    return found.findings[:NUM_FINDINGS]


def _lead(found: "Diagnosis") -> str:
    return f"{found.headline} Ranks idle {found.bubble_fraction:.0%} of the time."


def _rest(found: "Diagnosis", frames: "Frames") -> list[str]:
    """What is to be said below the findings."""
    if found.why_not_replayed:
        return [f"What fixing would save is not known: {found.why_not_replayed}."]
    if not found.findings:
        return ["Fixing any one thing would save less than 1% of a step."]
    told = []
    num_steps = frames.windows.height
    if found.num_replayed < num_steps:
        told.append(f"Savings are those of {found.num_replayed} of the {num_steps} steps.")
    if found.replay_error >= _NOTABLE_ERROR:
        told.append(f"Replays are {found.replay_error:.0%} off; smaller savings are uncertain.")
    return [" ".join(told)] if told else []


def _titled(finding: "Finding") -> str:
    part = (
        f"owns {finding.share:.0%} of a step"
        if finding.saving is None
        else f"fixing it saves {finding.saving:.0%}"
    )
    return f"{finding.title}: {part}"


def _parts(found: "Diagnosis", name: str, steps: str | None) -> list[Part]:
    return [
        Part(
            f"{number}. {_titled(each)}",
            f"{each.told} {each.advice}",
            each.command(name, steps),
        )
        for number, each in enumerate(_shown(found), start=1)
    ]


def _markdown(
    found: "Diagnosis", rest: list[str], name: str, steps: str | None, following: str
) -> str:
    from rrfp.cli.tables.sheet import escaped

    paragraphs = [escaped(_lead(found))]
    for number, each in enumerate(_shown(found), start=1):
        paragraphs.append(f"{number}. **{escaped(_titled(each))}**")
        paragraphs.append(f"   {escaped(f'{each.told} {each.advice}')}")
        paragraphs.append(f"   ```sh\n   {each.command(name, steps)}\n   ```")
    paragraphs += map(escaped, rest)
    return "\n\n".join([*paragraphs, f"Next:\n\n```sh\n{following}\n```"])


def _frame(found: "Diagnosis", name: str, steps: str | None) -> "pl.DataFrame":
    """A row a finding, also those that the screen has no room for."""
    import polars as pl

    rows = [each.as_json(name, steps) for each in found.findings]
    links = [
        None if each.link is None else "-".join(map(str, each.link)) for each in found.findings
    ]
    schema = {
        "kind": pl.String,
        "pp_rank": pl.Int64,
        "rank": pl.Int64,
        "link": pl.String,
        "saving_fraction": pl.Float64,
        "share_fraction": pl.Float64,
        "text": pl.String,
        "command": pl.String,
    }
    flat = [row | {"link": link} for row, link in zip(rows, links, strict=True)]
    return pl.DataFrame([[row[key] for key in schema] for row in flat], schema=schema, orient="row")
