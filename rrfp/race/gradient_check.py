"""The gradients of a step, by name in the whole model, so that two systems can be compared."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rrfp.errors import RrfpError
from rrfp.train.models.parameters import whole_name
from rrfp.train.ranks.parallel import Layout
from rrfp.train.settings import TrainSettings

Gradients = dict[str, torch.Tensor]


def gradients(chunks: Sequence[Any], settings: TrainSettings, layout: Layout) -> Gradients:
    """Copies of the gradients of a rank's chunks, this rank's slices of them, in fp32.

    They are read from where Megatron's data parallelism accumulates them or, in chunks without it,
    from the parameters. A parameter that no task has used has zeros.
    """
    from megatron.core.utils import unwrap_model

    return {
        whole_name(name, chunk, settings, layout): _gradient(parameter)
        for chunk in unwrap_model(list(chunks))
        for name, parameter in chunk.named_parameters()
    }


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    gradient = getattr(parameter, "main_grad", parameter.grad)
    if gradient is None:
        return torch.zeros(parameter.shape)
    return gradient.detach().to("cpu", torch.float32, copy=True)


def relative_difference(
    own: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]
) -> float:
    """How far `own` gradients are from the `other` ones: the norm of the difference as a share of
    the norm of the other gradient, for the parameter where that is largest.

    Raises RrfpError if they are not gradients of the same parameters.
    """
    if own.keys() != other.keys():
        strange = sorted(own.keys() ^ other.keys())
        raise RrfpError(
            f"{len(strange)} parameters have a gradient on one side only, such as {strange[0]}; "
            "compare ranks that hold the same stages"
        )
    return max((_difference(own[name], other[name]) for name in own), default=0.0)


def _difference(own: torch.Tensor, other: torch.Tensor) -> float:
    difference = float((own.double() - other.double()).norm())
    norm = float(other.double().norm())
    if difference == 0:
        return 0.0
    return difference / norm if norm and math.isfinite(difference) else math.inf
