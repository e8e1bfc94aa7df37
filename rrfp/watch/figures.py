"""Figures of each training step, assembled from the ranks' records while the run goes on.

A step is complete once every rank has ended it. On one host, its window lasts from the first rank's
entry into the schedule to the last rank's return, as in a trace. Clocks of several hosts drift
apart within hours; there the window is the longest of the ranks' own times, and a message is timed
at one of its ends.
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
    """Figures of one rank in a step."""

    info: RankInfo
    busy_fraction: float
    """Task time as a fraction of the step's window."""
    wait_fractions: Mapping[str, float]
    """Wait time by cause, as a fraction of the step's window."""
    log_task_s: float
    """Mean logarithm of the task times in seconds. A task counts at most twice the median of its
    kind and chunk, because other work on the machine stops single tasks for long."""
    peak_held: int
    """Peak number of activations held, in chunks."""
    peak_held_bytes: int = 0
    """Peak bytes of activations held; 0 if unknown."""


class LinkFigures(NamedTuple):
    """Figures of the messages of a directed link in a step."""

    log_s: float
    """Mean logarithm of the message times in seconds."""
    fraction: float
    """Sum of the message times as a fraction of the step's window."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of one training step."""

    step: int
    ended_s: float
    """Time of the last rank's return, on the reference clock."""
    window_s: float
    ranks: Mapping[int, RankFigures]
    links: Mapping[tuple[int, int], LinkFigures]
    """By sending and receiving rank; empty if messages are not recorded."""

    @property
    def bubble_fraction(self) -> float:
        """Share of the window in which ranks ran no task, as a mean over ranks."""
        return 1 - fmean(rank.busy_fraction for rank in self.ranks.values())

    def by_stage(self) -> dict[int, list[RankFigures]]:
        """Return the ranks' figures by pipeline rank, sorted by it and by rank."""
        found: dict[int, list[RankFigures]] = {}
        for rank in sorted(
            self.ranks.values(), key=lambda each: (each.info.pp_rank, each.info.rank)
        ):
            found.setdefault(rank.info.pp_rank, []).append(rank)
        return found

    def wait_fractions(self) -> dict[str, float]:
        """Return the mean wait fraction over all ranks by cause, the largest first."""
        total: Counter[str] = Counter()
        for rank in self.ranks.values():
            total.update(rank.wait_fractions)
        return {cause: share / len(self.ranks) for cause, share in total.most_common()}


@dataclass(slots=True)
class _RankStep:
    """One rank's records of a step so far; times are on the reference clock."""

    busy_ns: int = 0
    log_times: defaultdict[tuple[str, int], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Logarithms of the task times in seconds, by kind and chunk."""
    peak_held: int = 0
    peak_held_bytes: int = 0
    waits_ns: Counter[str] = field(default_factory=Counter)
    sends: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """Start and end of each message, by peer and sequence; `receives` likewise."""
    receives: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    window_ns: tuple[int, int] | None = None
    """Entry into the schedule and return from it; None until the rank has returned."""


class StepAssembler:
    """Assembles the ranks' records of one session into steps."""

    def __init__(self) -> None:
        self.infos: dict[int, RankInfo] = {}
        self.last_steps: dict[int, int] = {}
        """The last training step that each rank has ended."""
        self._shares: defaultdict[int, dict[int, _RankStep]] = defaultdict(dict)

    def add(self, records: RankRecords, *, is_aligned: bool = False) -> None:
        """Add records of one rank. Unless `is_aligned`, shift their times to the reference clock.

        A schedule phase ends a step, except an evaluation.
        """
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
        """Yield, and forget, the steps that all `num_ranks` ranks have ended, in step order.

        Also forgets earlier incomplete steps. Evaluations, and steps with an empty window or in
        which a rank ran no task, are not yielded.
        """
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
        # A rank ends its steps in order, so earlier steps that are incomplete stay incomplete.
        for step in [each for each in self._shares if ended and each <= ended[-1]]:
            del self._shares[step]

    def _share(self, step: int, rank: int) -> _RankStep:
        """Return a rank's records of a step so far, adding an empty object for a new step or
        rank."""
        return self._shares[step].setdefault(rank, _RankStep())

    def _figures(self, step: int, shares: Mapping[int, _RankStep]) -> StepFigures | None:
        """Compute the figures of a complete step; None if a rank ran no task or the window is
        empty."""
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
        self, shares: Mapping[int, _RankStep], window_ns: int
    ) -> Iterator[tuple[tuple[int, int], LinkFigures]]:
        """Yield each directed link, as sending and receiving rank, with its figures.

        Messages without a record of both ends are skipped. Between hosts a message counts as the
        longer of its two ends.
        """
        for receiver, into in shares.items():
            times_ns: defaultdict[int, list[int]] = defaultdict(list)
            for (sender, sequence), received in into.receives.items():
                sent = shares[sender].sends.get((receiver, sequence)) if sender in shares else None
                if sent is None:
                    continue
                is_one_host = self.infos[sender].host == self.infos[receiver].host
                if is_one_host:
                    took_ns = received[1] - sent[0]
                else:
                    took_ns = max(end - start for start, end in (sent, received))
                times_ns[sender].append(max(took_ns, 1))
            for sender, found_ns in times_ns.items():
                log_s = fmean(log(ns / NS_PER_S) for ns in found_ns)
                yield (sender, receiver), LinkFigures(log_s, sum(found_ns) / window_ns)


def _capped_mean(groups: Iterable[list[float]]) -> float:
    """Mean of the logarithms, each capped at that of twice the median time of its group."""
    capped: list[float] = []
    for group in groups:
        most = median(group) + _MOST_OF_MEDIAN
        capped += (min(each, most) for each in group)
    return fmean(capped)


def extra_work(figures: Iterable[StepFigures]) -> dict[int, float]:
    """Return by which fraction each pipeline rank works longer than the mean of the others.

    Sums over these steps; empty for a pipeline of one rank.
    """
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
