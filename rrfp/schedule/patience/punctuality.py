"""How well a rank knows when the tasks end that it waits for.

`Durations` says when a rank expects to be done with a task that it announces, and `Punctuality`
what the rank that hears it makes of that. The runtime uses them in real time, the simulator in
virtual.
"""

from math import sqrt
from typing import NamedTuple

from rrfp.schedule.hints.alternation import Alternation
from rrfp.schedule.patience.setting import LONGEST_NS, AutoPatience, Patience
from rrfp.schedule.policy import Policy
from rrfp.schedule.stimuli import Announced
from rrfp.schedule.tasks import Kind, Task


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
