"""What a recorded job says of itself in `run.json`: what steers it, its layout, its model."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from rrfp.megatron.adapters.groups import expert_parallel_group, replica_group
from rrfp.megatron.adapters.models import config_of, version
from rrfp.megatron.settings import DispatchSettings
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.shape import Placement, Shape
from rrfp.schedule.tasks import plain_integer
from rrfp.trace.records import RankInfo
from rrfp.trace.run_policy import unbound_policy

Described = dict[str, object]


@dataclass(frozen=True, slots=True)
class DispatchDescription:
    """Who dispatches the tasks of a job, and by which policy."""

    label: str
    """For the name of the run's directory."""
    placement: Placement
    settings: Callable[[Sequence[Any], int], Described]
    """What was asked for, by flag, of these model chunks and this number of pipeline ranks."""
    policy: Callable[[Described], Described]
    """The effective policy of these settings, as `rrfp.trace.run_policy` defines it."""
    connect_s: float | None
    """How long the ranks may take to meet at their first step; None: as long as the pipeline's
    process group waits."""


def describe_dispatch(settings: DispatchSettings) -> DispatchDescription:
    """A job whose tasks we dispatch."""
    # Not a copy in depth: a cost function may hold on to anything.
    others = {each.name: getattr(settings, each.name) for each in fields(settings)}
    del others["policy"]
    asked = settings.policy.described() | others
    for name in ("admit_cost", "hold_features"):
        if callable(asked[name]):
            asked[name] = getattr(asked[name], "__qualname__", "a function")
    return DispatchDescription(
        settings.policy.hint.name,
        settings.placement,
        lambda *_: asked,
        lambda asked: settings.policy.of_shape(_shape_of(asked, settings.placement)).described(),
        settings.connect_s,
    )


def _shape_of(settings: Mapping[str, Any], placement: Placement) -> Shape:
    """The shape of the first step, of these settings as they are recorded."""
    return Shape(settings["pp"], settings["microbatches"], settings["chunks"], placement)


def describe_native_dispatch() -> DispatchDescription:
    """A job that Megatron's own schedule runs."""

    def settings(chunks: Sequence[Any], num_ranks: int) -> Described:
        hint = "1f1b"
        if len(chunks) > 1:
            in_turn = config_of(chunks[0]).microbatch_group_size_per_vp_stage
            is_usual = in_turn in (None, num_ranks)
            # With an unknown hint name, a replay takes the order in which the tasks ran.
            hint = "interleaved" if is_usual else f"interleaved by {in_turn}"
        return {"hint": hint, "dispatch": str(Dispatch.MEGATRON), "placement": str(Placement.LOOP)}

    return DispatchDescription(
        "native",
        Placement.LOOP,
        settings,
        lambda settings: unbound_policy(str(settings["hint"]), Dispatch.MEGATRON),
        DispatchSettings().connect_s,
    )


def layout_of(groups: Any, num_chunks: int, *, has_experts: bool) -> Described:
    """The sizes of a step's process groups, under the names of `rrfp train`'s settings."""
    experts = expert_parallel_group(groups) if has_experts else None
    return {
        "pp": groups.pp.size(),
        "tp": groups.tp.size(),
        "cp": groups.cp.size(),
        # Ranks that share a sequence run the same tasks, like replicas.
        "dp": replica_group(groups).size(),
        "ep": 1 if experts is None else experts.size(),
        "chunks": num_chunks,
    }


def model_of(
    chunks: Sequence[Any], device: torch.device, arguments: Mapping[str, Any]
) -> Described:
    """The model and its step; what its configuration does not know is left out."""
    config = config_of(chunks[0])
    parameter = next((each for chunk in chunks for each in chunk.parameters()), None)
    known = {
        "model": type(_innermost(chunks[0])).__name__,
        "layers": getattr(config, "num_layers", None),
        "uneven_stages": any(getattr(config, name, None) for name in _UNEVEN) or None,
        "hidden": getattr(config, "hidden_size", None),
        "heads": getattr(config, "num_attention_heads", None),
        "experts": getattr(config, "num_moe_experts", None),
        "dtype": None if parameter is None else str(parameter.dtype).removeprefix("torch."),
        "device": device.type,
        "microbatches": arguments["num_microbatches"],
        "micro_batch_size": arguments.get("micro_batch_size"),
        "seq_length": arguments.get("seq_length"),
    }
    return {name: plain_integer(value) for name, value in known.items() if value is not None}


_UNEVEN = (
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""What in a configuration makes stages differ in layers."""


def program() -> Described:
    """The script that runs, and on what."""
    script, *arguments = sys.argv or [""]
    return {
        "script": script,
        "arguments": arguments,
        "megatron": version(),
        "torch": torch.__version__,
    }


def num_parameters(chunks: Sequence[Any]) -> list[int]:
    """How many parameters this rank has in each of its chunks."""
    return [sum(each.numel() for each in chunk.parameters()) for chunk in chunks]


def _innermost(model: Any) -> Any:
    """The model inside of the wrappers that data parallelism and mixed precision put around it."""
    while isinstance(inner := getattr(model, "module", None), torch.nn.Module):
        model = inner
    return model


def by_stage(ranks: Sequence[RankInfo], parameters: Sequence[Sequence[int]]) -> list[int]:
    """How many parameters each stage has, on a rank that holds it."""
    found = {
        stage: number
        for info, numbers in zip(ranks, parameters, strict=True)
        for stage, number in zip(info.stages, numbers, strict=True)
    }
    return [found[stage] for stage in sorted(found)]
