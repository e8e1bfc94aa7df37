"""One system of a race on one rank: its schedule, on a model shared with others, paced for each
round."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch

from rrfp.errors import UsageError
from rrfp.inputs.text_files import sha256_of
from rrfp.megatron.dropin import ForwardBackward
from rrfp.megatron.native.schedule import NativeSchedule
from rrfp.race.entries import Entry
from rrfp.race.gradient_check import Gradients, gradients
from rrfp.race.peer_schedule import PeerSchedule
from rrfp.race.peers import PEERS, Project
from rrfp.replay.cost_files import costs_file, resolve_costs
from rrfp.runtime.pace import StepPace
from rrfp.schedule.admission import Admit
from rrfp.schedule.causes import Cause
from rrfp.schedule.hints.hint import kinds_of
from rrfp.schedule.patience.setting import IMPATIENT
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.shape import Shape
from rrfp.schedule.sizes import Sizes
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.conditions import conditions
from rrfp.simulate.costs.model import Costs
from rrfp.simulate.costs.scaled import ScaledCosts
from rrfp.simulate.jitter import parse_jitter
from rrfp.simulate.plan.search import NUM_SIMULATIONS
from rrfp.trace.records import NS_PER_S, Record, TaskRecord, WaitRecord
from rrfp.train.admission import run_planner
from rrfp.train.data.batches import Batch, Data
from rrfp.train.models.model import ModelChunks
from rrfp.train.pacing import StepPacer, make_pace
from rrfp.train.rank import schedule_of
from rrfp.train.ranks.parallel import Layout, virtual_pipeline_size
from rrfp.train.settings import TrainSettings
from rrfp.train.training import run_schedule

_PATIENCE_S = 120.0
"""How much longer a turn may take than some multiple of its modelled work."""
_PATIENCE_FACTOR = 4


class _AtOnce:
    """The pace of a step that is not paced: it adds no time."""

    def task(self, task: Task) -> AbstractContextManager[None]:
        return nullcontext()

    def left_ns(self, task: Task, work_ns: int) -> int:
        return 0

    def worked(self, task: Task, worked_ns: int) -> None:
        pass

    def expected_ns(self, task: Task) -> None:
        return None

    def message_ns(self, task: Task) -> int:
        return 0


class _RoundPace:
    """The pace of the current round, whatever number the schedule itself gives the step."""

    def __init__(self, pacer: StepPacer) -> None:
        self.pacer = pacer
        self.round: int | None = None
        """The round; None: the step is not paced."""

    def sizes(self, step: int, shape: Shape) -> Sizes | None:
        return self.pacer.sizes(self.round or 0, shape)

    def start_step(self, step: int, shape: Shape) -> StepPace:
        return _AtOnce() if self.round is None else self.pacer.start_step(self.round, shape)


class _NoItems:
    """The `StepItems` of a race, whose costs are modelled."""

    def items(self) -> Sequence[Batch]:
        return ()

    def next_items(self) -> Sequence[Batch] | None:
        return None


class _Records:
    """Keeps the tasks and waits of a step; schedules record them from several threads."""

    def __init__(self) -> None:
        self._records: list[WaitRecord] = []
        self._tasks: list[TaskRecord] = []

    def record(self, record: Record) -> None:
        if isinstance(record, WaitRecord):
            self._records.append(record)
        elif isinstance(record, TaskRecord):
            self._tasks.append(record)

    def take_peak_bytes(self, sizes: Sizes, kinds: Sequence[Kind]) -> int:
        """The most bytes held at once in the tasks since the last call, by these sizes of the
        rank's chunks: the same count for every system, whoever decided."""
        tasks, self._tasks = self._tasks, []
        held = peak = 0
        for task in sorted(tasks):
            size = sizes.kept[task.chunk][task.microbatch]
            owed = 0
            if Kind.W in kinds:
                owed = size if sizes.owed is None else sizes.owed[task.chunk][task.microbatch]
            match task.kind:
                case Kind.F:
                    held += size
                case Kind.B:
                    held -= size - owed
                case _:
                    held -= owed
            peak = max(peak, held)
        return peak

    def forget(self) -> None:
        self._records, self._tasks = [], []

    def take_ns(self) -> tuple[int, int]:
        """Time in coordination, and in all other waits, since the last call."""
        records, self._records = self._records, []
        coordination_ns = blocking_ns = 0
        for record in records:
            if record.cause is Cause.COORDINATION:
                coordination_ns += record.end_ns - record.start_ns
            else:
                blocking_ns += record.end_ns - record.start_ns
        return coordination_ns, blocking_ns


