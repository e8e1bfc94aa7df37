"""V-Half and V-Min (Qi et al. 2024, "Pipeline parallelism with controllable memory", arXiv
2405.15362): orders over a V of two chunks that hold a half, or a third, of what 1F1B holds.

As in the paper, a building block says when each stage runs a microbatch's forward and backward if
every task takes a unit of time. It repeats every six units, which is a rank's work for a
microbatch, so that no two tasks of a rank coincide; weight gradients fill the gaps. The sooner a
block's backwards follow its forwards, the less is held.

The repeated blocks are then squeezed, each task starting once its rank is free and its inputs are
there, and reordered while the pipeline fills and drains: a task may overtake others of its rank if
the rest of the row, left as it is, still keeps within the peak. The first task of a row is thus
always allowed, and since the blocks respect what tasks need, some first task can always run: there
is no deadlock, with however many ranks and microbatches.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache

from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.schedule.values import Value

F, B, W = Kind.F, Kind.B, Kind.W

_PERIOD = 6
"""Units of time from one microbatch's block to the next."""
_NUM_LANES = 4
"""A rank runs forwards and backwards on two stages."""


@dataclass(frozen=True, slots=True)
class _Block(Value):
    """A building block: the unit of time in which each stage runs a microbatch."""

    starts: dict[Kind, tuple[int, ...]]
    peak: int
    """The most that a rank holds in the repeated blocks, in slots of a chunk and a microbatch."""


def v_half(shape: Shape, rank: int) -> tuple[Task, ...]:
    """V-Half: N ranks hold at most (N + 2) // 2 microbatches each."""
    return _rows(shape, _half_block)[rank]


def v_min(shape: Shape, rank: int) -> tuple[Task, ...]:
    """V-Min: N ranks hold at most (N + 4) // 3 microbatches each."""
    return _rows(shape, _min_block)[rank]


def _half_block(num_ranks: int) -> _Block:
    """A microbatch's forward, and then its backward, takes two units for each rank on the way down
    the V, and one on the way up."""
    pause = 3 if num_ranks % 2 == 0 else 0  # Without it tasks of a rank would coincide.
    ranks = range(num_ranks)
    forwards = [2 * rank for rank in ranks] + [2 * num_ranks - 1 + rank for rank in ranks]
    down = [3 * num_ranks - 1 + pause + 2 * rank for rank in ranks]
    up = [5 * num_ranks - 1 + pause + rank for rank in ranks]
    return _block(forwards, [*down, *up], peak=num_ranks // 2 + 1)


def _min_block(num_ranks: int) -> _Block:
    """Every stage follows the one before at once."""
    pause = 2 if num_ranks % 3 == 0 else 0  # Without it tasks of a rank would coincide.
    num_stages = 2 * num_ranks
    forwards = list(range(num_stages))
    backwards = [num_stages + pause + place for place in range(num_stages)]
    return _block(forwards, backwards, peak=(num_ranks + 4) // 3)


def _block(forwards: list[int], backwards: list[int], *, peak: int) -> _Block:
    """The block with these starts in the sequence in which tasks run, the last stage's backward
    first, and with this peak in microbatches."""
    return _Block({F: tuple(forwards), B: tuple(reversed(backwards))}, 2 * peak)


class _Phase(Enum):
    """A part of the step. Only the steady one keeps to the blocks' sequence: before it, fewer
    microbatches are in flight than memory allows, and after it, no new ones come."""

    FILL = auto()
    STEADY = auto()
    DRAIN = auto()


_Row = deque[tuple[_Phase, Task | None]]
"""Tasks in sequence; None is the weight gradient that is owed the longest by then."""


@dataclass(slots=True)
class _Rank:
    """A rank while its row is squeezed and reordered."""

    row: _Row
    """What it has yet to run."""
    ran: list[Task] = field(default_factory=list)
    owed: deque[Task] = field(default_factory=deque)
    """Weight gradients whose backward has run."""
    held: int = 0
    """Forwards run minus weight gradients run."""

    def choose(self, shape: Shape, peak: int, ran: set[Task]) -> int | None:
        """The place in the row of the task to run in this unit, given what all ranks ran; None to
        wait."""
        held = largest = self.held  # With the row as it stands, up to the task looked at.
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
                if len(overtaken) == _NUM_LANES:
                    break
            held += kind is F
            largest = max(largest, held)
        if not self.owed:
            return None
        return next(place for place, (_, task) in enumerate(self.row) if task is None)

    def run(self, place: int) -> Task:
        """Run the task at a place in the row."""
        _, task = self.row[place]
        del self.row[place]
        if task is None:
            task = self.owed.popleft()
            self.held -= 1
        elif task.kind is B:
            self.owed.append(task._replace(kind=W))
        else:
            self.held += 1
        self.ran.append(task)
        return task


@lru_cache(maxsize=4)
def _rows(shape: Shape, block_of: Callable[[int], _Block]) -> tuple[tuple[Task, ...], ...]:
    """Each rank's tasks: the blocks repeated, squeezed and reordered. Cached, since a rank's row
    comes with those of all others."""
    block = block_of(shape.num_ranks)
    ranks = [_Rank(_repeated(shape, block, rank)) for rank in range(shape.num_ranks)]
    ran: set[Task] = set()
    while any(rank.row for rank in ranks):
        # All ranks choose before any of them runs what it chose.
        chosen = [rank.choose(shape, block.peak, ran) for rank in ranks]
        ran.update(
            rank.run(place) for rank, place in zip(ranks, chosen, strict=True) if place is not None
        )
    return tuple(tuple(rank.ran) for rank in ranks)


def _repeated(shape: Shape, block: _Block, rank: int) -> _Row:
    """A rank's row in the repeated blocks, with weight gradients in the gaps."""
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
    start, num_owed = min(at), 0
    while num_owed or start <= end:
        phase = _Phase.DRAIN if start > last else _Phase.FILL if start < filled else _Phase.STEADY
        task = at.get(start)
        if task is not None:
            row.append((phase, task))
            num_owed += task.kind is B
        elif num_owed:
            row.append((phase, None))
            num_owed -= 1
        start += 1
    return row
