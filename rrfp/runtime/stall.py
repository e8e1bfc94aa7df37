"""The table of waiting ranks in the error that a stalled rank raises.

A rank that has waited almost too long calls for rows. Every waiting rank checks regularly for calls
and publishes its row; a rank that runs a task, or has ended, does not. Calls are numbered, and a
row names the call that it answers, because a row from before a rank's own call is stale. All this
goes through torch's store, and only after a rank has waited for some time.
"""

import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import reduce
from operator import or_
from threading import Thread
from typing import TypeVar

from torch.distributed import Store

from rrfp.runtime.agreement import GroupAgreement
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.tasks import Cause
from rrfp.strict_json import instance, integer, items, parsed

LOOK_S = 0.5
"""Interval at which a waiting rank checks whether another one calls for rows."""
GATHER_S = 1.5
"""Time before the end of its wait at which a rank calls for rows; the others check at least twice
in that time."""

_ANSWER_S = 0.5
"""Timeout of a call to the store. The rank handles no events meanwhile."""

T = TypeVar("T")

_NUM_LISTED = 3
_WIDTH = 80
_TITLES = ("rank", "pp_rank", "waits", "cause", "ready", "best waiting", "lacks")


@dataclass(frozen=True, slots=True)
class StallRow:
    """A waiting rank's own description of its wait, as text."""

    rank: int
    """The global rank."""
    pp_rank: int
    waited_s: float
    """The time since anything last arrived."""
    cause: str
    ready: str
    """The tasks whose inputs are all here."""
    best_waiting: str
    """The hint's best task that lacks an input."""
    lacks: str
    """The inputs that this task lacks, and the messages that the ready tasks lack from the group,
    each with its sender."""


class StallBoard:
    """The rows of ranks that may be involved in a stall, in torch's store below a key prefix.

    No call raises or takes long: a stalled rank must be able to report the stall, and to notice
    that a peer is lost. If the host of the store is gone, a call to the store may never return. So
    each call runs in a thread of its own, and there is no further call until it has returned.
    """

    def __init__(self, store: Store, prefix: str, ranks: Iterable[int]) -> None:
        """`prefix` must not be used for another run; `ranks` are those that may publish rows."""
        self.ranks = sorted(ranks)
        self._store = store
        self._prefix = prefix
        self._asking: Thread | None = None

    def call(self, step: int) -> int:
        """Ask every rank that waits in this step for its row; return the number of this call, or 0
        if the store does not answer."""
        return self._count(step, 1)

    def num_calls(self, step: int) -> int:
        """Return the number of calls in this step so far, by any rank; 0 if the store does not
        answer."""
        return self._count(step, 0)

    def publish(self, step: int, call: int, row: StallRow) -> None:
        """Publish this rank's row, in place of an earlier one, as the answer to this call and all
        earlier ones."""
        self._ask_store(
            lambda: self._store.set(self._row_key(step, row.rank), json.dumps([call, asdict(row)])),
            None,
        )

    def rows(self, step: int, call: int) -> list[StallRow]:
        """Return the rows that answer this call or a later one; empty if the store does not answer.
        Rows that cannot be read are skipped."""
        return self._ask_store(lambda: self._read_rows(step, call), [])

    def _read_rows(self, step: int, call: int) -> list[StallRow]:
        """Read from the store, by rank, the rows that answer this call or a later one. Rows that
        cannot be read are skipped."""
        rows = []
        for rank in self.ranks:
            key = self._row_key(step, rank)
            if not self._store.check([key]):
                continue
            # Skip a row that cannot be read: a stalled rank reports the others.
            with suppress(ValueError):
                answered, cells = items(parsed(self._store.get(key)), 2)
                if integer(answered) >= call:
                    rows.append(instance(StallRow, cells))
        return rows

    def _count(self, step: int, num_new: int) -> int:
        """Add `num_new` to the number of calls in this step, and return the sum; 0 if the store
        does not answer."""
        return self._ask_store(
            lambda: self._store.add(f"{self._prefix}/stall/{step}/calls", num_new), 0
        )

    def _ask_store(self, ask: Callable[[], T], default: T) -> T:
        """Call `ask` in a thread, and return its result; `default` on failure, after 0.5 s, or
        while an earlier call has not returned."""
        if self._asking is not None and self._asking.is_alive():
            return default
        answers: list[T] = []

        def run() -> None:
            # Without the store a rank still reports its own row. ValueError: the value of a count
            # is not a number.
            with suppress(RuntimeError, ValueError):
                answers.append(ask())

        self._asking = Thread(target=run, name="rrfp-stall", daemon=True)
        self._asking.start()
        self._asking.join(_ANSWER_S)
        return answers[0] if answers else default

    def _row_key(self, step: int, rank: int) -> str:
        """Return the store's key for a rank's row in a step."""
        return f"{self._prefix}/stall/{step}/row/{rank}"


