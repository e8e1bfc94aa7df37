"""Checks that a run's settings can run: each within its range, and all of them together."""

from collections.abc import Iterator
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


def check_gpus(num_ranks: int, run: RunSettings) -> None:
    """Raise UsageError if CUDA cannot be used, or if this process sees fewer GPUs than `num_ranks`,
    its own ranks, without --share-gpu. Ranks of other processes on this host are compared later
    (`rrfp.train.launch.hosts.joining`). The first call takes seconds."""
    num_gpus = len(visible_gpus())
    if num_ranks > num_gpus and not run.share_gpu:
        raise too_few_gpus(num_ranks, num_gpus, "this host")


def too_few_gpus(num_ranks: int, num_gpus: int, where: str) -> UsageError:
    """Make the UsageError that says that the ranks at `where` cannot have a GPU each; the caller
    raises it."""
    return UsageError(
        f"{num_ranks} ranks on {where} take a GPU each and it has {num_gpus}; start fewer, or let "
        "them share with --share-gpu, for trials"
    )


@cache
def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that this process and its ranks see, looked up once per process. Raise
    UsageError if CUDA cannot be used."""
    presence = check_cuda()
    if presence.problem is not None:
        raise UsageError(presence.problem)
    return presence.gpus


def gpu_index(local_rank: int, num_gpus: int) -> int:
    """Return the index of a rank's GPU, from its number on the host. Ranks beyond the last GPU
    start over at GPU 0."""
    return local_rank % num_gpus


_MAX_PORT = 2**16 - 1

_MAX_RANKS_PER_CORE = 16
"""More ranks per core would take minutes to start, if they fit in memory at all."""

_PLAIN_DATA = DataSettings()
_PLAIN_RUN = RunSettings()


def check_settings(settings: TrainSettings) -> None:
    """Raise UsageError for the first setting out of its range, for settings that do not work
    together or need a missing package, and for a host without enough cores, open files, a temporary
    directory or, with --device cuda, GPUs. Does not check that the hint fits the shape or that the
    data exist."""
    for flag, value in settings.by_flag().items():
        DECLARED[flag].check(value)
    for conflicts in (
        _run_conflicts,
        _device_conflicts,
        _step_conflicts,
        _model_conflicts,
        _data_conflicts,
    ):
        for sentence in conflicts(settings):
            raise UsageError(sentence)
    check_hold_is_absolute(settings.policy.hold)
    check_step(settings.policy, settings.step, FLAGS)
    _check_layout(settings.layout, settings.model)
    if settings.layout.stages is not None:
        _check_split(settings)
    _check_hosts(settings.layout.world_size, settings.run)
    check_open_files()
    temporary_directory()
    # Last, because it may take seconds.
    if settings.run.device is DeviceKind.CUDA:
        check_gpus(settings.layout.world_size // settings.run.nnodes, settings.run)


def _check_layout(layout: LayoutSettings, model: ModelSettings) -> None:
    """Raise UsageError unless stages divide the layers (without --layout), heads divide the hidden
    size into even parts, and --tp divides the heads."""
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
    """Raise UsageError unless --layout has an entry per stage, adds up to --layers, and gives every
    stage but the first and the last a layer."""
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
    """Raise UsageError if the hosts do not divide the ranks, this process has more than 16 ranks
    per core that it may use, --node-rank or --rdzv-endpoint is invalid, or several hosts lack
    --rdzv-endpoint or --out."""
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
    """Raise UsageError with the sentence unless `holds`."""
    if not holds:
        raise UsageError(sentence)


# Combinations of settings that do not work: each function yields error sentences.


def _run_conflicts(s: TrainSettings) -> Iterator[str]:
    """Yield an error sentence for each conflict about placement, checkpoints, the disk budget of
    the trace, the network, and what --dispatch megatron does not support."""
    layout, run, step = s.layout, s.run, s.step
    if layout.placement == Placement.V and layout.chunks != 2:
        yield f"--placement v takes 2 chunks per rank, not {layout.chunks}; add --chunks 2"
    for name in ("save_every", "save_async", "keep", "resume"):
        if run.save is None and getattr(run, name) != getattr(_PLAIN_RUN, name):
            yield (
                f"--{name.replace('_', '-')} is about checkpoints and there is no directory for "
                "them; add --save DIR"
            )
    if run.trace_mb is not None and run.trace_mb < LEAST_MB_OF_A_RANK * layout.world_size:
        yield (
            f"--trace-mb {run.trace_mb} is too little for {layout.world_size} ranks; give "
            f"{LEAST_MB_OF_A_RANK} a rank, or record nothing with --no-trace"
        )
    if run.resume and run.force:
        yield "--force replaces the run that --resume goes on with; leave one of them out"
    if run.network == Network.PRIVATE and run.nnodes > 1:
        yield (
            f"--network private has no way to another host and --nnodes is {run.nnodes}; leave it "
            "out"
        )
    if s.policy.dispatch != Dispatch.MEGATRON:
        return
    if layout.placement != Placement.LOOP:
        yield f"--dispatch megatron has no placement {layout.placement}; leave --placement out"
    if layout.chunks > 1 and layout.pp < 3:
        yield (
            "--dispatch megatron interleaves chunks over 3 or more pipeline ranks, not "
            f"{layout.pp} (between 2, gloo mixes up the messages of both directions); change --pp "
            "or --chunks"
        )
    if step.grad_order != GradOrder.CANONICAL:
        yield (
            "--dispatch megatron adds gradients up in its own order, which is the canonical one; "
            "leave --grad-order out"
        )
    if layout.transport != TransportName.AUTO:
        yield (
            "--dispatch megatron sends by Megatron-Core's own transfers; leave --transport "
            f"{layout.transport} out"
        )


def _device_conflicts(s: TrainSettings) -> Iterator[str]:
    """Yield an error sentence for each conflict about devices, data planes, TLS, and packages that
    these need and that are not installed."""
    layout, run = s.layout, s.run
    is_megatron, is_cuda = s.policy.dispatch == Dispatch.MEGATRON, run.device == DeviceKind.CUDA
    if layout.transport == TransportName.CUDA_IPC and run.device == DeviceKind.CPU:
        yield "--transport cuda-ipc carries tensors of GPUs and --device is cpu; choose shm"
    if layout.transport in (TransportName.INLINE, TransportName.SHM) and is_cuda:
        yield (
            f"--transport {layout.transport} carries tensors of the CPU and --device is cuda; "
            "choose cuda-ipc or bounce"
        )
    if run.share_gpu and not is_cuda:
        yield (
            f"--share-gpu lets ranks share a GPU and --device is {run.device}; add --device cuda "
            "or leave it out"
        )
    if run.share_gpu and (layout.tp > 1 or layout.cp > 1 or layout.ep > 1):
        yield (
            "--share-gpu leaves no NCCL, by which ranks of --tp, --cp and --ep exchange inside "
            "their tasks; leave these out (ranks of --pp and --dp can share), or take a GPU a rank"
        )
    if run.share_gpu and is_megatron:
        yield (
            "--share-gpu leaves no NCCL, by which Megatron-Core's own schedule transfers; leave "
            "--dispatch megatron out, or take a GPU a rank"
        )
    if run.pace is not None and is_megatron and is_cuda:
        yield (
            "--pace holds Megatron-Core's own schedule back on the host only, which does not wait "
            "for a GPU; leave --dispatch megatron or --pace out"
        )
    if layout.tls and run.nnodes > 1 and layout.transport == TransportName.NIXL:
        yield (
            "--transport nixl does not encrypt what goes to other hosts and --tls asks for it; "
            "leave one of them out"
        )
    if layout.tls and is_megatron:
        yield (
            "--tls encrypts rrfp's own messages and --dispatch megatron sends by Megatron-Core's "
            "own transfers; leave --tls out"
        )
    if layout.transport == TransportName.CUDA_IPC and not has_bindings():
        yield (
            "--transport cuda-ipc needs the package cuda-bindings, which is not installed; "
            f"{install_hint('cuda')}, or leave --transport out"
        )
    if layout.transport == TransportName.NIXL and not is_installed():
        yield (
            "--transport nixl needs the package nixl, which is not installed; "
            f"{install_hint('nixl')}, or leave --transport out"
        )
    if layout.tls and not tls.is_installed():
        yield (
            "--tls needs the package cryptography, which is not installed; "
            f"{install_hint('tls')}, or leave --tls out"
        )


def _step_conflicts(s: TrainSettings) -> Iterator[str]:
    """Yield an error sentence for each conflict about admission, its costs, and balancing over
    replicas."""
    step = s.step
    if step.admit == Admit.PLAN and step.admit_across != AdmitAcross.NONE:
        yield (
            f"--admit plan plans a replica's own items, and --admit-across {step.admit_across} "
            "assigns it others; choose --admit pyramid or leave --admit-across out"
        )
    if step.admit_across != AdmitAcross.NONE and s.layout.num_replicas == 1:
        yield (
            f"--admit-across {step.admit_across} balances over data-parallel replicas and there "
            "is 1; add --dp 2 or leave it out"
        )
    if step.admit_cost is not None and s.run.pace is not None:
        yield f"--pace {s.run.pace} knows what microbatches cost; leave --admit-cost out"
    if step.admit_cost == CostName.PATCHES and s.model.kind != ModelKind.VLM:
        yield (
            f"--admit-cost patches counts those of images and --model {s.model.kind} has none; "
            "leave it out"
        )


def _model_conflicts(s: TrainSettings) -> Iterator[str]:
    """Yield an error sentence for each conflict between the model and its parallel layout. Every
    --cp above 1 is one."""
    layout, experts, length = s.layout, s.model.num_experts, s.data.seq_length
    if layout.cp > 1:
        yield (
            f"--cp {layout.cp} needs the attention of Transformer Engine, and models here have "
            "Megatron-Core's own; leave --cp out"
        )
    if layout.sequence_parallel and layout.tp == 1:
        yield (
            "--sequence-parallel divides sequences among tensor-parallel ranks and there is 1; add "
            "--tp 2"
        )
    if (layout.sequence_parallel or s.data.variable_lengths) and length % layout.tp > 0:
        yield (
            f"a sequence length of {length} does not divide by {layout.tp} tensor-parallel ranks, "
            "as --sequence-parallel and --variable-lengths need; change --seq-length or --tp"
        )
    if s.model.kind == ModelKind.VLM and (experts is not None or layout.ep > 1):
        yield "--model vlm has dense layers; leave --experts and --ep out"
    if experts is not None and experts < NUM_EXPERTS_PER_TOKEN:
        yield (
            f"--experts is {experts}; every token takes {NUM_EXPERTS_PER_TOKEN}, so there must be "
            "at least as many"
        )
    if experts is not None and layout.tp > 1 and not layout.sequence_parallel:
        yield (
            f"experts with --tp {layout.tp} train with sequence parallelism only; add "
            "--sequence-parallel"
        )
    if layout.ep > 1 and layout.tp > 1 and s.run.device == DeviceKind.CPU:
        yield (
            f"--ep {layout.ep} with --tp {layout.tp} gathers tokens in unequal parts, which gloo "
            "cannot do; leave one of them out"
        )
    if layout.ep > 1 and experts is None:
        yield f"--ep {layout.ep} shares out experts and the layers are dense; add --experts"
    if experts is not None and experts % layout.ep > 0:
        yield (
            f"{experts} experts do not divide by {layout.ep} expert-parallel ranks; change "
            "--experts or --ep"
        )
    if layout.num_replicas * layout.cp % layout.ep > 0:
        yield (
            f"{layout.num_replicas} replicas do not divide by {layout.ep} expert-parallel ranks; "
            "change --dp or --ep"
        )


def _data_conflicts(s: TrainSettings) -> Iterator[str]:
    """Yield an error sentence for each conflict about the data or tied embeddings: an end token
    without a tokenizer, those of --model vlm, image settings that another model does not use, or
    tied embeddings with the first and the last of several stages on one rank."""
    layout, data, kind = s.layout, s.data, s.model.kind
    if data.end_of_document is not None and data.tokenizer is None:
        yield "--end-of-document names a token of a tokenizer; add --tokenizer or leave it out"
    yield from _vlm_conflicts(s) if kind == ModelKind.VLM else ()
    if kind != ModelKind.VLM:
        if (data.max_images, data.image_size, data.patch_size) != (
            _PLAIN_DATA.max_images,
            _PLAIN_DATA.image_size,
            _PLAIN_DATA.patch_size,
        ):
            yield (
                f"--max-images, --image-size and --patch-size are about images and --model {kind} "
                "sees none; add --model vlm"
            )
        if data.blank_images:
            yield f"--blank-images hides images and --model {kind} sees none; add --model vlm"
        if s.run.heldout_every is not None:
            yield (
                f"--heldout-every looks at images that are held out and --model {kind} sees none; "
                "add --model vlm"
            )
    has_first_and_last = layout.placement == Placement.V or layout.pp == 1
    if s.model.tie_embeddings and layout.chunks > 1 and has_first_and_last:
        yield (
            "--tie-embeddings with the first and the last stage on one rank would train two copies "
            "of the weight; leave it out or change --placement or --pp"
        )


def _vlm_conflicts(s: TrainSettings) -> Iterator[str]:
    """Yield an error sentence for each setting that --model vlm does not support."""
    layout, data = s.layout, s.data
    if s.shape.num_stages == 1:
        yield (
            "--model vlm needs a vision stage and a language stage, and there is 1 stage; add --pp "
            "2 or --chunks 2"
        )
    if layout.stages is not None:
        yield "--model vlm has as many layers on every stage; leave --layout out"
    if layout.sequence_parallel:
        yield (
            "--model vlm has images of any number of patches, which --sequence-parallel cannot "
            "divide; leave it out"
        )
    if s.model.tie_embeddings:
        yield (
            "--model vlm has no text on its first stage to tie the embedding of; leave "
            "--tie-embeddings out"
        )
    if data.variable_lengths:
        yield (
            "--model vlm gives every microbatch the length of its own documents anyway; leave "
            "--variable-lengths out"
        )
    if data.tokenizer is not None or data.text_key != _PLAIN_DATA.text_key:
        yield (
            "--model vlm reads captions as bytes, from a field 'text'; leave --tokenizer and "
            "--text-key out"
        )
    if data.image_size % data.patch_size > 0:
        yield (
            f"--image-size {data.image_size} is not a whole number of patches of {data.patch_size} "
            "pixels; change --image-size or --patch-size"
        )
    if data.micro_batch_size > 1:
        yield (
            "--model vlm packs a microbatch into one sequence; leave --micro-batch-size "
            f"{data.micro_batch_size} out"
        )
