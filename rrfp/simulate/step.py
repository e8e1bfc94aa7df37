"""One step of a whole run: pipelines side by side that meet at its end."""

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product

from rrfp.schedule.policy import Policy
from rrfp.schedule.punctuality import new_punctuality
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Cause, Kind, RunTask, Stimulus, Task, Waited
from rrfp.simulate.engine import Log, PipelineRun, StepConditions
from rrfp.simulate.transfers import AnnouncementModel, AsyncStep, BlockingStep
from rrfp.trace.records import (
    AgreementRecord,
    Phase,
    PhaseRecord,
    RankInfo,
    RankRecords,
    ReceiveRecord,
    Recording,
    SendRecord,
    TaskRecord,
    WaitRecord,
    stimulus_record,
)

# The records of a simulated step: the same as a real run's, so that every reader accepts them.


HOST = "simulated"


def new_recording(
    shape: Shape, num_members: int, num_replicas: int, settings: Mapping[str, object]
) -> Recording:
    """Make a recording without records, for `num_members` (tensor parallelism) times `num_replicas`
    pipelines, with ranks numbered in Megatron's order (tensor, then data, then pipeline)."""
    places = product(range(shape.num_ranks), range(num_replicas), range(num_members))
    return Recording(
        dict(settings),
        [
            RankRecords(RankInfo(rank, pp, tp, dp, shape.stages_of(pp), HOST, pid=rank))
            for rank, (pp, dp, tp) in enumerate(places)
        ],
    )


def end_of(recording: Recording) -> int:
    """Return the end of the last recorded step, in ns; 0 without steps."""
    return max((phase.end_ns for r in recording.ranks for phase in r.phases[-1:]), default=0)


class StepLog:
    """Writes one replica's step to a recording; the step begins at `origin_ns` of the run."""

    def __init__(
        self,
        recording: Recording,
        shape: Shape,
        replica: int,
        step: int,
        origin_ns: int,
        num_bytes: Sequence[int],
        budgets: Sequence[int] = (),
    ) -> None:
        """`num_bytes` are message sizes by microbatch; empty for messages without content.
        `budgets` are bounds in bytes by pipeline rank; empty without any."""
        self._members: list[list[RankRecords]] = [[] for _ in range(shape.num_ranks)]
        for records in recording.ranks:
            if records.info.dp_rank == replica:
                self._members[records.info.pp_rank].append(records)
        self._step = step
        self._origin_ns = origin_ns
        self._num_bytes = num_bytes
        self._budgets = budgets
        self._num_agreed = [0] * shape.num_ranks
        # A link's messages are numbered through the run; every step has the same number.
        self._num_sent = {
            (*link, member): step * num_messages
            for link, num_messages in _messages_of_a_step(shape).items()
            for member in range(len(self._members[0]))
        }

    def took_in(self, rank: int, member: int, now_ns: int, stimulus: Stimulus) -> None:
        """Record a stimulus of a member's dispatcher, on the run's clock."""
        record = stimulus_record(self._origin_ns + now_ns, self._step, stimulus)
        self._members[rank][member].stimuli.append(record)

    def waited(self, rank: int, member: int, waited: Waited) -> None:
        """Record an idle interval of a member, with its cause."""
        cause, start_ns, end_ns = waited
        record = WaitRecord(*self._moved(start_ns, end_ns), self._step, cause)
        self._members[rank][member].waits.append(record)

    def ran(self, rank: int, start_ns: int, end_ns: int, run: RunTask) -> None:
        """Record a task, with the counts of its decision, for every member of its rank."""
        (stage, kind, microbatch), chunk, *counts = run
        record = TaskRecord(
            *self._moved(start_ns, end_ns), self._step, kind, stage, chunk, microbatch, *counts
        )
        for records in self._members[rank]:
            records.tasks.append(record)

    def agreed(self, rank: int, start_ns: int, end_ns: int, task: Task) -> None:
        """Record a round of agreement for every member of a rank, numbered within the step."""
        stage, kind, microbatch = task
        record = AgreementRecord(
            *(*self._moved(start_ns, end_ns), self._step, kind, stage, microbatch),
            position=self._num_agreed[rank],
        )
        self._num_agreed[rank] += 1
        for records in self._members[rank]:
            records.agreements.append(record)

    def passed(
        self, sender: int, receiver: int, member: int, start_ns: int, end_ns: int, task: Task
    ) -> None:
        """Record a message as a send of one member and a receive of the other, numbered on its link
        through the run."""
        source, destination = self._members[sender][member], self._members[receiver][member]
        link = sender, receiver, member
        times = self._moved(start_ns, end_ns)
        stage, kind, microbatch = task
        what = *times, self._step, kind, stage, microbatch
        num_bytes = self._num_bytes[microbatch] if self._num_bytes else 0
        message = self._num_sent[link], num_bytes
        self._num_sent[link] += 1
        source.sends.append(SendRecord(*what, destination.info.rank, *message))
        destination.receives.append(ReceiveRecord(*what, source.info.rank, *message))

    def returned(self, rank: int, end_ns: int, finish_ns: int) -> None:
        """Record for every member that its rank ended its last task at `end_ns`, and left the
        schedule at `finish_ns`, after the replicas' gradients were reduced: that wait, if any, and
        the schedule phase, with the rank's bound in bytes (0 without one)."""
        for records in self._members[rank]:
            if finish_ns > end_ns:
                times = self._moved(end_ns, finish_ns)
                records.waits.append(WaitRecord(*times, self._step, Cause.GRADIENT_SYNC))
            times = self._moved(0, finish_ns)
            budget = self._budgets[rank] if self._budgets else 0
            records.phases.append(PhaseRecord(*times, self._step, Phase.SCHEDULE, budget))

    def _moved(self, start_ns: int, end_ns: int) -> tuple[int, int]:
        """Convert times since the start of the step to times of the run."""
        return self._origin_ns + start_ns, self._origin_ns + end_ns


