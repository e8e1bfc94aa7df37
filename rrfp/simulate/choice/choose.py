"""The best of some candidates, by successive halving over known steps.

All candidates meet the same steps, so they differ by what they do and not by their luck. Every
candidate runs one step; those that are far behind the best one are dropped, the others run as many
again, and so on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

from rrfp.simulate.choice.candidates import Candidate, patient

Play = Callable[[Candidate, int], int | None]
"""What a numbered step takes under a candidate, in ns; None if the step does not fit into the
memory under it."""

_MARGINS = (0.10, 0.05, 0.02, 0.01)
"""How far behind the best a candidate may be after each round, the last for all later ones."""
_MOST = (8, 6, 4, 3)
"""How many go on, at most."""
_LAST = len(_MOST) - 1
LEAST_GAIN = 0.005
"""What a change must gain, besides twice the standard error of its gain."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """A candidate, and what it is expected to take."""

    candidate: Candidate
    times_ns: tuple[int, ...]
    """By known step."""

    @property
    def mean_ns(self) -> float:
        return fmean(self.times_ns)


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, and from what."""

    chosen: Predicted
    kept: Predicted | None
    """What steered until now; None if that cannot run, or nothing did."""
    num_candidates: int
    num_simulations: int


def choose(
    candidates: Sequence[Candidate],
    play: Play,
    num_steps: int,
    current: Candidate | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> Choice | None:
    """The best candidate for steps like these, of which there are `num_steps`.

    The first candidate is the one to begin with. With a `current` one, another is chosen only if it
    gains more than luck explains. Candidates under which a step does not fit into the memory are
    left out; None if all are. `is_over` ends the comparison early.
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
        # The one to begin with is good in most cases, whatever luck the others had so far.
        left = near if candidates[0] in near else [*near, *candidates[:1]]
        if rounds == 0:
            # Whoever waits is worth as much as the one that does not, and a little.
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
    def __init__(self, play: Play) -> None:
        self._play = play
        self._times_ns: dict[tuple[object, ...], list[int]] = {}
        self._fails: set[tuple[object, ...]] = set()
        self.num_simulations = 0

    @property
    def num_candidates(self) -> int:
        return len(self._times_ns) + len(self._fails)

    def run(self, candidates: Sequence[Candidate], num: int) -> list[Candidate]:
        """Run each under the first `num` steps; those that could, best first."""
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
        return fmean(self._times_ns[candidate.name])

    def predicted(self, candidate: Candidate) -> Predicted:
        return Predicted(candidate, tuple(self._times_ns[candidate.name]))


def _gains(best: Predicted, kept: Predicted) -> bool:
    gains = [
        kept_ns - best_ns for kept_ns, best_ns in zip(kept.times_ns, best.times_ns, strict=False)
    ]
    error = stdev(gains) / sqrt(len(gains)) if len(gains) > 1 else 0.0
    return fmean(gains) > max(LEAST_GAIN * kept.mean_ns, 2 * error)
