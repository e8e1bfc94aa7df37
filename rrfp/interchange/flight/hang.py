"""Who waits for whom in a job that hangs, from the dumps of its ranks.

Of each group a rank is at the first operation that has not ended. In a collective it waits for the
ranks of the group that have not begun it; in a send or a receive for its peer, unless the peer is
in the other half: what two ranks send each other runs one after the other, unless a batch joins it.
In a batch it waits for all that its parts wait for. A rank that others wait for and that is in no
operation never came: it is what to look at. Without such a rank, ranks wait for each other in a
circle.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rrfp.interchange.flight.dumps import Dump, Group, Operation, batch_of

_OF_ALL = "default_pg"
_OTHER_HALF = {"send": "recv", "recv": "send"}


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that waits in an operation."""

    rank: int
    group: Group
    operation: Operation
    waits_for: tuple[int, ...]
    """Empty where every rank has come, and the operation does not end all the same."""
    parts: tuple[Operation, ...]
    """Of a batch, the sends, receives or collectives in it that the dump still has."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Ranks of one group whose operations with one number differ."""

    group: Group
    sequence: int
    operations: Mapping[str, tuple[int, ...]]
    """The ranks that began each; those of a batch are joined by commas."""


@dataclass(frozen=True, slots=True)
class Hang:
    """What the dumps of a job tell."""

    ranks: tuple[int, ...]
    """Those that have a dump."""
    without_dump: tuple[int, ...]
    waits: tuple[Wait, ...]
    """By rank; the first is what the rank has been in for the longest time."""
    never_came: tuple[int, ...]
    """Those that others wait for, and that are in no operation."""
    circles: tuple[tuple[int, ...], ...]
    """Ranks that wait for each other, each for the next and the last for the first."""
    mismatches: tuple[Mismatch, ...]
    last: Mapping[int, Operation]
    """The last operation that each rank began."""
    groups: Mapping[str, Group]
    """By name."""


def hang_of(dumps: Sequence[Dump]) -> Hang:
    """What a job's dumps tell of its hang."""
    groups = _groups(dumps)
    with_dump = {dump.rank for dump in dumps}
    # Ranks are numbered without gaps.
    numbered = range(max(with_dump, default=0))
    begun = _Begun(dumps)
    waits = [
        Wait(
            dump.rank,
            groups[operation.group],
            operation,
            begun.missing(dump.rank, parts or [operation], groups[operation.group]),
            tuple(parts),
        )
        for dump in dumps
        for *parts, operation in _first_pending(dump)
    ]
    waits.sort(key=lambda wait: (wait.rank, wait.operation.created_ns))
    edges: defaultdict[int, set[int]] = defaultdict(set)
    for wait in waits:
        edges[wait.rank].update(wait.waits_for)
    waited_for = set().union(*edges.values()) if edges else set()
    known = with_dump.union(numbered, *(group.ranks for group in groups.values()), waited_for)
    return Hang(
        tuple(sorted(with_dump)),
        tuple(sorted(known - with_dump)),
        tuple(waits),
        tuple(sorted(waited_for - {wait.rank for wait in waits})),
        tuple(_circles(edges)),
        tuple(_mismatches(dumps, groups)),
        {dump.rank: dump.operations[-1] for dump in dumps if dump.operations},
        groups,
    )


def _groups(dumps: Sequence[Dump]) -> dict[str, Group]:
    """All groups; where no dump tells a group's ranks, as on gloo, those that used it."""
    found: dict[str, Group] = {}
    used: defaultdict[str, set[int]] = defaultdict(set)
    for dump in dumps:
        for name, group in dump.groups.items():
            if name not in found or len(group.ranks) > len(found[name].ranks):
                found[name] = group
        for operation in dump.operations:
            used[operation.group].add(dump.rank)
    last_rank = max((dump.rank for dump in dumps), default=-1)
    for name, group in found.items():
        if not group.ranks:
            is_of_all = group.description == _OF_ALL
            ranks = range(1 + last_rank) if is_of_all else sorted(used[name])
            found[name] = replace(group, ranks=tuple(ranks), tells_ranks=False)
    return found