class RacedSystem:
    """An entry on this rank: its model, its schedule and its pace."""

    def __init__(self, entry: Entry, layout: Layout, model: ModelChunks, data: Data) -> None:
        settings = entry.settings
        self.layout = layout
        self.settings = settings
        self._records = _Records()
        self._model = model
        self._batches = data.batches(layout.dp_rank)
        assert settings.run.pace is not None
        _check_costs(settings.run.pace, entry.costs_sha256)
        self._jitter = parse_jitter(settings.run.jitter)
        self._costs: Costs = ScaledCosts(resolve_costs(settings.run.pace), entry.time_factor)
        pacer = make_pace(
            self._costs,
            self._jitter,
            Admit(settings.policy.admit),
            settings.run.seed,
            _shape_of(entry),
            layout.pp_rank,
            layout.dp_rank,
        )
        assert pacer is not None
        self._pace = _RoundPace(pacer)
        # The leader of a group decides ahead, based on how long its tasks took so far, and patience
        # follows from how punctual announcements were.
        self._learns_times = settings.policy.dispatch == Dispatch.READY and (
            settings.layout.tp > 1 or settings.policy.patience != IMPATIENT
        )
        self._schedule: NativeSchedule | ForwardBackward | PeerSchedule
        if entry.peer is not None:
            self._schedule = kind_of(entry.peer)(
                entry.peer, model, layout, self._records.record, pace=self._pace
            )
        else:
            self._schedule = schedule_of(
                settings, layout.pp_rank, self._records.record, pace=self._pace
            )
        self._is_warm = False
        self._planner = run_planner(settings, self._records.record, pacer, NUM_SIMULATIONS)
        self._planned: dict[int, Sequence[int]] = {}
        """By round: its planned order."""

    def prepare(self, number: int) -> None:
        """Draw the round's pace, before its step begins."""
        self._pace.pacer.prepare(number)

    def batches(self, number: int) -> list[Batch]:
        """The round's microbatches, in admission order. A planned order is that of the model, and
        the next round's is planned while this one is raced."""
        if self._planner is None:
            order = self._pace.pacer.order(number)
        else:
            if number not in self._planned:
                self._planned = {number: self._planner.order(number, _NoItems())}
            order = self._planned[number]
            self._pace.pacer.admit_as(number, order)
        return [self._batches.batch(number, microbatch) for microbatch in order]

    def warm_up(self, number: int) -> None:
        """Run the round's step once, so that links are open and all systems find equally warm
        caches. After the first time, only as many microbatches as there are ranks, unless the
        schedule is built for their number. A schedule that learns task times runs paced."""
        batches = self.batches(number)
        if self._learns_times:
            self.step(batches, number)
        elif self._is_warm and not isinstance(self._schedule, PeerSchedule):
            self.step(batches[: self.layout.pp])
        else:
            self.step(batches)
        self._is_warm = True
        self.forget()

    def step(self, batches: Sequence[Batch], number: int | None = None) -> None:
        """Run a step, paced for round `number` if given; its gradients are added to those
        present."""
        self._pace.round = number
        with chunks_of(self.settings):
            if isinstance(self._schedule, PeerSchedule):
                self._schedule.run(number or 0, batches)
                return
            run_schedule(self._schedule, self.settings, self._model, batches)

    def most_s(self, number: int) -> float:
        """More than a round's turn takes unless it is stuck: a multiple of all its work and
        messages one after another, because jitter adds to them."""
        settings = self.settings
        met = conditions(
            self._costs,
            self._jitter,
            Admit(settings.policy.admit),
            settings.shape,
            settings.run.seed + number,
            self.layout.dp_rank,
            number,
        )
        times, shape = met.times, met.shape
        rows = (*times.forward, *times.input_gradient, *times.weight_gradient)
        # Both directions of every link; a message's time depends only on link and microbatch.
        messages_ns = sum(
            met.links(rank, other, Task(0, Kind.F, microbatch))
            for rank in range(shape.num_ranks)
            for other in (rank - 1, rank + 1)
            for microbatch in range(shape.num_microbatches)
        )
        work_ns = sum(map(sum, rows)) + shape.num_chunks * messages_ns
        stopped_ns = sum(stop.until_ns for stop in self._jitter.stops)
        return _PATIENCE_S + (_PATIENCE_FACTOR * work_ns + stopped_ns) / NS_PER_S

    def gradients(self) -> Gradients:
        return gradients(self._model.chunks, self.settings, self.layout)

    def forget(self) -> None:
        """Clear the gradients and what was recorded."""
        for chunk in self._model.chunks:
            chunk.zero_grad_buffer()
        self._model.optimizer.zero_grad()
        self._records.forget()

    def figures(self, offset_ns: int) -> torch.Tensor:
        """The figures of the last step on this rank, as `rrfp.race.rank` reads them."""
        summary = self._schedule.last_step
        assert summary is not None
        tally = self._pace.pacer.tally
        coordination_ns, blocking_ns = self._records.take_ns()
        return torch.tensor(
            [
                summary.start_ns + offset_ns,
                summary.end_ns + offset_ns,
                summary.busy_ns,
                blocking_ns,
                coordination_ns,
                summary.peak_held,
                tally.num_tasks,
                tally.num_over,
                self._peak_bytes(),
            ],
            # Float64 represents nanoseconds exactly for the first hundred days after a host's boot.
            dtype=torch.float64,
        )

    def _peak_bytes(self) -> int:
        """The most bytes that this rank held in the last round; -1 where sizes are not known."""
        shape = self._pace.pacer.shape
        sizes = self._pace.sizes(self._pace.round or 0, shape)
        return -1 if sizes is None else self._records.take_peak_bytes(sizes, shape.kinds)

    def rest(self) -> None:
        """Release what would disturb other systems."""
        if isinstance(self._schedule, ForwardBackward | PeerSchedule):
            self._schedule.close()


