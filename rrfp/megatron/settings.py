"""The settings of a training run: one field a flag, the same names in a TOML file.

This file imports no torch: the launcher checks the settings before it starts any process.
"""

import dataclasses
import json
import math
import os
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from rrfp.errors import UsageError
from rrfp.megatron.dispatching import GradOrder
from rrfp.megatron.item_costs import CostName
from rrfp.schedule.admission import Admit
from rrfp.schedule.dispatcher import AgreementRule, WeightGradients
from rrfp.schedule.shape import Placement, Shape

DEVICES = ("cpu",)

_MAX_SEED = 2**32 - 1
_MAX_PORT = 2**16 - 1

_MAX_MICROBATCHES = 2**16
"""Far more than any pipeline can use; each costs a rank some memory for its tasks."""

NUM_EXPERTS_A_TOKEN = 2
"""Each token goes through so many experts of a layer, as in Megatron by default."""

_NUM_EXPERTS = 4
"""Experts a layer of `ModelKind.MOE` unless another number is asked for."""

_NUM_STEPS, _NUM_IMAGE_STEPS = 60, 240
"""Steps of a run of text, and of one that has to learn to see, unless others are asked for."""

_MAX_IMAGES, _IMAGE_SIZE, _PATCH_SIZE = 4, 32, 8
"""So that a microbatch of images takes a CPU a fraction of a second."""

_MAX_RANKS_PER_CORE = 16
"""More ranks than this on a host would start for many minutes, if there were memory for them."""


class DispatchMode(StrEnum):
    """Who decides what a rank runs next."""

    READY = "ready"
    """The hint ranks the tasks that are ready."""
    FIXED = "fixed"
    """The hint's order is binding."""
    MEGATRON = "megatron"
    """Megatron-Core's own schedule function, with its blocking transfers."""


class Dtype(StrEnum):
    """What parameters and activations are kept in; gradients add up in fp32 either way."""

    FP32 = "fp32"
    BF16 = "bf16"


class ModelKind(StrEnum):
    """What is trained."""

    GPT = "gpt"
    """Text; with `experts`, as `MOE`."""
    VLM = "vlm"
    """Images and text: vision stages before language stages."""
    MOE = "moe"
    """A GPT whose layers have experts."""
    MLP = "mlp"
    """A GPT without attention: as little work as a task of Megatron's can be, for paced runs."""


