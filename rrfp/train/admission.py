"""The admission order of a training run's steps. In a paced run every rank computes it from the
same costs; otherwise the first rank of a replica decides."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rrfp.inputs.admission_files import resolve_admission
from rrfp.megatron.admission import agreed_order
from rrfp.megatron.groups import step_groups
from rrfp.megatron.item_costs import resolve_cost
from rrfp.schedule.admission import Admit, admission_order
from rrfp.train.pacing import StepPacer
from rrfp.train.settings import TrainSettings

RunOrder = Callable[[int, Sequence[Any]], Sequence[int]]
"""Gives the admission order from a step's number and its batches."""


def run_order(settings: TrainSettings, pace: StepPacer | None = None) -> RunOrder:
    """The admission order of a run's steps, by modelled costs if the pace has them.

    Raises UsageError for an unknown order or cost.
    """
    if pace is not None and pace.has_costs:
        return lambda step, _: pace.order(step)
    admission = resolve_admission(settings.policy.admit, settings.data.microbatches)
    cost = resolve_cost(settings.policy.admit_cost)

    def order(step: int, batches: Sequence[Any]) -> Sequence[int]:
        if admission is Admit.GIVEN:
            return range(len(batches))

        def decide() -> Sequence[int]:
            return admission_order(admission, step, len(batches), lambda: cost.weigh(batches))

        return agreed_order(decide, len(batches), step_groups(None, None), torch.device("cpu"))

    return order
