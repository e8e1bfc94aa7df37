"""The search: all layouts with all hints on one step, the best of them on more steps, then local
changes of the best. All candidates are simulated on the same steps; the proposals are then
predicted on held-out steps."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil
from statistics import fmean
from time import monotonic

import numpy as np

from rrfp.errors import RrfpError, UsageError
from rrfp.planning.trials import Setting, Trial, run_settings
from rrfp.schedule.admission import Admit
from rrfp.schedule.hints import WeightGradients
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import Bytes, Dispatch, Hold, Policy, format_bytes
from rrfp.schedule.rehearsal import fitted
from rrfp.schedule.shape import Placement, Shape
from rrfp.simulate.costs.model import Costs
from rrfp.trace.records import NS_PER_S
from rrfp.tune.source import Candidate, Source, balanced, imbalance, loads, moves, work_of

# Simulation of candidates; each step of a candidate is simulated once.


_AT_ONCE = 32
"""Candidates per batch; candidates of one layout share random draws."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The simulation of a candidate's step under one seed."""

    makespan_ns: int
    peak_bytes: int | None
    """Peak bytes of any rank; None if the costs have no memory sizes."""


@dataclass(slots=True)
class Budget:
    """The remaining budget of the search."""

    simulations: int
    until: float | None = None
    """Deadline by the monotonic clock."""

    def is_spent(self) -> bool:
        """Return whether the simulations are used up or the deadline has passed."""
        return self.simulations <= 0 or (self.until is not None and monotonic() >= self.until)


@dataclass(slots=True)
class Evaluator:
    """Simulates candidates of a source and caches the outcomes."""

    source: Source
    memory: Hold
    budget: Budget
    on_simulation: Callable[[], None] = lambda: None
    """Called after each simulation."""
    _outcomes: dict[tuple[Candidate, int], StepOutcome | None] = field(default_factory=dict)
    _costs: dict[object, Costs] = field(default_factory=dict)
    _least: dict[object, int] = field(default_factory=dict)
    _fitted: dict[object, tuple[Policy, Shape] | None] = field(default_factory=dict)

    def run(self, candidates: Iterable[Candidate], seed: int) -> list[StepOutcome | None]:
        """Return the outcome of each candidate under a seed; None if it cannot run or exceeds the
        memory. Only those without a cached outcome are simulated, even if the budget is spent."""
        asked = list(candidates)
        new = [each for each in dict.fromkeys(asked) if (each, seed) not in self._outcomes]
        for first in range(0, len(new), _AT_ONCE):
            self._simulate(new[first : first + _AT_ONCE], seed)
        return [self._outcomes[each, seed] for each in asked]

    def mean_ns(self, candidate: Candidate, seeds: Sequence[int]) -> float:
        """Return the mean step time over seeds, simulated if it is not cached; infinite if the
        candidate cannot run under one of them."""
        total = 0
        for seed in seeds:
            (outcome,) = self.run([candidate], seed)
            if outcome is None:
                return float("inf")
            total += outcome.makespan_ns
        return total / len(seeds)

    def least_bytes(self, candidate: Candidate, seeds: Iterable[int]) -> int:
        """Return the least memory bound in bytes under which no rank can deadlock under any seed; 0
        for costs without sizes."""
        return max((self._least_of(candidate, seed) for seed in seeds), default=0)

    def _least_of(self, candidate: Candidate, seed: int) -> int:
        """Return `least_bytes` under one seed, over all replicas; cached."""
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
        """Simulate candidates under a seed and cache the outcomes; None for those that cannot
        run."""
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
        """Take a simulation off the budget and call `on_simulation`."""
        self.budget.simulations -= 1
        self.on_simulation()

    def _setting(self, candidate: Candidate, seed: int) -> Setting | None:
        """Return the simulator's setting for a candidate. None if it cannot run: its policy does
        not fit the shape, its hold in bytes is too small, or the costs cannot be divided by its
        split."""
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
        """Return the candidate's policy fitted to its shape, and the shape; cached. None if they do
        not fit, or if microbatches cannot be joined without a rest."""
        given = self.source.shape.num_microbatches
        if given * candidate.divided % candidate.joined:
            return None
        shape = self.source.shape_of(candidate)
        key = (candidate.policy, shape)
        if key not in self._fitted:
            try:
                self._fitted[key] = fitted(candidate.policy, shape, counts_places=False)
            except RrfpError:
                self._fitted[key] = None
        return self._fitted[key]

    def _costs_of(self, candidate: Candidate) -> Costs:
        """Return the candidate's costs. Candidates with equal costs get the same object, to share
        draws."""
        key = (candidate.split, candidate.joined, candidate.divided)
        if key not in self._costs:
            self._costs[key] = self.source.costs_of(candidate)
        return self._costs[key]

    def _outcome(self, candidate: Candidate, setting: Setting, trial: Trial) -> StepOutcome | None:
        """Return the outcome of a trial, with the time after the last task; None if it exceeded the
        memory, or if that is in bytes and the costs have no sizes."""
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
        return StepOutcome(trial.makespan_ns + self.source.tail_ns, peak_bytes)


