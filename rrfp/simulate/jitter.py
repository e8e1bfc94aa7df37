"""Jitter: random and systematic deviations of task and message times from their costs.

A spec is parts joined by ``+``, such as ``lognormal:0.5+stop:3:0.2:0.1``. Every draw is keyed by
the seed, the replica, the part and the task, so that methods compared under one seed meet the same
jitter, whatever order they run tasks in. The factors of `lognormal`, `pareto` and `length` have
mean 1: they spread the work without adding to it. A backward that is not split uses the factors of
its two parts.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain
from math import factorial

import numpy as np

from rrfp.errors import UsageError
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.costs.model import (
    FACTORS,
    LONGEST_S,
    Links,
    check_link,
    check_rank,
    parse_ranges,
)
from rrfp.simulate.costs.unit_costs import Floats
from rrfp.simulate.engine import Stretch, TaskTimes
from rrfp.trace.records import NS_PER_S

# Random draws that are the same to the bit on every machine.
#
# A draw depends only on its key, that is, on what it is for and never on when it is made. So
# everything compared under one seed meets the same draws. The bits come from a counter-based
# generator (Philox, whose stream numpy guarantees). They are processed only with operations that
# IEEE 754 rounds exactly (+ - * / sqrt, comparisons, scaling by powers of two), because the
# logarithms and exponentials of C libraries differ between machines in their last bit.


LARGEST_SIGMA = 3.0
"""The largest sigma of a lognormal factor. One deviation is a factor of e**3 = 20; more is a typing
error."""

_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
"""ln 2 in two parts; the first ends in zeros, so that a whole number times it is exact."""
_LOG2_E = 1.44269504088896340736
_SQRT_HALF = 0.70710678118654752440
_EXP = [1 / factorial(n) for n in range(15)]
"""e**r as a polynomial in r, whose size is at most ln(2) / 2."""
_LOG = [2 / n for n in range(1, 24, 2)]
"""log((1 + f) / (1 - f)) / f as a polynomial in f * f, where f is at most 0.172."""


def uniforms(num: int, *key: int | str) -> Floats:
    """Return `num` draws from [0, 1), the same for one key on every machine; a larger `num` only
    appends draws."""
    return uniforms_in_parts(*key)(num)


def uniforms_in_parts(*key: int | str) -> Callable[[int], Floats]:
    """Return a function that returns the draws of `uniforms` piece by piece: the next `num` at each
    call."""
    digest = blake2b(json.dumps(key).encode(), digest_size=16).digest()
    bits = np.random.Philox(key=int.from_bytes(digest, "little"))
    return lambda num: np.asarray((bits.random_raw(num) >> np.uint64(11)) * 2.0**-53)


def normals(num: int, *key: int | str) -> Floats:
    """Return `num` draws of mean 0 and standard deviation 1, the same for one key on every machine;
    a larger `num` only appends draws.

    Marsaglia's polar method: of points in a square, those inside the circle are used, 79 in 100.
    """
    num_points = num + num // 2 + 64
    while True:
        x, y = 2 * uniforms(2 * num_points, *key).reshape(-1, 2).T - 1
        square = x * x + y * y
        is_inside = (square > 0) & (square < 1)
        if is_inside.sum() >= num:
            x, square = x[is_inside][:num], square[is_inside][:num]
            return np.asarray(x * np.sqrt(-2 * log(square) / square))
        num_points *= 2


def lognormals(num: int, sigma: float, *key: int | str) -> Floats:
    """Return `num` factors of mean 1 whose logarithms have the standard deviation `sigma`."""
    return exp(sigma * normals(num, *key) - sigma * sigma / 2)


def exp(x: Floats) -> Floats:
    """Return e**x to within two units in the last place, for x between -700 and 700, with the same
    bits on every machine."""
    power = np.rint(x * _LOG2_E)
    rest = (x - power * _LN2_HIGH) - power * _LN2_LOW
    return np.ldexp(_polynomial(_EXP, rest), power.astype(np.int32))


def log(x: Floats) -> Floats:
    """Return the natural logarithm of normal positive numbers, to within two units in the last
    place, with the same bits on every machine."""
    mantissa, power = np.frexp(x)
    is_low = mantissa < _SQRT_HALF
    mantissa, power = np.where(is_low, 2 * mantissa, mantissa), power - is_low
    f = (mantissa - 1) / (mantissa + 1)
    return np.asarray(power * _LN2_HIGH + (f * _polynomial(_LOG, f * f) + power * _LN2_LOW))


def _polynomial(coefficients: Sequence[float], x: Floats) -> Floats:
    """Evaluate a polynomial by Horner's rule; the coefficient of x**0 comes first."""
    value = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value


