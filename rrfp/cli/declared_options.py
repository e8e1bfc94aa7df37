"""Command-line options made from declared settings, and shell completion.

Nothing here imports typer or another slow package when the module is imported.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import MISSING
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_origin

from rrfp.errors import RrfpError
from rrfp.inputs import Declared, declared_in, is_choice
from rrfp.schedule.admission import Admit, AdmitAcross
from rrfp.schedule.named_hints import AUTO, HINT_DESCRIPTIONS, HINTS
from rrfp.schedule.policy import Knob
from rrfp.trace.run_dir import runs_in

if TYPE_CHECKING:
    import typer


# Shell completion of hints, runs and option values. typer completes subcommands and options.


PROGRAM = "rrfp"
VARIABLE = "_RRFP_COMPLETE"
"""The environment variable in which a shell requests completions, or its completion script."""

Offer = str | tuple[str, str]
"""A possible word, or the word and its description."""
Completer = Callable[[str], list[Offer]]
"""Returns the completions of the beginning of a word. An empty list lets the shell offer files."""

_MOST_COUNTED = 9


def is_requested() -> bool:
    """Return True if a shell started this process for completions, by the variable
    _RRFP_COMPLETE."""
    return VARIABLE in os.environ


def print_completions(app: "typer.Typer") -> int:
    """Print the completions that a shell requested and return the exit code, 1 after an error.

    Errors are not printed, because they would appear in the user's command line.
    """
    import typer
    from typer.completion import shell_complete

    command = typer.main.get_command(app)
    try:
        return shell_complete(command, {}, PROGRAM, VARIABLE, os.environ[VARIABLE])
    except Exception:
        return 1


def hint_names(incomplete: str) -> list[Offer]:
    """Return the hints whose names begin with `incomplete`, with their descriptions."""
    return [each for each in HINT_DESCRIPTIONS.items() if each[0].startswith(incomplete)]


def hint_names_or_auto(incomplete: str) -> list[Offer]:
    """Return `auto` and the hints, if their names begin with `incomplete`, with their
    descriptions."""
    auto: list[Offer] = [(AUTO.name, "chosen during the run")]
    return [each for each in auto if each[0].startswith(incomplete)] + hint_names(incomplete)


def run_names(incomplete: str) -> list[Offer]:
    """Complete the name of a run in `runs/`, or after `@` the number of one of the newest nine. The
    newest is first. Empty if `runs/` cannot be read."""
    with suppress(OSError, RrfpError):
        names = [path.name for path in runs_in()]
        if incomplete.startswith("@"):
            numbered = enumerate(names[:_MOST_COUNTED], start=1)
            return [
                (f"@-{back}", name) for back, name in numbered if f"@-{back}".startswith(incomplete)
            ]
        return [name for name in names if name.startswith(incomplete)]
    return []


def cost_names(incomplete: str) -> list[Offer]:
    """Complete the name of costs: the presets first, then the runs."""
    from rrfp.simulate.costs.toml_files import PRESETS

    presets: list[Offer] = [name for name in PRESETS if name.startswith(incomplete)]
    return presets + run_names(incomplete)


def one_of(*words: str) -> Completer:
    """Return a completer of these words, which offers those that begin like the incomplete one."""

    def offer(incomplete: str) -> list[Offer]:
        return [word for word in words if word.startswith(incomplete)]

    return offer


_NAMES_OR_FILES = {"admit": Admit, "admit_across": AdmitAcross}
"""The names that a flag takes besides file names."""


def completer_of(declared: Declared) -> Completer | None:
    """Return a setting's own completer, or one for hints, costs or the names that it takes; None
    lets the shell offer files."""
    if declared.completes is not None:
        return declared.completes
    if isinstance(declared.kind, Knob):
        if declared.kind.name == "hint":
            return hint_names_or_auto
        offered = declared.kind.offered(in_run=declared.in_run)
        return one_of(*offered) if offered else None
    if declared.flag == "pace":
        return cost_names
    choices = _NAMES_OR_FILES.get(declared.flag, declared.kind)
    return one_of(*choices) if is_choice(choices) else None


SCHEDULE, MEMORY, LAYOUT, MODEL, DATA = "Schedule", "Memory", "Layout", "Model", "Data"
TRAINING, PACE, OUTPUT, CHECKPOINTS, HOSTS = "Training", "Pace", "Output", "Checkpoints", "Hosts"
TIME_OUTS = "Time-outs"

_PANELS = {
    "policy": SCHEDULE,
    "step": SCHEDULE,
    "layout": LAYOUT,
    "model": MODEL,
    "data": DATA,
    "run": TRAINING,
}
"""The help panel of each group of settings, unless a setting names its own."""
COMMON_PANEL = "Common options"
"""The only panel of settings in a short help screen."""

_LONGEST_CHOICES = 9

METAVARS = {int: "INT", float: "NUMBER", Path: "PATH", str: "TEXT", bool: ""}


def panel_of(declared: Declared) -> str | None:
    """Return the help panel of a setting: its own, or else that of its group. None if neither has
    one."""
    return declared.panel or _PANELS.get(declared.group)


def type_word(kind: Any) -> str:
    """Return the word for a type in the help: `INT`, `NUMBER`, `PATH`, `TEXT`, nothing for bool,
    choices of up to nine characters such as `cpu|cuda`, and `NAME` for other choices and types."""
    if is_choice(kind):
        names = "|".join(kind)
        return names if len(names) <= _LONGEST_CHOICES else "NAME"
    return METAVARS.get(kind, "NAME")


def metavar_of(declared: Declared) -> str:
    """Return a setting's own word for its value in the help, or else the word for its type."""
    return declared.metavar or type_word(declared.kind)


