"""Training runs on real ranks, for tests: a small GPT under any dispatch."""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from rrfp.megatron.settings import DispatchSettings
from rrfp.runtime.protocols import StepSummary
from rrfp.schedule.admission import Admit
from rrfp.schedule.rehearsal import StepPolicy
from rrfp.schedule.shape import Shape
from rrfp.trace.records import Record, TaskRecord
from rrfp.train.checks import check_settings
from rrfp.train.data.batches import Batch, Batches
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
    """The results of a run on one rank."""

    losses: list[float] = field(default_factory=list)
    heldout_losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    summaries: list[StepSummary | None] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    orders: list[list[int]] = field(default_factory=list)
    """The order of entry of each step, if it was planned."""
    plans: list[dict[str, object] | None] = field(default_factory=list)
    """Likewise: how each order was chosen."""
    policies: list[StepPolicy] = field(default_factory=list)
    """The policy of each step."""
    parameters_sha256: str = ""
    """A digest of this rank's final parameters."""

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
    from rrfp.train.data.batches import open_data
    from rrfp.train.launch.process_groups import seed_random_states
    from rrfp.train.loop import Trainer, evaluation_of, schedule_of
    from rrfp.train.models.model import build_model
    from rrfp.train.ordered_batches import OrderedBatches
    from rrfp.train.pacing import pace_of

    check_settings(settings)
    run = RankRun()
    seed_random_states(settings, layout)
    data = open_data(settings)
    gpt = build_model(settings, layout, data)
    pace = pace_of(settings, layout)
    # By a number of simulations, so that steps of some milliseconds are planned as well.
    batches = OrderedBatches(settings, layout, data, run.records.append, pace, 24)
    schedule = schedule_of(settings, layout.pp_rank, batches.record, pace=pace)
    trainer = Trainer(settings, layout, gpt, batches, schedule, run.records.append)
    evaluation = evaluation_of(settings, layout, gpt, data.heldout)
    for step in range(settings.num_steps):
        result = trainer.train_step(step)
        if evaluation is not None and evaluation.is_due(step):
            run.heldout_losses.append(evaluation.loss())
        if settings.step.admit == Admit.PLAN:
            run.orders.append(list(batches.order))
            run.plans.append(batches.plan_figures())
        assert schedule.report is not None
        if schedule.report.policy is not None:
            run.policies.append(schedule.report.policy)
        run.losses.append(result.loss)
        run.grad_norms.append(result.grad_norm)
        run.tokens.append(result.tokens)
        run.summaries.append(schedule.report.summary)
    schedule.close()
    batches.close()
    if evaluation is not None:
        evaluation.close()
    digest = hashlib.sha256()
    for chunk in gpt.chunks:
        for parameter in chunk.parameters():
            digest.update(parameter.detach().view(torch.uint8).numpy().tobytes())
    run.parameters_sha256 = digest.hexdigest()
    return run


# Megatron's own sums of the losses of experts, wherever the installed release keeps them.


