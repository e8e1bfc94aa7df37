"""`rrfp watch`: a live page about a running job, alerts, and metrics for dashboards."""

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rrfp.cli.declared_options import run_names
from rrfp.errors import RrfpError, UsageError
from rrfp.trace.locate import find_run
from rrfp.trace.run_dir import RUNS, runs_in

_POLL_S = 0.5


class WatchFormat(StrEnum):
    """Output formats of `rrfp watch`."""

    TABLE = "table"
    JSON = "json"


def watch(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN",
            help="A run: its directory, its name in runs/, or @-1 for the newest; none means the "
            "newest one.",
            autocompletion=run_names,
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Show the run once and exit.")] = False,
    alert: Annotated[
        bool,
        typer.Option(
            "--alert",
            help="Print no page, but a line when a rank, stage, replica or link has been slow for "
            "10 steps, and when it has recovered.",
        ),
    ] = False,
    alert_command: Annotated[
        str | None,
        typer.Option(
            metavar="CMD",
            help="Shell command to run for each alert; $RRFP_ALERT_TEXT is the line, and other "
            "RRFP_ALERT_* variables are its parts.",
        ),
    ] = None,
    export: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND:WHERE",
            help="Export each step's metrics: tensorboard:DIR, prometheus:FILE, otel:URL or "
            "wandb:DIR (offline); repeatable.",
        ),
    ] = None,
    output_format: Annotated[
        WatchFormat,
        typer.Option("--format", help="json: one object per line for each step, alert and change."),
    ] = WatchFormat.TABLE,
) -> None:
    """Watch a running job: how busy each stage is, why it waits, and which rank became slow.

    Only reads the run's directory, so the run is not disturbed. Ends with the
    run or on Ctrl-C.
    """
    path = _find(run)
    if alert and once:
        raise UsageError("--alert waits for steps to come and --once does not; leave one out")
    # Imported late: numpy and rich.
    from rrfp.cli.watch.loop import AlertCommand, watch_run
    from rrfp.cli.watch.views import Lines, LivePage, OncePage, View
    from rrfp.watch.exporters import open_exporter
    from rrfp.watch.follow import Follower

    name = path.resolve().name
    exporters = {asked: open_exporter(asked, name) for asked in export or []}
    follower = Follower(path)
    view: View
    if output_format is WatchFormat.JSON:
        view = Lines(follower, as_json=True, only_alerts=alert)
    elif once:
        view = OncePage(follower)
    elif alert or not sys.stdout.isatty():
        view = Lines(follower, as_json=False, only_alerts=alert)
    else:
        view = LivePage(follower)
    command = None if alert_command is None else AlertCommand(alert_command)
    watch_run(follower, view, exporters, command, once=once, sleep=lambda: time.sleep(_POLL_S))


def _find(run: Path | None) -> Path:
    """Return the directory of a run; None means the newest, even if it has no records yet. Raises
    RrfpError if there is no such run, and UsageError if it is no directory."""
    if run is None:
        found = runs_in()
        if not found:
            raise RrfpError(f"there is no run yet in {RUNS}; make one with 'rrfp train'")
        return found[0]
    path = find_run(run)
    if not path.is_dir():
        raise UsageError(
            f"{path} is not the directory of a run, which is what is watched; 'rrfp analyze' reads "
            "a trace"
        )
    return path
