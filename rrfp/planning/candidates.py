"""The policies that a run may choose from with its chunks, placement and memory, and the search
for the best one."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, stdev

from rrfp.errors import UsageError
from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.hints import WeightGradients
from rrfp.schedule.named_hints import AUTO_CHOICES, HINTS, ORDERS
from rrfp.schedule.policy import AgreementRule, Dispatch, Policy, counts_microbatches
from rrfp.schedule.rehearsal import fitted
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind
from rrfp.simulate.engine import StepConditions
from rrfp.simulate.step import simulate_step


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy, fitted to a shape, and the shape with its kinds of task."""

    policy: Policy
    shape: Shape

    @property
    def name(self) -> tuple[object, ...]:
        """A key that no other candidate of the run has: hint, dispatch, order of weight gradients
        and patience."""
        policy = self.policy
        return (policy.hint.name, policy.dispatch, policy.w, policy.waits)


def describe_choice(policy: Policy) -> str:
    """Describe the part of a policy that a choice decides, as `zb-v ready ranked`: hint and
    dispatch, then `ranked` and `patient` where they apply."""
    words = [policy.hint.name, str(policy.dispatch)]
    if policy.w is WeightGradients.RANKED:
        words.append(str(policy.w))
    if policy.waits:
        words.append("patient")
    return " ".join(words)


def candidates_of(
    asked: Policy,
    shape: Shape,
    *,
    splits: bool | None = None,
    may_bind: bool = True,
) -> list[Candidate]:
    """Return a candidate for each use of a hint of `AUTO_CHOICES` that fits a shape and the bounds
    of `asked`, with the hint of `asked` first. Others are left out.
    Raises UsageError if that first hint does not support the shape.

    A hint is used by readiness, with ranked weight gradients if it ranks them, and as a binding
    order. `splits` selects policies that split the backward (True) or do not (False). Without
    `may_bind`, or with another agreement rule than intersection, no policy binds an order. A policy
    that binds is returned if its order keeps no more microbatches than a bound that counts them
    allows; with a bound in bytes this differs from step to step (`fits`).
    """
    found: list[Candidate] = []

    def offer(policy: Policy) -> None:
        with suppress(UsageError):  # It does not fit the shape or the bounds.
            found.append(Candidate(*fitted(policy, shape, counts_places=False)))

    first = asked.hint.for_shape(shape)
    names = [first.name, *(name for name in AUTO_CHOICES if name != first.name)]
    hints = [HINTS[name] for name in names]
    for hint in hints:
        if splits not in (None, hint.splits_backward):
            continue
        if shape.num_chunks == 1 and hint.name.endswith("-deep"):
            continue  # the same as without it
        ready = replace(asked, hint=hint, order=None)
        offer(ready)
        if hint.ranks_weight_gradients:
            offer(replace(ready, w=WeightGradients.RANKED))
        if may_bind and hint.name in ORDERS and asked.agreement is AgreementRule.INTERSECTION:
            limit = None if asked.limits_by_shape else asked.limit
            hold = asked.hold if counts_microbatches(asked.hold) else None
            offer(Policy(hint, None, Dispatch.FIXED, limit, hold))
    return found


def unbound_of(policy: Policy, asked: Policy) -> Policy:
    """Return a policy that dispatches by readiness, with the hint and order of a binding one, and
    the other knobs of `asked`. Weight gradients are ranked if the hint ranks them."""
    ready = replace(asked, hint=policy.hint, order=policy.order)
    return replace(ready, w=WeightGradients.RANKED) if policy.hint.ranks_weight_gradients else ready


