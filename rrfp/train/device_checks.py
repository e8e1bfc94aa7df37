"""Checks of what a run asks of its device, and of what carries tensors between its ranks."""

from collections.abc import Callable
from functools import cache

from rrfp.errors import UsageError
from rrfp.runtime.device.cuda_presence import Gpu, cuda_presence
from rrfp.runtime.device.cuda_runtime import has_bindings
from rrfp.runtime.planes.names import TransportName
from rrfp.runtime.planes.nixl_package import is_installed
from rrfp.runtime.transport import tls
from rrfp.schedule.policy import Dispatch
from rrfp.train.setting_groups import DeviceKind, RunSettings
from rrfp.train.settings import TrainSettings


def check_gpus(num_ranks: int, run: RunSettings) -> None:
    """Raise UsageError if so many ranks of this process cannot have a GPU each, and are not to
    share. Other processes may start ranks on this host, too, and what those take is compared when
    they meet (`rrfp.train.ranks.hosts.gpus`). The first call takes seconds."""
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
    presence = cuda_presence()
    if presence.problem is not None:
        raise UsageError(presence.problem)
    return presence.gpus


def index_of_gpu(local_rank: int, num_gpus: int) -> int:
    """Which of the GPUs that it sees a rank takes, by its number on the host."""
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
        "--transport cuda-ipc needs the package cuda-bindings, which is not installed; pip install "
        "'rrfp[cuda]', or leave --transport out",
    ),
    (
        lambda s: s.layout.transport == TransportName.NIXL and not is_installed(),
        "--transport nixl needs the package nixl, which is not installed; pip install "
        "'rrfp[nixl]', or leave --transport out",
    ),
    (
        lambda s: s.layout.tls and not tls.is_installed(),
        "--tls needs the package cryptography, which is not installed; pip install 'rrfp[tls]', or "
        "leave --tls out",
    ),
)
"""Combinations that do not work, as in `rrfp.train.checks`."""
