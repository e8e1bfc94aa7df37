"""The random states that Megatron's modules draw from, by name (`CudaRNGStatesTracker`).

Some trackers keep states by value, and some keep generators: Transformer Engine's, and the one for
CUDA graphs. A captured graph refers to its generators, so these stay where they are.
"""

import torch
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    is_graph_safe_cuda_rng_tracker,
)


def named_states() -> dict[str, torch.Tensor]:
    """All states by value, on the CPU."""
    return {
        name: state.get_state() if isinstance(state, torch.Generator) else state
        for name, state in get_cuda_rng_tracker().get_states().items()
    }


def set_named_states(states: dict[str, torch.Tensor]) -> None:
    """Set states that `named_states` gave."""
    tracker = get_cuda_rng_tracker()
    kept = tracker.get_states()
    if any(isinstance(state, torch.Generator) for state in kept.values()):
        for name, state in states.items():
            kept[name].set_state(state)
    # A tracker that is given states, even an empty dict, considers itself initialised.
    elif states:
        tracker.set_states(states)


def shared_state_name() -> str:
    """The name of the state that tensor-parallel ranks have in common."""
    return str(get_data_parallel_rng_tracker_name())


def tracker_of_generators() -> str | None:
    """The type of the tracker, if Megatron's recomputation brings its states back by reference;
    None otherwise."""
    tracker = get_cuda_rng_tracker()
    return type(tracker).__name__ if is_graph_safe_cuda_rng_tracker(tracker) else None


def seed_states(seed: int) -> None:
    """Reset all states to those of this seed, which differ between tensor-parallel ranks."""
    # Only whoever sets up the process groups needs it.
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
