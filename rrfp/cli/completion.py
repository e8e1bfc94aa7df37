"""What a shell offers when Tab is pressed: hints, runs, and the values of an option.

Verbs and options are typer's to offer. Nothing here loads what is slow to import.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING

from rrfp.errors import RrfpError
from rrfp.schedule.admission import Admit
from rrfp.schedule.dealing import AdmitAcross
from rrfp.schedule.hints.auto import AUTO
from rrfp.schedule.hints.hint import Hint
from rrfp.schedule.hints.table import IN_WORDS
from rrfp.schedule.hold import Hold
from rrfp.schedule.patience.setting import AutoPatience, Patience
from rrfp.trace.rundir import runs_in
from rrfp.train.declared import Declared

if TYPE_CHECKING:
    import typer

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
    from rrfp.simulate.costs.table import PRESETS

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