def format_first(things: Sequence[object]) -> str:
    """Format the first 3 things, and the number of others; '-' without any."""
    text = ", ".join(map(str, things[:_NUM_LISTED])) or "-"
    num_more = len(things) - _NUM_LISTED
    return f"{text} and {num_more} more" if num_more > 0 else text


def format_rows(rows: Iterable[StallRow], ranks: Iterable[int]) -> str:
    """Format the rows by rank, below a line of titles, within 80 columns: cells that do not fit go
    on lines of their own, each with its title. A last sentence lists the ranks without a row."""
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
    titles, num_titles = _join_fitting(_TITLES, widths)
    texts = [titles]
    for cells in lines[1:]:
        text, num_fitting = _join_fitting(cells[:num_titles], widths)
        texts.append(text)
        texts += [
            _wrap(f"{title}: {cell}", indent=6)
            for title, cell in zip(_TITLES[num_fitting:], cells[num_fitting:], strict=True)
        ]
    if silent:
        texts.append(
            _wrap(
                f"no word of rank {', '.join(map(str, silent))}: not waiting for a message in this "
                "step, but running a task, past the step, or gone"
            )
        )
    return "\n".join(texts)


def _join_fitting(cells: Sequence[str], widths: Sequence[int]) -> tuple[str, int]:
    """Join the leading cells, padded to their columns, that fit into 80 columns; also return their
    number."""
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
    num_fitting = len(padded)
    while len(line := "  ".join(padded[:num_fitting]).rstrip()) > _WIDTH:
        num_fitting -= 1
    return line, num_fitting


def _wrap(text: str, indent: int = 0) -> str:
    """Wrap text to 80 columns, with every line indented by this many spaces."""
    margin = " " * indent
    return textwrap.fill(
        text, _WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False
    )


def pending_messages(
    dispatcher: Dispatcher, agreement: GroupAgreement, pp_ranks: Sequence[int]
) -> dict[int, str]:
    """Describe, by the sending global rank, what this rank still waits for in this step: the
    group's messages, and the outputs that its unfinished tasks lack; of each sender only the first,
    the group's before others."""
    unfinished = dispatcher.unfinished()
    pending = agreement.pending_messages(reduce(or_, (missing for _, missing in unfinished), 0))
    shape = dispatcher.shape
    for task, missing in unfinished:
        sender = shape.sender(task)
        if missing & 1 and sender is not None:
            peer = pp_ranks[shape.rank_of(sender.stage)]
            pending.setdefault(peer, f"the output of {sender}, which {task} needs")
    return pending


def make_stall_row(
    dispatcher: Dispatcher,
    agreement: GroupAgreement,
    pp_ranks: Sequence[int],
    cause: Cause,
    waited_s: float,
) -> StallRow:
    """Describe this rank's current wait: the ready tasks, the hint's best task that lacks an input,
    and what these lack from which rank; of each list only the first 3 are named."""
    pp_rank = dispatcher.rank
    status = dispatcher.status()
    best = status.best_waiting
    lacks = []
    for needed in () if best is None else best.lacks:
        needed_rank = dispatcher.shape.rank_of(needed.stage)
        is_own = needed_rank == pp_rank
        lacks.append(f"{needed} here" if is_own else f"{needed} from rank {pp_ranks[needed_rank]}")
    pending: dict[int, str] = {}
    for here in status.ready:
        for peer, what in agreement.pending_messages(here.missing_members).items():
            pending.setdefault(peer, f"for {here.task} {what} from rank {peer}")
    return StallRow(
        rank=pp_ranks[pp_rank],
        pp_rank=pp_rank,
        waited_s=waited_s,
        cause=cause,
        ready=format_first([each.task for each in status.ready]),
        best_waiting="-" if best is None else str(best.task),
        lacks="; ".join(format_first(part) for part in (lacks, [*pending.values()]) if part) or "-",
    )
