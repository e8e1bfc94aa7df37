"""The settings of a training run, in groups. Each has a flag, and the same name in a TOML file.

Imports no torch: the launcher checks the settings before it starts any process.
"""

import json
import math
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Self

from rrfp.errors import UsageError, did_you_mean
from rrfp.inputs import OrderFile, parse_layout, resolve_hint
from rrfp.megatron.settings import GradOrder, check_auto
from rrfp.runtime.planes.registry import DEFAULT_OUTBOX_MB, MOST_OUTBOX_MB, TransportName
from rrfp.schedule.admission import Admit
from rrfp.schedule.balance import AdmitAcross
from rrfp.schedule.hints import Hint, WeightGradients
from rrfp.schedule.knobs import (
    IMPATIENT,
    Hold,
    Patience,
    check_is_absolute,
    described_hold,
    described_patience,
    parse_hold,
    parse_patience,
)
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import PAPER_LIMIT, AgreementRule, Dispatch, Policy
from rrfp.schedule.shape import Placement, Shape
from rrfp.trace.spill import DEFAULT_TRACE_MB, LEAST_MB_OF_A_RANK

# How a multimodal model is divided between vision and language. Imports no torch.


_VISION_SHARE = 3 / 8
"""The share of stages that are vision stages, as in the simulator's `multimodal` costs."""


def num_vision_stages(num_stages: int) -> int:
    """How many stages, from the first on, are vision stages."""
    return max(1, int(_VISION_SHARE * num_stages + 0.5))


# How a setting is declared: once, for the command line, for TOML files and for validation.


_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", Path: "a path"}

_METADATA = "declared"


@dataclass(frozen=True, slots=True)
class Must:
    """A constraint on a setting's value."""

    wording: str
    """The constraint in words, after "it must be"."""
    holds: Callable[[Any], bool]


AT_LEAST_1 = Must("at least 1", lambda value: value >= 1)


@dataclass(frozen=True, slots=True)
class _Metadata:
    help: str
    must: Must | None
    flag: str | None
    metavar: str | None


@dataclass(frozen=True, slots=True)
class Declared:
    """One declared setting."""

    flag: str
    """Its name as a keyword: `micro_batch_size`. The flag is `--micro-batch-size`; TOML files may
    use either spelling."""
    group: str
    field: str
    """Its attribute: `settings.<group>.<field>`."""
    kind: Any
    """int, float, bool, str, Path, a StrEnum, Hint, Hold, or Patience."""
    default: Any
    help: str
    must: Must | None
    metavar: str | None

    @property
    def spelled(self) -> str:
        """The flag's name on the command line, without the leading dashes."""
        return self.flag.replace("_", "-")

    @property
    def help_text(self) -> str:
        """Its help, with the default unless the text itself states it."""
        return self.help if self.help.endswith(".") else f"{self.help} [{self.default}]."

    def read(self, value: Any) -> Any:
        """Convert a number, a hint, a hold, a patience, a path or a choice given as text; any other
        value is returned as it is.

        Raises UsageError for a text that is no number or not one of the choices, and for an unknown
        hint.
        """
        if value is None or not isinstance(value, str):
            return value
        if self.kind is Hint:
            return resolve_hint(value, auto=True)
        if self.kind == Hold:
            return parse_hold(value, f"--{self.spelled}")
        if self.kind == Patience:
            return parse_patience(value, f"--{self.spelled}")
        if self.kind is Path:
            return Path(value)
        if self.kind in (int, float):
            try:
                return self.kind(value)
            except ValueError:
                raise UsageError(
                    f"--{self.spelled} is '{value}'; it takes {_TYPE_NAMES[self.kind]}"
                ) from None
        if _is_choice(self.kind):
            if value not in list(self.kind):
                raise UsageError(
                    f"--{self.spelled} is '{value}'; it must be one of {', '.join(self.kind)}"
                    f"{did_you_mean(value, self.kind)}"
                )
            return self.kind(value)
        return value

    def read_toml(self, value: object, path: Path) -> Any:
        """Convert a value from a TOML file; raises UsageError if its type is wrong."""
        wanted = str if self.kind is Hint or _is_choice(self.kind) else self.kind
        if wanted in (Hold, Patience):
            wanted = int if type(value) is int else str
        if wanted is Path and isinstance(value, str):
            return Path(value)
        if wanted is float and type(value) is int:
            return float(value) if abs(value) < sys.float_info.max else math.inf
        if type(value) is not wanted:
            raise UsageError(
                f"{path} sets {self.spelled} to {value!r}; it takes "
                f"{_TYPE_NAMES.get(wanted, 'a string')}"
            )
        return value

    def check(self, value: Any) -> None:
        """Raise UsageError if a value is out of the setting's range."""
        if value is not None and self.must is not None and not self.must.holds(value):
            raise UsageError(f"--{self.spelled} is {value}; it must be {self.must.wording}")


