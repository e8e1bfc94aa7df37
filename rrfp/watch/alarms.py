"""Alarms for slow ranks, stages, replicas and links, and the measures of a step for dashboards.

Two detectors check each step: one the ranks' tasks, the other the links' messages. A link raises no
alarm while a rank at one of its ends is slow.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from rrfp.trace.records import RankInfo
from rrfp.watch.figures import StepFigures
from rrfp.watch.slowness import Baseline, Detector, Slowdown

_MOST_RANKS_LISTED = 8


class Kind(StrEnum):
    """Kind of place that can be slow."""

    RANK = "rank"
    """One rank, or all ranks of a tensor-parallel group, which run the same tasks."""
    STAGE = "stage"
    """A pipeline rank in all of its replicas."""
    REPLICA = "replica"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class Alarm:
    """A slow place."""

    kind: Kind
    ranks: tuple[int, ...]
    """The slow ranks; for a link the senders, then the receivers."""
    pp_rank: int | None
    dp_rank: int | None
    link: tuple[int, int] | None
    """Sending and receiving pipeline rank."""
    hosts: tuple[str, ...]
    rise: float
    """Additional time as a fraction: 0.3 is 30% longer."""
    against: Baseline
    since_step: int
    has_chunks: bool = False
    """True if each pipeline rank holds several stages; texts then say "pipeline rank"."""

    @property
    def _stage(self) -> str:
        """Noun for a pipeline rank: `stage`, or `pipeline rank` if it holds several stages."""
        return "pipeline rank" if self.has_chunks else "stage"

    @property
    def place(self) -> str:
        """Name of the place for people, such as `rank 3 (stage 1, replica 1, on node7)`."""
        ranks = format_ranks(self.ranks)
        match self.kind:
            case Kind.STAGE:
                return f"{self._stage} {self.pp_rank} ({ranks})"
            case Kind.REPLICA:
                return f"replica {self.dp_rank} ({ranks})"
            case Kind.LINK:
                assert self.link is not None
                where = "" if self.dp_rank is None else f" of replica {self.dp_rank}"
                return f"the link from {self._stage} {self.link[0]} to {self.link[1]}{where}"
            case Kind.RANK:
                host = f", on {self.hosts[0]}" if len(self.hosts) == 1 else ""
                return f"{ranks} ({self._stage} {self.pp_rank}, replica {self.dp_rank}{host})"

    @property
    def short(self) -> str:
        """Name of the place for dashboards: `rank_3` (`rank_2-3` for a tensor-parallel group),
        `stage_1`, `replica_0`, or `link_0-1` by pipeline ranks."""
        match self.kind:
            case Kind.LINK:
                assert self.link is not None
                return f"link_{self.link[0]}-{self.link[1]}"
            case Kind.RANK:
                return "rank_" + "-".join(map(str, self.ranks))
            case Kind.STAGE:
                return f"stage_{self.pp_rank}"
            case Kind.REPLICA:
                return f"replica_{self.dp_rank}"

    @property
    def text(self) -> str:
        """Sentence such as `rank 3 (...) takes 31% longer than before, since step 57`.

        Instead of `before` it may name tensor-parallel peers or other replicas.
        """
        is_group = self.kind is Kind.RANK and len(self.ranks) > 1
        verb, whose = ("take", "their") if is_group else ("takes", "its")
        compared = {
            Baseline.MEMBERS: f"than {whose} tensor-parallel peers",
            Baseline.PEERS: f"than {whose} peers in other replicas",
            Baseline.PAST: "than before",
        }[self.against]
        if self.kind is Kind.REPLICA:
            compared = "than the other replicas"
        return (
            f"{self.place} {verb} {self.rise:.0%} longer {compared}, since step {self.since_step}"
        )


@dataclass(frozen=True, slots=True)
class Alert:
    """An alarm that was raised, or ended, in this step."""

    step: int
    alarm: Alarm
    has_recovered: bool = False

    @property
    def text(self) -> str:
        """Sentence with the step, such as `step 60: rank 3 (...) has recovered`, or the alarm's
        text."""
        if self.has_recovered:
            return f"step {self.step}: {self.alarm.place} has recovered"
        return f"step {self.step}: {self.alarm.text}"


class Alarms:
    """Detects slow places in the steps of one session, whose ranks do not change."""

    def __init__(self, infos: Iterable[RankInfo]) -> None:
        self._infos = {info.rank: info for info in infos}
        self._replicas = sorted({info.dp_rank for info in self._infos.values()})
        self._stages = sorted({info.pp_rank for info in self._infos.values()})
        self._members = sorted({info.tp_rank for info in self._infos.values()})
        self._tasks = Detector(len(self._replicas), len(self._stages), len(self._members))
        self._hops: list[tuple[int, int]] = []
        self._links: Detector | None = None
        self._slow: dict[Slowdown, Alarm] = {}
        self._slow_links: dict[Slowdown, Alarm] = {}
        self._has_chunks = any(len(info.stages) > 1 for info in self._infos.values())

    @property
    def active(self) -> list[Alarm]:
        """Alarms that have not ended: those of ranks, stages and replicas, then those of links."""
        return [*self._slow.values(), *self._slow_links.values()]

    @property
    def leading(self) -> Alarm | None:
        """The rank, stage or replica with the largest rise, even if below the alarm threshold.

        None without a rise.
        """
        slow = self._tasks.leading
        return None if slow is None else self._alarm_of_tasks(slow)

    def add_step(self, step: StepFigures) -> list[Alert]:
        """Add a step's figures and return the alarms that it raises or ends, those of links last.

        Of tasks, and then of links, the alarms that end come first; they are no longer active.
        """
        sample = np.full((len(self._replicas), len(self._stages), len(self._members)), np.nan)
        work = np.zeros(sample.shape)
        for figures in step.ranks.values():
            place = self._place(figures.info)
            sample[place], work[place] = figures.log_task_s, figures.busy_fraction
        changes = self._tasks.add_sample(step.step, sample, work)
        alerts = [
            Alert(step.step, self._slow.pop(slow), has_recovered=True) for slow in changes.recovered
        ]
        for slow in changes.slow:
            self._slow[slow] = self._alarm_of_tasks(slow)
            alerts.append(Alert(step.step, self._slow[slow]))
        return alerts + self._add_links(step)

    def _add_links(self, step: StepFigures) -> list[Alert]:
        """Add a step's message times and return the link alarms that it raises or ends.

        The first step with messages determines the links; links that appear later are ignored. A
        link that becomes slow while a rank at its ends has an alarm raises none, even later.
        """
        if self._links is None:
            self._hops = sorted({self._hop(link) for link in step.links})
            if not self._hops:
                return []
            sizes = len(self._replicas), len(self._hops), len(self._members)
            self._links = Detector(*sizes)
        sample = np.full((len(self._replicas), len(self._hops), len(self._members)), np.nan)
        work = np.zeros(sample.shape)
        for link, figures in step.links.items():
            hop = self._hop(link)
            if hop in self._hops:
                replica, _, member = self._place(self._infos[link[0]])
                place = replica, self._hops.index(hop), member
                sample[place], work[place] = figures
        changes = self._links.add_sample(step.step, sample, work)
        alerts = [
            Alert(step.step, ended, has_recovered=True)
            for slow in changes.recovered
            if (ended := self._slow_links.pop(slow, None)) is not None
        ]
        blamed = {rank for alarm in self._slow.values() for rank in alarm.ranks}
        for slow in changes.slow:
            alarm = self._alarm_of_link(slow)
            if alarm is not None and not blamed.intersection(alarm.ranks):
                self._slow_links[slow] = alarm
                alerts.append(Alert(step.step, alarm))
        return alerts

    def _hop(self, link: tuple[int, int]) -> tuple[int, int]:
        """Return the pipeline ranks of a link between two global ranks."""
        return self._infos[link[0]].pp_rank, self._infos[link[1]].pp_rank

    def _place(self, info: RankInfo) -> tuple[int, int, int]:
        """Return a rank's index in the grid (replicas, stages, members)."""
        return (
            self._replicas.index(info.dp_rank),
            self._stages.index(info.pp_rank),
            self._members.index(info.tp_rank),
        )

    def _alarm_of_tasks(self, slow: Slowdown) -> Alarm:
        """Make the alarm for slow tasks of a rank or tensor-parallel group, a stage or a replica.

        Without data parallelism a slow stage is a slow rank.
        """
        where = slow.where
        has_replicas, has_stages = len(self._replicas) > 1, len(self._stages) > 1
        if where.place is None or not has_stages:
            kind = Kind.REPLICA if where.place is None else Kind.RANK
        else:
            kind = Kind.STAGE if where.replica is None and has_replicas else Kind.RANK
        pp_rank = None if where.place is None else self._stages[where.place]
        # Without data parallelism no part has a replica, and the only one is meant.
        dp_rank = None if kind is Kind.STAGE else self._replicas[where.replica or 0]
        tp_rank = None if where.member is None else self._members[where.member]
        infos = self._matching(pp_rank, dp_rank, tp_rank)
        return Alarm(
            kind,
            tuple(info.rank for info in infos),
            pp_rank,
            dp_rank,
            None,
            _hosts(infos),
            slow.rise,
            slow.against,
            slow.since,
            self._has_chunks,
        )

    def _alarm_of_link(self, slow: Slowdown) -> Alarm | None:
        """Make the alarm for a slow link; None if all links of a replica are slow alike."""
        where = slow.where
        if where.place is None:
            return None
        hop = self._hops[where.place]
        is_one_replica = where.replica is not None and len(self._replicas) > 1
        dp_rank = self._replicas[where.replica or 0] if is_one_replica else None
        tp_rank = None if where.member is None else self._members[where.member]
        infos = [info for end in hop for info in self._matching(end, dp_rank, tp_rank)]
        return Alarm(
            Kind.LINK,
            tuple(info.rank for info in infos),
            None,
            dp_rank,
            hop,
            _hosts(infos),
            slow.rise,
            slow.against,
            slow.since,
            self._has_chunks,
        )

    def _matching(
        self, pp_rank: int | None, dp_rank: int | None, tp_rank: int | None
    ) -> list[RankInfo]:
        """Return the ranks with these coordinates, sorted by rank; None matches any."""
        return [
            info
            for _, info in sorted(self._infos.items())
            if pp_rank in (None, info.pp_rank)
            and dp_rank in (None, info.dp_rank)
            and tp_rank in (None, info.tp_rank)
        ]