class Recompute(StrEnum):
    """Which activations the backward computes again rather than keeps."""

    NONE = "none"
    SELECTIVE = "selective"
    """Those inside the attention."""
    FULL = "full"
    """Those of every layer but its input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """What to train, on how many ranks, in which order, and where the run goes."""

    hint: str | None = None
    """A hint's name or an order file; None chooses by the dispatch (`resolved_hint`)."""
    dispatch: str = DispatchMode.READY
    pp: int = 4
    """Pipeline ranks."""
    tp: int = 1
    """Tensor-parallel ranks."""
    dp: int | None = None
    """Data-parallel replicas; None is as many as `ep` spans (`num_replicas`)."""
    cp: int = 1
    """Context-parallel ranks."""
    ep: int = 1
    """Expert-parallel ranks: replicas that share out the experts of their layers."""
    chunks: int = 1
    """Model chunks a pipeline rank."""
    placement: str = Placement.LOOP
    sequence_parallel: bool = False
    """Split what lies between the tensor-parallel layers along the sequence."""
    microbatches: int = 8
    """Microbatches a step, for each replica."""
    micro_batch_size: int = 1
    """Sequences a microbatch."""
    seq_length: int = 256
    """Tokens a sequence; the longest with `variable_lengths`."""
    model: str = ModelKind.GPT
    layers: int = 8
    hidden: int = 128
    heads: int = 4
    experts: int | None = None
    """Experts a layer, of which each token takes 2; None chooses by the model (`num_experts`)."""
    tie_embeddings: bool = False
    """Let the output layer use the weight of the embedding."""
    dropout: float = 0.0
    """Share of the hidden and attention values that is dropped."""
    dtype: str = Dtype.FP32
    recompute: str = Recompute.NONE
    distributed_optimizer: bool = False
    """Divide the optimizer's state among the replicas."""
    lr: float = 2e-3
    """Learning rate, once it has warmed up over the first steps."""
    steps: int | None = None
    """None trains for as many steps as the model takes to learn something (`num_steps`)."""
    limit: int | None = None
    """D (forwards minus backwards run on a rank) at which `ready` dispatch withholds forwards; None
    is `DEFAULT_LIMIT`, unless there is a `hold`. A binding order is checked against it when it is
    given."""
    hold: int | None = None
    """Most activations that `ready` dispatch keeps on a rank, in whole-rank microbatches."""
    w: str = WeightGradients.IDLE
    """When an order that splits the backward, used as a hint, runs the weight gradients."""
    agreement: str = AgreementRule.INTERSECTION
    grad_order: str = GradOrder.CANONICAL
    admit: str = Admit.GIVEN
    """The order in which a step's microbatches enter: a name or an admission file."""
    admit_cost: str | None = None
    """What a microbatch weighs: a name or MODULE:FUNCTION; None is `work`."""
    seed: int = 1234
    data: Path | None = None
    """Text file, folder, JSONL or Megatron .bin/.idx; None trains on Python's standard library."""
    variable_lengths: bool = False
    """Give every microbatch the length of its own documents."""
    max_images: int = _MAX_IMAGES
    """Most images a microbatch; each has its own number of them, from 0."""
    image_size: int = _IMAGE_SIZE
    """Longest edge of an image, in pixels."""
    patch_size: int = _PATCH_SIZE
    """Edge of a patch, in pixels."""
    blank_images: bool = False
    """Show grey instead of the images, to see what they are worth."""
    heldout_every: int | None = None
    """Steps from one evaluation on held-out images to the next; there is one after the last."""
    pace: str | None = None
    """Costs, as `rrfp simulate` takes them, to which every task and message is stretched; None
    leaves them as they are."""
    jitter: str = "none"
    """Jitter, as `rrfp simulate` takes it, on the costs of `pace` or on what tasks really take."""
    device: str = "cpu"
    out: Path | None = None
    """The run's directory; None names it by time and hint."""
    force: bool = False
    """Overwrite an existing `out`."""
    no_trace: bool = False
    nnodes: int = 1
    """Hosts; every one runs the same command but for `node_rank`."""
    node_rank: int = 0
    """This host's number, from 0."""
    rdzv_endpoint: str | None = None
    """HOST:PORT of host 0, where the hosts meet."""

    @property
    def resolved_hint(self) -> str:
        """The hint asked for, or the default of the dispatch."""
        if self.hint is not None:
            return self.hint
        return self.megatron_hint if self.dispatch == DispatchMode.MEGATRON else "bf"

    @property
    def megatron_hint(self) -> str:
        """The order that Megatron-Core's own schedule runs."""
        return "1f1b" if self.chunks == 1 else "interleaved"

    @property
    def num_experts(self) -> int | None:
        """Experts a layer; None where layers are dense."""
        if self.experts is None and self.model == ModelKind.MOE:
            return _NUM_EXPERTS
        return self.experts

    @property
    def num_steps(self) -> int:
        """Steps of the run: those asked for, or enough to see the loss fall."""
        if self.steps is not None:
            return self.steps
        return _NUM_IMAGE_STEPS if self.model == ModelKind.VLM else _NUM_STEPS

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas: those asked for, or as few as the experts can be spread over."""
        return self.dp if self.dp is not None else self.ep // math.gcd(self.ep, self.cp)

    @property
    def shape(self) -> Shape:
        """The pipeline of a step."""
        return Shape(self.pp, self.microbatches, self.chunks, Placement(self.placement))

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.cp * self.num_replicas

    @classmethod
    def from_toml(cls, path: Path, **flags: Any) -> Self:
        """Read a TOML file of the flags' names; `flags` given beside it go first.

        Relative paths in the file count from the current directory, as on the command line.
        Raises UsageError for a file that cannot be read, an unknown name or a wrong type.
        """
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(
                f"cannot read the configuration {path}: {error.strerror}; check --config"
            ) from None
        # A number of thousands of digits is a ValueError too, and no TOMLDecodeError.
        except ValueError as error:
            raise UsageError(f"{path} is not TOML ({error}); correct it") from None
        except RecursionError:
            raise UsageError(f"{path} is nested too deeply; write a setting a line") from None
        return cls(**{**_checked(table, path), **flags})

    def described(self) -> dict[str, object]:
        """Every setting by its name, as JSON has it, hint, replicas and steps resolved."""
        values = dataclasses.asdict(self)
        values |= {
            "hint": self.resolved_hint,
            "dp": self.num_replicas,
            "steps": self.num_steps,
        }
        return {
            name: str(value) if isinstance(value, Path) else value for name, value in values.items()
        }

    def to_json(self) -> str:
        """These settings as text, for `from_json`."""
        return json.dumps(self.described())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        paths = {name: Path(values[name]) for name in ("data", "out") if values[name] is not None}
        return cls(**{**values, **paths})

    def validate(self) -> None:
        """Raise UsageError when these settings cannot run. Hints and data are checked apart."""
        for name in _AT_LEAST_ONE:
            _require(
                getattr(self, name) is None or getattr(self, name) >= 1,
                f"--{_flag(name)} is {getattr(self, name)}; it must be at least 1",
            )
        _require(
            self.microbatches <= _MAX_MICROBATCHES,
            f"--microbatches is {self.microbatches}; it must be at most {_MAX_MICROBATCHES}",
        )
        _require(
            math.isfinite(self.lr) and self.lr > 0,
            f"--lr is {self.lr}; it must be a finite number above 0",
        )
        _require(
            0 <= self.seed <= _MAX_SEED, f"--seed is {self.seed}; it must be in 0..{_MAX_SEED}"
        )
        _require(
            0 <= self.dropout < 1, f"--dropout is {self.dropout}; it must be at least 0 and below 1"
        )
        check_device(self.device)
        for name, choices in _CHOICES.items():
            _require(
                getattr(self, name) in tuple(choices),
                f"--{_flag(name)} is '{getattr(self, name)}'; it must be one of "
                f"{', '.join(choices)}",
            )
        for is_so, sentence in _TOGETHER:
            _require(not is_so(self), sentence.format(self))
        self._validate_layout()
        self._validate_hosts()

    def _validate_layout(self) -> None:
        _require(
            self.layers % (self.pp * self.chunks) == 0,
            f"{self.layers} layers do not divide by {self.pp} pipeline ranks"
            + ("" if self.chunks == 1 else f" of {self.chunks} chunks")
            + "; change --layers, --pp or --chunks",
        )
        _require(
            self.hidden % self.heads == 0,
            f"a hidden size of {self.hidden} does not divide by {self.heads} heads; "
            "change --hidden or --heads",
        )
        _require(
            self.hidden // self.heads % 2 == 0,
            f"a head of {self.hidden // self.heads} numbers cannot be rotated in pairs; "
            "make --hidden an even multiple of --heads",
        )
        _require(
            self.heads % self.tp == 0,
            f"{self.heads} heads do not divide by {self.tp} tensor-parallel ranks; "
            "change --heads or --tp",
        )

    def _validate_hosts(self) -> None:
        _require(
            self.world_size % self.nnodes == 0,
            f"{self.world_size} ranks do not divide over {self.nnodes} hosts; change --nnodes",
        )
        num_ranks, num_cores = self.world_size // self.nnodes, os.cpu_count() or 1
        _require(
            num_ranks <= _MAX_RANKS_PER_CORE * num_cores,
            f"{num_ranks} ranks on a host of {num_cores} cores are too many; change --pp, --tp or "
            f"--dp so that there are at most {_MAX_RANKS_PER_CORE * num_cores}",
        )
        _require(
            0 <= self.node_rank < self.nnodes,
            f"--node-rank is {self.node_rank}; with --nnodes {self.nnodes} it must be in "
            f"0..{self.nnodes - 1}",
        )
        if self.rdzv_endpoint is not None:
            host, _, port = self.rdzv_endpoint.rpartition(":")
            _require(
                bool(host) and port.isdecimal() and 0 < int(port) <= _MAX_PORT,
                f"--rdzv-endpoint is '{self.rdzv_endpoint}'; it must be HOST:PORT, such as "
                f"node0:29400",
            )
        if self.nnodes > 1:
            _require(
                self.rdzv_endpoint is not None,
                "several hosts need --rdzv-endpoint HOST:PORT, an address of host 0",
            )
            _require(
                self.out is not None,
                "several hosts need --out DIR on a file system that all of them share",
            )


def check_device(device: str) -> None:
    """Raise UsageError unless training can run on the device."""
    _require(device != "cuda", "--device cuda has no transport in this version; use --device cpu")
    _require(device in DEVICES, f"'{device}' is not a device; use --device {' or '.join(DEVICES)}")


_AT_LEAST_ONE = (
    "pp",
    "tp",
    "dp",
    "cp",
    "ep",
    "chunks",
    "microbatches",
    "micro_batch_size",
    "seq_length",
    "layers",
    "hidden",
    "heads",
    "experts",
    "steps",
    "limit",
    "hold",
    "max_images",
    "image_size",
    "patch_size",
    "heldout_every",
    "nnodes",
)

_CHOICES: dict[str, type[StrEnum]] = {
    "dispatch": DispatchMode,
    "placement": Placement,
    "w": WeightGradients,
    "agreement": AgreementRule,
    "grad_order": GradOrder,
    "model": ModelKind,
    "dtype": Dtype,
    "recompute": Recompute,
}

_TOGETHER: tuple[tuple[Callable[[TrainSettings], bool], str], ...] = (
    (
        lambda s: s.placement == Placement.V and s.chunks != 2,
        "--placement v takes 2 chunks a rank, not {0.chunks}; add --chunks 2",
    ),
    (
        lambda s: s.limit is not None and s.hold is not None,
        "--limit and --hold exclude each other; keep --hold {0.hold}, the exact bound, or --limit "
        "{0.limit}",
    ),
    # What Megatron-Core's own schedules run.
    (
        lambda s: s.dispatch == DispatchMode.MEGATRON and s.placement != Placement.LOOP,
        "--dispatch megatron has no placement {0.placement}; leave --placement out",
    ),
    (
        lambda s: s.dispatch == DispatchMode.MEGATRON and s.resolved_hint != s.megatron_hint,
        "--dispatch megatron runs {0.megatron_hint} only, not '{0.hint}'; leave --hint out",
    ),
    (
        lambda s: s.dispatch == DispatchMode.MEGATRON and s.chunks > 1 and s.pp < 3,
        "--dispatch megatron interleaves chunks over 3 or more pipeline ranks, not {0.pp} (between "
        "2, gloo mixes up the messages of both directions); change --pp or --chunks",
    ),
    (
        lambda s: s.dispatch == DispatchMode.MEGATRON and s.grad_order != GradOrder.CANONICAL,
        "--dispatch megatron adds gradients up in its own order, which is the canonical one; leave "
        "--grad-order out",
    ),
    (
        lambda s: s.dispatch != DispatchMode.READY and s.agreement != AgreementRule.INTERSECTION,
        "--dispatch {0.dispatch} has one order and nothing to agree on; leave --agreement out",
    ),
    (
        lambda s: s.dispatch != DispatchMode.READY and s.w != WeightGradients.IDLE,
        "--dispatch {0.dispatch} runs weight gradients where its order has them; leave --w out",
    ),
    # Who says what a microbatch weighs.
    (
        lambda s: s.admit_cost is not None and s.admit != Admit.PYRAMID,
        "--admit-cost {0.admit_cost} weighs microbatches and --admit {0.admit} sorts none; add "
        "--admit pyramid or leave --admit-cost out",
    ),
    (
        lambda s: s.admit_cost is not None and s.pace is not None,
        "--pace {0.pace} knows what microbatches cost; leave --admit-cost out",
    ),
    (
        lambda s: s.admit_cost == CostName.PATCHES and s.model != ModelKind.VLM,
        "--admit-cost patches counts those of images and --model {0.model} has none; leave it out",
    ),
    # What the model and its groups need.
    (
        lambda s: s.cp > 1,
        "--cp {0.cp} needs the attention of Transformer Engine, which this build for the CPU "
        "lacks; leave --cp out",
    ),
    (
        lambda s: s.sequence_parallel and s.tp == 1,
        "--sequence-parallel divides sequences among tensor-parallel ranks and there is 1; add "
        "--tp 2",
    ),
    (
        lambda s: (s.sequence_parallel or s.variable_lengths) and s.seq_length % s.tp > 0,
        "a sequence length of {0.seq_length} does not divide by {0.tp} tensor-parallel ranks, as "
        "--sequence-parallel and --variable-lengths need; change --seq-length or --tp",
    ),
    (
        lambda s: s.model == ModelKind.VLM and (s.num_experts is not None or s.ep > 1),
        "--model vlm has dense layers; leave --experts and --ep out",
    ),
    (
        lambda s: s.num_experts is not None and s.num_experts < NUM_EXPERTS_A_TOKEN,
        "--experts is {0.num_experts}; every token takes "
        f"{NUM_EXPERTS_A_TOKEN}, so there must be at least as many",
    ),
    (
        lambda s: s.num_experts is not None and s.tp > 1 and not s.sequence_parallel,
        "experts with --tp {0.tp} train with sequence parallelism only; add --sequence-parallel",
    ),
    (
        lambda s: s.ep > 1 and s.tp > 1,
        "--ep {0.ep} with --tp {0.tp} gathers tokens in unequal parts, which gloo cannot do; leave "
        "one of them out",
    ),
    (
        lambda s: s.ep > 1 and s.num_experts is None,
        "--ep {0.ep} shares out experts and the layers are dense; add --experts",
    ),
    (
        lambda s: s.num_experts is not None and s.num_experts % s.ep > 0,
        "{0.num_experts} experts do not divide by {0.ep} expert-parallel ranks; change --experts "
        "or --ep",
    ),
    (
        lambda s: s.num_replicas * s.cp % s.ep > 0,
        "{0.num_replicas} replicas do not divide by {0.ep} expert-parallel ranks; change --dp or "
        "--ep",
    ),
    (
        lambda s: s.model == ModelKind.VLM and s.shape.num_stages == 1,
        "--model vlm needs a vision stage and a language stage, and there is 1 stage; add --pp 2 "
        "or --chunks 2",
    ),
    (
        lambda s: s.model == ModelKind.VLM and s.sequence_parallel,
        "--model vlm has images of any number of patches, which --sequence-parallel cannot divide; "
        "leave it out",
    ),
    (
        lambda s: s.model == ModelKind.VLM and s.tie_embeddings,
        "--model vlm has no text on its first stage to tie the embedding of; leave "
        "--tie-embeddings out",
    ),
    (
        lambda s: s.model == ModelKind.VLM and s.variable_lengths,
        "--model vlm gives every microbatch the length of its own documents anyway; leave "
        "--variable-lengths out",
    ),
    (
        lambda s: s.model == ModelKind.VLM and s.image_size % s.patch_size > 0,
        "--image-size {0.image_size} is not a whole number of patches of {0.patch_size} pixels; "
        "change --image-size or --patch-size",
    ),
    (
        lambda s: (
            s.model != ModelKind.VLM
            and (s.max_images, s.image_size, s.patch_size)
            != (_MAX_IMAGES, _IMAGE_SIZE, _PATCH_SIZE)
        ),
        "--max-images, --image-size and --patch-size are about images and --model {0.model} sees "
        "none; add --model vlm",
    ),
    (
        lambda s: s.model != ModelKind.VLM and s.blank_images,
        "--blank-images hides images and --model {0.model} sees none; add --model vlm",
    ),
    (
        lambda s: s.model != ModelKind.VLM and s.heldout_every is not None,
        "--heldout-every looks at images that are held out and --model {0.model} sees none; add "
        "--model vlm",
    ),
    (
        lambda s: s.model == ModelKind.VLM and s.micro_batch_size > 1,
        "--model vlm packs a microbatch into one sequence; leave --micro-batch-size "
        "{0.micro_batch_size} out",
    ),
    (
        lambda s: s.tie_embeddings and s.chunks > 1 and (s.placement == Placement.V or s.pp == 1),
        "--tie-embeddings with the first and the last stage on one rank would train two copies of "
        "the weight; leave it out or change --placement or --pp",
    ),
)
"""What does not go together, and the sentence that says so of the settings it is formatted with."""

_MOST_OF_A_FLOAT = 10**308
"""No float is much larger than that."""

_TYPE_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise UsageError(sentence)


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _checked(table: Mapping[str, object], path: Path) -> dict[str, object]:
    field_types = {
        name: _without_none(annotation)
        for name, annotation in typing.get_type_hints(TrainSettings).items()
    }
    values: dict[str, object] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in field_types:
            known = ", ".join(_flag(field.name) for field in dataclasses.fields(TrainSettings))
            raise UsageError(f"{path} sets '{key}', which is not a setting ({known}); correct it")
        if name in values:
            raise UsageError(f"{path} sets '{_flag(name)}' twice; keep one")
        values[name] = _converted(value, field_types[name], f"{path} sets {key}")
    return values


def _without_none(annotation: Any) -> type:
    if isinstance(annotation, types.UnionType):
        (annotation,) = (part for part in annotation.__args__ if part is not types.NoneType)
    assert isinstance(annotation, type)
    return annotation


def _converted(value: object, wanted: type, context: str) -> object:
    if wanted is Path and isinstance(value, str):
        return Path(value)
    if wanted is float and type(value) is int:
        return float(value) if abs(value) < _MOST_OF_A_FLOAT else math.inf
    if type(value) is not wanted:
        raise UsageError(f"{context} to {value!r}; it takes {_TYPE_NAMES.get(wanted, 'a path')}")
    return value
