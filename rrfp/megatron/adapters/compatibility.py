"""Checks the installed Megatron-Core against the parts of it that rrfp uses.

Megatron's schedules have no stable interface, so what counts is their code, not their version. The
tables below list what rrfp uses; everything is checked before anything runs.

An entry is a name in a module of `megatron.core`, and how it is used:

- ``name``: it exists;
- ``name: dict``: it is a dict;
- ``name(a, b, *, c)``: it takes `a` and `b` by position and `c` by name, and requires nothing else;
- ``name(a, b, ...)``: it begins with these, and the rest is passed through;
- ``newer | older``: it is one of these, and `rrfp.megatron.adapters` meets both. The older may be
  in another module: ``module:name``.
"""

import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from inspect import Parameter
from typing import Any

from rrfp.errors import UsageError
from rrfp.megatron.provenance import describe_callable, foreign_layer, is_ours
from rrfp.megatron.settings import DispatchSettings
from rrfp.schedule.named_hints import HINTS, hint_named

_WORKS = "megatron-core 0.16.1 to 0.20"
_CORE = "megatron.core"
_NUM_TOLD = 3

Needs = Mapping[str, tuple[str, ...]]
"""Entries by module."""

_GROUPS = (
    "get_pipeline_model_parallel_world_size()",
    "get_virtual_pipeline_model_parallel_world_size()",
    "get_pipeline_model_parallel_group()",
    "get_tensor_model_parallel_group()",
    "get_context_parallel_group()",
    "get_data_parallel_group(*, with_context_parallel, partial_data_parallel)",
    "get_tensor_and_data_parallel_group(*, with_context_parallel)",
    "get_embedding_group(*, check_initialized)",
    "get_position_embedding_group(*, check_initialized)",
    "get_expert_model_parallel_group(*, check_initialized)",
    "get_expert_tensor_parallel_group(*, check_initialized)",
    "get_expert_tensor_and_model_parallel_group(*, check_initialized)",
)
"""The groups of a step in `parallel_state`, and their sizes."""

DROP_IN: Needs = {
    "pipeline_parallel.schedules": (
        "forward_step(forward_step_func, data_iterator, model, num_microbatches, input_tensor, "
        "forward_data_store, config, cp_group_size, *, collect_non_loss_data, is_first_microbatch, "
        "current_microbatch, vp_stage, is_last_stage)",
        "backward_step(input_tensor, output_tensor, output_tensor_grad, config)"
        " | backward_step(input_tensor, output_tensor, output_tensor_grad, model_type, config)",
        "check_first_val_step(first_val_step, forward_only, cond)",
        "deallocate_output_tensor(out, deallocate_pipeline_outputs)",
        "clear_embedding_activation_buffer(config, model, is_last_stage)",
        "finish_embedding_wgrad_compute(config, embedding_module, is_last_stage, tp_group)",
    ),
    "utils": (
        "get_model_config(model)",
        "get_model_type(model)",
        "get_attr_wrapped_model(model, attr)",
        "make_viewless_tensor(inp, *, requires_grad, keep_graph)",
        "prepare_input_tensors_for_wgrad_compute(grad_output, all_gathered_input)",
    ),
    "parallel_state": _GROUPS,
    "process_groups_config": ("ProcessGroupCollection()",),
    "tensor_parallel.random": (
        "get_cuda_rng_tracker()",
        "get_data_parallel_rng_tracker_name()",
        "is_graph_safe_cuda_rng_tracker(cuda_rng_tracker)",
        "CudaRNGStatesTracker.get_states(self)",
        "CudaRNGStatesTracker.set_states(self, states)",
    ),
    "tensor_parallel.layers": (
        "ColumnParallelLinear",
        "RowParallelLinear",
        "custom_fwd",
        "custom_bwd",
        "get_global_memory_buffer()",
        "dist_all_gather_func",
        "dist_reduce_scatter_func",
    ),
    "fusions.fused_softmax": ("FusedScaleMaskSoftmax",),
    "transformer.moe.moe_logging": (
        "get_moe_metrics_tracker()"
        " | transformer.moe.moe_utils:_MOE_LAYER_WISE_LOGGING_TRACKER: dict",
    ),
    "transformer.multi_token_prediction": ("MTPLossLoggingHelper.tracker: dict",),
    "transformer.experimental_attention_variant.dsa": (
        "DSAIndexerLossLoggingHelper.tracker: dict",
    ),
}
"""Names that the drop-in calls, sets and reads."""

