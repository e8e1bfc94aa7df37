"""The work of a rank for a row of `test_learns_the_same.py`: runs Megatron's own schedule and then
rrfp's on the same modules and data, and returns the results of each."""

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rrfp.megatron.pipeline import Pipeline
from rrfp.runtime.net import transport as factory
from rrfp.runtime.planes import host_planes, nixl
from rrfp.runtime.planes import outbox as outbox_module
from rrfp.runtime.planes.codec import flat
from rrfp.runtime.planes.outbox import Outbox
from rrfp.runtime.protocols import Compute
from rrfp.schedule.admission import balance_batch, equal_times, format_step, pyramid
from rrfp.schedule.hints import Order, format_order
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.train.data.batches import Batch, open_data
from rrfp.train.settings import TrainSettings
from tests.doubles.simulated_device import SimulatedDevice
from tests.megatron import multimodal
from tests.megatron import training as loops
from tests.megatron.training import (
    FirstRankKnows,
    Outcome,
    Rig,
    backwards_in_reverse,
    balance_losses,
    forget_balance_losses,
    masked,
    megatron_lm_step,
    native,
    ours,
    run_on_items,
    three_value_step,
    train_variant,
)

Settings = dict[str, Any]
"""Keywords of `TrainSettings`, or of one of rrfp's schedules."""

MEGATRON: Settings = {"dispatch": "megatron"}


@dataclass(frozen=True)
class Row:
    """A model and its training on a layout, and the schedules that must come to the same."""

    layout: str
    name: str
    work: Callable[..., list[Any]]
    """Takes a rank's layout, the settings and the schedules. Returns the reference's result on this
    rank, followed by each schedule's."""
    schedules: Sequence[Settings]
    settings: Settings = field(default_factory=dict)
    is_slow: bool = False
    needs: str = ""
    """A package of an extra."""

    @property
    def is_there(self) -> bool:
        return not self.needs or find_spec(self.needs) is not None

    @property
    def id(self) -> str:
        return f"{self.layout} {self.name}"


def learn(settings: Settings, rows: Sequence[Row]) -> dict[str, list[Any]]:
    """By row, what this rank comes to: all rows in one start of the layout's groups."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from rrfp.train.launch.process_groups import parallel_groups

    found = {}
    with parallel_groups(TrainSettings(**settings), timeout_s=120.0) as layout:
        for row in rows:
            try:
                found[row.id] = row.work(layout, {**settings, **row.settings}, row.schedules)
            except BaseException as error:
                error.add_note(f"in the row '{row.id}'")
                raise
    return found


# Orders that no hint's name gives.

REVERSE = "in reverse"
SHUFFLED = "shuffled"
"""A function that also takes a seed."""


def with_order_files(row: Row, settings: Settings, directory: Path) -> Row:
    """The row with files, made in `directory`, for such orders."""
    shape = TrainSettings(**{**settings, **row.settings}).shape

    def file_of(hint: str) -> str:
        name, _, seed = hint.partition(" ")
        path = directory / f"{row.id} {hint}.csv"
        if hint == REVERSE:
            return backwards_in_reverse(path, shape)
        if name == SHUFFLED:
            path.write_text(format_order(shuffled_order(shape, int(seed))), encoding="utf-8")
            return str(path)
        return hint

    schedules = [
        {**schedule, "hint": file_of(schedule["hint"])} if "hint" in schedule else schedule
        for schedule in row.schedules
    ]
    return replace(row, schedules=schedules)


def shuffled_order(shape: Shape, seed: int) -> Order:
    """All forwards in a random order of their microbatches, then all backwards in another."""
    forwards, backwards = (
        random.Random(f"{seed} {kind}").sample(
            range(shape.num_microbatches), shape.num_microbatches
        )
        for kind in "FB"
    )
    rows = (
        (
            *(Task(stage, Kind.F, microbatch) for microbatch in forwards),
            *(Task(stage, Kind.B, microbatch) for microbatch in backwards),
        )
        for stage in range(shape.num_stages)
    )
    return Order(SHUFFLED, shape, tuple(rows))


# Steps of a training.


@dataclass(frozen=True)
class Trained:
    """The results of a training on one rank."""

    losses: list[float]
    grad_norms: list[float]
    tokens: list[int]
    parameters_sha256: str
    backwards: list[int] = field(compare=False)
    """The microbatches of the first step's backwards, as ours ran them."""


def trained(layout: Any, settings: Settings, schedules: Sequence[Settings]) -> list[Trained]:
    """From the start by each schedule, with an optimizer."""
    return [_train(layout, settings, schedule) for schedule in (MEGATRON, *schedules)]


