"""The findings of a run: the saving of fixing each, the largest first.

Where a run cannot be replayed, and for what no replay can fix (a rank that enters late, a group
whose members wait for each other), a finding says what it owns of a step instead.
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
from rrfp.analyze.misalignment import timed_messages
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

# What a run would have taken otherwise: a sample of its steps, replayed.


_SAMPLE = StepSample(num_tasks=4_000, most_tasks_of_a_step=10_000)


@dataclass(frozen=True, slots=True)
class Replays:
    """The replays of a run with changes, if it can be replayed."""

    run: RecordedRun | None
    """None when it was not replayed."""
    culprits: Sequence[Bottleneck]
    """The bottlenecks that are worth fixing, the largest saving first."""
    usual: WhatIf | None
    """The run with each of the sensible changes, where that was asked for."""
    why_not: str
    """Why the run was not replayed, in a sentence; empty when it was."""
    num_steps: int = 0
    """Replayed."""
    error: float = 0.0
    """How far the replay of a step as it was is off what was measured, either way, as a share of
    it; the median."""


def replays(frames: Frames, *, with_usual: bool = False) -> Replays:
    """Replay a sample of a run's steps, with each suspect fixed and, if asked for, with the usual
    changes."""
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


# Why the steps of a run took as long as they did.
#
# A step's critical path says who ran or waited when, but not why the chain was so long. Here its
# time is divided further, and the parts still sum to the step:
#
# - *Work*: as much as the median stage has in a step. No order of the same tasks avoids it.
# - *Slow stage*: the excess of the path's tasks over those of the median rank, at their kind's
#   mean.
# - *Uneven*: the excess of the path's tasks over the mean of their own rank and kind.
# - *Series*: the rest of the path's tasks. Stages worked one after another where they could have
#   worked side by side. Where a limit, a hold, a binding order or patience withheld ready work from
#   another rank meanwhile, that time is theirs instead.
# - *Link*: messages in flight between two tasks. From the moment one member of a group has its
#   message until the last one has, the time is *coordination*.


_MOST_STEPS = 30
"""Finding a path takes a while, and steps are much alike."""


class Fault(StrEnum):
    """An owner of a part of a step, besides the causes of waits that explain themselves (`limit`,
    `hold`, `order`, `patience`, `coordination`, `transfer`, `gradient_sync`)."""

    WORK = "work"
    SLOW_STAGE = "slow_stage"
    UNEVEN = "uneven"
    SERIES = "series"
    LINK = "link"
    ENTRY = "entry"
    """A rank entered the schedule late."""
    OVERHEAD = "overhead"
    """Time that no record explains."""


class Owner(NamedTuple):
    """The owner of a part of the step."""

    what: str
    """A `Fault`, or the cause of a wait."""
    pp_rank: int
    """Where: the receiver of a link; for work and series, the busiest rank."""
    sender: int | None = None
    """The sender of a link."""


@dataclass(frozen=True, slots=True)
class Blame:
    """The owners of the time of a run's steps; means over the steps examined."""

    num_steps: int
    step_ns: float
    busiest: int
    """The pipeline rank with the most work."""
    busiest_ns: float
    """The work of that rank in a step."""
    owners_ns: dict[Owner, float]
    """The largest first; they sum to `step_ns`."""


def blame(frames: Frames) -> Blame:
    """Divide the steps that every rank finished, or thirty of them.

    Raises RrfpError when no step was finished, or one has no tasks.
    """
    finished = frames.windows["step"].to_list()
    if not finished:
        raise RrfpError("the trace has no step that every rank finished; see 'rrfp trace check'")
    chosen = spread_evenly(finished, _MOST_STEPS)
    return _Division(frames.of_steps(chosen), chosen).blame()


