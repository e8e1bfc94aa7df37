"""The data of a run: which batch a microbatch is, a function of (seed, step, replica, microbatch).

Nothing is kept between calls, so every rank finds any microbatch by itself, in any order.
"""

from collections.abc import Callable
from typing import Protocol, TypedDict

import torch

from rrfp.megatron.data_source import open_documents
from rrfp.megatron.settings import ModelKind, TrainSettings


class Batch(TypedDict):
    """One microbatch; every tensor is (micro_batch_size, length)."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    """1.0 where the label counts, 0.0 where it is padding."""
    position_ids: torch.Tensor


class Batches(Protocol):
    """The batches of one data-parallel replica."""

    def batch(self, step: int, microbatch: int) -> Batch:
        """The microbatch of that step, the same whenever and wherever it is asked for."""
        ...


class Data(Protocol):
    """What a run trains on."""

    vocab_size: int
    """One more than the highest token."""

    @property
    def heldout(self) -> Callable[[int], Batch] | None:
        """A microbatch of what training never sees, by its number; None if nothing is held out."""

    def batches(self, dp_rank: int) -> Batches:
        """The batches of a replica. Raises UsageError when there is not enough for one."""
        ...


def open_data(settings: TrainSettings) -> Data:
    """Open the data that these settings train on. Raises UsageError when there is none."""
    if settings.model == ModelKind.VLM:
        from rrfp.megatron.image_batches import ImageData

        return ImageData(open_documents(settings), settings)
    from rrfp.megatron.text_batches import TextData

    return TextData(settings)
