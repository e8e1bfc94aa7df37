"""Measures the steps of a recorded run: tasks, the delays before them, and messages.

The measurements of a step are

- every task's own time. Ranks that run it together count as one: from when the last of them began
  it to when the last of them ended it.
- the *overhead* before it: from when it could run to its start. That is the runtime's own work, a
  group's round of agreement, and waiting for a core.
- every message's transfer: from the end of the task that sends it, or from when the link was free,
  to when its receiver could act on it. A message that a rank knew of at a decision had come by
  then, and one that came between two decisions had not come at the first. So a dispatcher that
  meets these times decides as the run's did.
- what each microbatch kept in memory on each stage, where the run tells.
- the tail from the last task of all to the end of the step's window: gradient synchronization.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from statistics import mean, median, median_low

from rrfp.errors import RrfpError
from rrfp.replay.blocking import Span, find_transfers, spans_of
from rrfp.replay.recorded import (
    Members,
    RecordedRun,
    StepRecords,
    budgets_of,
    sizes_of_rank,
    sizes_of_replica,
)
from rrfp.schedule.admission import pyramid
from rrfp.schedule.bounds import ActivationSizes, Rows
from rrfp.schedule.dispatcher import Dispatcher, Group
from rrfp.schedule.policy import counts_microbatches
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, RunTask, Task, format_task
from rrfp.simulate.engine import Stretch, Transfer
from rrfp.trace.records import (
    StimulusRecord,
    are_sizes_known,
    spread_evenly,
    step_name,
    stimulus_of,
    task_of,
)

# What microbatches keep once a replay has evened them, or the stages. Their sums stay.


def evened(of_replicas: Sequence[ActivationSizes | None]) -> list[ActivationSizes | None]:
    """Spread the bytes of each stage evenly over all microbatches of all replicas, to within a
    byte; the sums stay. If the sizes of any replica are not known, all stay as they are."""
    known = [sizes for sizes in of_replicas if sizes is not None]
    if len(known) < len(of_replicas):
        return list(of_replicas)
    kept = _evened([sizes.activations for sizes in known])
    owed = [sizes.pending_w for sizes in known if sizes.pending_w is not None]
    if not owed:
        return [ActivationSizes(rows) for rows in kept]
    return [ActivationSizes(*rows) for rows in zip(kept, _evened(owed), strict=True)]


def without_heavy(sizes: ActivationSizes) -> ActivationSizes:
    """Cap the bytes of each microbatch on a stage at those of the stage's median one."""

    def rows(of: Rows) -> Rows:
        return [[min(size, median_low(row)) for size in row] for row in of]

    return ActivationSizes(
        rows(sizes.activations), None if sizes.pending_w is None else rows(sizes.pending_w)
    )


def divided(
    sizes: ActivationSizes, divide: Callable[[Sequence[int]], Sequence[float]]
) -> ActivationSizes:
    """Divide each microbatch's bytes over the stages in other shares; its sum stays. `divide`
    computes the shares of one microbatch from its bytes by stage. Bytes pending for W never exceed
    those kept from F on."""
    kept = _divided(sizes.activations, divide)
    if sizes.pending_w is None:
        return ActivationSizes(kept)
    owed = [
        [min(pair) for pair in zip(*rows, strict=True)]
        for rows in zip(_divided(sizes.pending_w, divide), kept, strict=True)
    ]
    return ActivationSizes(kept, owed)


