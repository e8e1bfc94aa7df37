"""What the tasks and messages of a step are known to cost, before jitter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol

from rrfp.errors import UsageError
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Task
from rrfp.simulate.world import TaskTimes

LONGEST_S = 3600.0
"""What a task may take at most where it is written down; a longer one is a slip."""
FACTORS = (0.001, 1000.0)
"""The range of a factor on times, where it is written down."""


@dataclass(frozen=True, slots=True)
class Links:
    """How long messages take: a `Transfer`. A gradient is as large as the activation it is of."""

    latency_ns: int = 0
    ns_per_byte: float = 0.0
    num_bytes: Sequence[int] = ()
    """Of a message, by microbatch; none where messages take the latency alone."""
    factors: Mapping[tuple[int, int], float] = field(default_factory=lambda: MappingProxyType({}))
    """How many times longer a message takes from one pipeline rank to another; 1 where not said."""

    def __call__(self, sender: int, receiver: int, task: Task) -> int:
        num_bytes = self.num_bytes[task.microbatch] if self.num_bytes else 0
        factor = self.factors.get((sender, receiver), 1.0)
        return round((self.latency_ns + num_bytes * self.ns_per_byte) * factor)

    @property
    def is_free(self) -> bool:
        """Whether no message takes any time."""
        return self.latency_ns == 0 and (self.ns_per_byte == 0 or not any(self.num_bytes))


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What one step of one pipeline costs, as far as it is known before the step from the data."""

    times: TaskTimes
    links: Links = field(default_factory=Links)
    agreement_ns: int = 0
    """What a group's round of agreement takes."""
    lateness_ns: int = 0
    """The most by which a message is later at one member of a group than at the first."""
    gradient_sync_ns: int = 0
    """The reduction of gradients between replicas, at the end of the step."""
    is_known: bool = True
    """Whether somebody who admits microbatches could know the times; else they are drawn as jitter
    is."""

    def permuted(self, order: Sequence[int]) -> "StepCosts":
        """The same step with microbatch `order[i]` admitted as number i."""

        def rows(times: Sequence[Sequence[int]]) -> list[list[int]]:
            return [[row[microbatch] for microbatch in order] for row in times]

        times, links = self.times, self.links
        return replace(
            self,
            times=TaskTimes(
                rows(times.forward), rows(times.input_gradient), rows(times.weight_gradient)
            ),
            links=replace(links, num_bytes=[links.num_bytes[each] for each in order])
            if links.num_bytes
            else links,
        )


class Costs(Protocol):
    """Where the costs of a step come from."""

    def step(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        """The costs of one step of one replica, the same whenever asked for.

        Raises UsageError when they do not fit the shape.
        """
        ...


def part_of(whole_ns: int, num_parts: int, part: int) -> int:
    """One of the parts into which a rank's time is divided evenly; together they are the whole."""
    return whole_ns * (part + 1) // num_parts - whole_ns * part // num_parts


def check_takes_time(times: TaskTimes, name: str) -> None:
    """Raise UsageError when no task takes any time: there would be nothing to compare.

    `name` is what left them without: costs or jitter.
    """
    kinds = (times.forward, times.input_gradient, times.weight_gradient)
    if not any(any(row) for rows in kinds for row in rows):
        raise UsageError(
            f"{name} gives every task less than a nanosecond; let one of them take longer"
        )


def check_rank(rank: int, shape: Shape, name: str) -> None:
    """Raise UsageError when `name` speaks of a pipeline rank that there is not."""
    if rank >= shape.num_ranks:
        raise UsageError(
            f"{name} names pipeline rank {rank} and there are {shape.num_ranks}, from 0 on; "
            "correct it or change --pp"
        )


def check_chunk(chunk: int, shape: Shape, name: str) -> None:
    """Raise UsageError when `name` speaks of a chunk that no rank has."""
    if chunk >= shape.num_chunks:
        raise UsageError(
            f"{name} names chunk {chunk} and a rank has {shape.num_chunks}, from 0 on; "
            "correct it or change --chunks"
        )


def check_link(sender: int, receiver: int, shape: Shape, name: str) -> None:
    """Raise UsageError when `name` speaks of a link that carries no message."""
    check_rank(max(sender, receiver), shape, name)
    if receiver not in shape.neighbours(sender):
        raise UsageError(
            f"{name} names the link from rank {sender} to rank {receiver}, which carries no "
            "message; name two neighbours"
        )
