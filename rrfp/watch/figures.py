"""The figures of each step, put together from what the ranks record, as they record it.

A step counts once every rank has ended it. Its window is measured as in a trace, from the first
entry into the schedule to the last return, where all ranks share a host. Clocks of several hosts
drift apart in hours, so there it is the longest of the ranks' own times, and a message is timed at
one of its ends.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import log
from statistics import fmean, median
from typing import NamedTuple

from rrfp.trace.records import NS_PER_S, Phase, RankInfo, RankRecords, is_evaluation

_MOST_OF_MEDIAN = log(2)


@dataclass(frozen=True, slots=True)
class RankFigures:
    """A rank's share of a step."""

    info: RankInfo
    busy_fraction: float
    """Of the step's window."""
    wait_fractions: Mapping[str, float]
    """By cause."""
    log_task_s: float
    """The mean logarithm of its tasks' times in seconds. A single task counts as twice the median
    of its kind and chunk at most: a machine that does other things too stops some for long."""
    peak_held: int
    """The most activations that it kept, in chunks."""
    peak_held_bytes: int = 0
    """Likewise in bytes; 0 where they are not known."""


class LinkFigures(NamedTuple):
    """The messages of a directed link in a step."""

    log_s: float
    """The mean logarithm of their times in seconds."""
    fraction: float
    """Their times' sum, as a share of the step's window."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What one training step came to."""

    step: int
    ended_s: float
    """When its last rank returned, on the reference clock."""
    window_s: float
    ranks: Mapping[int, RankFigures]
    links: Mapping[tuple[int, int], LinkFigures]
    """By the ranks from and to; empty where messages are not recorded."""

    @property
    def bubble_fraction(self) -> float:
        return 1 - fmean(rank.busy_fraction for rank in self.ranks.values())

    def by_stage(self) -> dict[int, list[RankFigures]]:
        """The ranks of each pipeline rank."""
        found: dict[int, list[RankFigures]] = {}
        for rank in sorted(
            self.ranks.values(), key=lambda each: (each.info.pp_rank, each.info.rank)
        ):
            found.setdefault(rank.info.pp_rank, []).append(rank)
        return found

    def wait_fractions(self) -> dict[str, float]:
        """By cause: the mean over the ranks, the largest first."""
        total: Counter[str] = Counter()
        for rank in self.ranks.values():
            total.update(rank.wait_fractions)
        return {cause: share / len(self.ranks) for cause, share in total.most_common()}


