"""Checks the installed Megatron-Core against the parts of it that rrfp uses.

Megatron's schedules have no stable interface, so the check compares code and not versions. The
tables below list the names that rrfp uses. All of them are checked before anything runs.

An entry is a name in a module of `megatron.core` and its required form:

- ``name``: the name exists;
- ``name: dict``: it is a dict;
- ``name(a, b, *, c)``: it takes `a` and `b` by position and `c` by name, and requires nothing else;
- ``name(a, b, ...)``: its first parameters are these, and rrfp passes the rest through;
- ``newer | older``: either form, and `rrfp.megatron.adapters` supports both. The older name may be
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
_MAX_LISTED = 3

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
"""Getters of process groups and their sizes in `parallel_state`."""

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
"""Names that the drop-in calls, sets or reads."""

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
"""Functions that the drop-in replaces. They must require no other parameters and must not be
patched. The drop-in refuses calls that set other parameters."""

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
"""Further functions that are replaced if weight gradients are separate tasks."""

REPLACED_BY_INSTALL: Needs = {
    "pipeline_parallel.schedules": (
        "get_forward_backward_func(pp_size, vp_size, schedule_pg_collection)"
        " | get_forward_backward_func(pp_size, vp_size)",
    ),
}
"""The function that `install()` replaces."""

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
"""Names that `trace_native()` uses."""


@cache
def check_for_drop_in(settings: DispatchSettings, *, installs: bool = False) -> None:
    """Raise UsageError if the drop-in does not support the installed Megatron-Core under these
    settings; hints that split the backward need further names. Call it before importing the
    drop-in. With `installs`, also check the names that `install()` needs. A passed check is cached,
    because training loops fetch the schedule for every evaluation."""
    _check([DROP_IN], [REPLACED, REPLACED_BY_INSTALL] if installs else [REPLACED])
    if settings.policy.hint.splits_backward:
        whole = [name for name in HINTS if not hint_named(name).splits_backward]
        _check([], [REPLACED_IF_SPLIT], f"choose a hint that works ({', '.join(whole)}), or ")


def check_for_trace() -> None:
    """Raise UsageError if `trace_native()` does not support the installed Megatron-Core."""
    _check([TRACED], [])


def schedules() -> Any:
    """Import Megatron's module `schedules`. Raises UsageError if Megatron-Core is not installed or
    cannot be imported."""
    return _import("pipeline_parallel.schedules")


def _check(called: Iterable[Needs], replaced: Iterable[Needs], instead: str = "") -> None:
    """Raise UsageError, listing up to three differences, if an entry of these tables is not met. An
    entry of `replaced` must not be patched by a third party either. `instead` is advice that the
    message puts before the supported releases."""
    differences = []
    for is_replaced, tables in ((False, called), (True, replaced)):
        for module, entry in _entries(tables):
            difference = _difference(module, entry, is_replaced=is_replaced)
            if difference is not None:
                differences.append(difference)
    if differences:
        listed = ", ".join(differences[:_MAX_LISTED])
        if len(differences) > _MAX_LISTED:
            listed += f" and {len(differences) - _MAX_LISTED} more"
        raise UsageError(
            f"{_version()} is not one that rrfp knows: {listed}; {instead}use {_WORKS}"
        )


def _entries(tables: Iterable[Needs]) -> Iterator[tuple[str, str]]:
    """Each entry of these tables, with its module."""
    return (
        (module, entry)
        for needs in tables
        for module, entries in needs.items()
        for entry in entries
    )


def parse_forms(module: str, entry: str) -> Iterator[tuple[str, str]]:
    """Yield the accepted forms of an entry as (module, name with parameters), newest first."""
    for form in entry.split(" | "):
        home, colon, name = form.partition(":")
        elsewhere = colon and not name.startswith(" ")
        yield (home, name) if elsewhere else (module, form)


@dataclass(frozen=True, slots=True)
class _Need:
    """One parsed form of a table entry."""

    name: str
    is_dict: bool = False
    is_called: bool = False
    positional: tuple[str, ...] = ()
    by_keyword: tuple[str, ...] = ()
    is_open: bool = False
    """True if further parameters are passed through."""

    @staticmethod
    def parse(entry: str) -> "_Need":
        """Parse a form of an entry, such as `name`, `name: dict` or `name(a, *, b, ...)`."""
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


def _difference(module: str, entry: str, *, is_replaced: bool) -> str | None:
    """Describe how the installed name differs from the newest form of an entry; None if it has one
    of the entry's forms. Raise UsageError if a third party's patch is the reason, or if one is on a
    replaced name."""
    looks = [_Finding.at(home, _Need.parse(form)) for home, form in parse_forms(module, entry)]
    look = next((look for look in looks if look.differs is None), looks[0])
    foreign = foreign_layer(look.called) if look.called is not None else None
    if foreign is not None and not is_ours(foreign) and (is_replaced or look.differs):
        why = look.differs or "would not run under rrfp's schedule"
        raise UsageError(
            f"{describe_callable(foreign)} has replaced {_CORE}.{look.path} and {why}; "
            "switch that patch off"
        )
    return None if look.differs is None else f"{look.path} {look.differs}"


@dataclass(frozen=True, slots=True)
class _Finding:
    """The installed Megatron-Core compared with one form of an entry."""

    path: str
    differs: str | None
    called: Any = None
    """The callable, if the form has parameters and the name exists."""

    @staticmethod
    def at(module: str, need: _Need) -> "_Finding":
        """Compare the installed name with one form of an entry. A missing module or name is a
        difference. Raise UsageError if the module cannot be imported."""
        path = f"{module}.{need.name}"
        try:
            found: Any = _import(module)
            for name in need.name.split("."):
                found = getattr(found, name)
        except _MissingModuleError:
            return _Finding(f"the module {module}", "is missing")
        except AttributeError:
            return _Finding(path, "is missing")
        if need.is_dict:
            return _Finding(path, None if isinstance(found, dict) else "is not a dict")
        if not need.is_called:
            return _Finding(path, None)
        return _Finding(path, _parameters_differ(found, need), found)


def _parameters_differ(found: Any, need: _Need) -> str | None:
    """Describe how a callable's parameters differ from the need: missing ones (unless it takes
    `*args` or `**kwargs`), new required ones, or another order; or that it is no callable. None if
    they do not differ, or if they are unknown."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError:  # built in: its parameters are unknown
        return None
    except TypeError:
        return "cannot be called"
    kinds = {parameter.kind for parameter in parameters}
    positional = [p.name for p in parameters if p.kind in _POSITIONAL]
    named = [p.name for p in parameters if p.kind in _NAMED]
    passed = (*need.positional, *need.by_keyword)
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
    if any(a != b for a, b in zip(positional, need.positional, strict=False)):
        return f"takes its parameters in the order {', '.join(positional)}"
    return None


_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (*_POSITIONAL, Parameter.KEYWORD_ONLY)


class _MissingModuleError(Exception):
    """Raised if Megatron-Core lacks a module."""


def _import(module: str) -> Any:
    """Import a module of megatron.core. Raises _MissingModuleError if this Megatron-Core lacks it,
    and UsageError if Megatron-Core is not installed or the import fails otherwise."""
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
    """Format the message that the import of a module of Megatron-Core has raised an error."""
    return (
        f"{_version()} cannot be imported here: {name} raises {type(error).__name__} ({error}); "
        f"use {_WORKS}, or install what is missing"
    )


def _version() -> str:
    """The installed Megatron-Core's version and path, as far as known, for a message."""
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
