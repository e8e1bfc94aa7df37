"""Where each rank stands in the run, from the groups that its trace tells."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rrfp.errors import RrfpError
from rrfp.interchange.unnamed.calls import Groups, UnnamedRank

_PIPELINE = ("PIPELINE_MODEL_PARALLEL_GROUP", "mesh_pp", "pp")
_TENSOR = ("TENSOR_MODEL_PARALLEL_GROUP", "mesh_tp", "tp")
"""The descriptions of groups: Megatron's, and those of torch's device meshes."""


class Place(NamedTuple):
    pp_rank: int
    tp_rank: int
    dp_rank: int
    num_pp_ranks: int


def groups_of(described: Mapping[str, Sequence[int]]) -> Groups:
    """The groups of a rank, from all its groups by their descriptions."""
    return Groups(_first(described, _PIPELINE), _first(described, _TENSOR))


def _first(described: Mapping[str, Sequence[int]], names: Sequence[str]) -> tuple[int, ...]:
    return next((tuple(described[name]) for name in names if name in described), ())


def places_of(ranks: Sequence[UnnamedRank], world_size: int) -> tuple[dict[int, Place], list[str]]:
    """The place of each rank, and notes on how it was found.

    Where no trace tells a pipeline group, all ranks of the run count as one pipeline.
    Raises RrfpError when the groups leave out their own rank.
    """
    notes = []
    if any(not rank.groups.pipeline for rank in ranks):
        notes.append(
            "the trace does not tell which ranks make up a pipeline: all of them are taken for "
            "one, in the order of their numbers"
        )
    everyone = tuple(range(world_size))
    pipelines = {rank.number: rank.groups.pipeline or everyone for rank in ranks}
    places = {}
    counted: dict[tuple[int, tuple[int, ...]], int] = {}
    for rank in sorted(ranks, key=lambda rank: rank.number):
        pipeline, tensor = pipelines[rank.number], rank.groups.tensor or (rank.number,)
        if rank.number not in pipeline or rank.number not in tensor:
            raise RrfpError(
                f"the trace of rank {rank.number} describes the group "
                f"{list(pipeline if rank.number not in pipeline else tensor)[:8]} as its own, "
                "which leaves it out; import the files of one run"
            )
        tp_rank = tensor.index(rank.number)
        replicas = [key for key in counted if key[0] == tp_rank]
        dp_rank = counted.setdefault((tp_rank, pipeline), len(replicas))
        places[rank.number] = Place(pipeline.index(rank.number), tp_rank, dp_rank, len(pipeline))
    return places, notes
