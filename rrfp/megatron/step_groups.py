"""The process groups of a step, and the ranks that they force to run tasks in the same order.

Ranks that share a collective inside a task (tensor, sequence, context, expert parallelism) must run
the same tasks in the same order, or they deadlock in it. Expert parallelism spans data-parallel
replicas, perhaps on some stages only. So whole pipelines are coupled: if two of them share a
collective on one stage, they agree on the order on all stages.
"""

import copy
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from rrfp.errors import UsageError
from rrfp.megatron.adapters.groups import (
    default_groups,
    expert_groups,
    pipeline_group,
    refuse_multi_module,
)
from rrfp.runtime.rendezvous import Rendezvous
from rrfp.strict_json import integers, items


@dataclass(frozen=True, slots=True)
class Place:
    """The pipeline of a rank and the ranks coupled to it. All ranks are global ranks."""

    rank: int
    pipeline: tuple[int, ...]
    """The ranks of its pipeline, by pipeline rank."""
    sharers: tuple[int, ...]
    """The ranks that share a collective inside a task with it, including itself, sorted."""

    @property
    def pp_rank(self) -> int:
        """The pipeline rank: the index of `rank` in `pipeline`."""
        return self.pipeline.index(self.rank)


def step_groups(p2p_communicator: Any, pg_collection: Any) -> Any:
    """Return the step's process groups (`pp`, `tp`, `cp`) from Megatron's two arguments or, without
    both, from its parallel state. A collection without `pp` is copied, and the copy gets the
    communicator's group or else that of the parallel state.

    Raise UsageError for a multi-module collection, if no pipeline group is found, and if only one
    argument is given; with one pipeline rank, the collection alone is enough.
    """
    refuse_multi_module(pg_collection)
    if pg_collection is None and p2p_communicator is None:
        return default_groups()
    pipeline = pipeline_group(pg_collection, p2p_communicator)
    if pipeline is None:
        raise UsageError(
            "the process groups of this step have no pp, and neither its p2p_communicator nor "
            "Megatron's parallel state has it; add it to pg_collection"
        )
    # As in Megatron, a communicator is not needed without pipelining.
    if pg_collection is None or (p2p_communicator is None and pipeline.size() > 1):
        raise UsageError(
            "p2p_communicator and pg_collection come together or not at all; pass both or neither"
        )
    if getattr(pg_collection, "pp", None) is not None:
        return pg_collection
    # The caller's collection must not change.
    groups = copy.copy(pg_collection)
    groups.pp = pipeline
    return groups


def place_in(groups: Any, *, has_experts: bool) -> Place:
    """Return this process's place in these groups. Its sharers are the ranks of its tensor- and
    context-parallel groups and, with `has_experts`, of the experts' groups."""
    rank = dist.get_rank()
    shared = sharing_groups(groups, has_experts=has_experts)
    sharers = {rank}.union(*map(ranks_of, shared))
    return Place(rank, ranks_of(groups.pp), tuple(sorted(sharers)))


def sharing_groups(groups: Any, *, has_experts: bool) -> list[Any]:
    """Return the process groups in which this rank shares collectives inside tasks: the tensor- and
    context-parallel groups and, with `has_experts`, the experts' groups. Missing groups are left
    out."""
    shared = [groups.tp, groups.cp]
    if has_experts:
        shared += expert_groups(groups)
    return [group for group in shared if group is not None]


def device_of(models: Sequence[torch.nn.Module], groups: Any) -> torch.device:
    """The device of the first parameter of this rank's chunks. Without parameters: the current CUDA
    device if the pipeline group uses NCCL, else the CPU."""
    parameters = itertools.chain.from_iterable(model.parameters() for model in models)
    parameter = next(parameters, None)
    if parameter is not None:
        return parameter.device
    if "cuda:nccl" in dist.get_backend_config(groups.pp):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def device_for(group: Any) -> torch.device:
    """A device whose tensors the group's collectives accept: the CPU if the group has a CPU
    backend, else the current CUDA device."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def timeout_s_of(group: Any) -> float:
    """The timeout of a process group's collectives in seconds: the longest among its backends, or
    torch's default if none states one."""
    timeouts = [
        getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        for device in getattr(group, "_device_types", ())
    ]
    found = [timeout for timeout in timeouts if timeout is not None]
    return max(found, default=default_pg_timeout).total_seconds()


def ranks_of(group: Any) -> tuple[int, ...]:
    """The global ranks of a process group."""
    # The caller may have made them with NumPy.
    return tuple(map(int, dist.get_process_group_ranks(group)))


def coupled_pipelines(place: Place, rendezvous: Rendezvous) -> list[tuple[int, ...]]:
    """Return the pipelines that must run tasks in the same order as this rank's pipeline, including
    it, sorted. All of their ranks get the same list.

    Every rank of the run publishes its place and waits for the places of the ranks coupled to it,
    directly or indirectly. This needs no collective. Raise PeerLostError naming a rank that has not
    published its place in time, and UsageError if coupled ranks are on different stages.
    """
    own = [place.pipeline, place.sharers]
    rendezvous.publish(f"place-in-groups/{place.rank}", json.dumps(own))
    places: dict[int, Place] = {}
    new = {place.rank}
    while new:
        rendezvous.awaited = sorted(new)
        for peer in rendezvous.awaited:
            places[peer] = rendezvous.wait_json(
                f"place-in-groups/{peer}", peer, partial(_decode_place, peer)
            )
        coupled = itertools.chain.from_iterable(
            (*places[peer].pipeline, *places[peer].sharers) for peer in new
        )
        new = set(coupled) - places.keys()
    _check_that_stages_match(places)
    return sorted({peer.pipeline for peer in places.values()})


def _decode_place(rank: int, published: object) -> Place:
    """Decode the place that a rank published, as the two lists of its pipeline and its sharers.
    Raise ValueError for another structure, and if a list lacks the rank itself."""
    pipeline, sharers = map(integers, items(published, 2))
    if rank not in pipeline or rank not in sharers:
        raise ValueError(f"the place does not include rank {rank} itself")
    return Place(rank, pipeline, sharers)


def _check_that_stages_match(places: dict[int, Place]) -> None:
    """Raise UsageError if two ranks that share a collective have different pipeline ranks, or
    pipelines of different lengths."""
    for place in places.values():
        for other in map(places.__getitem__, place.sharers):
            here, there = place.pp_rank, other.pp_rank
            if here != there or len(place.pipeline) != len(other.pipeline):
                raise UsageError(
                    f"rank {place.rank}, pipeline rank {here} of {len(place.pipeline)}, shares a "
                    f"collective with rank {other.rank}, pipeline rank {there} of "
                    f"{len(other.pipeline)}; put such ranks on the same stages"
                )
