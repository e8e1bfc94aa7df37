"""How a hang is told: who waits for whom, in at most a screen."""

import json
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from rrfp.interchange.flight.dumps import Group, Operation
from rrfp.interchange.flight.hang import Hang, Wait

_MOST_LINES = 5
_MOST_RANKS = 6
_WIDTH = 79
_MOST_TEXT = 400


def hang_text(hang: Hang) -> str:
    """The headline, what to look at, and a line for each group of ranks that wait for the same."""
    lines = [*_wrapped(headline(hang)), *_advice(hang)]
    rows: defaultdict[tuple[str, str], list[Wait]] = defaultdict(list)
    for wait in hang.waits:
        rows[_what(wait.operation, wait.group), _for_whom(wait)].append(wait)
    if rows:
        lines.append("")
    for (what, whom), waits in list(rows.items())[:_MOST_LINES]:
        since = min(wait.operation.created_ns for wait in waits)
        place = next((wait.operation.place for wait in waits if wait.operation.place), "")
        lines += _wrapped(
            f"{_ranks([wait.rank for wait in waits], first='Rank')} in {what}, {whom}; since "
            f"{_time(since)}{', at ' + _short(place) if place else ''}"
        )
    if len(rows) > _MOST_LINES:
        lines.append(f"... and {len(rows) - _MOST_LINES} more; --format json has them all")
    return "\n".join(lines)


def hang_json(hang: Hang) -> str:
    """Everything, as one JSON object."""
    return json.dumps(
        {
            "headline": headline(hang),
            "ranks": hang.ranks,
            "ranks_without_dump": hang.without_dump,
            "never_came": hang.never_came,
            "circles": hang.circles,
            "mismatches": [asdict(mismatch) for mismatch in hang.mismatches],
            "waits": [
                {
                    "rank": wait.rank,
                    "waits_for": wait.waits_for,
                    "group": wait.group.name,
                    "group_description": wait.group.description,
                    "group_ranks": wait.group.ranks,
                    **_told(wait.operation),
                    "parts": [_told(part) for part in wait.parts],
                }
                for wait in hang.waits
            ],
            "last": {
                str(rank): {"group": operation.group, **_told(operation)}
                for rank, operation in hang.last.items()
            },
        },
        indent=2,
    )


def headline(hang: Hang) -> str:
    """Whose fault it is, as far as the dumps tell, in a sentence."""
    if hang.mismatches:
        mismatch = hang.mismatches[0]
        began = "; ".join(
            f"{_ranks(ranks)} {name}" for name, ranks in list(mismatch.operations.items())[:3]
        )
        return (
            f"Ranks began different operations as number {mismatch.sequence} of "
            f"{mismatch.group.title}: {began}."
        )
    if hang.never_came:
        # Of a rank without a dump nobody knows how far it came.
        known = [rank for rank in hang.never_came if rank not in hang.without_dump]
        late = known or hang.never_came
        waiting = [wait for wait in hang.waits if set(wait.waits_for) & set(late)]
        directly = _ranks([wait.rank for wait in waiting])
        operation = _what(waiting[0].operation, waiting[0].group)
        verb = "waits" if len({wait.rank for wait in waiting}) == 1 else "wait"
        them = "it" if len(late) == 1 else "them"
        told = "never came:" if known else "left no dump, and"
        return f"{_ranks(late, first='Rank')} {told} {directly} {verb} for {them} in {operation}."
    if hang.circles:
        circle = hang.circles[0]
        chain = " -> ".join(map(str, (*circle[:_MOST_RANKS], circle[0])))
        return f"Ranks wait for each other in a circle: {chain}."
    if hang.waits:
        return _endless(hang)
    return "No rank waits: every operation in the dumps has ended."