# The search space: initial candidates, and neighbors of a candidate.


_READY, _FIXED = Dispatch.READY, Dispatch.FIXED
_IDLE, _RANKED = WeightGradients.IDLE, WeightGradients.RANKED

HintUse = tuple[str, Dispatch, WeightGradients]
"""A hint, its dispatch, and the treatment of weight gradients."""

_ALSO_PATIENT = (("zb-h1", _READY, _RANKED), ("zb-v", _READY, _RANKED), ("v-half", _READY, _RANKED))
"""Uses of hints that are also tried with patience."""

_ONE_CHUNK: tuple[HintUse, ...] = (
    ("bf", _READY, _IDLE),
    ("bfw", _READY, _IDLE),
    ("b-first", _READY, _IDLE),
    ("fb", _READY, _IDLE),
    ("1f1b", _READY, _IDLE),
    ("zb-h1", _READY, _IDLE),
    ("zb-h1", _READY, _RANKED),
    ("1f1b", _FIXED, _IDLE),
    ("zb-h1", _FIXED, _IDLE),
)
_LOOP: tuple[HintUse, ...] = (
    ("bf", _READY, _IDLE),
    ("bfw", _READY, _IDLE),
    ("bf-deep", _READY, _IDLE),
    ("bfw-deep", _READY, _IDLE),
    ("interleaved", _READY, _IDLE),
    ("interleaved", _FIXED, _IDLE),
)
_V: tuple[HintUse, ...] = (
    ("bf-deep", _READY, _IDLE),
    ("bfw", _READY, _IDLE),
    ("bfw-deep", _READY, _IDLE),
    ("zb-v", _READY, _IDLE),
    ("zb-v", _READY, _RANKED),
    ("v-half", _READY, _IDLE),
    ("v-half", _READY, _RANKED),
    ("v-min", _READY, _RANKED),
    ("zb-v", _FIXED, _IDLE),
    ("v-half", _FIXED, _IDLE),
    ("v-min", _FIXED, _IDLE),
)

_SHARES_OF_A_HOLD = tuple(map(Fraction, ("1/2", "3/4", "1", "5/4", "3/2", "2")))
"""Holds to try, in microbatches per rank of the pipeline."""

_NUM_EVEN, _NUM_OTHERS = 12, 8
"""Number of neighboring splits to try: the most even ones, and random others."""


