"""The work of a race's ranks: all entries' turns, round by round, in one launch.

All entries train the same small model from the same parameters, which no optimizer changes. Before
each timed step, links are open, every code path has run once, garbage has been collected, and all
ranks have synchronized. rrfp's links are closed after each turn, so that their threads do not
disturb the next one.

In round 0 an entry's gradients are compared with the reference: Megatron's 1F1B, on the same data,
without a pace.
"""

import gc
import math
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rrfp.errors import RrfpError, UsageError
from rrfp.inputs import sha256_of
from rrfp.megatron.dropin import ForwardBackward
from rrfp.megatron.native.schedule import NativeSchedule
from rrfp.planning.candidates import peak_bytes
from rrfp.planning.order_search import NUM_SIMULATIONS
from rrfp.race.entries import Entry, RaceFiles, Turn, rounds
from rrfp.race.peer_schedules import PeerSchedule
from rrfp.race.systems import PEERS, Project
from rrfp.replay.cost_sources import costs_file, resolve_costs
from rrfp.runtime.pace import StepPace
from rrfp.schedule.admission import Admit
from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.hints import kinds_of
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Cause, Kind, Task
from rrfp.simulate.conditions import conditions
from rrfp.simulate.costs.model import Costs, ScaledCosts
from rrfp.simulate.jitter import parse_jitter
from rrfp.strict_json import integer, items, text
from rrfp.trace.records import NS_PER_S, Record, TaskRecord, WaitRecord
from rrfp.trace.run_dir import RunDir
from rrfp.train.data.batches import Batch, Data, open_data
from rrfp.train.launch.collectives import broadcast_json, gather_tensors
from rrfp.train.launch.process_groups import Layout, virtual_pipeline_size
from rrfp.train.launch.rank_status import FailureReport
from rrfp.train.loop import introduce, run_schedule, schedule_of
from rrfp.train.models.gpt import whole_name
from rrfp.train.models.model import ModelChunks, build_model
from rrfp.train.ordered_batches import OrderedBatches
from rrfp.train.pacing import StepPacer, make_pace
from rrfp.train.settings import TrainSettings

Gradients = dict[str, torch.Tensor]
"""Gradients of a step by the parameter's name in the whole model."""


def gradients(chunks: Sequence[Any], settings: TrainSettings, layout: Layout) -> Gradients:
    """Copy the gradients of a rank's chunks (this rank's slices) to the CPU in fp32.

    They come from `main_grad`, where Megatron's data parallelism accumulates them, or from `grad`
    in chunks without it. A parameter without gradient gives zeros."""
    from rrfp.megatron.adapters.models import unwrap_models

    return {
        whole_name(name, chunk, settings, layout): _gradient(parameter)
        for chunk in unwrap_models(chunks)
        for name, parameter in chunk.named_parameters()
    }


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a copy of a parameter's gradient on the CPU in fp32, from `main_grad` if there is one;
    zeros without a gradient."""
    gradient = getattr(parameter, "main_grad", parameter.grad)
    if gradient is None:
        return torch.zeros(parameter.shape)
    return gradient.detach().to("cpu", torch.float32, copy=True)


def relative_difference(
    own: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]
) -> float:
    """The largest ||own - other|| / ||other|| over all parameters.

    Raises RrfpError if the gradients belong to different parameters.
    """
    if own.keys() != other.keys():
        strange = sorted(own.keys() ^ other.keys())
        raise RrfpError(
            f"{len(strange)} parameters have a gradient on one side only, such as {strange[0]}; "
            "compare ranks that hold the same stages"
        )
    return max((_difference(own[name], other[name]) for name in own), default=0.0)


def _difference(own: torch.Tensor, other: torch.Tensor) -> float:
    """Return ||own - other|| / ||other||: 0 for equal gradients, infinite for a zero reference or a
    difference that is not finite."""
    difference = float((own.double() - other.double()).norm())
    norm = float(other.double().norm())
    if difference == 0:
        return 0.0
    return difference / norm if norm and math.isfinite(difference) else math.inf


_LEAST_TIMEOUT_S = 120.0
"""Time limit of a turn beyond `_TIMEOUT_FACTOR` times its modeled work."""
_TIMEOUT_FACTOR = 4


class _Unpaced:
    """A `StepPace` that adds no time."""

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
    """A `Pace` for the current round, independent of the schedule's own step number."""

    def __init__(self, pacer: StepPacer) -> None:
        self.pacer = pacer
        self.round: int | None = None
        """The current round; None for an unpaced step."""

    def sizes(self, step: int, shape: Shape) -> ActivationSizes | None:
        """Return the activation sizes of the current round (of round 0 if unpaced); `step` is
        ignored."""
        return self.pacer.sizes(self.round or 0, shape)

    def start_step(self, step: int, shape: Shape) -> StepPace:
        """Return the pace of the current round, or one that adds no time if unpaced; `step` is
        ignored."""
        return _Unpaced() if self.round is None else self.pacer.start_step(self.round, shape)


