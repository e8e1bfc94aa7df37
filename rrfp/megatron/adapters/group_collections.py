"""The process groups of a step: which ones a collection holds, and of how many models."""

from typing import Any

from megatron.core import parallel_state, process_groups_config
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection

from rrfp.errors import UsageError

# From 0.17 on.
_MULTI_MODULE = getattr(process_groups_config, "MultiModuleProcessGroupCollection", None)


def default_groups() -> Any:
    """The collection that Megatron's schedules make of the parallel state when a loop passes none.
    From 0.19 on Megatron has a function for it."""
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
    # From 0.18 on the biases of experts are finalised over it.
    groups.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return groups


def refuse_multi_module(collection: Any) -> None:
    """Raise UsageError for the groups of several models in one pipeline, such as an encoder and a
    language model on grids of their own."""
    if _MULTI_MODULE is not None and isinstance(collection, _MULTI_MODULE):
        modules = ", ".join(collection.module_pgs)
        raise UsageError(
            f"a multi-module pipeline ({modules}) cannot run readiness-first: its stages exchange "
            "dicts of tensors between grids of ranks; use Megatron's own schedule for it"
        )
