"""What stalled ranks tell each other: for each rank, why it waits, for what, and who owes it.

A rank that has waited too long calls for rows; every rank that waits looks now and then whether
somebody has called, and publishes its row. A rank that runs a task, or is gone, has none. All of
it goes through torch's store, and none of it happens before a rank has waited for a while.
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Protocol

from torch.distributed import Store

LOOK_S = 0.5
"""A rank that waits looks so often whether another one calls for rows."""
GATHER_S = 1.5
"""A rank that calls waits so long for the rows of the others; it covers two of their looks."""
GATHER_LOOK_S = 0.1
"""It looks so often whether they are all there."""

_NUM_LISTED = 6


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
    """What it lacks, and of whom."""


class StallBoard(Protocol):
    """Where the ranks that a stall may concern publish their rows. Never raises: a rank that
    stalls must be able to say so."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that may publish here."""
        ...

    def call(self, step: int) -> None:
        """Ask every rank that waits in this step for its row."""

    def is_called(self, step: int) -> bool: ...

    def publish(self, step: int, row: StallRow) -> None: ...

    def has_all_rows(self, step: int) -> bool: ...

    def rows(self, step: int) -> list[StallRow]:
        """What was published in this step."""
        ...


class StoreStallBoard:
    """A board in torch's store (`StallBoard`), below a key prefix that serves one opening."""

    def __init__(self, store: Store, prefix: str, ranks: Iterable[int]) -> None:
        self.ranks = sorted(ranks)
        self._store = store
        self._prefix = prefix

    def call(self, step: int) -> None:
        # Here and below: without its store a rank still tells its own row.
        with suppress(RuntimeError):
            self._store.set(self._call_key(step), "")

    def is_called(self, step: int) -> bool:
        return self._has([self._call_key(step)])

    def publish(self, step: int, row: StallRow) -> None:
        with suppress(RuntimeError):
            self._store.set(self._row_key(step, row.rank), json.dumps(asdict(row)))

    def has_all_rows(self, step: int) -> bool:
        return self._has([self._row_key(step, rank) for rank in self.ranks])

    def rows(self, step: int) -> list[StallRow]:
        rows = []
        with suppress(RuntimeError):
            for rank in self.ranks:
                key = self._row_key(step, rank)
                if self._store.check([key]):
                    rows.append(StallRow(**json.loads(self._store.get(key))))
        return rows

    def _call_key(self, step: int) -> str:
        return f"{self._prefix}/stall/{step}/call"

    def _row_key(self, step: int, rank: int) -> str:
        return f"{self._prefix}/stall/{step}/row/{rank}"

    def _has(self, keys: list[str]) -> bool:
        try:
            return self._store.check(keys)
        except RuntimeError:
            return False


def listed(things: Sequence[object]) -> str:
    """The first few, and how many more there are."""
    text = ", ".join(map(str, things[:_NUM_LISTED])) or "-"
    num_more = len(things) - _NUM_LISTED
    return f"{text} and {num_more} more" if num_more > 0 else text


def grid(rows: Iterable[StallRow], ranks: Iterable[int]) -> str:
    """One line a rank, below a line of titles; a rank without a row stands there as silent."""
    row_of = {row.rank: row for row in rows}
    cells = [("rank", "pp_rank", "waits", "cause", "ready", "best waiting", "lacks")]
    silent = []
    for rank in sorted({*ranks, *row_of}):
        row = row_of.get(rank)
        if row is None:
            silent.append(rank)
            continue
        waits = f"{row.waited_s:.1f} s"
        cells.append(
            (
                *(str(rank), str(row.pp_rank), waits, row.cause),
                *(row.ready, row.best_waiting, row.lacks),
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    if silent:
        lines.append(
            f"no word of rank {', '.join(map(str, silent))}: not waiting for a message in this "
            "step, but running a task, past the step, or gone"
        )
    return "\n".join(lines)
