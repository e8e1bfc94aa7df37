"""The work of a race's ranks: every entry's turns, round by round, in one launch.

All entries train the same small model from the same parameters, which no optimizer changes. Before
the one timed step everything is warm and quiet: links are open, every code path has run, garbage
has been collected, and all ranks have synchronised. Our links are closed after each turn, so that
their threads do not disturb the next one.

In round 0 an entry's gradients are compared with the reference: Megatron's 1F1B, on the same data,
without a pace.
"""

import gc
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from rrfp.errors import RrfpError
from rrfp.race.entries import Entry, RaceFiles, Turn, rounds
from rrfp.race.gradient_check import Gradients, relative_difference
from rrfp.race.raced_system import RacedSystem, chunks_of
from rrfp.runtime.decoding import integer, items, text
from rrfp.schedule.policy import Dispatch
from rrfp.trace.records import NS_PER_S
from rrfp.trace.rundir import RunDir
from rrfp.train.data.batches import Data
from rrfp.train.data.open import open_data
from rrfp.train.models.model import ModelChunks, build_model
from rrfp.train.rank import introduce
from rrfp.train.ranks.exchange import broadcast_json, gather_tensors
from rrfp.train.ranks.failure import FailureReport
from rrfp.train.ranks.parallel import Layout
from rrfp.train.settings import TrainSettings


def work(run: RunDir, settings: TrainSettings, layout: Layout) -> None:
    """Run this rank's part of every turn that has not ended yet. Raises what a step raises."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    files = RaceFiles(run.path)
    leads = layout.rank == 0
    offset_ns = introduce(layout).clock_offset_ns
    # Only one rank reads, because another host may see an outdated version of a shared file.
    told = _state(files) if leads else None
    entries, ended = broadcast_json(told, _decode_state)
    race = _Race(layout, entries, offset_ns)
    gc.freeze()

    def begin(entry: Entry, number: int) -> None:
        if leads:
            files.begin(entry, number)

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
    """The entries and the turns that have ended, for all ranks."""
    return [[entry.to_json() for entry in files.read_entries()], sorted(files.ended())]


def _decode_state(told: object) -> tuple[list[Entry], set[tuple[str, int]]]:
    entries, ended = map(items, items(told, 2))
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
        """By `_reference_key`: the gradients of all ranks; known only to rank 0."""

    def turn(self, entry: Entry, number: int) -> Turn:
        """Run an entry's step of a round; every rank calls this, and rank 0 gets all figures."""
        system = self._system(entry)
        with _bounded(entry, number, system.most_s(number)):
            system.warm_up(number)
            batches = system.batches(number)
            system.prepare(number)
            with _stillness():
                dist.barrier()
                system.step(batches, number)
            figures = system.figures(self._offset_ns)
            of_ranks = [torch.empty_like(figures) for _ in range(self._layout.world_size)]
            dist.all_gather(of_ranks, figures)
            turn = turn_of(entry, number, torch.stack(of_ranks))
            if number == 0:
                turn = self._compare(turn, system)
            system.forget()
            system.rest()
        return turn

    def _system(self, entry: Entry) -> RacedSystem:
        if entry.name not in self._systems:
            settings = entry.settings
            layout = replace(
                self._layout, chunks=settings.layout.chunks, placement=settings.layout.placement
            )
            # Settings with the same key share a model; order and bounds are not part of it.
            data_key = (settings.run.seed, settings.data.microbatches)
            if data_key not in self._data:
                self._data[data_key] = open_data(settings)
            data = self._data[data_key]
            model_key = (settings.run.seed, settings.layout.chunks, str(settings.layout.placement))
            if model_key not in self._models:
                with chunks_of(settings):
                    self._models[model_key] = build_model(settings, layout, data)
            self._systems[entry.name] = RacedSystem(entry, layout, self._models[model_key], data)
        return self._systems[entry.name]

    def missing_reference(self, entry: Entry) -> Entry | None:
        """The entry whose gradients of the first round this one's are compared with; None if they
        are already known."""
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
        """Compute the reference's gradients of the first round; every rank calls this."""
        system = self._system(reference)
        with _bounded(reference, 0, system.most_s(0)):
            system.warm_up(0)
            system.step(system.batches(0))
            gathered = gather_tensors(system.gradients())
            self._references[_reference_key(reference.settings)] = gathered
            system.forget()

    def _compare(self, turn: Turn, system: RacedSystem) -> Turn:
        """The turn, with the comparison of its gradients."""
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
    """Settings with equal keys have the same gradients."""
    return settings.run.seed, settings.data.microbatches


def turn_of(entry: Entry, number: int, table: torch.Tensor) -> Turn:
    """A turn's outcome, from the `RacedSystem.figures` of all ranks, one row each."""
    start_ns, end_ns, busy_ns, blocking_ns, coordination_ns, *counts = table.T
    held, num_tasks, num_over, peak_bytes = counts
    # A rank that is done, or was not called yet, is as idle as one that waits inside the step.
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
def _stillness() -> Iterator[None]:
    """Pause garbage collection."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _bounded(entry: Entry, number: int, most_s: float) -> Iterator[None]:
    """End this process if a turn takes longer: a wait inside a library cannot be interrupted."""
    timer = threading.Timer(most_s, partial(_give_up, entry, number, most_s))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(entry: Entry, number: int, most_s: float) -> None:
    sentence = f"round {number} of {entry.name} was not over after {most_s:.0f} s"
    FailureReport(sentence, RrfpError.exit_code, False, False).write()
    os._exit(RrfpError.exit_code)