class _Division:
    """The time of some steps, divided."""

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
        self._settle_uneven(owners_ns, {r: ns / num_steps for r, ns in uneven_ns.items()})
        self._settle_work(owners_ns)
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
        mean_ns = self._mean_ns[task.pp_rank, task.kind]
        middle_ns = min(mean_ns, self._middle_ns[task.kind])
        owners_ns[Owner(Fault.WORK, self._busiest)] += middle_ns
        owners_ns[Owner(Fault.SLOW_STAGE, task.pp_rank)] += mean_ns - middle_ns
        uneven_ns[task.pp_rank] += task.end_ns - task.start_ns - mean_ns

    def _divide_link(
        self,
        step: int,
        segment: Segment,
        owners_ns: defaultdict[Owner, float],
    ) -> None:
        """A message for a group is under way until one member has its share; after that the members
        wait for each other."""
        start_ns, end_ns, pp_rank, _, sender = segment
        first_ns = self._first_came_ns.get((step, pp_rank, end_ns), end_ns)
        shared_ns = end_ns - max(first_ns, start_ns)
        owners_ns[Owner(Cause.COORDINATION, pp_rank)] += shared_ns
        owners_ns[Owner(Fault.LINK, pp_rank, sender)] += end_ns - start_ns - shared_ns

    def _settle_uneven(
        self, owners_ns: defaultdict[Owner, float], uneven_ns: dict[int, float]
    ) -> None:
        """Short tasks of some ranks make up for long ones of others; only the rest is uneven."""
        total_ns = sum(uneven_ns.values())
        long_ns = {rank: ns for rank, ns in uneven_ns.items() if ns > 0}
        if total_ns <= 0:
            owners_ns[Owner(Fault.WORK, self._busiest)] += total_ns
            return
        for rank, ns in long_ns.items():
            owners_ns[Owner(Fault.UNEVEN, rank)] = ns * total_ns / sum(long_ns.values())

    def _settle_work(self, owners_ns: defaultdict[Owner, float]) -> None:
        """Work beyond what the median stage has is series, or was withheld."""
        work, series = Owner(Fault.WORK, self._busiest), Owner(Fault.SERIES, self._busiest)
        owners_ns[series] = max(0.0, owners_ns[work] - self._usual_ns)
        owners_ns[work] -= owners_ns[series]
        uneven = [owner for owner in owners_ns if owner.what == Fault.UNEVEN]
        for owner, withheld_ns in self._withheld().items():
            # A rank bound to an order cannot run something else while a task takes long.
            payers = [series, *uneven] if owner.what == Cause.ORDER else [series]
            owners_ns[owner] += _take(owners_ns, payers, withheld_ns)

    def _withheld(self) -> dict[Owner, float]:
        """How long ready tasks were withheld while other ranks were on the path, of the one rank
        from which most was withheld; means over the steps, the largest first."""
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
    """The time at which the first member of a group had its message for a task, by step, pipeline
    rank and the time at which the last member had its own."""
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
    # The message had come, and the rank still waited.
    Cause.FORWARD_INPUT: Fault.OVERHEAD,
    Cause.BACKWARD_INPUT: Fault.OVERHEAD,
    Cause.DRAIN: Fault.OVERHEAD,
}
"""The owner of a wait that lies on the path itself, where its cause is not."""


def _take(owners_ns: defaultdict[Owner, float], payers: Iterable[Owner], wanted_ns: float) -> float:
    """Take up to so much time from its owners, one after the other; how much they had."""
    taken_ns = 0.0
    for payer in payers:
        part_ns = max(0.0, min(owners_ns[payer], wanted_ns - taken_ns))
        owners_ns[payer] -= part_ns
        taken_ns += part_ns
    return taken_ns


