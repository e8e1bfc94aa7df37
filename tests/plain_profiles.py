"""Pipelines under torch.profiler and nothing of ours, with the times that a hook took."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

NUM_RANKS = 4
MICROBATCHES = 8
STEPS = 2
WIDTH = 256


@dataclass(slots=True)
class PlainRun:
    """What one rank recorded."""

    profile: dict[str, Any]
    truth: list[tuple[int, int, int, str, int | None, int | None]]
    """Of each task: start and end in ns since 1970, step, kind, and stage and microbatch where the
    hook knows them."""


def profile_pipelining(name: str, num_chunks: int, with_stack: bool) -> PlainRun:
    """A small MLP under one of torch.distributed.pipelining's schedules, on gloo."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, schedules

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, num_stages = dist.get_rank(), NUM_RANKS * num_chunks
    is_v = name == "ScheduleZBVZeroBubble"
    held = [chunk * NUM_RANKS + rank for chunk in range(num_chunks)]
    held = [rank, num_stages - 1 - rank] if is_v else held
    stages = [
        PipelineStage(
            torch.nn.Sequential(*(_layer() for _ in range(4))),
            index,
            num_stages,
            torch.device("cpu"),
        )
        for index in held
    ]
    run = PlainRun({}, [])
    step = 0

    def noted(function: Any, letter: str, stage: int) -> Any:
        def call(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            start_ns = time.time_ns()
            result = function(microbatch, *args, **kwargs)
            run.truth.append((start_ns, time.time_ns(), step, letter, stage, microbatch))
            return result

        return call

    for stage in stages:
        of: Any = stage
        of.forward_one_chunk = noted(of.forward_one_chunk, "F", of.stage_index)
        of.backward_one_chunk = noted(of.backward_one_chunk, "B", of.stage_index)
        of.backward_weight_one_chunk = noted(of.backward_weight_one_chunk, "W", of.stage_index)
    schedule = getattr(schedules, name)(
        stages if num_chunks > 1 else stages[0],
        MICROBATCHES,
        loss_fn=torch.nn.functional.mse_loss,
    )
    data = torch.randn(MICROBATCHES * 64, WIDTH)
    inputs = (data,) if rank == 0 else ()
    is_last = num_stages - 1 in held

    def train() -> None:
        schedule.step(*inputs, **({"target": data, "losses": []} if is_last else {}))

    train()
    run.truth.clear()
    with _profiler(with_stack) as profiler:
        for step in range(STEPS):  # noqa: B007 (the hook reads it)
            train()
            profiler.step()
    run.profile = _exported(profiler)
    dist.destroy_process_group()
    return run


def _layer() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())


def profile_megatron(settings: dict[str, Any], with_stack: bool) -> PlainRun:
    """Megatron's own schedule, on the CPU."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from megatron.core.pipeline_parallel import schedules

    from rrfp.train.data.open import open_data
    from rrfp.train.launch.process_groups import parallel_groups, seed_random_states
    from rrfp.train.loop import Trainer
    from rrfp.train.models.model import build_model
    from rrfp.train.settings import TrainSettings
    from tests.training import SMALL

    torch.set_num_threads(1)
    run = PlainRun({}, [])
    step = 0

    def noted(function: Callable[..., Any], letter: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start_ns = time.time_ns()
            result = function(*args, **kwargs)
            run.truth.append((start_ns, time.time_ns(), step, letter, None, None))
            return result

        return call

    own: Any = schedules
    own.forward_step = noted(own.forward_step, "F")
    own.backward_step = noted(own.backward_step, "B")
    chosen = TrainSettings(**{**SMALL, **settings, "steps": 1 + STEPS})
    with parallel_groups(chosen) as layout:
        seed_random_states(chosen, layout)
        data = open_data(chosen)
        gpt = build_model(chosen, layout, data)
        schedule = schedules.get_forward_backward_func()
        batches = data.batches(layout.dp_rank)
        trainer = Trainer(chosen, layout, gpt, batches, schedule, lambda _: None)
        trainer.train_step(0)
        run.truth.clear()
        with _profiler(with_stack) as profiler:
            for step in range(STEPS):
                trainer.train_step(1 + step)
                profiler.step()
        run.profile = _exported(profiler)
    return run


def _profiler(with_stack: bool) -> Any:
    activities = [torch.profiler.ProfilerActivity.CPU]
    return torch.profiler.profile(activities=activities, with_stack=with_stack)


def _exported(profiler: Any) -> dict[str, Any]:
    path = Path(f"profile-{os.getpid()}.json").absolute()
    try:
        profiler.export_chrome_trace(str(path))
        profile: dict[str, Any] = json.loads(path.read_bytes())
    finally:
        path.unlink(missing_ok=True)
    return profile
