"""Which ranks must run in step with this one: a step's process groups and the coupling they imply.

Ranks that share a collective inside a task (tensor, sequence, context, expert parallelism) must run
the same tasks in the same order, or they deadlock inside it. Experts are spread over data-parallel
replicas, perhaps on some stages only, so whole pipelines are coupled: if two of them share a
collective on one stage, they agree on all of their stages.
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
    """The place of this process; all ranks are global ranks."""

    rank: int
    pipeline: tuple[int, ...]
    """The ranks of its pipeline, by pipeline rank."""
    sharers: tuple[int, ...]
    """The ranks with which it shares a collective inside a task, itself included, sorted."""

    @property
    def pp_rank(self) -> int:
        return self.pipeline.index(self.rank)


def step_groups(p2p_communicator: Any, pg_collection: Any) -> Any:
    """The process groups of the step, from the caller or from Megatron's parallel state; they have
    `pp`, `tp` and `cp`."""
    refuse_multi_module(pg_collection)
    if pg_collection is None and p2p_communicator is None:
        return default_groups()
    pipeline = pipeline_group(pg_collection, p2p_communicator)
    if pipeline is None:
        raise UsageError(
            "the process groups of this step have no pp, and neither its p2p_communicator nor "
            "Megatron's parallel state has it; add it to pg_collection"
        )
    # As in Megatron: without pipelining there is no communicator to pass.
    if pg_collection is None or (p2p_communicator is None and pipeline.size() > 1):
        raise UsageError(
            "p2p_communicator and pg_collection come together or not at all; pass both or neither"
        )
    if getattr(pg_collection, "pp", None) is not None:
        return pg_collection
    # The caller's own stays as it is.
    groups = copy.copy(pg_collection)
    groups.pp = pipeline
    return groups


def place_in(groups: Any, *, has_experts: bool) -> Place:
    """This process' place in these groups, including the experts' groups with `has_experts`.

    If the collection does not name the experts' groups, they come from Megatron's parallel state,
    as in Megatron's own modules.
    """
    rank = dist.get_rank()
    shared = sharing_groups(groups, has_experts=has_experts)
    sharers = {rank}.union(*map(ranks_of, shared))
    return Place(rank, ranks_of(groups.pp), tuple(sorted(sharers)))


def sharing_groups(groups: Any, *, has_experts: bool) -> list[Any]:
    """The process groups in which this rank shares collectives inside tasks."""
    shared = [groups.tp, groups.cp]
    if has_experts:
        shared += expert_groups(groups)
    return [group for group in shared if group is not None]


def device_of(models: Sequence[torch.nn.Module], groups: Any) -> torch.device:
    """The device of this rank's tensors: that of its parameters or, if its stages have none, that
    of its process groups."""
    parameters = itertools.chain.from_iterable(model.parameters() for model in models)
    parameter = next(parameters, None)
    if parameter is not None:
        return parameter.device
    if "cuda:nccl" in dist.get_backend_config(groups.pp):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def device_for(group: Any) -> torch.device:
    """Where the tensors of a group's collectives may lie: the CPU if it takes those."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def timeout_s_of(group: Any) -> float:
    """How long the collectives of a process group may take."""
    timeouts = [
        getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        for device in getattr(group, "_device_types", ())
    ]
    found = [timeout for timeout in timeouts if timeout is not None]
    return max(found, default=default_pg_timeout).total_seconds()


def ranks_of(group: Any) -> tuple[int, ...]:
    """The ranks of a process group in the world."""
    # The caller may have computed them with NumPy.
    return tuple(map(int, dist.get_process_group_ranks(group)))


def coupled_pipelines(place: Place, rendezvous: Rendezvous) -> list[tuple[int, ...]]:
    """The pipelines that run the same tasks in the same order as this rank's, its own included; the
    same list on each of their ranks.

    Every rank of the run publishes its place and reads those of the ranks that it is coupled to,
    directly or indirectly. This needs no collective, and a rank without coupling reads only its own
    pipeline's. Raises PeerLostError naming a rank that has not published its place in time, and
    UsageError if coupled ranks are on different stages.
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


def _decode_place(rank: int, told: object) -> Place:
    pipeline, sharers = map(integers, items(told, 2))
    if rank not in pipeline or rank not in sharers:
        raise ValueError(f"the place does not include rank {rank} itself")
    return Place(rank, pipeline, sharers)


def _check_that_stages_match(places: dict[int, Place]) -> None:
    for place in places.values():
        for other in map(places.__getitem__, place.sharers):
            here, there = place.pp_rank, other.pp_rank
            if here != there or len(place.pipeline) != len(other.pipeline):
                raise UsageError(
                    f"rank {place.rank}, pipeline rank {here} of {len(place.pipeline)}, shares a "
                    f"collective with rank {other.rank}, pipeline rank {there} of "
                    f"{len(other.pipeline)}; put such ranks on the same stages"
                )