_STEP = (
    "(forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, "
    "decoder_seq_length, forward_only, collect_non_loss_data, first_val_step, "
    "adjust_tensor_shapes_fn, p2p_communicator, pg_collection, force_all_reduce)"
)

REPLACED: Needs = {
    "pipeline_parallel.schedules": (
        f"forward_backward_no_pipelining{_STEP}",
        f"forward_backward_pipelining_without_interleaving{_STEP}",
        f"forward_backward_pipelining_with_interleaving{_STEP}",
    ),
}
"""What the drop-in replaces: it must require no other parameters, and must not be patched. The
drop-in refuses a call that sets others."""

_LINEAR = (
    "LinearWithGradAccumulationAndAsyncCommunication.forward(ctx, input, weight, bias, "
    "gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, grad_output_buffer, "
    "wgrad_deferral_limit, tp_group"
)

REPLACED_IF_SPLIT: Needs = {
    "tensor_parallel.layers": (
        f"{_LINEAR}, gtp_remat_size, output_dtype) | {_LINEAR}, gtp_remat_size) | {_LINEAR})",
    ),
}
"""The same, if weight gradients are separate tasks."""

REPLACED_BY_INSTALL: Needs = {
    "pipeline_parallel.schedules": (
        "get_forward_backward_func(pp_size, vp_size, schedule_pg_collection)"
        " | get_forward_backward_func(pp_size, vp_size)",
    ),
}
"""What `install()` replaces."""

TRACED: Needs = {
    "pipeline_parallel.schedules": (
        "forward_step(forward_step_func, data_iterator, model, ...)",
        "backward_step(input_tensor, output_tensor, ...)",
        "forward_backward_no_pipelining",
        "forward_backward_pipelining_without_interleaving",
        "forward_backward_pipelining_with_interleaving",
    ),
    "pipeline_parallel.p2p_communication": ("P2PCommunicator._communicate",),
    "utils": ("get_model_config(model)", "get_attr_wrapped_model(model, attr)"),
    "parallel_state": _GROUPS,
    "process_groups_config": ("ProcessGroupCollection()",),
}
"""What `trace_native()` records, and what it needs from Megatron."""


@cache
def check_for_drop_in(settings: DispatchSettings, *, installs: bool = False) -> None:
    """Raise UsageError for a Megatron-Core that the drop-in does not know, before the drop-in is
    imported. `installs` also checks what `install()` needs. Results are cached, because loops ask
    for a schedule again and again."""
    _check([DROP_IN], [REPLACED, REPLACED_BY_INSTALL] if installs else [REPLACED])
    if settings.policy.hint.splits_backward:
        whole = [name for name in HINTS if not hint_named(name).splits_backward]
        _check([], [REPLACED_IF_SPLIT], f"choose a hint that works ({', '.join(whole)}), or ")


def check_for_trace() -> None:
    """Raise UsageError for a Megatron-Core that `trace_native()` does not know."""
    _check([TRACED], [])


def schedules() -> Any:
    """Megatron's module `schedules`. Raises UsageError if Megatron-Core is not installed."""
    return _imported("pipeline_parallel.schedules")


def _check(called: Iterable[Needs], stood_for: Iterable[Needs], instead: str = "") -> None:
    differences = []
    for is_stood_for, tables in ((False, called), (True, stood_for)):
        for module, entry in _entries(tables):
            difference = _difference(module, entry, is_stood_for=is_stood_for)
            if difference is not None:
                differences.append(difference)
    if differences:
        told = ", ".join(differences[:_NUM_TOLD])
        if len(differences) > _NUM_TOLD:
            told += f" and {len(differences) - _NUM_TOLD} more"
        raise UsageError(f"{_version()} is not one that rrfp knows: {told}; {instead}use {_WORKS}")


def _entries(tables: Iterable[Needs]) -> Iterator[tuple[str, str]]:
    return (
        (module, entry)
        for needs in tables
        for module, entries in needs.items()
        for entry in entries
    )


def forms(module: str, entry: str) -> Iterator[tuple[str, str]]:
    """What an entry of a module's table takes, the newest first: modules and names."""
    for form in entry.split(" | "):
        home, colon, name = form.partition(":")
        elsewhere = colon and not name.startswith(" ")
        yield (home, name) if elsewhere else (module, form)