def _first_pending(dump: Dump) -> Iterator[list[Operation]]:
    """Of each group the first operation that has not ended; of a batch all, its end last."""
    first: dict[str, list[Operation]] = {}
    for operation in dump.operations:
        if not operation.is_done:
            batch = first.setdefault(operation.group, [operation])
            if operation is not batch[0] and batch_of(operation) == batch_of(batch[0]):
                batch.append(operation)
    for batch in first.values():
        # Without such an end they are no batch: on gloo all sends have one number.
        yield batch if batch[-1].name == "coalesced" else batch[:1]


class _Begun:
    """What each rank has begun."""

    def __init__(self, dumps: Sequence[Dump]) -> None:
        self._last: dict[tuple[int, str], int] = {}
        """The last number of a rank's collectives in a group."""
        self._halves: set[tuple[int, str, str, int]] = set()
        """The sends and receives that a rank is in: group, name and peer."""
        for dump in dumps:
            batches = {batch_of(each) for each in dump.operations if each.name == "coalesced"}
            first: dict[tuple[str, int], Operation] = {}
            for operation in dump.operations:
                group = operation.group
                if not operation.is_p2p:
                    last = self._last.get((dump.rank, group), -1)
                    self._last[dump.rank, group] = max(last, operation.sequence)
                elif operation.peer is not None and not operation.is_done:
                    before = first.setdefault((group, operation.peer), operation)
                    batch = batch_of(operation)
                    if operation is before or (batch == batch_of(before) and batch in batches):
                        self._halves.add((dump.rank, group, operation.name, operation.peer))

    def missing(self, rank: int, parts: Sequence[Operation], group: Group) -> tuple[int, ...]:
        """For whom a rank waits in the operations of a batch, or in a single one."""
        found: set[int] = set()
        for each in parts:
            if each.peer is not None:
                if (each.peer, each.group, _OTHER_HALF[each.name], rank) not in self._halves:
                    found.add(each.peer)
            elif not each.is_p2p:
                last = {other: self._last.get((other, each.group), -1) for other in group.ranks}
                found.update(other for other in last if last[other] < each.sequence)
        return tuple(sorted(found - {rank}))


def _circles(edges: Mapping[int, set[int]]) -> Iterator[tuple[int, ...]]:
    """A circle of every set of ranks that wait for each other, the smallest rank first."""
    told: set[int] = set()
    for start in sorted(edges):
        path: dict[int, None] = {}
        rank = start
        while rank not in path and rank not in told and edges.get(rank):
            path[rank] = None
            rank = min(edges[rank])
        if rank in path:
            ranks = list(path)
            circle = ranks[ranks.index(rank) :]
            first = circle.index(min(circle))
            yield tuple(circle[first:] + circle[:first])
        told.update(path)


def _mismatches(dumps: Sequence[Dump], groups: Mapping[str, Group]) -> Iterator[Mismatch]:
    """Of each group, the first number under which its ranks began different collectives."""
    began: defaultdict[tuple[str, int], dict[int, list[Operation]]] = defaultdict(dict)
    for dump in dumps:
        for operation in dump.operations:
            if not operation.is_p2p:
                of_rank = began[operation.group, operation.sequence]
                of_rank.setdefault(dump.rank, []).append(operation)
    oldest = {dump.rank: dump.operations[0] for dump in dumps if dump.operations}
    told = set()
    for (group, sequence), of_ranks in sorted(began.items()):
        found: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        for rank, operations in of_ranks.items():
            is_batch = operations[-1].name == "coalesced"
            # The oldest batch of a dump may have lost its first parts.
            if not (is_batch and operations[0] is oldest[rank]):
                found[tuple(map(_same, operations))].append(rank)
        if len(found) > 1 and group not in told:
            told.add(group)
            yield Mismatch(
                groups[group],
                sequence,
                {
                    ", ".join(
                        f"{each.name} of {each.sizes}"
                        for each in of_ranks[ranks[0]]
                        if each.name != "coalesced"
                    ): tuple(ranks)
                    for ranks in found.values()
                },
            )


def _same(operation: Operation) -> str:
    """What must be the same on all ranks."""
    return operation.name + (operation.sizes if operation.name == "all_reduce" else "")
