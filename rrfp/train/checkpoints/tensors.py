"""The tensors of a checkpoint: parameters and the optimizer's state, by their names in the whole
model.

The names depend neither on ranks nor on the kind of optimizer, and each tensor is saved whole, in
as many parts as tensor parallelism has cut it. So every layout can read what another has saved.

| key | |
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
from rrfp.train.checkpoints.plans import plans_exchanged, reason_of
from rrfp.train.checkpoints.reading import executing_nothing
from rrfp.train.launch.process_groups import Layout, seed_random_states
from rrfp.train.models.gpt import is_second_copy, whole_name
from rrfp.train.models.model import ModelChunks
from rrfp.train.settings import DeviceKind, TrainSettings

# The random states of a rank in a checkpoint.
#
# They belong to a rank's place in the layout. Under another layout there is nobody to take them
# over: ranks then start from the seed, as in a new run, and their states advance by as many steps
# as are finished. That is where these ranks would stand if they had trained from the start. Under
# Megatron's own schedule only training itself can tell how far that is, and the same seed would
# repeat the first steps' masks, so these ranks start from another seed, made of the run's and the
# step.


def captured(layout: Layout) -> ShardedObject:
    """This rank's random states: those of torch, numpy and Python, its GPU's if it has one, and
    Megatron's named ones."""
    told: Any = np.random.get_state()
    _, keys, place, has_gauss, gauss = told
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


def to_load(layout: Layout) -> ShardedObject:
    """What to read from a checkpoint of the same layout."""
    return _sharded_states(layout, None)


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


def _sharded_states(layout: Layout, data: object) -> ShardedObject:
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


_MOMENTS = ("exp_avg", "exp_avg_sq")
_MAIN = "param"
"""Megatron's name for the fp32 copy of a parameter."""
_STEP = "step"


@dataclass(frozen=True, slots=True)
class Loading:
    """A tensor to be loaded, and where its values go."""

    sharded: ShardedTensor
    target: torch.Tensor
    part: slice | None = None
    """Of the flattened tensor that is loaded, what belongs to the target; None if all of it."""

    def finish(self, loaded: torch.Tensor) -> None:
        """Copy what was loaded to the target, if it was not read there."""
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
        """What this rank contributes to a checkpoint. Every rank calls it."""
        parameters = self._parameters()
        found = [*parameters.values()]
        for optimizer in self._optimizers:
            if isinstance(optimizer, DistributedOptimizer):
                found += _gathered(optimizer, parameters)
            else:
                found += _whole_states(optimizer, parameters)
        return found

    @torch.no_grad()
    def to_load(self, optimizer_step: int) -> list[Loading]:
        """What this rank reads from a checkpoint after so many updates."""
        parameters = self._parameters()
        found = [Loading(sharded, parameter.detach()) for parameter, sharded in parameters.items()]
        for optimizer in self._optimizers:
            _make_states(optimizer, optimizer_step)
            if isinstance(optimizer, DistributedOptimizer):
                found += _parts_to_load(optimizer, parameters)
            else:
                states = _whole_states(optimizer, parameters)
                found += [Loading(sharded, sharded.data) for sharded in states]
        return found

    def _parameters(self) -> "_Parameters":
        """This rank's parameters, each as a part of the whole model's. They are made each time,
        because `dist_checkpointing` changes what it is given."""
        return {
            parameter: _sharded(name, parameter, chunk.module, self._settings, self._layout)
            for chunk in self._model.chunks
            for name, parameter in chunk.module.named_parameters()
        }


_Parameters = dict[torch.nn.Parameter, ShardedTensor]


def _whole_states(optimizer: Any, parameters: _Parameters) -> Iterator[ShardedTensor]:
    """The state of an optimizer that each replica keeps whole."""
    for parameter, main in _main_parameters(optimizer):
        state = optimizer.optimizer.state[main]
        for name in _MOMENTS:
            yield _of_state(parameters[parameter], name, state[name])
        if main is not parameter:
            yield _of_state(parameters[parameter], _MAIN, main.detach())


