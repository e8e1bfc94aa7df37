"""The space that is searched: where it begins, and what is next to a candidate."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil

from rrfp.schedule.admission import Admit
from rrfp.schedule.hints.hint import WeightGradients
from rrfp.schedule.hints.table import HINTS
from rrfp.schedule.hold import Bytes, Hold
from rrfp.schedule.patience.setting import IMPATIENT, AutoPatience
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.shape import Placement, Shape
from rrfp.tune.candidate import Candidate
from rrfp.tune.source import Source
from rrfp.tune.splits import balanced, loads, moves, work_of

_READY, _FIXED = Dispatch.READY, Dispatch.FIXED
_IDLE, _RANKED = WeightGradients.IDLE, WeightGradients.RANKED

Way = tuple[str, Dispatch, WeightGradients]
"""A hint, and what is made of it."""

_PATIENT = (("zb-h1", _READY, _RANKED), ("zb-v", _READY, _RANKED), ("v-half", _READY, _RANKED))
"""What patience may make the best of all."""

_ONE_CHUNK: tuple[Way, ...] = (
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
_LOOP: tuple[Way, ...] = (
    ("bf", _READY, _IDLE),
    ("bfw", _READY, _IDLE),
    ("bf-deep", _READY, _IDLE),
    ("bfw-deep", _READY, _IDLE),
    ("interleaved", _READY, _IDLE),
    ("interleaved", _FIXED, _IDLE),
)
_V: tuple[Way, ...] = (
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
"""Holds in microbatches that are tried, as multiples of the number of ranks."""

_NUM_EVEN, _NUM_OTHERS = 12, 8
"""Splits that are tried from another one."""


@dataclass(slots=True)
class Space:
    """What may be chosen for a source under a bound on memory."""

    source: Source
    memory: Hold
    """A number of bytes or of microbatches."""
    work: Sequence[float] = field(init=False, default=())
    """By unit; empty where layers cannot be told apart."""

    def __post_init__(self) -> None:
        source = self.source
        if source.layered is not None:
            num = source.shape.num_microbatches
            seeds = list(source.seeds[:4]) or range(4)
            self.work = work_of(source.layered, source.shape.num_ranks, num, seeds)

    def ways(self, chunks: int, placement: Placement) -> tuple[Way, ...]:
        """The hints that go with a layout."""
        found = _ONE_CHUNK if chunks == 1 else _V if placement is Placement.V else _LOOP
        if self.source.splits_backward:
            return found
        return tuple(way for way in found if not HINTS[way[0]].splits_backward)

    def begin(self) -> list[Candidate]:
        """Every layout with every hint, order of entry and size, the layers divided evenly, and so
        that the ranks' loads are."""
        source = self.source
        found = []
        for chunks, placement in source.layouts:
            for split in self.splits(chunks, placement):
                for hint, dispatch, w in self.ways(chunks, placement):
                    for joined, divided in source.sizes:
                        plain = Candidate(
                            hint=hint,
                            dispatch=dispatch,
                            w=w,
                            chunks=chunks,
                            placement=placement,
                            split=split,
                            hold=None if dispatch is _FIXED else self.memory_in(joined, divided),
                            joined=joined,
                            divided=divided,
                        )
                        found += [replace(plain, admit=admit) for admit in source.admissions]
                        if (hint, dispatch, w) in _PATIENT and (joined, divided) == (1, 1):
                            patient = replace(plain, patience=AutoPatience.AUTO)
                            found += [replace(patient, admit=each) for each in source.admissions]
        if source.own is not None:
            found.append(source.own)
        return list(dict.fromkeys(found))

    def memory_in(self, joined: int, divided: int) -> Hold:
        """The memory, where it is in microbatches, in those of another size."""
        if isinstance(self.memory, Bytes):
            return self.memory
        assert isinstance(self.memory, int | Fraction)
        return max(1, int(self.memory * divided / joined))

    def splits(self, chunks: int, placement: Placement) -> list[tuple[int, ...] | None]:
        """The splits to begin with."""
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
        """The bounds that may be worth a try: all of the memory, or fewer microbatches."""
        whole = self.memory_in(candidate.joined, candidate.divided)
        yield whole
        ranks = self.source.shape.num_ranks
        most = candidate.microbatches(self.source.shape.num_microbatches)
        for share in _SHARES_OF_A_HOLD:
            hold = ceil(share * ranks)
            if hold <= most and (isinstance(whole, Bytes) or hold < whole):  # type: ignore[operator]
                yield hold

    def near(self, candidate: Candidate, draw: random.Random) -> list[Candidate]:
        """Candidates that differ in one thing, in random order."""
        source, found = self.source, []
        if candidate.limit is None and candidate.dispatch is _READY:
            found += [replace(candidate, hold=hold) for hold in self.holds(candidate)]
            found += [replace(candidate, patience=each) for each in (IMPATIENT, AutoPatience.AUTO)]
        found += [replace(candidate, admit=Admit(admit)) for admit in source.admissions]
        for hint, dispatch, w in self.ways(candidate.chunks, candidate.placement):
            hold = candidate.hold or self.memory_in(candidate.joined, candidate.divided)
            found.append(
                replace(
                    candidate,
                    hint=hint,
                    dispatch=dispatch,
                    w=w,
                    limit=None,
                    hold=None if dispatch is _FIXED else hold,
                    patience=IMPATIENT if dispatch is _FIXED else candidate.patience,
                )
            )
        for joined, divided in source.sizes:
            if (joined, divided) != (candidate.joined, candidate.divided):
                of_size = None if candidate.dispatch is _FIXED else self.memory_in(joined, divided)
                found.append(
                    replace(candidate, joined=joined, divided=divided, hold=of_size, limit=None)
                )
        if candidate.split is not None and source.moves_layers:
            found += [candidate.with_split(split) for split in self._moved(candidate, draw)]
        found = [each for each in dict.fromkeys(found) if each != candidate]
        draw.shuffle(found)
        return found

    def _moved(self, candidate: Candidate, draw: random.Random) -> list[tuple[int, ...]]:
        """Splits with one layer moved: those that even out the ranks' loads best, and a few
        others."""
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
