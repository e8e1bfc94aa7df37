"""One step of a whole run: pipelines side by side that meet at its end."""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace

from rrfp.schedule.policy import Policy
from rrfp.schedule.punctuality import punctuality_of
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind
from rrfp.simulate.engine import Log, PipelineRun
from rrfp.simulate.recording import StepLog, end_of
from rrfp.simulate.transfers import Announcing, BlockingStep, TravellingStep
from rrfp.simulate.world import World
from rrfp.trace.records import Recording

# Plays one pipeline's step over its world's links.


def play(shape: Shape, policy: Policy, world: World, log: Log | None = None) -> PipelineRun:
    """Run one step of one pipeline, from 0 ns until no events are left.

    Raises RrfpError if tasks are left then, because a binding order deadlocks over its links.
    """
    with _collector_paused():
        if world.blocking:
            return BlockingStep(shape, policy, world, log).play()
        announcing = _announcing_after_a_step(shape, policy, world)
        return TravellingStep(shape, policy, world, log, announcing).play()


def _announcing_after_a_step(shape: Shape, policy: Policy, world: World) -> Announcing | None:
    """Announcements between ranks that have run this step before: in the runtime, too, all steps
    but the first have some to learn from. None where no rank ever waits."""
    heard = [punctuality_of(policy, shape.num_chunks) for _ in range(shape.num_ranks)]
    patient = [each for each in heard if each is not None]
    if not patient:
        return None
    announcing = Announcing(shape, world, patient)
    # What stretches tasks counts what was run, and begins anew with the step that counts.
    before = replace(world, stretch=deepcopy(world.stretch))
    TravellingStep(shape, policy, before, None, announcing).play()
    return announcing


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the garbage collector: a step makes millions of tuples, and no cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """The outcome of a step."""

    makespan_ns: int
    """From its start until the last rank ends, the reduction of gradients included."""
    busy_ns: tuple[tuple[int, ...], ...]
    """Time in F, B and W, by replica, then pipeline rank."""
    peak_held: tuple[int, ...]
    """The most activations held, by pipeline rank, in slots of one chunk and one microbatch."""
    peak_held_bytes: tuple[int, ...]
    """Likewise in bytes; zeros where sizes are not known."""

    @property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time in the step that is not work."""
        num_ranks = len(self.peak_held) * len(self.busy_ns)
        return 1 - sum(map(sum, self.busy_ns)) / (self.makespan_ns * num_ranks)


def simulate_step(
    shape: Shape,
    policy: Policy,
    worlds: Sequence[World],
    *,
    gradient_sync_ns: int = 0,
    recording: Recording | None = None,
    step: int = 0,
) -> SimulatedStep:
    """Simulate a step of data-parallel replicas, one in each world.

    A pipeline rank leaves the step `gradient_sync_ns` after its last task has ended on every
    replica. The step's records are appended to `recording`, which must be made for this shape and
    number of replicas; its steps must be numbered from 0. Raises RrfpError if an order deadlocks.
    """
    origin_ns = 0 if recording is None else end_of(recording)
    logs = [
        None
        if recording is None
        else StepLog(
            *(recording, shape, replica, step, origin_ns, world.num_bytes),
            _budgets(shape, policy, world),
        )
        for replica, world in enumerate(worlds)
    ]
    runs = [play(shape, policy, world, log) for world, log in zip(worlds, logs, strict=True)]
    last_ends_ns = map(max, zip(*(run.ends_ns for run in runs), strict=True))
    finishes_ns = [end_ns + gradient_sync_ns for end_ns in last_ends_ns]
    for run, log in zip(runs, logs, strict=True):
        if log is not None:
            for rank, (end_ns, finish_ns) in enumerate(zip(run.ends_ns, finishes_ns, strict=True)):
                log.returned(rank, end_ns, finish_ns)
    return SimulatedStep(
        max(finishes_ns),
        tuple(run.busy_ns for run in runs),
        _largest(run.peak_held for run in runs),
        _largest(run.peak_held_bytes for run in runs),
    )


def _budgets(shape: Shape, policy: Policy, world: World) -> Sequence[int]:
    """The bounds in bytes by pipeline rank; empty without any."""
    if world.budgets or policy.hold_bytes is None or Kind.B not in shape.kinds:
        return world.budgets
    return [policy.hold_bytes] * shape.num_ranks


def _largest(by_replica: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(max, zip(*by_replica, strict=True)))