def _union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same time as disjoint spans, in order."""
    union: list[tuple[int, int]] = []
    for start_ns, end_ns in sorted(spans):
        if union and start_ns <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end_ns)
        else:
            union.append((start_ns, end_ns))
    return union


def _overlap_ns(first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> int:
    """How long two lists of disjoint spans, both in order, overlap."""
    overlap_ns = i = j = 0
    while i < len(first) and j < len(second):
        overlap_ns += max(0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return overlap_ns


# What owns most of a step, in words, and what to try.
#
# `blame` says who owns how much. Here the owners are gathered by what they are, the largest first,
# each with a sentence of figures and one of advice. The saving of fixing one is not known here.


_LEAST_SHARE = 0.01
"""The share of a step below which an owner is left out."""


@dataclass(frozen=True, slots=True)
class Share:
    """One thing that makes a step long."""

    what: str
    """A `Fault`, or the cause of a wait."""
    pp_rank: int
    """The pipeline rank with most of it; the receiver of a link."""
    sender: int | None
    """The sender of a link."""
    time_ns: float
    """The time that it owns of a step, in the mean."""
    share: float
    """The share that it owns of a step."""
    title: str
    told: str
    advice: str


def shares(frames: Frames, found: Blame) -> list[Share]:
    """The owners of at least 1% of a step, the largest first."""
    gathered: dict[str, dict[Owner, float]] = {}
    for owner, time_ns in found.owners_ns.items():
        if owner.what != Fault.WORK:
            gathered.setdefault(owner.what, {})[owner] = time_ns
    told = _Teller(frames, found)
    largest = sorted(gathered.values(), key=lambda owners: -sum(owners.values()))
    return [
        told.share(owners)
        for owners in largest
        if sum(owners.values()) >= _LEAST_SHARE * found.step_ns
    ]


def headline(frames: Frames, found: Blame) -> str:
    """How long a step takes, and how much of it no schedule can save."""
    step_ns, busy = step_time_ns(frames), found.busiest_ns / found.step_ns
    return (
        f"{_a_step(frames)} takes {format_time(step_ns)}, the mean of {frames.windows.height}. "
        f"{_Teller(frames, found).place(found.busiest).capitalize()}, the busiest, works "
        f"{format_time(busy * step_ns)} of it ({busy:.0%}): no order of the "
        "same tasks makes a step shorter than that."
    )


def _a_step(frames: Frames) -> str:
    return "An evaluation" if all(map(is_evaluation, frames.steps)) else "A step"


class _Teller:
    """Puts the owners of one run into words."""

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
        """A pipeline rank by its stages."""
        stages = self._stages.get(pp_rank, [])
        if len(stages) == 1:
            return f"stage {stages[0]}"
        return f"rank {pp_rank} (stages {', '.join(map(str, stages))})"

    def share(self, owners: dict[Owner, float]) -> Share:
        """The share that owners of one kind amount to."""
        most = max(owners, key=lambda owner: owners[owner])
        time_ns = sum(owners.values())
        share = time_ns / self._found.step_ns
        stage = max(
            self._stages.get(most.pp_rank, [most.pp_rank]), key=lambda s: self._work_ns.get(s, 0)
        )
        at = self.place(most.pp_rank)
        amount = f"{format_time(time_ns)} ({share:.0%})"
        part = "" if len(owners) == 1 else f", {format_time(owners[most])} of it there"
        title, told, advice = self._words(most, stage, at, amount, part)
        return Share(most.what, most.pp_rank, most.sender, time_ns, share, title, told, advice)

    def _words(
        self, owner: Owner, stage: int, at: str, amount: str, part: str
    ) -> tuple[str, str, str]:
        """Return the title, the figures and the advice of what owns a part of a step."""
        match owner.what:
            case Fault.SLOW_STAGE:
                return (
                    f"{at.capitalize()} has more work than the others",
                    f"Its tasks take {amount} of a step longer than those of the stage in the "
                    "middle, and the others wait for it.",
                    f"Give stage {stage} less of the model, or a faster device.",
                )
            case Fault.SERIES:
                return self._on_series(amount)
            case Fault.UNEVEN:
                return self._on_uneven(at, amount, part)
            case Fault.LINK:
                sender = self.place(owner.sender if owner.sender is not None else owner.pp_rank)
                return (
                    f"Messages from {sender} to {at} take long",
                    f"{amount} of a step wait for messages that are under way{part}. One takes "
                    f"{self._message_time(owner)} there, the median.",
                    f"Look at the link from {sender} to {at}: its bandwidth, and what else it "
                    "carries. Forwards that run ahead (a higher --limit or --hold) hide latency.",
                )
            case Cause.LIMIT | Cause.HOLD:
                return self._on_bound(owner, at, amount, part)
            case Cause.ORDER:
                return (
                    f"The order keeps ready work of {at} waiting",
                    f"The order binds, and {amount} of a step pass while something else was ready"
                    f"{part}.",
                    "Try --dispatch ready: the same hint then ranks what is ready.",
                )
            case Cause.PATIENCE:
                return (
                    f"{at.capitalize()} waits for better tasks than it could run",
                    f"They were announced, and {amount} of a step pass before they come while "
                    f"something else was ready{part}.",
                    "See what 'rrfp analyze whatif RUN --patience 0' saves.",
                )
            case Cause.COORDINATION:
                return (
                    f"The members of {at} wait for each other",
                    f"Ranks that run tasks together were not ready for the same ones for {amount} "
                    f"of a step{part}.",
                    f"See 'rrfp analyze misalignment RUN --stage {stage}' for whose messages are "
                    "late."
                    + (
                        " Try --agreement intersection."
                        if self._settings.get("agreement") == "unanimous"
                        else ""
                    ),
                )
            case Cause.TRANSFER:
                return (
                    f"Blocking transfers hold up {at}",
                    f"Transfers that lie on the compute path own {amount} of a step{part}.",
                    "Try --dispatch ready: messages then pass beside the work.",
                )
            case Cause.GRADIENT_SYNC:
                advice = "More --microbatches a step make it a smaller share."
                took = f"That takes {amount} of a step."
                return "Gradients are summed while nothing runs", took, advice
            case Fault.ENTRY:
                return (
                    f"{at.capitalize()} enters the step late",
                    f"The others wait {amount} of a step for its entry into the schedule{part}.",
                    f"See what it does before, its data and optimizer phases, in 'rrfp trace "
                    f"view'; {at} loads more or shares its cores.",
                )
            case _:
                return (
                    f"Between its tasks {at} idles without a recorded reason",
                    f"The runtime's own work, and waiting for a core, own {amount} of a step"
                    f"{part}.",
                    "Where ranks share cores, give each its own, with OMP_NUM_THREADS to match. A "
                    "larger --micro-batch-size makes tasks longer, and the gaps a smaller share.",
                )

    def _on_series(self, amount: str) -> tuple[str, str, str]:
        return (
            "Stages work one after another",
            f"For {amount} of a step they wait in a row, each for the one before it: while the "
            "pipeline fills, while it drains, and on the way there and back.",
            self._advice_on_series(),
        )

    def _advice_on_series(self) -> str:
        words = ["More --microbatches a step make it a smaller share."]
        if self._can_split:
            words.append("Try --hint bfw: weight gradients then fill the drain.")
        if all(len(stages) == 1 for stages in self._stages.values()):
            words.append("--chunks 2 shortens the way.")
        return " ".join(words)

    def _on_uneven(self, at: str, amount: str, part: str) -> tuple[str, str, str]:
        title = "Task times are uneven"
        told = (
            f"The tasks that a step waits for take {amount} of it longer than the mean of their "
            f"stage and kind, most of all those of {at}{part}."
        )
        if self._settings.get("dispatch", Dispatch.READY) != Dispatch.READY:
            return (
                title,
                told,
                "Try --dispatch ready: what is ready then runs in the meantime.",
            )
        if self._can_split:
            return (
                title,
                told,
                "Try --hint bfw: weight gradients then wait for such gaps.",
            )
        if self._is_bound:
            return (
                title,
                told,
                "A higher --limit or --hold keeps more work at hand for such gaps.",
            )
        return (
            title,
            told,
            "See what makes them long: their microbatches, or what else ran on the machine.",
        )

    def _on_bound(self, owner: Owner, at: str, amount: str, part: str) -> tuple[str, str, str]:
        flag = f"--{owner.what}"
        value = self._settings.get(owner.what)
        is_given = type(value) is int
        doubled = 2 * value if type(value) is int else None
        return (
            f"The {owner.what} withholds forwards of {at}",
            f"Forwards were there and {flag}{f' {value}' if is_given else ''} withheld them for "
            f"{amount} of a step{part}.",
            f"Try {flag} {doubled or 'with a higher number'}, if memory allows.",
        )

    def _message_time(self, owner: Owner) -> str:
        of_link = timed_messages(self._frames).filter(
            (pl.col("from_pp_rank") == owner.sender) & (pl.col("to_pp_rank") == owner.pp_rank)
        )
        middle_ns: Any = (of_link["came_ns"] - of_link["left_ns"]).median()
        return format_time(middle_ns or 0)


NUM_FINDINGS = 3

_NO_REPLAY_FIXES = (Cause.COORDINATION, Cause.GRADIENT_SYNC, Fault.ENTRY, Fault.OVERHEAD)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that makes a step long."""

    kind: str
    """A `BottleneckKind`; of what was not replayed, a `Fault` or the cause of a wait."""
    title: str
    told: str
    advice: str
    saving: float | None
    """The share of a step that fixing it saves in a replay; None if it was not replayed."""
    share: float | None
    """The share of a step that it owns, where it was not replayed."""
    pp_rank: int | None = None
    rank: int | None = None
    link: tuple[int, int] | None = None
    """The pipeline ranks that send and take its messages."""
    flags: str = ""
    """The flags of `rrfp analyze whatif` that replay the run with it fixed."""

    def command(self, run: str, steps: str | None = None) -> str:
        """A command that replays this run, or these steps of it, with it fixed, or that shows
        where it is."""
        if not self.flags:
            return f"rrfp trace view {quote(run)}"
        chosen = "" if steps is None else f" --steps {steps}"
        return f"rrfp analyze whatif {quote(run)} {self.flags}{chosen}"

    def as_json(self, run: str, steps: str | None = None) -> dict[str, object]:
        """The object that `rrfp analyze --format json` prints."""
        return {
            "kind": self.kind,
            "pp_rank": self.pp_rank,
            "rank": self.rank,
            "link": None if self.link is None else list(self.link),
            "saving_fraction": self.saving,
            "share_fraction": self.share,
            "text": f"{self.title}. {self.told} {self.advice}",
            "command": self.command(run, steps),
        }


