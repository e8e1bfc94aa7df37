"""Training runs on real ranks, for tests: a small GPT under any dispatch."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rrfp.megatron.step_policy import StepPolicy
from rrfp.runtime.protocols import StepSummary
from rrfp.trace.records import Record, TaskRecord
from rrfp.train.checks import check_settings
from rrfp.train.launch.process_groups import Layout
from rrfp.train.settings import TrainSettings

SMALL: dict[str, Any] = {
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "seq_length": 32,
    "microbatches": 4,
    "steps": 3,
    "lr": 3e-3,
}


@dataclass(slots=True)
class RankRun:
    """What one rank saw of a run."""

    losses: list[float] = field(default_factory=list)
    heldout_losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    summaries: list[StepSummary | None] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    orders: list[list[int]] = field(default_factory=list)
    """Of a planned run: the order of entry of each step."""
    plans: list[dict[str, object] | None] = field(default_factory=list)
    """Likewise: how each order was chosen."""
    policies: list[StepPolicy] = field(default_factory=list)
    """What steered each step."""
    parameters_sha256: str = ""
    """Of this rank's parameters at the end."""

    def tasks(self) -> list[TaskRecord]:
        return [record for record in self.records if isinstance(record, TaskRecord)]


def train_variants(settings: dict[str, Any], variants: Sequence[dict[str, Any]]) -> list[RankRun]:
    """Train on this rank, from the start, once with each variant of the settings; runs in a
    process of its own."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from rrfp.train.launch.process_groups import parallel_groups

    chosen = [TrainSettings(**{**settings, **variant}) for variant in variants]
    with parallel_groups(chosen[0]) as layout:
        return [train_variant(variant, layout) for variant in chosen]


def train_natively(settings: dict[str, Any], num_runs: int = 1) -> list[RankRun]:
    """Train with Megatron's own schedule, a number of times over."""
    return train_variants(settings, [{"dispatch": "megatron"}] * num_runs)


def train_variant(settings: TrainSettings, layout: Layout) -> RankRun:
    """Train on this rank, from the start, in groups that it has joined."""
    from rrfp.train.data.open import open_data
    from rrfp.train.launch.process_groups import seed_random_states
    from rrfp.train.loop import Trainer, evaluation_of, schedule_of
    from rrfp.train.models.model import build_model
    from rrfp.train.pacing import pace_of
    from rrfp.train.planning import run_dealing, run_planner

    check_settings(settings)
    run = RankRun()
    seed_random_states(settings, layout)
    data = open_data(settings)
    batches = data.batches(layout.dp_rank)
    gpt = build_model(settings, layout, data)
    pace = pace_of(settings, layout)
    # By a number of simulations, so that steps of some milliseconds are planned as well.
    planner = run_planner(settings, run.records.append, pace, num_simulations=24)
    record = run.records.append if planner is None else planner.record
    schedule = schedule_of(settings, layout.pp_rank, record, pace=pace)
    trainer = Trainer(
        *(settings, layout, gpt, batches, schedule, run.records.append),
        planner=planner,
        dealing=run_dealing(settings, layout, data, pace),
    )
    evaluation = evaluation_of(settings, layout, gpt, data.heldout)
    for step in range(settings.num_steps):
        result = trainer.train_step(step)
        if evaluation is not None and evaluation.is_due(step):
            run.heldout_losses.append(evaluation.loss())
        if planner is not None:
            run.orders.append(list(planner.order_of_step))
            run.plans.append(planner.described())
        if (steering := getattr(schedule, "last_steering", None)) is not None:
            run.policies.append(steering)
        run.losses.append(result.loss)
        run.grad_norms.append(result.grad_norm)
        run.tokens.append(result.tokens)
        run.summaries.append(schedule.last_step)
    schedule.close()
    if planner is not None:
        planner.close()
    if evaluation is not None:
        evaluation.close()
    digest = hashlib.sha256()
    for chunk in gpt.chunks:
        for parameter in chunk.parameters():
            digest.update(parameter.detach().view(torch.uint8).numpy().tobytes())
    run.parameters_sha256 = digest.hexdigest()
    return run
