"""The named orders: published schedules, generated for a pipeline's shape.

Each is a function from a shape and a rank to that rank's tasks. The table `ORDERS` says which
layouts each supports and whether it splits the backward. None depends on how long tasks take.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from rrfp.errors import UsageError
from rrfp.schedule.hints.controllable_memory import v_half, v_min
from rrfp.schedule.hints.hint import Rounds, WeightGradients
from rrfp.schedule.order import Order, order_rounds
from rrfp.schedule.shape import SPLIT_BACKWARD, WHOLE_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.schedule.values import Value

F, B, W = Kind.F, Kind.B, Kind.W


@dataclass(frozen=True, slots=True)
class _Chunks(Value):
    """The chunks and placement that an order supports."""

    needed: str
    """As an error names them."""
    min_chunks: int = 1
    max_chunks: int | None = None
    placement: Placement | None = None

    def fits(self, shape: Shape) -> bool:
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
    """A named order, and the pipelines that it can be generated for."""

    name: str
    row: Callable[[Shape, int], Iterable[Task]]
    """The tasks of a rank, in sequence."""
    kinds: tuple[Kind, ...]
    chunks: _Chunks
    in_whole_rounds: bool = False
    """Whether it needs a multiple of the number of ranks as microbatches."""

    def fits(self, shape: Shape) -> bool:
        """Whether this order can be generated for this shape."""
        return self.chunks.fits(shape) and self._fits_microbatches(shape)

    def on(self, shape: Shape) -> Order:
        """The order for a shape; the shape's kinds are replaced by this order's own.

        Raises UsageError, naming what it needs, for a shape that it does not fit.
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
        return W in self.kinds

    @property
    def ranks_weight_gradients(self) -> bool:
        return self.splits_backward

    def keys(self, shape: Shape, rank: int) -> list[int]:
        """Ranked by place in the rank's row."""
        return self.on(shape).keys(shape, rank)

    def rounds(self, w: WeightGradients) -> Rounds:
        return order_rounds(w)

    def _fits_microbatches(self, shape: Shape) -> bool:
        return not self.in_whole_rounds or shape.num_microbatches % shape.num_ranks == 0


def _one_forward_one_backward(shape: Shape, rank: int) -> Iterator[Task]:
    """1F1B (PipeDream-flush; Narayanan et al. 2021), as Megatron runs it."""
    microbatches = range(shape.num_microbatches)
    forwards = [Task(rank, F, microbatch) for microbatch in microbatches]
    backwards = [Task(rank, B, microbatch) for microbatch in microbatches]
    return _alternate(forwards, backwards, shape.num_ranks - 1 - rank)


def _gpipe(shape: Shape, rank: int) -> Iterator[Task]:
    """GPipe (Huang et al. 2019): all forwards, then all backwards from the deepest chunk on."""
    stages = shape.stages_of(rank)
    for kind, of_kind in ((F, stages), (B, stages[::-1])):
        for stage in of_kind:
            for microbatch in range(shape.num_microbatches):
                yield Task(stage, kind, microbatch)


def _interleaved(shape: Shape, rank: int) -> Iterator[Task]:
    """Interleaved 1F1B (Narayanan et al. 2021), as Megatron runs it with groups of one microbatch
    per rank.

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
    """First `num_ahead` forwards, then forwards and backwards alternating, then the rest."""
    num_ahead = min(num_ahead, len(forwards))
    yield from forwards[:num_ahead]
    for forward, backward in zip(forwards[num_ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(backwards) - num_ahead :]


def _zb_h1(shape: Shape, rank: int) -> Iterator[Task]:
    """ZB-H1 (Qi et al., "Zero bubble pipeline parallelism", ICLR 2024).

    1F1B with weight gradients deferred, on rank r by r microbatches. Rank r of 1F1B holds r fewer
    activations than rank 0, so no rank comes to hold more than rank 0 did.
    """
    owed: deque[Task] = deque()
    for task in _one_forward_one_backward(shape, rank):
        yield task
        if task.kind is B:
            owed.append(task._replace(kind=W))
            if len(owed) > rank:
                yield owed.popleft()
    yield from owed


def _zb_v(shape: Shape, rank: int) -> Iterator[Task]:
    """ZB-V (Qi et al. 2024, "Pipeline parallelism with controllable memory").

    Every rank has an early and a late stage, so backwards start on the rank where forwards end.
    The order is generated for at least 2N - 1 microbatches on N ranks; with fewer, the tasks of
    the surplus microbatches are dropped.
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
