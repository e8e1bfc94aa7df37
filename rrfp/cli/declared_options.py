"""Options made of settings as they were declared, for the verbs that take some of them."""

import inspect
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from rrfp.errors import RrfpError
from rrfp.schedule.admission import Admit
from rrfp.schedule.balance import AdmitAcross
from rrfp.schedule.hints import Hint
from rrfp.schedule.knobs import AutoPatience, Hold, Patience
from rrfp.schedule.named_hints import AUTO, IN_WORDS
from rrfp.trace.run_dir import runs_in
from rrfp.train.settings import Declared

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
    """Print what the shell may offer, and give the exit code. Never says anything else: it would
    stand in the middle of somebody's command line."""
    import typer
    from typer.completion import shell_complete

    command = typer.main.get_command(app)
    try:
        return shell_complete(command, {}, PROGRAM, VARIABLE, os.environ[VARIABLE])
    except Exception:
        return 1


def hint_names(incomplete: str) -> list[Offer]:
    """The hints."""
    return [each for each in IN_WORDS.items() if each[0].startswith(incomplete)]


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
    """What may be offered for a setting of a training run."""
    if declared.kind is Hint:
        return hint_names_or_auto
    if declared.flag == "pace":
        return cost_names
    if declared.kind == Hold:
        return None
    if declared.kind == Patience:
        return one_of(AutoPatience.AUTO)
    choices = _NAMES_OR_FILES.get(declared.flag, declared.kind)
    return one_of(*choices) if issubclass(choices, StrEnum) else None


SCHEDULE, MEMORY, LAYOUT, MODEL, DATA = "Schedule", "Memory", "Layout", "Model", "Data"
TRAINING, PACE, OUTPUT, CHECKPOINTS, HOSTS = "Training", "Pace", "Output", "Checkpoints", "Hosts"
TIME_OUTS = "Time-outs"

_OF_GROUPS = {
    "policy": SCHEDULE,
    "layout": LAYOUT,
    "model": MODEL,
    "data": DATA,
    "run": TRAINING,
    "recording": OUTPUT,
    "waits": TIME_OUTS,
}
_OF_SETTINGS = {
    **dict.fromkeys(("limit", "hold", "hold_features", "measure_memory", "recompute"), MEMORY),
    **dict.fromkeys(("pace", "jitter"), PACE),
    **dict.fromkeys(("out", "force", "shared_files", "no_trace", "trace_mb"), OUTPUT),
    **dict.fromkeys(("save", "save_every", "save_async", "keep", "resume"), CHECKPOINTS),
    **dict.fromkeys(("nnodes", "node_rank", "rdzv_endpoint", "network"), HOSTS),
}
"""The panels of settings that do not stand in their group's."""


def panel_of(declared: Declared) -> str:
    """The panel of a setting in the help."""
    return _OF_SETTINGS.get(declared.flag, _OF_GROUPS[declared.group])


def option_of(declared: Declared) -> inspect.Parameter:
    """The option of a setting, in its panel of the help; without it the settings' own default
    holds, or a TOML file's."""
    import typer

    is_text = declared.kind in (Hint, Hold, Patience) or issubclass(declared.kind, StrEnum)
    kind = str if is_text else declared.kind
    told = hint_help(declared.help_text) if declared.kind is Hint else declared.help_text
    option = typer.Option(
        f"--{declared.spelled}",
        help=escaped(told),
        show_default=False,
        metavar=declared.metavar,
        readable=False,  # Our readers report why a file cannot be read.
        rich_help_panel=panel_of(declared),
        autocompletion=completer_of(declared),
    )
    return inspect.Parameter(
        declared.flag,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def listed(run: Callable[..., Any], options: Iterable[Declared]) -> Callable[..., Any]:
    """`rrfp run` as typer lists and completes it, with these options."""
    import typer

    own = {
        "module": Annotated[bool, typer.Option("-m", "--module")],
        "script": Annotated[str, typer.Argument(metavar="SCRIPT")],
        "arguments": Annotated[list[str] | None, typer.Argument(metavar="ARGS")],
    }
    parameters = [option_of(declared) for declared in options]
    for name, annotation in own.items():
        default = inspect.Parameter.empty if name == "script" else None
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
        )
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def hint_help(about: str) -> str:
    """The help of an option that takes a hint: what it is for, and what each hint is."""
    width = max(map(len, IN_WORDS))
    # Behind \b typer keeps the lines as they are.
    lines = (f"{name:{width}} {words}" for name, words in IN_WORDS.items())
    return "\n\n".join((about, "\b\n" + "\n".join(lines)))


def escaped(text: str) -> str:
    """A help text in which [bf] is shown; to typer it would be a style."""
    return text.replace("[", r"\[")
