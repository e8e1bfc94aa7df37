"""The records of a simulated run, the same as a real run's, so that every reader accepts them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product

from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Cause, RunTask, Stimulus, Task, Waited
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

HOST = "simulated"


def new_recording(
    shape: Shape, num_members: int, num_replicas: int, settings: Mapping[str, object]
) -> Recording:
    """A recording without records, for `num_members` (tensor parallelism) times `num_replicas`
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
    """When the last recorded step ended, in ns."""
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
        record = stimulus_record(self._origin_ns + now_ns, self._step, stimulus)
        self._members[rank][member].stimuli.append(record)

    def waited(self, rank: int, member: int, waited: Waited) -> None:
        cause, start_ns, end_ns = waited
        record = WaitRecord(*self._moved(start_ns, end_ns), self._step, cause)
        self._members[rank][member].waits.append(record)

    def ran(self, rank: int, start_ns: int, end_ns: int, run: RunTask) -> None:
        (stage, kind, microbatch), chunk, *counts = run
        record = TaskRecord(
            *self._moved(start_ns, end_ns), self._step, kind, stage, chunk, microbatch, *counts
        )
        for records in self._members[rank]:
            records.tasks.append(record)

    def agreed(self, rank: int, start_ns: int, end_ns: int, task: Task) -> None:
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
        """A rank ended its last task at `end_ns`, and left the schedule at `finish_ns`, after the
        replicas' gradients were reduced."""
        for records in self._members[rank]:
            if finish_ns > end_ns:
                times = self._moved(end_ns, finish_ns)
                records.waits.append(WaitRecord(*times, self._step, Cause.GRADIENT_SYNC))
            times = self._moved(0, finish_ns)
            budget = self._budgets[rank] if self._budgets else 0
            records.phases.append(PhaseRecord(*times, self._step, Phase.SCHEDULE, budget))

    def _moved(self, start_ns: int, end_ns: int) -> tuple[int, int]:
        return self._origin_ns + start_ns, self._origin_ns + end_ns


def _messages_of_a_step(shape: Shape) -> Counter[tuple[int, int]]:
    """How many messages go from one pipeline rank to another, by (sender, receiver)."""
    counts: Counter[tuple[int, int]] = Counter()
    for stage in range(shape.num_stages):
        for kind in shape.kinds:
            link = shape.link(Task(stage, kind, 0))
            if link is not None:
                counts[link] += shape.num_microbatches
    return counts