_MS = 1e6
"""ns"""

LEVELS = {
    "J0": (0.0, 0 * _MS, 0.0),
    "J1": (0.1, 5 * _MS, 0.5),
    "J2": (0.2, 10 * _MS, 1.0),
    "J3": (0.3, 15 * _MS, 1.5),
}
"""The paper's levels (section 7.6): probability, base in ns, alpha."""

SPECS = (
    "none",
    *LEVELS,
    "lognormal:SIGMA",
    "pareto:ALPHA",
    "length:SIGMA",
    "slow-stage:RANK:FACTOR",
    "slow-link:FROM-TO:FACTOR",
    "stop:RANK:AT_S:FOR_S",
)
"""The parts of a spec, as errors list them."""

_Key = tuple[int | str, ...]
_Ranks = frozenset[int] | None
"""Pipeline ranks; None: all."""
_Draw = Callable[..., Floats]
"""Draws factors: from their number, the distribution's parameter and the key of the draws."""


def _pareto(num: int, alpha: float, *key: int | str) -> Floats:
    """Draw `num` factors of mean 1 from a Pareto distribution with the exponent `alpha`."""
    return (alpha - 1) / alpha * exp(log(1 - uniforms(num, *key)) / -alpha)


def _constant(num: int, factor: float, *key: int | str) -> Floats:
    """Return the same factor `num` times; nothing is drawn."""
    return np.full(num, factor)


@dataclass(frozen=True, slots=True)
class _Factor:
    """A factor on the tasks of some ranks."""

    draw: _Draw
    value: float
    """The parameter of the distribution."""
    key: _Key
    """The key of its draws: its name, and how many parts of that name precede it."""
    is_of_task: bool
    """Every task draws its own factor; otherwise all tasks of a microbatch share one."""
    ranks: _Ranks

    def row(self, shape: Shape, stage: int, kind: Kind, key: _Key) -> Floats:
        """Return the factors by microbatch for tasks of a kind on a stage: drawn for each task, or
        the same for all tasks of a microbatch."""
        of_task = (stage, kind) if self.is_of_task else ()
        return self.draw(shape.num_microbatches, self.value, *key, *self.key, *of_task)


@dataclass(frozen=True, slots=True)
class _Delays:
    """The paper's delays: after some tasks, in proportion to the rank's recent task times."""

    probability: float
    base_ns: float
    alpha: float
    key: _Key
    ranks: _Ranks


@dataclass(frozen=True, slots=True)
class _Stop:
    """A rank does nothing for a while."""

    rank: int
    from_ns: int
    until_ns: int


@dataclass(frozen=True, slots=True)
class _SlowLink:
    sender: int
    receiver: int
    factor: float


@dataclass(frozen=True, slots=True)
class Jitter:
    """A parsed spec of jitter: factors on task times, delays after tasks, stops of ranks and slow
    links."""

    spec: str
    factors: tuple[_Factor, ...] = ()
    delays: tuple[_Delays, ...] = ()
    stops: tuple[_Stop, ...] = ()
    slow_links: tuple[_SlowLink, ...] = ()

    def times(self, times: TaskTimes, shape: Shape, seed: int, replica: int) -> TaskTimes:
        """Return the times of this step's tasks with the factors, and without delays and stops.

        Raises UsageError if the spec names a pipeline rank or a link that does not exist.
        """
        self._check(shape)
        if not self.factors:
            return times

        def jittered(kind: Kind, rows: Sequence[Sequence[int]]) -> list[Sequence[int]]:
            return [
                self._row(row, shape, stage, kind, (seed, replica))
                for stage, row in enumerate(rows)
            ]

        return TaskTimes(
            jittered(Kind.F, times.forward),
            jittered(Kind.B, times.input_gradient),
            jittered(Kind.W, times.weight_gradient),
        )

    def _row(
        self, row: Sequence[int], shape: Shape, stage: int, kind: Kind, key: _Key
    ) -> Sequence[int]:
        """Multiply the times of a kind of task on a stage by all factors for its rank, rounded to
        whole ns; without such factors they stay."""
        rank = shape.rank_of(stage)
        factors = [
            each.row(shape, stage, kind, key) for each in self.factors if _is_on(rank, each.ranks)
        ]
        if not factors:
            return row
        times_ns = np.asarray(row, dtype=np.float64)
        for each in factors:
            times_ns = times_ns * each
        return list(map(int, np.rint(times_ns).tolist()))

    @property
    def needs_costs(self) -> bool:
        """True if real tasks cannot be made to follow it just by lengthening them: some would have
        to be shortened, or a link is slower and the times of messages must be known."""
        lengthens = all(each.draw is _constant and each.value >= 1 for each in self.factors)
        return bool(self.slow_links) or not lengthens

    @property
    def delays_tasks(self) -> bool:
        """True if tasks may take longer than `times` says, because of delays or stops."""
        return bool(self.delays or self.stops)

    def stretch(self, shape: Shape, seed: int, replica: int) -> Stretch | None:
        """Return the delays and stops of one replica's step, which depend on what its ranks run;
        None if the spec has neither."""
        if not self.delays_tasks:
            return None
        return _Stretch(self, shape, (seed, replica))

    def links(self, links: Links) -> Links:
        """Return the links with the slow ones slower, by factors on top of their own.

        Raises UsageError if a link is to be slower and messages take no time.
        """
        if not self.slow_links:
            return links
        if links.is_free:
            raise UsageError(
                f"jitter {self.spec} slows a link and messages take no time; choose --costs with "
                "links, or leave it out"
            )
        factors = dict(links.factors)
        for each in self.slow_links:
            link = (each.sender, each.receiver)
            factors[link] = factors.get(link, 1.0) * each.factor
        return replace(links, factors=factors)

    def _check(self, shape: Shape) -> None:
        """Raise UsageError if the spec names a pipeline rank that the shape lacks, or a link that
        carries no message."""
        name = f"jitter {self.spec}"
        bound_to = (part.ranks for parts in (self.factors, self.delays) for part in parts)
        for rank in chain.from_iterable(ranks for ranks in bound_to if ranks is not None):
            check_rank(rank, shape, name)
        for stop in self.stops:
            check_rank(stop.rank, shape, name)
        for slow in self.slow_links:
            check_link(slow.sender, slow.receiver, shape, name)


