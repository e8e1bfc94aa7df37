"""Megatron's own schedule functions, and patches of the functions that they call."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from rrfp.megatron.adapters.groups import pipeline_size
from rrfp.megatron.installation import original_function

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextmanager
def patched_parts(
    *, forward: Wrap, backward: Wrap, communicate: Wrap, config: Any, finalize: Wrap
) -> Iterator[None]:
    """Replace, for the block, functions that Megatron's own schedules call by wrapped versions: a
    microbatch's forward and backward, the method that makes all transfers, and the configuration's
    `finalize_model_grads_func`, if set."""
    with ExitStack() as restored:
        _replace(restored, schedules, "forward_step", forward)
        _replace(restored, schedules, "backward_step", backward)
        # All transfers of all schedules go through this method, and nothing else does.
        _replace(restored, P2PCommunicator, "_communicate", communicate)
        if config.finalize_model_grads_func is not None:
            _replace(restored, config, "finalize_model_grads_func", finalize)
        yield


def _replace(restored: ExitStack, owner: Any, name: str, wrap: Wrap) -> None:
    """Replace an attribute by its wrapped value until `restored` closes."""
    original = getattr(owner, name)
    restored.callback(setattr, owner, name, original)
    setattr(owner, name, wrap(original))


def megatron_schedule_for(num_chunks: int) -> Callable[..., list[Any]]:
    """Megatron's own schedule function, even if rrfp has replaced it, for this number of chunks per
    rank and Megatron's pipeline size, chosen as its `get_forward_backward_func` does."""
    if pipeline_size() == 1:
        return original_function("forward_backward_no_pipelining")
    if num_chunks == 1:
        return original_function("forward_backward_pipelining_without_interleaving")
    return original_function("forward_backward_pipelining_with_interleaving")
