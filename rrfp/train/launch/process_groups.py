"""Joins the process groups of a run: torch's world, and Megatron's groups within it."""

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
from rrfp.train.checks import index_of_gpu
from rrfp.train.launch.store import open_store
from rrfp.train.settings import DeviceKind, RunSettings, TrainSettings

# Gloo groups on one device, at one address, whose port is open only while a group is made.
#
# torch gives each group its own gloo device. A device listens at whatever address the host's name
# or GLOO_SOCKET_IFNAME yields, and its thread wakes up a hundred times a second. Megatron makes
# some fifty groups on each rank, so several ranks on a few cores would spend much of their time on
# that.
#
# A device accepts whoever connects, and takes him for the member of a group whose number he sends;
# the numbers count up from 0. So its port lets in nobody except while a group is made: when torch's
# constructor returns, all members are connected. Between hosts it lets in only those of the run.
# All this where the kernel permits such a filter (`rrfp.runtime.net.source_filter`).


_NUM_THREADS = 2
"""The number that torch gives a group."""


@contextmanager
def one_device_at(address: str) -> Iterator[None]:
    """Make gloo groups on one device, which listens only at this address of the host. Raises
    RrfpError if it cannot."""
    # torch declares neither these options nor that the name is assignable.
    module: Any = dist.distributed_c10d
    torchs_own: Any = module.ProcessGroupGloo
    others = _listening()
    try:
        # A lazy device would accept connections later.
        device = torchs_own.create_device(hostname=address, lazy_init=False)
    except RuntimeError as error:
        raise RrfpError(
            f"gloo cannot listen at {address} ({first_line(str(error))}); see whether it is an "
            "address of this host"
        ) from None

    class OnOneDevice(torchs_own):  # type: ignore[misc]
        def __init__(
            self, store: Store, rank: int, size: int, timeout: timedelta, **newer: Any
        ) -> None:
            # Newer releases of torch pass more, such as enable_reconfigure: all are options.
            options = torchs_own._Options()
            for name, value in newer.items():
                setattr(options, name, value)
            options._devices = [device]
            options._threads = _NUM_THREADS
            options._timeout = timeout
            # The others learn of the port in the constructor, so none comes before.
            accept_only(door, run_host_addresses())
            try:
                super().__init__(store, rank, size, options)
            finally:
                accept_nobody(door)

    (descriptor,) = _listening() - others
    with socket.socket(fileno=os.dup(descriptor)) as door:
        accept_nobody(door)
        module.ProcessGroupGloo = OnOneDevice
        try:
            yield
        finally:
            module.ProcessGroupGloo = torchs_own


def _listening() -> set[int]:
    """The descriptors of this process' TCP sockets that listen."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            if not str(link.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as opened:
                is_tcp = opened.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(int(link.name))
    return found


# The device of a rank, taken before it joins any group, and Megatron-Core prepared for it.


_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS"}
"""Read by CUDA's libraries as they start: the same sums in every run. A user's own values stay."""


def take_device(run: RunSettings) -> torch.device:
    """Prepare this process, whose LOCAL_RANK is in the environment, for the device on which its
    tensors are to lie. Must come before any other use of Megatron-Core and of CUDA."""
    if run.device is DeviceKind.CPU:
        prepare_cpu()
        return torch.device("cpu")
    for name, value in _DETERMINISTIC.items():
        os.environ.setdefault(name, value)
    prepare_without_transformer_engine()
    if run.share_gpu:
        reduce_losses_among_several()
        reduce_one_by_one()
    # Where a sum has no fixed order on a GPU, a slower one that has takes its place. Some have
    # none, and of these Megatron takes sums of whole numbers, which need no order.
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic: Any = torch.utils.deterministic  # declares no names
    deterministic.fill_uninitialized_memory = False
    index = index_of_gpu(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count())
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def backend_of(run: RunSettings) -> str:
    """The backend of torch's groups. Few numbers travel from the CPU, so there is gloo for them on
    every device. NCCL takes no two ranks on one GPU; then gloo carries a GPU's tensors, too."""
    has_nccl = run.device is DeviceKind.CUDA and not run.share_gpu
    return "cpu:gloo,cuda:nccl" if has_nccl else "gloo"