def _messages_of_a_step(shape: Shape) -> Counter[tuple[int, int]]:
    """Count the messages of a step from one pipeline rank to another, by (sender, receiver)."""
    counts: Counter[tuple[int, int]] = Counter()
    for stage in range(shape.num_stages):
        for kind in shape.kinds:
            link = shape.link(Task(stage, kind, 0))
            if link is not None:
                counts[link] += shape.num_microbatches
    return counts


# Plays one pipeline's step over its world's links.


def play(
    shape: Shape, policy: Policy, world: StepConditions, log: Log | None = None
) -> PipelineRun:
    """Simulate one step of one pipeline, from 0 ns until no events are left; the garbage collector
    is paused. Where ranks may wait for announced tasks, the step is first played once for them to
    learn.

    Raises RrfpError if tasks are left at the end, because a binding order deadlocks over its links,
    and UsageError for blocking transfers without a binding order.
    """
    with _collector_paused():
        if world.blocking:
            return BlockingStep(shape, policy, world, log).play()
        announcing = _announcing_after_a_step(shape, policy, world)
        return AsyncStep(shape, policy, world, log, announcing).play()


def _announcing_after_a_step(
    shape: Shape, policy: Policy, world: StepConditions
) -> AnnouncementModel | None:
    """Play the step once, without a log, and return the announcements between ranks that have
    learned from it: in the runtime, too, all steps but the first have some to learn from. None,
    without playing, where no rank ever waits."""
    heard = [new_punctuality(policy, shape.num_chunks) for _ in range(shape.num_ranks)]
    patient = [each for each in heard if each is not None]
    if not patient:
        return None
    announcing = AnnouncementModel(shape, world, patient)
    # The stretch has state, so the rehearsal step gets a copy.
    before = replace(world, stretch=deepcopy(world.stretch))
    AsyncStep(shape, policy, before, None, announcing).play()
    return announcing


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the garbage collector, unless it was off: a step makes millions of tuples, and no
    cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """The outcome of a simulated step of all replicas."""

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
        """The share of all ranks' time in the step, gradient reduction included, that is not in
        tasks."""
        num_ranks = len(self.peak_held) * len(self.busy_ns)
        return 1 - sum(map(sum, self.busy_ns)) / (self.makespan_ns * num_ranks)


def simulate_step(
    shape: Shape,
    policy: Policy,
    worlds: Sequence[StepConditions],
    *,
    gradient_sync_ns: int = 0,
    recording: Recording | None = None,
    step: int = 0,
) -> SimulatedStep:
    """Simulate a step of data-parallel replicas, one for each of `worlds`, their conditions.

    A pipeline rank leaves the step `gradient_sync_ns` after its last task has ended on every
    replica. The step's records are appended to `recording`, if given, after its last step; it must
    be made for this shape and number of replicas, and its steps must be numbered from 0. Raises
    RrfpError if an order deadlocks.
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


def _budgets(shape: Shape, policy: Policy, world: StepConditions) -> Sequence[int]:
    """Return the bounds in bytes by pipeline rank, for the records: the step's own, else the
    policy's hold in bytes unless the step has no backwards; empty without either."""
    if world.budgets or policy.hold_bytes is None or Kind.B not in shape.kinds:
        return world.budgets
    return [policy.hold_bytes] * shape.num_ranks


def _largest(by_replica: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the largest value of all replicas, by pipeline rank."""
    return tuple(map(max, zip(*by_replica, strict=True)))