@dataclass(slots=True)
class Space:
    """The candidates for a source under a memory bound."""

    source: Source
    memory: Hold
    """The bound in bytes or in microbatches."""
    work: Sequence[float] = field(init=False, default=())
    """Mean time of a microbatch for each unit (embedding, layers, head); empty without costs by
    layer."""

    def __post_init__(self) -> None:
        source = self.source
        if source.layered is not None:
            num = source.shape.num_microbatches
            seeds = list(source.seeds[:4]) or range(4)
            self.work = work_of(source.layered, source.shape.num_ranks, num, seeds)

    def ways(self, chunks: int, placement: Placement) -> tuple[HintUse, ...]:
        """Return the uses of hints that are possible with a layout; none that split the backward if
        the costs do not."""
        found = _ONE_CHUNK if chunks == 1 else _V if placement is Placement.V else _LOOP
        if self.source.splits_backward:
            return found
        return tuple(way for way in found if not HINTS[way[0]].splits_backward)

    def initial_candidates(self) -> list[Candidate]:
        """Return all combinations of layout, hint, admission and size, with layers divided evenly
        and with loads balanced, some hints also with patience, and the run's own settings; each
        once."""
        source = self.source
        found = []
        for chunks, placement in source.layouts:
            for split in self.splits(chunks, placement):
                for hint, dispatch, w in self.ways(chunks, placement):
                    for joined, divided in source.sizes:
                        hold = None if dispatch is _FIXED else self.memory_in(joined, divided)
                        plain = Candidate(
                            policy=Policy(HINTS[hint], dispatch=dispatch, hold=hold, w=w),
                            chunks=chunks,
                            placement=placement,
                            split=split,
                            joined=joined,
                            divided=divided,
                        )
                        found += [replace(plain, admit=admit) for admit in source.admissions]
                        if (hint, dispatch, w) in _ALSO_PATIENT and (joined, divided) == (1, 1):
                            patient = replace(plain, policy=plain.policy.waiting())
                            found += [replace(patient, admit=each) for each in source.admissions]
        if source.own is not None:
            found.append(source.own)
        return list(dict.fromkeys(found))

    def memory_in(self, joined: int, divided: int) -> Hold:
        """Return the memory bound for microbatches of this size: in bytes it is the same, in
        microbatches it is converted, to at least 1."""
        if isinstance(self.memory, Bytes):
            return self.memory
        assert isinstance(self.memory, int | Fraction)
        return max(1, int(self.memory * divided / joined))

    def splits(self, chunks: int, placement: Placement) -> list[tuple[int, ...] | None]:
        """Return the initial splits of layers for a layout: even, and with balanced loads. Only the
        even one if layers cannot be moved, and only None without costs by layer."""
        source = self.source
        shape = Shape(source.shape.num_ranks, 1, chunks, placement)
        even = source.even(shape.num_stages)
        if even is None or source.layered is None:
            return [None]
        if not source.moves_layers:
            return [even]
        slowness = source.layered.slowness(shape.num_ranks)
        return list(dict.fromkeys([even, balanced(even, self.work, slowness, shape)]))

    def holds(self, candidate: Candidate) -> Iterator[Hold]:
        """Yield the holds to try: the whole memory, and smaller numbers of microbatches, from half
        of one to two per pipeline rank, that do not exceed the step's microbatches."""
        whole = self.memory_in(candidate.joined, candidate.divided)
        yield whole
        ranks = self.source.shape.num_ranks
        most = candidate.microbatches(self.source.shape.num_microbatches)
        for share in _SHARES_OF_A_HOLD:
            hold = ceil(share * ranks)
            if hold <= most and (isinstance(whole, Bytes) or hold < whole):  # type: ignore[operator]
                yield hold

    def neighbors(self, candidate: Candidate, draw: random.Random) -> list[Candidate]:
        """Return the candidates that differ in one choice (hold, patience, admission, use of a
        hint, size or split), each once, in an order shuffled by `draw`. Another use of a hint, or
        size, may also change the bounds."""
        source, found = self.source, []
        policy = candidate.policy
        if policy.limit is None and policy.dispatch is _READY:
            found += [candidate.with_policy(hold=hold) for hold in self.holds(candidate)]
            found += [replace(candidate, policy=policy.waiting(waits)) for waits in (False, True)]
        found += [replace(candidate, admit=Admit(admit)) for admit in source.admissions]
        for hint, dispatch, w in self.ways(candidate.chunks, candidate.placement):
            base, hold = policy.waiting(False), None
            if dispatch is _READY:
                base = policy
                hold = policy.hold or self.memory_in(candidate.joined, candidate.divided)
            changed = replace(base, hint=HINTS[hint], dispatch=dispatch, w=w, limit=None, hold=hold)
            found.append(replace(candidate, policy=changed))
        for joined, divided in source.sizes:
            if (joined, divided) != (candidate.joined, candidate.divided):
                of_size = None if policy.dispatch is _FIXED else self.memory_in(joined, divided)
                sized = replace(candidate, joined=joined, divided=divided)
                found.append(sized.with_policy(hold=of_size, limit=None))
        if candidate.split is not None and source.moves_layers:
            found += [
                candidate.with_split(split) for split in self._neighboring_splits(candidate, draw)
            ]
        found = [each for each in dict.fromkeys(found) if each != candidate]
        draw.shuffle(found)
        return found

    def _neighboring_splits(
        self, candidate: Candidate, draw: random.Random
    ) -> list[tuple[int, ...]]:
        """Return splits with one layer moved: the 12 with the most even loads, and up to 8 others
        that `draw` picks."""
        source = self.source
        assert candidate.split is not None
        assert source.layered is not None
        shape = Shape(source.shape.num_ranks, 1, candidate.chunks, candidate.placement)
        slowness = source.layered.slowness(shape.num_ranks)

        def unevenness(split: tuple[int, ...]) -> float:
            return sum(each**2 for each in loads(split, self.work, slowness, shape))

        ranked = sorted(moves(candidate.split), key=unevenness)
        rest = ranked[_NUM_EVEN:]
        return [*ranked[:_NUM_EVEN], *draw.sample(rest, min(_NUM_OTHERS, len(rest)))]


