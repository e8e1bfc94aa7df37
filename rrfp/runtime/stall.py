"""What stalled ranks report to each other: why each one waits, for what, and who owes it.

A rank that has waited almost too long calls for rows. Every waiting rank checks now and then for
calls and publishes its row; a rank that runs a task, or is gone, does not. Calls are numbered and a
row says which one it answers, because rows from before a rank's own call are stale. It all goes
through torch's store, and only after a rank has waited for a while.
"""

import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import reduce
from operator import or_
from threading import Thread
from typing import Protocol, TypeVar

from torch.distributed import Store

from rrfp.runtime.protocols import Agreement
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.tasks import Cause
from rrfp.strict_json import instance, integer, items, parsed

LOOK_S = 0.5
"""How often a waiting rank checks whether another one calls for rows."""
GATHER_S = 1.5
"""How long before giving up a rank calls for rows; the others check at least twice by then."""

_ANSWER_S = 0.5
"""How long the store may take to answer. Nothing that arrives is taken in meanwhile."""

T = TypeVar("T")

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
    """Where the ranks that a stall may concern publish their rows. Never raises and never takes
    long, because a stalled rank must be able to report it, and to hear that a peer is lost."""

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
    """A `StallBoard` in torch's store, below a key prefix used by one opening only.

    The host of the store may have gone, with nothing to say so. A call to it then never returns, so
    each is made in a thread of its own, and none while one has not returned.
    """

    def __init__(self, store: Store, prefix: str, ranks: Iterable[int]) -> None:
        self.ranks = sorted(ranks)
        self._store = store
        self._prefix = prefix
        self._asking: Thread | None = None

    def call(self, step: int) -> int:
        return self._count(step, 1)

    def num_calls(self, step: int) -> int:
        return self._count(step, 0)

    def publish(self, step: int, call: int, row: StallRow) -> None:
        self._answer(
            lambda: self._store.set(self._row_key(step, row.rank), json.dumps([call, asdict(row)])),
            None,
        )

    def rows(self, step: int, call: int) -> list[StallRow]:
        return self._answer(lambda: self._rows(step, call), [])

    def _rows(self, step: int, call: int) -> list[StallRow]:
        rows = []
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
        return self._answer(
            lambda: self._store.add(f"{self._prefix}/stall/{step}/calls", num_new), 0
        )

    def _answer(self, ask: Callable[[], T], without: T) -> T:
        """What the store answers; `without` if it fails, or does not answer in time."""
        if self._asking is not None and self._asking.is_alive():
            return without
        answers: list[T] = []

        def note() -> None:
            # Without the store a rank still reports its own row. ValueError: the value of a count
            # is not a number.
            with suppress(RuntimeError, ValueError):
                answers.append(ask())

        self._asking = Thread(target=note, name="rrfp-stall", daemon=True)
        self._asking.start()
        self._asking.join(_ANSWER_S)
        return answers[0] if answers else without

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


# What a waiting rank lacks, and who owes it.


def owed(dispatcher: Dispatcher, agreement: Agreement, pp_ranks: Sequence[int]) -> dict[int, str]:
    """By global rank: what it still owes this rank in this step."""
    unfinished = dispatcher.unfinished()
    debts = agreement.owed(reduce(or_, (missing for _, missing in unfinished), 0))
    shape = dispatcher.shape
    for task, missing in unfinished:
        sender = shape.sender(task)
        if missing & 1 and sender is not None:
            peer = pp_ranks[shape.rank_of(sender.stage)]
            debts.setdefault(peer, f"the output of {sender}, which {task} needs")
    return debts


def stall_row(
    dispatcher: Dispatcher,
    agreement: Agreement,
    pp_ranks: Sequence[int],
    cause: Cause,
    waited_s: float,
) -> StallRow:
    """This rank's account of a wait."""
    pp_rank = dispatcher.rank
    status = dispatcher.status()
    best = status.best_waiting
    lacks = []
    for needed in () if best is None else best.lacks:
        needed_rank = dispatcher.shape.rank_of(needed.stage)
        is_own = needed_rank == pp_rank
        lacks.append(f"{needed} here" if is_own else f"{needed} from rank {pp_ranks[needed_rank]}")
    debts: dict[int, str] = {}
    for here in status.ready:
        for peer, what in agreement.owed(here.missing_members).items():
            debts.setdefault(peer, f"for {here.task} {what} from rank {peer}")
    return StallRow(
        rank=pp_ranks[pp_rank],
        pp_rank=pp_rank,
        waited_s=waited_s,
        cause=cause,
        ready=listed([each.task for each in status.ready]),
        best_waiting="-" if best is None else str(best.task),
        lacks="; ".join(listed(part) for part in (lacks, [*debts.values()]) if part) or "-",
    )