class _Records:
    """Collects the tasks and waits of a step; `record` is called from several threads."""

    def __init__(self) -> None:
        self._records: list[WaitRecord] = []
        self._tasks: list[TaskRecord] = []

    def record(self, record: Record) -> None:
        """Keep a record of a task or a wait; all others are dropped."""
        if isinstance(record, WaitRecord):
            self._records.append(record)
        elif isinstance(record, TaskRecord):
            self._tasks.append(record)

    def take_peak_bytes(self, sizes: ActivationSizes, *, splits_backward: bool) -> int:
        """Return the peak activation bytes in the tasks since the last call, and drop these tasks.
        They are computed from the sizes of the rank's chunks in the same way for every system."""
        tasks, self._tasks = self._tasks, []
        ran = ((task.chunk, task.kind, task.microbatch) for task in sorted(tasks))
        return peak_bytes(ran, sizes, splits_backward=splits_backward)

    def forget(self) -> None:
        """Drop all records."""
        self._records, self._tasks = [], []

    def take_ns(self) -> tuple[int, int]:
        """Return the time in waits for coordination, then the time in all other waits, in ns since
        the last call, and drop these waits."""
        records, self._records = self._records, []
        coordination_ns = blocking_ns = 0
        for record in records:
            if record.cause is Cause.COORDINATION:
                coordination_ns += record.end_ns - record.start_ns
            else:
                blocking_ns += record.end_ns - record.start_ns
        return coordination_ns, blocking_ns


