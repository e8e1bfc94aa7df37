"""The tensors of a checkpoint: parameters, optimizer state and random states.

Parameters and optimizer state have the names of the whole model. The names depend neither on ranks
nor on the kind of optimizer, and each tensor is saved whole, in the parts of tensor parallelism. So
a checkpoint can be loaded under any layout.

| key | content |
|---|---|
| `decoder.layers.3.mlp.linear_fc1.weight` | a parameter |
| `optimizer.state.exp_avg.<parameter>`, `optimizer.state.exp_avg_sq.<parameter>` | Adam's moments |
| `optimizer.state.param.<parameter>` | the fp32 copy that is trained, where the parameter is bf16 |
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from rrfp.errors import RrfpError, is_torchs_loss, is_torchs_silence
from rrfp.megatron.cpu.checkpoints import prepare_checkpoints
from rrfp.megatron.step.random_streams import advance_named_states
from rrfp.schedule.policy import Dispatch
from rrfp.train.checkpoints.directory import Checkpoint
from rrfp.train.checkpoints.plans import exchanging_plans, reason_of
from rrfp.train.checkpoints.reading import loading_data_only
from rrfp.train.launch.process_groups import Layout, seed_random_states
from rrfp.train.models.gpt import is_second_copy, whole_name
from rrfp.train.models.model import ModelChunks
from rrfp.train.settings import DeviceKind, TrainSettings

# Random states. They belong to a rank's place in the layout. Ranks of another layout start from the
# seed, as in a new run, and their states advance by the number of finished steps: they are then as
# if the ranks had trained from the start. Under Megatron's own schedule that advance is unknown
# without training, and the same seed would repeat the masks of the first steps. These ranks start
# from another seed, derived from the run's seed and the step.


def captured_random_states(layout: Layout) -> ShardedObject:
    """Capture this rank's random states for a checkpoint: torch's, NumPy's and Python's, its GPU's
    if it has one, and Megatron's named ones."""
    state: Any = np.random.get_state()
    _, keys, place, has_gauss, gauss = state
    version, numbers, next_gauss = random.getstate()
    return _sharded_states(
        layout,
        {
            "torch": torch.get_rng_state(),
            **({"gpu": torch.cuda.get_rng_state()} if _has_gpu(layout) else {}),
            "numpy": [torch.from_numpy(keys.astype(np.int64)), place, has_gauss, gauss],
            "python": [version, list(numbers), next_gauss],
            "megatron": dict(get_cuda_rng_tracker().get_states()),
        },
    )


