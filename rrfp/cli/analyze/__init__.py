"""`rrfp analyze`: reports from a run's trace.

Each module of this package is a subcommand: a function with the module's name, and `EXAMPLE`.
"""

from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import typer
from typer.core import TyperGroup

from rrfp.cli.options import Command
from rrfp.trace.run_dir import RUNS

_FIRST = (
    "findings",
    "bubbles",
    "whatif",
    "deviations",
    "memory",
    "misalignment",
    "critical_path",
    "compare",
    "report",
    "chart",
)
"""The order of the subcommands in the help; others follow by name."""


class _FindingsByDefault(TyperGroup):
    """A command group that runs `findings` unless the first argument names another subcommand."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, after putting `findings` in front of them if the list is empty or
        the first one is no subcommand, misspelled subcommand or help option (`_is_argument`)."""
        # Completion of an empty word offers subcommands as well.
        is_open = not args and ctx.resilient_parsing
        if not is_open and (not args or self._is_argument(args[0], ctx.help_option_names)):
            args = ["findings", *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete subcommands, and also the runs of `findings`, or its options after a dash."""
        findings = self.commands["findings"]
        with findings.make_context("findings", [], parent=ctx, resilient_parsing=True) as context:
            is_option = incomplete.startswith("-")
            run = next(each for each in findings.params if each.name == "path")
            offered = (findings if is_option else run).shell_complete(context, incomplete)
        return [*super().shell_complete(ctx, incomplete), *offered]

    def _is_argument(self, text: str, help_options: list[str]) -> bool:
        """Return True if a text belongs to `findings`: an option, a path, a run, and any other text
        except subcommands, help options and what looks like a misspelled subcommand."""
        if text in self.commands or text in help_options:
            return False
        if text.startswith("-") or "/" in text or "." in text or Path(text).exists():
            return True
        if (RUNS / text).exists():
            return True
        return not get_close_matches(text, self.commands)


def make_app() -> typer.Typer:
    """Make the command group of `rrfp analyze`, with a subcommand for each module of this package;
    imports them."""
    group = typer.Typer(
        cls=_FindingsByDefault,
        help="Show what makes a run's steps long, and reports from its trace. Without a "
        "subcommand: the findings, rrfp analyze [RUN].",
    )
    names = {module.name for module in iter_modules(__path__)}
    for name in (*_FIRST, *sorted(names.difference(_FIRST))):
        module = import_module(f"{__name__}.{name}")
        command = group.command(name.replace("_", "-"), cls=Command, epilog=module.EXAMPLE)
        command(getattr(module, name))
    return group


app = make_app()