NO_JITTER = Jitter("none")


class _Stretch:
    """A `Stretch`: the delays and stops of one replica's step."""

    def __init__(self, jitter: Jitter, shape: Shape, key: _Key) -> None:
        self._num_microbatches = shape.num_microbatches
        self._key = key
        self._delays = [
            [each for each in jitter.delays if _is_on(rank, each.ranks)]
            for rank in range(shape.num_ranks)
        ]
        stops = sorted(jitter.stops, key=lambda stop: stop.from_ns)
        self._stops = [
            [each for each in stops if each.rank == rank] for rank in range(shape.num_ranks)
        ]
        self._lately_ns: list[float] = [0.0] * shape.num_ranks
        """The paper's e: by rank, a decaying mean of its tasks' times."""
        self._drawn: dict[_Key, list[float]] = {}

    def __call__(self, rank: int, start_ns: int, task: Task, time_ns: int) -> int:
        stretched_ns = time_ns
        if self._delays[rank]:
            # At first, this task is all that is known about the rank.
            before_ns = self._lately_ns[rank] or time_ns
            lately_ns = self._lately_ns[rank] = 0.9 * before_ns + 0.1 * time_ns
            for delays in self._delays[rank]:
                scale = self._scales(delays, task.stage, task.kind)[task.microbatch]
                stretched_ns += round(scale * max(delays.base_ns, lately_ns))
        return self._end_ns(rank, start_ns, stretched_ns) - start_ns

    def _scales(self, delays: _Delays, stage: int, kind: Kind) -> list[float]:
        """Return the delay of each microbatch's task as a multiple of e (or of base); 0 for tasks
        that are not delayed. Drawn once for each kind and stage."""
        key = (*self._key, *delays.key, stage, kind)
        if key not in self._drawn:
            # The key omits the level, so that J2 delays all tasks that J1 delays.
            num = self._num_microbatches
            is_hit = uniforms(num, *key, "whether") < delays.probability
            sizes = delays.alpha * (0.5 + uniforms(num, *key, "how much"))
            self._drawn[key] = (is_hit * sizes).tolist()
        return self._drawn[key]

    def _end_ns(self, rank: int, start_ns: int, time_ns: int) -> int:
        """Return the end of a task that needs `time_ns` of work, later by the stops of its rank
        that it meets."""
        now_ns, left_ns = start_ns, time_ns
        for stop in self._stops[rank]:
            if now_ns < stop.until_ns and now_ns + left_ns > stop.from_ns:
                left_ns -= max(0, stop.from_ns - now_ns)
                now_ns = stop.until_ns
        return now_ns + left_ns


def _is_on(rank: int, ranks: _Ranks) -> bool:
    """True if the rank is one of `ranks`; None means all ranks."""
    return ranks is None or rank in ranks


