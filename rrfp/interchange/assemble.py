"""Makes a recording from the spans of another program's trace.

Messages and waits that the trace lacks are derived from the tasks. If transfers do not block, the
recording also gets the stimuli of a dispatcher that is bound to the run's order, so that the run
can be replayed.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory

from rrfp.errors import RrfpError
from rrfp.interchange.spans import Link, RankSpans, RunSpans, Source, TaskSpan, TransferSpan, listed
from rrfp.schedule.named_hints import ORDERS
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.shape import SPLIT_BACKWARD, WHOLE_BACKWARD, Shape, shape_of_stages
from rrfp.schedule.tasks import Cause, ComputeIdle, InputArrived, Kind, Task
from rrfp.trace.perfetto.format import MOST_OF_A_KIND
from rrfp.trace.perfetto.writer import write_run_files
from rrfp.trace.records import (
    FixedScheduleCounts,
    Phase,
    RankInfo,
    RankRecords,
    ReceiveRecord,
    Recording,
    SendRecord,
    StimulusRecord,
    TaskRecord,
    WaitRecord,
    evaluation_step,
    is_evaluation,
    stimulus_record,
    task_of,
)
from rrfp.trace.run_dir import RunDir, create_run_dir, update_latest
from rrfp.trace.run_json import POLICY, policy_without_dispatcher

# The order in which an imported run's ranks ran their tasks, and the stimuli to replay it.


AS_RECORDED = "as recorded"
"""The name of an order that is not one of rrfp's."""


def is_steady(ranks: list[RankRecords]) -> bool:
    """True if each rank ran all its training steps in the same order; ranks may differ."""
    return all(len(set(_rows(rank))) <= 1 for rank in ranks)


def _rows(rank: RankRecords) -> list[tuple[Task, ...]]:
    """The tasks of each training step of a rank, in order. Evaluations, without backwards, are
    skipped."""
    rows: defaultdict[int, list[Task]] = defaultdict(list)
    for task in rank.tasks:
        rows[task.step].append(task_of(task))
    return [tuple(row) for row in rows.values() if any(task.kind is Kind.B for task in row)]


def stimuli_of(rank: RankRecords) -> Iterator[StimulusRecord]:
    """Yield the stimuli with which a dispatcher bound to the rank's order runs each task as early
    as possible. With them the run can be replayed over links that do not block."""
    arrivals: defaultdict[int, deque[tuple[int, Task]]] = defaultdict(deque)
    for receive in sorted(rank.receives, key=lambda receive: receive.end_ns):
        arrivals[receive.step].append((receive.end_ns, task_of(receive)))
    needed = {(step, task) for step, found in arrivals.items() for _, task in found}
    free_ns = {phase.step: phase.start_ns for phase in rank.phases if phase.phase == Phase.SCHEDULE}
    for record in rank.tasks:
        step, task = record.step, task_of(record)
        now_ns = free_ns.get(step, record.start_ns)
        coming = arrivals[step]
        while coming and (coming[0][0] <= now_ns or (step, task) in needed):
            came_ns, arrived = coming.popleft()
            if came_ns > now_ns:
                yield stimulus_record(now_ns, step, ComputeIdle())
                now_ns = came_ns
            needed.discard((step, arrived))
            yield stimulus_record(came_ns, step, InputArrived(arrived))
        yield stimulus_record(now_ns, step, ComputeIdle())
        free_ns[step] = record.end_ns


def order_name(shape: Shape, ranks: list[RankRecords]) -> str:
    """The name of the first hint whose order every rank followed in all its training steps, or
    `AS_RECORDED`, also if steps are incomplete."""
    rows = [(rank.info.pp_rank, row) for rank in ranks for row in _rows(rank)]
    if not rows or any(len(row) != shape.num_tasks_of_a_rank for _, row in rows):
        return AS_RECORDED
    for name, order in ORDERS.items():
        if order.fits(shape):
            wanted = order.for_shape(shape).rows
            if all(row == wanted[pp_rank] for pp_rank, row in rows):
                return name
    return AS_RECORDED


# The description of an imported run, in the form of `run.json`.


