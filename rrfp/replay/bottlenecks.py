"""The bottlenecks of a run, by the time that removing each would save.

The run is replayed with each candidate made like its peers: a stage like the median stage, a rank
or a replica like the same ranks of the others, a link like the median link, microbatches and stages
like each other; and with another policy: without its binding order, with twice its bound, or with a
bound in bytes instead of one that counts microbatches. Bottlenecks are ranked by the saving, not by
which rank waits.

Some effects make the steps of every run longer than their work: a pipeline fills and drains,
messages take time, and task times scatter, so that a stage has a few long tasks. Such background
effects are reported only if they save more than twice as much as any other bottleneck.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from statistics import fmean, median, median_low

from rrfp.errors import RrfpError, UsageError
from rrfp.replay.change import W_SHARE, Change, replay
from rrfp.replay.measured import MeasuredStep
from rrfp.replay.recorded import RecordedRun
from rrfp.schedule.admission import Admit
from rrfp.schedule.hints import Hint
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import Auto, Bytes, Dispatch, doubled
from rrfp.schedule.tasks import Kind

# The two parts of a bubble: the part that the schedule leaves, and the part that jitter adds.


@dataclass(frozen=True, slots=True)
class BubbleParts:
    """Idle time as a share of the measured time; the parts sum to the whole."""

    structural: float
    excess: float

    @property
    def fraction(self) -> float:
        """The whole bubble as a share of the measured time."""
        return self.structural + self.excess

    @property
    def description(self) -> str:
        """The parts in two sentences, in whole percents that add up."""
        whole, structural = (round(100 * part) for part in (self.fraction, self.structural))
        excess = whole - structural
        jitter = f"{'added' if excess > 0 else 'took off'} {abs(excess)}%"
        return (
            f"{whole}% of the ranks' time was bubble. Tasks at their mean times would have left "
            f"{structural}%; jitter {jitter if excess else 'changed nothing'}."
        )

    def as_json(self) -> dict[str, float]:
        """Return both parts and their sum as JSON."""
        return {
            "fraction": self.fraction,
            "structural": self.structural,
            "excess": self.excess,
        }


# The structural part of a run's bubble, which its schedule leaves, and the excess, which jitter
# adds.
#
# The *structural* part is the bubble that the same tasks would leave under the same policy if each
# took the mean time of its stage and kind in the step; the rest is *excess*.
#
# Only the tasks' own times are averaged. Messages and the delays before tasks stay as they were,
# and count as structural: many of them happen once, like a rank's late entry into the step, and a
# mean would spread them over all messages of a link.
#
# Excess may be negative, and usually is on ranks that share cores: a task takes long while others
# run beside it, and less time while they wait. The recorded times then match the recorded idle
# time, and the means do not.


@dataclass(frozen=True, slots=True)
class Structural:
    """The parts of the bubble, over the steps of a run."""

    ranks: tuple[BubbleParts, ...]
    """By pipeline rank, over its replicas."""

    @property
    def whole(self) -> BubbleParts:
        """The mean of the parts over all ranks."""
        count = len(self.ranks)
        return BubbleParts(
            sum(rank.structural for rank in self.ranks) / count,
            sum(rank.excess for rank in self.ranks) / count,
        )


def structural(run: RecordedRun, steps: Sequence[MeasuredStep]) -> Structural:
    """Divide the bubble of these steps into its two parts, by pipeline rank: the structural part
    remains in a replay with each task at its mean time, and the excess is the rest."""
    window_ns = sum(step.window_ns for step in steps)
    smooth_ns = sum(replay(run, step.without_jitter()).makespan_ns for step in steps)
    busy_ns = [0.0] * run.shape.num_ranks
    for step in steps:
        for replica in step.replicas:
            for rank, time_ns in enumerate(replica.busy_ns(run.shape)):
                busy_ns[rank] += time_ns / len(step.replicas)
    return Structural(
        tuple(
            BubbleParts((smooth_ns - busy) / window_ns, (window_ns - smooth_ns) / window_ns)
            for busy in busy_ns
        )
    )


LEAST_SAVING = 0.01
"""The smallest saving that is reported, as a share of a step."""

_LEAST_EXCESS = 0.05
"""The excess over its peers up to which a rank, replica or link is not a candidate, because they
are never quite equal."""
LEAST_EXCESS_OF_STAGE = 0.02
"""The same for a stage. Stages differ by their layers, and little by chance."""
_MOST_OF_A_KIND = 3
"""The number of candidates of a kind that are replayed, the worst ones."""
_BACKGROUND_FACTOR = 2
"""A background effect must save more than this factor times the worst other bottleneck."""
_SAME_SHARE = 0.8
"""Two bottlenecks count as one if removing the smaller saves at least this share of the larger's
saving."""
_ONE_STAGE = 0.6
"""Uneven stages count as one slow stage if speeding it up saves at least this share of the saving
of evening out all."""


class BottleneckKind(StrEnum):
    """The kinds of bottlenecks."""

    SLOW_STAGE = "slow_stage"
    SLOW_RANK = "slow_rank"
    REPLICA = "replica"
    SLOW_LINK = "slow_link"
    UNEVEN_LAYERS = "uneven_layers"
    UNEVEN_MICROBATCHES = "uneven_microbatches"
    ORDER = "order"
    BOUND = "bound"
    MEMORY = "memory"
    LINKS = "links"
    UNEVEN_TASKS = "uneven_tasks"
    PIPELINE_DEPTH = "pipeline_depth"


BACKGROUND = (BottleneckKind.LINKS, BottleneckKind.UNEVEN_TASKS, BottleneckKind.PIPELINE_DEPTH)


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """One bottleneck, and the saving of removing it."""

    kind: BottleneckKind
    change: Change
    pp_rank: int | None = None
    """The pipeline rank of the stage, rank or link, if it is one."""
    excess: float = 0.0
    """The time that it takes beyond its peers, as a share of the peers' time."""
    saving: float = 0.0
    """The share of a step that removing it saves in a replay, the median over the steps."""
    remedy: Change | None = None
    """An available change that removes it, at least in part."""
    remedy_saving: float = 0.0
    """The share of a step that the remedy saves."""
    hides: float = 0.0
    """The share of a step that it costs, if that is more than the saving: evening out heavy
    microbatches moves their excess work to the others."""

    is_scattered: bool = False
    """Whether a stage has more work than its peers only because of a few long tasks."""

    @property
    def is_background(self) -> bool:
        """True if this effect makes the steps of every run longer, so that it needs a large saving
        to be reported."""
        return self.kind in BACKGROUND or self.is_scattered

    @property
    def weight(self) -> float:
        """The share of a step by which background effects are judged: the saving or, if larger,
        what heavy microbatches cost (`hides`)."""
        return max(self.saving, self.hides)