def option_of(
    declared: Declared, *, has_default: bool = False, is_text: bool = False
) -> inspect.Parameter:
    """Return the typer option or argument of a setting.

    Without `has_default` a missing option gives None, a choice is not checked, and the settings or
    a TOML file decide. With it the parameter is named by the field, not the flag. With `is_text`
    the value stays text, or a list.
    """
    import typer

    kind = declared.value_type
    if is_text:
        kind = kind if get_origin(kind) is list else str
    elif is_choice(kind) and not has_default:
        # The settings report a wrong choice.
        kind = str
    shown: dict[str, Any] = {
        # typer would read [bf] as a style.
        "help": help_of(declared).replace("[", r"\["),
        "show_default": False,
        "metavar": metavar_of(declared),
        "rich_help_panel": panel_of(declared),
        "autocompletion": completer_of(declared),
    }
    if declared.is_argument:
        option = typer.Argument(**shown)
    else:
        # The readers of files report why a file cannot be read.
        shown |= {"min": declared.least, "max": declared.most, "readable": False}
        option = typer.Option(f"--{declared.spelled}", **shown)
    default = declared.default if has_default else None
    if default is MISSING:
        default = inspect.Parameter.empty
    return inspect.Parameter(
        declared.field if has_default else declared.flag,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind | None if default is None else kind, option],
    )


def with_parameters(
    command: Callable[..., Any], parameters: Sequence[inspect.Parameter]
) -> Callable[..., Any]:
    """Set the signature and annotations of a command, which typer reads, and return the same
    command."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


_Options = TypeVar("_Options")


def with_options(
    options: type[_Options], others: Iterable[Declared] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator that turns a function of an options object into a typer command.

    The declared settings of the class `options` become options of the command. With `others` the
    function also takes a dict of these settings' texts by flag, without those not given.
    """
    own = [option_of(each, has_default=True) for each in declared_in("", options)]
    texts = [option_of(each, is_text=True) for each in others]

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        @wraps(run)
        def command(**values: Any) -> None:
            given = {each.name: values.pop(each.name) for each in texts}
            chosen = {name: text for name, text in given.items() if text is not None}
            if texts:
                run(options(**values), chosen)
            else:
                run(options(**values))

        return with_parameters(command, [*texts, *own])

    return decorate


def as_typer_command(run: Callable[..., Any], options: Iterable[Declared]) -> Callable[..., Any]:
    """Give `rrfp run` the signature with which typer lists and completes it, and return it. typer
    never runs it."""
    import typer

    own: dict[str, tuple[Any, Any]] = {
        "module": (Annotated[bool, typer.Option("-m", "--module")], None),
        "help_all": (Annotated[bool, typer.Option("--help-all")], None),
        "script": (Annotated[str, typer.Argument(metavar="SCRIPT")], inspect.Parameter.empty),
        "arguments": (Annotated[list[str] | None, typer.Argument(metavar="ARGS")], None),
    }
    parameters = [option_of(declared) for declared in options]
    for name, (annotation, default) in own.items():
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
        )
    return with_parameters(run, parameters)


HINT_TABLE = "\n\n\b\n"
"""The start of the table of hints in a help text; after \\b typer does not wrap lines."""


def help_of(declared: Declared) -> str:
    """Return the help of a setting; that of a policy's hint ends in a table of all hints."""
    text = declared.help_text
    if not (isinstance(declared.kind, Knob) and declared.kind.name == "hint"):
        return text
    width = max(map(len, HINT_DESCRIPTIONS))
    lines = (f"{name:{width}} {words}" for name, words in HINT_DESCRIPTIONS.items())
    return text + HINT_TABLE + "\n".join(lines)


def short_help(text: str) -> str:
    """Replace the table of hints in a help text by the names of the hints; other texts stay."""
    about, has_table, _ = text.partition(HINT_TABLE)
    return f"{about} Hints: {', '.join(HINTS)}." if has_table else about
