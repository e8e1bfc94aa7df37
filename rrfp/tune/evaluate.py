"""What candidates would take, by simulation: each step once."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from time import monotonic

from rrfp.errors import RrfpError, UsageError
from rrfp.schedule.hold import Bytes, Hold
from rrfp.schedule.policy import Policy
from rrfp.schedule.rehearsal import fitted
from rrfp.schedule.shape import Shape
from rrfp.simulate.costs.model import Costs
from rrfp.simulate.trial import Setting, Trial, run_settings
from rrfp.tune.candidate import Candidate
from rrfp.tune.source import Source

_AT_ONCE = 32
"""Candidates that are simulated in one go: those of one layout share what is drawn."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A candidate's step under one seed."""

    makespan_ns: int
    peak_bytes: int | None
    """The most that a rank held; None where the costs say nothing of memory."""


@dataclass(slots=True)
class Budget:
    """How much may be simulated."""

    simulations: int
    until: float | None = None
    """When to stop, by the monotonic clock."""

    def is_spent(self) -> bool:
        """Whether nothing more may be."""
        return self.simulations <= 0 or (self.until is not None and monotonic() >= self.until)


@dataclass(slots=True)
class Evaluator:
    """Simulates candidates of a source, and remembers what came out."""

    source: Source
    memory: Hold
    budget: Budget
    told: Callable[[], None] = lambda: None
    """Called after each simulation."""
    _outcomes: dict[tuple[Candidate, int], Outcome | None] = field(default_factory=dict)
    _costs: dict[object, Costs] = field(default_factory=dict)
    _least: dict[object, int] = field(default_factory=dict)
    _fitted: dict[object, tuple[Policy, Shape] | None] = field(default_factory=dict)

    def run(self, candidates: Iterable[Candidate], seed: int) -> list[Outcome | None]:
        """The outcome of each under a seed; None for one that cannot run, or not in the memory."""
        asked = list(candidates)
        new = [each for each in dict.fromkeys(asked) if (each, seed) not in self._outcomes]
        for first in range(0, len(new), _AT_ONCE):
            self._simulate(new[first : first + _AT_ONCE], seed)
        return [self._outcomes[each, seed] for each in asked]

    def mean_ns(self, candidate: Candidate, seeds: Sequence[int]) -> float:
        """The mean over seeds; infinite for one that cannot run under one of them."""
        total = 0
        for seed in seeds:
            (outcome,) = self.run([candidate], seed)
            if outcome is None:
                return float("inf")
            total += outcome.makespan_ns
        return total / len(seeds)

    def least_bytes(self, candidate: Candidate, seeds: Iterable[int]) -> int:
        """The least bound in bytes with which no rank can get stuck under any of the seeds."""
        return max((self._least_of(candidate, seed) for seed in seeds), default=0)

    def _least_of(self, candidate: Candidate, seed: int) -> int:
        shape, costs = self.source.shape_of(candidate), self._costs_of(candidate)
        key = (id(costs), shape.num_chunks, shape.placement, seed)
        if key not in self._least:
            least = 0
            for replica in range(self.source.num_replicas):
                sizes = costs.step(shape, seed, replica).sizes
                if sizes is not None:
                    of_ranks = (sizes.of(shape.stages_of(r)) for r in range(shape.num_ranks))
                    least = max(least, *(each.least_budget for each in of_ranks))
            self._least[key] = least
        return self._least[key]

    def _simulate(self, candidates: Sequence[Candidate], seed: int) -> None:
        settings = {}
        for each in candidates:
            setting = self._setting(each, seed)
            if setting is None:
                self._outcomes[each, seed] = None
            else:
                settings[each] = setting
        rows = run_settings(list(settings.values()), [seed], finished=self._count)
        for (each, setting), row in zip(settings.items(), rows, strict=True):
            self._outcomes[each, seed] = self._outcome(each, setting, row.trials[0])

    def _count(self) -> None:
        self.budget.simulations -= 1
        self.told()

    def _setting(self, candidate: Candidate, seed: int) -> Setting | None:
        """None for a candidate that cannot run."""
        source = self.source
        found = self._policy_and_shape(candidate)
        if found is None:
            return None
        policy, shape = found
        try:
            if isinstance(policy.hold, Bytes) and (
                self.least_bytes(candidate, [seed]) > policy.hold.num
            ):
                return None
            costs = self._costs_of(candidate)
        except UsageError:
            return None
        return Setting(
            shape=shape,
            policy=policy,
            costs=costs,
            jitter=source.jitter,
            admit=candidate.admit,
            num_members=source.num_members,
            num_replicas=source.num_replicas,
        )

    def _policy_and_shape(self, candidate: Candidate) -> tuple[Policy, Shape] | None:
        given = self.source.shape.num_microbatches
        if given * candidate.divided % candidate.joined:
            return None
        shape = self.source.shape_of(candidate)
        key = (candidate.family, candidate.hold, candidate.limit, candidate.patience, shape)
        if key not in self._fitted:
            try:
                self._fitted[key] = fitted(candidate.policy, shape, counts_places=False)
            except RrfpError:
                self._fitted[key] = None
        return self._fitted[key]

    def _costs_of(self, candidate: Candidate) -> Costs:
        """One object for all candidates with the same costs, so that draws are shared."""
        key = (candidate.split, candidate.joined, candidate.divided)
        if key not in self._costs:
            self._costs[key] = self.source.costs_of(candidate)
        return self._costs[key]

    def _outcome(self, candidate: Candidate, setting: Setting, trial: Trial) -> Outcome | None:
        peaks = trial.peak_held_bytes
        peak_bytes = None if peaks is None else max(peaks)
        if isinstance(self.memory, Bytes):
            if peak_bytes is None or peak_bytes > self.memory.num:
                return None
        else:
            assert isinstance(self.memory, int | Fraction)
            held = Fraction(max(trial.peak_held), setting.shape.num_chunks)
            if held * candidate.joined > self.memory * candidate.divided:
                return None
        return Outcome(trial.makespan_ns + self.source.tail_ns, peak_bytes)