def restore_random_states(states: dict[str, Any]) -> None:
    """Set this rank's random states of torch, NumPy, Python and Megatron, and its GPU's if
    captured."""
    torch.set_rng_state(states["torch"])
    if "gpu" in states:
        torch.cuda.set_rng_state(states["gpu"])
    keys, place, has_gauss, gauss = states["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), place, has_gauss, gauss))
    version, numbers, next_gauss = states["python"]
    random.setstate((version, tuple(numbers), next_gauss))
    get_cuda_rng_tracker().set_states(states["megatron"])


def reseed_random_states(settings: TrainSettings, layout: Layout, step: int) -> None:
    """Set the random states of a rank that starts after `step` steps of another layout: advance
    Megatron's named states by these steps or, with --dispatch megatron, seed torch's and Megatron's
    from the run's seed and the step."""
    if settings.policy.dispatch is Dispatch.MEGATRON:
        digest = hashlib.sha256(f"{settings.run.seed} {step}".encode()).digest()
        seed_random_states(settings.changed(seed=int.from_bytes(digest[:4], "big")), layout)
    else:
        advance_named_states(step, layout.device)


def _sharded_states(layout: Layout, data: object) -> ShardedObject:
    """Wrap random states (None: to be loaded) with a key for the layout and this rank's place in
    it."""
    return ShardedObject(
        f"random_states.{layout_name(layout)}",
        data,
        (layout.pp, layout.tp, layout.dp),
        (layout.pp_rank, layout.tp_rank, layout.dp_rank),
    )


def layout_name(layout: Layout) -> str:
    """Return the name that layouts share if they can share random states: the numbers of ranks,
    with a suffix on GPUs, which have states of another kind."""
    return f"pp{layout.pp}-tp{layout.tp}-dp{layout.dp}{'-gpu' if _has_gpu(layout) else ''}"


def _has_gpu(layout: Layout) -> bool:
    """True if this rank trains on a GPU."""
    return layout.device.type == "cuda"


_MOMENTS = ("exp_avg", "exp_avg_sq")
_MAIN = "param"
"""Megatron's name for the fp32 copy of a parameter."""
_STEP = "step"


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """A tensor to load, and the tensor that receives its values."""

    sharded: ShardedTensor
    target: torch.Tensor
    part: slice | None = None
    """The part of the flattened loaded tensor that belongs to the target; None means all of it."""

    def finish(self, loaded: torch.Tensor) -> None:
        """Copy the loaded values, or the `part` of them that belongs to the target, to the target,
        unless they were read into it."""
        if self.part is not None:
            loaded = loaded.flatten()[self.part]
        if loaded.data_ptr() != self.target.data_ptr():
            self.target.copy_(loaded)


class TrainedTensors:
    """The parameters that one rank trains, and its optimizer's state."""

    def __init__(self, model: ModelChunks, settings: TrainSettings, layout: Layout) -> None:
        self._optimizers = _chained(model.optimizer)
        self._model = model
        self._settings = settings
        self._layout = layout

    def saved(self) -> list[ShardedTensor]:
        """Return this rank's parameters and optimizer state for a checkpoint. Every rank calls
        this: the state of a distributed optimizer is gathered."""
        parameters = self._parameters()
        found = [*parameters.values()]
        for optimizer in self._optimizers:
            if isinstance(optimizer, DistributedOptimizer):
                found += _gathered(optimizer, parameters)
            else:
                found += _whole_states(optimizer, parameters)
        return found

    @torch.no_grad()
    def load_targets(self, optimizer_step: int) -> list[LoadTarget]:
        """List the tensors that this rank reads from a checkpoint after `optimizer_step` updates,
        and where their values go. Replaces the optimizer's state by zeros."""
        parameters = self._parameters()
        found = [
            LoadTarget(sharded, parameter.detach()) for parameter, sharded in parameters.items()
        ]
        for optimizer in self._optimizers:
            _make_states(optimizer, optimizer_step)
            if isinstance(optimizer, DistributedOptimizer):
                found += _parts_to_load(optimizer, parameters)
            else:
                states = _whole_states(optimizer, parameters)
                found += [LoadTarget(sharded, sharded.data) for sharded in states]
        return found

    def _parameters(self) -> "_Parameters":
        """Map this rank's parameters to their parts of the whole model's. Created for each call,
        because `dist_checkpointing` changes its arguments."""
        return {
            parameter: _sharded(name, parameter, chunk.module, self._settings, self._layout)
            for chunk in self._model.chunks
            for name, parameter in chunk.module.named_parameters()
        }


_Parameters = dict[torch.nn.Parameter, ShardedTensor]


def _whole_states(optimizer: Any, parameters: _Parameters) -> Iterator[ShardedTensor]:
    """Yield Adam's moments, and the fp32 copies of bf16 parameters, of an optimizer that is whole
    on each replica."""
    for parameter, main in _main_parameters(optimizer):
        state = optimizer.optimizer.state[main]
        for name in _MOMENTS:
            yield _of_state(parameters[parameter], name, state[name])
        if main is not parameter:
            yield _of_state(parameters[parameter], _MAIN, main.detach())


def _gathered(optimizer: Any, parameters: _Parameters) -> Iterator[ShardedTensor]:
    """Gather the state of a distributed optimizer, whole on each replica, in Megatron's format for
    resharding; yield Adam's moments and, for bf16, the fp32 copies."""
    by_key = {f"{number}": sharded for number, sharded in enumerate(parameters.values())}
    found = optimizer.sharded_param_state_fully_reshardable(by_key, False, {})
    for tensors in found.values():
        for name, sharded in tensors.items():
            if name in _MOMENTS or (name == _MAIN and optimizer.config.bf16):
                yield sharded


def _parts_to_load(optimizer: Any, parameters: _Parameters) -> Iterator[LoadTarget]:
    """Yield this replica's parts of the state of a distributed optimizer as load targets.
    (Megatron's own loading expects the state of Transformer Engine's Adam.)"""
    for parameter, main in _divided_parameters(optimizer):
        place = optimizer._get_model_param_range_map(parameter)["param"]
        part = slice(place.start, place.end)
        state = optimizer.optimizer.state[main]
        targets = {name: state[name] for name in _MOMENTS}
        if optimizer.config.bf16:
            targets[_MAIN] = main.detach()
        for name, target in targets.items():
            whole = torch.empty(parameter.shape, dtype=target.dtype)
            yield LoadTarget(_of_state(parameters[parameter], name, whole), target, part)


def _sharded(
    name: str, parameter: Any, chunk: Any, settings: TrainSettings, layout: Layout
) -> ShardedTensor:
    """Wrap a parameter as a part of the whole model's parameter of that name: this rank's slice,
    and which replica of it this is."""
    cuts = []
    is_cut = getattr(parameter, "tensor_model_parallel", False) and layout.tp > 1
    if is_cut:
        cuts.append((parameter.partition_dim, layout.tp_rank, layout.tp))
    # An expert is replicated only among replicas that hold the same experts.
    is_expert = not getattr(parameter, "allreduce", True)
    replica = layout.dp_rank // layout.ep if is_expert else layout.dp_rank
    return ShardedTensor.from_rank_offsets(
        whole_name(name, chunk, settings, layout),
        parameter,
        *cuts,
        replica_id=(
            int(is_second_copy(name, settings)),
            0 if is_cut else layout.tp_rank,
            replica,
        ),
    )


def _of_state(sharded: ShardedTensor, name: str, data: torch.Tensor) -> ShardedTensor:
    """Wrap a tensor of the optimizer's state under a key with its own and its parameter's name,
    sharded as the parameter is."""
    key = f"optimizer.state.{name}.{sharded.key}"
    return replace(sharded, key=key, data=data, dtype=data.dtype)


def _chained(optimizer: Any) -> list[Any]:
    """List the optimizers of a rank, without stubs that have no parameters; with experts there are
    two."""
    return [
        each
        for each in getattr(optimizer, "chained_optimizers", [optimizer])
        if not getattr(each, "is_stub_optimizer", False)
    ]


def _main_parameters(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each parameter of an undivided optimizer with the parameter that Adam updates for it:
    its fp32 copy if it is bf16, else itself."""
    if not hasattr(optimizer, "fp32_from_float16_groups"):
        for group in optimizer.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, parameter
        return
    for models, mains in (
        (optimizer.float16_groups, optimizer.fp32_from_float16_groups),
        (optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups),
    ):
        for model_group, main_group in zip(models, mains, strict=True):
            yield from zip(model_group, main_group, strict=True)


def _divided_parameters(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each parameter of which this replica updates a part, with the part that Adam
    updates."""
    for parameter, (group, place) in optimizer.model_param_group_index_map.items():
        yield parameter, optimizer.optimizer.param_groups[group]["params"][place]


def _make_states(optimizer: Any, step: int) -> None:
    """Set Adam's state, which its first update would create, to zero moments after `step` updates.
    Any existing state is replaced."""
    for group in optimizer.optimizer.param_groups:
        for main in group["params"]:
            optimizer.optimizer.state[main] = {
                _STEP: torch.tensor(float(step)),
                **{name: torch.zeros_like(main) for name in _MOMENTS},
            }


def load(
    checkpoint: Checkpoint, settings: TrainSettings, layout: Layout, tensors: TrainedTensors
) -> None:
    """Load parameters, the optimizer's state and random states into a model of any layout; every
    rank calls this. In another layout `reseed_random_states` sets the last. Raise RrfpError if the
    checkpoint cannot be read or does not fit, and torch's errors if another rank is lost
    meanwhile."""
    from megatron.core import dist_checkpointing

    prepare_checkpoints()
    # The optimizer makes one update per step.
    targets = tensors.load_targets(checkpoint.step)
    state: dict[str, Any] = {"tensors": {str(n): each.sharded for n, each in enumerate(targets)}}
    is_same_layout = _saved_layout_name(checkpoint) == layout_name(layout)
    if is_same_layout:
        state["random_states"] = _sharded_states(layout, None)
    with exchanging_plans(), loading_data_only():
        try:
            loaded = dist_checkpointing.load(
                state, str(checkpoint.path), validate_access_integrity=False
            )
        except RrfpError:
            raise
        except (Exception, CheckpointException) as error:
            if is_torchs_loss(error) or is_torchs_silence(error):
                raise
            raise RrfpError(
                f"the checkpoint {checkpoint.path} cannot be loaded ({reason_of(error)}); choose a "
                "--tp that divides 64 as did that of the run that saved it, or move the checkpoint "
                "away to go on from the one before"
            ) from error
    for number, target in enumerate(targets):
        target.finish(loaded["tensors"][str(number)])
    if is_same_layout:
        restore_random_states(loaded["random_states"])
    else:
        reseed_random_states(settings, layout, checkpoint.step)


def _saved_layout_name(checkpoint: Checkpoint) -> str:
    """Return the `layout_name` of the run that saved a checkpoint, from its settings."""
    saved = checkpoint.manifest.settings
    on_gpu = saved.get("device") == DeviceKind.CUDA
    return f"pp{saved['pp']}-tp{saved['tp']}-dp{saved['dp']}{'-gpu' if on_gpu else ''}"