@dataclass(frozen=True, slots=True)
class _Need:
    """An entry of a table."""

    name: str
    is_dict: bool = False
    is_called: bool = False
    by_place: tuple[str, ...] = ()
    by_name: tuple[str, ...] = ()
    is_open: bool = False
    """Whether all further parameters are passed through."""

    @staticmethod
    def of(entry: str) -> "_Need":
        name, is_called, inside = entry.rstrip(")").partition("(")
        name, _, kind = name.partition(": ")
        parameters = inside.split(", ") if inside else []
        star = parameters.index("*") if "*" in parameters else len(parameters)
        return _Need(
            name,
            kind == "dict",
            bool(is_called),
            tuple(name for name in parameters[:star] if name != "..."),
            tuple(parameters[star + 1 :]),
            "..." in parameters,
        )


def _difference(module: str, entry: str, *, is_stood_for: bool) -> str | None:
    """How the installed name differs from all forms that an entry takes, told of the newest; None
    if it has one of them. Raises UsageError if a third party's patch is the reason."""
    looks = [_Look.at(home, _Need.of(form)) for home, form in forms(module, entry)]
    look = next((look for look in looks if look.differs is None), looks[0])
    foreign = foreign_layer(look.called) if look.called is not None else None
    if foreign is not None and not is_ours(foreign) and (is_stood_for or look.differs):
        why = look.differs or "would not run under rrfp's schedule"
        raise UsageError(
            f"{describe_callable(foreign)} has replaced {_CORE}.{look.path} and {why}; "
            "switch that patch off"
        )
    return None if look.differs is None else f"{look.path} {look.differs}"


@dataclass(frozen=True, slots=True)
class _Look:
    """What the installed Megatron-Core has in place of a need."""

    path: str
    differs: str | None
    called: Any = None
    """What is called, if the need is a call and the name exists."""

    @staticmethod
    def at(module: str, need: _Need) -> "_Look":
        path = f"{module}.{need.name}"
        try:
            found: Any = _imported(module)
            for name in need.name.split("."):
                found = getattr(found, name)
        except _MissingModuleError:
            return _Look(f"the module {module}", "is missing")
        except AttributeError:
            return _Look(path, "is missing")
        if need.is_dict:
            return _Look(path, None if isinstance(found, dict) else "is not a dict")
        if not need.is_called:
            return _Look(path, None)
        return _Look(path, _parameters_differ(found, need), found)


def _parameters_differ(found: Any, need: _Need) -> str | None:
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError:  # built in: its parameters are unknown
        return None
    except TypeError:
        return "cannot be called"
    kinds = {parameter.kind for parameter in parameters}
    by_place = [p.name for p in parameters if p.kind in _BY_PLACE]
    named = [p.name for p in parameters if p.kind in _NAMED]
    passed = (*need.by_place, *need.by_name)
    if Parameter.VAR_POSITIONAL not in kinds and Parameter.VAR_KEYWORD not in kinds:
        lacking = [name for name in passed if name not in named]
        if lacking:
            return f"has no parameter {' or '.join(lacking)}"
    if not need.is_open:
        new = [
            p.name
            for p in parameters
            if p.kind in _NAMED and p.name not in passed and p.default is Parameter.empty
        ]
        if new:
            return f"has a parameter {' and '.join(new)}"
    # Parameters that a wrapper passes on by `*args` may have any names in the wrapped function.
    if any(a != b for a, b in zip(by_place, need.by_place, strict=False)):
        return f"takes its parameters in the order {', '.join(by_place)}"
    return None


_BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (*_BY_PLACE, Parameter.KEYWORD_ONLY)


class _MissingModuleError(Exception):
    """Megatron-Core does not have a module."""


def _imported(module: str) -> Any:
    name = f"{_CORE}.{module}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing in ("megatron", _CORE):
            raise UsageError(f"Megatron-Core is not installed here; install {_WORKS}") from error
        if name == missing or name.startswith(f"{missing}."):
            raise _MissingModuleError from error
        raise UsageError(_unimportable(name, error)) from error
    except (
        Exception
    ) as error:  # a Megatron-Core that does not fit its dependencies may raise anything
        raise UsageError(_unimportable(name, error)) from error


def _unimportable(name: str, error: Exception) -> str:
    return (
        f"{_version()} cannot be imported here: {name} raises {type(error).__name__} ({error}); "
        f"use {_WORKS}, or install what is missing"
    )


def _version() -> str:
    """The installed Megatron-Core, by version and place as far as they are known."""
    version = place = None
    try:
        core = importlib.import_module(_CORE)
        version, place = getattr(core, "__version__", None), next(iter(core.__path__), None)
    except Exception:  # it may be what failed to import
        version = None
    if version is None:
        try:
            version = metadata.version("megatron-core")
        except metadata.PackageNotFoundError:
            version = "of an unknown version"
    return f"Megatron-Core {version}" + ("" if place is None else f" in {place}")