NUM_SEARCHED = 6
"""Most steps on which candidates are compared."""
NUM_PREDICTED = 20
"""Steps on which proposals are predicted."""
_SURVIVING_SHARES = (0.35, 0.35)
"""Fraction of candidates that are kept after one step, and after two."""
_AT_FIRST = 0.5
"""Largest fraction of the simulations for the first step."""
_NUM_IMPROVED = 6
"""Number of candidates that are improved by local changes."""
_TOO_SLOW = 1.01
"""A change is dropped once its total time exceeds the candidate's by this factor."""
_QUANTILES = (0.05, 0.95)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A candidate with its simulated times on held-out steps."""

    candidate: Candidate
    steps_s: tuple[float, ...]
    """Step times by held-out seed."""
    first_seed: int
    peak_bytes: int | None
    """Peak bytes of any rank in these steps; None if the costs have no memory sizes."""

    @property
    def mean_s(self) -> float:
        return fmean(self.steps_s)

    @property
    def low_s(self) -> float:
        """The 5% quantile of the step times."""
        return float(np.quantile(self.steps_s, _QUANTILES[0]))

    @property
    def high_s(self) -> float:
        """The 95% quantile of the step times."""
        return float(np.quantile(self.steps_s, _QUANTILES[1]))


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search."""

    proposals: tuple[Prediction, ...]
    """Best first."""
    own: Prediction | None
    """The run's own settings, or without a run, 1F1B over the layers as given."""
    memory: Hold
    """The memory bound as a number."""
    num_simulated: int
    """Simulated steps, without those of `own`."""
    imbalance: str | None
    """Sentence on uneven loads, which no order of tasks fixes; None if the loads are even."""


def seeds_of(source: Source, seed: int, num_predicted: int) -> tuple[list[int], list[int]]:
    """Return the seeds of the steps to search on and of the held-out steps: the first 6 of the
    source's own and its fresh ones; without own seeds, 6 from `seed` on and the `num_predicted`
    after them."""
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
    on_simulation: Callable[[], None] = lambda: None,
) -> SearchResult:
    """Search for the best candidates that stay within the memory.

    `simulations` limits the number of simulated steps and `budget_s` the time in seconds; a
    comparison that has begun is finished, and the best candidates found by then are returned. Equal
    arguments without `budget_s` give equal results. `on_simulation` is called after each
    simulation. Raises UsageError if no candidate fits into the memory (for bytes, with the least
    that suffices), and for bytes if the costs have no sizes.
    """
    searched, fresh = seeds_of(source, seed, num_predicted)
    bound = source.memory(memory, [*searched, *fresh])
    space = Space(source, bound)
    # Predictions of the proposals and the baseline do not count against the budget.
    reserved = (num_best + 1) * len(fresh)
    until = None if budget_s is None else monotonic() + budget_s
    num_affordable = max(1, simulations - reserved)
    budget = Budget(num_affordable, until)
    evaluator = Evaluator(source, bound, budget, on_simulation)
    search = _Search(space, evaluator, searched, fresh, random.Random(seed))
    ranked = search.run()
    if not ranked:
        raise _memory_refusal(space, evaluator, [*searched, *fresh])
    proposals = _predicted(ranked, evaluator, fresh, num_best)
    if not proposals:
        raise _memory_refusal(space, evaluator, [*searched, *fresh])
    unbound = Evaluator(
        source, _NO_BOUND[isinstance(bound, Bytes)], Budget(len(fresh)), on_simulation
    )
    own = _baseline(source, space, unbound, fresh)
    proposals.sort(key=lambda each: each.mean_s)
    spent = num_affordable - budget.simulations
    imbalance_sentence = imbalance(source, space.work, proposals[0].candidate, searched)
    return SearchResult(tuple(proposals), own, bound, spent, imbalance_sentence)


