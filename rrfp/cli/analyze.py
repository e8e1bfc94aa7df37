"""`rrfp analyze`: reports from a run's trace."""

import csv
import json
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.cli.compare import compare
from rrfp.cli.options import Steps, TracePath, parse_steps
from rrfp.cli.orders import critical_path, deviations, misalignment
from rrfp.errors import RrfpError
from rrfp.hint_files import resolve_hint
from rrfp.schedule.dispatcher import Dispatch
from rrfp.trace.records import NS_PER_S

if TYPE_CHECKING:
    from rrfp.analyze.bubbles import Bubbles
    from rrfp.analyze.whatif import Change, WhatIf
    from rrfp.simulate.recorded import RecordedRun

app = typer.Typer(help="Reports from a run's trace.", no_args_is_help=True)


class Format(StrEnum):
    """How a report is printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


NOT_WHOLE = "they are not whole training steps"
"""Why a step is not replayed."""

OutputFormat = Annotated[Format, typer.Option("--format", help="How to print the report.")]


@app.callback()
def _options() -> None:
    """Reports from a run's trace."""


@app.command(epilog="Example: rrfp analyze bubbles runs/latest --steps 3:10 --fail-above 0.4")
def bubbles(
    path: TracePath = None,
    steps: Steps = None,
    output_format: OutputFormat = Format.TABLE,
    fail_above: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Exit with 1 when the bubble fraction is above this."),
    ] = None,
) -> None:
    """Show how much of each rank's time was idle, and why."""
    asked = None if steps is None else parse_steps(steps)

    from rrfp.analyze.bubbles import bubbles as divide
    from rrfp.trace.perfetto import read_trace
    from rrfp.trace.rundir import resolve_trace

    report = divide(read_trace(resolve_trace(path)), asked)
    tell_left_out(report.dropped_steps, "not every rank finished them")
    match output_format:
        case Format.TABLE:
            _print_table(report)
        case Format.JSON:
            print(json.dumps(report.as_json()))
        case Format.CSV:
            _print_csv(report)
    if fail_above is not None and report.bubble_fraction > fail_above:
        raise RrfpError(
            f"the bubble fraction is {report.bubble_fraction:.4f}, above the {fail_above:g} of "
            f"--fail-above"
        )


@app.command(
    epilog="Examples: rrfp analyze whatif runs/latest; "
    "rrfp analyze whatif runs/latest --hint bfw --hint zb-h1 --hold 8"
)
def whatif(
    path: TracePath = None,
    hint: Annotated[
        list[str] | None,
        typer.Option(help="A hint's name or an order file; may be given several times."),
    ] = None,
    dispatch: Annotated[
        Dispatch | None,
        typer.Option(
            help="What the hint is to the dispatcher; --hint, --limit or --hold without it make it "
            "ready."
        ),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(metavar="N", help="Forwards a rank may run ahead of its backwards, or none."),
    ] = None,
    hold: Annotated[
        int | None,
        typer.Option(min=1, help="Activations kept on a rank, in whole-rank microbatches."),
    ] = None,
    without_jitter: Annotated[
        bool, typer.Option("--without-jitter", help="Let every task take the mean of its kind.")
    ] = False,
    median_stage: Annotated[
        int | None,
        typer.Option(min=0, metavar="STAGE", help="Make a stage as fast as the one in the middle."),
    ] = None,
    free_links: Annotated[
        bool, typer.Option("--free-links", help="Let messages take no time.")
    ] = False,
    w_share: Annotated[
        float | None,
        typer.Option(
            help="The weight gradient's share of a backward that was recorded whole, for hints "
            "that split it; without it, that of F, B and W as 1 : 0.9 : 0.6."
        ),
    ] = None,
    steps: Steps = None,
    output_format: OutputFormat = Format.TABLE,
) -> None:
    """Replay a run under other hints and bounds, or without what slowed it.

    The run's own policy is replayed first; how far that is from what was
    measured tells whether the replay is sound. What is asked for holds together
    in every row, and each --hint makes one; without any, a sensible set is shown.
    Savings are shares of the run's own replayed time.
    """
    asked = None if steps is None else parse_steps(steps)

    from rrfp.analyze.whatif import Change, what_if
    from rrfp.cli.sweep import count_or_none
    from rrfp.trace.perfetto import read_trace
    from rrfp.trace.rundir import resolve_trace

    bound = None if limit is None else count_or_none("limit", limit)

    def changes(run: "RecordedRun") -> "list[Change]":
        hints = [resolve_hint(text, run.shape) for text in hint] if hint else [None]
        return [
            Change(
                each,
                dispatch,
                bound,
                hold,
                limit is not None and bound is None,
                without_jitter=without_jitter,
                median_stage=median_stage,
                free_links=free_links,
            )
            for each in hints
        ]

    choices = (hint, dispatch, limit, hold, without_jitter or None, median_stage)
    is_asked = free_links or any(choice is not None for choice in choices)
    recording = read_trace(resolve_trace(path))
    report = what_if(recording, changes if is_asked else None, asked, w_share)
    tell_left_out(report.run.left_out, NOT_WHOLE)
    match output_format:
        case Format.TABLE:
            _print_whatif(report)
        case Format.JSON:
            print(json.dumps(report.as_json()))
        case Format.CSV:
            _print_whatif_csv(report)