def _endless(hang: Hang) -> str:
    """What does not end although all have come, and who waits for the ranks in it."""
    first = next(wait for wait in hang.waits if not wait.waits_for)
    what = _what(first.operation, first.group)
    within = [
        wait.rank
        for wait in hang.waits
        if not wait.waits_for and _what(wait.operation, wait.group) == what
    ]
    reached = set(within)
    while (
        more := {wait.rank for wait in hang.waits if reached.intersection(wait.waits_for)} - reached
    ):
        reached |= more
    where = "at the network"
    if not _tells_ranks(first):
        where = "for a rank without a dump, then at the network"
    told = (
        f"{_ranks(within, first='Rank')} {'is' if len(within) == 1 else 'are'} in {what}, "
        f"{_for_whom(first)}, and it does not end: look {where}."
    )
    if behind := sorted(reached.difference(within)):
        verb = "waits" if len(behind) == 1 else "wait"
        them = "it" if len(within) == 1 else "them"
        told += f" {_ranks(behind, first='Rank')} {verb} for {them}."
    return told


def _advice(hang: Hang) -> Iterator[str]:
    for rank in hang.never_came[:_MOST_RANKS]:
        if rank in hang.without_dump:
            yield f"Rank {rank} left no dump: look at its log, it may have died."
        elif operation := hang.last.get(rank):
            yield from _wrapped(
                f"Look at rank {rank}: the last that it began was "
                f"{_what(operation, hang.groups[operation.group])}, at "
                f"{_time(operation.created_ns)}"
                f"{', ' + _short(operation.place) if operation.place else ''}."
            )
        else:
            yield f"Look at rank {rank}: it began no operation at all."
    others = sorted(set(hang.without_dump) - set(hang.never_came))
    if others:
        yield f"{_ranks(others, first='Rank')} left no dump."


def _told(operation: Operation) -> dict[str, object]:
    told = asdict(operation)
    return {
        "operation": told["name"],
        "sequence": told["sequence"],
        "peer": told["peer"],
        "state": told["state"],
        "sizes": told["sizes"],
        "since": _time(operation.created_ns),
        "created_ns": told["created_ns"],
        "place": told["place"],
    }


def _what(operation: Operation, group: Group) -> str:
    match operation.name:
        case "coalesced":
            return f"batch #{operation.sequence} of {group.title}"
        case "send":
            return f"send #{operation.sequence} of {group.title} to rank {operation.peer}"
        case "recv":
            return f"recv #{operation.sequence} of {group.title} from rank {operation.peer}"
    return f"{operation.name} #{operation.sequence} of {group.title}"


def _for_whom(wait: Wait) -> str:
    if wait.operation.name == "coalesced" and not wait.parts:
        return "whose parts no dump has any more"
    if not wait.waits_for:
        return f"to which all {'' if _tells_ranks(wait) else 'that left a dump '}have come"
    has = "has" if len(wait.waits_for) == 1 else "have"
    match wait.operation.name:
        case "recv":
            return "which has not sent"
        case "send":
            return "which does not receive"
    return f"{_ranks(wait.waits_for)} {has} not come"


def _tells_ranks(wait: Wait) -> bool:
    """Whether the dumps tell who takes part."""
    return wait.group.tells_ranks or wait.operation.is_p2p


def _ranks(ranks: Sequence[int], first: str = "rank") -> str:
    """`ranks 0, 1, 2, ... (8 in all)`."""
    found = list(dict.fromkeys(ranks))
    told = ", ".join(map(str, found[:_MOST_RANKS]))
    more = f", ... ({len(found)} in all)" if len(found) > _MOST_RANKS else ""
    return f"{first}{'s' if len(found) > 1 else ''} {told}{more}"


def _time(time_ns: int) -> str:
    if time_ns <= 0:
        return "an unknown time"
    try:
        return f"{datetime.fromtimestamp(time_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return "an unknown time"


def _short(place: str) -> str:
    """Of a path its end, which tells most."""
    return place if len(place) <= 60 else "..." + place[-57:]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text[:_MOST_TEXT], _WIDTH, subsequent_indent="  ")