class _Search:
    """One search of a space on the steps of `seeds`, within the evaluator's budget. `fresh` are the
    held-out steps."""

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
        """Search within the budget, and return the best candidates, best first; empty if none can
        run. Halves the initial candidates, or a random sample if they are too many; improves up to
        6 of the survivors, of different families first; then, with the rest of the budget, the best
        of all."""
        possible = [each for each in self._space.initial_candidates() if self._fits(each)]
        # A fallback: the fastest candidates on one step may all exceed the memory on others.
        certain = [each for each in possible if each.policy.hold == self._space.memory]
        most = max(2 * _NUM_IMPROVED, round(_AT_FIRST * self._evaluator.budget.simulations))
        if len(possible) > most:
            possible = self._draw.sample(possible, most)
        begun = self._halve(possible) or self._rank(certain, self._seeds)
        if not begun:
            return []
        found = list(begun)
        for candidate in _diverse(begun)[:_NUM_IMPROVED]:
            if self._evaluator.budget.is_spent():
                break
            found.append(self._improve(candidate))
        best = self._rank(list(dict.fromkeys(found)), self._seeds)
        # Spend the rest of the budget on the best candidate.
        if not self._evaluator.budget.is_spent():
            best = self._rank(list(dict.fromkeys([self._improve(best[0]), *best])), self._seeds)
        return best

    def _fits(self, candidate: Candidate) -> bool:
        """Return whether no rank can deadlock on any step, including the held-out ones. True for a
        hold that is not in bytes."""
        hold = candidate.policy.hold
        return not isinstance(hold, Bytes) or (
            self._evaluator.least_bytes(candidate, self._all_seeds) <= hold.num
        )

    def _halve(self, candidates: list[Candidate]) -> list[Candidate]:
        """Successive halving: keep the best on one step, of these the best on two steps (35% each
        time, at least 12), and rank the rest on all steps. Returns the survivors, best first; stops
        early when the budget is spent."""
        for number, share in enumerate(_SURVIVING_SHARES, start=1):
            seeds = self._seeds[:number]
            ranked = self._rank(candidates, seeds)
            candidates = ranked[: max(2 * _NUM_IMPROVED, round(share * len(ranked)))]
            if self._evaluator.budget.is_spent():
                return candidates
        return self._rank(candidates, self._seeds)

    def _rank(self, candidates: Sequence[Candidate], seeds: Sequence[int]) -> list[Candidate]:
        """Simulate candidates on all seeds, and return those that can run on each, by ascending
        mean time."""
        for seed in seeds:
            self._evaluator.run(candidates, seed)
        means = {each: self._evaluator.mean_ns(each, seeds) for each in candidates}
        runnable = [each for each, mean in means.items() if mean != float("inf")]
        return sorted(runnable, key=means.__getitem__)

    def _improve(self, candidate: Candidate) -> Candidate:
        """Apply local changes that make the candidate faster until none does (hill climbing), or
        until the budget is spent."""
        while not self._evaluator.budget.is_spent():
            for changed in self._space.neighbors(candidate, self._draw):
                if self._is_faster(changed, candidate):
                    candidate = changed
                    break
                if self._evaluator.budget.is_spent():
                    return candidate
            else:
                return candidate
        return candidate

    def _is_faster(self, changed: Candidate, than: Candidate) -> bool:
        """Return whether a changed candidate is faster than another one, in total over the steps to
        search on. False if either cannot run; it gives up early on one that is more than 1% slower
        so far."""
        new_ns, old_ns = 0, 0
        for seed in self._seeds:
            new, old = self._evaluator.run([changed, than], seed)
            if new is None or old is None:
                return False
            new_ns, old_ns = new_ns + new.makespan_ns, old_ns + old.makespan_ns
            if new_ns > old_ns * _TOO_SLOW:
                return False
        return new_ns < old_ns