def findings(
    frames: Frames,
    found: Blame,
    run: RecordedRun | None = None,
    culprits: Sequence[Bottleneck] = (),
) -> list[Finding]:
    """The findings: those that a replay has fixed, by their savings, among those that none can, by
    what they own. Without `run`, nothing was replayed."""
    owned = shares(frames, found)
    if run is None:
        return [_of_share(each) for each in owned]
    adviser = Adviser(frames, run)
    fixed = [_finding_of(adviser, each) for each in culprits]
    fixed += [_of_share(each) for each in owned if each.what in _NO_REPLAY_FIXES]
    return sorted(fixed, key=lambda each: -(each.saving or each.share or 0.0))


def _of_share(owned: Share) -> Finding:
    link = None if owned.sender is None else (owned.sender, owned.pp_rank)
    return Finding(
        str(owned.what),
        owned.title,
        owned.told,
        owned.advice,
        None,
        owned.share,
        owned.pp_rank,
        link=link,
    )


def _finding_of(adviser: Adviser, culprit: Bottleneck) -> Finding:
    change = culprit.change
    title, told, advice = adviser.describe(culprit)
    return Finding(
        str(culprit.kind),
        title,
        told,
        advice,
        culprit.saving,
        None,
        culprit.pp_rank,
        change.usual_rank,
        change.usual_link,
        change.flags,
    )


