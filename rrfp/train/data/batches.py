"""The data of a run: a microbatch is a pure function of (seed, step, replica, microbatch).

Nothing is kept between calls, so every rank finds any microbatch by itself, in any order.
"""

from collections.abc import Callable
from typing import Protocol, TypedDict

import torch


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
        """This microbatch of the step; equal arguments give equal batches, on every rank."""
        ...


class Data(Protocol):
    """The data that a run trains on."""

    vocab_size: int
    """One more than the highest token."""

    @property
    def heldout(self) -> Callable[[int], Batch] | None:
        """Gives a microbatch of held-out data by its number; None if nothing is held out."""

    def batches(self, dp_rank: int) -> Batches:
        """The batches of a replica. Raises UsageError if there is not enough data for one."""
        ...
