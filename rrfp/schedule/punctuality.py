"""Waiting for announced tasks, and deciding just before the running task ends.

A rank announces when it expects a task to end (`Durations`). The receiving rank tracks how accurate
announcements are (`Punctuality`) and may wait for an announced task (`Announcements`). The runtime
uses these classes in real time, the simulator in virtual time.
"""

from collections import deque
from math import erf, exp, log, sqrt
from typing import Final, NamedTuple

from rrfp.schedule.bounds import Bounds
from rrfp.schedule.named_hints import Alternation
from rrfp.schedule.policy import LONGEST_NS, AutoPatience, Patience, Policy
from rrfp.schedule.ready_tracker import NO_TASK, HeapTiers, ReadyTracker
from rrfp.schedule.tasks import Announced, Kind, Task

# The announcements that a rank has received, and when to wait for the announced tasks.
#
# Theory of operation. When a rank dispatches a task whose output another rank consumes, it
# announces to that rank when to expect it. A free rank chooses as if the announced tasks that are
# due within its patience, early or late, were ready. If its choice is one of them it waits, else it
# runs the choice. So a lesser task that happens to be ready does not delay the task that the hint
# puts first.
#
# Weight gradients that fill idle time are never delayed: a wait is idle time, too.
#
# No patience deadlocks a step, under any bound and hint, and with any announcements:
#
# 1. *A wait has a deadline*, the end of the patience for what it waits for, and each task counts as
# announced at most once, so that all waits together are finite. After them the rank decides as if
# nothing had been announced: by the proofs in `rrfp.schedule.bounds` something can always run.
# 2. *A wait changes nothing that a bound counts*, because it runs nothing: what is held stays, in
# microbatches or in bytes, and so does the next task of a rank that drains. The rank waits only
# for what the bound permits now, and it will still permit it then.
# 3. *Ranks do not wait for each other.* An announced task lacks the output of a task that was
# dispatched, which runs to its end whatever this rank does. A rank that waits has announced
# no task that is still running, so no chain of waits is longer than one.


NEVER: Final = -1
"""Placeholder in ns for a time that does not exist."""