_NUMBER = re.compile(r"\d{1,12}(\.\d{0,12})?", re.ASCII)
_RANK = re.compile(r"\d{1,6}", re.ASCII)
_DISTRIBUTIONS: dict[str, tuple[_Draw, float, float]] = {
    "lognormal": (lognormals, 0.0, LARGEST_SIGMA),
    "pareto": (_pareto, 1.01, 1000.0),
    "length": (lognormals, 0.0, LARGEST_SIGMA),
}
"""By name: how its factors are drawn, and the range of their parameter."""
_LIST_ITEM = re.compile(r"\d{1,6}(-\d{1,6})?", re.ASCII)
"""A rank or a range of ranks, into which a part breaks if a spec is split at its commas."""


def parse_jitter(spec: str) -> Jitter:
    """Parse a spec: `none`, or parts joined by ``+``.

    Parts that are drawn may be limited to pipeline ranks: ``lognormal:0.5@0-2,5``. Raises
    UsageError for an unknown part, and for a number out of range; whether the ranks exist is
    checked later.
    """
    if spec == "none":
        return NO_JITTER
    reader = _Reader(spec)
    for part in spec.split("+"):
        reader.read(part)
    return Jitter(
        spec,
        tuple(reader.factors),
        tuple(reader.delays),
        tuple(reader.stops),
        tuple(reader.slow_links),
    )


class _Reader:
    """Parses a spec of jitter part by part."""

    def __init__(self, spec: str) -> None:
        self.factors: list[_Factor] = []
        self.delays: list[_Delays] = []
        self.stops: list[_Stop] = []
        self.slow_links: list[_SlowLink] = []
        self._names: list[str] = []

    def read(self, part: str) -> None:
        """Parse one part of a spec, such as `J1@0-2` or `stop:3:0.2:0.1`, and append it to the
        factors, delays, stops or slow links. Raises UsageError for an unknown part, for a number
        out of range, and for `none` beside other parts."""
        what, at, bound_to = part.partition("@")
        ranks: _Ranks = None
        if at:
            ranges = parse_ranges(bound_to, f"jitter {part}")
            ranks = frozenset().union(*ranges)
        match what.split(":"):
            case [name] if name in LEVELS:
                self.delays.append(_Delays(*LEVELS[name], self._key("delays"), ranks))
            case [name, value] if name in _DISTRIBUTIONS:
                draw, least, most = _DISTRIBUTIONS[name]
                number = _number(value, least, most, part)
                self.factors.append(_Factor(draw, number, self._key(name), name != "length", ranks))
            case ["slow-stage", rank, factor] if not at:
                number = _number(factor, *FACTORS, part)
                self.factors.append(
                    _Factor(_constant, number, (), False, frozenset([_rank(rank, part)]))
                )
            case ["slow-link", link, factor] if not at:
                sender, _, receiver = link.partition("-")
                number = _number(factor, *FACTORS, part)
                self.slow_links.append(
                    _SlowLink(_rank(sender, part), _rank(receiver, part), number)
                )
            case ["stop", rank, from_s, for_s] if not at:
                from_ns = round(_number(from_s, 0.0, LONGEST_S, part) * NS_PER_S)
                for_ns = round(_number(for_s, 0.0, LONGEST_S, part) * NS_PER_S)
                self.stops.append(_Stop(_rank(rank, part), from_ns, from_ns + for_ns))
            case ["none"] if not at:
                raise UsageError("jitter none stands alone; leave it out beside other parts")
            case [item] if _LIST_ITEM.fullmatch(item):
                raise UsageError(
                    f"'{part}' is not jitter; put a value with commas, such as J1@0,2, into --row, "
                    "as --sweep divides it"
                )
            case _:
                raise UsageError(f"'{part}' is not jitter; write {', '.join(SPECS)}")

    def _key(self, name: str) -> _Key:
        """Count a part, and return the key of its draws: its name and its number among parts of
        that name, which draw independently."""
        self._names.append(name)
        return (name, self._names.count(name) - 1)


def _number(text: str, least: float, most: float, part: str) -> float:
    """Parse a number from `least` to `most`. Raises UsageError, which names `part`, for anything
    else."""
    if not _NUMBER.fullmatch(text) or not least <= float(text) <= most:
        raise UsageError(
            f"jitter {part}: '{text}' must be a number from {least:g} to {most:g}; correct it"
        )
    return float(text)


def _rank(text: str, part: str) -> int:
    """Parse the number of a pipeline rank. Raises UsageError for any other text; whether the rank
    exists is not checked."""
    if not _RANK.fullmatch(text):
        raise UsageError(f"jitter {part}: '{text}' must be a pipeline rank, from 0 on; correct it")
    return int(text)