def find_bottlenecks(run: RecordedRun, steps: Sequence[MeasuredStep]) -> list[Bottleneck]:
    """Find the bottlenecks of a run by replaying each candidate's removal; the largest saving comes
    first. `steps` are its measured steps. Savings below 1%, consequences of other bottlenecks and
    small background effects are left out.

    Raises RrfpError for a step that takes no time.
    """
    if any(step.window_ns <= 0 for step in steps):
        raise RrfpError("the steps take no time in this trace; see 'rrfp trace check'")
    own = [replay(run, step) for step in steps]
    own_ns = [step.makespan_ns for step in own]
    most_bytes = max(max(step.peak_held_bytes) for step in own)
    found = []
    for candidate in _candidates(run, steps, most_bytes):
        saving = _saving(run, steps, own_ns, candidate.change)
        if saving < LEAST_SAVING:
            continue
        measured = replace(candidate, saving=saving)
        if candidate.remedy is not None:
            remedy_saving = _saving(run, steps, own_ns, candidate.remedy)
            measured = replace(measured, remedy_saving=remedy_saving)
        if candidate.kind is BottleneckKind.UNEVEN_MICROBATCHES:
            hides = _saving(run, steps, own_ns, Change(usual_microbatches=True))
            measured = replace(measured, hides=hides)
        found.append(measured)
    found = _without_consequences(run, found)
    most = max((each.weight for each in found if not each.is_background), default=0.0)
    return sorted(
        (
            each
            for each in found
            if not each.is_background or each.saving > _BACKGROUND_FACTOR * most
        ),
        key=lambda each: -each.saving,
    )


def _saving(
    run: RecordedRun, steps: Sequence[MeasuredStep], own_ns: Sequence[int], change: Change
) -> float:
    """Return the share of a step's replayed time (`own_ns`) that a change saves, the median over
    the steps; 0 if the change does not apply to the run."""
    try:
        policy, shape = change.policy(run) if change.has_policy else (None, None)
        after_ns = [
            replay(run, change.apply(step, run), policy, shape, W_SHARE).makespan_ns
            for step in steps
        ]
    except UsageError:
        return 0.0
    return median(1 - after / own for after, own in zip(after_ns, own_ns, strict=True))


