"""What stalled ranks report to each other: why each one waits, for what, and who owes it.

A rank that has waited almost too long calls for rows. Every waiting rank checks now and then for
calls and publishes its row; a rank that runs a task, or is gone, does not. Calls are numbered and a
row says which one it answers, because rows from before a rank's own call are stale. It all goes
through torch's store, and only after a rank has waited for a while.
"""

import json
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Protocol

from torch.distributed import Store

from rrfp.runtime.decoding import instance, integer, items, parsed

LOOK_S = 0.5
"""How often a waiting rank checks whether another one calls for rows."""
GATHER_S = 1.5
"""How long before giving up a rank calls for rows; the others check at least twice by then."""

_NUM_LISTED = 3
_WIDTH = 80
_TITLES = ("rank", "pp_rank", "waits", "cause", "ready", "best waiting", "lacks")


@dataclass(frozen=True, slots=True)
class StallRow:
    """A waiting rank's own account of its wait, as text."""

    rank: int
    """The global rank."""
    pp_rank: int
    waited_s: float
    """The time since anything last arrived."""
    cause: str
    ready: str
    """The tasks with all inputs here."""
    best_waiting: str
    """The hint's best task that lacks an input."""
    lacks: str
    """What that task lacks, and from whom; and what the ready tasks lack from the group."""


class StallBoard(Protocol):
    """Where the ranks that a stall may concern publish their rows. Never raises, because a stalled
    rank must be able to report it."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that may publish here."""
        ...

    def call(self, step: int) -> int:
        """Ask every rank that waits in this step for its row; returns the number of this call."""
        ...

    def num_calls(self, step: int) -> int: ...

    def publish(self, step: int, call: int, row: StallRow) -> None:
        """Answer the latest call, and with it those before."""

    def rows(self, step: int, call: int) -> list[StallRow]:
        """The answers to this call."""
        ...


class StoreStallBoard:
    """A `StallBoard` in torch's store, below a key prefix used by one opening only."""

    def __init__(self, store: Store, prefix: str, ranks: Iterable[int]) -> None:
        self.ranks = sorted(ranks)
        self._store = store
        self._prefix = prefix

    def call(self, step: int) -> int:
        return self._count(step, 1)

    def num_calls(self, step: int) -> int:
        return self._count(step, 0)

    def publish(self, step: int, call: int, row: StallRow) -> None:
        with suppress(RuntimeError):
            self._store.set(self._row_key(step, row.rank), json.dumps([call, asdict(row)]))

    def rows(self, step: int, call: int) -> list[StallRow]:
        rows = []
        with suppress(RuntimeError):
            for rank in self.ranks:
                key = self._row_key(step, rank)
                if not self._store.check([key]):
                    continue
                # Skip a row that cannot be read: a stalled rank reports what it knows.
                with suppress(ValueError):
                    answered, cells = items(parsed(self._store.get(key)), 2)
                    if integer(answered) >= call:
                        rows.append(instance(StallRow, cells))
        return rows

    def _count(self, step: int, num_new: int) -> int:
        # Without the store a rank still reports its own row. ValueError: the value is not a number.
        with suppress(RuntimeError, ValueError):
            return self._store.add(f"{self._prefix}/stall/{step}/calls", num_new)
        return 0

    def _row_key(self, step: int, rank: int) -> str:
        return f"{self._prefix}/stall/{step}/row/{rank}"


def listed(things: Sequence[object]) -> str:
    """The first few things, and how many more there are."""
    text = ", ".join(map(str, things[:_NUM_LISTED])) or "-"
    num_more = len(things) - _NUM_LISTED
    return f"{text} and {num_more} more" if num_more > 0 else text


def grid(rows: Iterable[StallRow], ranks: Iterable[int]) -> str:
    """One line per rank, below a line of titles, within 80 columns: cells that do not fit go on
    lines of their own. Ranks without a row are listed as silent."""
    row_of = {row.rank: row for row in rows}
    lines, silent = [_TITLES], []
    for rank in sorted({*ranks, *row_of}):
        row = row_of.get(rank)
        if row is None:
            silent.append(rank)
            continue
        numbers = (str(rank), str(row.pp_rank), f"{row.waited_s:.1f} s")
        lines.append((*numbers, row.cause, row.ready, row.best_waiting, row.lacks))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    titles, num_titles = _beside(_TITLES, widths)
    texts = [titles]
    for cells in lines[1:]:
        text, num_beside = _beside(cells[:num_titles], widths)
        texts.append(text)
        texts += [
            _wrapped(f"{title}: {cell}", indent=6)
            for title, cell in zip(_TITLES[num_beside:], cells[num_beside:], strict=True)
        ]
    if silent:
        texts.append(
            _wrapped(
                f"no word of rank {', '.join(map(str, silent))}: not waiting for a message in this "
                "step, but running a task, past the step, or gone"
            )
        )
    return "\n".join(texts)


def _beside(cells: Sequence[str], widths: Sequence[int]) -> tuple[str, int]:
    """The leading cells that fit on one line, and how many they are."""
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
    num_beside = len(padded)
    while len(line := "  ".join(padded[:num_beside]).rstrip()) > _WIDTH:
        num_beside -= 1
    return line, num_beside


def _wrapped(text: str, indent: int = 0) -> str:
    margin = " " * indent
    return textwrap.fill(
        text, _WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False
    )
