"""Creates the process groups of a run: torch's world, and Megatron's groups within it."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store

from rrfp.errors import RrfpError, first_line
from rrfp.megatron.cpu.patches import (
    prepare_cpu,
    prepare_without_transformer_engine,
    reduce_losses_among_several,
    reduce_one_by_one,
)
from rrfp.runtime import launchers as variables
from rrfp.runtime.net.source_filter import accept_nobody, accept_only, run_host_addresses
from rrfp.runtime.rendezvous import reachable_address
from rrfp.schedule.shape import Placement, Shape
from rrfp.train.checks import gpu_index
from rrfp.train.launch.store import open_store
from rrfp.train.settings import DeviceKind, RunSettings, TrainSettings

# All gloo groups of a rank share one gloo device. torch gives each group its own, which listens at
# the address of the host's name or of GLOO_SOCKET_IFNAME, with a thread that wakes up 100 times a
# second. Megatron creates some 50 groups per rank, so several ranks on a few cores would spend much
# of their time on that.
#
# A device accepts any connection, and trusts the group number that the peer sends; the numbers
# count up from 0. So a filter closes its port except while a group is created: when torch's
# constructor returns, all members are connected. Between hosts it admits only addresses of the run.
# The filter requires a kernel that permits it (`rrfp.runtime.net.source_filter`).


_NUM_THREADS = 2
"""torch's default for a group."""


@contextmanager
def one_device_at(address: str) -> Iterator[None]:
    """Let all gloo groups created in the block share one device, which listens only at this address
    and, where the kernel permits a filter, refuses connections except while a group is created.
    Raise RrfpError if it cannot listen there."""
    # torch declares neither these options nor that the name is assignable.
    module: Any = dist.distributed_c10d
    original: Any = module.ProcessGroupGloo
    others = _listening_descriptors()
    try:
        # A lazy device would accept connections later.
        device = original.create_device(hostname=address, lazy_init=False)
    except RuntimeError as error:
        raise RrfpError(
            f"gloo cannot listen at {address} ({first_line(str(error))}); see whether it is an "
            "address of this host"
        ) from None

    class OnOneDevice(original):  # type: ignore[misc]
        def __init__(
            self, store: Store, rank: int, size: int, timeout: timedelta, **newer: Any
        ) -> None:
            # Newer releases of torch pass more, such as enable_reconfigure: all are options.
            options = original._Options()
            for name, value in newer.items():
                setattr(options, name, value)
            options._devices = [device]
            options._threads = _NUM_THREADS
            options._timeout = timeout
            # The other members learn the port in the constructor, so none connects before.
            accept_only(listening, run_host_addresses())
            try:
                super().__init__(store, rank, size, options)
            finally:
                accept_nobody(listening)

    (descriptor,) = _listening_descriptors() - others
    with socket.socket(fileno=os.dup(descriptor)) as listening:
        accept_nobody(listening)
        module.ProcessGroupGloo = OnOneDevice
        try:
            yield
        finally:
            module.ProcessGroupGloo = original


def _listening_descriptors() -> set[int]:
    """Return the descriptors of this process' listening TCP sockets."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of this iteration itself
            if not str(link.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as opened:
                is_tcp = opened.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(int(link.name))
    return found


_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS"}
"""Variables that make CUDA's libraries deterministic, unless the user has set them."""


def prepare_device(run: RunSettings) -> torch.device:
    """Choose the device of this rank (by LOCAL_RANK), and patch and configure Megatron-Core, torch
    and CUDA for it; a GPU computes deterministically where torch can. Call this before any other
    use of Megatron-Core and CUDA."""
    if run.device is DeviceKind.CPU:
        prepare_cpu()
        return torch.device("cpu")
    for name, value in _DETERMINISTIC.items():
        os.environ.setdefault(name, value)
    prepare_without_transformer_engine()
    if run.share_gpu:
        reduce_losses_among_several()
        reduce_one_by_one()
    # Replaces sums without a fixed order on a GPU by slower ones. Some have no replacement;
    # Megatron uses these for integers only, whose sums do not depend on the order.
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic: Any = torch.utils.deterministic  # declares no names
    deterministic.fill_uninitialized_memory = False
    index = gpu_index(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count())
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def backend_of(run: RunSettings) -> str:
    """Return the backend of torch's groups. CPU tensors use gloo on every device. GPU tensors use
    NCCL, or gloo if ranks share a GPU, which NCCL refuses."""
    has_nccl = run.device is DeviceKind.CUDA and not run.share_gpu
    return "cpu:gloo,cuda:nccl" if has_nccl else "gloo"


