"""Whether a rank's code can be imported, and how long that takes: torch first, then the rest."""

import importlib
import time
from collections.abc import Iterator
from importlib import metadata

from rrfp.doctor.check import EVERY_RUN, Check, State, fails
from rrfp.errors import described
from rrfp.runtime.probe import NoAnswerError, probe

_MODULES = {"torch": "torch", "megatron-core": "rrfp.train.rank"}
"""What is imported for each distribution; a rank also imports what Megatron-Core needs."""
_SLOW_S = 20.0
_LIMIT_S = 180.0


def imports() -> Iterator[Check]:
    """A check for each distribution."""
    for name, module in _MODULES.items():
        try:
            # In a process of its own: if one crashes the other is not to blame.
            modules = [*dict.fromkeys(("torch", module))]
            told = probe(seconds_to_import, modules, limit_s=_LIMIT_S)[module]
        except NoAnswerError as error:
            told = f"cannot be imported ({error})"
        if isinstance(told, str):
            yield fails(name, f"{module} {told}; {_advice(told)}", EVERY_RUN)
        else:
            yield _timed(name, told)


def _advice(told: str) -> str:
    if "PermissionError" in told:
        return "let this user read that file and the directories above it"
    return "install rrfp anew, or raise the limit (ulimit -a) that keeps it from loading"


def _timed(name: str, seconds: float) -> Check:
    is_slow = seconds > _SLOW_S
    found = f"to import {name} {_version(name)}"
    advice = f"{found}, as every rank does; keep the environment on a local disk"
    return Check(
        name,
        State.SLOW if is_slow else State.OK,
        round(seconds, 1),
        "s",
        advice if is_slow else found,
        EVERY_RUN,
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "from a checkout"


def seconds_to_import(modules: list[str]) -> dict[str, float | str]:
    """How long each module takes, one after the other, or why it cannot be imported."""
    told: dict[str, float | str] = {}
    for module in modules:
        start_s = time.perf_counter()
        try:
            importlib.import_module(module)
        except Exception as error:
            told[module] = f"cannot be imported ({described(error)})"
        else:
            told[module] = time.perf_counter() - start_s
    return told