def _evened(of_replicas: Sequence[Rows]) -> list[Rows]:
    """Spread the bytes of each stage evenly over all microbatches of all replicas, in whole
    bytes."""
    replicas = range(len(of_replicas))
    found: list[list[Sequence[int]]] = [[] for _ in replicas]
    for rows in zip(*of_replicas, strict=True):
        num = len(rows[0])
        total = sum(map(sum, rows))
        parts = [(total + place) // (num * len(rows)) for place in range(num * len(rows))]
        for replica in replicas:
            found[replica].append(parts[replica * num : (replica + 1) * num])
    return list(found)


def _divided(rows: Rows, divide: Callable[[Sequence[int]], Sequence[float]]) -> list[list[int]]:
    """Divide the bytes of each microbatch over the stages, in the shares that `divide` computes
    from them."""
    columns = [_apportioned(sum(column), divide(column)) for column in zip(*rows, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


def _apportioned(total: int, shares: Sequence[float]) -> list[int]:
    """Divide a whole number into whole parts, which add up to it, in proportion to these shares;
    zeros if all shares are 0."""
    whole = sum(shares)
    if not whole:
        return [0] * len(shares)
    ends = [round(total * part / whole) for part in accumulate(shares, initial=0.0)]
    return [end - start for start, end in pairwise(ends)]


# The split of a model's layers over its stages that evens out the stages' work.


def work_after(work_ns: Sequence[int], split: Sequence[int], even: Sequence[int]) -> list[float]:
    """Return the work of each stage if the layers were split as `even` instead of `split` (layers
    by stage).

    A stage in the middle consists of its layers. In the first and in the last one a layer takes as
    long as in the median stage of the middle (at most its own mean; without a middle, the smaller
    of both means), and the rest, the embedding or the loss, stays.
    """
    return [
        rest + rate * layers
        for (rest, rate), layers in zip(_stage_costs(work_ns, split), even, strict=True)
    ]


def even_split(work_ns: Sequence[int], split: Sequence[int], shape: Shape) -> tuple[int, ...]:
    """Find the split of the same layers whose busiest pipeline rank has least to do, by the costs
    of `work_after`: layers are given one by one to the rank that has the least load with it. Every
    stage keeps a layer. `work_ns` is by stage, under `split`."""
    costs = _stage_costs(work_ns, split)
    found = [1] * len(split)

    def load_with_another(stage: int) -> tuple[float, float]:
        """That of its rank; of equals, the stage with less itself."""
        rank = shape.rank_of(stage)
        of_rank = [each for each in range(len(split)) if shape.rank_of(each) == rank]
        loads = [costs[each][0] + costs[each][1] * found[each] for each in of_rank]
        return sum(loads) + costs[stage][1], loads[of_rank.index(stage)]

    for _ in range(sum(split) - len(split)):
        found[min(range(len(split)), key=load_with_another)] += 1
    return tuple(found)


def _stage_costs(work_ns: Sequence[int], split: Sequence[int]) -> list[tuple[float, float]]:
    """Return for each stage the work apart from layers (0 in the middle), and the work of a
    layer."""
    rates = [ns / layers for ns, layers in zip(work_ns, split, strict=True)]
    usual = median_low(rates[1:-1] or [min(rates)])
    last = len(rates) - 1
    return [
        (ns - min(usual, rate) * layers, min(usual, rate)) if stage in (0, last) else (0.0, rate)
        for stage, (ns, rate, layers) in enumerate(zip(work_ns, rates, split, strict=True))
    ]


# A measured step, and the same step with a bottleneck removed.


Means = Mapping[tuple[int, Kind], int]
"""The mean time of a stage's tasks of a kind, in ns."""


@dataclass(frozen=True, slots=True)
class ReplicaStep:
    """The measured times of one replica's step, in ns."""

    durations_ns: Mapping[Task, int]
    """The time of each task that ran."""
    overheads_ns: Mapping[Task, int]
    """The delay before each of them."""
    transfers_ns: Mapping[Task, int]
    """The time of the message for a task, if another rank sends one."""
    members_ns: Mapping[int, Means] = field(default_factory=dict)
    """The mean times of each rank's own tasks, where several ranks run them together."""
    sizes: ActivationSizes | None = None
    """The activation sizes by stage; None if not known."""
    budgets: tuple[int, ...] = ()
    """The bounds in bytes that were in force, by pipeline rank; empty without any."""

    def busy_ns(self, shape: Shape) -> list[int]:
        """Return the time in tasks, by pipeline rank."""
        totals_ns = [0] * shape.num_ranks
        for task, time_ns in self.durations_ns.items():
            totals_ns[shape.rank_of(task.stage)] += time_ns
        return totals_ns

    @property
    def transfer(self) -> Transfer | None:
        """A function for how long each message took; None if messages take no time."""
        if not self.transfers_ns:
            return None
        return lambda sender, receiver, task: self.transfers_ns[task]

    @property
    def stretch(self) -> Stretch:
        """A function that adds its overhead to each task's time, or the step's median if the run
        had no such task."""
        usual_ns = median_low(self.overheads_ns.values())
        return lambda rank, start_ns, task, time_ns: time_ns + self.overheads_ns.get(task, usual_ns)

    def without_jitter(self) -> "ReplicaStep":
        """Return the step with every task at the mean of its stage and kind in the step; overheads
        and messages stay."""
        means_ns = means_of(self.durations_ns)
        return replace(self, durations_ns={task: means_ns[task[:2]] for task in self.durations_ns})

    def with_median_stage(self, stage: int) -> "ReplicaStep":
        """Return the step with the tasks of one stage as fast, in the mean, as those of the median
        stage; each kind by itself. A stage that is faster gets slower."""
        means_ns = means_of(self.durations_ns)
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
        """Return the step with messages that take no time."""
        return replace(self, transfers_ns={})

    def with_usual_link(self, link: tuple[int, int], shape: Shape) -> "ReplicaStep":
        """Return the step with the messages of one link, by its pipeline ranks, as fast in the
        median as those of the median link, if they are slower; otherwise it stays."""
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

    def with_microbatches_of(self, means_ns: Means, sizes: ActivationSizes | None) -> "ReplicaStep":
        """Return the step with microbatches that all weigh as much as one whose tasks take these
        means, and with these activation sizes. Other differences between their tasks stay."""
        return replace(self._weighing(means_ns, lambda _: 1.0), sizes=sizes)

    def with_usual_microbatches(self) -> "ReplicaStep":
        """Return the step with heavy microbatches as light as the median one, in task times and in
        activation bytes; light ones stay."""
        lighter = self._weighing(means_of(self.durations_ns), min)
        return replace(lighter, sizes=self.sizes and without_heavy(self.sizes))

    def _weighing(
        self, means_ns: Means, weigh: Callable[[tuple[float, float]], float]
    ) -> "ReplicaStep":
        """Return the step with other weights of its microbatches; `weigh` computes each from what
        the microbatch and the median one weigh. A weight is the median, over the microbatch's
        tasks, of their times as multiples of the means."""
        shares: defaultdict[int, list[float]] = defaultdict(list)
        for task, time_ns in self.durations_ns.items():
            shares[task.microbatch].append(time_ns / max(1, means_ns[task[:2]]))
        weights = {microbatch: median(each) for microbatch, each in shares.items()}
        usual = median_low(weights.values())
        factors = {
            microbatch: weigh((weight, usual)) / weight if weight else 1.0
            for microbatch, weight in weights.items()
        }
        durations_ns = {
            task: round(time_ns * factors[task.microbatch])
            for task, time_ns in self.durations_ns.items()
        }
        return replace(self, durations_ns=durations_ns)

    def with_pyramid(self) -> "ReplicaStep":
        """Return the step with its microbatches admitted as a pyramid, by what each took. Task
        times and sizes move with them; overheads and messages stay in place."""
        weights_ns: defaultdict[int, int] = defaultdict(int)
        for task, time_ns in self.durations_ns.items():
            weights_ns[task.microbatch] += time_ns
        order = pyramid([weights_ns[microbatch] for microbatch in range(len(weights_ns))])
        durations_ns = {
            task: self.durations_ns[task._replace(microbatch=order[task.microbatch])]
            for task in self.durations_ns
        }
        sizes = self.sizes and self.sizes.permuted(order)
        return replace(self, durations_ns=durations_ns, sizes=sizes)

    def with_even_stages(self, layers: int | None, shape: Shape) -> "ReplicaStep":
        """Return the step with its work and bytes divided evenly over the stages: in whole layers
        if `layers` is given, assuming that the stages share them evenly now; otherwise all stages
        get the same time and bytes."""
        work_ns = [0] * shape.num_stages
        for task, time_ns in self.durations_ns.items():
            work_ns[task.stage] += time_ns
        sizes = self.sizes
        if layers is None:
            even_ns = [mean(work_ns)] * shape.num_stages
            sizes = sizes and divided(sizes, lambda column: [1] * len(column))
        else:
            split = [layers // shape.num_stages] * shape.num_stages
            even = even_split(work_ns, split, shape)
            even_ns = work_after(work_ns, split, even)
            sizes = sizes and divided(sizes, lambda column: work_after(column, split, even))
        durations_ns = {
            task: round(time_ns * even_ns[task.stage] / max(1, work_ns[task.stage]))
            for task, time_ns in self.durations_ns.items()
        }
        return replace(self, durations_ns=durations_ns, sizes=sizes)

    def with_usual_member(self, rank: int) -> "ReplicaStep":
        """Return the step with the tasks that a rank runs with others as fast in the mean as those
        of the median one of the others, if they are slower; each stage and kind by itself. It stays
        if the rank shares no tasks."""
        own = self.members_ns.get(rank, {})
        others = [
            means
            for other, means in self.members_ns.items()
            if other != rank and means.keys() == own.keys()
        ]
        if not others:
            return self
        factors = {
            key: min(1.0, median(means[key] for means in others) / max(1, ns))
            for key, ns in own.items()
        }
        durations_ns = {
            task: round(time_ns * factors.get(task[:2], 1.0))
            for task, time_ns in self.durations_ns.items()
        }
        return replace(self, durations_ns=durations_ns)

    def scaled_to(
        self, peers: Sequence["ReplicaStep"], pp_ranks: Collection[int], shape: Shape
    ) -> "ReplicaStep":
        """Return the step with the tasks of these pipeline ranks as fast in the mean as those of
        the median peer, if they are slower; each stage and kind by itself."""
        means_ns = means_of(self.durations_ns)
        of_peers = [means_of(peer.durations_ns) for peer in peers]
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
    """One measured step of a run; the methods return changed copies."""

    window_ns: int
    """From the first rank's entry into the schedule to the last one's return from it."""
    replicas: tuple[ReplicaStep, ...]
    tail_ns: int
    """From the end of the last task of all to the end of the window."""

    def without_jitter(self) -> "MeasuredStep":
        """Return the step with every task at the mean of its stage and kind in its replica."""
        return self._with(ReplicaStep.without_jitter)

    def with_median_stage(self, stage: int) -> "MeasuredStep":
        """Return the step with one stage as fast as the median stage, in every replica."""
        return self._with(lambda replica: replica.with_median_stage(stage))

    def with_free_links(self) -> "MeasuredStep":
        """Return the step with messages that take no time."""
        return self._with(ReplicaStep.with_free_links)

    def with_usual_link(self, link: tuple[int, int], shape: Shape) -> "MeasuredStep":
        """Return the step with one link as fast as the median link, in every replica, if it is
        slower."""
        return self._with(lambda replica: replica.with_usual_link(link, shape))

    def with_even_microbatches(self) -> "MeasuredStep":
        """Return the step with microbatches that weigh the same in all replicas, in task times and,
        if all sizes are known, in bytes."""
        of_replicas = [means_of(replica.durations_ns) for replica in self.replicas]
        means_ns = {key: round(mean(each[key] for each in of_replicas)) for key in of_replicas[0]}
        sizes = evened([replica.sizes for replica in self.replicas])
        return replace(
            self,
            replicas=tuple(
                replica.with_microbatches_of(means_ns, own)
                for replica, own in zip(self.replicas, sizes, strict=True)
            ),
        )

    def with_usual_microbatches(self) -> "MeasuredStep":
        """Return the step with heavy microbatches as light as the median one of their replica;
        light ones stay."""
        return self._with(ReplicaStep.with_usual_microbatches)

    def with_pyramid(self) -> "MeasuredStep":
        """Return the step with each replica's microbatches admitted as a pyramid, by what each
        took."""
        return self._with(ReplicaStep.with_pyramid)

    def with_even_stages(self, layers: int | None, shape: Shape) -> "MeasuredStep":
        """Return the step with the work of each replica divided evenly over the stages; in whole
        layers if `layers` is given."""
        return self._with(lambda replica: replica.with_even_stages(layers, shape))

    def with_usual_member(self, rank: int) -> "MeasuredStep":
        """Return the step with a rank as fast as the median one of those that run its tasks with
        it, if it is slower."""
        return self._with(lambda replica: replica.with_usual_member(rank))

    def with_usual_ranks(
        self, number: int, pp_ranks: Collection[int], shape: Shape
    ) -> "MeasuredStep":
        """Return the step with some pipeline ranks of a replica as fast as those of the median one
        of the other replicas, if they are slower. The other replicas stay."""
        peers = [peer for other, peer in enumerate(self.replicas) if other != number]
        replicas = list(self.replicas)
        replicas[number] = replicas[number].scaled_to(peers, pp_ranks, shape)
        return replace(self, replicas=tuple(replicas))

    def _with(self, change: Callable[[ReplicaStep], ReplicaStep]) -> "MeasuredStep":
        """Return the step with a change to each of its replicas."""
        return replace(self, replicas=tuple(map(change, self.replicas)))


def means_of(times_ns: Mapping[Task, int]) -> dict[tuple[int, Kind], int]:
    """Return the mean time by stage and kind, to the nearest ns."""
    by_kind: defaultdict[tuple[int, Kind], list[int]] = defaultdict(list)
    for task, time_ns in times_ns.items():
        by_kind[task[:2]].append(time_ns)
    return {key: (2 * sum(each) + len(each)) // (2 * len(each)) for key, each in by_kind.items()}


def _link(task: Task, shape: Shape) -> tuple[int, int]:
    """Return the pipeline ranks that send and receive the message for a task, which must have
    one."""
    link = shape.link(task)
    assert link is not None, "it is a message between ranks"
    return link


# Recorded stimuli, passed again to a dispatcher like the rank's own.


def decisions(
    stimuli: Iterable[StimulusRecord], dispatcher: Dispatcher
) -> Iterator[tuple[StimulusRecord, Task | None]]:
    """Pass one step's stimuli, in their recorded order, to a new dispatcher; yield each with the
    task that the dispatcher then runs, if any. Nothing is compared with the recorded tasks."""
    for record in stimuli:
        task = None
        for instruction in dispatcher.handle(record.time_ns, stimulus_of(record)):
            if isinstance(instruction, RunTask):
                task = instruction.task
        yield record, task


def redispatch(
    run: RecordedRun, members: Members, member: int = 0
) -> Iterator[tuple[StimulusRecord, Task | None]]:
    """Decide a step of one rank again from its recorded stimuli; yield each stimulus with the task
    that the rank then ran, if any.

    Raises RrfpError at the first task that differs from the recorded one, if a recorded task is
    left, and for a run of Megatron's own schedules, which no dispatcher ran.
    """
    rank = members[member]
    split = run.shape.splits_backward
    num_decided = 0
    for stimulus, decided in decisions(rank.stimuli, dispatcher_of(run, members, member)):
        if decided is not None:
            record = rank.tasks[num_decided]
            if decided != task_of(record):
                raise RrfpError(
                    f"what rank {rank.info.rank} took in leads to "
                    f"{format_task(decided, split=split)} where it ran "
                    f"{format_task(task_of(record), split=split)} in {step_name(record.step)}: its "
                    "settings are not those of the trace, or it is of another version of rrfp; "
                    "see 'rrfp trace check' and record it again"
                )
            num_decided += 1
        yield stimulus, decided
    if num_decided < len(rank.tasks):
        raise RrfpError(
            f"what the dispatcher of rank {rank.info.rank} took in leads to {num_decided} "
            f"of the {len(rank.tasks)} tasks that it ran; see 'rrfp trace check'"
        )


def dispatcher_of(run: RecordedRun, members: Members, member: int = 0) -> Dispatcher:
    """Make a dispatcher such as that rank had at the start of a step, with its bound and its role
    in its group. Raises RrfpError if the rank recorded no stimuli or stimuli of another group, or
    if it ran under a hold in bytes that the trace does not record."""
    rank = members[member]
    if not rank.stimuli:
        raise RrfpError(
            f"rank {rank.info.rank} recorded nothing that a dispatcher took in, as Megatron's own "
            "schedules have none; replay a run of --dispatch ready or fixed"
        )
    if not all(0 <= stimulus.member < len(members) for stimulus in rank.stimuli):
        raise RrfpError(
            f"rank {rank.info.rank} took in what arrived at a rank that is not of its group; see "
            "'rrfp trace check'"
        )
    group = Group(len(members), member == 0) if rank.is_in_group else None
    if counts_microbatches(run.policy.hold):
        return Dispatcher(run.shape, rank.info.pp_rank, run.policy, group)
    budget = rank.budget_bytes or run.policy.hold_bytes
    if budget is None or not are_sizes_known(rank.tasks):
        raise RrfpError(
            f"rank {rank.info.rank} ran with a hold of {run.policy.hold}, and the trace does not "
            "tell its bytes; record it again with this version of rrfp"
        )
    sizes = sizes_of_rank(run.shape, rank)
    return Dispatcher(run.shape, rank.info.pp_rank, run.policy, group, sizes=sizes, budget=budget)


def measure(run: RecordedRun) -> list[MeasuredStep]:
    """Measure the steps of a recorded run, by deciding each again unless its transfers blocked.

    Raises RrfpError if the stimuli of a rank's dispatcher do not lead to the tasks that it ran, and
    for recorded bytes that do not add up.
    """
    return [_measure(run, records) for records in run.steps]


def _measure(run: RecordedRun, records: StepRecords) -> MeasuredStep:
    """Measure one step: its replicas, with their activation sizes and budgets, its window, and the
    tail after its last task."""
    start_ns, end_ns = records.window
    take = _blocking_replica if run.is_blocking else _replica
    last_ns = max(
        task.end_ns
        for replica in records.replicas
        for members in replica
        for rank in members
        for task in rank.tasks
    )
    replicas = tuple(
        replace(
            take(run, replica, start_ns),
            sizes=sizes_of_replica(run.shape, replica),
            budgets=budgets_of(replica),
        )
        for replica in records.replicas
    )
    return MeasuredStep(end_ns - start_ns, replicas, end_ns - last_ns)


def _replica(run: RecordedRun, replica: tuple[Members, ...], start_ns: int) -> ReplicaStep:
    """Measure one replica's step over asynchronous links: task times, the delays before tasks, and
    messages."""
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
        _members_ns(replica),
    )


def _decided(
    run: RecordedRun, members: Members, spans: dict[Task, Span], start_ns: int
) -> tuple[dict[Task, int], dict[Task, int]]:
    """Return the time at which each task of a rank could run, and the time at which the rank could
    act on each of its messages.

    The leader's stimuli show which messages each decision knew of. A decision that follows a task
    directly counts from the end of that task, and one that ends a wait from when it was taken.
    Every member is decided again; RrfpError is raised if one differs from the record.
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
        if stimulus.name == "Announced":
            continue  # It makes nothing ready.
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
    """Measure one replica's step over blocking transfers: task times, the delays before tasks, and
    messages, which are derived from the waits if the run was imported."""
    entries_ns = [start_ns] * len(replica)
    ranks = find_transfers(run.shape, replica, entries_ns, are_recorded=not run.is_imported)
    transfers = {each.task: each for rank in ranks for gap in rank.transfers for each in gap}
    overheads_ns: dict[Task, int] = {}
    for rank in ranks:
        for gap, (task, (begin_ns, _)) in enumerate(rank.spans.items()):
            passed_ns = [each.passed_ns for each in rank.transfers[gap]]
            could_run_ns = max(rank.free_ns[gap], *(ns for ns in passed_ns if ns <= begin_ns), 0)
            overheads_ns[task] = max(0, begin_ns - could_run_ns)
    return ReplicaStep(
        {
            task: end_ns - begin_ns
            for rank in ranks
            for task, (begin_ns, end_ns) in rank.spans.items()
        },
        overheads_ns,
        {task: each.passed_ns - each.began_ns for task, each in transfers.items()},
        _members_ns(replica),
    )


def _transfers_ns(
    shape: Shape, spans: Mapping[Task, Span], came_ns: dict[Task, int]
) -> dict[Task, int]:
    """Return how long each message took on its link, one after the other. A message that seems to
    have come before it can have left comes when it leaves; `came_ns` is changed accordingly."""
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


def _members_ns(replica: tuple[Members, ...]) -> dict[int, Means]:
    """Return the mean times of each rank's own tasks, by its rank, where several ranks run them
    together."""
    return {
        rank.info.rank: means_of(
            {task_of(task): task.end_ns - task.start_ns for task in rank.tasks}
        )
        for members in replica
        if len(members) > 1
        for rank in members
    }


# Which steps of a long run are replayed, where replaying all of them would take too long.


@dataclass(frozen=True, slots=True)
class StepSample:
    """A limit on how many tasks of a run are replayed."""

    num_tasks: int
    """The number of tasks to replay in all; at least one step is."""
    most_tasks_of_a_step: int
    """Larger steps are not replayed at all."""

    def choose(self, steps: Sequence[int], num_tasks_of_a_step: float) -> list[int]:
        """Choose some of a run's steps, spread evenly over them, at least one: as many as
        `num_tasks` allows.

        Raises RrfpError when a step has too many tasks.
        """
        if num_tasks_of_a_step > self.most_tasks_of_a_step:
            raise RrfpError(
                f"a step has {num_tasks_of_a_step:,.0f} tasks, more than the "
                f"{self.most_tasks_of_a_step:,} that are replayed here; 'rrfp analyze whatif' "
                "replays them all"
            )
        return spread_evenly(steps, max(1, int(self.num_tasks / max(num_tasks_of_a_step, 1))))
