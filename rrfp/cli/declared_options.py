"""Options made of settings as they were declared, for the verbs that take some of them."""

import inspect
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Annotated, Any

from rrfp.cli.completion import completer_of
from rrfp.schedule.hints.hint import Hint
from rrfp.schedule.hints.table import IN_WORDS
from rrfp.schedule.hold import Hold
from rrfp.schedule.patience.setting import Patience
from rrfp.train.declared import Declared

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
