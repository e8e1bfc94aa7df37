"""What a step consisted of, and the same step without what slowed it."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median, median_low

from rrfp.replay.layers import even_split, work_after
from rrfp.replay.memory.changed import divided, evened, without_heavy
from rrfp.schedule.admission import pyramid
from rrfp.schedule.shape import Shape
from rrfp.schedule.sizes import Sizes
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.world import Stretch, Transfer

Means = Mapping[tuple[int, Kind], int]
"""The mean time of a stage's tasks of a kind, in ns."""


@dataclass(frozen=True, slots=True)
class ReplicaStep:
    """What one replica's step consisted of, in ns."""

    durations_ns: Mapping[Task, int]
    """By task that ran."""
    overheads_ns: Mapping[Task, int]
    """The delay before each of them."""
    transfers_ns: Mapping[Task, int]
    """The time of the message for a task, if another rank sends one."""
    members_ns: Mapping[int, Means] = field(default_factory=dict)
    """The mean times of each rank's own tasks, where several ranks run them together."""
    sizes: Sizes | None = None
    """What microbatches kept in memory, by stage; None where it is not known."""
    budgets: tuple[int, ...] = ()
    """The bounds in bytes that were in force, by pipeline rank; empty without any."""

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
        means_ns = means_of(self.durations_ns)
        return replace(self, durations_ns={task: means_ns[task[:2]] for task in self.durations_ns})

    def with_median_stage(self, stage: int) -> "ReplicaStep":
        """The same step with the tasks of one stage as fast, in the mean, as those of the median
        stage; each kind by itself."""
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

    def with_microbatches_of(self, means_ns: Means, sizes: Sizes | None) -> "ReplicaStep":
        """The same step with microbatches that all weigh as much as one whose tasks take these
        means, and keep what `sizes` say. They keep what else makes their tasks differ."""
        return replace(self._weighing(means_ns, lambda _: 1.0), sizes=sizes)

    def with_usual_microbatches(self) -> "ReplicaStep":
        """The same step with its heavy microbatches as light as the median one."""
        lighter = self._weighing(means_of(self.durations_ns), min)
        return replace(lighter, sizes=self.sizes and without_heavy(self.sizes))

    def _weighing(
        self, means_ns: Means, weigh: Callable[[tuple[float, float]], float]
    ) -> "ReplicaStep":
        """The same step with other weights, by what each microbatch and the median one weigh. A
        weight is how much longer than the mean its tasks take, in the median."""
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
        """The same step with its microbatches admitted as a pyramid, by what each took."""
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
        """The same step with its work divided evenly over the stages: in whole layers, if it is
        known how many the stages share evenly now."""
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
        """The same step with the tasks that a rank runs with others as fast as those of the median
        one of the others, if they are slower; each stage and kind by itself."""
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
        """The same step with the tasks of these pipeline ranks as fast in the mean as those of the
        median peer, if they are slower; each stage and kind by itself."""
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
        """The same step with heavy microbatches as light as the median one of their replica."""
        return self._with(ReplicaStep.with_usual_microbatches)

    def with_pyramid(self) -> "MeasuredStep":
        """The same step with each replica's microbatches admitted as a pyramid."""
        return self._with(ReplicaStep.with_pyramid)

    def with_even_stages(self, layers: int | None, shape: Shape) -> "MeasuredStep":
        """The same step with its work divided evenly over the stages."""
        return self._with(lambda replica: replica.with_even_stages(layers, shape))

    def with_usual_member(self, rank: int) -> "MeasuredStep":
        """The same step with a rank as fast as those that run its tasks with it."""
        return self._with(lambda replica: replica.with_usual_member(rank))

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


def means_of(times_ns: Mapping[Task, int]) -> dict[tuple[int, Kind], int]:
    """The mean time by stage and kind, to the nearest ns."""
    by_kind: defaultdict[tuple[int, Kind], list[int]] = defaultdict(list)
    for task, time_ns in times_ns.items():
        by_kind[task[:2]].append(time_ns)
    return {key: (2 * sum(each) + len(each)) // (2 * len(each)) for key, each in by_kind.items()}


def _link(task: Task, shape: Shape) -> tuple[int, int]:
    """The pipeline ranks that send and receive the message for a task."""
    link = shape.link(task)
    assert link is not None, "it is a message between ranks"
    return link