def _candidates(
    run: RecordedRun, steps: Sequence[MeasuredStep], most_bytes: int
) -> Iterator[Bottleneck]:
    """Yield the candidates, without savings: the worst slow stages, ranks, replicas and links, and
    the general ones, such as free links, even microbatches, and `ready` dispatch if an order binds,
    else a wider bound. `most_bytes` is the largest peak of a rank's activations; 0 if not known."""
    stages = list(_slow_stages(run, steps))
    whole = [each for each in stages if not each.is_scattered]
    yield from _worst(whole, LEAST_EXCESS_OF_STAGE)
    yield from _worst((each for each in stages if each.is_scattered), LEAST_EXCESS_OF_STAGE)
    yield from _worst(_slow_ranks(run, steps))
    yield from _worst(_slow_replicas(run, steps))
    most = max(whole, key=lambda each: each.excess, default=None)
    if most is not None and most.excess > LEAST_EXCESS_OF_STAGE:
        change = Change(even_stages=True)
        yield replace(most, kind=BottleneckKind.UNEVEN_LAYERS, change=change, remedy=None)
    if run.knows_arrivals:
        yield from _worst(_slow_links(run, steps))
    yield Bottleneck(BottleneckKind.LINKS, Change(free_links=True))
    yield Bottleneck(
        BottleneckKind.UNEVEN_MICROBATCHES,
        Change(even_microbatches=True),
        remedy=Change(admit=Admit.PYRAMID),
    )
    yield Bottleneck(BottleneckKind.UNEVEN_TASKS, Change(without_jitter=True))
    if run.policy.dispatch is Dispatch.FIXED:
        yield Bottleneck(BottleneckKind.ORDER, Change(_own_ready_hint(run), Dispatch.READY))
    else:
        # A bound withholds nothing from an order that binds.
        yield from _bounds(run, steps, most_bytes)
    if Kind.W not in run.shape.kinds:
        for hint in ("bfw", "bfw-deep")[: run.shape.num_chunks]:
            yield Bottleneck(BottleneckKind.PIPELINE_DEPTH, Change(HINTS[hint]))


def _bounds(
    run: RecordedRun, steps: Sequence[MeasuredStep], most_bytes: int
) -> Iterator[Bottleneck]:
    """Yield twice the run's bound, if it has one that is known; and if that is a limit or counts
    microbatches, a bound in bytes at the largest peak of a rank (`most_bytes`), if that is
    known."""
    limit, hold = run.policy.limit, run.policy.hold
    if hold is Auto.AUTO:
        budgets = [each for step in steps for replica in step.replicas for each in replica.budgets]
        hold = Bytes(max(budgets)) if budgets else None
    if limit is not None:
        yield Bottleneck(BottleneckKind.BOUND, Change(limit=2 * limit))
    elif hold is not None:
        wider = doubled(hold)
        if isinstance(wider, Bytes):
            wider = _rounded_down(wider.num)
        yield Bottleneck(BottleneckKind.BOUND, Change(hold=wider))
    if most_bytes and (limit is not None or isinstance(hold, int | Fraction)):
        yield Bottleneck(BottleneckKind.MEMORY, Change(hold=_rounded_down(most_bytes)))