_CPU = torch.device("cpu")
_SEED_STRIDE = 100
"""The difference between seeds of neighbouring pipeline ranks, as in Megatron's training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """This process' place in the parallel layout. Ranks are numbered tensor-parallel first, then
    data-parallel, then pipeline (Megatron's default order). Expert-parallel ranks are neighbouring
    replicas."""

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
    """Where its model and data are."""

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.dp

    @property
    def rank(self) -> int:
        return self.first_rank(self.pp_rank) + self.dp_rank * self.tp + self.tp_rank

    def first_rank(self, pp_rank: int) -> int:
        """The smallest global rank of a pipeline rank."""
        return pp_rank * self.dp * self.tp

    @property
    def num_stages(self) -> int:
        return self.pp * self.chunks

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that this process holds, by chunk."""
        return self._shape.stages_of(self.pp_rank)

    @property
    def last_stage_pp_rank(self) -> int:
        """The pipeline rank of the last stage, where the losses are."""
        return self._shape.rank_of(self.num_stages - 1)

    @property
    def _shape(self) -> Shape:
        return Shape(self.pp, 1, self.chunks, self.placement)


@contextmanager
def parallel_groups(
    settings: TrainSettings, timeout_s: float = 900.0, device: torch.device = _CPU
) -> Iterator[Layout]:
    """Join the groups, seed Megatron's random states, and leave the groups at the end.

    RANK and WORLD_SIZE come from the environment; our launcher or torchrun (MASTER_ADDR,
    MASTER_PORT) says where the store is. gloo listens at one address: loopback if there is one
    host. `timeout_s` bounds every collective. `device` is what `take_device` returned.
    """
    with one_device_at(variables.LOOPBACK if settings.run.nnodes == 1 else reachable_address()):
        _join_the_world(backend_of(settings.run), timeout_s)
        with _megatrons_groups(settings, timeout_s, device) as layout:
            yield layout


def _join_the_world(backend: str, timeout_s: float) -> None:
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
def _megatrons_groups(
    settings: TrainSettings, timeout_s: float, device: torch.device
) -> Iterator[Layout]:
    from rrfp.megatron.adapters.parallel_state import create_groups, destroy_groups

    asked = settings.layout
    try:
        if dist.get_world_size() != asked.world_size:
            raise RrfpError(
                f"{dist.get_world_size()} processes were started for {asked.world_size} ranks "
                f"(pp {asked.pp} x tp {asked.tp} x cp {asked.cp} x dp {asked.num_replicas}); start "
                "as many as ranks"
            )
        place = create_groups(
            pp=asked.pp,
            tp=asked.tp,
            cp=asked.cp,
            ep=asked.ep,
            num_chunks=virtual_pipeline_size(settings),
            timeout_s=timeout_s,
        )
        layout = Layout(
            pp=asked.pp,
            tp=asked.tp,
            dp=asked.num_replicas,
            ep=asked.ep,
            chunks=asked.chunks,
            placement=asked.placement,
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
    """Reset torch's and Megatron's random states; joining the groups does this too."""
    from rrfp.megatron.adapters.global_state import seed_states

    seed = settings.run.seed + _SEED_STRIDE * layout.pp_rank
    torch.manual_seed(seed)
    seed_states(seed)


def virtual_pipeline_size(settings: TrainSettings) -> int | None:
    """The number of chunks to tell Megatron: only for a loop over several ranks, because it
    supports neither a V nor chunks on a single rank."""
    is_megatrons = (
        settings.layout.placement == Placement.LOOP
        and settings.layout.pp > 1
        and settings.layout.chunks > 1
    )
    return settings.layout.chunks if is_megatrons else None
