"""How well a rank knows when the tasks end that it waits for.

`Durations` says when a rank expects to be done with a task that it announces, and `Punctuality`
what the rank that hears it makes of that. The runtime uses them in real time, the simulator in
virtual.
"""

from collections import deque
from math import erf, exp, log, sqrt
from typing import Final, NamedTuple

from rrfp.schedule.bounds import Bounds
from rrfp.schedule.knobs import LONGEST_NS, AutoPatience, Patience
from rrfp.schedule.named_hints import Alternation
from rrfp.schedule.policy import Policy
from rrfp.schedule.ready_tracker import NOTHING, Books, Tiers
from rrfp.schedule.tasks import Announced, Kind, Task

# What was announced to a rank, and when it is worth waiting for.
#
# Theory of operation. When a rank dispatches a task whose output another rank takes, it announces
# to that rank when to expect it. A free rank chooses as if the announced tasks that are due within
# its patience, early or late, were ready. If its choice is one of them it waits, else it runs the
# choice. So a task that the hint puts first is not put off by a lesser one that happens to be
# ready.
#
# Weight gradients that fill idle time are never put off: a wait is idle time, too.
#
# No patience deadlocks a step, whatever the bound, the hint, and what was announced:
#
# 1. *A wait has a deadline*, the end of the patience for what it waits for, and each task counts as
# announced at most once, so that all waits together are finite. After them the rank decides as if
# nothing had been announced: by the proofs in `rrfp.schedule.bounds` something can always run.
# 2. *A wait changes nothing that a bound counts*, because it runs nothing: what is held stays, in
# microbatches or in bytes, and so does the next task of a rank that drains. The rank waits only
# for what the bound permits now, and it will still permit it then.
# 3. *Ranks do not wait for each other.* An announced task lacks the output of a task that was
# dispatched, which runs to its end whatever this rank does. A rank that waits has announced
# nothing that has not ended, so no chain of waits is longer than one.


NEVER: Final = -1
"""In the place of a time in ns."""


