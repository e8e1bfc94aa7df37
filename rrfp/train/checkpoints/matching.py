"""Whether a checkpoint can go on under given settings: they must train the same thing.

Imports no torch: the launcher looks before it starts any process.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rrfp.errors import UsageError
from rrfp.train.checkpoints.directory import Checkpoint
from rrfp.train.models.vision_share import num_vision_stages
from rrfp.train.setting_groups import ModelKind
from rrfp.train.settings import DECLARED, TrainSettings

_MAY_CHANGE = ("recompute", "microbatches", "data", "tokenizer", "end_of_document")
"""Settings of the model and the data that do not decide by themselves what is trained. The last
three name contents, which are compared instead."""

_SAME = tuple(
    flag
    for flag, declared in DECLARED.items()
    if (declared.group in ("model", "data") and flag not in _MAY_CHANGE) or flag in ("lr", "seed")
)
"""The settings that decide what is trained, besides those that are computed from several."""

_CONTENTS = {
    "data": "the content of --data",
    "tokenizer": "the content of --tokenizer",
    "end_of_document": "the token that ends a document",
}

_SHA256_DIGITS, _SHOWN_DIGITS = 64, 12


def check_unused(save: Path, found: Checkpoint | None) -> None:
    """Raise UsageError if the directory of a new run has a checkpoint."""
    if found is not None:
        raise UsageError(
            f"{save} has the checkpoint of step {found.step} of another run; go on from it with "
            "--resume, or choose another directory with --save"
        )


def check_continues(
    settings: TrainSettings, contents: Mapping[str, str], checkpoint: Checkpoint
) -> None:
    """Raise UsageError, naming the setting and both values, if these settings and data train
    something else than the checkpoint holds, or for fewer steps than it has."""
    asked, saved = settings.described(), checkpoint.manifest.settings
    where = f"the checkpoint {checkpoint.path}"
    for flag in _SAME:
        if flag in saved and saved[flag] != asked[flag]:
            raise UsageError(
                f"--{DECLARED[flag].spelled} is {_told(asked[flag])} and was "
                f"{_told(saved[flag])} for {where}, which --resume cannot change; give the same, "
                "or start a new run with another --save"
            )
    then = checkpoint.manifest.contents
    if not then:
        raise UsageError(
            f"{where} does not say what its data were, so --resume cannot compare them; start a "
            "new run with another --save"
        )
    for flag, name in _CONTENTS.items():
        if then.get(flag) != contents.get(flag):
            raise UsageError(
                f"{name} is {_told(contents.get(flag))} and was {_told(then.get(flag))} for "
                f"{where}, which --resume cannot change; give the same, or start a new run with "
                "another --save"
            )
    problem = _not_settings(saved)
    if problem:
        raise UsageError(f"{where} is damaged ({problem}); start a new run with another --save")
    for name, of, advice in _COMPUTED:
        if of(asked) != of(saved):
            raise UsageError(
                f"{name} is {of(asked)} and was {of(saved)} for {where}, which --resume cannot "
                f"change; {advice}"
            )
    if settings.num_steps < checkpoint.step:
        raise UsageError(
            f"--steps is {settings.num_steps} and {where} has {checkpoint.step}; ask for more, or "
            "start a new run with another --save"
        )


def _not_settings(saved: Mapping[str, Any]) -> str:
    """What a checkpoint's settings lack of what is computed from several; empty if nothing."""
    for flag in ("dp", "microbatches", "pp", "chunks", "layers"):
        if type(saved.get(flag)) is not int:
            return f"its {flag} is {saved.get(flag)!r:.40}"
    return "" if "model" in saved else "it names no model"


def _global_batch(told: Mapping[str, Any]) -> int:
    return int(told["dp"] * told["microbatches"])


def _vision_layers(told: Mapping[str, Any]) -> int:
    if told["model"] != ModelKind.VLM:
        return 0
    num_stages = told["pp"] * told["chunks"]
    return int(num_vision_stages(num_stages) * told["layers"] // num_stages)


_COMPUTED: tuple[tuple[str, Callable[[Mapping[str, Any]], int], str], ...] = (
    (
        "the number of microbatches of all replicas (--dp x --microbatches)",
        _global_batch,
        "change --microbatches with --dp so that their product stays",
    ),
    (
        "the number of vision layers (a share of the stages, --pp x --chunks)",
        _vision_layers,
        "choose --pp and --chunks that divide the layers in the same place",
    ),
)


def _told(value: object) -> str:
    if isinstance(value, str) and len(value) == _SHA256_DIGITS:
        return f"{value[:_SHOWN_DIGITS]}..."
    return "not given" if value is None else str(value)