def settings_of(run: RunSpans, ranks: list[RankRecords], source: Source) -> dict[str, object]:
    """The content of `run.json` for an imported run. Its dispatch is `fixed` if any rank has
    stimuli, otherwise `megatron`; its hint is the order's name, or `AS_RECORDED`."""
    shape = _shape(run)
    # Without a dispatcher, the run is replayed as a fixed order; without stimuli, with transfers
    # that block, as in Megatron's own schedules.
    dispatch = Dispatch.FIXED if any(rank.stimuli for rank in ranks) else Dispatch.MEGATRON
    hint = AS_RECORDED if shape is None else order_name(shape, ranks)
    return {
        "settings": {
            "dispatch": str(dispatch),
            "hint": hint,
            "device": source.device,
            "pp": 1 + max(rank.info.pp_rank for rank in ranks),
            "chunks": len(ranks[0].info.stages),
        },
        POLICY: policy_without_dispatcher(hint, dispatch),
        "imported": {
            "source": source.name,
            "files": source.num_files,
            "tells_waits": all(rank.tells_waits for rank in run.ranks),
            "transfers_block": source.transfers_block,
        },
        **({} if source.world_size is None else {"world": source.world_size}),
        "ranks": [
            {
                "stages": list(rank.info.stages),
                **{
                    name: getattr(rank.info, name)
                    for name in ("rank", "pp_rank", "tp_rank", "dp_rank", "host", "pid")
                },
            }
            for rank in ranks
        ],
    }


def _shape(run: RunSpans) -> Shape | None:
    """The shape of the run's pipeline, with the microbatches that have a backward; None if its
    stages are placed neither in a loop nor in a V."""
    stages = {rank.info.pp_rank: rank.info.stages for rank in run.ranks}
    tasks = [task for rank in run.ranks for task in rank.tasks]
    splits = any(task.kind is Kind.W for task in tasks)
    # Count backwards, because evaluations have none and may have more microbatches.
    last = max((task.microbatch for task in tasks if task.kind is Kind.B), default=0)
    return shape_of_stages(stages, 1 + last, SPLIT_BACKWARD if splits else WHOLE_BACKWARD)


# The records of an imported run, from its spans.
#
# A rank that idles before a task waits for its input until the producing task ends. The rest of the
# idle time has the cause `transfer` while the trace shows a send or receive of the rank, and
# otherwise no cause. A message is sent when its producing task ends. It arrives when the last wait
# before its consuming task ends, or at once without such a wait. Its size is unknown.


def records_of(run: RunSpans) -> list[RankRecords]:
    """The records of each rank, including derived messages, of unknown size, and derived waits,
    which are also added to the spans."""
    records = {id(rank): _of_rank(run, rank) for rank in run.ranks}
    sequences: defaultdict[Link, int] = defaultdict(int)
    for message in sorted(_messages(run), key=lambda each: (each.sent_ns, each.task)):
        link = message.sender.info.rank, message.receiver.info.rank
        sequence = sequences[link]
        sequences[link] += 1
        task = message.task
        of = task.step, task.kind, task.stage, task.microbatch
        records[id(message.sender)].sends.append(
            SendRecord(message.sent_ns, message.sent_ns, *of, link[1], sequence, 0)
        )
        records[id(message.receiver)].receives.append(
            ReceiveRecord(message.began_ns, message.arrived_ns, *of, link[0], sequence, 0)
        )
    return list(records.values())


def _of_rank(run: RunSpans, rank: RankSpans) -> RankRecords:
    """The records of one rank, without messages. Adds derived waits to `rank`, unless its waits are
    complete."""
    tasks = _task_records(rank.info, rank.tasks)
    if not rank.tells_waits:
        rank.waits = sorted([*rank.waits, *_derived_waits(run, rank)])
    return RankRecords(rank.info, tasks, rank.waits, phases=sorted(rank.phases))


def _derived_waits(run: RunSpans, rank: RankSpans) -> Iterator[WaitRecord]:
    """Yield the waits of the idle time before a rank's tasks: for the input until the producing
    task ends, then `TRANSFER` while a transfer of the rank lasts. The rest gets no wait."""
    transfers = sorted(rank.transfers)
    ends_ns = list(accumulate((span.end_ns for span in transfers), max))
    for start_ns, task in run.gaps(rank):
        found = run.sender(rank, task)
        input_ns = start_ns
        if found is not None and found[1].end_ns > start_ns:
            input_ns = min(found[1].end_ns, task.start_ns)
            cause = Cause.FORWARD_INPUT if task.kind is Kind.F else Cause.BACKWARD_INPUT
            yield WaitRecord(start_ns, input_ns, task.step, cause)
        for begin_ns, end_ns in _parts(transfers, ends_ns, input_ns, task.start_ns):
            yield WaitRecord(begin_ns, end_ns, task.step, Cause.TRANSFER)


@dataclass(frozen=True, slots=True)
class _Message:
    """A task's output, sent to the rank of the next task."""

    sent_ns: int
    began_ns: int
    """The time at which both its ranks were ready for the transfer."""
    arrived_ns: int
    task: TaskSpan
    """The task that consumes it."""
    sender: RankSpans
    receiver: RankSpans