def _rounded_down(num_bytes: int) -> Bytes:
    """Round down to a whole number of MiB or KiB, if that changes it by at most a thousandth."""
    unit = next((unit for unit in (2**20, 2**10) if num_bytes >= 1000 * unit), 1)
    return Bytes(num_bytes // unit * unit)


def _own_ready_hint(run: RecordedRun) -> Hint:
    """Return the default hint for `ready` dispatch with the same kinds of tasks: `bf`, or `bfw`
    with split backwards, and its deep form for several chunks."""
    name = "bfw" if run.shape.splits_backward else "bf"
    return HINTS[name if run.shape.num_chunks == 1 else f"{name}-deep"]


def _worst(
    candidates: Iterable[Bottleneck], least_excess: float = _LEAST_EXCESS
) -> list[Bottleneck]:
    """Return the candidates with an excess above `least_excess`, the largest first, 3 at most."""
    found = [each for each in candidates if each.excess > least_excess]
    return sorted(found, key=lambda each: -each.excess)[:_MOST_OF_A_KIND]


def _slow_stages(run: RecordedRun, steps: Sequence[MeasuredStep]) -> Iterator[Bottleneck]:
    """Yield every stage, the fast ones too, with its mean work beyond the median stage's. It is
    marked as scattered if the upper quartiles show less than half of that, so that a few long tasks
    cause it. Even stages are the remedy if the run's layers are known."""
    times_ns: defaultdict[tuple[int, Kind], list[int]] = defaultdict(list)
    for step in steps:
        for replica in step.replicas:
            for task, time_ns in replica.durations_ns.items():
                times_ns[task.stage, task.kind].append(time_ns)
    excesses = _excesses(run, {key: fmean(each) for key, each in times_ns.items()})
    usual = _excesses(run, {key: _usually_at_most(each) for key, each in times_ns.items()})
    for stage, excess in enumerate(excesses):
        yield Bottleneck(
            BottleneckKind.SLOW_STAGE,
            Change(median_stage=stage),
            run.shape.rank_of(stage),
            excess,
            remedy=None if run.layers is None else Change(even_stages=True),
            is_scattered=usual[stage] < excess / 2,
        )


def _excesses(run: RecordedRun, times_ns: Mapping[tuple[int, Kind], float]) -> list[float]:
    """Return the work of each stage beyond the median stage's, as a share of that; negative for
    less work. `times_ns` are the task times by stage and kind."""
    work_ns = [0.0] * run.shape.num_stages
    for (stage, _), ns in times_ns.items():
        work_ns[stage] += ns
    usual_ns = max(1.0, median_low(work_ns))
    return [ns / usual_ns - 1 for ns in work_ns]


def _usually_at_most(times_ns: Sequence[int]) -> int:
    """Return the upper quartile of these times."""
    return sorted(times_ns)[3 * (len(times_ns) - 1) // 4]


def _slow_ranks(run: RecordedRun, steps: Sequence[MeasuredStep]) -> Iterator[Bottleneck]:
    """Yield every rank with its work beyond that of the same ranks of the other replicas (the
    median); in a run of one replica, beyond that of the members of its group. The rank is named by
    its busiest member."""
    busy_ns = _busy_ns(run, steps)
    if len(busy_ns) == 1:
        yield from _slow_members(run)
    for number, of_ranks in enumerate(busy_ns):
        for pp_rank, ns in enumerate(of_ranks):
            others = [each[pp_rank] for each in busy_ns if each is not of_ranks]
            if others:
                rank = _slowest_member(run, number, pp_rank)
                excess = ns / max(1, median(others)) - 1
                yield Bottleneck(BottleneckKind.SLOW_RANK, Change(usual_rank=rank), pp_rank, excess)


def _slow_members(run: RecordedRun) -> Iterator[Bottleneck]:
    """Yield every rank of the first replica with its work beyond the median of the other members of
    its group; nothing where groups have one member."""
    for pp_rank in range(run.shape.num_ranks):
        work_ns = _members_work_ns(run, 0, pp_rank)
        for rank, ns in work_ns.items():
            others = [other for each, other in work_ns.items() if each != rank]
            if others:
                excess = ns / max(1, median(others)) - 1
                yield Bottleneck(BottleneckKind.SLOW_RANK, Change(usual_rank=rank), pp_rank, excess)


def _slowest_member(run: RecordedRun, replica: int, pp_rank: int) -> int:
    """Return the rank of the member of a pipeline rank's group that has most work; of equals, the
    first."""
    work_ns = _members_work_ns(run, replica, pp_rank)
    return max(work_ns, key=lambda rank: (work_ns[rank], -rank))


def _members_work_ns(run: RecordedRun, replica: int, pp_rank: int) -> dict[int, int]:
    """Return the time in tasks, over all steps, of each member of a pipeline rank's group, by its
    rank."""
    work_ns: defaultdict[int, int] = defaultdict(int)
    for step in run.steps:
        for member in step.replicas[replica][pp_rank]:
            work_ns[member.info.rank] += sum(task.end_ns - task.start_ns for task in member.tasks)
    return work_ns


def _slow_replicas(run: RecordedRun, steps: Sequence[MeasuredStep]) -> Iterator[Bottleneck]:
    """Yield every replica with its work beyond the median of the others'; nothing with one
    replica."""
    busy_ns = _busy_ns(run, steps)
    for number, of_ranks in enumerate(busy_ns):
        others = [sum(each) for each in busy_ns if each is not of_ranks]
        if others:
            excess = sum(of_ranks) / max(1, median(others)) - 1
            yield Bottleneck(BottleneckKind.REPLICA, Change(usual_replica=number), excess=excess)


def _busy_ns(run: RecordedRun, steps: Sequence[MeasuredStep]) -> list[list[int]]:
    """Return the time in tasks over these steps, by replica and pipeline rank."""
    totals_ns = [[0] * run.shape.num_ranks for _ in run.steps[0].replicas]
    for step in steps:
        for of_ranks, replica in zip(totals_ns, step.replicas, strict=True):
            for pp_rank, ns in enumerate(replica.busy_ns(run.shape)):
                of_ranks[pp_rank] += ns
    return totals_ns


def _slow_links(run: RecordedRun, steps: Sequence[MeasuredStep]) -> Iterator[Bottleneck]:
    """Yield every link, with its receiver as the rank, and with the median time of its messages
    beyond the median link's, as a share of that."""
    times_ns: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for step in steps:
        for replica in step.replicas:
            for task, time_ns in replica.transfers_ns.items():
                link = run.shape.link(task)
                if link is not None:
                    times_ns[link].append(time_ns)
    medians_ns = {link: median_low(each) for link, each in times_ns.items()}
    if not medians_ns:
        return
    usual_ns = max(1, median_low(medians_ns.values()))
    for link, ns in medians_ns.items():
        yield Bottleneck(
            BottleneckKind.SLOW_LINK, Change(usual_link=link), link[1], ns / usual_ns - 1
        )


def _without_consequences(run: RecordedRun, found: list[Bottleneck]) -> list[Bottleneck]:
    """Drop bottlenecks that are part of another one, or only its consequence: heavy microbatches,
    stages, ranks and replicas that a slow rank or replica explains, either slow stages or uneven
    layers, a wider bound where one in bytes saves nearly as much, and all but the best hint for the
    pipeline's depth. If that saves more than replacing a binding order, both become one."""
    by_kind: defaultdict[BottleneckKind, list[Bottleneck]] = defaultdict(list)
    for each in found:
        by_kind[each.kind].append(each)
    ranks, replicas = by_kind[BottleneckKind.SLOW_RANK], by_kind[BottleneckKind.REPLICA]
    stages = [each for each in by_kind[BottleneckKind.SLOW_STAGE] if not each.is_scattered]
    dropped: list[Bottleneck] = []
    # All microbatches of a slow replica look heavy.
    for heavy in by_kind[BottleneckKind.UNEVEN_MICROBATCHES]:
        dropped += _explained_by(heavy, replicas + ranks, _SAME_SHARE)
    # A slow rank makes its replica and its stage look slow.
    for rank in ranks:
        assert rank.change.usual_rank is not None
        number, _ = run.place_of(rank.change.usual_rank)
        for replica in replicas:
            if replica.change.usual_replica == number:
                is_rank = rank.saving >= _SAME_SHARE * replica.saving
                dropped.append(replica if is_rank else rank)
        for stage in stages:
            if stage.pp_rank == rank.pp_rank:
                dropped += _explained_by(stage, [rank], _SAME_SHARE)
    # One slow stage, or rank, makes them all uneven.
    for uneven in by_kind[BottleneckKind.UNEVEN_LAYERS]:
        is_one = _explained_by(uneven, stages + ranks + replicas, _ONE_STAGE)
        dropped += is_one or stages
    # A wider bound gains little over one that fills the memory which was used anyway.
    for bound in by_kind[BottleneckKind.BOUND]:
        dropped += _explained_by(bound, by_kind[BottleneckKind.MEMORY], _SAME_SHARE)
    # Of several hints that fill the drain the best is enough.
    depths = sorted(by_kind[BottleneckKind.PIPELINE_DEPTH], key=lambda each: -each.saving)
    dropped += depths[1:]
    orders = by_kind[BottleneckKind.ORDER]
    if orders and depths and depths[0].saving > orders[0].saving:
        # Who gives up an order that keeps work waiting may as well fill the drain.
        dropped += [orders[0], depths[0]]
        found = [*found, _with_remedy(orders[0], depths[0])]
    return [each for each in found if each not in dropped]


def _with_remedy(order: Bottleneck, depth: Bottleneck) -> Bottleneck:
    """Return a binding order with the saving of a hint that fills the drain too; `ready` dispatch
    alone, with its own saving, becomes the remedy."""
    return replace(
        order,
        change=depth.change,
        saving=depth.saving,
        remedy=order.change,
        remedy_saving=order.saving,
    )


def _explained_by(whole: Bottleneck, parts: Sequence[Bottleneck], share: float) -> list[Bottleneck]:
    """Return a list of the whole alone, if removing one of `parts` saves at least `share` of what
    removing the whole saves; else an empty list."""
    return [whole] if any(each.saving >= share * whole.saving for each in parts) else []
