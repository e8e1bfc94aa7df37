"""The settings of a training run, in groups. Each has a flag, and the same name in a TOML file.

Imports no torch: the launcher checks the settings before it starts any process.
"""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from rrfp.errors import UsageError, did_you_mean
from rrfp.inputs import (
    AT_LEAST_1,
    FINITE_ABOVE_0,
    Declared,
    Must,
    declared_in,
    declared_knobs,
    parse_layout,
    setting,
)
from rrfp.megatron.settings import OUTBOX_MB, PLACEMENT, TLS, TRANSPORT, StepSettings
from rrfp.runtime.planes.registry import TransportName
from rrfp.schedule.hints import Hint
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import KNOBS, Dispatch, Policy
from rrfp.schedule.shape import Placement, Shape
from rrfp.trace.spill import DEFAULT_TRACE_MB, LEAST_MB_OF_A_RANK

_VISION_SHARE = 3 / 8
"""The share of stages that are vision stages, as in the simulator's `multimodal` costs."""


def num_vision_stages(num_stages: int) -> int:
    """Return the number of vision stages of a multimodal model: 3/8 of its stages, rounded, and at
    least 1. They come first."""
    return max(1, int(_VISION_SHARE * num_stages + 0.5))


_MAX_SEED = 2**32 - 1

_MAX_MICROBATCHES = 2**16
"""Far more than any pipeline can use; each needs some memory per rank for its tasks."""

NUM_EXPERTS_PER_TOKEN = 2
"""Experts of a layer that process each token: Megatron's default."""

_NUM_EXPERTS = 4
"""Default number of experts per layer of `ModelKind.MOE`."""


class ModelKind(StrEnum):
    """The models that can be trained."""

    GPT = "gpt"
    """Text; with `experts`, the same as `MOE`."""
    VLM = "vlm"
    """Images and text: vision stages before language stages."""
    MOE = "moe"
    """A GPT whose layers have experts."""
    MLP = "mlp"
    """A GPT without attention: as little work per task as Megatron allows, for paced runs."""


class Dtype(StrEnum):
    """The type of parameters and activations; gradients are accumulated in fp32 either way."""

    FP32 = "fp32"
    BF16 = "bf16"


class DeviceKind(StrEnum):
    """The device that holds tensors."""

    CPU = "cpu"
    CUDA = "cuda"


class Network(StrEnum):
    """The network in which ranks open their ports."""

    AUTO = "auto"
    """`PRIVATE` where the run and its host permit it, else `HOST`."""
    PRIVATE = "private"
    """In a network namespace of the run's own."""
    HOST = "host"