def patient(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return patient variants of the candidates that dispatch by readiness and are not patient yet.
    The candidates themselves are not returned."""
    return [
        replace(each, policy=each.policy.waiting())
        for each in candidates
        if each.policy.dispatch is Dispatch.READY and not each.policy.waits
    ]


# Simulations of measured steps under any candidate.


MakeWorld = Callable[[Policy], StepConditions]
"""Makes the simulator's conditions of one replica's step under a policy, with fresh state."""


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Steps of a run to compare candidates by, with the simulator's conditions of every replica."""

    steps: Sequence[Sequence[MakeWorld]]
    budgets: Sequence[int] = ()
    """The bounds in bytes by pipeline rank; empty where memory is not counted in bytes."""

    def __len__(self) -> int:
        return len(self.steps)

    def play(self, candidate: Candidate, step: int) -> int | None:
        """Simulate a step under a candidate. Returns its time in ns; None if the candidate binds an
        order that keeps more than the budgets. The budgets are raised for a step that exceeds them
        in any order."""
        policy, shape = candidate.policy, candidate.shape
        worlds = []
        for make in self.steps[step]:
            world = make(policy)
            if self.budgets and world.sizes is not None:
                if not fits(policy, shape, world.sizes, self.budgets):
                    return None
                budgets = map(max, self.budgets, least_budgets(world.sizes, shape))
                world = replace(world, budgets=tuple(budgets))
            worlds.append(world)
        return simulate_step(shape, policy, worlds).makespan_ns


def least_budgets(sizes: ActivationSizes, shape: Shape) -> list[int]:
    """Return the bytes that the heaviest microbatches take on each pipeline rank's chunks, one of
    each chunk at once."""
    return [sizes.of(shape.stages_of(rank)).least_budget for rank in range(shape.num_ranks)]


def fits(policy: Policy, shape: Shape, sizes: ActivationSizes, budgets: Sequence[int]) -> bool:
    """Return whether a step of these sizes stays within the budgets (bytes by pipeline rank) under
    a policy. Without a binding order this is True, as the dispatcher enforces them; with one, the
    order alone decides the peak, and not the tasks' times."""
    if policy.dispatch is not Dispatch.FIXED:
        return True
    order = policy.order
    assert order is not None
    return all(
        peak_bytes(order.rows[rank], sizes, splits_backward=shape.splits_backward) <= budgets[rank]
        for rank in range(shape.num_ranks)
    )


def peak_bytes(
    tasks: Iterable[tuple[int, str, int]], sizes: ActivationSizes, *, splits_backward: bool
) -> int:
    """Return the most bytes that a rank keeps at once if it runs its tasks in this sequence. A task
    is a row of the sizes (a stage, or a chunk of the rank), a kind and a microbatch."""
    held = most = 0
    for row, kind, microbatch in tasks:
        size = sizes.activations[row][microbatch]
        if kind == Kind.F:
            held += size
            most = max(most, held)
            continue
        owed = 0
        if splits_backward:
            owed = size if sizes.pending_w is None else sizes.pending_w[row][microbatch]
        held -= size - owed if kind == Kind.B else owed
    return most


# The best candidate, by successive halving over measured steps.
#
# All candidates run the same steps, so they differ by their own merit and not by their luck. Every
# candidate runs one step; candidates far behind the best one are dropped, the others run as many
# steps again, and so on.


Play = Callable[[Candidate, int], int | None]
"""Gives the time of a numbered step under a candidate, in ns; None if the step does not fit into
the memory under it."""

_MARGINS = (0.10, 0.05, 0.02, 0.01)
"""How far behind the best a candidate may be after each round; the last counts for later ones."""
_MOST = (8, 6, 4, 3)
"""How many candidates stay after each round, at most."""
_LAST = len(_MOST) - 1
LEAST_GAIN = 0.005
"""The share of the step time that a change must gain. The gain must also exceed twice its standard
error."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """A candidate and its expected times."""

    candidate: Candidate
    times_ns: tuple[int, ...]
    """By measured step."""

    @property
    def mean_ns(self) -> float:
        return fmean(self.times_ns)


@dataclass(frozen=True, slots=True)
class Choice:
    """The outcome of a search."""

    chosen: Predicted
    kept: Predicted | None
    """The policy in effect until now; None if that cannot run, or there was none."""
    num_candidates: int
    num_simulations: int


def choose(
    candidates: Sequence[Candidate],
    play: Play,
    num_steps: int,
    current: Candidate | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> Choice | None:
    """Return the best candidate for steps like the `num_steps` measured ones, by successive
    halving: those far behind the best are dropped, the others run twice as many steps.

    The first candidate is the starting one, which is not dropped for being slow. With a `current`
    one, another is chosen only if it gains more than luck explains. Patient variants of those left
    after the first round are added. Candidates under which a step does not fit into the memory are
    left out; None if all are. If `is_over` returns True, the comparison ends after the round.
    """
    race = _Race(play)
    current_name = None if current is None else current.name
    num, rounds = 1, 0
    left = list(candidates)
    while True:
        num = min(num, num_steps)
        left = race.run(left, num)
        if not left or num == num_steps or is_over():
            break
        margin, most = _MARGINS[min(rounds, _LAST)], _MOST[min(rounds, _LAST)]
        best_ns = race.mean_ns(left[0])
        near = [each for each in left if race.mean_ns(each) <= (1 + margin) * best_ns][:most]
        # The starting one is good in most cases, even if others were luckier so far.
        left = near if candidates[0] in near else [*near, *candidates[:1]]
        if rounds == 0:
            # A patient variant is about as good as its original, or slightly better.
            left += patient(left)
        num, rounds = 2 * num, rounds + 1
    if not left:
        return None
    best = race.predicted(left[0])
    kept = None
    if current is not None and race.run([current], num):
        kept = race.predicted(current)
    chosen = best
    if kept is not None and best.candidate.name != current_name and not _gains(best, kept):
        chosen = kept
    return Choice(chosen, kept, race.num_candidates, race.num_simulations)


class _Race:
    """The simulated times of candidates, each step of each candidate once."""

    def __init__(self, play: Play) -> None:
        self._play = play
        self._times_ns: dict[tuple[object, ...], list[int]] = {}
        self._fails: set[tuple[object, ...]] = set()
        self.num_simulations = 0

    @property
    def num_candidates(self) -> int:
        """The number of candidates that were simulated, with those that do not fit into the
        memory."""
        return len(self._times_ns)

    def run(self, candidates: Sequence[Candidate], num: int) -> list[Candidate]:
        """Simulate the first `num` steps under each candidate, except those that it has run before.
        Returns the candidates under which they fit into the memory, best mean time first."""
        for each in candidates:
            times_ns = self._times_ns.setdefault(each.name, [])
            while len(times_ns) < num and each.name not in self._fails:
                time_ns = self._play(each, len(times_ns))
                if time_ns is None:
                    self._fails.add(each.name)
                    break
                self.num_simulations += 1
                times_ns.append(time_ns)
        ran = [each for each in candidates if each.name not in self._fails]
        return sorted(ran, key=self.mean_ns)

    def mean_ns(self, candidate: Candidate) -> float:
        """Return a candidate's mean time over the steps that it has run, in ns."""
        return fmean(self._times_ns[candidate.name])

    def predicted(self, candidate: Candidate) -> Predicted:
        """Return a candidate with its times on the steps that it has run."""
        return Predicted(candidate, tuple(self._times_ns[candidate.name]))


def _gains(best: Predicted, kept: Predicted) -> bool:
    """Return whether the best candidate gains more over the present one than luck explains, on
    average: over 0.5% of the step's time and over twice the standard error."""
    gains = [
        kept_ns - best_ns for kept_ns, best_ns in zip(kept.times_ns, best.times_ns, strict=False)
    ]
    error = stdev(gains) / sqrt(len(gains)) if len(gains) > 1 else 0.0
    return fmean(gains) > max(LEAST_GAIN * kept.mean_ns, 2 * error)
