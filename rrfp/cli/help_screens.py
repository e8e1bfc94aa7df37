"""How the help of a command reads: types as INT or PATH, and a short screen before the long one."""

import copy
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

from rrfp.cli.declared_options import HINT_TABLE, word_for
from rrfp.schedule.named_hints import HINTS

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
