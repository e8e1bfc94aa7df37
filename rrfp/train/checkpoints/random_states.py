"""The random states of a rank in a checkpoint.

They belong to a rank's place in the layout. Under another layout there is nobody to take them over:
ranks then start from the seed, as in a new run, and their states advance by as many steps as are
finished. That is where these ranks would stand if they had trained from the start. Under Megatron's
own schedule only training itself can tell how far that is, and the same seed would repeat the first
steps' masks, so these ranks start from another seed, made of the run's and the step.
"""

import hashlib
import random
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from rrfp.megatron.step.random_streams import advance_named_states
from rrfp.schedule.policy import Dispatch
from rrfp.train.ranks.parallel import Layout, seed_random_states
from rrfp.train.settings import TrainSettings


def captured(layout: Layout) -> ShardedObject:
    """This rank's random states: those of torch, numpy and Python, its GPU's if it has one, and
    Megatron's named ones."""
    told: Any = np.random.get_state()
    _, keys, place, has_gauss, gauss = told
    version, numbers, next_gauss = random.getstate()
    return _sharded(
        layout,
        {
            "torch": torch.get_rng_state(),
            **({"gpu": torch.cuda.get_rng_state()} if _has_gpu(layout) else {}),
            "numpy": [torch.from_numpy(keys.astype(np.int64)), place, has_gauss, gauss],
            "python": [version, list(numbers), next_gauss],
            "megatron": dict(get_cuda_rng_tracker().get_states()),
        },
    )


def to_load(layout: Layout) -> ShardedObject:
    """What to read from a checkpoint of the same layout."""
    return _sharded(layout, None)


def restore(states: dict[str, Any]) -> None:
    """Set what `captured` took."""
    torch.set_rng_state(states["torch"])
    if "gpu" in states:
        torch.cuda.set_rng_state(states["gpu"])
    keys, place, has_gauss, gauss = states["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), place, has_gauss, gauss))
    version, numbers, next_gauss = states["python"]
    random.setstate((version, tuple(numbers), next_gauss))
    get_cuda_rng_tracker().set_states(states["megatron"])


def start_again(settings: TrainSettings, layout: Layout, step: int) -> None:
    """Set the random states of ranks that begin after `step` steps of another layout."""
    if settings.policy.dispatch is Dispatch.MEGATRON:
        digest = hashlib.sha256(f"{settings.run.seed} {step}".encode()).digest()
        seed_random_states(settings.changed(seed=int.from_bytes(digest[:4], "big")), layout)
    else:
        advance_named_states(step, layout.device)


def _sharded(layout: Layout, data: object) -> ShardedObject:
    return ShardedObject(
        f"random_states.{layout_name(layout)}",
        data,
        (layout.pp, layout.tp, layout.dp),
        (layout.pp_rank, layout.tp_rank, layout.dp_rank),
    )


def layout_name(layout: Layout) -> str:
    """Names the layouts that share random states: those of a GPU are of another kind."""
    return f"pp{layout.pp}-tp{layout.tp}-dp{layout.dp}{'-gpu' if _has_gpu(layout) else ''}"


def _has_gpu(layout: Layout) -> bool:
    return layout.device.type == "cuda"