def _diverse(ranked: Sequence[Candidate]) -> list[Candidate]:
    """Return the best candidate of each family and admission order, then the others."""
    seen: dict[object, Candidate] = {}
    for each in ranked:
        seen.setdefault((each.family, each.admit), each)
    first = list(seen.values())
    return [*first, *(each for each in ranked if each not in first)]


def _predicted(
    ranked: Sequence[Candidate], evaluator: Evaluator, fresh: Sequence[int], num_best: int
) -> list[Prediction]:
    """Predict the best candidate of each family and admission order, then others, `num_best` in
    total, on held-out steps. Those that cannot run all of these steps are left out."""
    found: list[Prediction] = []
    for candidate in _diverse(ranked):
        if len(found) == num_best:
            break
        predicted = predict(candidate, evaluator, fresh)
        if predicted is not None:
            found.append(predicted)
    return found


def predict(candidate: Candidate, evaluator: Evaluator, seeds: Sequence[int]) -> Prediction | None:
    """Predict a candidate on these steps; None if it cannot run one of them."""
    outcomes: list[StepOutcome] = []
    for seed in seeds:
        (outcome,) = evaluator.run([candidate], seed)
        if outcome is None:
            return None
        outcomes.append(outcome)
    peaks = [each.peak_bytes for each in outcomes]
    known = [peak for peak in peaks if peak is not None]
    return Prediction(
        candidate,
        tuple(each.makespan_ns / NS_PER_S for each in outcomes),
        seeds[0],
        max(known) if len(known) == len(peaks) else None,
    )


def predict_unbound(
    candidate: Candidate, source: Source, seeds: Sequence[int]
) -> Prediction | None:
    """Predict a candidate on these steps without the search's memory bound; the candidate's own
    hold still applies. None if it cannot run one of them."""
    bound = _NO_BOUND[isinstance(candidate.policy.hold, Bytes) or source.knows_sizes]
    return predict(candidate, Evaluator(source, bound, Budget(len(seeds))), seeds)


def _baseline(
    source: Source, space: Space, unbound: Evaluator, fresh: Sequence[int]
) -> Prediction | None:
    """Predict the run's own settings or, if they are unknown or without a run, Megatron's 1F1B. The
    search's memory bound does not apply; None if they cannot run, or 1F1B is not in the space."""
    own = source.own
    if own is None:
        plain = [
            each
            for each in space.initial_candidates()
            if each.policy.hint.name == "1f1b"
            and each.policy.hold is None
            and each.joined == each.divided == 1
        ]
        if not plain:
            return None
        own = plain[0]
    return predict(own, unbound, fresh)


_NO_BOUND: dict[bool, Hold] = {True: Bytes(2**60), False: 10**6}
"""An unlimited hold, by whether it is in bytes."""


def _memory_refusal(space: Space, evaluator: Evaluator, seeds: Sequence[int]) -> UsageError:
    """Return the error, to be raised, that no candidate fits into the memory; for a memory in
    bytes, with the least one that suffices."""
    memory = space.memory
    if not isinstance(memory, Bytes):
        return UsageError(
            f"no schedule stays within a memory of {memory} microbatches; give more, as in "
            f"--memory {space.source.shape.num_ranks}"
        )
    distinct = {
        (each.split, each.chunks, each.placement, each.joined, each.divided): each
        for each in space.initial_candidates()
    }
    least = min(evaluator.least_bytes(each, seeds) for each in distinct.values())
    return UsageError(
        f"the memory of {format_bytes(memory.num)} ({memory.num} bytes) is below the "
        f"{format_bytes(least)} that the heaviest microbatches of these steps take on their way "
        f"through any rank; set it to {least}B or more"
    )
