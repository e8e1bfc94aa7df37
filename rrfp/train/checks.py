"""Checks that a run's settings can run: each within its range, and all of them together."""

from collections.abc import Callable
from functools import cache

from rrfp.errors import UsageError
from rrfp.megatron.settings import FLAGS, GradOrder, check_step
from rrfp.planning.item_costs import CostName
from rrfp.requirements import install_hint
from rrfp.runtime.device.cuda_runtime import Gpu, check_cuda, has_bindings
from rrfp.runtime.net import tls
from rrfp.runtime.planes.registry import TransportName, is_installed
from rrfp.schedule.admission import Admit, AdmitAcross
from rrfp.schedule.policy import Dispatch, check_hold_is_absolute
from rrfp.schedule.shape import Placement
from rrfp.system import check_open_files, num_cores, temporary_directory
from rrfp.trace.spill import LEAST_MB_OF_A_RANK
from rrfp.train.settings import (
    DECLARED,
    NUM_EXPERTS_PER_TOKEN,
    DataSettings,
    DeviceKind,
    LayoutSettings,
    ModelKind,
    ModelSettings,
    Network,
    RunSettings,
    TrainSettings,
)

# Checks of what a run asks of its device, and of what carries tensors between its ranks.


def check_gpus(num_ranks: int, run: RunSettings) -> None:
    """Raise UsageError if so many ranks of this process cannot have a GPU each, and are not to
    share. Other processes may start ranks on this host, too, and what those take is compared when
    they meet (`rrfp.train.launch.hosts.joining`). The first call takes seconds."""
    num_gpus = len(gpus_here())
    if num_ranks > num_gpus and not run.share_gpu:
        raise too_few_gpus(num_ranks, num_gpus, "this host")


def too_few_gpus(num_ranks: int, num_gpus: int, where: str) -> UsageError:
    """The refusal of ranks that cannot have a GPU each."""
    return UsageError(
        f"{num_ranks} ranks on {where} take a GPU each and it has {num_gpus}; start fewer, or let "
        "them share with --share-gpu, for trials"
    )


@cache
def gpus_here() -> tuple[Gpu, ...]:
    """The GPUs that this process and its ranks see. Raises UsageError where CUDA cannot be used."""
    presence = check_cuda()
    if presence.problem is not None:
        raise UsageError(presence.problem)
    return presence.gpus


def index_of_gpu(local_rank: int, num_gpus: int) -> int:
    """The index of the GPU that a rank takes, by its number on the host."""
    return local_rank % num_gpus


DEVICES_TOGETHER: tuple[tuple[Callable[[TrainSettings], bool], str], ...] = (
    (
        lambda s: s.layout.transport == TransportName.CUDA_IPC and s.run.device == DeviceKind.CPU,
        "--transport cuda-ipc carries tensors of GPUs and --device is cpu; choose shm",
    ),
    (
        lambda s: (
            s.layout.transport in (TransportName.INLINE, TransportName.SHM)
            and s.run.device == DeviceKind.CUDA
        ),
        "--transport {0.layout.transport} carries tensors of the CPU and --device is cuda; choose "
        "cuda-ipc or bounce",
    ),
    (
        lambda s: s.run.share_gpu and s.run.device != DeviceKind.CUDA,
        "--share-gpu lets ranks share a GPU and --device is {0.run.device}; add --device cuda or "
        "leave it out",
    ),
    (
        lambda s: s.run.share_gpu and (s.layout.tp > 1 or s.layout.cp > 1 or s.layout.ep > 1),
        "--share-gpu leaves no NCCL, by which ranks of --tp, --cp and --ep exchange inside their "
        "tasks; leave these out (ranks of --pp and --dp can share), or take a GPU a rank",
    ),
    (
        lambda s: s.run.share_gpu and s.policy.dispatch == Dispatch.MEGATRON,
        "--share-gpu leaves no NCCL, by which Megatron-Core's own schedule transfers; leave "
        "--dispatch megatron out, or take a GPU a rank",
    ),
    (
        lambda s: (
            s.run.pace is not None
            and s.policy.dispatch == Dispatch.MEGATRON
            and s.run.device == DeviceKind.CUDA
        ),
        "--pace holds Megatron-Core's own schedule back on the host only, which does not wait for "
        "a GPU; leave --dispatch megatron or --pace out",
    ),
    (
        lambda s: s.layout.tls and s.run.nnodes > 1 and s.layout.transport == TransportName.NIXL,
        "--transport nixl does not encrypt what goes to other hosts and --tls asks for it; leave "
        "one of them out",
    ),
    (
        lambda s: s.layout.tls and s.policy.dispatch == Dispatch.MEGATRON,
        "--tls encrypts rrfp's own messages and --dispatch megatron sends by Megatron-Core's own "
        "transfers; leave --tls out",
    ),
    (
        lambda s: s.layout.transport == TransportName.CUDA_IPC and not has_bindings(),
        "--transport cuda-ipc needs the package cuda-bindings, which is not installed; "
        f"{install_hint('cuda')}, or leave --transport out",
    ),
    (
        lambda s: s.layout.transport == TransportName.NIXL and not is_installed(),
        "--transport nixl needs the package nixl, which is not installed; "
        f"{install_hint('nixl')}, or leave --transport out",
    ),
    (
        lambda s: s.layout.tls and not tls.is_installed(),
        "--tls needs the package cryptography, which is not installed; "
        f"{install_hint('tls')}, or leave --tls out",
    ),
)
"""Combinations that do not work, as in `rrfp.train.checks`."""