def setting(
    default: Any,
    help_text: str,
    *,
    must: Must | None = None,
    flag: str | None = None,
    metavar: str | None = None,
) -> Any:
    """A field of a group of settings. The default is appended to a help text that does not end with
    a full stop. `flag` names the setting if its field has another name."""
    return field(default=default, metadata={_METADATA: _Metadata(help_text, must, flag, metavar)})


def declared_in(group: str, of: type) -> Iterator[Declared]:
    """The settings of a group, in the order of its fields."""
    hints = typing.get_type_hints(of)
    for each in fields(of):
        metadata: _Metadata = each.metadata[_METADATA]
        yield Declared(
            metadata.flag or each.name,
            group,
            each.name,
            _without_none(hints[each.name]),
            each.default,
            metadata.help,
            metadata.must,
            metadata.metavar,
        )


def _without_none(annotation: Any) -> Any:
    if isinstance(annotation, types.UnionType):
        parts = [part for part in annotation.__args__ if part is not types.NoneType]
        return reduce(or_, parts)
    return annotation


def _is_choice(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, StrEnum)


# The settings of a training run, group by group. Everything about a setting is declared here: its
# flag's help, its default, its range, and its place in a TOML file.
#
# Imports no torch: the launcher checks the settings before it starts any process.


_MAX_SEED = 2**32 - 1

_MAX_MICROBATCHES = 2**16
"""Far more than any pipeline can use; each costs a rank some memory for its tasks."""

NUM_EXPERTS_PER_TOKEN = 2
"""Experts of a layer that each token passes through: Megatron's default."""

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
    """Where tensors live."""

    CPU = "cpu"
    CUDA = "cuda"


class Network(StrEnum):
    """Where ranks open their ports."""

    AUTO = "auto"
    """`PRIVATE` where the run and its host permit it, else `HOST`."""
    PRIVATE = "private"
    """In a network namespace of the run's own."""
    HOST = "host"


