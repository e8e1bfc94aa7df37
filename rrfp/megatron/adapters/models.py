"""Access to Megatron's models (configuration, attributes inside wrappers) and its indexed
datasets."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import megatron.core
from megatron.core.utils import get_attr_wrapped_model, get_model_config


def version() -> str:
    """The version of the installed Megatron-Core, for display only: code checks for names
    instead."""
    return str(getattr(megatron.core, "__version__", "unknown"))


def chunks_of(model: Any) -> list[Any]:
    """Return the chunks in the `model` argument of a schedule's call: one chunk, or a list or tuple
    of them."""
    return [*model] if isinstance(model, list | tuple) else [model]


def config_of(model: Any) -> Any:
    """The configuration of a model chunk, found inside its wrappers."""
    return get_model_config(model)


def may_have_experts(model: Any) -> bool:
    """True if a model chunk's configuration sets a number of experts."""
    return getattr(config_of(model), "num_moe_experts", None) is not None


def attribute_of(model: Any, name: str) -> Any:
    """An attribute of a model or of a module that it wraps; None if none of them has it."""
    try:
        return get_attr_wrapped_model(model, name)
    except RuntimeError:
        return None


def unwrap_models(chunks: Sequence[Any]) -> list[Any]:
    """Return model chunks without their data-parallel and mixed-precision wrappers."""
    from megatron.core.utils import unwrap_model

    found: list[Any] = unwrap_model([*chunks])
    return found


def indexed_dataset(prefix: Path) -> Any:
    """Open a .bin/.idx pair with Megatron's memory-mapped reader."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return IndexedDataset(str(prefix))