def balance_losses() -> dict[str, tuple[torch.Tensor, Any]]:
    """By name: a vector by layer, and the group to reduce it in."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # up to 0.17
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        found = get_moe_layer_wise_logging_tracker()
        return {name: (each["values"], each["reduce_group"]) for name, each in found.items()}
    metrics = get_moe_metrics_tracker().metrics
    return {name: (each.values, each.reduce_group) for name, each in metrics.items()}


def forget_balance_losses() -> None:
    """As before the first step."""
    try:
        from megatron.core.transformer.moe import moe_logging
    except ImportError:
        from megatron.core.transformer.moe import moe_utils

        moe_utils._MOE_LAYER_WISE_LOGGING_TRACKER.clear()
    else:
        moe_logging.destroy_moe_metrics_tracker()


# One rank's part of a small GPT, run for a step by Megatron's schedule or by ours.


MICROBATCHES = 4

TIMEOUT_S = 300.0
"""Many steps on several ranks, on a machine that may be busy."""


class Outcome(NamedTuple):
    """The results of a step on one rank."""

    losses: list[float]
    gradients_sha256: str


def backwards_in_reverse(path: Path, shape: Shape) -> str:
    """An order file that takes the microbatches from the last to the first."""
    microbatches = range(shape.num_microbatches - 1, -1, -1)

    def row(rank: int) -> list[str]:
        stages = shape.stages_of(rank)
        forwards = [f"{stage}F{microbatch}" for stage in stages for microbatch in microbatches]
        stages = stages[::-1]
        return forwards + [f"{stage}B{index}" for stage in stages for index in microbatches]

    rows = (",".join(row(rank)) for rank in range(shape.num_ranks))
    path.write_text("\n".join(rows), encoding="utf-8")
    return str(path)


class Rig:
    """One rank's chunks of a small GPT, their data, and their place."""

    def __init__(self, settings: dict[str, Any], layout: Any) -> None:
        from rrfp.train.data.batches import open_data
        from rrfp.train.models.model import build_model

        chosen = TrainSettings(**settings)
        data = open_data(chosen)
        self.layout = layout
        self.batches = data.batches(layout.dp_rank)
        self.gpt = build_model(chosen, layout, data)

    def run(
        self,
        schedule: Callable[..., list[Any]],
        forward_step: Callable[..., Any] | None = None,
        *,
        num_microbatches: int = MICROBATCHES,
        data: Iterator[Any] | None = None,
        **arguments: Any,
    ) -> Outcome:
        """One step from empty gradients; the parameters stay as they are."""
        from rrfp.train.models.gpt import forward_step as mean_loss_step

        chunks = self.gpt.chunks
        for chunk in chunks:
            chunk.zero_grad_buffer()
        reduced = schedule(
            forward_step_func=forward_step or mean_loss_step,
            data_iterator=[data or self.data(num_microbatches) for _ in chunks],
            model=chunks,
            num_microbatches=num_microbatches,
            seq_length=SMALL["seq_length"],
            micro_batch_size=1,
            **arguments,
        )
        digest = hashlib.sha256()
        for chunk in chunks:
            for parameter in chunk.parameters():
                digest.update(parameter.main_grad.numpy().tobytes())
        return Outcome([item["loss"].item() for item in reduced], digest.hexdigest())

    def gradients(self) -> dict[str, str]:
        """Digests of this rank's gradients by the parameters' names in the whole model."""
        found = {}
        for chunk in self.gpt.chunks:
            gpt = chunk.module
            numbers = [layer.layer_number - 1 for layer in gpt.decoder.layers]
            for name, parameter in gpt.named_parameters():
                if name.startswith("decoder.layers."):
                    _, _, index, rest = name.split(".", 3)
                    name = f"layer {numbers[int(index)]} {rest}"
                found[name] = hashlib.sha256(parameter.main_grad.numpy().tobytes()).hexdigest()
        return found

    def data(self, num_microbatches: int) -> Iterator[Batch]:
        """Batches of which each masks a few more labels than the one before."""
        return masked(self.batches, num_microbatches)


def masked(batches: Batches, num_microbatches: int) -> Iterator[Batch]:
    for index in range(num_microbatches):
        batch = batches.batch(0, index)
        batch["loss_mask"][:, : 3 * (index % 8)] = 0
        yield batch


def on_rigs(work: Callable[..., Any], settings: dict[str, Any], *args: object) -> Any:
    """Run `work(layout, *args)` on this rank, in Megatron's groups."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from rrfp.train.launch.process_groups import parallel_groups

    with parallel_groups(TrainSettings(**settings), timeout_s=120.0) as layout:
        return work(layout, settings, *args)


def native() -> Callable[..., list[Any]]:
    from megatron.core.pipeline_parallel import schedules

    function: Callable[..., list[Any]] = schedules.get_forward_backward_func()
    return function


def ours(**settings: Any) -> Any:
    from rrfp.megatron.dropin import get_forward_backward_func

    return get_forward_backward_func(settings=DispatchSettings(**settings))


def three_value_step(data_iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total = (losses * batch["loss_mask"]).sum()
        return total, batch["loss_mask"].sum().int(), {"loss": total.detach().clone()}

    return output, loss


# Training loops' own data on one rank: loaders that draw from the loop's random states, and items
# in hand that reach the model as Megatron-LM hands them on.


NUM = 6
NUM_STEPS = 2
NUM_SAMPLES = 8
"""Fewer items than the steps take: the loader restarts within a step."""


class Trained(NamedTuple):
    """The results of some steps on one rank."""

    losses: list[list[float]]
    gradients: list[str]
    drawn: list[int]
    """The samples in the order in which they were drawn."""
    states: list[str]
    """The digest of the loop's random states after each step."""


class Samples:
    """A dataset whose samples are known by their numbers."""

    def __init__(self, rig: Rig) -> None:
        self._items = []
        for number in range(NUM_SAMPLES):
            batch = rig.batches.batch(0, number)
            batch["loss_mask"][:, : 3 * number] = 0
            self._items.append({**batch, "number": number})

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self._items[number]


def shuffled(samples: Samples, num_workers: int = 0) -> Iterator[Any]:
    """A loader that shuffles by the loop's own random state, epoch after epoch."""
    loader: Any = DataLoader(
        samples,  # type: ignore[arg-type]
        batch_size=None,
        shuffle=True,
        num_workers=num_workers,
    )
    while True:
        yield from loader