def trained_by_ours(
    layout: Any, settings: Settings, schedules: Sequence[Settings]
) -> list[Trained]:
    """The same where Megatron's own schedule differs, or does not go: the reference is `fb`."""
    return [_train(layout, settings, schedule) for schedule in ({"hint": "fb"}, *schedules)]


def _train(layout: Any, settings: Settings, schedule: Settings) -> Trained:
    chosen = TrainSettings(**{**settings, **schedule})
    run = train_variant(chosen, layout)
    assert len(run.losses) == chosen.num_steps
    assert run.losses[-1] != run.losses[0]
    backwards = [each for each in run.tasks() if each.step == 0 and each.kind == Kind.B]
    return Trained(
        run.losses,
        run.grad_norms,
        run.tokens,
        run.parameters_sha256,
        [task.microbatch for task in backwards],
    )


def overlapped(layout: Any, settings: Settings, schedules: Sequence[Settings]) -> list[Trained]:
    """With gradients reduced, and parameters gathered, by the hooks of Megatron's
    DistributedDataParallel while tasks run."""
    from megatron.core import distributed, optimizer

    # Over two ranks Megatron's own interleaving mixes up its messages.
    first = MEGATRON if layout.chunks == 1 else {"hint": "fb"}
    plain = _train(layout, settings, first)
    ddp_config = partial(
        distributed.DistributedDataParallelConfig,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        bucket_size=2000,
    )
    optimizer_config = partial(optimizer.OptimizerConfig, overlap_param_gather=True)
    with (
        patch.object(distributed, "DistributedDataParallelConfig", ddp_config),
        patch.object(optimizer, "OptimizerConfig", optimizer_config),
    ):
        found = [_train(layout, settings, schedule) for schedule in (first, *schedules)]
    # Other buckets give each rank another share of the sum that a norm is.
    assert found[0].losses == pytest.approx(plain.losses, rel=1e-5)
    assert found[0].grad_norms == pytest.approx(plain.grad_norms, rel=1e-5)
    # Each rank has its own share of the last parameters only: the rest is not gathered yet.
    assert found[0].parameters_sha256 != plain.parameters_sha256
    return found


# One step, by its losses and gradients.


def called(layout: Any, settings: Settings, schedules: Sequence[Settings]) -> list[Any]:
    """A step in all the ways in which a training loop may ask for one."""
    rig = Rig(settings, layout)
    own = [ours(**schedule) for schedule in schedules]
    found = [_call(rig, schedule, settings["microbatches"]) for schedule in (native(), *own)]
    for schedule in own:
        schedule.close()
    if layout.pp_rank == layout.last_stage_pp_rank:
        assert len(set(found[0]["evaluation"].losses)) == settings["microbatches"]
        gradients = {case: outcome.gradients_sha256 for case, outcome in found[0].items()}
        assert gradients["three values"] != gradients["per token"] != gradients["mean"]
    return found


def _call(rig: Rig, schedule: Callable[..., Any], num_microbatches: int) -> dict[str, Outcome]:
    run = partial(rig.run, schedule, num_microbatches=num_microbatches)
    config = rig.gpt.config
    found = {"mean": run(), "three values": run(three_value_step)}
    with torch.no_grad():
        found["evaluation"] = run(forward_only=True)
        found["first validation"] = run(forward_only=True, first_val_step=True)
        found["other data"] = run(non_loss_step, forward_only=True, collect_non_loss_data=True)
    with patch.object(config, "calculate_per_token_loss", True):
        found["per token"] = run(three_value_step)
    with patch.object(config, "deallocate_pipeline_outputs", False):
        found["kept outputs"] = run()
    if rig.layout.chunks > 1:
        return found
    with patch.object(config, "no_sync_func", None):
        found["no no_sync"] = run()
    if rig.layout.pp_rank in (0, rig.layout.pp - 1):
        found["no iterator"] = run(data_at_the_ends_step)
        found["not drawn from"] = run(data_at_the_ends_step)
    else:
        found["no iterator"] = rig.run(
            lambda **given: schedule(**{**given, "data_iterator": None}), data_at_the_ends_step
        )
        found["not drawn from"] = run(data_at_the_ends_step, data=iter(()))
    return found


