"""Forwards and backwards told by autograd alone.

Every operator of a forward that autograd records takes the next number of a sequence, and the
engine evaluates its node in the backward under the same number. Within one backward, the engine
takes nodes by falling numbers, for it runs the youngest that is ready first. So a number that rises
begins the next backward, and so does a send or a receive. The numbers of a backward are those of
the operators of its forward, which lasts from the first of these to the last.

What a backward computes anew (activation checkpointing) lies inside its nodes and is passed over.
Forwards without gradients have no numbers: evaluations are not seen.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from rrfp.interchange.kineto.host import MOST_SEQUENCE, Operator
from rrfp.interchange.unnamed.calls import Call, Transfer
from rrfp.schedule.tasks import Kind


def calls_of_autograd(
    forwards: Sequence[Operator], backwards: Sequence[Operator], transfers: Sequence[Transfer]
) -> list[Call]:
    """The forwards and backwards of a rank, by their operators in the order of time."""
    groups = list(_backwards(backwards, transfers))
    outside = list(_outside(forwards, groups))
    top = list(_top_level(outside))
    starts_ns = [operator.start_ns for operator in top]
    made: dict[int, Operator] = {}
    for operator in outside:
        # Of the operators with one number, the last to begin took it.
        made[operator.sequence] = operator
    calls = []
    for pair, nodes in enumerate(groups):
        start_ns, end_ns = nodes[0].start_ns, max(node.end_ns for node in nodes)
        calls.append(Call(start_ns, start_ns, end_ns, Kind.B, pair))
        found = [made[node.sequence] for node in nodes if node.sequence in made]
        if found:
            first = top[bisect_right(starts_ns, min(found).start_ns) - 1]
            last = top[bisect_right(starts_ns, max(found).start_ns) - 1]
            calls.append(Call(first.start_ns, first.start_ns, last.end_ns, Kind.F, pair))
    return sorted(calls)


def _backwards(
    nodes: Sequence[Operator], transfers: Sequence[Transfer]
) -> Iterator[list[Operator]]:
    """The nodes of each backward."""
    between_ns = [transfer.start_ns for transfer in transfers]
    group: list[Operator] = []
    lowest = MOST_SEQUENCE
    for node in _top_level(nodes):
        if group:
            moved = bisect_left(between_ns, group[-1].end_ns) < bisect_left(
                between_ns, node.start_ns
            )
            if moved or lowest < node.sequence < MOST_SEQUENCE:
                yield group
                group, lowest = [], MOST_SEQUENCE
        group.append(node)
        lowest = min(lowest, node.sequence)
    if group:
        yield group


def _outside(
    forwards: Sequence[Operator], groups: Sequence[Sequence[Operator]]
) -> Iterator[Operator]:
    """The operators that ran in no backward."""
    starts_ns = [nodes[0].start_ns for nodes in groups]
    ends_ns = [max(node.end_ns for node in nodes) for nodes in groups]
    for operator in forwards:
        place = bisect_right(starts_ns, operator.start_ns) - 1
        if place < 0 or operator.start_ns >= ends_ns[place]:
            yield operator


def _top_level(operators: Sequence[Operator]) -> Iterator[Operator]:
    """Those that lie in no other."""
    end_ns: int | None = None
    for operator in operators:
        if end_ns is None or operator.start_ns >= end_ns:
            yield operator
            end_ns = operator.end_ns