def _messages(run: RunSpans) -> Iterator[_Message]:
    """Yield the message to each task whose input comes from another rank. It is sent when the
    producing task ends, at the latest when the consuming task begins, and arrives when the last
    wait before that task ends, or at once."""
    for rank in run.ranks:
        waits = sorted(rank.waits, key=lambda wait: wait.end_ns)
        ends_ns = [wait.end_ns for wait in waits]
        gaps = {task: start_ns for start_ns, task in run.gaps(rank)}
        for task in rank.tasks:
            if (found := run.sender(rank, task)) is None:
                continue
            sender, sent = found
            sent_ns = min(sent.end_ns, task.start_ns)
            began_ns = arrived_ns = sent_ns
            last = bisect_left(ends_ns, task.start_ns + 1) - 1
            # Ignore a wait that ended before the rank was free for the task.
            if last >= 0 and ends_ns[last] > gaps.get(task, task.start_ns):
                arrived_ns = max(sent_ns, ends_ns[last])
                began_ns = min(arrived_ns, max(sent_ns, waits[last].start_ns))
            yield _Message(sent_ns, began_ns, arrived_ns, task, sender, rank)


def _parts(
    spans: list[TransferSpan], ends_ns: list[int], start_ns: int, end_ns: int
) -> Iterator[tuple[int, int]]:
    """Yield the parts of an interval that spans, sorted by start, cover. `ends_ns` has the latest
    end up to each span."""
    position_ns = start_ns
    index = bisect_left(ends_ns, start_ns + 1)
    while index < len(spans) and spans[index].start_ns < end_ns:
        begin_ns = max(position_ns, spans[index].start_ns)
        stop_ns = min(spans[index].end_ns, end_ns)
        if begin_ns < stop_ns:
            yield begin_ns, stop_ns
            position_ns = stop_ns
        index += 1


def _task_records(info: RankInfo, tasks: list[TaskSpan]) -> list[TaskRecord]:
    """The task records, with the counters that a fixed schedule has. Raises RrfpError for a task on
    a stage that the rank does not hold."""
    release = Kind.W if any(task.kind is Kind.W for task in tasks) else Kind.B
    counts: defaultdict[int, FixedScheduleCounts] = defaultdict(
        lambda: FixedScheduleCounts(release)
    )
    records = []
    for task in tasks:
        if task.stage not in info.stages:
            raise RrfpError(
                f"rank {info.rank} ran a task of stage {task.stage} and says that it holds "
                f"{', '.join(map(str, info.stages))}; import one run at a time"
            )
        chunk = info.stages.index(task.stage)
        counted = counts[task.step].ran(task.kind)
        records.append(TaskRecord(*task[:4], task.stage, chunk, task.microbatch, *counted))
    return records


# Recognizing evaluations in traces that number them among the training steps.


_Place = tuple[int, int]
"""A rank and one of its stages."""


def number_evaluations(ranks: list[RankSpans]) -> None:
    """Renumber complete steps without backwards as evaluations, in their order; other steps keep
    their numbers. If waits are not in the trace, its last step does not count as complete. Changes
    nothing if no step has a backward, or if the trace itself marks evaluations."""
    kinds: defaultdict[int, set[Kind]] = defaultdict(set)
    ran: defaultdict[int, defaultdict[_Place, set[int]]] = defaultdict(lambda: defaultdict(set))
    for rank in ranks:
        for task in rank.tasks:
            kinds[task.step].add(task.kind)
            ran[task.step][rank.info.rank, task.stage].add(task.microbatch)
    if all(found == {Kind.F} for found in kinds.values()) or any(map(is_evaluation, kinds)):
        return
    finished = set.intersection(
        *({each.step for each in rank.phases if each.phase == Phase.SCHEDULE} for rank in ranks)
    )
    # Skip steps that may have lost their backwards: unfinished ones, and the last one if the trace
    # does not have the ends of schedule calls.
    if not all(rank.tells_waits for rank in ranks):
        finished -= {max(kinds)}
    places = {(rank.info.rank, stage) for rank in ranks for stage in rank.info.stages}
    tested = [
        step
        for step in sorted(finished)
        if kinds[step] == {Kind.F} and _is_whole(ran[step], places)
    ]
    numbers = {step: evaluation_step(number) for number, step in enumerate(tested)}
    for rank in ranks if numbers else ():
        rank.renumber(numbers)


