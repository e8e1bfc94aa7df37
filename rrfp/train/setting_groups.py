"""The settings of a training run, group by group. Everything about a setting is declared here: its
flag's help, its default, its range, and its place in a TOML file.

Imports no torch: the launcher checks the settings before it starts any process.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rrfp.megatron.settings import GradOrder
from rrfp.runtime.planes.names import DEFAULT_OUTBOX_MB, MOST_OUTBOX_MB, TransportName
from rrfp.schedule.admission import Admit
from rrfp.schedule.dealing import AdmitAcross
from rrfp.schedule.hints.hint import Hint, WeightGradients
from rrfp.schedule.hold import Hold
from rrfp.schedule.patience.setting import IMPATIENT, Patience
from rrfp.schedule.policy import PAPER_LIMIT, AgreementRule, Dispatch
from rrfp.schedule.shape import Placement
from rrfp.trace.spills.room import DEFAULT_TRACE_MB, LEAST_MB_OF_A_RANK
from rrfp.train.declared import AT_LEAST_1, Must, setting

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
