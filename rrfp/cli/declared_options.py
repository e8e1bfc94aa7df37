"""Options of the command line, made of settings as they are declared."""

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
from rrfp.schedule.named_hints import AUTO, HINT_DESCRIPTIONS
from rrfp.schedule.policy import Knob
from rrfp.trace.run_dir import runs_in

if TYPE_CHECKING:
    import typer


# What a shell offers when Tab is pressed: hints, runs, and the values of an option.
#
# Verbs and options are typer's to offer. Nothing here loads what is slow to import.


PROGRAM = "rrfp"
VARIABLE = "_RRFP_COMPLETE"
"""In it a shell asks for what may stand in a command line, or for the script that asks so."""

Offer = str | tuple[str, str]
"""A word that may stand there, perhaps with what it is."""
Completer = Callable[[str], list[Offer]]
"""Offers what goes on from the beginning of a word. Nothing leaves files to the shell."""

_MOST_COUNTED = 9


def is_asked() -> bool:
    """Whether this process was started by a shell's Tab."""
    return VARIABLE in os.environ


def answer(app: "typer.Typer") -> int:
    """Print what the shell may offer, and return the exit code. Nothing else is printed: it would
    stand in the middle of a command line."""
    import typer
    from typer.completion import shell_complete

    command = typer.main.get_command(app)
    try:
        return shell_complete(command, {}, PROGRAM, VARIABLE, os.environ[VARIABLE])
    except Exception:
        return 1


def hint_names(incomplete: str) -> list[Offer]:
    """The hints."""
    return [each for each in HINT_DESCRIPTIONS.items() if each[0].startswith(incomplete)]


def hint_names_or_auto(incomplete: str) -> list[Offer]:
    """The hints, and the wish for a choice while a run goes on."""
    auto: list[Offer] = [(AUTO.name, "chosen while the run goes on")]
    return [each for each in auto if each[0].startswith(incomplete)] + hint_names(incomplete)


def run_names(incomplete: str) -> list[Offer]:
    """The runs in `runs`, the newest first, by name, or counted if an `@` was written."""
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
    """Costs by name, and the runs that may be costs."""
    from rrfp.simulate.costs.toml_files import PRESETS

    presets: list[Offer] = [name for name in PRESETS if name.startswith(incomplete)]
    return presets + run_names(incomplete)


def one_of(*words: str) -> Completer:
    """Offers these words."""

    def offer(incomplete: str) -> list[Offer]:
        return [word for word in words if word.startswith(incomplete)]

    return offer


_NAMES_OR_FILES = {"admit": Admit, "admit_across": AdmitAcross}
"""By flag: the names, where a file may stand as well."""


def completer_of(declared: Declared) -> Completer | None:
    """The completer of a setting; None leaves files to the shell."""
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
"""The panel of each group of settings, for those that name none themselves."""

_LONGEST_CHOICES = 9

METAVARS = {int: "INT", float: "NUMBER", Path: "PATH", str: "TEXT", bool: ""}


def panel_of(declared: Declared) -> str | None:
    """The panel of a setting in the help."""
    return declared.panel or _PANELS.get(declared.group)


def word_for(kind: Any) -> str:
    """The word by which the help shows the type of a value; the choices where they are short."""
    if is_choice(kind):
        names = "|".join(kind)
        return names if len(names) <= _LONGEST_CHOICES else "NAME"
    return METAVARS.get(kind, "NAME")


def metavar_of(declared: Declared) -> str:
    """The type of a setting as the help shows it."""
    return declared.metavar or word_for(declared.kind)


def option_of(
    declared: Declared, *, has_default: bool = False, is_text: bool = False
) -> inspect.Parameter:
    """The option of a setting, in its panel of the help. Without `has_default` a missing option is
    None, so that the settings' own default holds, or a TOML file's. With `is_text` its value stays
    a text."""
    import typer

    kind = declared.value_type
    if is_text:
        kind = kind if get_origin(kind) is list else str
    elif is_choice(kind) and not has_default:
        # The settings report a wrong choice.
        kind = str
    text = declared.help_text
    if isinstance(declared.kind, Knob) and declared.kind.name == "hint":
        text = hint_help(text)
    shown: dict[str, Any] = {
        "help": escaped(text),
        "show_default": False,
        "metavar": metavar_of(declared),
        "rich_help_panel": panel_of(declared),
        "autocompletion": completer_of(declared),
    }
    if declared.is_argument:
        option = typer.Argument(**shown)
    else:
        # Our readers report why a file cannot be read.
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
    """Give a command the signature that typer reads."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


_Options = TypeVar("_Options")


def taking(
    options: type[_Options], others: Iterable[Declared] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function. It takes an object of the class, whose declared settings are
    the command's options, and with `others` the texts of those that were given, by flag."""
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


def listed(run: Callable[..., Any], options: Iterable[Declared]) -> Callable[..., Any]:
    """`rrfp run` as typer lists and completes it, with these options."""
    import typer

    own: dict[str, tuple[Any, Any]] = {
        "module": (Annotated[bool, typer.Option("-m", "--module")], None),
        "script": (
            Annotated[str, typer.Argument(metavar="SCRIPT")],
            inspect.Parameter.empty,
        ),
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
"""Begins the table of hints in a help text. Behind \\b typer keeps the lines as they are."""


def hint_help(about: str) -> str:
    """The help of an option that takes a hint: what it is for, and what each hint is."""
    width = max(map(len, HINT_DESCRIPTIONS))
    lines = (f"{name:{width}} {words}" for name, words in HINT_DESCRIPTIONS.items())
    return about + HINT_TABLE + "\n".join(lines)


def escaped(text: str) -> str:
    """A help text in which [bf] is shown; to typer it would be a style."""
    return text.replace("[", r"\[")
