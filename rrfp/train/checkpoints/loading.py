"""Loads a checkpoint into a model that was built for any layout."""

from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from rrfp.errors import RrfpError, is_torchs_loss, is_torchs_silence
from rrfp.megatron.cpu.checkpoints import prepare_checkpoints
from rrfp.train.checkpoints import random_states
from rrfp.train.checkpoints.directory import Checkpoint
from rrfp.train.checkpoints.plans import plans_exchanged, reason_of
from rrfp.train.checkpoints.reading import executing_nothing
from rrfp.train.checkpoints.tensors import TrainedTensors
from rrfp.train.ranks.parallel import Layout
from rrfp.train.setting_groups import DeviceKind
from rrfp.train.settings import TrainSettings


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
    same_layout = _saved_layout(checkpoint) == random_states.layout_name(layout)
    if same_layout:
        state["random_states"] = random_states.to_load(layout)
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
        random_states.restore(loaded["random_states"])
    else:
        random_states.start_again(settings, layout, checkpoint.step)


def _saved_layout(checkpoint: Checkpoint) -> str:
    told = checkpoint.manifest.settings
    on_gpu = told.get("device") == DeviceKind.CUDA
    return f"pp{told['pp']}-tp{told['tp']}-dp{told['dp']}{'-gpu' if on_gpu else ''}"
