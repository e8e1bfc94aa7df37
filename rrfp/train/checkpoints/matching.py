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

_MAY_CHANGE = ("recompute", "microbatches")
"""Settings of the model and the data that do not decide by themselves what is trained."""

_SAME = tuple(
    flag
    for flag, declared in DECLARED.items()
    if (declared.group in ("model", "data") and flag not in _MAY_CHANGE) or flag in ("lr", "seed")
)
"""The settings that decide what is trained, besides those that are computed from several."""

_PATHS = tuple(flag for flag in _SAME if DECLARED[flag].kind is Path)


def check_continues(settings: TrainSettings, checkpoint: Checkpoint) -> None:
    """Raise UsageError, naming the setting and both values, if these settings train something else
    than the checkpoint holds, or for fewer steps than it has."""
    asked, saved = settings.described(), checkpoint.manifest.settings
    where = f"the checkpoint {checkpoint.path}"
    for flag in _SAME:
        if flag in saved and _comparable(flag, saved[flag]) != _comparable(flag, asked[flag]):
            raise UsageError(
                f"--{DECLARED[flag].spelled} is {_told(asked[flag])} and was "
                f"{_told(saved[flag])} for {where}, which --resume cannot change; give the same, "
                "or start a new run with another --save"
            )
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


def _comparable(flag: str, value: Any) -> Any:
    return str(Path(value).resolve()) if flag in _PATHS and value is not None else value


def _told(value: object) -> str:
    return "not given" if value is None else str(value)
