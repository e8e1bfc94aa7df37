"""The named hints: rules that alternate between kinds, and published schedules as orders.

Each published schedule is a function from a shape and a rank to that rank's tasks. The table
`ORDERS` lists them, with the layouts that each supports. None depends on the tasks' times.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import lru_cache
from itertools import count
from typing import Final, Self

from rrfp.errors import UsageError, did_you_mean
from rrfp.schedule.hints import Hint, Order, Rounds, WeightGradients, order_rounds
from rrfp.schedule.shape import SPLIT_BACKWARD, WHOLE_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import Kind, Task, Value

# Hints that alternate between forwards and backwards, or strictly prefer one of them.


@dataclass(frozen=True, slots=True)
class Alternation(Value):
    """A rule that tries kind `first`, then the other direction (paper section 5). Forwards prefer
    the smallest chunk (the largest if `deep`), backwards the largest. Within a chunk the smallest
    microbatch goes first."""

    name: str
    first: Kind
    in_rounds: bool
    """Whether a round runs one task of each direction that has one ready; otherwise `first` always
    goes first."""
    deep: bool = False
    """Whether forwards prefer the largest chunk, as backwards do, instead of the smallest (the
    paper's rule)."""
    splits_backward: bool = False

    @property
    def second(self) -> Kind:
        """The direction that is tried after `first`: B after F, else F."""
        return Kind.B if self.first is Kind.F else Kind.F

    @property
    def ranks_weight_gradients(self) -> bool:
        """Always False: split-off weight gradients only fill idle time."""
        return False

    def for_shape(self, shape: Shape) -> Self:
        """Return itself, as it fits any shape."""
        return self

    def keys(self, shape: Shape, rank: int) -> list[int]:
        """Return a key for each task, the smallest best: by chunk, then microbatch. Forwards prefer
        the smallest chunk (the largest if `deep`), other kinds the largest. Keys of different kinds
        may be equal."""
        num_chunks, num_microbatches = shape.num_chunks, shape.num_microbatches
        keys: list[int] = []
        for kind in shape.kinds:
            prefers_shallow = kind is Kind.F and not self.deep
            for chunk in range(num_chunks):
                preference = chunk if prefers_shallow else num_chunks - 1 - chunk
                start = preference * num_microbatches
                keys += range(start, start + num_microbatches)
        return keys

    def rounds(self, w: WeightGradients) -> Rounds:
        """Try `first`, then the other direction. In rounds, after a task of `first` the other
        direction goes first. `w` is ignored."""
        first, second = (self.first,), (self.second,)
        top = (first, second)
        if not self.in_rounds:
            return Rounds(top, {})
        return Rounds(top, {self.first: (second, first)})


BF = Alternation("bf", Kind.B, in_rounds=True)
BFW = Alternation("bfw", Kind.B, in_rounds=True, splits_backward=True)

ALTERNATIONS = {
    hint.name: hint
    for hint in (
        BF,
        Alternation("fb", Kind.F, in_rounds=True),
        Alternation("b-first", Kind.B, in_rounds=False),
        Alternation("f-first", Kind.F, in_rounds=False),
        BFW,
        Alternation("bf-deep", Kind.B, in_rounds=True, deep=True),
        Alternation("bfw-deep", Kind.B, in_rounds=True, deep=True, splits_backward=True),
    )
}


# V-Half and V-Min (Qi et al. 2024, "Pipeline parallelism with controllable memory", arXiv
# 2405.15362): orders over a V of two chunks that hold a half, or a third, of what 1F1B holds.
#
# As in the paper, a building block says when each stage runs a microbatch's forward and backward if
# every task takes a unit of time. It repeats every six units, which is a rank's work for a
# microbatch, so that no two tasks of a rank coincide; weight gradients fill the gaps. The sooner a
# block's backwards follow its forwards, the fewer activations a rank holds.
#
# The repeated blocks are then compacted (each task starts once its rank is free and its inputs have
# arrived) and reordered while the pipeline fills and drains: a task may overtake others of its rank
# if the rest of the row, unchanged, still stays within the peak. So the first task of a row is
# always allowed. Since the blocks respect dependencies, the first task of some row can always run:
# no number of ranks and microbatches deadlocks.


F, B, W = Kind.F, Kind.B, Kind.W

_PERIOD = 6
"""Units of time from one microbatch's block to the next."""
_NUM_QUEUES = 4
"""The queues of a rank in which microbatches do not overtake: F and B of each of its two stages."""


@dataclass(frozen=True, slots=True)
class _Block(Value):
    """A building block: the unit of time in which each stage runs a microbatch."""

    starts: dict[Kind, tuple[int, ...]]
    peak: int
    """The largest number of activations that a rank holds in the repeated blocks, in slots of one
    chunk and one microbatch."""


def v_half(shape: Shape, rank: int) -> tuple[Task, ...]:
    """Return a rank's tasks under V-Half (two chunks in a V, split backwards), where N ranks hold
    at most (N + 2) // 2 microbatches each."""
    return _rows(shape, _half_block)[rank]


def v_min(shape: Shape, rank: int) -> tuple[Task, ...]:
    """Return a rank's tasks under V-Min (two chunks in a V, split backwards), where N ranks hold at
    most (N + 4) // 3 microbatches each."""
    return _rows(shape, _min_block)[rank]


def _half_block(num_ranks: int) -> _Block:
    """Return the building block of V-Half: forwards, and then backwards, take two units per rank on
    the way down the V, and one on the way up. Even numbers of ranks need a pause of three units
    between the two."""
    pause = 3 if num_ranks % 2 == 0 else 0  # Without it tasks of a rank would coincide.
    ranks = range(num_ranks)
    forwards = [2 * rank for rank in ranks] + [2 * num_ranks - 1 + rank for rank in ranks]
    down = [3 * num_ranks - 1 + pause + 2 * rank for rank in ranks]
    up = [5 * num_ranks - 1 + pause + rank for rank in ranks]
    return _block(forwards, [*down, *up], peak=num_ranks // 2 + 1)


def _min_block(num_ranks: int) -> _Block:
    """Return the building block of V-Min: each stage starts one unit after the stage before it,
    first all forwards, then all backwards; with a multiple of 3 ranks, after a pause of two
    units."""
    pause = 2 if num_ranks % 3 == 0 else 0  # Without it tasks of a rank would coincide.
    num_stages = 2 * num_ranks
    forwards = list(range(num_stages))
    backwards = [num_stages + pause + place for place in range(num_stages)]
    return _block(forwards, backwards, peak=(num_ranks + 4) // 3)


def _block(forwards: list[int], backwards: list[int], *, peak: int) -> _Block:
    """Make a block from the starts of forwards and backwards, each in the sequence in which they
    run (the last stage's backward first). `peak` is given in microbatches, and stored in slots of
    one of the two chunks."""
    return _Block({F: tuple(forwards), B: tuple(reversed(backwards))}, 2 * peak)


class _Phase(Enum):
    """A phase of the step. Only the steady phase follows the blocks' sequence strictly: before it,
    memory allows more microbatches in flight, and after it, no new ones start."""

    FILL = auto()
    STEADY = auto()
    DRAIN = auto()


_Row = deque[tuple[_Phase, Task | None]]
"""Tasks in sequence; None stands for the oldest pending weight gradient at that point."""


@dataclass(slots=True)
class _Rank:
    """The state of a rank while its row is compacted and reordered."""

    row: _Row
    """The tasks that it has yet to run."""
    ran: list[Task] = field(default_factory=list)
    pending_w: deque[Task] = field(default_factory=deque)
    """Weight gradients whose backward has run, the oldest first."""
    held: int = 0
    """Forwards run minus weight gradients run."""

    def choose(self, shape: Shape, peak: int, ran: set[Task]) -> int | None:
        """Choose the first task of the current phase (when steady, only the row's first) whose
        prerequisites all ranks have run (`ran`) and that overtakes no other of its kind on its
        stage; a forward must also stay within `peak`. Otherwise choose a pending weight gradient.
        Return its index in the row, or None to wait."""
        held = largest = self.held  # Under the unchanged row, up to the task at hand.
        overtaken: set[tuple[int, Kind]] = set()
        for place, (phase, task) in enumerate(self.row):
            if phase is not self.row[0][0] or (phase is _Phase.STEADY and place):
                break
            if task is None:
                held -= 1
                continue
            stage, kind, _ = task
            if (stage, kind) not in overtaken:  # Microbatches do not overtake each other.
                fits = kind is B or largest < peak
                if fits and ran.issuperset(shape.prerequisites(task)):
                    return place
                overtaken.add((stage, kind))
                if len(overtaken) == _NUM_QUEUES:
                    break
            held += kind is F
            largest = max(largest, held)
        if not self.pending_w:
            return None
        return next(place for place, (_, task) in enumerate(self.row) if task is None)

    def run(self, place: int) -> Task:
        """Remove the entry at this index of the row, record that its task ran, and return the task.
        None in the row stands for the oldest pending weight gradient; a backward makes its weight
        gradient pending."""
        _, task = self.row[place]
        del self.row[place]
        if task is None:
            task = self.pending_w.popleft()
            self.held -= 1
        elif task.kind is B:
            self.pending_w.append(task._replace(kind=W))
        else:
            self.held += 1
        self.ran.append(task)
        return task


@lru_cache(maxsize=4)
def _rows(shape: Shape, block_of: Callable[[int], _Block]) -> tuple[tuple[Task, ...], ...]:
    """Return the tasks of all ranks: the blocks repeated, compacted and reordered, unit of time by
    unit of time. Cached, because all rows are computed together."""
    block = block_of(shape.num_ranks)
    ranks = [_Rank(_repeated(shape, block, rank)) for rank in range(shape.num_ranks)]
    ran: set[Task] = set()
    while any(rank.row for rank in ranks):
        # All ranks choose before any of them runs its task.
        chosen = [rank.choose(shape, block.peak, ran) for rank in ranks]
        ran.update(
            rank.run(place) for rank, place in zip(ranks, chosen, strict=True) if place is not None
        )
    return tuple(tuple(rank.ran) for rank in ranks)


def _repeated(shape: Shape, block: _Block, rank: int) -> _Row:
    """Return the row of a rank when the block is repeated for every microbatch: its tasks by time,
    each with its phase, and weight gradients in the gaps."""
    at = {
        block.starts[kind][stage] + _PERIOD * microbatch: Task(stage, kind, microbatch)
        for kind in (F, B)
        for stage in shape.stages_of(rank)
        for microbatch in range(shape.num_microbatches)
    }
    filled = block.starts[B][shape.num_ranks]  # The first backward is at the bottom of the V.
    last = _PERIOD * (shape.num_microbatches - 1)  # The last microbatch starts.
    end = max(at)
    row: _Row = deque()
    start, num_pending = min(at), 0
    while num_pending or start <= end:
        phase = _Phase.DRAIN if start > last else _Phase.FILL if start < filled else _Phase.STEADY
        task = at.get(start)
        if task is not None:
            row.append((phase, task))
            num_pending += task.kind is B
        elif num_pending:
            row.append((phase, None))
            num_pending -= 1
        start += 1
    return row


@dataclass(frozen=True, slots=True)
class _Chunks(Value):
    """The chunks and placement that an order supports."""

    needed: str
    """The requirement, as errors state it."""
    min_chunks: int = 1
    max_chunks: int | None = None
    placement: Placement | None = None

    def fits(self, shape: Shape) -> bool:
        """True if the shape has a supported number of chunks and, where one is required, the
        placement."""
        return (
            self.min_chunks <= shape.num_chunks
            and (self.max_chunks is None or shape.num_chunks <= self.max_chunks)
            and self.placement in (None, shape.placement)
        )


_ANY = _Chunks("any number of chunks per rank")
_ONE_CHUNK = _Chunks("1 chunk per rank", max_chunks=1)
_LOOP = _Chunks("2 or more chunks per rank in placement loop", 2, placement=Placement.LOOP)
_V = _Chunks("2 chunks per rank in placement v", 2, 2, Placement.V)


@dataclass(frozen=True, slots=True)
class NamedOrder(Value):
    """A published schedule, and the shapes that it can be generated for."""

    name: str
    row: Callable[[Shape, int], Iterable[Task]]
    """The tasks of a rank, in sequence."""
    kinds: tuple[Kind, ...]
    chunks: _Chunks
    in_whole_rounds: bool = False
    """Whether the number of microbatches must be a multiple of the number of ranks."""

    def fits(self, shape: Shape) -> bool:
        """True if this order can be generated for the shape's chunks, placement and number of
        microbatches."""
        return self.chunks.fits(shape) and self._fits_microbatches(shape)

    def for_shape(self, shape: Shape) -> Order:
        """Generate the order for a shape, whose kinds are replaced by the order's own.

        Raises UsageError, with the requirement, for a shape that it does not support.
        """
        if not self.chunks.fits(shape):
            raise UsageError(
                f"order {self.name} needs {self.chunks.needed}, not {shape.num_chunks} in "
                f"placement {shape.placement}; change --placement and --chunks (in a job of your "
                "own, its virtual pipeline size), or choose another hint"
            )
        if not self._fits_microbatches(shape):
            raise UsageError(
                f"order {self.name} needs a multiple of its {shape.num_ranks} pipeline ranks as "
                f"microbatches, not {shape.num_microbatches}; change their number"
            )
        shape = replace(shape, kinds=self.kinds)
        return Order(
            self.name, shape, tuple(tuple(self.row(shape, rank)) for rank in range(shape.num_ranks))
        )

    @property
    def splits_backward(self) -> bool:
        """True if weight gradients are separate tasks of the order."""
        return W in self.kinds

    @property
    def ranks_weight_gradients(self) -> bool:
        """True if the order splits backwards; then it places the weight gradients, too."""
        return self.splits_backward

    def keys(self, shape: Shape, rank: int) -> list[int]:
        """Generate the order for the shape, and return the position of each task in the rank's row,
        by task number. Raises UsageError for a shape that it does not support."""
        return self.for_shape(shape).keys(shape, rank)

    def rounds(self, w: WeightGradients) -> Rounds:
        """Let all kinds compete by position, or with `idle` run weight gradients only when no other
        task may."""
        return order_rounds(w)

    def _fits_microbatches(self, shape: Shape) -> bool:
        """True if the number of microbatches is a multiple of that of ranks, or need not be one."""
        return not self.in_whole_rounds or shape.num_microbatches % shape.num_ranks == 0


def _one_forward_one_backward(shape: Shape, rank: int) -> Iterator[Task]:
    """Yield a rank's tasks under 1F1B (PipeDream-flush; Narayanan et al. 2021), as Megatron runs
    it: a forward for each later rank, then forwards and backwards in turns. Ranks have one
    chunk."""
    microbatches = range(shape.num_microbatches)
    forwards = [Task(rank, F, microbatch) for microbatch in microbatches]
    backwards = [Task(rank, B, microbatch) for microbatch in microbatches]
    return _alternate(forwards, backwards, shape.num_ranks - 1 - rank)


def _gpipe(shape: Shape, rank: int) -> Iterator[Task]:
    """Yield a rank's tasks under GPipe (Huang et al. 2019): all forwards, chunk by chunk, then all
    backwards from the deepest chunk on."""
    stages = shape.stages_of(rank)
    for kind, of_kind in ((F, stages), (B, stages[::-1])):
        for stage in of_kind:
            for microbatch in range(shape.num_microbatches):
                yield Task(stage, kind, microbatch)


def _interleaved(shape: Shape, rank: int) -> Iterator[Task]:
    """Yield a rank's tasks under interleaved 1F1B (Narayanan et al. 2021), as Megatron runs it with
    groups of one microbatch per rank.

    Each group of as many microbatches as there are ranks passes through all of the rank's chunks
    before the next group; backwards visit the chunks in reverse.
    """
    num_ranks, num_chunks = shape.num_ranks, shape.num_chunks
    visits = [
        (chunk, first + place)
        for first in range(0, shape.num_microbatches, num_ranks)
        for chunk in range(num_chunks)
        for place in range(num_ranks)
    ]
    forwards = [Task(shape.stage_of(rank, chunk), F, m) for chunk, m in visits]
    backwards = [Task(shape.stage_of(rank, num_chunks - 1 - chunk), B, m) for chunk, m in visits]
    num_ahead = 2 * (num_ranks - 1 - rank) + (num_chunks - 1) * num_ranks
    return _alternate(forwards, backwards, num_ahead)


def _alternate(
    forwards: Sequence[Task], backwards: Sequence[Task], num_ahead: int
) -> Iterator[Task]:
    """Yield `num_ahead` forwards (or all, if fewer), then forwards and backwards in turns, then the
    backwards that are left."""
    num_ahead = min(num_ahead, len(forwards))
    yield from forwards[:num_ahead]
    for forward, backward in zip(forwards[num_ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(backwards) - num_ahead :]


def _zb_h1(shape: Shape, rank: int) -> Iterator[Task]:
    """Yield a rank's tasks under ZB-H1 (Qi et al., "Zero bubble pipeline parallelism", ICLR 2024).

    1F1B with weight gradients deferred, on rank r by r microbatches. Rank r of 1F1B holds r fewer
    activations than rank 0, so no rank comes to hold more than rank 0 did.
    """
    pending: deque[Task] = deque()
    for task in _one_forward_one_backward(shape, rank):
        yield task
        if task.kind is B:
            pending.append(task._replace(kind=W))
            if len(pending) > rank:
                yield pending.popleft()
    yield from pending


def _zb_v(shape: Shape, rank: int) -> Iterator[Task]:
    """Yield a rank's tasks under ZB-V (Qi et al. 2024, "Pipeline parallelism with controllable
    memory").

    Every rank has an early and a late stage, so backwards start on the rank where forwards end. The
    order is generated for at least 2N - 1 microbatches on N ranks; with fewer, the tasks of the
    surplus microbatches are dropped.
    """
    num_ranks = shape.num_ranks
    num = max(shape.num_microbatches, 2 * num_ranks - 1)
    early, late = shape.stages_of(rank)
    early_whole, late_whole = ((early, B), (early, W)), ((late, B), (late, W))
    num_before_steady = 2 * num_ranks - 1 - rank
    passes: tuple[tuple[int, tuple[tuple[int, Kind], ...]], ...] = (
        (num_before_steady - rank, ((early, F),)),
        (rank, ((late, F), (early, F))),
        (num_ranks - rank, ((late, F), *late_whole)),
        (num - num_before_steady, ((early, F), *early_whole, (late, F), *late_whole)),
        (num_ranks - 1 - rank, (*early_whole, (late, F), *late_whole)),
        (rank, ((early, B), (late, B))),
        (num_ranks - rank, early_whole),
        (rank, ((late, W),)),
        (rank, ((early, W),)),
    )
    microbatches = {(stage, kind): count() for stage in (early, late) for kind in shape.kinds}
    for num_times, steps in passes:
        for _ in range(num_times):
            for stage, kind in steps:
                microbatch = next(microbatches[stage, kind])
                if microbatch < shape.num_microbatches:
                    yield Task(stage, kind, microbatch)


ORDERS = {
    order.name: order
    for order in (
        NamedOrder("1f1b", _one_forward_one_backward, WHOLE_BACKWARD, _ONE_CHUNK),
        NamedOrder("gpipe", _gpipe, WHOLE_BACKWARD, _ANY),
        NamedOrder("zb-h1", _zb_h1, SPLIT_BACKWARD, _ONE_CHUNK),
        NamedOrder("zb-v", _zb_v, SPLIT_BACKWARD, _V),
        NamedOrder("v-half", v_half, SPLIT_BACKWARD, _V),
        NamedOrder("v-min", v_min, SPLIT_BACKWARD, _V),
        NamedOrder("interleaved", _interleaved, WHOLE_BACKWARD, _LOOP, in_whole_rounds=True),
    )
}


# The table of named hints. A new hint needs a line in `HINTS` and one in `HINT_DESCRIPTIONS`.


HINTS: dict[str, Hint] = {
    **ALTERNATIONS,
    **ORDERS,
}


HINT_DESCRIPTIONS: dict[str, str] = {
    "bf": "in turns: a backward, a forward",
    "fb": "in turns: a forward, a backward",
    "b-first": "any ready backward before forwards",
    "f-first": "any ready forward before backwards",
    "bfw": "bf, with weight gradients when idle",
    "bf-deep": "bf, deepest chunk's forwards first",
    "bfw-deep": "bfw, deepest chunk's forwards first",
    "1f1b": "Megatron's: a forward, a backward",
    "gpipe": "all forwards, then all backwards",
    "zb-h1": "zero bubble: 1f1b, backward split",
    "zb-v": "zero bubble over a V of two chunks",
    "v-half": "over a V: half of 1f1b's memory",
    "v-min": "over a V: a third of 1f1b's memory",
    "interleaved": "Megatron's 1f1b over several chunks",
}
"""A short description of each hint, for help texts."""

AUTO_CHOICES: Final[tuple[str, ...]] = (
    "bf",
    "bfw",
    "bf-deep",
    "bfw-deep",
    "b-first",
    "1f1b",
    "zb-h1",
    "interleaved",
    "zb-v",
    "v-half",
    "v-min",
)
"""The hints that `--hint auto` chooses from, in the order in which it compares them."""


def hint_named(name: str, others: Sequence[str] = ()) -> Hint:
    """Return the hint of that name. Raises UsageError for an unknown one; the error lists the known
    names and `others`, names that the caller accepts besides."""
    if name not in HINTS:
        names = [*HINTS, *others]
        raise UsageError(
            f"'{name}' is neither a hint ({', '.join(names)}) nor the path of an order file"
            f"{did_you_mean(name, names)}"
        )
    return HINTS[name]


# The hint `auto`, which simulations choose during a run (`rrfp.planning`).


@dataclass(frozen=True, slots=True)
class AutoHint(Value):
    """The request to choose a hint during the run. As a hint it stands for the initial one, which
    steps without a choice, such as evaluations, use throughout."""

    first: str | None = None
    """The initial hint. None: `zb-v` on a V, `bfw` with one chunk, `bfw-deep` with several in a
    loop."""
    every: int = 50
    """The number of steps from one choice to the next."""
    waits: bool = False
    """Whether the step after a request waits for the choice. Then the steps at which the hint
    changes do not depend on the machine's speed."""

    def __post_init__(self) -> None:
        """Raise UsageError for an unknown hint, and for fewer than two steps between choices."""
        if self.first is not None:
            hint_named(self.first)
        if self.every < 2:
            raise UsageError(
                f"hint auto is to choose every {self.every} steps, and it has to measure one "
                "first; set it to 2 or more"
            )

    @property
    def name(self) -> str:
        """The name of the hint, always `auto`."""
        return "auto"

    @property
    def splits_backward(self) -> bool:
        """True if the initial hint splits backwards; the default ones all do."""
        return self.first is None or HINTS[self.first].splits_backward

    @property
    def ranks_weight_gradients(self) -> bool:
        """Always False, whatever the initial hint does."""
        return False

    def for_shape(self, shape: Shape) -> Hint:
        """Return the initial hint for this shape: `first` or, by default, `zb-v` on a V, `bfw` with
        one chunk and `bfw-deep` with several. Raises UsageError for a shape that it does not
        support."""
        name = self.first
        if name is None and shape.placement is Placement.V:
            name = "zb-v"
        if name is None:
            name = "bfw" if shape.num_chunks == 1 else "bfw-deep"
        return HINTS[name].for_shape(shape)

    def keys(self, shape: Shape, rank: int) -> list[int]:
        """Return the keys of the initial hint for this shape."""
        return self.for_shape(shape).keys(shape, rank)

    def rounds(self, w: WeightGradients) -> Rounds:
        """Raise TypeError always: callers must use the hint that `for_shape` returns."""
        raise TypeError("hint auto has no rounds; use the hint that for_shape returns")


AUTO: Final = AutoHint()