# What `rrfp analyze` says of a run: its findings, and the figures that they are shares of.


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings of a run's steps."""

    headline: str
    step_time_s: float
    """The mean."""
    bubble_fraction: float
    findings: tuple[Finding, ...]
    why_not_replayed: str
    """In a sentence; empty when the run was replayed."""
    num_replayed: int
    """The number of steps replayed, spread evenly over the run."""
    replay_error: float
    """How far a step's replay as it was is off, as a share of it; the median."""

    def as_note(self) -> dict[str, Any]:
        """Return the note that `of_note` reads."""
        return asdict(self)

    @classmethod
    def of_note(cls, note: dict[str, Any]) -> Self:
        """Raises TypeError, KeyError or ValueError for what `as_note` has not given."""
        found = [
            Finding(**{**each, "link": None if each["link"] is None else tuple(each["link"])})
            for each in note["findings"]
        ]
        return cls(**{**note, "findings": tuple(found)})

    def as_json(self, run: str, steps: str | None = None) -> dict[str, object]:
        """The object that `rrfp analyze --format json` prints for a run of that name: `findings`
        were replayed, `owned` were not."""
        told = [each.as_json(run, steps) for each in self.findings]
        return {
            "run": run,
            "step_time_s": self.step_time_s,
            "bubble_fraction": self.bubble_fraction,
            "findings": [each for each in told if each["saving_fraction"] is not None],
            "owned": [each for each in told if each["saving_fraction"] is None],
            "why_not_replayed": self.why_not_replayed or None,
            "steps_replayed": self.num_replayed,
            "replay_error_fraction": self.replay_error,
        }


def diagnose(frames: Frames) -> Diagnosis:
    """Find out what makes these steps long. Raises RrfpError when no step was finished by every
    rank, or one has no tasks."""
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
    """The findings for programs, a row for each; a terminal has its own form of them."""
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