class Recompute(StrEnum):
    """Which activations the backward recomputes instead of keeping."""

    NONE = "none"
    SELECTIVE = "selective"
    """Those inside attention."""
    FULL = "full"
    """All inside a layer; only its input is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """The policy that was asked for; `TrainSettings.effective_policy` is the one in effect."""

    hint: Hint | None = setting(
        None,
        "What goes first of the ready tasks: a hint, an order file (.csv), or auto (chosen while "
        "the run goes on, by simulating its own steps) [bf].",
    )
    dispatch: Dispatch = setting(
        Dispatch.READY,
        "ready (default: the hint ranks ready tasks), fixed (its order binds) or megatron "
        "(Megatron-Core's own 1F1B, or interleaving with --chunks).",
    )
    limit: int | None = setting(
        None,
        "Forwards a rank may run ahead of its backwards [if ready without --hold: what fills the "
        f"pipeline, {PAPER_LIMIT} or more].",
    )
    hold: Hold | None = setting(
        None,
        "Most activations that a rank keeps, instead of --limit: 8 (microbatches), 40GiB, or auto "
        "(what the device has left).",
        metavar="SIZE",
    )
    hold_features: str | None = setting(
        None,
        "What a microbatch's size grows with, for a hold in bytes: MODULE:FUNCTION, which takes an "
        "item of the data and returns a number or several [tokens, patches, images and squares].",
    )
    measure_memory: bool = setting(
        False,
        "Measure what activations take, in every step; a hold in bytes does so while it must.",
    )
    w: WeightGradients = setting(
        WeightGradients.IDLE,
        "When an order used as a hint runs weight gradients: idle (default: when nothing else is "
        "ready) or ranked (at their places).",
    )
    agreement: AgreementRule = setting(
        AgreementRule.INTERSECTION,
        "What ranks that share collectives run: intersection (default: the best task that all have "
        "ready) or unanimous (the task that all would pick).",
    )
    patience: Patience = setting(
        IMPATIENT,
        "How long a free rank waits for a better task that another rank has announced: 0 (default: "
        "never), auto (by how punctual announcements are) or a time such as 5ms.",
        metavar="TIME",
    )
    grad_order: GradOrder = setting(
        GradOrder.CANONICAL,
        "How gradients are summed: canonical (default: by microbatch, the same to the bit) or "
        "arrival (as they come).",
    )
    admit: str = setting(
        Admit.GIVEN,
        "The order in which a step's microbatches enter: given (default), pyramid (light, heavy, "
        "light), plan (searched by simulation while the step before runs) or a file with a line "
        "per step.",
    )
    admit_cost: str | None = setting(
        None,
        "The weight of a microbatch in the pyramid: work (default), tokens, patches or "
        "MODULE:FUNCTION, which takes its batch.",
    )
    plan_ms: float | None = setting(
        None,
        "How long --admit plan searches for a step's order, in ms [a tenth of the last step].",
        must=Must("a finite number above 0", lambda value: math.isfinite(value) and value > 0),
        metavar="MS",
    )
    admit_across: str = setting(
        AdmitAcross.NONE,
        "Whether a step's microbatches are dealt to the --dp replicas by weight before they enter: "
        "none (default), replicas or a file with a line per step.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSettings:
    """The parallel layout."""

    pp: int = setting(4, "Pipeline ranks", must=AT_LEAST_1)
    tp: int = setting(1, "Tensor-parallel ranks", must=AT_LEAST_1)
    dp: int | None = setting(
        None, "Data-parallel replicas [as many as --ep spans, or 1].", must=AT_LEAST_1
    )
    cp: int = setting(
        1,
        "Context-parallel ranks; above 1 is refused: models here lack Transformer Engine's "
        "attention [1].",
        must=AT_LEAST_1,
    )
    ep: int = setting(1, "Replicas that divide the experts; a divisor of --dp", must=AT_LEAST_1)
    chunks: int = setting(1, "Model chunks per pipeline rank", must=AT_LEAST_1)
    placement: Placement = setting(
        Placement.LOOP,
        "Placement of chunks: loop (default: Megatron's interleaving) or v (there and back, with "
        "--chunks 2).",
    )
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
    transport: TransportName = setting(
        TransportName.AUTO,
        "What carries tensors between ranks: auto (default: what suits the device and the peer's "
        "place), inline (the sockets), shm, cuda-ipc, nixl or bounce.",
    )
    outbox_mb: int = setting(
        DEFAULT_OUTBOX_MB,
        "Memory per rank and data plane in which large messages wait for their receivers, in MiB; "
        "nixl takes twice as much",
        must=Must(
            f"at least 1 and at most {MOST_OUTBOX_MB}", lambda value: 1 <= value <= MOST_OUTBOX_MB
        ),
        metavar="MIB",
    )
    tls: bool = setting(
        False, "Encrypt the messages between pipeline ranks of different hosts (`rrfp[tls]`)."
    )

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas: as asked for, or else as many as divide the experts."""
        return self.dp if self.dp is not None else self.ep // math.gcd(self.ep, self.cp)

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.cp * self.num_replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """What is trained."""

    kind: ModelKind = setting(
        ModelKind.GPT,
        "gpt (default: text), vlm (images, then text), moe (a gpt with experts) or mlp (a gpt "
        "without attention, for --pace).",
        flag="model",
    )
    layers: int = setting(
        8, "Transformer layers, a multiple of --pp x --chunks without --layout", must=AT_LEAST_1
    )
    hidden: int = setting(128, "Hidden size", must=AT_LEAST_1)
    heads: int = setting(4, "Attention heads, a multiple of --tp", must=AT_LEAST_1)
    experts: int | None = setting(
        None,
        f"Experts per layer, of which a token takes {NUM_EXPERTS_PER_TOKEN} [moe: {_NUM_EXPERTS}; "
        "else dense layers].",
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
        Recompute.NONE, "Activations to recompute: none (default), selective or full."
    )

    @property
    def num_experts(self) -> int | None:
        """Experts per layer; None if layers are dense."""
        if self.experts is None and self.kind is ModelKind.MOE:
            return _NUM_EXPERTS
        return self.experts


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """The training data, and how a step divides it. Default image sizes let a CPU run a microbatch
    in a fraction of a second."""

    path: Path | None = setting(
        None,
        "Text file, JSONL, Parquet, folder of them, or Megatron .bin/.idx pair [Python's standard "
        "library]; for --model vlm a folder with images and a JSONL of 'image' and 'text' "
        "[scenes drawn at run time].",
        flag="data",
    )
    text_key: str = setting("text", "Field of JSONL, or column of Parquet, that has the text")
    tokenizer: Path | None = setting(
        None,
        "A tokenizer.json of the library tokenizers, or a folder with one [a token per byte].",
    )
    end_of_document: str | None = setting(
        None,
        "The token of --tokenizer that ends a document [what it says itself].",
        metavar="TOKEN",
    )
    microbatches: int = setting(
        8,
        "Microbatches per step and replica",
        must=Must(
            f"at least 1 and at most {_MAX_MICROBATCHES}",
            lambda value: 1 <= value <= _MAX_MICROBATCHES,
        ),
    )
    micro_batch_size: int = setting(1, "Sequences per microbatch", must=AT_LEAST_1)
    seq_length: int = setting(256, "Tokens per sequence", must=AT_LEAST_1)
    variable_lengths: bool = setting(
        False, "Give every microbatch the length of its own documents."
    )
    max_images: int = setting(4, "Most images in a microbatch of --model vlm", must=AT_LEAST_1)
    image_size: int = setting(32, "Longest edge of an image, in pixels", must=AT_LEAST_1)
    patch_size: int = setting(8, "Edge of a patch, in pixels", must=AT_LEAST_1)
    blank_images: bool = setting(
        False, "Show grey instead of the images, to see what they are worth."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The run's length, pace, hosts and directory."""

    steps: int | None = setting(None, "Steps [60; vlm: 240].", must=AT_LEAST_1)
    lr: float = setting(
        2e-3,
        "Learning rate",
        must=Must("a finite number above 0", lambda value: math.isfinite(value) and value > 0),
    )
    seed: int = setting(
        1234,
        "Seed of parameters, data and dropout",
        must=Must(f"in 0..{_MAX_SEED}", lambda value: 0 <= value <= _MAX_SEED),
    )
    pace: str | None = setting(
        None,
        "Hold tasks and messages to language, multimodal or uniform costs, or to those of a CSV or "
        "TOML file or of a run [none].",
    )
    jitter: str = setting(
        "none", "none (default), J0 to J3, lognormal:0.5, ...: see docs/reference/costs.md."
    )
    heldout_every: int | None = setting(
        None,
        "Steps between evaluations on held-out images [after the last step only].",
        must=AT_LEAST_1,
    )
    device: DeviceKind = setting(
        DeviceKind.CPU, "cpu (default) or cuda, which 'rrfp doctor --device cuda' tries out."
    )
    share_gpu: bool = setting(False, "Let several ranks share a GPU, for trials.")
    out: Path | None = setting(None, "The run's directory [runs/<time>-<hint>].")
    force: bool = setting(False, "Replace the run in --out.")
    shared_files: bool = setting(
        False, "Let the umask decide who may read the run's files; else only you may."
    )
    no_trace: bool = setting(False, "Record nothing.")
    trace_mb: int | None = setting(
        None,
        "The most that the records and the trace take on disk, in MiB: the oldest steps go first "
        f"[{DEFAULT_TRACE_MB}, or {LEAST_MB_OF_A_RANK} a rank if that is more].",
        must=AT_LEAST_1,
        metavar="MIB",
    )
    save: Path | None = setting(
        None,
        "Directory for checkpoints, one after the last step, and one on SIGTERM, which then ends "
        "the run with exit code 0 [none].",
    )
    save_every: int | None = setting(
        None, "Steps between checkpoints, with --save [those above only].", must=AT_LEAST_1
    )
    save_async: bool = setting(False, "Write checkpoints while training goes on.")
    keep: int = setting(2, "Checkpoints to keep, the newest ones", must=AT_LEAST_1)
    resume: bool = setting(
        False, "Go on from the newest whole checkpoint in --save; without one, start anew."
    )
    silence: float = setting(
        15.0,
        "Seconds for which a rank may stand still, or a host be out of reach, before the run ends "
        "and names it",
        must=Must("a finite number of at least 3", lambda value: 3 <= value < math.inf),
        metavar="SECONDS",
    )
    nnodes: int = setting(1, "Hosts of the run", must=AT_LEAST_1)
    node_rank: int = setting(0, "This host's number")
    rdzv_endpoint: str | None = setting(
        None, "Where hosts meet: a free port of host 0.", metavar="HOST:PORT"
    )
    network: Network = setting(
        Network.AUTO,
        "auto (default: ranks of one host meet in a network of their own, on the CPU and where "
        "that is permitted), private (or the run is refused) or host (ports take anybody).",
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
