"""Named orders played in time, and what programs that know no microbatches record of them."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from rrfp.schedule.named_hints import ORDERS
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task

TASK_NS = 1_000_000
TRANSFER_NS = 10_000
NUM_OPERATORS = 3
US = 1_000


class Timed(NamedTuple):
    start_ns: int
    end_ns: int
    step: int
    task: Task


class Told(NamedTuple):
    """An event as a profiler names it."""

    start_ns: int
    end_ns: int
    name: str
    sequence: int | None


def played(name: str, shape: Shape, num_steps: int) -> list[list[Timed]]:
    """What each rank runs when: each task once its rank is free and its input has come."""
    rows = ORDERS[name].on(shape).rows
    ran: list[list[Timed]] = [[] for _ in rows]
    ended: dict[tuple[int, Task], int] = {}
    free = [0] * len(rows)
    for step in range(num_steps):
        left = [list(row) for row in rows]
        while any(left):
            for rank, row in enumerate(left):
                while row and (ready := _ready_ns(shape, row[0], step, ended)) is not None:
                    start_ns = max(free[rank], ready) + TRANSFER_NS
                    end_ns = start_ns + TASK_NS * (2 if row[0].kind is Kind.B else 1)
                    ran[rank].append(Timed(start_ns, end_ns, step, row[0]))
                    ended[step, row[0]] = free[rank] = end_ns
                    row.pop(0)
        free = [max(free)] * len(rows)
    return ran


def _ready_ns(
    shape: Shape, task: Task, step: int, ended: dict[tuple[int, Task], int]
) -> int | None:
    needs = []
    if task.kind is Kind.F and task.stage > 0:
        needs.append(Task(task.stage - 1, Kind.F, task.microbatch))
    if task.kind is Kind.B:
        needs.append(Task(task.stage, Kind.F, task.microbatch))
        if task.stage + 1 < shape.num_stages:
            needs.append(Task(task.stage + 1, Kind.B, task.microbatch))
    if any((step, need) not in ended for need in needs):
        return None
    return max((ended[step, need] for need in needs), default=0)


def operators(ran: list[Timed]) -> Iterator[Told]:
    """The operators of a rank, numbered by autograd, with a receive before each task and a send
    after it."""
    number = 0
    numbers: dict[tuple[int, int, int], range] = {}
    unknown = range(1 << 40, (1 << 40) + NUM_OPERATORS)
    for start_ns, end_ns, step, task in ran:
        key = step, task.stage, task.microbatch
        yield Told(start_ns - TRANSFER_NS, start_ns, "c10d::recv_", number)
        part_ns = (end_ns - start_ns) // NUM_OPERATORS
        if task.kind is Kind.F:
            numbers[key] = range(number, number + NUM_OPERATORS)
            names = [("aten::addmm", sequence) for sequence in numbers[key]]
            number += NUM_OPERATORS
        else:
            node = "autograd::engine::evaluate_function: AddmmBackward0"
            names = [(node, sequence) for sequence in reversed(numbers.get(key, unknown))]
        for index, (name, sequence) in enumerate(names):
            begin_ns = start_ns + index * part_ns
            is_last = index == NUM_OPERATORS - 1
            yield Told(begin_ns, end_ns if is_last else begin_ns + part_ns, name, sequence)
        yield Told(end_ns, end_ns + TRANSFER_NS // 2, "c10d::send", number)


def plain_profile(ran: list[Timed], rank: int, num_ranks: int, **more: Any) -> dict[str, Any]:
    """A profile with the operators of a rank, and nothing that names tasks."""
    events = [
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": name,
            "pid": 7,
            "tid": 7,
            "ts": start_ns / US,
            "dur": (end_ns - start_ns) / US,
            "args": {"Sequence number": sequence, "Fwd thread id": 0},
        }
        for start_ns, end_ns, name, sequence in operators(ran)
    ]
    told = {"rank": rank, "world_size": num_ranks, **more}
    return {"schemaVersion": 1, "distributedInfo": told, "traceEvents": events}


def told_tasks(recording: Any, rank: int) -> list[tuple[int, int, Task]]:
    """The tasks of an imported run: their lengths, steps and names, in their order."""
    return [
        (task.end_ns - task.start_ns, task.step, Task(task.stage, Kind(task.kind), task.microbatch))
        for task in recording.ranks[rank].tasks
    ]


def expected_tasks(ran: list[Timed]) -> list[tuple[int, int, Task]]:
    return [(end_ns - start_ns, step, task) for start_ns, end_ns, step, task in ran]