def _is_whole(microbatches: Mapping[_Place, set[int]], places: set[_Place]) -> bool:
    """True if all stages of all ranks ran, and ran the same microbatches."""
    return microbatches.keys() == places and len(set(map(frozenset, microbatches.values()))) == 1


@dataclass(frozen=True, slots=True)
class Imported:
    """A recording, and notes for the user on how it was made, one sentence each."""

    recording: Recording
    notes: tuple[str, ...]


def assemble(ranks: list[RankSpans], source: Source) -> Imported:
    """Make a recording from the spans of all ranks, which it changes: numbers evaluations, aligns
    clocks, trims waits, and counts times from 0. Adds stimuli if transfers do not block and every
    rank's order is steady. Raises RrfpError if the spans cannot be from one run, or contain no
    task."""
    ranks = sorted(ranks, key=lambda rank: rank.info.rank)
    if not any(rank.tasks for rank in ranks):
        raise RrfpError(f"the {source.name} has no task; import one that was taken in a step")
    _check_places(ranks, source)
    number_evaluations(ranks)
    notes = [*source.notes, *_missing(ranks, source)]
    run = RunSpans(ranks)
    notes += run.align_clocks()
    run.trim_input_waits()
    run.move_start_to_zero()
    records = records_of(run)
    if not source.transfers_block and is_steady(records):
        for rank in records:
            rank.stimuli = list(stimuli_of(rank))
    return Imported(Recording(settings_of(run, records, source), records), tuple(notes))


def _check_places(ranks: list[RankSpans], source: Source) -> None:
    """Raise RrfpError if two ranks have the same place, a rank is beyond the world size, or a
    number is impossible."""
    found: dict[tuple[int, int, int], int] = {}
    for rank in ranks:
        info = rank.info
        place = info.pp_rank, info.tp_rank, info.dp_rank
        most = max(
            *(info.rank, *place, *info.stages),
            *(max(task.stage, task.microbatch) for task in rank.tasks),
        )
        if most >= MOST_OF_A_KIND:
            raise RrfpError(
                f"the {source.name} has the number {most} for a rank, a stage or a microbatch; "
                f"no run has as many as {MOST_OF_A_KIND}, so it is damaged"
            )
        if source.world_size is not None and info.rank >= source.world_size:
            raise RrfpError(
                f"the {source.name} is of rank {info.rank}, of a run of {source.world_size} ranks; "
                "import the files of one run"
            )
        if place in found:
            raise RrfpError(
                f"ranks {found[place]} and {info.rank} both say that they are pp {place[0]}, tp "
                f"{place[1]}, dp {place[2]}; import one run at a time"
            )
        found[place] = info.rank


def _missing(ranks: list[RankSpans], source: Source) -> Iterator[str]:
    """Yield a note if ranks of the run are missing; none if the world size is unknown."""
    present = {rank.info.rank for rank in ranks}
    missing = [rank for rank in range(source.world_size or 0) if rank not in present]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        yield (
            f"{len(missing)} of {source.world_size} ranks {are} missing ({listed(missing)}): what "
            "is said of waits for them, and of the run as a whole, is said without them"
        )


# The run directory of an import.


_HINT = "imported"


def check_run_dir(out: Path, *, force: bool) -> None:
    """Raise UsageError if `out` is a file, or exists and `force` is not given. Creates and removes
    nothing."""
    if out.exists() and not (force and out.is_dir()):
        create_run_dir(out, force, _HINT)


def write_run(out: Path, recording: Recording, *, force: bool) -> None:
    """Write a recording as a run. With `force`, a run that `out` holds stays until the new one is
    complete, and is then replaced. Raises UsageError as `check_run_dir` does, and RrfpError if the
    run cannot be written."""
    check_run_dir(out, force=force)
    try:
        _write(out, recording, force=force)
    except OSError as error:
        raise RrfpError(f"the run {out} could not be written: {error.strerror}") from error


def _write(out: Path, recording: Recording, *, force: bool) -> None:
    """Write a run to a temporary directory within `out`, then remove the run in `out`, if any, and
    move the new files into place. Updates the link `latest`. A new `out` that stays empty is
    removed. May raise OSError."""
    is_new = not out.exists()
    run = create_run_dir(out, force, _HINT) if is_new else RunDir(out)
    try:
        with TemporaryDirectory(prefix=".import-", dir=out) as directory:
            part = RunDir(Path(directory))
            write_run_files(part, recording)
            create_run_dir(out, force=True, hint=_HINT)
            part.run_json.replace(run.run_json)
            part.trace.replace(run.trace)
            update_latest(out.parent)
    finally:
        if is_new and not any(out.iterdir()):
            out.rmdir()
