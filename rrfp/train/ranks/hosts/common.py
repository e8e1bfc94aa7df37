"""What all hosts of a run must have in common: the settings, and what is in the files they name."""

from collections.abc import Mapping

from rrfp.errors import UsageError
from rrfp.inputs.admission_files import admission_file
from rrfp.inputs.hint_files import order_file
from rrfp.inputs.text_files import sha256_of
from rrfp.replay.cost_files import costs_file
from rrfp.train.data.tokenizer import tokenizer_file
from rrfp.train.settings import DECLARED, TrainSettings

_MAY_DIFFER = frozenset({"node_rank", "rdzv_endpoint", "out", "data", "force", "save"})
"""Settings that may differ between hosts."""
_DIGITS = 12
"""Digits of a digest that identify a file in messages."""


def in_common(settings: TrainSettings, data: str) -> dict[str, object]:
    """One host's account of it, as it reads its own files; `data` is the digest of what it trains
    on."""
    paths = {
        "hint": order_file(settings.hint.name),
        "admit": admission_file(settings.policy.admit),
        "pace": None if settings.run.pace is None else costs_file(settings.run.pace),
        "tokenizer": None
        if settings.data.tokenizer is None
        else tokenizer_file(settings.data.tokenizer),
    }
    files = {
        f"the content of --{name} {path}": _short(sha256_of(path))
        for name, path in paths.items()
        if path is not None
    }
    named = {name: value for name, value in settings.described().items() if name not in _MAY_DIFFER}
    return named | files | {"the content of --data": _short(data)}


def check_common(first: Mapping[str, object], node_rank: int, own: Mapping[str, object]) -> None:
    """Raise UsageError if a host's account differs from that of host 0, which is the first."""
    for name, value in first.items():
        if own.get(name) != value:
            flag = f"--{DECLARED[name].spelled}" if name in DECLARED else name
            raise UsageError(
                f"{flag} is {value} on host 0 and {own.get(name)} on host {node_rank}; run the "
                "same command with the same files on both"
            )


def _short(digest: str) -> str:
    return f"{digest[:_DIGITS]}..."
