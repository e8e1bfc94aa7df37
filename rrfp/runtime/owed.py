"""What a waiting rank lacks, and who owes it."""

from collections.abc import Sequence
from functools import reduce
from operator import or_

from rrfp.runtime.protocols import Agreement
from rrfp.runtime.stall import StallRow, listed
from rrfp.schedule.causes import Cause
from rrfp.schedule.dispatcher import Dispatcher


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
    story = dispatcher.story()
    best = story.best_waiting
    lacks = []
    for needed in () if best is None else best.lacks:
        needed_rank = dispatcher.shape.rank_of(needed.stage)
        is_own = needed_rank == pp_rank
        lacks.append(f"{needed} here" if is_own else f"{needed} from rank {pp_ranks[needed_rank]}")
    debts: dict[int, str] = {}
    for here in story.ready:
        for peer, what in agreement.owed(here.missing_members).items():
            debts.setdefault(peer, f"for {here.task} {what} from rank {peer}")
    return StallRow(
        rank=pp_ranks[pp_rank],
        pp_rank=pp_rank,
        waited_s=waited_s,
        cause=cause,
        ready=listed([each.task for each in story.ready]),
        best_waiting="-" if best is None else str(best.task),
        lacks="; ".join(listed(part) for part in (lacks, [*debts.values()]) if part) or "-",
    )