def non_loss_step(data_iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def largest(losses: torch.Tensor, *, non_loss_data: bool) -> dict[str, torch.Tensor]:
        assert non_loss_data
        return {"loss": losses.max()}

    return output, largest


def data_at_the_ends_step(
    data_iterator: Iterator[Batch] | None, model: Any
) -> tuple[torch.Tensor, Any]:
    gpt = model.module
    if not (gpt.pre_process or gpt.post_process):
        return model(None, None, None), None
    assert data_iterator is not None
    return three_value_step(data_iterator, model)


def logged(
    layout: Any, settings: Settings, schedules: Sequence[Settings]
) -> list[tuple[Outcome, list[float]]]:
    """A step, with the auxiliary losses that it leaves to log."""
    rig = Rig(settings, layout)
    found = []
    own = [ours(**chosen) for chosen in schedules]
    for schedule in [native(), *own]:
        forget_balance_losses()
        outcome = rig.run(schedule)
        losses = balance_losses().values()
        found.append((outcome, [value for values, _ in losses for value in values.tolist()]))
    for schedule in own:
        schedule.close()
    assert any(found[0][1]) == ("experts" in settings)
    return found


def of_images(layout: Any, settings: Settings, schedules: Sequence[Settings]) -> list[Any]:
    """A step of the multimodal model, whose messages have shapes that vary."""
    rig = multimodal.Rig(settings, layout)
    own = [ours(**schedule) for schedule in schedules]
    found = [rig.step(schedule) for schedule in (native(), *own)]
    for schedule in own:
        schedule.close()
    assert len(found[0][1]) > 20 // max(1, layout.num_stages - 1)
    return found


# A loop's own data.


@dataclass(frozen=True)
class FromData:
    """The results of steps on a loop's data on one rank."""

    losses: list[list[float]]
    gradients: list[str]
    states: list[str]
    samples: list[int]
    """That were drawn, sorted."""
    drawn: list[int] = field(compare=False)
    """The same in the order in which they ran."""


def from_data(
    layout: Any, settings: Settings, schedules: Sequence[Settings], *, kind: str
) -> list[FromData]:
    """Steps on iterators that draw from the loop's random states; with `admit`, Megatron's schedule
    is given the items in that order."""
    rig = Rig(settings, layout)
    admits = "admit" in schedules[0]

    def arrange(items: list[Any]) -> list[Any]:
        order = pyramid([number_of(item) for item in items])
        return [items[number] for number in order]

    expected = _steps(loops.train(rig, native(), kind, arrange=arrange if admits else None))
    assert len(set(expected.states)) > 1
    found = []
    for schedule in schedules:
        cost = {"admit_cost": number_of} if admits else {}
        found.append(_steps(loops.train(rig, ours(**schedule, **cost), kind)))
        keeps_order = layout.chunks == 1 and not schedule["hint"].endswith(".csv")
        assert not keeps_order or found[-1].drawn == expected.drawn
    return [expected, *found]


def _steps(run: loops.Trained) -> FromData:
    return FromData(run.losses, run.gradients, run.states, sorted(run.drawn), run.drawn)


def number_of(item: Any) -> float:
    return float(item["number"])


def admitted(layout: Any, settings: Settings, schedules: Sequence[Settings]) -> list[Any]:
    """Run two steps and an evaluation. rrfp's schedules admit the items in another order than they
    come in; Megatron's schedule gets its data in that order, on each rank with data."""
    rig = Rig(settings, layout)
    items = list(rig.data(loops.NUM))
    order = pyramid([batch["tokens"].numel() for batch in items])
    assert order != list(range(loops.NUM))
    given = run_on_items(rig, native(), items)
    expected = run_on_items(rig, native(), [items[number] for number in order])
    assert given.gradients_sha256 != expected.gradients_sha256
    assert sorted(given.losses) == sorted(expected.losses)
    found: list[Any] = [[expected, expected, given.losses] * 2]
    for chosen in schedules:
        # Every rank finds other numbers, but those of the replica's first rank count.
        cost = {"admit_cost": FirstRankKnows(layout)} if "hint" not in chosen else {}
        schedule = ours(admit="pyramid", **chosen, **cost)
        found.append([])
        for step in (three_value_step, megatron_lm_step):
            found[-1] += [run_on_items(rig, schedule, items, step) for _ in range(2)]
            with torch.no_grad():
                looked = run_on_items(rig, schedule, items, step, forward_only=True)
            found[-1].append(looked.losses)
        schedule.close()
    return found


def balanced(layout: Any, settings: Settings, schedules: Sequence[Settings]) -> list[Any]:
    """A step, twice, of items that ours deal to the replicas; Megatron's schedule is given what
    each of them gets."""
    return _balanced(Rig(settings, layout), layout, settings, schedules)


def balanced_by_tokens(layout: Any, settings: Settings, schedules: Sequence[Settings]) -> list[Any]:
    """Likewise, where gradients are scaled by the tokens of all replicas."""
    rig = Rig(settings, layout)
    with patch.object(rig.gpt.config, "calculate_per_token_loss", True):
        return _balanced(rig, layout, settings, schedules)


def _balanced(
    rig: Rig, layout: Any, settings: Settings, schedules: Sequence[Settings]
) -> list[Any]:
    data = open_data(TrainSettings(**settings))
    given = [[*masked(data.batches(replica), loops.NUM)] for replica in range(layout.dp)]
    items = [item for of_replica in given for item in of_replica]
    weights = [float(item["tokens"].numel()) for item in items]
    hands = [
        [hand[index] for index in pyramid([weights[number] for number in hand])]
        for hand in balance_batch(equal_times(weights, layout.pp), layout.dp)
    ]
    own = hands[layout.dp_rank]
    assert {number // loops.NUM for number in own} == {*range(layout.dp)}
    undealt = run_on_items(rig, native(), given[layout.dp_rank])
    expected = run_on_items(rig, native(), [items[number] for number in own])
    assert undealt.gradients_sha256 != expected.gradients_sha256
    found: list[Any] = [[expected, expected, undealt.losses] * 2]
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write(format_step(hands))
        file.flush()
        for chosen in schedules:
            listed = {"admit_across": file.name}
            by_cost = {"admit_across": "replicas", "admit": "pyramid"}
            schedule = ours(**(listed if "hint" not in chosen else by_cost), **chosen)
            found.append([])
            for step in (three_value_step, megatron_lm_step):
                found[-1] += [
                    run_on_items(rig, schedule, given[layout.dp_rank], step) for _ in range(2)
                ]
                with torch.no_grad():
                    looked = run_on_items(
                        rig, schedule, given[layout.dp_rank], step, forward_only=True
                    )
                found[-1].append(looked.losses)
            schedule.close()
    return found


# Steps whose messages all go by a data plane.


def over_planes(layout: Any, settings: Settings, schedules: Sequence[Settings]) -> list[Trained]:
    """As `trained`, with small messages in the outbox as well."""
    CountingOutbox.num_staged = 0
    with (
        patch.object(outbox_module, "LEAST_STAGED_BYTES", 1),
        patch.object(host_planes, "Outbox", CountingOutbox),
        patch.object(nixl, "Outbox", CountingOutbox),
    ):
        found = trained(layout, settings, schedules)
    # A middle stage sends both ways.
    num_ways = 1 if layout.pp_rank in (0, layout.last_stage_pp_rank) else 2
    num_steps = TrainSettings(**settings).num_steps
    assert CountingOutbox.num_staged == (
        num_ways * num_steps * settings["microbatches"] * len(schedules)
    )
    return found


class CountingOutbox(Outbox):
    """Knows how many messages went by outboxes."""

    num_staged = 0

    def stage(self, *staged: Any) -> None:
        CountingOutbox.num_staged += 1
        super().stage(*staged)


def on_simulated_device(
    layout: Any, settings: Settings, schedules: Sequence[Settings]
) -> list[Trained]:
    """As `trained`, by ours on a device on which everything is late."""
    devices: list[SimulatedDevice] = []

    def device(_: torch.device) -> SimulatedDevice:
        devices.append(SimulatedDevice(layout.rank))
        return devices[-1]

    run_step = Pipeline.run_step

    def run_step_late(
        self: Pipeline, step: int, steering: Any, memory: Any, compute: Compute, pace: Any
    ) -> Any:
        return run_step(self, step, steering, memory, LateCompute(compute, devices[-1]), pace)

    try:
        with (
            patch.dict(factory.DEVICES, cpu=device),
            patch.object(Pipeline, "run_step", run_step_late),
        ):
            return trained(layout, settings, schedules)
    finally:
        for each in devices:
            each.close()


class LateCompute:
    """Runs tasks on the host, with outputs that come into being late, on the compute stream."""

    def __init__(self, compute: Compute, device: SimulatedDevice) -> None:
        self._compute = compute
        self._device = device

    def run(
        self, task: Task, inputs: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        device = self._device
        stream = device.compute_stream()
        # A kernel runs after what its stream has been given before.
        device.synchronize(device.record(stream))
        late: list[torch.Tensor | None] = []
        for output in self._compute.run(task, inputs):
            if output is None:
                late.append(None)
                continue
            source = output.detach().contiguous()
            target = device.empty(source.shape, source.dtype, stream)
            device.copy(flat(target), flat(source), stream)
            device.launch(lambda kept=source: None, stream)  # type: ignore[misc] # kept until then
            late.append(target)
        return tuple(late)

    @property
    def held_bytes(self) -> int:
        return self._compute.held_bytes

    @property
    def waiting_gradient_bytes(self) -> int:
        return self._compute.waiting_gradient_bytes
