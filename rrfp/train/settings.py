"""The settings of a training run, in groups. Each has a flag, and the same name in a TOML file.

Imports no torch: the launcher checks the settings before it starts any process.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rrfp.errors import UsageError, did_you_mean
from rrfp.inputs.hint_files import OrderFile
from rrfp.inputs.layer_layout import parse_layout
from rrfp.megatron.settings import check_auto
from rrfp.schedule.hints.hint import Hint
from rrfp.schedule.hints.table import HINTS
from rrfp.schedule.hold import check_is_absolute, described_hold
from rrfp.schedule.patience.setting import described_patience
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.shape import Shape
from rrfp.train.declared import Declared, declared_in
from rrfp.train.setting_groups import (
    DataSettings,
    LayoutSettings,
    ModelKind,
    ModelSettings,
    PolicySettings,
    RunSettings,
)

_NUM_STEPS, _NUM_IMAGE_STEPS = 60, 240
"""Default number of steps, of text and of multimodal runs."""

_ORDER = "order"
"""The key for the text of an order file, which travels with the settings: ranks do not read it."""


@dataclass(frozen=True, slots=True, init=False)
class TrainSettings:
    """What to train, on how many ranks, under which policy, and where the run goes."""

    policy: PolicySettings
    layout: LayoutSettings
    model: ModelSettings
    data: DataSettings
    run: RunSettings

    def __init__(self, **flags: Any) -> None:
        """Settings by flag (`pp=2, hint="bfw"`); names and paths may be given as text.

        Raises UsageError for a text that is not one of the choices, and for an unknown hint.
        """
        given: dict[str, dict[str, Any]] = {group: {} for group in _GROUPS}
        for flag, value in flags.items():
            if flag not in DECLARED:
                raise TypeError(f"'{flag}' is not a setting")
            declared = DECLARED[flag]
            given[declared.group][declared.field] = declared.read(value)
        for group, of in _GROUPS.items():
            object.__setattr__(self, group, of(**given[group]))

    def changed(self, **flags: Any) -> Self:
        """These settings with some flags changed."""
        return type(self)(**{**self.by_flag(), **flags})

    def by_flag(self) -> dict[str, Any]:
        """Every setting by its flag."""
        return {
            flag: getattr(getattr(self, declared.group), declared.field)
            for flag, declared in DECLARED.items()
        }

    @property
    def hint(self) -> Hint:
        """The hint asked for, or the dispatch's default."""
        if self.policy.hint is not None:
            return self.policy.hint
        return self.megatron_hint if self.policy.dispatch is Dispatch.MEGATRON else HINTS["bf"]

    @property
    def megatron_hint(self) -> Hint:
        """The order that Megatron-Core's own schedule runs."""
        return HINTS["1f1b" if self.layout.chunks == 1 else "interleaved"]

    @property
    def effective_policy(self) -> Policy:
        """The policy in effect. Raises UsageError for parts that do not fit together, and for a
        hint that does not fit the shape."""
        asked = self.policy
        check_is_absolute(asked.hold)
        return Policy.with_usual_limit(
            *(self.hint, asked.dispatch, asked.limit, asked.hold, asked.w, asked.agreement),
            patience=asked.patience,
        ).of_shape(self.shape)

    def check_policy(self) -> None:
        """Raise UsageError for parts of the policy that do not go together."""
        check_auto(self.effective_policy.hint, self.policy.grad_order)

    @property
    def num_steps(self) -> int:
        """Steps of the run: as asked for, or enough to see the loss fall."""
        if self.run.steps is not None:
            return self.run.steps
        return _NUM_IMAGE_STEPS if self.model.kind is ModelKind.VLM else _NUM_STEPS

    @property
    def shape(self) -> Shape:
        """The pipeline of a step."""
        layout = self.layout
        return Shape(layout.pp, self.data.microbatches, layout.chunks, layout.placement)

    @property
    def split(self) -> tuple[int, ...]:
        """The layers of each stage, in model order: as asked for, or equally many. Raises
        UsageError for a text that says something else."""
        stages = self.layout.stages
        if stages is None:
            num_stages = self.layout.pp * self.layout.chunks
            return (self.model.layers // num_stages,) * num_stages
        return parse_layout(stages, "--layout")

    @classmethod
    def from_toml(cls, path: Path, **flags: Any) -> Self:
        """Read a TOML file with the names of flags, at top level or in tables by group; `flags`
        take precedence.

        Relative paths in the file are relative to the current directory, as on the command line.
        Raises UsageError for a file that cannot be read, an unknown name or a wrong type.
        """
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(
                f"cannot read the configuration {path}: {error.strerror}; check --config"
            ) from None
        # A number with thousands of digits raises a ValueError that is not a TOMLDecodeError.
        except ValueError as error:
            raise UsageError(f"{path} is not TOML ({error}); correct it") from None
        except RecursionError:
            raise UsageError(f"{path} is nested too deeply; write one setting per line") from None
        return cls(**{**_read(table, path), **flags})

    def described(self) -> dict[str, object]:
        """Every setting by its flag, as JSON values, with hint, replicas and steps resolved."""
        values = self.by_flag() | {
            "hint": self.hint.name,
            "dp": self.layout.num_replicas,
            "steps": self.num_steps,
        }
        values["hold"] = described_hold(values["hold"])
        values["patience"] = described_patience(values["patience"])
        return {
            flag: str(value) if isinstance(value, Path) else value for flag, value in values.items()
        }

    def to_json(self) -> str:
        """These settings as text, for `from_json`."""
        hint = self.hint
        order = {_ORDER: hint.text} if isinstance(hint, OrderFile) else {}
        return json.dumps(self.described() | order)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        if _ORDER in values:
            values["hint"] = OrderFile(values["hint"], values.pop(_ORDER))
        return cls(**values)


_GROUPS: dict[str, Any] = {
    "policy": PolicySettings,
    "layout": LayoutSettings,
    "model": ModelSettings,
    "data": DataSettings,
    "run": RunSettings,
}

DECLARED: dict[str, Declared] = {
    declared.flag: declared for group, of in _GROUPS.items() for declared in declared_in(group, of)
}
"""Every setting by its flag."""


def _read(table: Mapping[str, object], path: Path) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value in _entries(table, path):
        flag = key.replace("-", "_")
        if flag not in DECLARED:
            known = [each.spelled for each in DECLARED.values()]
            what = did_you_mean(key.replace("_", "-"), known) or "; correct it"
            raise UsageError(
                f"{path} sets '{key}', which is not a setting ({', '.join(known)}){what}"
            )
        if flag in values:
            raise UsageError(f"{path} sets '{DECLARED[flag].spelled}' twice; keep one")
        values[flag] = DECLARED[flag].read_toml(value, path)
    return values


def _entries(table: Mapping[str, object], path: Path) -> Iterator[tuple[str, object]]:
    """The settings of a file: those at top level, and those in the table of their group."""
    for key, value in table.items():
        if not isinstance(value, dict) or key not in _GROUPS:
            yield key, value
            continue
        for inner, inner_value in value.items():
            declared = DECLARED.get(inner.replace("-", "_"))
            if declared is not None and declared.group != key:
                raise UsageError(f"{path} sets '{inner}' in [{key}]; move it to [{declared.group}]")
            yield inner, inner_value
