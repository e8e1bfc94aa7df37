"""What rrfp asks of Megatron's models: configuration and wrappers, and its files of tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import megatron.core
from megatron.core.utils import get_attr_wrapped_model, get_model_config


def version() -> str:
    """The version of the installed Megatron-Core, for people: code looks at what is there."""
    return str(getattr(megatron.core, "__version__", "unknown"))


def config_of(model: Any) -> Any:
    """The configuration of a model chunk, inside of its wrappers."""
    return get_model_config(model)


def may_have_experts(model: Any) -> bool:
    """Whether a model chunk may have layers of experts."""
    return getattr(config_of(model), "num_moe_experts", None) is not None


def attribute_of(model: Any, name: str) -> Any:
    """An attribute of a model inside its wrappers; None if no layer of them has it."""
    try:
        return get_attr_wrapped_model(model, name)
    except RuntimeError:
        return None


def unwrap_models(chunks: Sequence[Any]) -> list[Any]:
    """Model chunks without the wrappers of data parallelism and mixed precision."""
    from megatron.core.utils import unwrap_model

    found: list[Any] = unwrap_model([*chunks])
    return found


def indexed_dataset(prefix: Path) -> Any:
    """Megatron's reader of a .bin/.idx pair, which maps it into memory."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return IndexedDataset(str(prefix))