class RacedSystem:
    """An entry on this rank: its schedule and pace, on a model that entries share."""

    def __init__(self, entry: Entry, layout: Layout, model: ModelChunks, data: Data) -> None:
        settings = entry.settings
        self.layout = layout
        self.settings = settings
        self._records = _Records()
        self._model = model
        assert settings.run.pace is not None
        _check_costs(settings.run.pace, entry.costs_sha256)
        self._jitter = parse_jitter(settings.run.jitter)
        self._costs: Costs = ScaledCosts(resolve_costs(settings.run.pace), entry.time_factor)
        pacer = make_pace(
            self._costs,
            self._jitter,
            Admit(settings.step.admit),
            settings.run.seed,
            _shape_of(entry),
            layout.pp_rank,
            layout.dp_rank,
        )
        assert pacer is not None
        self._pace = _RoundPace(pacer)
        # A group's leader decides in advance from the task times so far, and patience depends on
        # how punctual announcements were. Both need a paced warm-up.
        self._learns_times = settings.policy.dispatch == Dispatch.READY and (
            settings.layout.tp > 1 or settings.policy.waits
        )
        self._schedule: NativeSchedule | ForwardBackward | PeerSchedule
        if entry.peer is not None:
            self._schedule = schedule_class_of(entry.peer)(
                entry.peer, model, layout, self._records.record, pace=self._pace
            )
        else:
            self._schedule = schedule_of(
                settings, layout.pp_rank, self._records.record, pace=self._pace
            )
        self._is_warm = False
        self._source = OrderedBatches(
            settings, layout, data, self._records.record, pacer, NUM_SIMULATIONS
        )
        self._batches: tuple[int, list[Batch]] | None = None
        """A round and its batches: the order of a round is planned once."""

    def prepare(self, number: int) -> None:
        """Draw the round's modeled times, before its step begins."""
        self._pace.pacer.prepare(number)

    def batches(self, number: int) -> list[Batch]:
        """The round's microbatches, in the admission order of the modeled costs. The next round's
        order is planned while this one is raced."""
        if self._batches is None or self._batches[0] != number:
            self._batches = number, self._source.batches(number)
        return self._batches[1]

    def warm_up(self, number: int) -> None:
        """Run the round's step once, to open links and warm caches equally for all systems, and
        clear its gradients and records.

        After the first time it runs only one microbatch per pipeline rank, unless the schedule is a
        peer's, built for a number of microbatches. A schedule that learns task times always runs
        the whole step, paced.
        """
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
        """Run a step, with the pace of round `number` or, for None, without pace. Gradients are
        added to the present ones."""
        self._pace.round = number
        with virtual_pipeline_of(self.settings):
            if isinstance(self._schedule, PeerSchedule):
                self._schedule.run(number or 0, batches)
                return
            run_schedule(self._schedule, self.settings, self._model, batches)

    def timeout_s(self, number: int) -> float:
        """Time limit in seconds for a round's turn: the sum of 120 s, 4 times its total work and
        messages in sequence, as jitter adds to them, and the times until jitter's stops end."""
        settings = self.settings
        met = conditions(
            self._costs,
            self._jitter,
            Admit(settings.step.admit),
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
        return _LEAST_TIMEOUT_S + (_TIMEOUT_FACTOR * work_ns + stopped_ns) / NS_PER_S

    def gradients(self) -> Gradients:
        """Copy the gradients of this rank's chunks to the CPU, as `gradients` does."""
        return gradients(self._model.chunks, self.settings, self.layout)

    def forget(self) -> None:
        """Clear the gradients of the shared model and the records of this system."""
        for chunk in self._model.chunks:
            chunk.zero_grad_buffer()
        self._model.optimizer.zero_grad()
        self._records.forget()

    def figures(self, offset_ns: int) -> torch.Tensor:
        """Return the figures of the last step on this rank, as `turn_of` reads them, and drop its
        waits and, if sizes are known, its tasks. Times are shifted by `offset_ns`, so that they
        compare across hosts."""
        assert self._schedule.report is not None
        summary = self._schedule.report.summary
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
        """Return the peak activation bytes of this rank in the last round, and drop the records of
        its tasks; -1, and nothing is dropped, if sizes are unknown."""
        modeled = self._pace.pacer.modeled
        assert modeled is not None
        shape = modeled.shape
        sizes = self._pace.sizes(self._pace.round or 0, shape)
        if sizes is None:
            return -1
        return self._records.take_peak_bytes(sizes, splits_backward=shape.splits_backward)

    def close(self) -> None:
        """Close the links, whose threads would disturb other systems; Megatron's own schedule has
        none. Later steps reopen them."""
        if isinstance(self._schedule, ForwardBackward | PeerSchedule):
            self._schedule.close()


def _check_costs(pace: str, sha256: str | None) -> None:
    """Raise UsageError if the costs file here differs from that of the host that prepared the race;
    presets pass."""
    file = costs_file(pace)
    if file is not None and sha256_of(file) != sha256:
        raise UsageError(
            f"the costs {pace} on {socket.gethostname()} are not those that the race was prepared "
            "with; use the same file, unchanged, on all hosts"
        )


def schedule_class_of(peer: str) -> type[PeerSchedule]:
    """The class that runs a peer's schedule. Imports the peer's project."""
    if PEERS[peer].project is Project.DEEPSPEED:
        from rrfp.race.deepspeed_schedule import DeepSpeedSchedule

        return DeepSpeedSchedule
    from rrfp.race.peer_schedules import TorchSchedule

    return TorchSchedule


def _shape_of(entry: Entry) -> Shape:
    """The shape of an entry's step, including its kinds of task."""
    settings = entry.settings
    shape = settings.shape
    if entry.peer is not None:
        return PEERS[entry.peer].shape(settings.layout.pp, settings.data.microbatches)
    return replace(shape, kinds=kinds_of(settings.hint.for_shape(shape)))


def virtual_pipeline_of(settings: TrainSettings) -> AbstractContextManager[None]:
    """Return a context that sets Megatron's global number of chunks per rank to that of these
    settings."""
    from rrfp.megatron.adapters.parallel_state import virtual_pipeline

    return virtual_pipeline(virtual_pipeline_size(settings))


def work(run: RunDir, settings: TrainSettings, layout: Layout) -> None:
    """Run this rank's part of every turn that has not ended. Rank 0 reads the entries and sends
    them to all ranks, stores the turn that begins, and appends the results. Before round 0 of an
    entry, missing reference gradients are computed. Raises any error of a step."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    files = RaceFiles(run.path)
    leads = layout.rank == 0
    offset_ns = introduce(layout).clock_offset_ns
    # Only rank 0 reads, because another host may see an outdated version of a shared file.
    state = _state(files) if leads else None
    entries, ended = broadcast_json(state, _decode_state)
    race = _Race(layout, entries, offset_ns)
    gc.freeze()

    def begin(entry: Entry, number: int) -> None:
        if leads:
            files.write_current_turn(entry, number)

    for number, entry in rounds(entries, ended):
        reference = race.missing_reference(entry) if number == 0 else None
        if reference is not None:
            begin(reference, number)
            race.refer_to(reference)
        begin(entry, number)
        turn = race.turn(entry, number)
        if leads:
            files.append(turn)


def _state(files: RaceFiles) -> object:
    """Read the entries and the completed turns as JSON values, to broadcast to all ranks."""
    return [[entry.to_json() for entry in files.read_entries()], sorted(files.ended())]


def _decode_state(state: object) -> tuple[list[Entry], set[tuple[str, int]]]:
    """Read the value of `_state`. Raises ValueError if it is invalid."""
    entries, ended = map(items, items(state, 2))
    try:
        read = [Entry.from_json(text(entry)) for entry in entries]
    except (KeyError, TypeError) as error:
        raise ValueError(f"an entry of the race lacks {error}") from None
    turns = (items(turn, 2) for turn in ended)
    return read, {(text(name), integer(number)) for name, number in turns}


class _Race:
    """All entries on this rank."""

    def __init__(self, layout: Layout, entries: Sequence[Entry], offset_ns: int) -> None:
        self._layout = layout
        self._entries = entries
        self._offset_ns = offset_ns
        self._data: dict[tuple[int, int], Data] = {}
        self._models: dict[tuple[int, int, str], ModelChunks] = {}
        self._systems: dict[str, RacedSystem] = {}
        self._references: dict[tuple[int, int], list[Gradients]] = {}
        """All ranks' reference gradients by `_reference_key`; only rank 0 has the tensors."""

    def turn(self, entry: Entry, number: int) -> Turn:
        """Run an entry's step of a round, after its warm-up; every rank calls this. Returns the
        figures over all ranks; in round 0, rank 0 also compares the gradients with the reference's.

        The gradients and links are cleared and closed afterwards. The process is ended if this
        takes longer than the turn's time limit.
        """
        system = self._system(entry)
        with _time_limit(entry, number, system.timeout_s(number)):
            system.warm_up(number)
            batches = system.batches(number)
            system.prepare(number)
            with _garbage_collection_paused():
                dist.barrier()
                system.step(batches, number)
            figures = system.figures(self._offset_ns)
            of_ranks = [torch.empty_like(figures) for _ in range(self._layout.world_size)]
            dist.all_gather(of_ranks, figures)
            turn = turn_of(entry, number, torch.stack(of_ranks))
            if number == 0:
                turn = self._compare(turn, system)
            system.forget()
            system.close()
        return turn

    def _system(self, entry: Entry) -> RacedSystem:
        """The entry's system, created when first used. Data and models are shared."""
        if entry.name not in self._systems:
            settings = entry.settings
            layout = replace(
                self._layout, chunks=settings.layout.chunks, placement=settings.layout.placement
            )
            # Entries that differ only in order and bounds share data and model.
            data_key = (settings.run.seed, settings.data.microbatches)
            if data_key not in self._data:
                self._data[data_key] = open_data(settings)
            data = self._data[data_key]
            model_key = (settings.run.seed, settings.layout.chunks, str(settings.layout.placement))
            if model_key not in self._models:
                with virtual_pipeline_of(settings):
                    self._models[model_key] = build_model(settings, layout, data)
            self._systems[entry.name] = RacedSystem(entry, layout, self._models[model_key], data)
        return self._systems[entry.name]

    def missing_reference(self, entry: Entry) -> Entry | None:
        """Return the entry that computes the reference gradients for this one, Megatron's 1F1B on
        the same data; None if they are known."""
        key = _reference_key(entry.settings)
        if key in self._references:
            return None
        return next(
            each
            for each in self._entries
            if each.settings.policy.dispatch == Dispatch.MEGATRON
            and each.settings.layout.chunks == 1
            and _reference_key(each.settings) == key
        )

    def refer_to(self, reference: Entry) -> None:
        """Compute the reference's gradients of the first round, without pace, and gather them on
        rank 0; every rank calls this."""
        system = self._system(reference)
        with _time_limit(reference, 0, system.timeout_s(0)):
            system.warm_up(0)
            system.step(system.batches(0))
            gathered = gather_tensors(system.gradients())
            self._references[_reference_key(reference.settings)] = gathered
            system.forget()

    def _compare(self, turn: Turn, system: RacedSystem) -> Turn:
        """Gather the gradients of all ranks on rank 0, and return the turn with their comparison to
        the reference; unchanged on other ranks. Every rank calls this."""
        settings = system.settings
        found = gather_tensors(system.gradients())
        if self._layout.rank != 0:
            return turn
        # A parameter may be on another pipeline rank, but never on another tensor-parallel rank.
        own, reference = (
            {
                f"{name} on tensor-parallel rank {rank % self._layout.tp}": gradient
                for rank, of_rank in enumerate(each)
                for name, gradient in of_rank.items()
            }
            for each in (found, self._references[_reference_key(settings)])
        )
        return replace(
            turn,
            gradient_difference=relative_difference(own, reference),
            gradients_same=all(torch.equal(own[name], reference[name]) for name in own),
        )


def _reference_key(settings: TrainSettings) -> tuple[int, int]:
    """Key of the reference gradients. Settings with equal keys have the same gradients."""
    return settings.run.seed, settings.data.microbatches


def turn_of(entry: Entry, number: int, table: torch.Tensor) -> Turn:
    """Make a turn from the `RacedSystem.figures` of all ranks, one row each. The step lasts from
    the first rank's start to the last one's end; times are means over ranks, counts of tasks are
    sums, and peaks are the largest. A rank's time before and after its own part of the step counts
    as blocking."""
    start_ns, end_ns, busy_ns, blocking_ns, coordination_ns, *counts = table.T
    held, num_tasks, num_over, peak_bytes = counts
    # Time before a rank's own entry and after its own return counts as idle.
    blocking_ns = blocking_ns + (end_ns.max() - end_ns) + (start_ns - start_ns.min())
    return Turn(
        entry.name,
        number,
        step_time_s=float(end_ns.max() - start_ns.min()) / NS_PER_S,
        compute_s=float(busy_ns.mean()) / NS_PER_S,
        blocking_s=float(blocking_ns.mean()) / NS_PER_S,
        coordination_s=float(coordination_ns.mean()) / NS_PER_S,
        peak_held=float(held.max()),
        num_tasks=int(num_tasks.sum()),
        num_over=int(num_over.sum()),
        peak_held_bytes=int(peak_bytes.max()) if peak_bytes.min() >= 0 else None,
    )


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Collect garbage, then pause garbage collection in the block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _time_limit(entry: Entry, number: int, timeout_s: float) -> Iterator[None]:
    """End the process, with a failure report, if the block takes longer; a wait inside a library
    cannot be interrupted."""
    timer = threading.Timer(timeout_s, partial(_give_up, entry, number, timeout_s))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(entry: Entry, number: int, timeout_s: float) -> None:
    """Write a failure report for a turn that took too long, and end the process at once."""
    sentence = f"round {number} of {entry.name} was not over after {timeout_s:.0f} s"
    FailureReport(sentence, RrfpError.exit_code, False, False).write()
    os._exit(RrfpError.exit_code)