_CPU = torch.device("cpu")
_SEED_STRIDE = 100
"""Difference between the seeds of neighboring pipeline ranks, as in Megatron's training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The parallel layout and this process' place in it. Ranks are numbered tensor-parallel first,
    then data-parallel, then pipeline (Megatron's default order). Expert-parallel ranks are
    neighboring replicas."""

    pp: int
    tp: int
    dp: int
    ep: int
    chunks: int
    placement: Placement
    pp_rank: int
    tp_rank: int
    dp_rank: int
    ep_rank: int
    device: torch.device = _CPU
    """The device of its model and data."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the run."""
        return self.pp * self.tp * self.dp

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self.first_rank(self.pp_rank) + self.dp_rank * self.tp + self.tp_rank

    def first_rank(self, pp_rank: int) -> int:
        """Return the smallest global rank of a pipeline rank."""
        return pp_rank * self.dp * self.tp

    @property
    def num_stages(self) -> int:
        """Number of stages: pipeline ranks times chunks."""
        return self.pp * self.chunks

    @property
    def stages(self) -> tuple[int, ...]:
        """The stage of each chunk of this process."""
        return self._shape.stages_of(self.pp_rank)

    @property
    def last_stage_pp_rank(self) -> int:
        """The pipeline rank of the last stage, which computes the losses."""
        return self._shape.rank_of(self.num_stages - 1)

    @property
    def _shape(self) -> Shape:
        """The shape of the pipeline, with one microbatch, to look up stages and ranks."""
        return Shape(self.pp, 1, self.chunks, self.placement)


@contextmanager
def parallel_groups(
    settings: TrainSettings, timeout_s: float = 900.0, device: torch.device = _CPU
) -> Iterator[Layout]:
    """Create torch's and Megatron's groups, seed the random states, yield this rank's layout, and
    destroy the groups at the end. Raise RrfpError if too many or too few ranks were started, gloo
    cannot listen, or the store cannot be reached.

    RANK and WORLD_SIZE come from the environment, and the address of the store from rrfp's launcher
    or torchrun (MASTER_ADDR, MASTER_PORT). gloo listens at one address: loopback on a single host.
    `timeout_s` bounds every collective. `device` is the result of `prepare_device`.
    """
    with one_device_at(variables.LOOPBACK if settings.run.nnodes == 1 else reachable_address()):
        _init_world(backend_of(settings.run), timeout_s)
        with _megatron_groups(settings, timeout_s, device) as layout:
            yield layout


def _init_world(backend: str, timeout_s: float) -> None:
    """Initialize torch's process group: with the store that rrfp's launcher has named, or else by
    torchrun's variables."""
    timeout, store = timedelta(seconds=timeout_s), open_store(timeout_s)
    if store is None:
        dist.init_process_group(backend, timeout=timeout)
        return
    dist.init_process_group(
        backend,
        timeout=timeout,
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


@contextmanager
def _megatron_groups(
    settings: TrainSettings, timeout_s: float, device: torch.device
) -> Iterator[Layout]:
    """Create Megatron's groups and seed the random states; destroy these groups and torch's world
    after the block. Raise RrfpError if the number of processes is not that of the ranks."""
    from rrfp.megatron.adapters.parallel_state import create_groups, destroy_groups

    parallel = settings.layout
    try:
        if dist.get_world_size() != parallel.world_size:
            raise RrfpError(
                f"{dist.get_world_size()} processes were started for {parallel.world_size} ranks "
                f"(pp {parallel.pp} x tp {parallel.tp} x cp {parallel.cp} x dp "
                f"{parallel.num_replicas}); start as many as ranks"
            )
        place = create_groups(
            pp=parallel.pp,
            tp=parallel.tp,
            cp=parallel.cp,
            ep=parallel.ep,
            num_chunks=virtual_pipeline_size(settings),
            timeout_s=timeout_s,
        )
        layout = Layout(
            pp=parallel.pp,
            tp=parallel.tp,
            dp=parallel.num_replicas,
            ep=parallel.ep,
            chunks=parallel.chunks,
            placement=parallel.placement,
            pp_rank=place.pp_rank,
            tp_rank=place.tp_rank,
            dp_rank=place.dp_rank,
            ep_rank=place.ep_rank,
            device=device,
        )
        assert layout.rank == dist.get_rank()
        seed_random_states(settings, layout)
        yield layout
    finally:
        destroy_groups()
        dist.destroy_process_group()


def seed_random_states(settings: TrainSettings, layout: Layout) -> None:
    """Set torch's and Megatron's random states from the run's seed and this pipeline rank;
    `parallel_groups` does too."""
    from rrfp.megatron.adapters.global_state import seed_states

    seed = settings.run.seed + _SEED_STRIDE * layout.pp_rank
    torch.manual_seed(seed)
    seed_states(seed)


def virtual_pipeline_size(settings: TrainSettings) -> int | None:
    """Return the number of chunks for Megatron's configuration. None unless chunks loop over
    several ranks: Megatron supports neither a V nor chunks on a single rank."""
    is_interleaved = (
        settings.layout.placement == Placement.LOOP
        and settings.layout.pp > 1
        and settings.layout.chunks > 1
    )
    return settings.layout.chunks if is_interleaved else None
