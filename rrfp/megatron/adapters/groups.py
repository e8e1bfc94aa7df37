"""The process groups of a step, from the training loop's collection or Megatron's parallel state.

Up to 0.18 Megatron's schedules require a collection with every group that they use. Since 0.19 the
collection must have `tp` and `cp` only: the pipeline group comes with the communicator, and only
gradient finalization needs the replicas.
"""

from typing import Any

from megatron.core import parallel_state, process_groups_config
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection

from rrfp.errors import UsageError

# From 0.17 on.
_MULTI_MODULE = getattr(process_groups_config, "MultiModuleProcessGroupCollection", None)


def default_groups() -> Any:
    """Return the collection that Megatron's schedules use when a training loop passes none, from
    its parallel state. From 0.19 on Megatron has a function for it."""
    build = getattr(schedules, "_build_default_pg_collection", None)
    if build is not None:
        return build()
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=False
    )
    # From 0.18 on the biases of experts are finalized over it.
    groups.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return groups


def pipeline_group(collection: Any, communicator: Any = None) -> Any:
    """The pipeline's process group, from the collection, else the communicator, else Megatron's
    parallel state. None if none of them has one."""
    return (
        getattr(collection, "pp", None)
        or getattr(communicator, "pp_group", None)
        or parallel_state.get_pipeline_model_parallel_group(check_initialized=False)
    )


def replica_group(collection: Any) -> Any:
    """The group of ranks that hold the same stages (data and context parallelism), from the
    collection, else Megatron's parallel state. Raises UsageError if neither has it."""
    return _data_group(collection, "dp_cp", with_context_parallel=True)


def data_parallel_group(collection: Any) -> Any:
    """The data-parallel group without context parallelism, from the collection, else Megatron's
    parallel state. Raises UsageError if neither has it."""
    return _data_group(collection, "dp", with_context_parallel=False)


def _data_group(collection: Any, name: str, *, with_context_parallel: bool) -> Any:
    """The group called `name` in the collection, else the data-parallel group in Megatron's
    parallel state, with or without context parallelism. Raise UsageError if there is neither."""
    found = getattr(collection, name, None)
    if found is not None:
        return found
    if pipeline_group(None) is None:
        raise UsageError(
            f"the process groups of this step have no {name}, and Megatron's parallel state, which "
            "would have it, is not set up; add it to pg_collection"
        )
    return parallel_state.get_data_parallel_group(with_context_parallel=with_context_parallel)


def expert_groups(collection: Any) -> list[Any]:
    """The groups in which experts run collectives. Each comes from the collection if it names the
    group, else from Megatron's parallel state, as in Megatron's own modules. Missing groups are
    left out."""
    found = (
        getattr(collection, name, None) or of_state(check_initialized=False)
        for name, of_state in _OF_EXPERTS.items()
    )
    return [group for group in found if group is not None]


def expert_parallel_group(collection: Any) -> Any:
    """The expert-parallel group, from the collection, else Megatron's parallel state; None if
    neither has one."""
    return getattr(collection, "ep", None) or _OF_EXPERTS["ep"](check_initialized=False)


_OF_EXPERTS = {
    "ep": parallel_state.get_expert_model_parallel_group,
    "expt_tp": parallel_state.get_expert_tensor_parallel_group,
    "tp_ep": parallel_state.get_expert_tensor_and_model_parallel_group,
}


def pipeline_size() -> int:
    """The number of pipeline ranks in Megatron's parallel state."""
    return int(parallel_state.get_pipeline_model_parallel_world_size())


def virtual_pipeline_size() -> int | None:
    """The virtual pipeline size (model chunks per rank) in Megatron's parallel state, or None."""
    size: int | None = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    return size


def refuse_multi_module(collection: Any) -> None:
    """Raise UsageError if the collection has the groups of several models in one pipeline, such as
    an encoder and a language model on separate grids."""
    if _MULTI_MODULE is not None and isinstance(collection, _MULTI_MODULE):
        modules = ", ".join(collection.module_pgs)
        raise UsageError(
            f"a multi-module pipeline ({modules}) cannot run readiness-first: its stages exchange "
            "dicts of tensors between grids of ranks; use Megatron's own schedule for it"
        )