class Announcements:
    """The tasks of one rank whose input was announced and has not arrived everywhere."""

    def __init__(self, books: Books, bounds: Bounds) -> None:
        self.windows: dict[int, tuple[int, int]] = {}
        """By number: from when to wait for a task, and until when."""
        self._books = books
        self._bounds = bounds
        num_chunks = books.shape.num_chunks
        self._idle = (num_chunks + 1,)
        """The tier of weight gradients that fill idle time."""
        self._draining = (tuple(range(num_chunks + 1)), self._idle)
        """The tiers of a rank that drains."""

    def add(self, number: int, announced: Announced) -> None:
        """Note the first announcement of the task of this number."""
        _, expected_ns, patience_ns = announced
        window = expected_ns - patience_ns, expected_ns + patience_ns
        self.windows.setdefault(number, window)

    def until(self, now_ns: int, choice: int, tiers: Tiers) -> int:
        """Until when to wait rather than run `choice`, the best task that may run; `NEVER`: run
        it."""
        books, bounds = self._books, self._bounds
        if bounds.drains:
            tiers = self._draining
        if tiers[-1] == self._idle and choice >= 2 * books.num_of_a_kind:
            return NEVER
        best_tier, best_entry = self._tier(choice, tiers), books.entry(choice)
        found_ns = NEVER
        for number, (from_ns, until_ns) in self.windows.items():
            if not from_ns <= now_ns < until_ns or books.lacks[number] != 0:
                continue
            tier, entry = self._tier(number, tiers), books.entry(number)
            if tier > best_tier or (tier == best_tier and entry >= best_entry):
                continue
            if not bounds.permits(number):
                continue
            if number < books.num_of_a_kind:
                heap = books.ready_sets[0].heaps[number // books.num_microbatches]
                first = books.best(heap)
                # The bound withholds a better one of its chunk, and so this one, too.
                if first != NOTHING and first < entry:
                    continue
            best_tier, best_entry, found_ns = tier, entry, until_ns
        return found_ns

    def _tier(self, number: int, tiers: Tiers) -> int:
        """The place of the tier in which a task competes now."""
        books = self._books
        num_chunks = books.lanes.num_chunks
        lane = number // books.num_microbatches
        heap = lane if lane < num_chunks else num_chunks - 1 + lane // num_chunks
        for place, tier in enumerate(tiers):
            if heap in tier:
                return place
        raise AssertionError("every heap is in a tier")


class Trust(NamedTuple):
    """How much `auto` makes of a hint."""

    share: float
    """The most that it waits, as a share of a mean task."""
    noisy: float
    """The noise at which it does not wait. Up to half of it, it waits as long as it ever does."""


IN_PLANS = Trust(1 / 2, 0.4)
"""In an order."""
IN_RULES = Trust(1 / 4, 0.1)
"""In a rule such as `bf`, which ranks what is ready and plans nothing."""
IN_NONE = Trust(0, 1)
"""In a rule that puts shallow chunks first: their forwards would be waited for, while deep ones
starve."""

_FIRST_GUESSES = 4
"""So many announcements, all noisy, stand for what has not been heard yet."""
_WEIGHT_OF_LATEST = 0.02
"""In the long run; until then all that was heard counts alike."""
_LARGEST_ERROR = 1.0
"""As a share of what was expected. A larger one counts as this: one stop of a rank must not decide
for long."""


class Durations:
    """How long one rank's tasks of each kind and chunk take: a decaying mean, because the first of
    a kind takes longer than later ones."""

    def __init__(self) -> None:
        self._means_ns: dict[tuple[Kind, int], float] = {}

    def expected_ns(self, kind: Kind, chunk: int) -> float | None:
        """The mean; None before the first."""
        return self._means_ns.get((kind, chunk))

    def took(self, kind: Kind, chunk: int, taken_ns: int) -> None:
        """A task has run."""
        before_ns = self._means_ns.get((kind, chunk), float(taken_ns))
        self._means_ns[kind, chunk] = 0.9 * before_ns + 0.1 * taken_ns


def punctuality_of(policy: Policy, num_chunks: int) -> "Punctuality | None":
    """What a rank under this policy has heard at first: nothing. None if it never waits."""
    hint, trust = policy.hint, IN_PLANS
    if isinstance(hint, Alternation):
        trust = IN_RULES if hint.deep or num_chunks == 1 else IN_NONE
    if not policy.patience or (trust is IN_NONE and isinstance(policy.patience, AutoPatience)):
        return None
    return Punctuality(policy.patience, trust)


class Punctuality:
    """How punctual what is announced to one rank is, and how long it therefore waits for it."""

    def __init__(self, patience: Patience, trust: Trust) -> None:
        """`trust` is what `auto` goes by."""
        self.asked = patience, trust
        self._due: dict[Task, tuple[int, int]] = {}
        """By task announced: when its input was said to come, and how long that was from then."""
        self._lateness_ns: dict[tuple[Kind, int], float] = {}
        """By kind and stage: how much later than said inputs come in the mean. Messages take time
        that their senders do not know."""
        self._num_heard = 0
        self._mean_ns = 0.0
        self._square_error = trust.noisy * trust.noisy

    @property
    def noise(self) -> float:
        """The error of announcements, as a share of the time that tasks take (root mean square)."""
        return sqrt(self._square_error)

    @property
    def patience_ns(self) -> int:
        """How long to wait now: what was asked for or, with `auto`, a share of a mean task."""
        patience, trust = self.asked
        if not isinstance(patience, AutoPatience):
            return patience
        confidence = min(1.0, max(0.0, 2 * (1 - self.noise / trust.noisy)))
        return min(LONGEST_NS, int(self._mean_ns * trust.share * confidence))

    def announced(self, task: Task, heard_ns: int, left_ns: int) -> Announced:
        """The stimulus of an announcement that came at `heard_ns`: the task's input is said to come
        `left_ns` later."""
        stage, kind, _ = task
        said_ns = heard_ns + left_ns
        self._due[task] = said_ns, left_ns
        lateness_ns = self._lateness_ns.get((kind, stage), 0.0)
        return Announced(task, said_ns + int(lateness_ns), self.patience_ns)

    def arrived(self, task: Task, now_ns: int) -> None:
        """A task's input has come; measures the error, if it was announced."""
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
        self._num_heard += 1
        self._mean_ns += (left_ns - self._mean_ns) * max(1 / self._num_heard, _WEIGHT_OF_LATEST)
        error = min(_LARGEST_ERROR, abs(error_ns) / self._mean_ns) if self._mean_ns else 0.0
        weight = max(1 / (self._num_heard + _FIRST_GUESSES), _WEIGHT_OF_LATEST)
        self._square_error += (error * error - self._square_error) * weight


# When a rank whose device runs a task decides on the next one.
#
# A device works beside its host, which takes a while to launch a task on it. A decision that is
# made when the running task is launched knows too little of what will have come by its end; one
# that is made at its end leaves the device idle for the launch. So the rank decides as late as it
# dares: once the chance that the running task ends within the time of a launch from now exceeds
# `RISK`, given how long such tasks take, by how much their times vary, and that it is still
# running. A launch that takes no time is thus waited with to the end, and tasks that take what is
# expected of them are launched upon just in time.


RISK: Final = 0.05
"""Simulated steps of several hints lost the least with 0.03 to 0.08 (decision 0024)."""

_STEPS: Final = 64
"""In which an expected time is searched."""
_LEAST_NOISE: Final = 1e-3
_MOST_NOISE: Final = 2.0
_WEIGHT_OF_LATEST_DURATION: Final = 0.02
"""Of the noise, in the long run; until then all tasks count alike."""
_NUM_LAUNCHES: Final = 9
"""So many of a kind's latest launches are remembered."""


class JustInTime:
    """What one rank knows of how long its tasks run, and how long they take to launch."""

    def __init__(self, risk: float = RISK) -> None:
        """With a `risk` of 0 it decides at once, with one above 1 at the end."""
        self._risk = risk
        self._runs = Durations()
        self._latest_ns: dict[tuple[Kind, int], deque[int]] = {}
        """The latest launches of each kind and chunk."""
        self._num_seen = 0
        self._square_noise = 0.0

    @property
    def noise(self) -> float:
        """The standard deviation of the logarithm of what tasks take over what was expected."""
        return min(_MOST_NOISE, max(_LEAST_NOISE, sqrt(self._square_noise)))

    @property
    def launch_ns(self) -> int:
        """How long a launch may take: the most of any kind, because it is not known yet which it
        will be. Of each it is the second longest of the latest: few take longer and leave the
        device idle, and one that compiles a kernel, as the first often does, does not count."""
        return max(
            (sorted(each)[max(0, len(each) - 2)] for each in self._latest_ns.values()), default=0
        )

    def launched(self, kind: Kind, chunk: int, taken_ns: int) -> None:
        """The host has launched a task."""
        latest_ns = self._latest_ns.setdefault((kind, chunk), deque(maxlen=_NUM_LAUNCHES))
        latest_ns.append(taken_ns)

    def ran(self, kind: Kind, chunk: int, taken_ns: int, known_ns: int | None = None) -> None:
        """The device has run a task, of which `known_ns` was expected beforehand."""
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
        """When to decide on what follows a task that began at `start_ns`, should it still run then;
        None: at its end. `known_ns` is what is known of it beforehand. At once where nothing is
        known of such tasks."""
        expected_ns = self._expected_ns(kind, chunk, known_ns)
        launch_ns = self.launch_ns
        if not expected_ns:
            return None if self._risk > 1 else start_ns
        after_ns = _daring_ns(expected_ns, self.noise, launch_ns, self._risk)
        return None if after_ns is None else start_ns + int(after_ns)

    def _expected_ns(self, kind: Kind, chunk: int, known_ns: int | None) -> float:
        if known_ns is not None:
            return float(known_ns)
        return self._runs.expected_ns(kind, chunk) or 0.0


def _daring_ns(expected_ns: float, noise: float, launch_ns: int, risk: float) -> float | None:
    """How long a task of this expected time, lognormal with this noise, may run before the chance
    that it ends within a launch exceeds the risk; None if it never does."""
    if launch_ns <= 0:
        return None
    location = log(expected_ns) - noise * noise / 2
    scale = 1 / (noise * sqrt(2.0))
    after_ns, most_ns = 0.0, expected_ns * exp(2 * noise)
    while after_ns <= most_ns:
        ended = _chance(after_ns, location, scale)
        if ended >= 1:
            break
        if _chance(after_ns + launch_ns, location, scale) - ended >= risk * (1 - ended):
            return after_ns
        after_ns += expected_ns / _STEPS
    return None


def _chance(time_ns: float, location: float, scale: float) -> float:
    """Of a lognormal time to be shorter than this one."""
    return (1 + erf((log(time_ns) - location) * scale)) / 2 if time_ns > 0 else 0.0
