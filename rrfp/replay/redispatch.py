"""A recorded step decided again: each rank's stimuli, handed to a dispatcher like its own."""

from collections.abc import Iterable, Iterator

from rrfp.errors import RrfpError
from rrfp.replay.memory.kept import sizes_of_rank
from rrfp.replay.recorded import RecordedRun
from rrfp.replay.step_records import Members
from rrfp.schedule.dispatcher import Dispatcher, Group
from rrfp.schedule.hold import counts_microbatches
from rrfp.schedule.instructions import RunTask
from rrfp.schedule.tasks import Task, format_task
from rrfp.trace.kept_bytes import are_known
from rrfp.trace.records import StimulusRecord
from rrfp.trace.steps import step_name
from rrfp.trace.stimuli import stimulus_of, task_of


def decisions(
    stimuli: Iterable[StimulusRecord], dispatcher: Dispatcher
) -> Iterator[tuple[StimulusRecord, Task | None]]:
    """Hand one step's stimuli, in their recorded order, to a fresh dispatcher; yields each with the
    task that the dispatcher then runs, if any."""
    for record in stimuli:
        task = None
        for instruction in dispatcher.handle(record.time_ns, stimulus_of(record)):
            if isinstance(instruction, RunTask):
                task = instruction.task
        yield record, task


def redispatch(
    run: RecordedRun, members: Members, member: int = 0
) -> Iterator[tuple[StimulusRecord, Task | None]]:
    """Decide a step of one rank again; yields each stimulus with the task that the rank then ran.

    Raises RrfpError at the first task that differs from the recorded one, and for a run of
    Megatron's own schedules, which no dispatcher steered.
    """
    rank = members[member]
    split = run.shape.splits_backward
    num_decided = 0
    for stimulus, decided in decisions(rank.stimuli, dispatcher_of(run, members, member)):
        if decided is not None:
            record = rank.tasks[num_decided]
            if decided != task_of(record):
                raise RrfpError(
                    f"what rank {rank.info.rank} took in leads to "
                    f"{format_task(decided, split=split)} where it ran "
                    f"{format_task(task_of(record), split=split)} in {step_name(record.step)}: its "
                    "settings are not those of the trace, or it is of another version of rrfp; "
                    "see 'rrfp trace check' and record it again"
                )
            num_decided += 1
        yield stimulus, decided
    if num_decided < len(rank.tasks):
        raise RrfpError(
            f"what the dispatcher of rank {rank.info.rank} took in leads to {num_decided} "
            f"of the {len(rank.tasks)} tasks that it ran; see 'rrfp trace check'"
        )


def dispatcher_of(run: RecordedRun, members: Members, member: int = 0) -> Dispatcher:
    """A dispatcher such as that rank had at the start of a step."""
    rank = members[member]
    if not rank.stimuli:
        raise RrfpError(
            f"rank {rank.info.rank} recorded nothing that a dispatcher took in, as Megatron's own "
            "schedules have none; replay a run of --dispatch ready or fixed"
        )
    if not all(0 <= stimulus.member < len(members) for stimulus in rank.stimuli):
        raise RrfpError(
            f"rank {rank.info.rank} took in what arrived at a rank that is not of its group; see "
            "'rrfp trace check'"
        )
    group = Group(len(members), member == 0) if rank.is_in_group else None
    if counts_microbatches(run.policy.hold):
        return Dispatcher(run.shape, rank.info.pp_rank, run.policy, group)
    budget = rank.budget_bytes or run.policy.hold_bytes
    if budget is None or not are_known(rank.tasks):
        raise RrfpError(
            f"rank {rank.info.rank} ran with a hold of {run.policy.hold}, and the trace does not "
            "tell its bytes; record it again with this version of rrfp"
        )
    sizes = sizes_of_rank(run.shape, rank)
    return Dispatcher(run.shape, rank.info.pp_rank, run.policy, group, sizes=sizes, budget=budget)
