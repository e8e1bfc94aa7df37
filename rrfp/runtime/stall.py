"""What stalled ranks tell each other: for each rank, why it waits, for what, and who owes it.

A rank that has nearly waited too long calls for rows; every rank that waits looks now and then
whether somebody has called, and publishes its row. A rank that runs a task, or is gone, has none.
Calls are numbered, and a row says which one it answers: what was told before this rank's own call
is no news to it. All of it goes through torch's store, and none of it happens before a rank has
waited for a while.
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
"""A rank that waits looks so often whether another one calls for rows."""
GATHER_S = 1.5
"""A rank calls so long before it gives up; it covers two looks of the others."""

_NUM_LISTED = 3
_WIDTH = 80
_TITLES = ("rank", "pp_rank", "waits", "cause", "ready", "best waiting", "lacks")


@dataclass(frozen=True, slots=True)
class StallRow:
    """A waiting rank's own account of its wait, in words."""

    rank: int
    """Among all ranks of the run."""
    pp_rank: int
    waited_s: float
    """Since anything last arrived."""
    cause: str
    ready: str
    """The tasks whose every input is here."""
    best_waiting: str
    """The hint's best task that lacks an input."""
    lacks: str
    """What it lacks, and of whom; and what of the group's the ready tasks lack."""


class StallBoard(Protocol):
    """Where the ranks that a stall may concern publish their rows. Never raises: a rank that
    stalls must be able to say so."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that may publish here."""
        ...

    def call(self, step: int) -> int:
        """Ask every rank that waits in this step for its row; the number of this call."""
        ...

    def num_calls(self, step: int) -> int: ...

    def publish(self, step: int, call: int, row: StallRow) -> None:
        """Answer a call, the latest one, and with it those before."""

    def rows(self, step: int, call: int) -> list[StallRow]:
        """The answers to this call."""
        ...


class StoreStallBoard:
    """A board in torch's store (`StallBoard`), below a key prefix that serves one opening."""

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
                # A row that cannot be read is no row: whoever stalls tells what it knows.
                with suppress(ValueError):
                    answered, cells = items(parsed(self._store.get(key)), 2)
                    if integer(answered) >= call:
                        rows.append(instance(StallRow, cells))
        return rows

    def _count(self, step: int, num_new: int) -> int:
        # Without its store a rank still tells its own row; ValueError: what stands there is no
        # number.
        with suppress(RuntimeError, ValueError):
            return self._store.add(f"{self._prefix}/stall/{step}/calls", num_new)
        return 0

    def _row_key(self, step: int, rank: int) -> str:
        return f"{self._prefix}/stall/{step}/row/{rank}"


def listed(things: Sequence[object]) -> str:
    """The first few, and how many more there are."""
    text = ", ".join(map(str, things[:_NUM_LISTED])) or "-"
    num_more = len(things) - _NUM_LISTED
    return f"{text} and {num_more} more" if num_more > 0 else text


def grid(rows: Iterable[StallRow], ranks: Iterable[int]) -> str:
    """One line a rank, below a line of titles, and within 80 columns: what does not fit beside the
    rest stands below it. A rank without a row is told as silent."""
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
    """The cells from the first on that fit into one line, and how many they are."""
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