def of_workers(samples: Samples) -> Iterator[Any]:
    return shuffled(samples, num_workers=1)


def of_generators(samples: Samples) -> Iterator[Any]:
    """Draws from Python's, numpy's and torch's generators, for each item."""
    while True:
        number = random.randrange(3) + np.random.randint(3) + int(torch.randint(4, ()))
        yield samples[number % NUM_SAMPLES]


KINDS: dict[str, Callable[[Samples], Iterator[Any]]] = {
    each.__name__: each for each in (shuffled, of_workers, of_generators)
}


def set_off() -> None:
    """The same random states on every rank, as loops seed them; Megatron's tracker, too."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)


def states() -> str:
    numpys: Any = np.random.get_state()
    found = (random.getstate(), numpys[1].tobytes(), numpys[2:], torch.get_rng_state().tolist())
    return hashlib.sha256(repr(found).encode()).hexdigest()


class Saved(NamedTuple):
    """The random states in a checkpoint."""

    python: Any
    numpy: Any
    torch: torch.Tensor
    named: dict[str, torch.Tensor]  # pyright: ignore[reportInvalidTypeForm]

    @classmethod
    def now(cls) -> "Saved":
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        named = {name: s.clone() for name, s in get_cuda_rng_tracker().get_states().items()}
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), named)

    def restore(self) -> None:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        get_cuda_rng_tracker().set_states(dict(self.named))


class Loop:
    """A training loop on one rank, with iterators of its own for every chunk."""

    def __init__(self, rig: Rig, schedule: Callable[..., list[Any]], kind: str) -> None:
        self._rig = rig
        self._schedule = schedule
        samples = Samples(rig)
        self.iterators = [KINDS[kind](samples) for _ in rig.gpt.chunks]
        self.found = Trained([], [], [], [])

    def step(self, arrange: Callable[[list[Any]], list[Any]] | None = None) -> None:
        """One step; `arrange` puts its items in another order."""
        iterators: list[Any] = list(self.iterators)
        if arrange is not None:
            iterators = [iter(arrange([next(each) for _ in range(NUM)])) for each in self.iterators]

        def with_data(**given: Any) -> list[Any]:
            return self._schedule(**{**given, "data_iterator": iterators})

        def forward_step(data_iterator: Iterator[Any], model: Any) -> Any:
            item = next(data_iterator)
            self.found.drawn.append(item["number"])
            return three_value_step(iter([item]), model)

        outcome = self._rig.run(with_data, forward_step, num_microbatches=NUM)
        self.found.losses.append(outcome.losses)
        self.found.gradients.append(outcome.gradients_sha256)
        self.found.states.append(states())


def train(rig: Rig, schedule: Callable[..., Any], kind: str, **arrangement: Any) -> Trained:
    set_off()
    loop = Loop(rig, schedule, kind)
    for _ in range(NUM_STEPS):
        loop.step(**arrangement)
    if hasattr(schedule, "close"):
        schedule.close()
    return loop.found


# Items in hand.


def run_on_items(
    rig: Rig,
    schedule: Callable[..., list[Any]],
    items: Sequence[Any],
    step: Callable[..., Any] = three_value_step,
    **arguments: Any,
) -> Outcome:
    """A step on iterators of their own for every chunk, where this rank is given data at all."""
    layout = rig.layout
    is_given = step is not megatron_lm_step or (
        layout.pp_rank in (0, layout.last_stage_pp_rank) and layout.tp_rank == 0
    )

    def called(**given: Any) -> list[Any]:
        iterators = [iter(items) if is_given else None for _ in rig.gpt.chunks]
        return schedule(**{**given, "data_iterator": iterators, **arguments})

    return rig.run(called, step, num_microbatches=NUM)


def megatron_lm_step(data_iterator: Iterator[Batch] | None, model: Any) -> tuple[torch.Tensor, Any]:
    """As in Megatron-LM: the first and the last stage have data, on the first rank of a
    tensor-parallel group, which tells the others."""
    from megatron.core import parallel_state

    if not (model.module.pre_process or model.module.post_process):
        return model(None, None, None), None
    group = parallel_state.get_tensor_model_parallel_group()
    told: list[Any] = [None if data_iterator is None else next(data_iterator)]
    dist.broadcast_object_list(told, dist.get_global_rank(group, 0), group=group)
    return three_value_step(iter(told), model)


class FirstRankKnows:
    """A cost that only the first rank of a replica tells rightly."""

    def __init__(self, layout: Any) -> None:
        self._knows = layout.pp_rank == layout.tp_rank == 0

    def __call__(self, item: Batch) -> torch.Tensor:
        return torch.tensor(item["tokens"].numel() if self._knows else 0)
