"""The search: all layouts with all hints on a few steps, the best of them on more, and from the
best of these on by small changes. Everything is simulated on the same steps, and the proposals are
predicted for others, which the search has not seen."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from time import monotonic

import numpy as np

from rrfp.errors import UsageError
from rrfp.schedule.hold import Bytes, Hold, told_bytes
from rrfp.trace.records import NS_PER_S
from rrfp.tune.candidate import Candidate
from rrfp.tune.evaluate import Budget, Evaluator, Outcome
from rrfp.tune.imbalance import imbalance
from rrfp.tune.source import Source
from rrfp.tune.space import Space

NUM_SEARCHED = 6
"""Steps that candidates are compared on, at most."""
NUM_PREDICTED = 20
"""Steps that proposals are predicted for."""
_KEPT = (0.35, 0.35)
"""The share of candidates that go on after one step, and after two."""
_AT_FIRST = 0.5
"""The share of the simulations that candidates get on the first step, at most."""
_NUM_IMPROVED = 6
"""Candidates that are improved by small changes."""
_TOO_SLOW = 1.01
"""How much longer than the best one a change may take on its first step, and still be tried on
others."""
_QUANTILES = (0.05, 0.95)


@dataclass(frozen=True, slots=True)
class Predicted:
    """A candidate, and what it would take on steps that the search has not seen."""

    candidate: Candidate
    steps_s: tuple[float, ...]
    """By fresh seed."""
    first_seed: int
    peak_bytes: int | None
    """The most that any rank would hold in these steps; None where the costs do not say."""

    @property
    def mean_s(self) -> float:
        return fmean(self.steps_s)

    @property
    def low_s(self) -> float:
        """Nineteen of twenty steps take longer."""
        return float(np.quantile(self.steps_s, _QUANTILES[0]))

    @property
    def high_s(self) -> float:
        """Nineteen of twenty steps take less."""
        return float(np.quantile(self.steps_s, _QUANTILES[1]))


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a search."""

    proposals: tuple[Predicted, ...]
    """Best first."""
    own: Predicted | None
    """What the run was itself, or where none ran, 1F1B over the layers as given."""
    memory: Hold
    """The bound on memory, as a number."""
    num_simulated: int
    imbalance: str | None
    """What no order of tasks mends, in a sentence; None where the ranks' loads are even."""


def seeds_of(source: Source, seed: int, num_predicted: int) -> tuple[list[int], list[int]]:
    """The steps to search by, and those to predict for."""
    if source.seeds:
        return list(source.seeds[:NUM_SEARCHED]), list(source.fresh_seeds)
    first_fresh = seed + NUM_SEARCHED
    return list(range(seed, first_fresh)), list(range(first_fresh, first_fresh + num_predicted))


def tune(
    source: Source,
    memory: Hold,
    *,
    seed: int = 1234,
    simulations: int = 2000,
    budget_s: float | None = None,
    num_best: int = 5,
    num_predicted: int = NUM_PREDICTED,
    told: Callable[[], None] = lambda: None,
) -> Found:
    """Search for the best candidates that stay within the memory.

    `simulations` bounds the steps that are simulated, and `budget_s` the time; what was found by
    then counts. Equal arguments without `budget_s` give equal results. `told` is called after each
    simulation. Raises UsageError for a memory in which nothing runs, with the least that suffices.
    """
    searched, fresh = seeds_of(source, seed, num_predicted)
    bound = source.memory(memory, [*searched, *fresh])
    space = Space(source, bound)
    # Proposals are predicted in any case, and so is what they are held against.
    reserved = (num_best + 1) * len(fresh)
    until = None if budget_s is None else monotonic() + budget_s
    budget = Budget(max(1, simulations - reserved), until)
    evaluator = Evaluator(source, bound, budget, told)
    search = _Search(space, evaluator, searched, fresh, random.Random(seed))
    ranked = search.run()
    if not ranked:
        raise _refused(space, evaluator, [*searched, *fresh])
    proposals = _predicted(ranked, evaluator, fresh, num_best)
    if not proposals:
        raise _refused(space, evaluator, [*searched, *fresh])
    unbound = Evaluator(source, _NO_BOUND[isinstance(bound, Bytes)], Budget(len(fresh)), told)
    own = _own(source, space, unbound, fresh)
    proposals.sort(key=lambda each: each.mean_s)
    spent = simulations - reserved - budget.simulations
    told_imbalance = imbalance(source, space.work, proposals[0].candidate, searched)
    return Found(tuple(proposals), own, bound, spent, told_imbalance)