app.command(epilog="Example: rrfp analyze deviations runs/latest --fail-above 0.2")(deviations)
app.command(epilog="Example: rrfp analyze misalignment runs/latest --steps 3:10")(misalignment)
app.command(epilog="Example: rrfp analyze compare runs/before runs/after --steps 1:")(compare)
app.command("critical-path", epilog="Example: rrfp analyze critical-path runs/latest --step 4")(
    critical_path
)


def tell_left_out(steps: tuple[int, ...], why: str) -> None:
    """Name on stderr the steps that a report does not count."""
    if steps:
        typer.echo(f"left out, as {why}: steps {', '.join(map(str, steps))}", err=True)


def _print_table(report: "Bubbles") -> None:
    from rich.console import Console

    from rrfp.cli.tables import bubble_table

    Console().print(bubble_table(report))


def _print_csv(report: "Bubbles") -> None:
    """A row a rank; times in seconds."""
    from rrfp.analyze.bubbles import CAUSES

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["rank", "pp_rank", "stages", "bubble_fraction", "window_s", "busy_s", *CAUSES])
    for rank in report.ranks:
        times_ns = (rank.window_ns, rank.busy_ns, *(rank.causes_ns[cause] for cause in CAUSES))
        writer.writerow(
            [
                rank.info.rank,
                rank.info.pp_rank,
                " ".join(map(str, rank.info.stages)),
                rank.bubble_fraction,
                *(time_ns / NS_PER_S for time_ns in times_ns),
            ]
        )


def _print_whatif(report: "WhatIf") -> None:
    from rich.console import Console

    from rrfp.cli.tables import whatif_table

    # The name of an order file may look like a style.
    console = Console(highlight=False, markup=False, emoji=False)
    num_steps, bubble = len(report.run.steps), report.bubble.whole
    console.print(
        f"{num_steps} {'steps' if num_steps > 1 else 'step'}, measured "
        f"{report.measured_ns / NS_PER_S:.4g} s each (median); replayed as it was, the run is "
        f"{report.replay_error:.1%} off."
    )
    console.print(whatif_table(report))
    jitter = f"{'added' if bubble.excess > 0 else 'took off'} {abs(bubble.excess):.0%}"
    if abs(bubble.excess) < 0.005:
        jitter = "changed nothing"
    console.print(
        f"{bubble.fraction:.0%} of the ranks' time was bubble. Tasks at their mean times would "
        f"have left {bubble.structural:.0%}; jitter {jitter}."
    )
    for sentence in filter(None, (report.conclusion, report.caution)):
        console.print(sentence)


def _print_whatif_csv(report: "WhatIf") -> None:
    """A row a change; times in seconds, held activations by pipeline rank."""
    rows = [row.as_json(report.run.shape.num_chunks) for row in report.rows]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(rows[0])
    for row in rows:
        writer.writerow(
            " ".join(f"{held:g}" for held in value) if isinstance(value, list) else value
            for value in row.values()
        )