_MAX_PORT = 2**16 - 1

_MAX_RANKS_PER_CORE = 16
"""More ranks per core would take many minutes to start, if they fit in memory at all."""

_PLAIN_DATA = DataSettings()
_PLAIN_RUN = RunSettings()


def check_settings(settings: TrainSettings) -> None:
    """Raise UsageError if these settings cannot run. Whether the hint fits the shape, and the
    data are there, is checked elsewhere."""
    for flag, value in settings.by_flag().items():
        DECLARED[flag].check(value)
    for is_so, sentence in _TOGETHER:
        _require(not is_so(settings), sentence.format(settings))
    check_hold_is_absolute(settings.policy.hold)
    check_step(settings.policy, settings.step, FLAGS)
    _check_layout(settings.layout, settings.model)
    if settings.layout.stages is not None:
        _check_split(settings)
    _check_hosts(settings.layout.world_size, settings.run)
    check_open_files()
    temporary_directory()
    # Last: it may take seconds.
    if settings.run.device is DeviceKind.CUDA:
        check_gpus(settings.layout.world_size // settings.run.nnodes, settings.run)


def _check_layout(layout: LayoutSettings, model: ModelSettings) -> None:
    _require(
        layout.stages is not None or model.layers % (layout.pp * layout.chunks) == 0,
        f"{model.layers} layers do not divide by {layout.pp} pipeline ranks"
        + ("" if layout.chunks == 1 else f" of {layout.chunks} chunks")
        + "; change --layers, --pp or --chunks, or divide them with --layout",
    )
    _require(
        model.hidden % model.heads == 0,
        f"a hidden size of {model.hidden} does not divide by {model.heads} heads; "
        "change --hidden or --heads",
    )
    _require(
        model.hidden // model.heads % 2 == 0,
        f"a head of {model.hidden // model.heads} numbers cannot be rotated in pairs; "
        "make --hidden an even multiple of --heads",
    )
    _require(
        model.heads % layout.tp == 0,
        f"{model.heads} heads do not divide by {layout.tp} tensor-parallel ranks; "
        "change --heads or --tp",
    )


def _check_split(settings: TrainSettings) -> None:
    layout, num_layers, split = settings.layout, settings.model.layers, settings.split
    num_stages = layout.pp * layout.chunks
    _require(
        len(split) == num_stages,
        f"--layout {layout.stages} is of {len(split)} stages, and {layout.pp} pipeline ranks of "
        f"{layout.chunks} chunks have {num_stages}; change one of them",
    )
    _require(
        sum(split) == num_layers,
        f"--layout {layout.stages} has {sum(split)} layers in all and --layers is {num_layers}; "
        "make them the same",
    )
    _require(
        min(split[1:-1], default=1) > 0,
        f"--layout {layout.stages} leaves a stage in the middle without layers; give it one or "
        "more",
    )


def _check_hosts(world_size: int, run: RunSettings) -> None:
    _require(
        world_size % run.nnodes == 0,
        f"{world_size} ranks do not divide over {run.nnodes} hosts; change --nnodes",
    )
    num_ranks, most = world_size // run.nnodes, _MAX_RANKS_PER_CORE * num_cores()
    _require(
        num_ranks <= most,
        f"{num_ranks} ranks are more than {_MAX_RANKS_PER_CORE} a core, of which this process may "
        f"use {num_cores()}; change --pp, --tp or --dp so that there are at most {most}",
    )
    _require(
        0 <= run.node_rank < run.nnodes,
        f"--node-rank is {run.node_rank}; with --nnodes {run.nnodes} it must be in "
        f"0..{run.nnodes - 1}",
    )
    if run.rdzv_endpoint is not None:
        host, _, port = run.rdzv_endpoint.rpartition(":")
        _require(
            bool(host) and port.isdecimal() and 0 < int(port) <= _MAX_PORT,
            f"--rdzv-endpoint is '{run.rdzv_endpoint}'; it must be HOST:PORT with a port from 1 to "
            f"{_MAX_PORT}, such as node0:29400",
        )
    if run.nnodes > 1:
        _require(
            run.rdzv_endpoint is not None,
            "several hosts need --rdzv-endpoint HOST:PORT, an address of host 0",
        )
        _require(
            run.out is not None,
            "several hosts need --out DIR, of this run alone; they may share it or have one each",
        )


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise UsageError(sentence)


_TOGETHER: tuple[tuple[Callable[[TrainSettings], bool], str], ...] = (
    (
        lambda s: s.layout.placement == Placement.V and s.layout.chunks != 2,
        "--placement v takes 2 chunks per rank, not {0.layout.chunks}; add --chunks 2",
    ),
    # Checkpoints.
    *(
        (
            lambda s, name=name: (
                s.run.save is None and getattr(s.run, name) != getattr(_PLAIN_RUN, name)
            ),
            f"--{name.replace('_', '-')} is about checkpoints and there is no directory for them; "
            "add --save DIR",
        )
        for name in ("save_every", "save_async", "keep", "resume")
    ),
    (
        lambda s: (
            s.run.trace_mb is not None and s.run.trace_mb < LEAST_MB_OF_A_RANK * s.layout.world_size
        ),
        f"--trace-mb {{0.run.trace_mb}} is too little for {{0.layout.world_size}} ranks; give "
        f"{LEAST_MB_OF_A_RANK} a rank, or record nothing with --no-trace",
    ),
    (
        lambda s: s.run.resume and s.run.force,
        "--force replaces the run that --resume goes on with; leave one of them out",
    ),
    (
        lambda s: s.run.network == Network.PRIVATE and s.run.nnodes > 1,
        "--network private has no way to another host and --nnodes is {0.run.nnodes}; leave it out",
    ),
    # What Megatron-Core's own schedules run.
    (
        lambda s: s.policy.dispatch == Dispatch.MEGATRON and s.layout.placement != Placement.LOOP,
        "--dispatch megatron has no placement {0.layout.placement}; leave --placement out",
    ),
    (
        lambda s: (
            s.policy.dispatch == Dispatch.MEGATRON and s.layout.chunks > 1 and s.layout.pp < 3
        ),
        "--dispatch megatron interleaves chunks over 3 or more pipeline ranks, not {0.layout.pp} "
        "(between 2, gloo mixes up the messages of both directions); change --pp or --chunks",
    ),
    (
        lambda s: (
            s.policy.dispatch == Dispatch.MEGATRON and s.step.grad_order != GradOrder.CANONICAL
        ),
        "--dispatch megatron adds gradients up in its own order, which is the canonical one; "
        "leave --grad-order out",
    ),
    (
        lambda s: (
            s.policy.dispatch == Dispatch.MEGATRON and s.layout.transport != TransportName.AUTO
        ),
        "--dispatch megatron sends by Megatron-Core's own transfers; leave --transport "
        "{0.layout.transport} out",
    ),
    *DEVICES_TOGETHER,
    (
        lambda s: s.step.admit == Admit.PLAN and s.step.admit_across != AdmitAcross.NONE,
        "--admit plan plans a replica's own items, and --admit-across {0.step.admit_across} "
        "deals it others; choose --admit pyramid or leave --admit-across out",
    ),
    # The replicas and the weights of microbatches.
    (
        lambda s: s.step.admit_across != AdmitAcross.NONE and s.layout.num_replicas == 1,
        "--admit-across {0.step.admit_across} deals to data-parallel replicas and there is 1; "
        "add --dp 2 or leave it out",
    ),
    (
        lambda s: s.step.admit_cost is not None and s.run.pace is not None,
        "--pace {0.run.pace} knows what microbatches cost; leave --admit-cost out",
    ),
    (
        lambda s: s.step.admit_cost == CostName.PATCHES and s.model.kind != ModelKind.VLM,
        "--admit-cost patches counts those of images and --model {0.model.kind} has none; leave "
        "it out",
    ),
    # What the model and its groups need.
    (
        lambda s: s.layout.cp > 1,
        "--cp {0.layout.cp} needs the attention of Transformer Engine, and models here have "
        "Megatron-Core's own; leave --cp out",
    ),
    (
        lambda s: s.layout.sequence_parallel and s.layout.tp == 1,
        "--sequence-parallel divides sequences among tensor-parallel ranks and there is 1; add "
        "--tp 2",
    ),
    (
        lambda s: (
            (s.layout.sequence_parallel or s.data.variable_lengths)
            and s.data.seq_length % s.layout.tp > 0
        ),
        "a sequence length of {0.data.seq_length} does not divide by {0.layout.tp} tensor-"
        "parallel ranks, as --sequence-parallel and --variable-lengths need; change --seq-length "
        "or --tp",
    ),
    (
        lambda s: (
            s.model.kind == ModelKind.VLM and (s.model.num_experts is not None or s.layout.ep > 1)
        ),
        "--model vlm has dense layers; leave --experts and --ep out",
    ),
    (
        lambda s: s.model.num_experts is not None and s.model.num_experts < NUM_EXPERTS_PER_TOKEN,
        "--experts is {0.model.num_experts}; every token takes "
        f"{NUM_EXPERTS_PER_TOKEN}, so there must be at least as many",
    ),
    (
        lambda s: (
            s.model.num_experts is not None and s.layout.tp > 1 and not s.layout.sequence_parallel
        ),
        "experts with --tp {0.layout.tp} train with sequence parallelism only; add --sequence-"
        "parallel",
    ),
    (
        lambda s: s.layout.ep > 1 and s.layout.tp > 1 and s.run.device == DeviceKind.CPU,
        "--ep {0.layout.ep} with --tp {0.layout.tp} gathers tokens in unequal parts, which gloo "
        "cannot do; leave one of them out",
    ),
    (
        lambda s: s.layout.ep > 1 and s.model.num_experts is None,
        "--ep {0.layout.ep} shares out experts and the layers are dense; add --experts",
    ),
    (
        lambda s: s.model.num_experts is not None and s.model.num_experts % s.layout.ep > 0,
        "{0.model.num_experts} experts do not divide by {0.layout.ep} expert-parallel ranks; "
        "change --experts or --ep",
    ),
    (
        lambda s: s.layout.num_replicas * s.layout.cp % s.layout.ep > 0,
        "{0.layout.num_replicas} replicas do not divide by {0.layout.ep} expert-parallel ranks; "
        "change --dp or --ep",
    ),
    (
        lambda s: s.model.kind == ModelKind.VLM and s.shape.num_stages == 1,
        "--model vlm needs a vision stage and a language stage, and there is 1 stage; add --pp 2 "
        "or --chunks 2",
    ),
    (
        lambda s: s.model.kind == ModelKind.VLM and s.layout.stages is not None,
        "--model vlm has as many layers on every stage; leave --layout out",
    ),
    (
        lambda s: s.model.kind == ModelKind.VLM and s.layout.sequence_parallel,
        "--model vlm has images of any number of patches, which --sequence-parallel cannot "
        "divide; leave it out",
    ),
    (
        lambda s: s.model.kind == ModelKind.VLM and s.model.tie_embeddings,
        "--model vlm has no text on its first stage to tie the embedding of; leave --tie-"
        "embeddings out",
    ),
    (
        lambda s: s.model.kind == ModelKind.VLM and s.data.variable_lengths,
        "--model vlm gives every microbatch the length of its own documents anyway; leave "
        "--variable-lengths out",
    ),
    (
        lambda s: (
            s.model.kind == ModelKind.VLM
            and (s.data.tokenizer is not None or s.data.text_key != _PLAIN_DATA.text_key)
        ),
        "--model vlm reads captions as bytes, from a field 'text'; leave --tokenizer and "
        "--text-key out",
    ),
    (
        lambda s: s.data.end_of_document is not None and s.data.tokenizer is None,
        "--end-of-document names a token of a tokenizer; add --tokenizer or leave it out",
    ),
    (
        lambda s: s.model.kind == ModelKind.VLM and s.data.image_size % s.data.patch_size > 0,
        "--image-size {0.data.image_size} is not a whole number of patches of {0.data.patch_size}"
        " pixels; change --image-size or --patch-size",
    ),
    (
        lambda s: (
            s.model.kind != ModelKind.VLM
            and (s.data.max_images, s.data.image_size, s.data.patch_size)
            != (_PLAIN_DATA.max_images, _PLAIN_DATA.image_size, _PLAIN_DATA.patch_size)
        ),
        "--max-images, --image-size and --patch-size are about images and --model {0.model.kind} "
        "sees none; add --model vlm",
    ),
    (
        lambda s: s.model.kind != ModelKind.VLM and s.data.blank_images,
        "--blank-images hides images and --model {0.model.kind} sees none; add --model vlm",
    ),
    (
        lambda s: s.model.kind != ModelKind.VLM and s.run.heldout_every is not None,
        "--heldout-every looks at images that are held out and --model {0.model.kind} sees none; "
        "add --model vlm",
    ),
    (
        lambda s: s.model.kind == ModelKind.VLM and s.data.micro_batch_size > 1,
        "--model vlm packs a microbatch into one sequence; leave --micro-batch-size "
        "{0.data.micro_batch_size} out",
    ),
    (
        lambda s: (
            s.model.tie_embeddings
            and s.layout.chunks > 1
            and (s.layout.placement == Placement.V or s.layout.pp == 1)
        ),
        "--tie-embeddings with the first and the last stage on one rank would train two copies of"
        " the weight; leave it out or change --placement or --pp",
    ),
)
"""Combinations that do not work, each with its error sentence, formatted with the settings."""