class Recompute(StrEnum):
    """The activations that the backward recomputes instead of storing."""

    NONE = "none"
    SELECTIVE = "selective"
    """The activations inside attention."""
    FULL = "full"
    """Every activation inside a layer; only the layer's input is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSettings:
    """The parallel layout."""

    pp: int = setting(4, "Pipeline ranks", must=AT_LEAST_1, is_common=True)
    tp: int = setting(1, "Tensor-parallel ranks", must=AT_LEAST_1, is_common=True)
    dp: int | None = setting(
        None,
        "Data-parallel replicas [as many as --ep spans, or 1].",
        must=AT_LEAST_1,
        is_common=True,
    )
    cp: int = setting(
        1,
        "Context-parallel ranks; above 1 is refused: models here lack Transformer Engine's "
        "attention [1].",
        must=AT_LEAST_1,
    )
    ep: int = setting(1, "Expert-parallel size; must divide --dp", must=AT_LEAST_1)
    chunks: int = setting(1, "Model chunks per pipeline rank", must=AT_LEAST_1, is_common=True)
    placement: Placement = PLACEMENT
    stages: str | None = setting(
        None,
        "Layers of each stage, in model order, as Megatron's --pipeline-model-parallel-layout "
        "'Et*3|t*4|t*4|t*3L', or 3,4,4,3 [equally many].",
        flag="layout",
        metavar="LAYOUT",
    )
    sequence_parallel: bool = setting(
        False, "Divide norms and dropout along the sequence, with --tp."
    )
    distributed_optimizer: bool = setting(False, "Divide the optimizer's state among the replicas.")
    transport: TransportName = TRANSPORT
    outbox_mb: int = OUTBOX_MB
    tls: bool = TLS

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas: as given, or else the smallest number whose product with --cp is
        a multiple of --ep."""
        return self.dp if self.dp is not None else self.ep // math.gcd(self.ep, self.cp)

    @property
    def world_size(self) -> int:
        """Number of ranks of the run: pp x tp x cp x replicas."""
        return self.pp * self.tp * self.cp * self.num_replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The model."""

    kind: ModelKind = setting(
        ModelKind.GPT,
        "gpt (default: text), vlm (images, then text), moe (a gpt with experts) or mlp (a gpt "
        "without attention, for --pace).",
        flag="model",
        is_common=True,
    )
    layers: int = setting(
        8,
        "Transformer layers, a multiple of --pp x --chunks without --layout",
        must=AT_LEAST_1,
        is_common=True,
    )
    hidden: int = setting(128, "Hidden size", must=AT_LEAST_1)
    heads: int = setting(4, "Attention heads, a multiple of --tp", must=AT_LEAST_1)
    experts: int | None = setting(
        None,
        f"Experts per layer, {NUM_EXPERTS_PER_TOKEN} of them per token [moe: {_NUM_EXPERTS}; else "
        "dense layers].",
        must=AT_LEAST_1,
    )
    tie_embeddings: bool = setting(False, "Use the embedding's weight for the output too.")
    dropout: float = setting(
        0.0,
        "Share of hidden and attention values to drop",
        must=Must("at least 0 and below 1", lambda value: 0 <= value < 1),
    )
    dtype: Dtype = setting(Dtype.FP32, "fp32 (default) or bf16; gradients stay in fp32.")
    recompute: Recompute = setting(
        Recompute.NONE,
        "Activations to recompute: none (default), selective or full.",
        panel="Memory",
    )

    @property
    def num_experts(self) -> int | None:
        """Experts per layer: as given, or else 4 for --model moe; None if layers are dense."""
        if self.experts is None and self.kind is ModelKind.MOE:
            return _NUM_EXPERTS
        return self.experts


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """The training data and its division into steps. With the default image sizes a CPU runs a
    microbatch in a fraction of a second."""

    path: Path | None = setting(
        None,
        "Text file, JSONL, Parquet, folder of them, or Megatron .bin/.idx pair [Python's standard "
        "library]; for --model vlm a folder with images and a JSONL of 'image' and 'text' "
        "[scenes drawn at run time].",
        flag="data",
        is_common=True,
    )
    text_key: str = setting("text", "Field of JSONL, or column of Parquet, that has the text")
    tokenizer: Path | None = setting(
        None, "A tokenizer.json of the library tokenizers, or a folder with one [a token per byte]."
    )
    end_of_document: str | None = setting(
        None,
        "The token of --tokenizer that ends a document [as its files name it].",
        metavar="TOKEN",
    )
    microbatches: int = setting(
        8,
        "Microbatches per step and replica",
        must=Must(
            f"at least 1 and at most {_MAX_MICROBATCHES}",
            lambda value: 1 <= value <= _MAX_MICROBATCHES,
        ),
        is_common=True,
    )
    micro_batch_size: int = setting(1, "Sequences per microbatch", must=AT_LEAST_1)
    seq_length: int = setting(256, "Tokens per sequence", must=AT_LEAST_1)
    variable_lengths: bool = setting(
        False, "Give every microbatch the length of its own documents."
    )
    max_images: int = setting(4, "Maximum images per microbatch of --model vlm", must=AT_LEAST_1)
    image_size: int = setting(32, "Longest edge of an image, in pixels", must=AT_LEAST_1)
    patch_size: int = setting(8, "Edge of a patch, in pixels", must=AT_LEAST_1)
    blank_images: bool = setting(False, "Replace images by gray, to measure what they contribute.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The run's length, pace, hosts and directory."""

    steps: int | None = setting(None, "Steps [60; vlm: 240].", must=AT_LEAST_1, is_common=True)
    lr: float = setting(2e-3, "Learning rate", must=FINITE_ABOVE_0)
    seed: int = setting(
        1234,
        "Seed of parameters, data and dropout",
        must=Must(f"in 0..{_MAX_SEED}", lambda value: 0 <= value <= _MAX_SEED),
    )
    pace: str | None = setting(
        None,
        "Delay tasks and messages to language, multimodal or uniform costs, or to the costs in a "
        "CSV or TOML file or of a run [none].",
        panel="Pace",
    )
    jitter: str = setting(
        "none",
        "none (default), J0 to J3, lognormal:0.5, ...: see docs/reference/costs.md.",
        panel="Pace",
    )
    heldout_every: int | None = setting(
        None,
        "Steps between evaluations on held-out images [after the last step only].",
        must=AT_LEAST_1,
    )
    device: DeviceKind = setting(
        DeviceKind.CPU,
        "cpu (default) or cuda; test it by 'rrfp doctor --device cuda'.",
        is_common=True,
    )
    share_gpu: bool = setting(False, "Let several ranks share a GPU, for trials.")
    out: Path | None = setting(
        None, "The run's directory [runs/<time>-<hint>].", panel="Output", is_common=True
    )
    force: bool = setting(False, "Replace the run in --out.", panel="Output")
    shared_files: bool = setting(
        False,
        "Let the umask decide who may read the run's files; else only you may.",
        panel="Output",
    )
    no_trace: bool = setting(False, "Record nothing.", panel="Output")
    trace_mb: int | None = setting(
        None,
        "Disk budget of the records and the trace, in MiB; the oldest steps are removed first "
        f"[{DEFAULT_TRACE_MB}, or {LEAST_MB_OF_A_RANK} per rank if that is more].",
        must=AT_LEAST_1,
        metavar="MIB",
        panel="Output",
    )
    save: Path | None = setting(
        None,
        "Directory for checkpoints: one after the last step, and one on SIGTERM, which then ends "
        "the run with exit code 0 [none].",
        panel="Checkpoints",
        is_common=True,
    )
    save_every: int | None = setting(
        None,
        "Steps between checkpoints, with --save [one at the end only].",
        must=AT_LEAST_1,
        panel="Checkpoints",
    )
    save_async: bool = setting(False, "Write checkpoints in the background.", panel="Checkpoints")
    keep: int = setting(
        2, "Number of newest checkpoints to keep", must=AT_LEAST_1, panel="Checkpoints"
    )
    resume: bool = setting(
        False,
        "Resume from the newest whole checkpoint in --save; without one, start a new run.",
        panel="Checkpoints",
    )
    silence: float = setting(
        15.0,
        "Seconds for which a rank may hang, or a host be out of reach, before the run ends and "
        "names it",
        must=Must("a finite number of at least 3", lambda value: 3 <= value < math.inf),
        metavar="SECONDS",
    )
    nnodes: int = setting(1, "Hosts of the run", must=AT_LEAST_1, panel="Hosts")
    node_rank: int = setting(0, "This host's number", panel="Hosts")
    rdzv_endpoint: str | None = setting(
        None, "Rendezvous of the hosts: a free port of host 0.", metavar="HOST:PORT", panel="Hosts"
    )
    network: Network = setting(
        Network.AUTO,
        "auto (default: a private network namespace for CPU ranks of one host, where permitted), "
        "private (required) or host (open ports).",
        panel="Hosts",
    )


