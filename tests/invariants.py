"""What must hold of every step, computed from its history without the dispatcher's books.

`check_step` holds for any policy, `check_decisions` recomputes every decision and every cause of a
lone rank naively, from nothing but the definitions.
"""

from collections.abc import Iterator

from rrfp.schedule.causes import Cause
from rrfp.schedule.dispatcher import Dispatch
from rrfp.schedule.hints import Hint, Turns
from rrfp.schedule.order import Order
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from tests.virtual_time import History, Node, NodeHistory

F, B, W = Kind.F, Kind.B, Kind.W


def check_step(history: History, *, limit: int | None = None, order: Order | None = None) -> None:
    """Every task once and after its prerequisites, one at a time, D within the limit, idle time
    accounted for, the counts right, and one sequence in a group; and the step ended."""
    shape = history.shape
    for node, happened in history.nodes.items():
        assert len(set(happened.tasks)) == len(happened.tasks), f"{node} ran a task twice"
        assert set(happened.tasks) <= set(shape.tasks_of(node.rank)), f"{node} ran another's task"
        _check_time(happened)
        _check_counts(shape, node, happened, limit, order)
        leader = history.nodes[Node(node.rank, 0)].tasks
        assert happened.tasks == leader[: len(happened.tasks)], f"{node} left its group's sequence"
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
    shape: Shape, node: Node, happened: NodeHistory, limit: int | None, order: Order | None
) -> None:
    depth = held = 0
    unfinished = list(order.rows[node.rank]) if order is not None else []
    frees = W if shape.splits_backward else B
    for _, _, run in happened.ran:
        task = run.task
        depth += {F: 1, B: -1, W: 0}[task.kind]
        held += (task.kind is F) - (task.kind is frees)
        counted = (run.depth, run.held)
        assert counted == (depth, held), f"{task} states {counted}, not {(depth, held)}"
        assert limit is None or depth <= limit, f"D is {depth} on {node}, above {limit}"
        assert shape.stage_of(node.rank, run.chunk) == task.stage, f"{task} in chunk {run.chunk}"
        place = (-1, -1)
        if order is not None:
            place = (order.rows[node.rank].index(task), unfinished.index(task))
            unfinished.remove(task)
        stated = (run.hint_position, run.skipped)
        assert stated == place, f"{task} states place and skipped {stated}, not {place}"


def _check_prerequisites(history: History) -> None:
    ends = {
        (node.member, ran.run.task): ran.end_ns
        for node, happened in history.nodes.items()
        for ran in happened.ran
    }
    for node, happened in history.nodes.items():
        for start, _, run in happened.ran:
            for needed in history.shape.prerequisites(run.task):
                end = ends.get((node.member, needed))
                assert end is not None, f"{run.task} ran and {needed}, which it needs, did not"
                assert end <= start, f"{run.task} ran before {needed}, which it needs, had ended"


def check_decisions(
    history: History, hint: Hint, order: Order, dispatch: Dispatch, limit: int | None
) -> None:
    """Each rank, without a group, ran what the definitions say and named each wait rightly."""
    for node, happened in history.nodes.items():
        rank = _NaiveRank(history.shape, node.rank, happened, hint, order, dispatch, limit)
        rank.check()


class _NaiveRank:
    """One rank's step, decided again by scanning everything at every moment."""

    def __init__(
        self,
        shape: Shape,
        rank: int,
        happened: NodeHistory,
        hint: Hint,
        order: Order,
        dispatch: Dispatch,
        limit: int | None,
    ) -> None:
        self._shape = shape
        self._rank = rank
        self._happened = happened
        self._hint = hint
        self._row = order.rows[rank]
        self._fixed = dispatch is Dispatch.FIXED
        self._limit = limit if B in shape.kinds else None
        self._done: list[Task] = []
        self._round_is_half_done = False

    def check(self) -> None:
        waits = iter(self._happened.waits)
        cursor = 0
        for start, end, run in self._happened.ran:
            while cursor < start:
                wait = next(waits)
                self._round_is_half_done = False
                for here in self._states_of_inputs(wait.start_ns, wait.end_ns):
                    assert self._choice(here) is None, f"{self._choice(here)} could have run"
                    assert wait.cause is self._cause(here), f"{wait} is {self._cause(here)}"
                cursor = wait.end_ns
            here = self._here(start)
            runnable = [task for task in here if not self._is_withheld(task)]
            choice = self._choice(here)
            assert run.task == choice, f"{run.task} is not the choice, which is {choice}"
            kinds = [task.kind for task in runnable]
            counted = (run.ready, run.ready_forwards, run.ready_backwards)
            assert counted == (len(kinds), kinds.count(F), kinds.count(B)), f"{run} miscounts"
            self._done.append(run.task)
            self._round_is_half_done = self._is_first_of_round(run.task)
            cursor = end

    def _states_of_inputs(self, start: int, end: int) -> Iterator[list[Task]]:
        moments = {start} | {time for time, _ in self._happened.arrivals if start <= time < end}
        for moment in sorted(moments):
            yield self._here(moment)

    def _here(self, now: int) -> list[Task]:
        """The unfinished tasks whose every input is here."""
        shape, done = self._shape, set(self._done)
        have = {task for time, task in self._happened.arrivals if time <= now}
        here = []
        for task in shape.tasks_of(self._rank):
            local = [
                needed
                for needed in shape.prerequisites(task)
                if shape.rank_of(needed.stage) == self._rank
            ]
            comes = len(local) < len(shape.prerequisites(task))
            if task not in done and done.issuperset(local) and (task in have or not comes):
                here.append(task)
        return here

    def _is_withheld(self, task: Task) -> bool:
        depth = sum({F: 1, B: -1, W: 0}[done.kind] for done in self._done)
        is_bound = not self._fixed and self._limit is not None
        return is_bound and task.kind is F and depth >= (self._limit or 0)

    def _choice(self, here: list[Task]) -> Task | None:
        if self._fixed:
            best = self._best_unfinished()
            return best if best in here else None
        runnable = [task for task in here if not self._is_withheld(task)]
        groups = [self._ranked(runnable, kind) for kind in self._turns()]
        if isinstance(self._hint, Order):
            by_place = sorted(runnable, key=self._hint.rows[self._rank].index)
            groups = [
                [task for task in by_place if task.kind is not W],
                [task for task in by_place if task.kind is W],
            ]
        return next((group[0] for group in groups if group), None)

    def _turns(self) -> list[Kind]:
        if not isinstance(self._hint, Turns):
            return []
        first, second = (F, B) if self._hint.first is F else (B, F)
        return [second, first, W] if self._round_is_half_done else [first, second, W]

    def _is_first_of_round(self, task: Task) -> bool:
        hint = self._hint
        return isinstance(hint, Turns) and hint.in_rounds and task.kind is hint.first

    def _ranked(self, tasks: list[Task], kind: Kind) -> list[Task]:
        def preference(task: Task) -> tuple[int, int]:
            chunk = self._shape.chunk_of(task.stage)
            return (chunk if kind is F else -chunk, task.microbatch)

        return sorted((task for task in tasks if task.kind is kind), key=preference)

    def _best_unfinished(self) -> Task:
        return next(task for task in self._row if task not in self._done)

    def _cause(self, here: list[Task]) -> Cause:
        if not self._done:
            return Cause.WARMUP
        if here:
            return Cause.ORDER if self._fixed else Cause.LIMIT
        best = self._best_unfinished()
        forward = Task(best.stage, F, best.microbatch)
        return Cause.BACKWARD_INPUT if forward in self._done else Cause.FORWARD_INPUT
