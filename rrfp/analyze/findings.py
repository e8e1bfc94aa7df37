"""The findings of a run: the causes of long steps, with the saving of fixing each.

If a run cannot be replayed, and for causes that no replay removes (a rank that enters late, members
of a group that wait for each other), a finding has the share of the step it accounts for instead.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from shlex import quote
from statistics import median, median_low
from typing import Any, NamedTuple, Self

import polars as pl

from rrfp.analyze.advice import Adviser
from rrfp.analyze.bubbles import bubbles
from rrfp.analyze.critical_path import LINK, Segment, critical_path
from rrfp.analyze.frames import Frames, recording_of, run_settings, step_time_ns
from rrfp.analyze.misalignment import median_flight_ns
from rrfp.analyze.table import Column, Table, format_time
from rrfp.errors import RrfpError
from rrfp.replay.bottlenecks import Bottleneck, find_bottlenecks
from rrfp.replay.change import replay
from rrfp.replay.measured import StepSample, measure
from rrfp.replay.recorded import RecordedRun, read_run
from rrfp.replay.whatif import WhatIf, what_if
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.tasks import Cause, Kind
from rrfp.trace.records import NS_PER_S, is_evaluation, spread_evenly

# Replays of a sample of steps, with each suspect fixed.


_SAMPLE = StepSample(num_tasks=4_000, most_tasks_of_a_step=10_000)


@dataclass(frozen=True, slots=True)
class Replays:
    """The results of replaying a run with changes."""

    run: RecordedRun | None
    """None if it cannot be replayed."""
    culprits: Sequence[Bottleneck]
    """The bottlenecks worth fixing, the largest saving first."""
    usual: WhatIf | None
    """The run with each of the usual changes, if requested."""
    why_not: str
    """The reason why the run was not replayed; empty if it was."""
    num_steps: int = 0
    """The number of replayed steps."""
    error: float = 0.0
    """The median relative error of replayed step times without changes."""


def replays(frames: Frames, *, with_usual: bool = False) -> Replays:
    """Replay a sample of steps with each suspect fixed, and if requested with the usual changes.

    If the run cannot be replayed, the result has only the reason; no error is raised.
    """
    try:
        finished = frames.windows["step"].to_list()
        chosen = _SAMPLE.choose(finished, frames.tasks.height / max(1, len(frames.steps)))
        recording = recording_of(frames.of_steps(chosen))
        run = read_run(recording)
        steps = measure(run)
        found = find_bottlenecks(run, steps)
        error = median(
            abs(replay(run, step).makespan_ns - step.window_ns) / step.window_ns for step in steps
        )
        usual = what_if(recording) if with_usual else None
        return Replays(run, found, usual, "", len(steps), error)
    except RrfpError as error:
        return Replays(None, (), None, str(error))


# The division of a step's time by cause.
#
# A critical path states which rank ran or waited when, but not why the path was so long. Its time
# is divided further, and the parts sum to the step:
#
# - *Work*: the work of the median stage in a step. No order of the same tasks avoids it.
# - *Slow stage*: the excess of the path's tasks over the median rank's, at the mean of their kind.
# - *Uneven*: the excess of the path's tasks over the mean of their own rank and kind.
# - *Series*: the rest of the path's tasks, in which stages worked one after another and not
#   concurrently. If a limit, a hold, a fixed order or patience withheld ready work from another
#   rank at that time, the time counts for that cause instead.
# - *Link*: messages in flight between two tasks. The time between the first and the last member of
#   a group getting its message is *coordination*.


_MOST_STEPS = 30
"""The number of examined steps: computing a path is slow, and steps are similar."""


class Fault(StrEnum):
    """A cause of a part of a step, besides the causes of waits (`limit`, `hold`, `order`,
    `patience`, `coordination`, `transfer`, `gradient_sync`)."""

    WORK = "work"
    SLOW_STAGE = "slow_stage"
    UNEVEN = "uneven"
    SERIES = "series"
    LINK = "link"
    ENTRY = "entry"
    """A rank entered the schedule late."""
    OVERHEAD = "overhead"
    """No record explains the time."""


class Owner(NamedTuple):
    """A cause and the pipeline rank to which a part of the step is attributed."""

    what: str
    """A `Fault`, or the cause of a wait."""
    pp_rank: int
    """The receiver of a link; for work and series, the busiest rank."""
    sender: int | None = None
    """The sender of a link."""


@dataclass(frozen=True, slots=True)
class Blame:
    """The attribution of step time to owners, as means over the examined steps."""

    num_steps: int
    step_ns: float
    busiest: int
    """The pipeline rank with the most work."""
    busiest_ns: float
    """The work of that rank in a step."""
    owners_ns: dict[Owner, float]
    """The largest first; they sum to `step_ns`."""


def blame(frames: Frames) -> Blame:
    """Attribute the mean time of finished steps, or of thirty of them, evenly spread, to owners.

    Raises RrfpError if no step was finished, or if one of them has no tasks or no critical path.
    """
    finished = frames.finished_windows()["step"].to_list()
    chosen = spread_evenly(finished, _MOST_STEPS)
    return _Division(frames.of_steps(chosen), chosen).blame()


class _Division:
    """Attributes the time of some steps to owners."""

    def __init__(self, frames: Frames, steps: Sequence[int]) -> None:
        self._steps = steps
        time_ns = (pl.col("end_ns") - pl.col("start_ns")).alias("ns")
        tasks = frames.tasks.select("step", "rank", "pp_rank", "kind", time_ns)
        if tasks.is_empty():
            raise RrfpError("the finished steps have no tasks; see 'rrfp trace check'")
        of_a_step = pl.col("ns").sum() / (pl.col("rank").n_unique() * len(steps))
        self._busy_ns: dict[int, float] = dict(
            tasks.group_by("pp_rank").agg(of_a_step).sort("pp_rank").iter_rows()
        )
        self._usual_ns = median(self._busy_ns.values())
        self._busiest = max(self._busy_ns, key=lambda rank: (self._busy_ns[rank], -rank))
        self._mean_ns: dict[tuple[int, str], float] = {
            (pp_rank, kind): ns
            for pp_rank, kind, ns in tasks.group_by("pp_rank", "kind")
            .agg(pl.col("ns").mean())
            .iter_rows()
        }
        by_kind: defaultdict[str, list[float]] = defaultdict(list)
        for (_, kind), ns in self._mean_ns.items():
            by_kind[kind].append(ns)
        self._middle_ns = {kind: median_low(means) for kind, means in by_kind.items()}
        self._first_came_ns = _first_came_ns(frames)
        self._waits = frames.waits.select("step", "pp_rank", "cause", "start_ns", "end_ns")
        self._paths = {step: critical_path(frames, step).segments for step in steps}

    def blame(self) -> Blame:
        """Return the mean attribution over the steps, as time per step."""
        owners_ns: defaultdict[Owner, float] = defaultdict(float)
        uneven_ns: defaultdict[int, float] = defaultdict(float)
        for step, path in self._paths.items():
            for segment in path:
                if segment.kind in list(Kind):
                    self._divide_work(segment, owners_ns, uneven_ns)
                elif segment.kind == LINK:
                    self._divide_link(step, segment, owners_ns)
                else:
                    own = _OWN.get(segment.kind, segment.kind)
                    owners_ns[Owner(own, segment.pp_rank)] += segment.end_ns - segment.start_ns
        num_steps = len(self._steps)
        owners_ns = defaultdict(float, {o: ns / num_steps for o, ns in owners_ns.items()})
        self._assign_uneven(owners_ns, {r: ns / num_steps for r, ns in uneven_ns.items()})
        self._assign_series(owners_ns)
        found = sorted(owners_ns.items(), key=lambda item: (-item[1], str(item[0])))
        return Blame(
            num_steps,
            sum(path[-1].end_ns - path[0].start_ns for path in self._paths.values()) / num_steps,
            self._busiest,
            self._busy_ns[self._busiest],
            {owner: ns for owner, ns in found if ns > 0},
        )

    def _divide_work(
        self,
        task: Segment,
        owners_ns: defaultdict[Owner, float],
        uneven_ns: defaultdict[int, float],
    ) -> None:
        """Add a task of the path to `owners_ns` (work and slow stage) and `uneven_ns`.

        Uneven is its length less the mean of its rank and kind, and may be negative.
        """
        mean_ns = self._mean_ns[task.pp_rank, task.kind]
        middle_ns = min(mean_ns, self._middle_ns[task.kind])
        owners_ns[Owner(Fault.WORK, self._busiest)] += middle_ns
        owners_ns[Owner(Fault.SLOW_STAGE, task.pp_rank)] += mean_ns - middle_ns
        uneven_ns[task.pp_rank] += task.end_ns - task.start_ns - mean_ns

    def _divide_link(
        self, step: int, segment: Segment, owners_ns: defaultdict[Owner, float]
    ) -> None:
        """Add a message's time to `owners_ns`: link until the first member has it, then
        coordination."""
        start_ns, end_ns, pp_rank, _, sender = segment
        first_ns = self._first_came_ns.get((step, pp_rank, end_ns), end_ns)
        shared_ns = end_ns - max(first_ns, start_ns)
        owners_ns[Owner(Cause.COORDINATION, pp_rank)] += shared_ns
        owners_ns[Owner(Fault.LINK, pp_rank, sender)] += end_ns - start_ns - shared_ns

    def _assign_uneven(
        self, owners_ns: defaultdict[Owner, float], uneven_ns: dict[int, float]
    ) -> None:
        """Assign the net excess of long over short tasks to the ranks with long tasks.

        Changes `owners_ns`. A negative net excess reduces work instead.
        """
        total_ns = sum(uneven_ns.values())
        long_ns = {rank: ns for rank, ns in uneven_ns.items() if ns > 0}
        if total_ns <= 0:
            owners_ns[Owner(Fault.WORK, self._busiest)] += total_ns
            return
        for rank, ns in long_ns.items():
            owners_ns[Owner(Fault.UNEVEN, rank)] = ns * total_ns / sum(long_ns.values())

    def _assign_series(self, owners_ns: defaultdict[Owner, float]) -> None:
        """Move work beyond the median stage's to series, and series to causes that withheld tasks.

        Changes `owners_ns`. A fixed order also takes from uneven.
        """
        work, series = Owner(Fault.WORK, self._busiest), Owner(Fault.SERIES, self._busiest)
        owners_ns[series] = max(0.0, owners_ns[work] - self._usual_ns)
        owners_ns[work] -= owners_ns[series]
        uneven = [owner for owner in owners_ns if owner.what == Fault.UNEVEN]
        for owner, withheld_ns in self._withheld().items():
            # Under a fixed order a rank cannot run another task while one takes long.
            sources = [series, *uneven] if owner.what == Cause.ORDER else [series]
            owners_ns[owner] += _subtract(owners_ns, sources, withheld_ns)

    def _withheld(self) -> dict[Owner, float]:
        """Return how long ready tasks were withheld while other ranks were on the path, by owner.

        Only the rank with the longest such time counts. Means over the steps, the largest first.
        """
        withheld = self._waits.filter(pl.col("cause").is_in(_WITHHELD))
        found_ns: defaultdict[Owner, float] = defaultdict(float)
        for (step, pp_rank, cause), waits in withheld.group_by("step", "pp_rank", "cause"):
            others = [s[:2] for s in self._paths[step] if s.pp_rank != pp_rank]
            spans = _union(waits.select("start_ns", "end_ns").iter_rows())
            found_ns[Owner(cause, pp_rank)] += _overlap_ns(spans, others) / len(self._steps)
        by_rank: defaultdict[int, float] = defaultdict(float)
        for owner, ns in found_ns.items():
            by_rank[owner.pp_rank] += ns
        if not by_rank:
            return {}
        most = max(by_rank, key=lambda rank: (by_rank[rank], -rank))
        of_it = {owner: ns for owner, ns in found_ns.items() if owner.pp_rank == most}
        return dict(sorted(of_it.items(), key=lambda item: -item[1]))


def _first_came_ns(frames: Frames) -> dict[tuple[int, int, int], int]:
    """Return when the first member of a group got its message for a task.

    The key is the step, the pipeline rank, and the time when the last member got its message.
    """
    replicas = frames.run.select(pl.col("rank").alias("to_rank"), "dp_rank")
    of_groups = (
        frames.messages.join(replicas, on="to_rank")
        .group_by("step", "to_pp_rank", "dp_rank", "kind", "stage", "microbatch")
        .agg(pl.col("came_ns").max().alias("last_ns"), pl.col("came_ns").min().alias("first_ns"))
    )
    return {
        (step, pp_rank, last_ns): first_ns
        for step, pp_rank, last_ns, first_ns in of_groups.select(
            "step", "to_pp_rank", "last_ns", "first_ns"
        ).iter_rows()
    }


_WITHHELD = (Cause.LIMIT, Cause.HOLD, Cause.ORDER, Cause.PATIENCE)
_OWN: dict[str, str] = {
    Cause.WARMUP: Fault.ENTRY,
    # The rank waited although the message had arrived.
    Cause.FORWARD_INPUT: Fault.OVERHEAD,
    Cause.BACKWARD_INPUT: Fault.OVERHEAD,
    Cause.DRAIN: Fault.OVERHEAD,
}
"""The fault for a wait on the path, if it is not the cause of the wait."""


def _subtract(
    owners_ns: defaultdict[Owner, float], sources: Iterable[Owner], most_ns: float
) -> float:
    """Subtract up to `most_ns` in total from some owners, in this order; return the sum.

    Changes `owners_ns`; no owner becomes negative.
    """
    total_ns = 0.0
    for source in sources:
        part_ns = max(0.0, min(owners_ns[source], most_ns - total_ns))
        owners_ns[source] -= part_ns
        total_ns += part_ns
    return total_ns


def _union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge spans into disjoint spans in order."""
    union: list[tuple[int, int]] = []
    for start_ns, end_ns in sorted(spans):
        if union and start_ns <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end_ns)
        else:
            union.append((start_ns, end_ns))
    return union