def _hosts(infos: Iterable[RankInfo]) -> tuple[str, ...]:
    """Return the distinct hosts of these ranks, sorted."""
    return tuple(sorted({info.host for info in infos}))


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as `rank 3` or `ranks 0, 1, 2 and 5 more`; the first eight are listed."""
    listed = ", ".join(map(str, ranks[:_MOST_RANKS_LISTED]))
    num_more = len(ranks) - _MOST_RANKS_LISTED
    more = f" and {num_more} more" if num_more > 0 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"


def alert_environment(alert: Alert, run: str) -> Mapping[str, str]:
    """Return environment variables with the facts of an alert, for the user's alert command.

    Unknown facts are empty; RRFP_ALERT_RISE is a fraction.
    """
    alarm = alert.alarm
    link = "" if alarm.link is None else f"{alarm.link[0]},{alarm.link[1]}"
    return {
        "RRFP_ALERT": "recovered" if alert.has_recovered else "slow",
        "RRFP_ALERT_RUN": run,
        "RRFP_ALERT_TEXT": alert.text,
        "RRFP_ALERT_KIND": str(alarm.kind),
        "RRFP_ALERT_RANKS": ",".join(map(str, alarm.ranks)),
        "RRFP_ALERT_STAGE": "" if alarm.pp_rank is None else str(alarm.pp_rank),
        "RRFP_ALERT_REPLICA": "" if alarm.dp_rank is None else str(alarm.dp_rank),
        "RRFP_ALERT_LINK": link,
        "RRFP_ALERT_HOSTS": ",".join(alarm.hosts),
        "RRFP_ALERT_STEP": str(alert.step),
        "RRFP_ALERT_SINCE_STEP": str(alarm.since_step),
        "RRFP_ALERT_RISE": f"{alarm.rise:.4f}",
    }


# The measures of a step by the names that dashboards and programs get; each name has its unit.


MEASURES = {
    "loss": "The step's mean loss.",
    "heldout_loss": "The loss of the held-out data.",
    "grad_norm": "The norm of the gradients.",
    "step_time_s": "The time of a whole step, data and optimizer included, in seconds.",
    "tokens_per_s": "Tokens that were trained on in a second.",
    "schedule_time_s": "The time of a step's schedule, in seconds.",
    "bubble_fraction": "The share of the schedule's time that ranks are idle.",
    "busy_fraction": "The share of the schedule's time that a pipeline rank works.",
    "wait_fraction": "The share of the schedule's time that ranks wait for this cause.",
    "peak_held": "The most activations that a pipeline rank kept, in chunks.",
    "peak_held_bytes": "The most bytes of activations that a pipeline rank kept, where known.",
    "link_time_fraction": "The time of a link's messages, as a share of the schedule's.",
    "slow": "How much longer something slow takes, as a share; only while it is slow.",
}
"""Description of every measure, by name."""

_COPIED_METRICS = ("loss", "heldout_loss", "grad_norm", "step_time_s")


class Measure(NamedTuple):
    """One number of a step."""

    name: str
    label: tuple[str, str] | None
    """Name and value of the label, such as `("pp_rank", "3")`."""
    value: float

    @property
    def path(self) -> str:
        """Name with label, `busy_fraction/pp_rank_3`, for dashboards without labels."""
        return self.name if self.label is None else f"{self.name}/{self.label[0]}_{self.label[1]}"


def measures_of_metrics(line: dict[str, Any]) -> Iterator[Measure]:
    """Yield losses, gradient norm, step time and tokens per second of a line of `metrics.jsonl`.

    Tokens per second is computed from tokens and step time. Values that are not numbers are
    skipped.
    """
    for name in _COPIED_METRICS:
        value = line.get(name)
        if isinstance(value, int | float):
            yield Measure(name, None, float(value))
    tokens, seconds = line.get("tokens"), line.get("step_time_s")
    if isinstance(tokens, int | float) and isinstance(seconds, int | float) and seconds > 0:
        yield Measure("tokens_per_s", None, tokens / seconds)


def measures_of_step(step: StepFigures, active: Iterable[Alarm]) -> Iterator[Measure]:
    """Yield the measures of a recorded step, and the rise of each active alarm as `slow`.

    They are of the whole step, and by pipeline rank, cause of wait and link. Unknown peak bytes are
    left out.
    """
    yield Measure("schedule_time_s", None, step.window_s)
    yield Measure("bubble_fraction", None, step.bubble_fraction)
    for pp_rank, ranks in step.by_stage().items():
        label = "pp_rank", str(pp_rank)
        yield Measure("busy_fraction", label, fmean(rank.busy_fraction for rank in ranks))
        yield Measure("peak_held", label, float(max(rank.peak_held for rank in ranks)))
        if most_bytes := max(rank.peak_held_bytes for rank in ranks):
            yield Measure("peak_held_bytes", label, float(most_bytes))
    for cause, share in step.wait_fractions().items():
        yield Measure("wait_fraction", ("cause", cause), share)
    for (sender, receiver), link in step.links.items():
        yield Measure("link_time_fraction", ("link", f"{sender}-{receiver}"), link.fraction)
    for alarm in active:
        yield Measure("slow", ("place", alarm.short), alarm.rise)


def measures_as_json(measures: Iterable[Measure]) -> dict[str, Any]:
    """Return measures as one JSON object; a labeled measure maps label values to numbers."""
    found: dict[str, Any] = {}
    for name, label, value in measures:
        if label is None:
            found[name] = value
        else:
            found.setdefault(name, {})[label[1]] = value
    return found