@dataclass(slots=True)
class _Share:
    """What a rank has recorded of a step so far; times are on the reference clock."""

    busy_ns: int = 0
    log_times: defaultdict[tuple[str, int], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Of tasks, in seconds, by kind and chunk."""
    peak_held: int = 0
    peak_held_bytes: int = 0
    waits_ns: Counter[str] = field(default_factory=Counter)
    sends: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """Start and end of a message by peer and sequence; so are `receives`."""
    receives: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    window_ns: tuple[int, int] | None = None
    """From its entry into the schedule to its return, once it has returned."""


class StepAssembler:
    """Puts the steps of a session together."""

    def __init__(self) -> None:
        self.infos: dict[int, RankInfo] = {}
        self.last_steps: dict[int, int] = {}
        """By rank: the last training step that it has ended."""
        self._shares: defaultdict[int, dict[int, _Share]] = defaultdict(dict)

    def add(self, records: RankRecords, *, is_aligned: bool = False) -> None:
        """Take what a rank has recorded, on its own clock; on the reference clock if aligned."""
        info = records.info
        self.infos[info.rank] = info
        shift_ns = 0 if is_aligned else info.clock_offset_ns
        for task in records.tasks:
            share = self._share(task.step, info.rank)
            took_ns = task.end_ns - task.start_ns
            share.busy_ns += took_ns
            log_s = log(max(took_ns, 1) / NS_PER_S)
            share.log_times[task.kind, task.chunk].append(log_s)
            share.peak_held = max(share.peak_held, task.held)
            share.peak_held_bytes = max(share.peak_held_bytes, task.held_bytes)
        for wait in records.waits:
            self._share(wait.step, info.rank).waits_ns[wait.cause] += wait.end_ns - wait.start_ns
        for send in records.sends:
            times = send.start_ns + shift_ns, send.end_ns + shift_ns
            self._share(send.step, info.rank).sends[send.peer, send.sequence] = times
        for receive in records.receives:
            times = receive.start_ns + shift_ns, receive.end_ns + shift_ns
            self._share(receive.step, info.rank).receives[receive.peer, receive.sequence] = times
        for phase in records.phases:
            if phase.phase == Phase.SCHEDULE and not is_evaluation(phase.step):
                share = self._share(phase.step, info.rank)
                share.window_ns = phase.start_ns + shift_ns, phase.end_ns + shift_ns
                self.last_steps[info.rank] = phase.step

    def pop_finished(self, num_ranks: int) -> Iterator[StepFigures]:
        """The steps that `num_ranks` ranks have ended since the last call, in their order."""
        ended = sorted(
            step
            for step, shares in self._shares.items()
            if not is_evaluation(step)
            and len(shares) >= num_ranks
            and all(share.window_ns for share in shares.values())
        )
        for step in ended:
            figures = self._figures(step, self._shares[step])
            if figures is not None:
                yield figures
        # A rank ends its steps in their order: what is not whole by now will never be.
        for step in [each for each in self._shares if ended and each <= ended[-1]]:
            del self._shares[step]

    def _share(self, step: int, rank: int) -> _Share:
        shares = self._shares[step]
        if rank not in shares:
            shares[rank] = _Share()
        return shares[rank]

    def _figures(self, step: int, shares: Mapping[int, _Share]) -> StepFigures | None:
        windows = [share.window_ns for share in shares.values() if share.window_ns is not None]
        first_ns, last_ns = min(start for start, _ in windows), max(end for _, end in windows)
        is_one_host = len({self.infos[rank].host for rank in shares}) == 1
        longest_ns = max(end - start for start, end in windows)
        window_ns = last_ns - first_ns if is_one_host else longest_ns
        if window_ns <= 0 or not all(share.log_times for share in shares.values()):
            return None
        return StepFigures(
            step,
            last_ns / NS_PER_S,
            window_ns / NS_PER_S,
            {
                rank: RankFigures(
                    self.infos[rank],
                    share.busy_ns / window_ns,
                    {cause: ns / window_ns for cause, ns in share.waits_ns.items()},
                    _capped_mean(share.log_times.values()),
                    share.peak_held,
                    share.peak_held_bytes,
                )
                for rank, share in sorted(shares.items())
            },
            dict(self._links(shares, window_ns)),
        )

    def _links(
        self, shares: Mapping[int, _Share], window_ns: int
    ) -> Iterator[tuple[tuple[int, int], LinkFigures]]:
        for receiver, into in shares.items():
            times_ns: defaultdict[int, list[int]] = defaultdict(list)
            for (sender, sequence), received in into.receives.items():
                sent = shares[sender].sends.get((receiver, sequence)) if sender in shares else None
                if sent is None:
                    continue
                is_one_host = self.infos[sender].host == self.infos[receiver].host
                took_ns = received[1] - sent[0] if is_one_host else _longer(sent, received)
                times_ns[sender].append(max(took_ns, 1))
            for sender, found_ns in times_ns.items():
                yield (sender, receiver), _link(found_ns, window_ns)


def _capped_mean(groups: Iterable[list[float]]) -> float:
    """The mean of logarithms, each at most `_MOST_OF_MEDIAN` above the median of its group."""
    capped: list[float] = []
    for group in groups:
        most = median(group) + _MOST_OF_MEDIAN
        capped += (min(each, most) for each in group)
    return fmean(capped)


def _longer(*times: tuple[int, int]) -> int:
    return max(end - start for start, end in times)


def _link(times_ns: Iterable[int], window_ns: int) -> LinkFigures:
    times_ns = list(times_ns)
    return LinkFigures(fmean(log(ns / NS_PER_S) for ns in times_ns), sum(times_ns) / window_ns)


def extra_work(figures: Iterable[StepFigures]) -> dict[int, float]:
    """By pipeline rank: how much more it works than the others do on average, as a share; over
    these steps. Empty for a pipeline of one."""
    total: defaultdict[int, float] = defaultdict(float)
    for step in figures:
        for pp_rank, ranks in step.by_stage().items():
            total[pp_rank] += fmean(rank.busy_fraction for rank in ranks) * step.window_s
    if len(total) < 2:
        return {}
    whole = sum(total.values())
    return {
        pp_rank: work / ((whole - work) / (len(total) - 1)) - 1 if whole > work else 0.0
        for pp_rank, work in total.items()
    }
