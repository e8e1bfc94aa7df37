"""The description of a recorded job in `run.json`: its dispatch, layout, model and script."""

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
from rrfp.trace.run_json import policy_without_dispatcher

Described = dict[str, object]


@dataclass(frozen=True, slots=True)
class DispatchDescription:
    """The scheduler of a job (rrfp's dispatcher or Megatron's own) and its policy."""

    label: str
    """A part of the run directory's name."""
    placement: Placement
    settings: Callable[[Sequence[Any], int], Described]
    """Returns the requested settings, for model chunks and a number of pipeline ranks."""
    policy: Callable[[Described], Described]
    """Returns the effective policy of such settings (see `rrfp.trace.run_json`)."""
    connect_s: float | None
    """Seconds that ranks wait for each other at their first step. None: the timeout of the
    pipeline's process group."""


def describe_dispatch(settings: DispatchSettings) -> DispatchDescription:
    """Return the description of a job whose tasks rrfp dispatches with these settings. Functions
    among the settings (`admit_cost`, `hold_features`) are recorded by name."""
    # A shallow copy: a cost function may refer to anything.
    others = {each.name: getattr(settings, each.name) for each in fields(settings)}
    del others["policy"]
    requested = settings.policy.described() | others
    for name in ("admit_cost", "hold_features"):
        if callable(requested[name]):
            requested[name] = getattr(requested[name], "__qualname__", "a function")
    return DispatchDescription(
        settings.policy.hint.name,
        settings.placement,
        lambda *_: requested,
        lambda requested: settings.policy.of_shape(
            _shape_of(requested, settings.placement)
        ).described(),
        settings.connect_s,
    )


def _shape_of(settings: Mapping[str, Any], placement: Placement) -> Shape:
    """The shape of the first step, from the recorded settings `pp`, `microbatches` and `chunks`."""
    return Shape(settings["pp"], settings["microbatches"], settings["chunks"], placement)


def describe_native_dispatch() -> DispatchDescription:
    """Return the description of a job that runs Megatron's own schedule: hint `1f1b` with one chunk
    per rank, else `interleaved`, or `interleaved by N` for a microbatch group of unusual size N."""

    def settings(chunks: Sequence[Any], num_ranks: int) -> Described:
        hint = "1f1b"
        if len(chunks) > 1:
            group_size = config_of(chunks[0]).microbatch_group_size_per_vp_stage
            is_usual = group_size in (None, num_ranks)
            # With an unknown hint name, a replay takes the order in which the tasks ran.
            hint = "interleaved" if is_usual else f"interleaved by {group_size}"
        return {"hint": hint, "dispatch": str(Dispatch.MEGATRON), "placement": str(Placement.LOOP)}

    return DispatchDescription(
        "native",
        Placement.LOOP,
        settings,
        lambda settings: policy_without_dispatcher(str(settings["hint"]), Dispatch.MEGATRON),
        DispatchSettings().connect_s,
    )


def describe_layout(groups: Any, num_chunks: int, *, has_experts: bool) -> Described:
    """Return the sizes of a step's process groups and the number of chunks, keyed by `rrfp train`'s
    setting names. `dp` includes context parallelism; `ep` is 1 unless `has_experts`."""
    experts = expert_parallel_group(groups) if has_experts else None
    return {
        "pp": groups.pp.size(),
        "tp": groups.tp.size(),
        "cp": groups.cp.size(),
        # Context-parallel ranks run the same tasks, so they count as replicas.
        "dp": replica_group(groups).size(),
        "ep": 1 if experts is None else experts.size(),
        "chunks": num_chunks,
    }


def describe_model(
    chunks: Sequence[Any], device: torch.device, arguments: Mapping[str, Any]
) -> Described:
    """Describe the model and its steps: the class and configuration of the first chunk, the first
    parameter's dtype, the device, and the sizes in the schedule's arguments. Unknown values are
    left out."""
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
"""Settings of a configuration that give stages different numbers of layers."""


def describe_program() -> Described:
    """The running script, its arguments, and the versions of Megatron-Core and torch."""
    script, *arguments = sys.argv or [""]
    return {
        "script": script,
        "arguments": arguments,
        "megatron": version(),
        "torch": torch.__version__,
    }


def num_parameters(chunks: Sequence[Any]) -> list[int]:
    """The number of parameters in each of this rank's chunks."""
    return [sum(each.numel() for each in chunk.parameters()) for chunk in chunks]


def _innermost(model: Any) -> Any:
    """The model inside its data-parallel and mixed-precision wrappers, found along `module`
    attributes."""
    while isinstance(inner := getattr(model, "module", None), torch.nn.Module):
        model = inner
    return model


def parameters_by_stage(
    ranks: Sequence[RankInfo], parameters: Sequence[Sequence[int]]
) -> list[int]:
    """The number of parameters of each stage, in stage order, counted on one rank that holds the
    stage. `parameters` has the numbers by rank and chunk."""
    found = {
        stage: number
        for info, numbers in zip(ranks, parameters, strict=True)
        for stage, number in zip(info.stages, numbers, strict=True)
    }
    return [found[stage] for stage in sorted(found)]
