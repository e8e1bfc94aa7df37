"""Options that several subcommands share, and the layout of help screens."""

import copy
import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from rrfp.cli.declared_options import COMMON_PANEL, run_names, short_help, type_word
from rrfp.errors import UsageError
from rrfp.trace.records import evaluation_step, is_evaluation

if TYPE_CHECKING:
    from rrfp.analyze.frames import Frames

PATH_HELP = (
    "A run: its directory, its name in runs/, @-1 for the newest, or its trace file; none means "
    "the newest one."
)
STEPS_HELP = "Only the steps from A up to, not including, B."

TracePath = Annotated[
    Path | None, typer.Argument(metavar="RUN", help=PATH_HELP, autocompletion=run_names)
]
Steps = Annotated[str | None, typer.Option(metavar="A:B", help=STEPS_HELP)]
Evaluations = Annotated[
    bool,
    typer.Option(
        "--evaluations",
        help="Analyze the run's evaluations instead of its training steps; --steps then counts "
        "evaluations.",
    ),
]
Stage = Annotated[
    int | None, typer.Option(min=0, help="Only the pipeline rank that holds this stage.")
]


class PlainFormat(StrEnum):
    """Output formats of commands that analyze no run."""

    TABLE = "table"
    JSON = "json"


class RowFormat(StrEnum):
    """Output formats of tables that need no data frame."""

    TABLE = "table"
    MD = "md"
    JSON = "json"
    CSV = "csv"


class Format(StrEnum):
    """Output formats of analyses."""

    TABLE = "table"
    MD = "md"
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"


PEOPLE = (Format.TABLE, Format.MD)
"""Formats for people; the others are for programs."""


class By(StrEnum):
    """The subject of a row of a table."""

    STAGE = "stage"
    RANK = "rank"


FrameFormat = Annotated[
    Format,
    typer.Option(
        "--format", metavar="FORMAT", help="table, md (GitHub's Markdown), json, csv or parquet."
    ),
]
ByRank = Annotated[
    By,
    typer.Option(
        "--by", help="One row per stage, or per rank where several ranks share the work of a stage."
    ),
]


def parse_steps(text: str) -> range:
    """Parse `A:B` into a range without B; a missing A is 0, and a missing B is no limit. Raises
    UsageError for any other text, and for an empty range."""
    match = re.fullmatch(r"(\d{0,18}):(\d{0,18})", text)
    if match is None:
        raise UsageError(f"--steps takes a range such as 3:10, not '{text}'")
    start = int(match[1] or 0)
    stop = int(match[2]) if match[2] else sys.maxsize
    if start >= stop:
        raise UsageError(f"--steps {text} is empty; the second number must be the larger one")
    return range(start, stop)


def step_in_trace(frames: "Frames", number: int | None, *, evaluations: bool) -> int | None:
    """Convert a user's step number to the trace's, which numbers evaluations differently. It stays
    the same without `evaluations`, and where no step of the frames is an evaluation."""
    if number is None or not evaluations or not any(map(is_evaluation, frames.steps)):
        return number
    return evaluation_step(number)


# Help screens.


_ALL = "rrfp.help_all"
"""The key in a context's `meta` that requests all options."""


class Command(TyperCommand):
    """A command whose help shows the types of parameters as words, such as INT or PATH."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, changed so that the help shows an option's metavar or the word for
        its type, and nothing for an argument."""
        params: list[Any] = super().get_params(ctx)
        for param in params:
            word = param.metavar if param.param_type_name == "option" else ""
            if word is None:
                word = _type_word(param.type_descriptor.annotation)
            param.display_type_rich = lambda ctx, word=word: word
        return params


class SettingsCommand(Command):
    """A command with many options: `--help` lists the common ones, `--help-all` all of them."""

    common: frozenset[str] = frozenset()
    """The parameter names of the common settings; the command's own options are always listed."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all parameters; while the short help is made, only the command's own options and
        the common settings, which then share one panel."""
        params = super().get_params(ctx)
        if ctx.meta.get(_ALL, True):
            return params
        own = [each for each in params if each.rich_help_panel is None]
        return own + [_shortened(each) for each in params if each.name in self.common]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Format the help with the common options, or with all if `--help-all` requested them
        before."""
        ctx.meta.setdefault(_ALL, False)
        try:
            super().format_help(ctx, formatter)
        finally:
            del ctx.meta[_ALL]


def show_all(ctx: typer.Context, wanted: bool) -> None:
    """Print the help with all options on stdout and exit, if `--help-all` is given (its
    callback)."""
    if wanted:
        ctx.meta[_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


def _shortened(param: Any) -> Any:
    """Copy an option for the short help: in the panel of common options, with hints by name
    only."""
    short = copy.copy(param)
    short.rich_help_panel = COMMON_PANEL
    short.help = short_help(param.help)
    return short


def _type_word(annotation: Any) -> str:
    """Return the help's word, such as INT, for the type in an annotation; Annotated, list and None
    are removed before."""
    while hasattr(annotation, "__args__"):
        annotation = annotation.__args__[0]
    return type_word(annotation)
