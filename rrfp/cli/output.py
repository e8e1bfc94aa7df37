"""Reading the frames of a run, and the notes on stderr about steps that an analysis leaves out."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rrfp.cli.console import print_report
from rrfp.cli.options import PEOPLE, Format, parse_steps
from rrfp.cli.progress import working
from rrfp.errors import GateError, RrfpError, UsageError
from rrfp.requirements import install_hint
from rrfp.trace.records import EVALUATION, counted, step_names

if TYPE_CHECKING:
    from rrfp.analyze.frames import Frames
    from rrfp.analyze.table import Table


def note(sentence: str) -> None:
    """Print a sentence on stderr."""
    typer.echo(sentence, err=True)


def missing_for_charts() -> list[str]:
    """Return the packages of the extra `report` (altair, vl_convert) that this installation lacks,
    without importing them."""
    return [name for name in ("altair", "vl_convert") if find_spec(name) is None]


def check_report_extra() -> None:
    """Raise RrfpError, with the command that installs it, if a package that draws charts is
    missing."""
    if missing := missing_for_charts():
        raise RrfpError(
            f"charts need {' and '.join(missing)}, which this installation lacks; "
            f"{install_hint('report')}"
        )


_PAGES = (".html", ".htm")
NOT_WHOLE = "they are not whole training steps"
WITHOUT_SIZES = "the bytes of their microbatches were not known yet"
"""Reasons why a step is not replayed."""


def read_frames(
    path: Path | None, steps: str | None, evaluations: bool, *, with_warm_up: bool = False
) -> "Frames":
    """Read the frames of a run's training steps, or of its evaluations, and print on stderr what
    the trace lacks.

    `path` None is the newest run; `steps` is `A:B`. None selects all steps, without the slow first
    ones unless `with_warm_up`. Raises UsageError for a wrong range and if no step is left, and
    RrfpError if there is no trace.
    """
    asked = None if steps is None else parse_steps(steps)

    from rrfp.analyze.frame_files import load_frames
    from rrfp.trace.locate import resolve_trace

    with working("Reading the trace"):
        frames = load_frames(
            resolve_trace(path), asked, evaluations=evaluations, with_warm_up=with_warm_up
        )
    note_missing_records(frames)
    return frames


def print_analysis(frames: "Frames", table: "Table", output_format: Format) -> None:
    """Print a table of these frames on stdout, and on stderr the warm-up steps that they leave out;
    in formats for people also how many evaluations."""
    note_warm_up(frames)
    if output_format in PEOPLE:
        note_evaluations(frames)
    print_report([table], output_format, left_out_json(frames))


def left_out_json(frames: "Frames") -> dict[str, object]:
    """Return the JSON members about steps left out: the number of evaluations, and the numbers of
    the warm-up steps if there are any."""
    warm_up = {"warm_up_left_out": list(frames.warm_up)} if frames.warm_up else {}
    return {"evaluations_left_out": frames.num_left_out, **warm_up}


def check_threshold(most: float | None, found: Any, what: str) -> None:
    """Raise GateError if `found` is above `most`, the value of --fail-above; None allows anything.
    `what` names the figure."""
    if most is not None and found > most:
        raise GateError(f"{what} is {found:.4g}, above the {most:g} of --fail-above")


def check_page(path: Path) -> None:
    """Raise UsageError unless the name ends in .html or .htm. A directory passes, because writing
    refuses it."""
    if path.suffix.lower() not in _PAGES and not path.is_dir():
        raise UsageError(
            f"'{path}' is no file for a page; give it a name that ends in {' or '.join(_PAGES)}"
        )


def note_missing_records(frames: "Frames", whose: str = "") -> None:
    """Print on stderr a note for each kind of records that a trace lacks. `whose` precedes it, to
    distinguish several traces."""
    from rrfp.analyze.frames import missing_records

    for sentence in missing_records(frames):
        typer.echo(f"note: {whose}{sentence}; see 'rrfp trace check'", err=True)


def note_left_out(steps: tuple[int, ...], why: str) -> None:
    """Print on stderr the steps that a report does not count, and the reason; nothing without
    steps."""
    if steps:
        typer.echo(f"left out, as {why}: {step_names(steps)}", err=True)


def note_warm_up(frames: "Frames", whose: str = "") -> None:
    """Print on stderr the slow first steps that a report leaves out, if any, and the --steps that
    includes them."""
    if frames.warm_up:
        names, them = step_names(frames.warm_up), "it" if len(frames.warm_up) == 1 else "them"
        typer.echo(f"{whose}skipped as warm-up: {names} (--steps 0: includes {them})", err=True)


def note_evaluations(
    frames: "Frames", more: str = "--evaluations looks at them", whose: str = ""
) -> None:
    """Print on stderr how many evaluations a report leaves out, followed by the advice `more`;
    nothing if none. `whose` distinguishes runs."""
    if frames.num_left_out:
        number = counted(frames.num_left_out, EVALUATION)
        typer.echo(f"{whose}left out: {number}; {more}", err=True)
