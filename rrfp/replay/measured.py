"""What the steps of a recorded run consisted of: tasks, the delays before them, and messages.

Measured of each step are

- every task's own time. Ranks that run it together count as one: from when the last of them began
  it to when the last of them ended it.
- the *overhead* before it: from when it could run to its start. That is the runtime's own work, a
  group's round of agreement, and waiting for a core.
- every message's transfer: from the end of the task that sends it, or from when the link was free,
  to when its receiver could act on it. A message that a rank knew of at a decision had come by
  then, and one that came between two decisions had not come at the first. So a dispatcher that
  meets these times decides as the run's did.
- what each microbatch kept in memory on each stage, where the run tells.
- the tail from the last task of all to the end of the step's window: gradient synchronisation.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from rrfp.replay.measured_step import Means, MeasuredStep, ReplicaStep, means_of
from rrfp.replay.meetings import Span, meet, spans_of
from rrfp.replay.memory.kept import budgets_of, sizes_of_replica
from rrfp.replay.recorded import RecordedRun
from rrfp.replay.redispatch import redispatch
from rrfp.replay.step_records import Members, StepRecords
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Task
from rrfp.trace.stimuli import task_of


def measure(run: RecordedRun) -> list[MeasuredStep]:
    """Measure the steps of a recorded run.

    Raises RrfpError when what a rank's dispatcher took in does not lead to the tasks that it ran.
    """
    return [_measure(run, records) for records in run.steps]


def _measure(run: RecordedRun, records: StepRecords) -> MeasuredStep:
    start_ns, end_ns = records.window
    take = _blocking_replica if run.is_blocking else _replica
    last_ns = max(
        task.end_ns
        for replica in records.replicas
        for members in replica
        for rank in members
        for task in rank.tasks
    )
    replicas = tuple(
        replace(
            take(run, replica, start_ns),
            sizes=sizes_of_replica(run.shape, replica),
            budgets=budgets_of(replica),
        )
        for replica in records.replicas
    )
    return MeasuredStep(end_ns - start_ns, replicas, end_ns - last_ns)


def _replica(run: RecordedRun, replica: tuple[Members, ...], start_ns: int) -> ReplicaStep:
    """A step over asynchronous links."""
    spans: dict[Task, Span] = {}
    could_run_ns: dict[Task, int] = {}
    came_ns: dict[Task, int] = {}
    for members in replica:
        of_rank = spans_of(members)
        could_run, came = _decided(run, members, of_rank, start_ns)
        spans |= of_rank
        could_run_ns |= could_run
        came_ns |= came
    transfers_ns = _transfers_ns(run.shape, spans, came_ns)
    return ReplicaStep(
        {task: end_ns - begin_ns for task, (begin_ns, end_ns) in spans.items()},
        {
            task: max(0, begin_ns - max(could_run_ns[task], came_ns.get(task, 0)))
            for task, (begin_ns, _) in spans.items()
        },
        transfers_ns,
        _members_ns(replica),
    )


def _decided(
    run: RecordedRun, members: Members, spans: dict[Task, Span], start_ns: int
) -> tuple[dict[Task, int], dict[Task, int]]:
    """When each task of a rank could run, and when the rank could act on each of its messages.

    The leader's stimuli tell which messages each decision knew of. A decision that follows a task
    directly counts from the end of that task, and one that ends a wait from when it was taken.
    Every member must decide again as it did.
    """
    leader = members[0]
    for follower in range(1, len(members)):
        deque(redispatch(run, members, follower), maxlen=0)
    received_ns: dict[Task, int] = {}
    for rank in members:
        for receive in rank.receives:
            task = task_of(receive)
            received_ns[task] = max(receive.end_ns, received_ns.get(task, 0))
    could_run_ns: dict[Task, int] = {}
    came_ns: dict[Task, int] = {}
    # A rank may enter late, and cannot act on anything before that.
    free_ns = start_ns
    last_ns = leader.entry_ns - 1
    waits = False
    earlier: list[Task] = []
    latest: list[Task] = []
    for stimulus, decided in redispatch(run, members):
        if stimulus.name == "InputArrived":
            latest.append(task_of(stimulus))
            continue
        if stimulus.name == "Announced":
            continue  # It makes nothing ready.
        if decided is None:
            waits = waits or stimulus.name == "ComputeIdle"
            earlier += latest
            latest = []
            continue
        now_ns = max(stimulus.time_ns, free_ns) if waits else free_ns
        if not could_run_ns and (earlier or latest):
            now_ns = max(now_ns, leader.entry_ns)
        could_run_ns[decided] = now_ns
        for task in earlier:
            came_ns[task] = min(max(received_ns.get(task, now_ns), last_ns + 1), now_ns)
        for task in latest:
            raw_ns = now_ns if waits else received_ns.get(task, now_ns)
            came_ns[task] = min(max(raw_ns, last_ns + 1), now_ns)
        earlier, latest = [], []
        last_ns, free_ns, waits = now_ns, spans[decided][1], False
    return could_run_ns, came_ns


def _blocking_replica(run: RecordedRun, replica: tuple[Members, ...], start_ns: int) -> ReplicaStep:
    """A step over blocking transfers."""
    entries_ns = [start_ns] * len(replica)
    ranks = meet(run.shape, replica, entries_ns, are_recorded=not run.is_imported)
    meetings = {each.task: each for rank in ranks for gap in rank.meetings for each in gap}
    overheads_ns: dict[Task, int] = {}
    for rank in ranks:
        for gap, (task, (begin_ns, _)) in enumerate(rank.spans.items()):
            passed_ns = [each.passed_ns for each in rank.meetings[gap]]
            could_run_ns = max(rank.free_ns[gap], *(ns for ns in passed_ns if ns <= begin_ns), 0)
            overheads_ns[task] = max(0, begin_ns - could_run_ns)
    return ReplicaStep(
        {
            task: end_ns - begin_ns
            for rank in ranks
            for task, (begin_ns, end_ns) in rank.spans.items()
        },
        overheads_ns,
        {task: each.passed_ns - each.began_ns for task, each in meetings.items()},
        _members_ns(replica),
    )


def _transfers_ns(
    shape: Shape, spans: Mapping[Task, Span], came_ns: dict[Task, int]
) -> dict[Task, int]:
    """How long each message took on its link, one after the other. A message that seems to have
    come before it can have left comes when it leaves, in `came_ns` too."""
    transfers_ns: dict[Task, int] = {}
    free_ns: dict[tuple[int, int], int] = {}
    for task, (_, end_ns) in sorted(spans.items(), key=lambda item: item[1][1]):
        receiver = shape.receiver(task)
        link = None if receiver is None else shape.link(receiver)
        if receiver is None or link is None:
            continue
        leaves_ns = max(end_ns, free_ns.get(link, 0))
        came_ns[receiver] = free_ns[link] = max(leaves_ns, came_ns[receiver])
        transfers_ns[receiver] = came_ns[receiver] - leaves_ns
    return transfers_ns


def _members_ns(replica: tuple[Members, ...]) -> dict[int, Means]:
    """The mean times of each rank's own tasks, where several ranks run them together."""
    return {
        rank.info.rank: means_of(
            {task_of(task): task.end_ns - task.start_ns for task in rank.tasks}
        )
        for members in replica
        if len(members) > 1
        for rank in members
    }
