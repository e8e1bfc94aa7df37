"""The order in which an imported run's ranks ran their tasks, and what replays them."""

from collections import defaultdict, deque
from collections.abc import Iterator

from rrfp.schedule.hints.orders import ORDERS
from rrfp.schedule.shape import Shape
from rrfp.schedule.stimuli import ComputeIdle, InputArrived
from rrfp.schedule.tasks import Kind, Task
from rrfp.trace.records import Phase, RankRecords, StimulusRecord
from rrfp.trace.stimuli import record_of, task_of

AS_RECORDED = "as recorded"
"""The name of an order that is not one of ours."""


def is_steady(ranks: list[RankRecords]) -> bool:
    """Whether every rank ran all its training steps in the same order."""
    return all(len(set(_rows(rank))) <= 1 for rank in ranks)


def _rows(rank: RankRecords) -> list[tuple[Task, ...]]:
    """What a rank ran in each step that trained. Evaluations have no backwards."""
    rows: defaultdict[int, list[Task]] = defaultdict(list)
    for task in rank.tasks:
        rows[task.step].append(task_of(task))
    return [tuple(row) for row in rows.values() if any(task.kind is Kind.B for task in row)]


def stimuli_of(rank: RankRecords) -> Iterator[StimulusRecord]:
    """What a dispatcher bound to the rank's order would have taken in to run each task when it
    could. With these the run can be replayed over links that do not block."""
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
                yield record_of(now_ns, step, ComputeIdle())
                now_ns = came_ns
            needed.discard((step, arrived))
            yield record_of(came_ns, step, InputArrived(arrived))
        yield record_of(now_ns, step, ComputeIdle())
        free_ns[step] = record.end_ns


def order_name(shape: Shape, ranks: list[RankRecords]) -> str:
    """The name of the order in which every rank ran all its steps, or `AS_RECORDED`."""
    rows = [(rank.info.pp_rank, row) for rank in ranks for row in _rows(rank)]
    if not rows or any(len(row) != shape.num_tasks_of_a_rank for _, row in rows):
        return AS_RECORDED
    for name, order in ORDERS.items():
        if order.fits(shape):
            wanted = order.on(shape).rows
            if all(row == wanted[pp_rank] for pp_rank, row in rows):
                return name
    return AS_RECORDED