def _gathered(optimizer: Any, parameters: _Parameters) -> Iterator[ShardedTensor]:
    """The state of an optimizer that is divided among the replicas, in the format of Megatron's
    that can be resharded: each replica gathers all of it."""
    by_key = {f"{number}": sharded for number, sharded in enumerate(parameters.values())}
    found = optimizer.sharded_param_state_fully_reshardable(by_key, False, {})
    for tensors in found.values():
        for name, sharded in tensors.items():
            if name in _MOMENTS or (name == _MAIN and optimizer.config.bf16):
                yield sharded


def _parts_to_load(optimizer: Any, parameters: _Parameters) -> Iterator[Loading]:
    """The parts of such an optimizer's state that this replica keeps. (Megatron's own loading
    expects the state of Transformer Engine's Adam.)"""
    for parameter, main in _divided_parameters(optimizer):
        place = optimizer._get_model_param_range_map(parameter)["param"]
        part = slice(place.start, place.end)
        state = optimizer.optimizer.state[main]
        targets = {name: state[name] for name in _MOMENTS}
        if optimizer.config.bf16:
            targets[_MAIN] = main.detach()
        for name, target in targets.items():
            whole = torch.empty(parameter.shape, dtype=target.dtype)
            yield Loading(_of_state(parameters[parameter], name, whole), target, part)


def _sharded(
    name: str, parameter: Any, chunk: Any, settings: TrainSettings, layout: Layout
) -> ShardedTensor:
    """A parameter as a part of the whole model's."""
    cuts = []
    is_cut = getattr(parameter, "tensor_model_parallel", False) and layout.tp > 1
    if is_cut:
        cuts.append((parameter.partition_dim, layout.tp_rank, layout.tp))
    # Experts are replicated only where another replica holds the same ones.
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
    """The part of an optimizer's state that belongs to a parameter."""
    key = f"optimizer.state.{name}.{sharded.key}"
    return replace(sharded, key=key, data=data, dtype=data.dtype)


def _chained(optimizer: Any) -> list[Any]:
    """The optimizers of a rank: with experts there are two."""
    return [
        each
        for each in getattr(optimizer, "chained_optimizers", [optimizer])
        if not getattr(each, "is_stub_optimizer", False)
    ]


def _main_parameters(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Each parameter of an optimizer that is not divided, with what Adam trains in its place."""
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
    """Each parameter of which this replica updates a part, with what Adam trains in that place."""
    for parameter, (group, place) in optimizer.model_param_group_index_map.items():
        yield parameter, optimizer.optimizer.param_groups[group]["params"][place]


def _make_states(optimizer: Any, step: int) -> None:
    """Give Adam the state that its first update would make, after `step` updates."""
    for group in optimizer.optimizer.param_groups:
        for main in group["params"]:
            optimizer.optimizer.state[main] = {
                _STEP: torch.tensor(float(step)),
                **{name: torch.zeros_like(main) for name in _MOMENTS},
            }


# Loads a checkpoint into a model that was built for any layout.


def load(
    checkpoint: Checkpoint, settings: TrainSettings, layout: Layout, tensors: TrainedTensors
) -> None:
    """Load parameters, the optimizer's state and random states; every rank calls this.

    Raises RrfpError if the checkpoint cannot be read, or does not fit the model, and what torch
    raises if another rank is lost meanwhile.
    """
    from megatron.core import dist_checkpointing

    prepare_checkpoints()
    # The optimizer makes an update in each step.
    parts = tensors.to_load(checkpoint.step)
    state: dict[str, Any] = {"tensors": {str(n): part.sharded for n, part in enumerate(parts)}}
    same_layout = _saved_layout(checkpoint) == layout_name(layout)
    if same_layout:
        state["random_states"] = to_load(layout)
    with plans_exchanged(), executing_nothing():
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
    for number, part in enumerate(parts):
        part.finish(loaded["tensors"][str(number)])
    if same_layout:
        restore(loaded["random_states"])
    else:
        start_again(settings, layout, checkpoint.step)


def _saved_layout(checkpoint: Checkpoint) -> str:
    told = checkpoint.manifest.settings
    on_gpu = told.get("device") == DeviceKind.CUDA
    return f"pp{told['pp']}-tp{told['tp']}-dp{told['dp']}{'-gpu' if on_gpu else ''}"
