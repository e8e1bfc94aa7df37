"""What the steps of a recorded run consisted of: tasks, the delays before them, and messages.

Measured of each step are

- every task's own time. Ranks that run it together count as one: from when the last of them began
  it to when the last of them ended it.
- the *overhead* before it: from when it could run to its start. That is the runtime's own work, a
  group's round of agreement, and waiting for a core.
- every message's transfer: from the end of the task that sends it, or from when the link was free,
  to when its receiver could act on it. A message that a rank knew of at a decision had come by
  then, and one that came between two decisions had not come at the first. So a dispatcher that
  meets these times decides as the run's did.
- the tail from the last task of all to the end of the step's window: gradient synchronisation.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median, median_low

from rrfp.replay.meetings import Span, meet, spans_of
from rrfp.replay.recorded import RecordedRun
from rrfp.replay.redispatch import redispatch
from rrfp.replay.step_records import Members, StepRecords
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.world import Stretch, Transfer
from rrfp.trace.stimuli import task_of


@dataclass(frozen=True, slots=True)
class ReplicaStep:
    """What one replica's step consisted of, in ns."""

    durations_ns: Mapping[Task, int]
    """By task that ran."""
    overheads_ns: Mapping[Task, int]
    """The delay before each of them."""
    transfers_ns: Mapping[Task, int]
    """The time of the message for a task, if another rank sends one."""

    def busy_ns(self, shape: Shape) -> list[int]:
        """Time in tasks, by pipeline rank."""
        totals_ns = [0] * shape.num_ranks
        for task, time_ns in self.durations_ns.items():
            totals_ns[shape.rank_of(task.stage)] += time_ns
        return totals_ns

    @property
    def transfer(self) -> Transfer | None:
        """How long each message took; None if messages take no time."""
        if not self.transfers_ns:
            return None
        return lambda sender, receiver, task: self.transfers_ns[task]

    @property
    def stretch(self) -> Stretch:
        """Puts its overhead before each task, or the step's median if the run had no such task."""
        usual_ns = median_low(self.overheads_ns.values())
        return lambda rank, start_ns, task, time_ns: time_ns + self.overheads_ns.get(task, usual_ns)

    def without_jitter(self) -> "ReplicaStep":
        """The same step with every task at the mean of its stage and kind in the step; overheads
        and messages stay."""
        means_ns = _means(self.durations_ns)
        return replace(self, durations_ns={task: means_ns[task[:2]] for task in self.durations_ns})

    def with_median_stage(self, stage: int) -> "ReplicaStep":
        """The same step with the tasks of one stage as fast, in the mean, as those of the median
        stage; each kind by itself."""
        means_ns = _means(self.durations_ns)
        middle_ns = {
            kind: median_low(mean_ns for (_, other), mean_ns in means_ns.items() if other is kind)
            for kind in {kind for _, kind in means_ns}
        }
        durations_ns = {
            task: time_ns * middle_ns[task.kind] // max(1, means_ns[task[:2]])
            if task.stage == stage
            else time_ns
            for task, time_ns in self.durations_ns.items()
        }
        return replace(self, durations_ns=durations_ns)

    def with_free_links(self) -> "ReplicaStep":
        """The same step with messages that take no time."""
        return replace(self, transfers_ns={})

    def with_usual_link(self, link: tuple[int, int], shape: Shape) -> "ReplicaStep":
        """The same step with the messages of one link, by its pipeline ranks, as fast in the median
        as those of the link in the middle, if they are slower."""
        by_link: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for task, time_ns in self.transfers_ns.items():
            by_link[_link(task, shape)].append(time_ns)
        usual_ns = {each: median_low(times_ns) for each, times_ns in by_link.items()}
        middle_ns = median_low(usual_ns.values()) if usual_ns else 0
        if usual_ns.get(link, 0) <= middle_ns:
            return self
        factor = middle_ns / usual_ns[link]
        transfers_ns = {
            task: round(time_ns * factor) if _link(task, shape) == link else time_ns
            for task, time_ns in self.transfers_ns.items()
        }
        return replace(self, transfers_ns=transfers_ns)

    def with_microbatches_of(self, means_ns: Mapping[tuple[int, Kind], int]) -> "ReplicaStep":
        """The same step with microbatches that all weigh as much as one whose tasks take these
        means. A microbatch's weight is how much longer its tasks take, in the median; they keep
        what else makes them differ."""
        shares: defaultdict[int, list[float]] = defaultdict(list)
        for task, time_ns in self.durations_ns.items():
            shares[task.microbatch].append(time_ns / max(1, means_ns[task[:2]]))
        weights = {microbatch: median(each) for microbatch, each in shares.items()}
        durations_ns = {
            task: round(time_ns / weights[task.microbatch]) if weights[task.microbatch] else time_ns
            for task, time_ns in self.durations_ns.items()
        }
        return replace(self, durations_ns=durations_ns)

    def scaled_to(
        self, peers: Sequence["ReplicaStep"], pp_ranks: Collection[int], shape: Shape
    ) -> "ReplicaStep":
        """The same step with the tasks of these pipeline ranks as fast in the mean as those of the
        median peer, if they are slower; each stage and kind by itself."""
        means_ns = _means(self.durations_ns)
        of_peers = [_means(peer.durations_ns) for peer in peers]
        durations_ns = dict(self.durations_ns)
        for task, time_ns in self.durations_ns.items():
            if shape.rank_of(task.stage) in pp_ranks:
                key = task[:2]
                usual_ns = median(means[key] for means in of_peers if key in means)
                if means_ns[key] > usual_ns:
                    durations_ns[task] = round(time_ns * usual_ns / means_ns[key])
        return replace(self, durations_ns=durations_ns)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step of a run."""

    window_ns: int
    """From the first rank's entry into the schedule to the last one's return from it."""
    replicas: tuple[ReplicaStep, ...]
    tail_ns: int
    """From the end of the last task of all to the end of the window."""

    def without_jitter(self) -> "MeasuredStep":
        """The same step with every task at the mean of its stage and kind in its replica."""
        return self._with(ReplicaStep.without_jitter)

    def with_median_stage(self, stage: int) -> "MeasuredStep":
        """The same step with one stage as fast as the median stage."""
        return self._with(lambda replica: replica.with_median_stage(stage))

    def with_free_links(self) -> "MeasuredStep":
        """The same step with messages that take no time."""
        return self._with(ReplicaStep.with_free_links)

    def with_usual_link(self, link: tuple[int, int], shape: Shape) -> "MeasuredStep":
        """The same step with one link as fast as the median link, in every replica."""
        return self._with(lambda replica: replica.with_usual_link(link, shape))

    def with_even_microbatches(self) -> "MeasuredStep":
        """The same step with microbatches that weigh the same in all replicas."""
        of_replicas = [_means(replica.durations_ns) for replica in self.replicas]
        means_ns = {key: round(mean(each[key] for each in of_replicas)) for key in of_replicas[0]}
        return self._with(lambda replica: replica.with_microbatches_of(means_ns))

    def with_usual_ranks(
        self, number: int, pp_ranks: Collection[int], shape: Shape
    ) -> "MeasuredStep":
        """The same step with some pipeline ranks of a replica as fast as those of the median one
        of the other replicas."""
        peers = [peer for other, peer in enumerate(self.replicas) if other != number]
        replicas = list(self.replicas)
        replicas[number] = replicas[number].scaled_to(peers, pp_ranks, shape)
        return replace(self, replicas=tuple(replicas))

    def _with(self, change: Callable[[ReplicaStep], ReplicaStep]) -> "MeasuredStep":
        return replace(self, replicas=tuple(map(change, self.replicas)))


def measure(run: RecordedRun) -> list[MeasuredStep]:
    """Measure the steps of a recorded run.

    Raises RrfpError when what a rank's dispatcher took in does not lead to the tasks that it ran.
    """
    return [_measure(run, records) for records in run.steps]


def _measure(run: RecordedRun, records: StepRecords) -> MeasuredStep:
    start_ns, end_ns = records.window
    take = _blocking_replica if run.is_blocking else _replica
    last_ns = max(
        task.end_ns
        for replica in records.replicas
        for members in replica
        for rank in members
        for task in rank.tasks
    )
    replicas = tuple(take(run, replica, start_ns) for replica in records.replicas)
    return MeasuredStep(end_ns - start_ns, replicas, end_ns - last_ns)


def _replica(run: RecordedRun, replica: tuple[Members, ...], start_ns: int) -> ReplicaStep:
    """A step over asynchronous links."""
    spans: dict[Task, Span] = {}
    could_run_ns: dict[Task, int] = {}
    came_ns: dict[Task, int] = {}
    for members in replica:
        of_rank = spans_of(members)
        could_run, came = _decided(run, members, of_rank, start_ns)
        spans |= of_rank
        could_run_ns |= could_run
        came_ns |= came
    transfers_ns = _transfers_ns(run.shape, spans, came_ns)
    return ReplicaStep(
        {task: end_ns - begin_ns for task, (begin_ns, end_ns) in spans.items()},
        {
            task: max(0, begin_ns - max(could_run_ns[task], came_ns.get(task, 0)))
            for task, (begin_ns, _) in spans.items()
        },
        transfers_ns,
    )


def _decided(
    run: RecordedRun, members: Members, spans: dict[Task, Span], start_ns: int
) -> tuple[dict[Task, int], dict[Task, int]]:
    """When each task of a rank could run, and when the rank could act on each of its messages.

    The leader's stimuli tell which messages each decision knew of. A decision that follows a task
    directly counts from the end of that task, and one that ends a wait from when it was taken.
    Every member must decide again as it did.
    """
    leader = members[0]
    for follower in range(1, len(members)):
        deque(redispatch(run, members, follower), maxlen=0)
    received_ns: dict[Task, int] = {}
    for rank in members:
        for receive in rank.receives:
            task = task_of(receive)
            received_ns[task] = max(receive.end_ns, received_ns.get(task, 0))
    could_run_ns: dict[Task, int] = {}
    came_ns: dict[Task, int] = {}
    # A rank may enter late, and cannot act on anything before that.
    free_ns = start_ns
    last_ns = leader.entry_ns - 1
    waits = False
    earlier: list[Task] = []
    latest: list[Task] = []
    for stimulus, decided in redispatch(run, members):
        if stimulus.name == "InputArrived":
            latest.append(task_of(stimulus))
            continue
        if decided is None:
            waits = waits or stimulus.name == "ComputeIdle"
            earlier += latest
            latest = []
            continue
        now_ns = max(stimulus.time_ns, free_ns) if waits else free_ns
        if not could_run_ns and (earlier or latest):
            now_ns = max(now_ns, leader.entry_ns)
        could_run_ns[decided] = now_ns
        for task in earlier:
            came_ns[task] = min(max(received_ns.get(task, now_ns), last_ns + 1), now_ns)
        for task in latest:
            raw_ns = now_ns if waits else received_ns.get(task, now_ns)
            came_ns[task] = min(max(raw_ns, last_ns + 1), now_ns)
        earlier, latest = [], []
        last_ns, free_ns, waits = now_ns, spans[decided][1], False
    return could_run_ns, came_ns


def _blocking_replica(run: RecordedRun, replica: tuple[Members, ...], start_ns: int) -> ReplicaStep:
    """A step over blocking transfers."""
    ranks = meet(run.shape, replica, [start_ns] * len(replica))
    meetings = {each.task: each for rank in ranks for gap in rank.meetings for each in gap}
    overheads_ns: dict[Task, int] = {}
    for rank in ranks:
        for gap, (task, (begin_ns, _)) in enumerate(rank.spans.items()):
            passed_ns = [each.passed_ns for each in rank.meetings[gap]]
            could_run_ns = max(rank.free_ns[gap], *(ns for ns in passed_ns if ns <= begin_ns), 0)
            overheads_ns[task] = max(0, begin_ns - could_run_ns)
    return ReplicaStep(
        {
            task: end_ns - begin_ns
            for rank in ranks
            for task, (begin_ns, end_ns) in rank.spans.items()
        },
        overheads_ns,
        {task: each.passed_ns - each.began_ns for task, each in meetings.items()},
    )


def _transfers_ns(
    shape: Shape, spans: Mapping[Task, Span], came_ns: dict[Task, int]
) -> dict[Task, int]:
    """How long each message took on its link, one after the other. A message that seems to have
    come before it can have left comes when it leaves, in `came_ns` too."""
    transfers_ns: dict[Task, int] = {}
    free_ns: dict[tuple[int, int], int] = {}
    for task, (_, end_ns) in sorted(spans.items(), key=lambda item: item[1][1]):
        receiver = shape.receiver(task)
        link = None if receiver is None else shape.link(receiver)
        if receiver is None or link is None:
            continue
        leaves_ns = max(end_ns, free_ns.get(link, 0))
        came_ns[receiver] = free_ns[link] = max(leaves_ns, came_ns[receiver])
        transfers_ns[receiver] = came_ns[receiver] - leaves_ns
    return transfers_ns


def _link(task: Task, shape: Shape) -> tuple[int, int]:
    """The pipeline ranks that send and receive the message for a task."""
    link = shape.link(task)
    assert link is not None, "it is a message between ranks"
    return link


def _means(times_ns: Mapping[Task, int]) -> dict[tuple[int, Kind], int]:
    """The mean time by stage and kind, to the nearest ns."""
    by_kind: defaultdict[tuple[int, Kind], list[int]] = defaultdict(list)
    for task, time_ns in times_ns.items():
        by_kind[task[:2]].append(time_ns)
    return {key: (2 * sum(each) + len(each)) // (2 * len(each)) for key, each in by_kind.items()}