def _check_costs(pace: str, sha256: str | None) -> None:
    """Raise UsageError if the costs here differ from those of the host that prepared the race."""
    file = costs_file(pace)
    if file is not None and sha256_of(file) != sha256:
        raise UsageError(
            f"the costs {pace} on {socket.gethostname()} are not those that the race was prepared "
            "with; use the same file, unchanged, on all hosts"
        )


def kind_of(peer: str) -> type[PeerSchedule]:
    """What runs a peer. Imports its project, which only its own races need."""
    if PEERS[peer].project is Project.DEEPSPEED:
        from rrfp.race.deepspeed_schedule import DeepSpeedSchedule

        return DeepSpeedSchedule
    from rrfp.race.torch_schedule import TorchSchedule

    return TorchSchedule


def _shape_of(entry: Entry) -> Shape:
    """The shape of an entry's step, with its kinds of task."""
    settings = entry.settings
    shape = settings.shape
    if entry.peer is not None:
        return PEERS[entry.peer].shape(settings.layout.pp, settings.data.microbatches)
    return replace(shape, kinds=kinds_of(settings.hint.on(shape)))


@contextmanager
def chunks_of(settings: TrainSettings) -> Iterator[None]:
    """Set, for the block, the number of chunks per rank, which Megatron keeps globally."""
    from megatron.core import parallel_state

    size = virtual_pipeline_size(settings)
    before = (
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_rank(),
    )
    _set_chunks(size, None if size is None else 0)
    try:
        yield
    finally:
        _set_chunks(*before)


def _set_chunks(size: int | None, chunk: int | None) -> None:
    from megatron.core import parallel_state

    parallel_state.set_virtual_pipeline_model_parallel_world_size(size)
    parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