_NUM_STEPS, _NUM_IMAGE_STEPS = 60, 240
"""Default number of steps of text runs and of multimodal runs."""


@dataclass(frozen=True, slots=True, init=False)
class TrainSettings:
    """The settings of a training run, in groups, and its policy."""

    policy: Policy
    """The policy in effect, except for the usual limit, which depends on the step's shape."""
    step: StepSettings
    layout: LayoutSettings
    model: ModelSettings
    data: DataSettings
    run: RunSettings
    asked_hint: Hint | None
    """The hint that was given; None means the dispatch's default."""

    def __init__(self, **flags: Any) -> None:
        """Settings by flag (`pp=2, hint="bfw"`); names and paths may be text.

        Raises UsageError for a text that is no number or not one of the choices, an unknown hint,
        and parts of the policy that conflict, and TypeError for an unknown flag. Ranges are not
        checked.
        """
        knobs = {flag: DECLARED[flag].read(flags.pop(flag)) for flag in KNOBS if flag in flags}
        self._set(flags, knobs.pop("hint", None))
        hint = self._hint_under(knobs.get("dispatch", KNOBS["dispatch"].default))
        object.__setattr__(self, "policy", Policy(hint=hint, **knobs).with_usual_limit())

    def _set(self, flags: Mapping[str, Any], asked_hint: Hint | None) -> None:
        """Set the groups of settings from values by flag, and the hint that was given, but not the
        policy. Raise TypeError for an unknown flag, and UsageError for a text that is no number
        or not one of the choices."""
        given: dict[str, dict[str, Any]] = {group: {} for group in _GROUPS}
        for flag, value in flags.items():
            if flag not in DECLARED:
                raise TypeError(f"'{flag}' is not a setting")
            declared = DECLARED[flag]
            given[declared.group][declared.field] = declared.read(value)
        for group, of in _GROUPS.items():
            object.__setattr__(self, group, of(**given[group]))
        object.__setattr__(self, "asked_hint", asked_hint)

    def _hint_under(self, dispatch: Dispatch) -> Hint:
        """Return the given hint, or the dispatch's default. Raise UsageError if --dispatch megatron
        gets a hint other than that of its own schedule."""
        if dispatch is not Dispatch.MEGATRON:
            return self.asked_hint or HINTS["bf"]
        hint = self.asked_hint or self.megatron_hint
        if hint != self.megatron_hint:
            raise UsageError(
                f"--dispatch megatron runs {self.megatron_hint.name} only, not '{hint.name}'; "
                "leave --hint out"
            )
        return hint

    def changed(self, **flags: Any) -> Self:
        """Make a copy of these settings with some flags changed. Raise UsageError as the
        constructor does."""
        return type(self)(**{**self.by_flag(), **flags})

    def by_flag(self) -> dict[str, Any]:
        """Return the value of every setting by its flag; `hint` is the one that was given, or
        None."""
        values = {
            flag: getattr(getattr(self, declared.group), declared.field)
            for flag, declared in DECLARED.items()
        }
        return values | {"hint": self.asked_hint}

    @property
    def hint(self) -> Hint:
        """The given hint, or the dispatch's default."""
        return self.policy.hint

    @property
    def megatron_hint(self) -> Hint:
        """The hint of Megatron-Core's own schedule: 1f1b, or interleaved with several chunks."""
        return HINTS["1f1b" if self.layout.chunks == 1 else "interleaved"]

    @property
    def effective_policy(self) -> Policy:
        """The policy in effect, with its usual limit for steps of this shape. Raises UsageError for
        a hint that does not fit the shape."""
        return self.policy.of_shape(self.shape)

    @property
    def num_steps(self) -> int:
        """Steps of the run: as given, or else 60, and 240 for --model vlm."""
        if self.run.steps is not None:
            return self.run.steps
        return _NUM_IMAGE_STEPS if self.model.kind is ModelKind.VLM else _NUM_STEPS

    @property
    def shape(self) -> Shape:
        """The pipeline of a step: its ranks, microbatches, chunks and placement."""
        layout = self.layout
        return Shape(layout.pp, self.data.microbatches, layout.chunks, layout.placement)

    @property
    def split(self) -> tuple[int, ...]:
        """The number of layers of each stage, in model order: those of --layout, whose sum is not
        checked, or else equal ones, rounded down. Raises UsageError for a malformed --layout."""
        stages = self.layout.stages
        if stages is None:
            num_stages = self.layout.pp * self.layout.chunks
            return (self.model.layers // num_stages,) * num_stages
        return parse_layout(stages, "--layout")

    @classmethod
    def from_toml(cls, path: Path, **flags: Any) -> Self:
        """Read a TOML file with the names of flags, at top level or in tables by group; `flags`
        take precedence. Relative paths are relative to the current directory. Raise UsageError for
        a file that cannot be read or is not TOML, a name that is unknown, given twice or in the
        wrong table, a wrong type, and as the constructor does."""
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
        """Return every setting by its flag as a JSON value, with the values of the policy and the
        resolved hint, number of replicas and number of steps."""
        values = self.by_flag() | self.policy.described()
        values |= {"dp": self.layout.num_replicas, "steps": self.num_steps}
        return {
            flag: str(value) if isinstance(value, Path) else value for flag, value in values.items()
        }

    def to_json(self) -> str:
        """Return these settings as a JSON text for `from_json`, with the whole policy."""
        return json.dumps(self.described() | self.policy.to_json())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the text of `to_json`. The policy is read as a whole, not computed from its
        flags."""
        values = json.loads(text)
        policy = Policy.from_json(values)
        of_policy = policy.to_json()
        made = cls.__new__(cls)
        made._set(
            {flag: value for flag, value in values.items() if flag not in of_policy}, policy.hint
        )
        object.__setattr__(made, "policy", policy)
        return made


_GROUPS: dict[str, Any] = {
    "step": StepSettings,
    "layout": LayoutSettings,
    "model": ModelSettings,
    "data": DataSettings,
    "run": RunSettings,
}

_TABLES = {"policy": "policy", **{group: group for group in _GROUPS}, "step": "policy"}
"""The TOML table of each group."""

DECLARED: dict[str, Declared] = {
    **{declared.flag: declared for declared in declared_knobs("policy", in_run=True)},
    **{
        declared.flag: declared
        for group, of in _GROUPS.items()
        for declared in declared_in(group, of)
    },
}
"""Every setting by its flag."""


def _read(table: Mapping[str, object], path: Path) -> dict[str, object]:
    """Return the settings of a parsed TOML file by flag. Raise UsageError, naming the file, for an
    unknown name, a name given twice or in another group's table, or a value of a wrong type."""
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
    """Yield the names and values of a file's settings, at top level and in tables; names are not
    checked. Raise UsageError for a setting in the table of another group."""
    for key, value in table.items():
        if not isinstance(value, dict) or key not in _TABLES.values():
            yield key, value
            continue
        for inner, inner_value in value.items():
            declared = DECLARED.get(inner.replace("-", "_"))
            right = key if declared is None else _TABLES[declared.group]
            if right != key:
                raise UsageError(f"{path} sets '{inner}' in [{key}]; move it to [{right}]")
            yield inner, inner_value
