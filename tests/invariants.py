"""What must hold of every step, under any policy, computed from its history alone."""

from collections.abc import Mapping, Sequence

from rrfp.schedule.bounds import Sizes
from rrfp.schedule.order import Order
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from tests.virtual_time import History, Node, NodeHistory

F, B, W = Kind.F, Kind.B, Kind.W


def check_step(
    history: History,
    *,
    limit: int | None = None,
    hold: int | None = None,
    order: Order | None = None,
    sizes: Sizes | None = None,
    budgets: Sequence[int] | None = None,
) -> None:
    """Every task once and after its prerequisites, one at a time, D and the slots in use within
    their bounds, idle time accounted for, the counts right, one sequence in a group; and the
    step ended.

    `limit` is the limit on D (which chunks may overshoot by their number), `hold` is in slots,
    `sizes` are by stage, and `budgets` in bytes by rank.
    """
    shape = history.shape
    # D passes the limit only while a microbatch is finished whose forwards are not all run.
    limit = limit if limit is None or shape.num_chunks == 1 else limit + shape.num_chunks
    for node, happened in history.nodes.items():
        assert len(set(happened.tasks)) == len(happened.tasks), f"{node} ran a task twice"
        assert set(happened.tasks) <= set(shape.tasks_of(node.rank)), f"{node} ran another's task"
        _check_time(happened)
        _check_counts(shape, node, happened, limit, hold)
        if sizes is not None:
            _check_bytes(shape, node, happened, sizes, budgets)
        if order is not None:
            _check_places(order.rows[node.rank], happened)
    _check_sequences(history)
    _check_prerequisites(history)
    for node, happened in history.nodes.items():
        missing = set(shape.tasks_of(node.rank)) - set(happened.tasks)
        assert not missing, f"the step stalled; {node} did not run {sorted(missing)}"
    assert history.is_whole


def _check_time(happened: NodeHistory) -> None:
    """Tasks and waits, laid end to end, fill the time from 0 to the end of the last task."""
    intervals = [(start, end, 1) for start, end, _ in happened.ran]
    intervals += [(start, end, 0) for _, start, end in happened.waits]
    cursor = 0
    for start, end, _ in sorted(intervals):
        assert start == cursor, f"{cursor} to {start} is in no interval, or in two"
        cursor = end


def _check_counts(
    shape: Shape, node: Node, happened: NodeHistory, limit: int | None, hold: int | None
) -> None:
    depth = held = 0
    frees = W if shape.splits_backward else B
    keeps = B in shape.kinds  # Without a backward nothing is kept for it.
    for _, _, run in happened.ran:
        task = run.task
        depth += (task.kind is F) - (task.kind is B)
        held += (task.kind is F and keeps) - (task.kind is frees)
        counted = (run.depth, run.held)
        assert counted == (depth, held), f"{task} states {counted}, not {(depth, held)}"
        assert limit is None or depth <= limit, f"D is {depth} on {node}, above {limit}"
        assert hold is None or held <= hold, f"{node} uses {held} slots of {hold}"
        assert shape.stage_of(node.rank, run.chunk) == task.stage, f"{task} in chunk {run.chunk}"


def _check_bytes(
    shape: Shape,
    node: Node,
    happened: NodeHistory,
    sizes: Sizes,
    budgets: Sequence[int] | None,
) -> None:
    kept: dict[tuple[int, int], int] = {}
    for _, _, run in happened.ran:
        stage, kind, microbatch = run.task
        if kind is F and B in shape.kinds:
            kept[stage, microbatch] = sizes.kept[stage][microbatch]
        elif kind is B and shape.splits_backward:
            if sizes.owed is not None:
                kept[stage, microbatch] = sizes.owed[stage][microbatch]
        elif kind is not F:
            del kept[stage, microbatch]
        used = sum(kept.values())
        assert run.held_bytes == used, f"{run.task} states {run.held_bytes} bytes, not {used}"
        budget = None if budgets is None else budgets[node.rank]
        assert budget is None or used <= budget, f"{node} uses {used} bytes of {budget}"


def _check_places(row: tuple[Task, ...], happened: NodeHistory) -> None:
    unfinished = list(row)
    for _, _, run in happened.ran:
        place = (row.index(run.task), unfinished.index(run.task))
        unfinished.remove(run.task)
        stated = (run.hint_position, run.skipped)
        assert stated == place, f"{run.task} states place and skipped {stated}, not {place}"


def _check_sequences(history: History) -> None:
    for rank, groups in enumerate(history.groups):
        for leader, *followers in groups:
            sequence = history.nodes[Node(rank, leader)].tasks
            for member in followers:
                tasks = history.nodes[Node(rank, member)].tasks
                same = tasks == sequence[: len(tasks)]
                assert same, f"{Node(rank, member)} left its group's sequence"


def _check_prerequisites(history: History) -> None:
    ends_of: dict[int, dict[Task, int]] = {}
    for node, happened in history.nodes.items():
        ends = ends_of.setdefault(node.member, {})
        ends.update((ran.run.task, ran.end_ns) for ran in happened.ran)
    for node, happened in history.nodes.items():
        for start, _, run in happened.ran:
            for needed in history.shape.prerequisites(run.task):
                _check_prerequisite(ends_of[node.member], run.task, start, needed)


def _check_prerequisite(ends: Mapping[Task, int], task: Task, start: int, needed: Task) -> None:
    end = ends.get(needed)
    assert end is not None, f"{task} ran and {needed}, which it needs, did not"
    assert end <= start, f"{task} ran before {needed}, which it needs, had ended"