def _overlap_ns(first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> int:
    """Return the total overlap of two ordered lists of disjoint spans in ns."""
    overlap_ns = i = j = 0
    while i < len(first) and j < len(second):
        overlap_ns += max(0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return overlap_ns


# Descriptions of the largest owners, grouped by cause. Their savings are not known.


_LEAST_SHARE = 0.01
"""The share of a step below which a cause is left out."""


@dataclass(frozen=True, slots=True)
class Share:
    """The share of a step that one cause accounts for."""

    what: str
    """A `Fault`, or the cause of a wait."""
    pp_rank: int
    """The pipeline rank with the largest part; the receiver of a link."""
    sender: int | None
    """The sender of a link."""
    time_ns: float
    """The mean time in a step."""
    share: float
    """The same as a share of a step."""
    title: str
    figures: str
    advice: str


def shares(frames: Frames, found: Blame) -> list[Share]:
    """Describe the causes, except work, of at least 1% of a step, the largest first."""
    gathered: dict[str, dict[Owner, float]] = {}
    for owner, time_ns in found.owners_ns.items():
        if owner.what != Fault.WORK:
            gathered.setdefault(owner.what, {})[owner] = time_ns
    describer = _ShareDescriber(frames, found)
    largest = sorted(gathered.values(), key=lambda owners: -sum(owners.values()))
    return [
        describer.describe(owners)
        for owners in largest
        if sum(owners.values()) >= _LEAST_SHARE * found.step_ns
    ]


def headline(frames: Frames, found: Blame) -> str:
    """State the mean step time, and the work of the busiest rank, the least time of any order.

    The work is its share of the steps that `found` examined, applied to that mean.
    """
    step_ns, busy = step_time_ns(frames), found.busiest_ns / found.step_ns
    return (
        f"{_a_step(frames)} takes {format_time(step_ns)}, the mean of {frames.windows.height}. "
        f"{_ShareDescriber(frames, found).place(found.busiest).capitalize()}, the busiest, works "
        f"{format_time(busy * step_ns)} of it ({busy:.0%}): no order of the "
        "same tasks makes a step shorter than that."
    )


def _a_step(frames: Frames) -> str:
    """Return `An evaluation` if all steps are evaluations, otherwise `A step`."""
    return "An evaluation" if all(map(is_evaluation, frames.steps)) else "A step"


class _ShareDescriber:
    """Describes the causes of one run by title, figures and advice."""

    def __init__(self, frames: Frames, found: Blame) -> None:
        self._frames = frames
        self._found = found
        work = frames.tasks.group_by("pp_rank", "stage").agg(
            (
                (pl.col("end_ns") - pl.col("start_ns")).sum()
                / (pl.col("rank").n_unique() * pl.col("step").n_unique())
            ).alias("ns")
        )
        self._work_ns: dict[int, float] = dict(work.select("stage", "ns").iter_rows())
        self._stages: dict[int, list[int]] = {
            pp_rank: sorted(stages)
            for pp_rank, stages in work.group_by("pp_rank").agg("stage").iter_rows()
        }
        kinds = set(frames.tasks["kind"].unique())
        self._can_split = Kind.B in kinds and Kind.W not in kinds
        self._is_bound = frames.waits["cause"].is_in([Cause.LIMIT, Cause.HOLD]).any()
        self._settings = run_settings(frames)

    def place(self, pp_rank: int) -> str:
        """Name a pipeline rank by its stages: `stage 3`, or `rank 1 (stages 1, 5)`."""
        stages = self._stages.get(pp_rank, [])
        if len(stages) == 1:
            return f"stage {stages[0]}"
        return f"rank {pp_rank} (stages {', '.join(map(str, stages))})"

    def describe(self, owners: dict[Owner, float]) -> Share:
        """Describe the owners of one cause: their summed time, and the place of the largest."""
        most = max(owners, key=lambda owner: owners[owner])
        time_ns = sum(owners.values())
        share = time_ns / self._found.step_ns
        stage = max(
            self._stages.get(most.pp_rank, [most.pp_rank]), key=lambda s: self._work_ns.get(s, 0)
        )
        at = self.place(most.pp_rank)
        amount = f"{format_time(time_ns)} ({share:.0%})"
        part = "" if len(owners) == 1 else f", {format_time(owners[most])} of it there"
        title, figures, advice = self._words(most, stage, at, amount, part)
        return Share(most.what, most.pp_rank, most.sender, time_ns, share, title, figures, advice)

    def _words(
        self, owner: Owner, stage: int, at: str, amount: str, part: str
    ) -> tuple[str, str, str]:
        """Return the title, the figures and the advice of a cause.

        `at` is the place, `amount` the time and share, and `part` the time of the largest owner. A
        cause without a text of its own counts as unexplained idle time.
        """
        match owner.what:
            case Fault.SLOW_STAGE:
                return (
                    f"{at.capitalize()} is slower than the median stage",
                    f"Its tasks take {amount} of a step longer than the median stage's, and the "
                    "other stages wait for it.",
                    f"Give stage {stage} less of the model, or a faster device.",
                )
            case Fault.SERIES:
                return self._describe_series(amount)
            case Fault.UNEVEN:
                return self._describe_uneven(at, amount, part)
            case Fault.LINK:
                link = (owner.pp_rank if owner.sender is None else owner.sender), owner.pp_rank
                sender = self.place(link[0])
                flight = format_time(median_flight_ns(self._frames, link))
                return (
                    f"Messages from {sender} to {at} take long",
                    f"Ranks wait {amount} of a step for messages in flight{part}. The median "
                    f"message takes {flight} there.",
                    f"Check the link from {sender} to {at}: its bandwidth, and other traffic. "
                    "Forwards that run ahead (a higher --limit or --hold) hide latency.",
                )
            case Cause.LIMIT | Cause.HOLD:
                return self._describe_bound(owner, at, amount, part)
            case Cause.ORDER:
                return (
                    f"The fixed order makes {at} wait although work is ready",
                    f"Under the fixed order {at} waited {amount} of a step while another task was "
                    f"ready{part}.",
                    "Try --dispatch ready: the same hint then ranks the ready tasks.",
                )
            case Cause.PATIENCE:
                return (
                    f"{at.capitalize()} waits for better tasks than it could run",
                    f"It waited {amount} of a step for announced tasks while another task was "
                    f"ready{part}.",
                    "See the saving of 'rrfp analyze whatif RUN --patience 0'.",
                )
            case Cause.COORDINATION:
                return (
                    f"The members of {at} wait for each other",
                    f"Ranks that run tasks together were not ready for the same ones for {amount} "
                    f"of a step{part}.",
                    f"See in 'rrfp analyze misalignment RUN --stage {stage}' which messages are "
                    "late."
                    + (
                        " Try --agreement intersection."
                        if self._settings.get("agreement") == "unanimous"
                        else ""
                    ),
                )
            case Cause.TRANSFER:
                return (
                    f"Blocking transfers delay {at}",
                    f"Transfers on the compute path take {amount} of a step{part}.",
                    "Try --dispatch ready: messages then overlap with compute.",
                )
            case Cause.GRADIENT_SYNC:
                return (
                    "Gradients are summed while nothing else runs",
                    f"That takes {amount} of a step.",
                    "More --microbatches per step make it a smaller share.",
                )
            case Fault.ENTRY:
                return (
                    f"{at.capitalize()} enters the step late",
                    f"The others wait {amount} of a step for its entry into the schedule{part}.",
                    f"See its data and optimizer phases in 'rrfp trace view'; {at} loads more "
                    "data, or shares its cores.",
                )
            case _:
                return (
                    f"Unexplained idle time between tasks of {at}",
                    f"Runtime overhead and waiting for a core take {amount} of a step{part}.",
                    "If ranks share cores, give each its own, with OMP_NUM_THREADS to match. A "
                    "larger --micro-batch-size makes tasks longer and the gaps a smaller share.",
                )

    def _describe_series(self, amount: str) -> tuple[str, str, str]:
        """Return title, figures and advice for stages that work one after another.

        The advice adds `--hint bfw` if B is not split, and `--chunks 2` if no rank has several
        stages.
        """
        advice = ["More --microbatches per step make it a smaller share."]
        if self._can_split:
            advice.append("Try --hint bfw: weight gradients then fill the drain.")
        if all(len(stages) == 1 for stages in self._stages.values()):
            advice.append("--chunks 2 shortens the path.")
        return (
            "Stages work one after another",
            f"For {amount} of a step each stage waits for the one before it: while the pipeline "
            "fills and drains, and on the path through it.",
            " ".join(advice),
        )

    def _describe_uneven(self, at: str, amount: str, part: str) -> tuple[str, str, str]:
        """Return title, figures and advice for uneven tasks.

        The advice is the first that applies: ready dispatch, split backwards, a higher bound, or
        else a check of the cause.
        """
        if self._settings.get("dispatch", Dispatch.READY) != Dispatch.READY:
            advice = "Try --dispatch ready: other ready tasks then run in the meantime."
        elif self._can_split:
            advice = "Try --hint bfw: weight gradients then fill such gaps."
        elif self._is_bound:
            advice = "A higher --limit or --hold makes more tasks ready for such gaps."
        else:
            advice = "Check what makes them long: their data, or other processes on the machine."
        return (
            "Task times are uneven",
            f"The tasks that a step waits for take {amount} of it longer than the mean of their "
            f"stage and kind, most of all those of {at}{part}.",
            advice,
        )

    def _describe_bound(
        self, owner: Owner, at: str, amount: str, part: str
    ) -> tuple[str, str, str]:
        """Return title, figures and advice for a limit or hold; the advice doubles a known
        number."""
        flag = f"--{owner.what}"
        value = self._settings.get(owner.what)
        is_given = type(value) is int
        doubled = 2 * value if type(value) is int else None
        return (
            f"The {owner.what} withholds forwards of {at}",
            f"Forwards were ready, and {flag}{f' {value}' if is_given else ''} withheld them for "
            f"{amount} of a step{part}.",
            f"Try {flag} {doubled or 'with a higher number'}, if memory allows.",
        )


NUM_FINDINGS = 3

_NO_REPLAY_FIXES = (Cause.COORDINATION, Cause.GRADIENT_SYNC, Fault.ENTRY, Fault.OVERHEAD)


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause of long steps."""

    kind: str
    """A `BottleneckKind`; if it was not replayed, a `Fault` or the cause of a wait."""
    title: str
    figures: str
    advice: str
    saving: float | None
    """The share of a step that fixing it saves in a replay; None if not replayed."""
    share: float | None
    """The share of a step that it accounts for; None if it was replayed."""
    pp_rank: int | None = None
    rank: int | None = None
    link: tuple[int, int] | None = None
    """The pipeline ranks that send and receive its messages."""
    flags: str = ""
    """The flags of `rrfp analyze whatif` that replay the run with it fixed."""

    def command(self, run: str, steps: str | None = None) -> str:
        """Return the command that replays the run, or only `steps`, with the cause fixed.

        Without `flags` it is the command that shows the trace.
        """
        if not self.flags:
            return f"rrfp trace view {quote(run)}"
        chosen = "" if steps is None else f" --steps {steps}"
        return f"rrfp analyze whatif {quote(run)} {self.flags}{chosen}"

    def as_json(self, run: str, steps: str | None = None) -> dict[str, object]:
        """Return the object that `rrfp analyze --format json` prints for this finding."""
        return {
            "kind": self.kind,
            "pp_rank": self.pp_rank,
            "rank": self.rank,
            "link": None if self.link is None else list(self.link),
            "saving_fraction": self.saving,
            "share_fraction": self.share,
            "text": f"{self.title}. {self.figures} {self.advice}",
            "command": self.command(run, steps),
        }


def findings(
    frames: Frames,
    found: Blame,
    run: RecordedRun | None = None,
    culprits: Sequence[Bottleneck] = (),
) -> list[Finding]:
    """Return the findings, the largest saving or share first; shares below 1% are left out.

    Replayed bottlenecks (`culprits`) have savings; causes that a replay cannot remove have shares.
    Without `run` all causes have shares, and `culprits` are ignored.
    """
    owned = shares(frames, found)
    if run is None:
        return [_of_share(each) for each in owned]
    adviser = Adviser(frames, run)
    fixed = [_finding_of(adviser, each) for each in culprits]
    fixed += [_of_share(each) for each in owned if each.what in _NO_REPLAY_FIXES]
    return sorted(fixed, key=lambda each: -(each.saving or each.share or 0.0))


def _of_share(owned: Share) -> Finding:
    """Make a finding from a share; it has no saving and no flags, because it was not replayed."""
    link = None if owned.sender is None else (owned.sender, owned.pp_rank)
    return Finding(
        str(owned.what),
        owned.title,
        owned.figures,
        owned.advice,
        None,
        owned.share,
        owned.pp_rank,
        link=link,
    )


def _finding_of(adviser: Adviser, culprit: Bottleneck) -> Finding:
    """Make a finding with a saving from a replayed bottleneck."""
    change = culprit.change
    title, figures, advice = adviser.describe(culprit)
    return Finding(
        str(culprit.kind),
        title,
        figures,
        advice,
        culprit.saving,
        None,
        culprit.pp_rank,
        change.usual_rank,
        change.usual_link,
        change.flags,
    )


# The result of `rrfp analyze`.


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings of a run's steps."""

    headline: str
    step_time_s: float
    """The mean over the finished steps."""
    bubble_fraction: float
    findings: tuple[Finding, ...]
    why_not_replayed: str
    """The reason; empty if the run was replayed."""
    num_replayed: int
    """The number of replayed steps, spread evenly over the run."""
    replay_error: float
    """The median relative error of replayed step times without changes."""

    def as_note(self) -> dict[str, Any]:
        """Convert to the JSON object that `of_note` reads."""
        return asdict(self)

    @classmethod
    def of_note(cls, note: dict[str, Any]) -> Self:
        """Read the object of `as_note`. Raises TypeError or KeyError for one of another shape.

        The types of most values are not checked.
        """
        found = [
            Finding(**{**each, "link": None if each["link"] is None else tuple(each["link"])})
            for each in note["findings"]
        ]
        return cls(**{**note, "findings": tuple(found)})

    def as_json(self, run: str, steps: str | None = None) -> dict[str, object]:
        """Return the object that `rrfp analyze --format json` prints for a run of that name.

        Replayed findings are in `findings`, others in `owned`.
        """
        found = [each.as_json(run, steps) for each in self.findings]
        return {
            "run": run,
            "step_time_s": self.step_time_s,
            "bubble_fraction": self.bubble_fraction,
            "findings": [each for each in found if each["saving_fraction"] is not None],
            "owned": [each for each in found if each["saving_fraction"] is None],
            "why_not_replayed": self.why_not_replayed or None,
            "steps_replayed": self.num_replayed,
            "replay_error_fraction": self.replay_error,
        }


def diagnose(frames: Frames) -> Diagnosis:
    """Find the causes of long steps, by replay if that is possible.

    Raises RrfpError if no step was finished by all ranks, or as `blame` and `bubbles` do for
    damaged records.
    """
    found = blame(frames)
    replayed = replays(frames)
    return Diagnosis(
        headline(frames, found),
        step_time_ns(frames) / NS_PER_S,
        bubbles(frames).bubble_fraction,
        tuple(findings(frames, found, replayed.run, replayed.culprits)),
        replayed.why_not,
        replayed.num_steps,
        replayed.error,
    )


def finding_table(found: Diagnosis, run: str, steps: str | None = None) -> Table:
    """Make the table of findings for programs; the terminal has another layout."""
    rows = [each.as_json(run, steps) for each in found.findings]
    links = ["-".join(map(str, each.link)) if each.link else None for each in found.findings]
    schema = {
        "kind": pl.String,
        "pp_rank": pl.Int64,
        "rank": pl.Int64,
        "link": pl.String,
        "saving_fraction": pl.Float64,
        "share_fraction": pl.Float64,
        "text": pl.String,
        "command": pl.String,
    }
    values = {name: [row[name] for row in rows] for name in schema} | {"link": links}
    return Table(
        "",
        [
            Column(None, pl.Series(values[name], dtype=dtype), key=name)
            for name, dtype in schema.items()
        ],
        facts=found.as_json(run, steps),
    )
