"""Records a rank's training in Megatron-LM's own loop: one line of JSON per step, equal for every
schedule.

Only ranks of tests import this. It does not change the loop.
"""

import hashlib
import importlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


def record(folder: str, sigterm_at: int) -> None:
    """Have `megatron.training` write to this rank's file: for each training step what `train_step`
    returns, and digests of all gradients before the optimizer and of all parameters after it; for
    each evaluation its losses; what goes to TensorBoard, but for times. After step `sigterm_at`,
    counted from 1, the rank sends itself SIGTERM; 0 is never."""
    path = Path(folder, f"{os.environ['RANK']}.jsonl")
    training: Any = importlib.import_module("megatron.training.training")
    lines = path.open("w", buffering=1)

    def write(**line: object) -> None:
        lines.write(json.dumps(line) + "\n")

    training.train_step = _recorded_step(training.train_step, write, sigterm_at)
    training.evaluate = _recorded_evaluation(training.evaluate, write)
    board: Any = ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = type("SummaryWriter", (_SummaryWriter,), {"write": staticmethod(write)})
    sys.modules[board.__name__] = board
    timers: Any = importlib.import_module("megatron.core.timers")
    timers.SummaryWriter = board.SummaryWriter


class _SummaryWriter:
    """TensorBoard's, which is not installed: a line a scalar."""

    write: Callable[..., None]

    def __init__(self, **_options: object) -> None:
        pass

    def add_scalar(self, name: str, value: Any, *_args: object) -> None:
        if "time" not in name and "throughput" not in name:
            self.write(scalar=name, value=_plain(value))

    def add_text(self, *_args: object, **_options: object) -> None:
        pass

    add_scalars = flush = close = add_text


def _recorded_step(
    train_step: Callable[..., Any], write: Callable[..., None], sigterm_at: int
) -> Any:
    num_steps = itertools.count(1)

    @wraps(train_step)
    def step(forward: Any, data: Any, model: Any, optimizer: Any, *args: Any, **kw: Any) -> Any:
        gradients: list[str] = []
        optimizer_step = optimizer.step

        def optimized() -> Any:
            gradients.append(_digest(_gradient(parameter) for parameter in _parameters(model)))
            return optimizer_step()

        optimizer.step = optimized
        try:
            result = train_step(forward, data, model, optimizer, *args, **kw)
        finally:
            del optimizer.step
        write(
            step=[_plain(value) for value in result],
            gradients=gradients,
            parameters=_digest(parameter.detach() for parameter in _parameters(model)),
        )
        if next(num_steps) == sigterm_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    return step


def _recorded_evaluation(evaluate: Callable[..., Any], write: Callable[..., None]) -> Any:
    @wraps(evaluate)
    def evaluated(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        write(evaluation=_plain(result[0]))
        return result

    return evaluated


def _parameters(model: Iterable[torch.nn.Module]) -> Iterable[torch.nn.Parameter]:
    return (parameter for chunk in model for parameter in chunk.parameters())


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    main = getattr(parameter, "main_grad", None)
    gradient = parameter.grad if main is None else main
    return torch.zeros(0) if gradient is None else gradient


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """Numbers by all of their digits."""
    if isinstance(value, torch.Tensor):
        return [_plain(each) for each in value.flatten().tolist()]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, float):
        return value.hex()
    return value