class _Search:
    def __init__(
        self,
        space: Space,
        evaluator: Evaluator,
        seeds: Sequence[int],
        fresh: Sequence[int],
        draw: random.Random,
    ) -> None:
        self._space = space
        self._evaluator = evaluator
        self._seeds = seeds
        self._all_seeds = (*seeds, *fresh)
        self._draw = draw

    def run(self) -> list[Candidate]:
        """The candidates that came through, best first."""
        possible = [each for each in self._space.begin() if self._fits(each)]
        # Of those that are fastest on one step, none may stay within the memory on the others.
        certain = [each for each in possible if each.hold == self._space.memory]
        most = max(2 * _NUM_IMPROVED, round(_AT_FIRST * self._evaluator.budget.simulations))
        if len(possible) > most:
            possible = self._draw.sample(possible, most)
        begun = self._halved(possible) or self._ranked(certain, self._seeds)
        if not begun:
            return []
        found = list(begun)
        for candidate in self._diverse(begun)[:_NUM_IMPROVED]:
            if self._evaluator.budget.is_spent():
                break
            found.append(self._improved(candidate))
        best = self._ranked(list(dict.fromkeys(found)), self._seeds)
        # From the best one on once more, with all that is left.
        if not self._evaluator.budget.is_spent():
            best = self._ranked(list(dict.fromkeys([self._improved(best[0]), *best])), self._seeds)
        return best

    def _fits(self, candidate: Candidate) -> bool:
        """Whether no rank can get stuck in any step, of those that are predicted, too."""
        hold = candidate.hold
        return not isinstance(hold, Bytes) or (
            self._evaluator.least_bytes(candidate, self._all_seeds) <= hold.num
        )

    def _halved(self, candidates: list[Candidate]) -> list[Candidate]:
        """Those that are best on one step, of these on two, and the rest on all, best first."""
        for number, share in enumerate(_KEPT, start=1):
            seeds = self._seeds[:number]
            ranked = self._ranked(candidates, seeds)
            candidates = ranked[: max(2 * _NUM_IMPROVED, round(share * len(ranked)))]
            if self._evaluator.budget.is_spent():
                return candidates
        return self._ranked(candidates, self._seeds)

    def _ranked(self, candidates: Sequence[Candidate], seeds: Sequence[int]) -> list[Candidate]:
        for seed in seeds:
            self._evaluator.run(candidates, seed)
        means = {each: self._evaluator.mean_ns(each, seeds) for each in candidates}
        runnable = [each for each, mean in means.items() if mean != float("inf")]
        return sorted(runnable, key=means.__getitem__)

    def _diverse(self, ranked: Sequence[Candidate]) -> list[Candidate]:
        """The best of each family, then the others."""
        seen: dict[object, Candidate] = {}
        for each in ranked:
            seen.setdefault((each.family, each.admit), each)
        first = list(seen.values())
        return [*first, *(each for each in ranked if each not in first)]

    def _improved(self, candidate: Candidate) -> Candidate:
        """The candidate after all small changes, one after the other, that make it faster."""
        while not self._evaluator.budget.is_spent():
            for changed in self._space.near(candidate, self._draw):
                if self._is_faster(changed, candidate):
                    candidate = changed
                    break
                if self._evaluator.budget.is_spent():
                    return candidate
            else:
                return candidate
        return candidate

    def _is_faster(self, changed: Candidate, than: Candidate) -> bool:
        new_ns, old_ns = 0, 0
        for seed in self._seeds:
            new, old = self._evaluator.run([changed, than], seed)
            if new is None or old is None:
                return False
            new_ns, old_ns = new_ns + new.makespan_ns, old_ns + old.makespan_ns
            if new_ns > old_ns * _TOO_SLOW:
                return False
        return new_ns < old_ns


def _predicted(
    ranked: Sequence[Candidate], evaluator: Evaluator, fresh: Sequence[int], num_best: int
) -> list[Predicted]:
    """The best one of each family on fresh steps; where there are fewer families, others, too."""
    of_families: dict[object, Candidate] = {}
    for each in ranked:
        of_families.setdefault((each.family, each.admit), each)
    in_turn = [*of_families.values()]
    in_turn += [each for each in ranked if each not in in_turn]
    found: list[Predicted] = []
    for candidate in in_turn:
        if len(found) == num_best:
            break
        predicted = predict(candidate, evaluator, fresh)
        if predicted is not None:
            found.append(predicted)
    return found


def predict(candidate: Candidate, evaluator: Evaluator, seeds: Sequence[int]) -> Predicted | None:
    """What a candidate takes on these steps; None if one of them cannot be run."""
    outcomes: list[Outcome] = []
    for seed in seeds:
        (outcome,) = evaluator.run([candidate], seed)
        if outcome is None:
            return None
        outcomes.append(outcome)
    peaks = [each.peak_bytes for each in outcomes]
    known = [peak for peak in peaks if peak is not None]
    return Predicted(
        candidate,
        tuple(each.makespan_ns / NS_PER_S for each in outcomes),
        seeds[0],
        max(known) if len(known) == len(peaks) else None,
    )


def predict_unbound(candidate: Candidate, source: Source, seeds: Sequence[int]) -> Predicted | None:
    """What a candidate takes on these steps, whatever it keeps."""
    bound = _NO_BOUND[isinstance(candidate.hold, Bytes) or source.tells_sizes]
    return predict(candidate, Evaluator(source, bound, Budget(len(seeds))), seeds)


def _own(
    source: Source, space: Space, unbound: Evaluator, fresh: Sequence[int]
) -> Predicted | None:
    """What the run was itself, whatever it held, or 1F1B as Megatron would run it."""
    own = source.own
    if own is None:
        plain = [
            each
            for each in space.begin()
            if each.hint == "1f1b" and each.hold is None and each.joined == each.divided == 1
        ]
        if not plain:
            return None
        own = plain[0]
    return predict(own, unbound, fresh)


_NO_BOUND: dict[bool, Hold] = {True: Bytes(2**60), False: 10**6}
"""By whether the memory is in bytes."""


def _refused(space: Space, evaluator: Evaluator, seeds: Sequence[int]) -> UsageError:
    memory = space.memory
    if not isinstance(memory, Bytes):
        return UsageError(
            f"no schedule stays within a memory of {memory} microbatches; give more, as in "
            f"--memory {space.source.shape.num_ranks}"
        )
    distinct = {
        (each.split, each.chunks, each.placement, each.joined, each.divided): each
        for each in space.begin()
    }
    least = min(evaluator.least_bytes(each, seeds) for each in distinct.values())
    return UsageError(
        f"the memory of {told_bytes(memory.num)} ({memory.num} bytes) is below the "
        f"{told_bytes(least)} that the heaviest microbatches of these steps take on their way "
        f"through any rank; set it to {least}B or more"
    )
