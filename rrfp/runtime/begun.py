"""What a rank begins, told to its flight record: a task, or a wait and what that is for."""

from collections.abc import Sequence

from rrfp.runtime.owed import owed
from rrfp.runtime.protocols import Agreement
from rrfp.schedule.causes import Cause
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.tasks import Task
from rrfp.trace.records import BegunRecord, Doing


def begun_task(now_ns: int, step: int, task: Task) -> BegunRecord:
    stage, kind, microbatch = task
    return BegunRecord(now_ns, now_ns, step, Doing.TASK, kind, stage, microbatch)


def begun_wait(now_ns: int, step: int, cause: Cause) -> BegunRecord:
    return BegunRecord(now_ns, now_ns, step, cause)


def explained(
    wait: BegunRecord, dispatcher: Dispatcher, agreement: Agreement, pp_ranks: Sequence[int]
) -> BegunRecord:
    """The wait with the task whose output it is for, and the rank that owes it. Takes time linear
    in the tasks of the step."""
    story = dispatcher.story()
    best = () if story.best_waiting is None else (story.best_waiting,)
    for waiting in (*best, *story.tasks):
        for stage, kind, microbatch in waiting.lacks:
            pp_rank = dispatcher.shape.rank_of(stage)
            if pp_rank != dispatcher.rank:
                return wait._replace(
                    kind=kind, stage=stage, microbatch=microbatch, peer=pp_ranks[pp_rank]
                )
    return wait._replace(peer=next(iter(owed(dispatcher, agreement, pp_ranks)), -1))
