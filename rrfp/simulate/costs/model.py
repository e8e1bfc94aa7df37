"""The costs of a step's tasks and messages, before jitter."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from rrfp.errors import UsageError
from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Task
from rrfp.simulate.engine import TaskTimes

# Ranges of numbers as people write them: ``0-2,5``.


_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)


def parse_ranges(text: str, where: str) -> tuple[range, ...]:
    """Parse ``0-2,5``, with both ends included; `where` is what errors call it.

    Raises UsageError for any other text, and for a descending range.
    """
    ranges = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = match.groups() if match else ("1", "0")
        last = first if last is None else last
        if int(first) > int(last):
            raise UsageError(
                f"{where}: '{text}' names no pipeline ranks; write them as 0-2 or 0-2,5"
            )
        ranges.append(range(int(first), int(last) + 1))
    return tuple(ranges)


# The reason why stages differ: a choice of `rrfp tune`.


class Uneven(StrEnum):
    """The reason why middle stages with equally many layers take different times."""

    RANKS = "ranks"
    """Some ranks are slower than others with the same layers."""
    LAYERS = "layers"
    """Some layers are heavier than others on the same rank."""


LONGEST_S = 3600.0
"""The longest time that a user may write for a task; a longer one is a typing error."""
FACTORS = (0.001, 1000.0)
"""The range of a factor on times that a user may write."""
MOST_BYTES = 2**50
"""The most that a task may keep; more is a typing error."""


@dataclass(frozen=True, slots=True)
class Links:
    """A `Transfer`: how long messages take. A gradient is as large as its activation."""

    latency_ns: int = 0
    ns_per_byte: float = 0.0
    num_bytes: Sequence[int] = ()
    """Size of a message, by microbatch; empty if messages take only the latency."""
    factors: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """By (sender, receiver): how many times longer a message takes; 1 by default."""

    def __call__(self, sender: int, receiver: int, task: Task) -> int:
        num_bytes = self.num_bytes[task.microbatch] if self.num_bytes else 0
        factor = self.factors.get((sender, receiver), 1.0)
        return round((self.latency_ns + num_bytes * self.ns_per_byte) * factor)

    @property
    def is_free(self) -> bool:
        """True if no message takes any time, by latency and sizes; the factors do not count."""
        return self.latency_ns == 0 and (self.ns_per_byte == 0 or not any(self.num_bytes))


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The costs of one step of one pipeline, before jitter."""

    times: TaskTimes
    links: Links = field(default_factory=Links)
    agreement_ns: int = 0
    """The time of a group's round of agreement."""
    lateness_ns: int = 0
    """The most by which a message reaches another member of a group later than the first."""
    gradient_sync_ns: int = 0
    """The time of reducing gradients between replicas, at the end of the step."""
    is_known: bool = True
    """Whether the times are known when microbatches are admitted; otherwise they are drawn task by
    task, like jitter."""
    sizes: ActivationSizes | None = None
    """The activation sizes by stage; None if the costs do not include memory."""

    def permuted(self, order: Sequence[int]) -> "StepCosts":
        """Return the costs of the same step with microbatch `order[i]` admitted as number i: times,
        message sizes and activation sizes."""

        def rows(times: Sequence[Sequence[int]]) -> list[list[int]]:
            return [[row[microbatch] for microbatch in order] for row in times]

        times, links, sizes = self.times, self.links, self.sizes
        return replace(
            self,
            times=TaskTimes(
                rows(times.forward), rows(times.input_gradient), rows(times.weight_gradient)
            ),
            links=replace(links, num_bytes=[links.num_bytes[each] for each in order])
            if links.num_bytes
            else links,
            sizes=None if sizes is None else sizes.permuted(order),
        )


class Costs(Protocol):
    """A source of the costs of a step."""

    def step(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        """Return the costs of one step of one replica; equal arguments give equal costs.

        Raises UsageError if they do not fit the shape.
        """
        ...


def part_of(whole: int, num_parts: int, part: int) -> int:
    """Return part number `part`, from 0, of a whole number (a rank's time or bytes) divided into
    even whole parts, which add up to the whole."""
    return whole * (part + 1) // num_parts - whole * part // num_parts


def check_takes_time(times: TaskTimes, name: str) -> None:
    """Raise UsageError if every task takes 0 ns, as there would be nothing to compare.

    `name` is what errors call the costs or the jitter.
    """
    kinds = (times.forward, times.input_gradient, times.weight_gradient)
    if not any(any(row) for rows in kinds for row in rows):
        raise UsageError(
            f"{name} gives every task less than a nanosecond; let one of them take longer"
        )


def check_sizes(sizes: ActivationSizes, name: str) -> None:
    """Raise UsageError if a microbatch keeps more than `MOST_BYTES` on a stage; `name` is what
    errors call the costs."""
    for stage, row in enumerate(sizes.activations):
        if max(row) > MOST_BYTES:
            raise UsageError(
                f"{name} lets microbatch {row.index(max(row))} keep {max(row)} bytes on stage "
                f"{stage}, and the most is {MOST_BYTES}; correct it"
            )


def check_rank(rank: int, shape: Shape, name: str) -> None:
    """Raise UsageError if `rank` is beyond the last pipeline rank; `name` is what refers to it."""
    if rank >= shape.num_ranks:
        raise UsageError(
            f"{name} names pipeline rank {rank} and there are {shape.num_ranks}, from 0 on; "
            "correct it or change --pp"
        )


def check_chunk(chunk: int, shape: Shape, name: str) -> None:
    """Raise UsageError if `chunk` is beyond the last chunk of a rank; `name` is what refers to
    it."""
    if chunk >= shape.num_chunks:
        raise UsageError(
            f"{name} names chunk {chunk} and a rank has {shape.num_chunks}, from 0 on; "
            "correct it or change --chunks"
        )


def check_link(sender: int, receiver: int, shape: Shape, name: str) -> None:
    """Raise UsageError if a rank does not exist, or if no message passes from sender to receiver as
    they hold no adjacent stages; `name` is what refers to the link."""
    check_rank(max(sender, receiver), shape, name)
    if receiver not in shape.neighbors(sender):
        raise UsageError(
            f"{name} names the link from rank {sender} to rank {receiver}, which carries no "
            "message; name two neighbors"
        )


# Costs with every task longer or shorter by one factor.


@dataclass(frozen=True, slots=True)
class ScaledCosts:
    """A `Costs`: other costs with their tasks' times multiplied; messages are unchanged."""

    costs: Costs
    factor: float

    def step(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        """Return the other costs' step with all task times multiplied and rounded to ns. Messages,
        sizes and the rest stay."""
        costs = self.costs.step(shape, seed, replica)
        times = costs.times
        return replace(
            costs,
            times=TaskTimes(
                self._rows(times.forward),
                self._rows(times.input_gradient),
                self._rows(times.weight_gradient),
            ),
        )

    def _rows(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Multiply rows of times by the factor, rounded to ns."""
        return [[round(time_ns * self.factor) for time_ns in row] for row in rows]