class Announcements:
    """The tasks of one rank whose input was announced and has not arrived at all members."""

    def __init__(self, tracker: ReadyTracker, bounds: Bounds) -> None:
        self.windows: dict[int, tuple[int, int]] = {}
        """By task number: the time from which to wait for the task, and the time until which."""
        self._tracker = tracker
        self._bounds = bounds
        num_chunks = tracker.shape.num_chunks
        self._idle = (num_chunks + 1,)
        """The tier of weight gradients that fill idle time."""
        self._draining = (tuple(range(num_chunks + 1)), self._idle)
        """The tiers of a rank that drains."""

    def add(self, number: int, announced: Announced) -> None:
        """Record the announcement of the task `number` as a window of the patience before and after
        the expected time. Later announcements of the task have no effect."""
        _, expected_ns, patience_ns = announced
        window = expected_ns - patience_ns, expected_ns + patience_ns
        self.windows.setdefault(number, window)

    def until(self, now_ns: int, choice: int, tiers: HeapTiers) -> int:
        """Return the time in ns until which to wait instead of running `choice`, the best task that
        may run: the end of the window of the best announced task that goes before it, is due now,
        lacks only its input, and that the bounds permit. `NEVER` to run `choice`, as always if it
        is a weight gradient that fills idle time."""
        tracker, bounds = self._tracker, self._bounds
        if bounds.drains:
            tiers = self._draining
        if tiers[-1] == self._idle and choice >= 2 * tracker.num_per_kind:
            return NEVER
        best_tier, best_entry = self._tier(choice, tiers), tracker.entry(choice)
        found_ns = NEVER
        for number, (from_ns, until_ns) in self.windows.items():
            if not from_ns <= now_ns < until_ns or tracker.unmet[number] != 0:
                continue
            tier, entry = self._tier(number, tiers), tracker.entry(number)
            if tier > best_tier or (tier == best_tier and entry >= best_entry):
                continue
            if not bounds.permits(number):
                continue
            if number < tracker.num_per_kind:
                heap = tracker.ready_sets[0].heaps[number // tracker.num_microbatches]
                first = tracker.best(heap)
                # The bound withholds a better forward of its chunk, and so this one, too.
                if first != NO_TASK and first < entry:
                    continue
            best_tier, best_entry, found_ns = tier, entry, until_ns
        return found_ns

    def _tier(self, number: int, tiers: HeapTiers) -> int:
        """Return the index, in `tiers`, of the tier in which a task competes."""
        tracker = self._tracker
        num_chunks = tracker.index.num_chunks
        row = number // tracker.num_microbatches
        heap = row if row < num_chunks else num_chunks - 1 + row // num_chunks
        for place, tier in enumerate(tiers):
            if heap in tier:
                return place
        raise AssertionError("every heap is in a tier")


class Trust(NamedTuple):
    """How far a patience of `auto` trusts a hint."""

    share: float
    """The longest wait, as a share of a mean task."""
    noisy: float
    """The noise of announcements from which on it does not wait. Up to half of this noise, it waits
    the longest."""


TRUST_IN_ORDERS = Trust(1 / 2, 0.4)
TRUST_IN_RULES = Trust(1 / 4, 0.1)
"""For a rule such as `bf`, which ranks ready tasks and plans nothing."""
NO_TRUST = Trust(0, 1)
"""For a rule that puts shallow chunks first: ranks would wait for their forwards, while deep chunks
starve."""

_NUM_PRIOR = 4
"""The weight of the initial noise estimate, in announcements."""
_WEIGHT_OF_LATEST = 0.02
"""The weight of the latest announcement in the long run. Until then all count alike."""
_LARGEST_ERROR = 1.0
"""The largest error that counts, as a share of the expected time: a rank that stops once must not
dominate the estimate."""


class Durations:
    """Decaying mean times of one rank's tasks by kind and chunk. They decay because the first task
    of a kind takes longer than later ones."""

    def __init__(self) -> None:
        self._means_ns: dict[tuple[Kind, int], float] = {}

    def expected_ns(self, kind: Kind, chunk: int) -> float | None:
        """Return the decaying mean time of such tasks in ns; None before the first."""
        return self._means_ns.get((kind, chunk))

    def took(self, kind: Kind, chunk: int, taken_ns: int) -> None:
        """Add the time of a task that has run, in ns, to the decaying mean, with a weight of 0.1
        (the first one sets it)."""
        before_ns = self._means_ns.get((kind, chunk), float(taken_ns))
        self._means_ns[kind, chunk] = 0.9 * before_ns + 0.1 * taken_ns


def new_punctuality(policy: Policy, num_chunks: int) -> "Punctuality | None":
    """Make the punctuality tracker of a rank under this policy; None if such a rank never waits:
    with patience 0, and with `auto` under a rule that puts the first of several chunks first."""
    hint, trust = policy.hint, TRUST_IN_ORDERS
    if isinstance(hint, Alternation):
        trust = TRUST_IN_RULES if hint.deep or num_chunks == 1 else NO_TRUST
    if not policy.patience or (trust is NO_TRUST and isinstance(policy.patience, AutoPatience)):
        return None
    return Punctuality(policy.patience, trust)


class Punctuality:
    """Tracks how accurate the announcements to one rank are, and derives its patience from that."""

    def __init__(self, patience: Patience, trust: Trust) -> None:
        """`trust` only matters for a patience of `auto`."""
        self.asked = patience, trust
        self._due: dict[Task, tuple[int, int]] = {}
        """By announced task: the announced arrival of its input, and its distance from the
        announcement, in ns."""
        self._lateness_ns: dict[tuple[Kind, int], float] = {}
        """By kind and stage: the mean delay of inputs beyond the announced time. Senders do not
        know how long messages take."""
        self._num_measured = 0
        self._mean_ns = 0.0
        self._square_error = trust.noisy * trust.noisy

    @property
    def noise(self) -> float:
        """The error of announcements, as a share of the time that tasks take (root mean square,
        with the latest errors weighing most). It begins at the noise from which on `auto` does not
        wait."""
        return sqrt(self._square_error)

    @property
    def patience_ns(self) -> int:
        """The patience now, in ns: the given one or, with `auto`, a share of a mean task, at most
        60 s, that falls to 0 as announcements get noisy."""
        patience, trust = self.asked
        if not isinstance(patience, AutoPatience):
            return patience
        confidence = min(1.0, max(0.0, 2 * (1 - self.noise / trust.noisy)))
        return min(LONGEST_NS, int(self._mean_ns * trust.share * confidence))

    def announced(self, task: Task, now_ns: int, left_ns: int) -> Announced:
        """Record an announcement that arrives now and says that the task's input will arrive
        `left_ns` later. Return it as a stimulus, with that time corrected by the usual lateness,
        and with the patience now."""
        stage, kind, _ = task
        said_ns = now_ns + left_ns
        self._due[task] = said_ns, left_ns
        lateness_ns = self._lateness_ns.get((kind, stage), 0.0)
        return Announced(task, said_ns + int(lateness_ns), self.patience_ns)

    def arrived(self, task: Task, now_ns: int) -> None:
        """Record that a task's input has arrived: the error of its announcement updates the
        lateness, the mean time and the noise. Without an announcement nothing changes; the first
        one of a kind and stage only sets the lateness."""
        due = self._due.pop(task, None)
        if due is None:
            return
        said_ns, left_ns = due
        stage, kind, _ = task
        key = kind, stage
        before_ns = self._lateness_ns.get(key)
        most_ns = _LARGEST_ERROR * left_ns
        error_ns = min(most_ns, max(-most_ns, now_ns - said_ns - (before_ns or 0.0)))
        if before_ns is None:
            self._lateness_ns[key] = error_ns
            return
        self._lateness_ns[key] = before_ns + 0.1 * error_ns
        self._num_measured += 1
        self._mean_ns += (left_ns - self._mean_ns) * max(1 / self._num_measured, _WEIGHT_OF_LATEST)
        error = min(_LARGEST_ERROR, abs(error_ns) / self._mean_ns) if self._mean_ns else 0.0
        weight = max(1 / (self._num_measured + _NUM_PRIOR), _WEIGHT_OF_LATEST)
        self._square_error += (error * error - self._square_error) * weight


# The time at which a rank whose device runs a task decides on the next one.
#
# A device works beside its host, which takes a while to launch a task on it. A decision at the
# launch of the running task cannot know what arrives before that task ends; a decision at its end
# leaves the device idle for the launch. So the rank decides as late as is safe: once the
# probability that the running task ends within the time of one launch exceeds `RISK`, given the
# mean and the spread of such tasks' times, and that the task is still running. If launches take no
# time, the rank decides at the end of the task. If tasks take exactly the expected time, it decides
# one launch before the end.


RISK: Final = 0.05
"""Simulated steps of several hints lost the least with 0.03 to 0.08 (decision 0024)."""

_STEPS: Final = 64
"""The number of steps into which the search divides an expected time."""
_LEAST_NOISE: Final = 1e-3
_MOST_NOISE: Final = 2.0
_WEIGHT_OF_LATEST_DURATION: Final = 0.02
"""The weight of the latest task in the noise, in the long run. Until then all count alike."""
_NUM_LAUNCHES: Final = 9
"""The number of latest launches remembered for each kind and chunk."""


class JustInTime:
    """Chooses the time of one rank's next decision, from the run and launch times of its tasks."""

    def __init__(self, risk: float = RISK) -> None:
        """With a `risk` of 0 it decides at once, with one above 1 at the end of the task."""
        self._risk = risk
        self._runs = Durations()
        self._latest_ns: dict[tuple[Kind, int], deque[int]] = {}
        """The latest launches of each kind and chunk."""
        self._num_seen = 0
        self._square_noise = 0.0

    @property
    def noise(self) -> float:
        """The standard deviation of the logarithm of a task's time over its expected time, limited
        to 0.001 to 2."""
        return min(_MOST_NOISE, max(_LEAST_NOISE, sqrt(self._square_noise)))

    @property
    def launch_ns(self) -> int:
        """The time to allow for a launch, in ns: the maximum over kinds and chunks, because the
        next task is not known yet; 0 before the first launch. For each it is the second longest of
        the latest 9, so that a single launch that compiles a kernel does not count."""
        return max(
            (sorted(each)[max(0, len(each) - 2)] for each in self._latest_ns.values()), default=0
        )

    def launched(self, kind: Kind, chunk: int, taken_ns: int) -> None:
        """Add the launch time of a task, in ns; the latest 9 of each kind and chunk are kept."""
        latest_ns = self._latest_ns.setdefault((kind, chunk), deque(maxlen=_NUM_LAUNCHES))
        latest_ns.append(taken_ns)

    def ran(self, kind: Kind, chunk: int, taken_ns: int, known_ns: int | None = None) -> None:
        """Add the run time of a task, in ns, to the mean and, if a time was expected and it took
        any, to the noise. `known_ns` is its expected time, if that was known; by default the mean
        of earlier tasks."""
        expected_ns = self._expected_ns(kind, chunk, known_ns)
        self._runs.took(kind, chunk, taken_ns)
        if not expected_ns or taken_ns <= 0:
            return
        self._num_seen += 1
        weight = max(1 / self._num_seen, _WEIGHT_OF_LATEST_DURATION)
        off = log(taken_ns / expected_ns)
        self._square_noise += (off * off - self._square_noise) * weight

    def due_ns(
        self, kind: Kind, chunk: int, start_ns: int, known_ns: int | None = None
    ) -> int | None:
        """Return the time at which to decide on the successor of a task that began at `start_ns`,
        if the task still runs then; None: at its end, for instance if launches take no time.
        `known_ns` is its expected time, if known. Without any estimate the time is `start_ns`, or
        None with a risk above 1."""
        expected_ns = self._expected_ns(kind, chunk, known_ns)
        launch_ns = self.launch_ns
        if not expected_ns:
            return None if self._risk > 1 else start_ns
        after_ns = _latest_safe_ns(expected_ns, self.noise, launch_ns, self._risk)
        return None if after_ns is None else start_ns + int(after_ns)

    def _expected_ns(self, kind: Kind, chunk: int, known_ns: int | None) -> float:
        """Return the known time of a task, else the mean of earlier ones of its kind and chunk; 0
        without either."""
        if known_ns is not None:
            return float(known_ns)
        return self._runs.expected_ns(kind, chunk) or 0.0


def _latest_safe_ns(expected_ns: float, noise: float, launch_ns: int, risk: float) -> float | None:
    """Return how long a task may run (ns, in steps of 1/64 of the expected time) before the
    probability that it ends within one launch, if it still runs, reaches the risk; None if it never
    does, or if launches take no time. The task's time is lognormal with this mean and noise."""
    if launch_ns <= 0:
        return None
    location = log(expected_ns) - noise * noise / 2
    scale = 1 / (noise * sqrt(2.0))
    after_ns, most_ns = 0.0, expected_ns * exp(2 * noise)
    while after_ns <= most_ns:
        ended = _lognormal_cdf(after_ns, location, scale)
        if ended >= 1:
            break
        if _lognormal_cdf(after_ns + launch_ns, location, scale) - ended >= risk * (1 - ended):
            return after_ns
        after_ns += expected_ns / _STEPS
    return None


def _lognormal_cdf(time_ns: float, location: float, scale: float) -> float:
    """Return the probability that a lognormal time is shorter than this one; 0 for times up to 0.
    `scale` is 1 / (sigma * sqrt(2))."""
    return (1 + erf((log(time_ns) - location) * scale)) / 2 if time_ns > 0 else 0.0
