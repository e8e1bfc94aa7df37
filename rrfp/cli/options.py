"""Arguments and options that several verbs take."""

import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.cli.declared_options import run_names
from rrfp.errors import UsageError
from rrfp.trace.records import evaluation_step, is_evaluation

if TYPE_CHECKING:
    from rrfp.analyze.frames import Frames

import copy
from collections.abc import Callable
from typing import Any

from typer.core import TyperCommand

from rrfp.cli.declared_options import HINT_TABLE, word_for
from rrfp.schedule.named_hints import HINTS

PATH_HELP = (
    "A run: its directory, its name in runs/, @-1 for the newest, or its trace file; none means "
    "the newest one."
)
STEPS_HELP = "Only the steps from A up to, not including, B."

TracePath = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN",
        help=PATH_HELP,
        autocompletion=run_names,
    ),
]
Steps = Annotated[
    str | None,
    typer.Option(metavar="A:B", help=STEPS_HELP),
]
Evaluations = Annotated[
    bool,
    typer.Option(
        "--evaluations",
        help="Look at the run's evaluations, which are left out otherwise; steps are then counted "
        "among these.",
    ),
]
Stage = Annotated[
    int | None, typer.Option(min=0, help="Only the pipeline rank that holds this stage.")
]


class PlainFormat(StrEnum):
    """How findings about no run are printed."""

    TABLE = "table"
    JSON = "json"


class RowFormat(StrEnum):
    """How rows of a comparison are printed."""

    TABLE = "table"
    MD = "md"
    JSON = "json"
    CSV = "csv"


class Format(StrEnum):
    """How a report is printed."""

    TABLE = "table"
    MD = "md"
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"


PEOPLE = (Format.TABLE, Format.MD)
"""The formats for people; the others are for programs."""


class By(StrEnum):
    """The rows of a table."""

    STAGE = "stage"
    RANK = "rank"


FrameFormat = Annotated[
    Format,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="table, md (Markdown, as GitHub has it), json, csv or parquet.",
    ),
]
ByRank = Annotated[
    By,
    typer.Option(
        "--by", help="One row per stage, or per rank where several ranks share the work of a stage."
    ),
]


def parse_steps(text: str) -> range:
    """Read `A:B`; either number may be left out. Raises UsageError for anything else."""
    match = re.fullmatch(r"(\d{0,18}):(\d{0,18})", text)
    if match is None:
        raise UsageError(f"--steps takes a range such as 3:10, not '{text}'")
    start = int(match[1] or 0)
    stop = int(match[2]) if match[2] else sys.maxsize
    if start >= stop:
        raise UsageError(f"--steps {text} is empty; the second number must be the larger one")
    return range(start, stop)


def step_asked(frames: "Frames", number: int | None, *, evaluations: bool) -> int | None:
    """The step of that number as a trace numbers it: one that trains, or an evaluation."""
    if number is None or not evaluations or not any(map(is_evaluation, frames.steps)):
        return number
    return evaluation_step(number)


# How the help of a command reads: types as INT or PATH, and a short screen before the long one.

_ALL = "rrfp.help_all"
"""The key of a context's `meta` that asks for every option."""

_COMMON_PANEL = "Common options"


class Command(TyperCommand):
    """A command whose help shows the types of its parameters as words."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)
        for param in params:
            shown = param.metavar if param.param_type_name == "option" else ""
            if shown is None:
                shown = _metavar(param.type_descriptor.annotation)
            param.display_type_rich = _constantly(shown)
        return params


class SettingsCommand(Command):
    """A command with more options than one screen takes: `--help` shows the common ones, and
    `--help-all` every one."""

    common: frozenset[str] = frozenset()
    """The names of the common options' parameters, without those of the command itself."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        if ctx.meta.get(_ALL, True):
            return params
        own = [each for each in params if each.rich_help_panel is None]
        return own + [_shortened(each) for each in params if each.name in self.common]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        ctx.meta.setdefault(_ALL, False)
        try:
            super().format_help(ctx, formatter)
        finally:
            del ctx.meta[_ALL]


def show_all(ctx: typer.Context, wanted: bool) -> None:
    """The callback of `--help-all`."""
    if wanted:
        ctx.meta[_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


def _shortened(param: Any) -> Any:
    """An option as the short screen lists it: the hints by name alone."""
    short = copy.copy(param)
    short.rich_help_panel = _COMMON_PANEL
    about, has_table, _ = param.help.partition(HINT_TABLE)
    short.help = f"{about} Hints: {', '.join(HINTS)}." if has_table else about
    return short


def _metavar(annotation: Any) -> str:
    """The word for the type of an option."""
    while hasattr(annotation, "__args__"):
        annotation = annotation.__args__[0]
    return word_for(annotation)


def _constantly(text: str) -> Callable[..., str]:
    return lambda ctx: text
