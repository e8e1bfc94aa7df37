"""Options made of settings as they were declared, for the verbs that take some of them."""

import inspect
from enum import StrEnum
from typing import Annotated

import typer

from rrfp.schedule.hints.hint import Hint
from rrfp.train.declared import Declared


def option_of(declared: Declared, panel: str | None = None) -> inspect.Parameter:
    """The option of a setting, in this panel of the help; without it the settings' own default
    holds, or a TOML file's."""
    kind = str if declared.kind is Hint or issubclass(declared.kind, StrEnum) else declared.kind
    option = typer.Option(
        f"--{declared.spelled}",
        # In help texts [bf] would be a style, which is not shown.
        help=declared.help_text.replace("[", r"\["),
        show_default=False,
        metavar=declared.metavar,
        rich_help_panel=panel,
    )
    return inspect.Parameter(
        declared.flag,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )
