"""What the tasks of a rank's last steps took and kept, taken from its records as they come.

Imports no torch.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind
from rrfp.trace.records import Phase, PhaseRecord, Record, TaskRecord
from rrfp.trace.steps import is_evaluation

Numbers = npt.NDArray[np.float64]

NUM_ROWS = 5
"""Of a table: the times of F, B and W, what is kept from F on, and what is owed to W, in ns and
bytes."""
_KINDS = (Kind.F, Kind.B, Kind.W)


class MeasuredTasks:
    """Stands between a schedule and who takes its records, and remembers the last whole step."""

    def __init__(self, record: Callable[[Record], None]) -> None:
        self._record = record
        self._tasks: list[TaskRecord] = []
        self._whole: tuple[list[TaskRecord], int] | None = None

    def record(self, record: Record) -> None:
        """Take a record; any thread may call this, and tasks come from one."""
        if isinstance(record, TaskRecord) and not is_evaluation(record.step):
            if self._tasks and self._tasks[0].step != record.step:
                self._tasks = []
            self._tasks.append(record)
        elif (
            isinstance(record, PhaseRecord)
            and record.phase == Phase.SCHEDULE
            and not is_evaluation(record.step)
        ):
            self._whole, self._tasks = (self._tasks, record.budget_bytes), []
        self._record(record)

    def table(self, shape: Shape) -> Numbers:
        """The last whole step on this rank, `NUM_ROWS` times chunks times microbatches, and its
        bound in bytes behind them; zeros where nothing was measured, or another shape."""
        size = NUM_ROWS * shape.num_chunks * shape.num_microbatches
        found = np.zeros(size + 1)
        if self._whole is None or len(self._whole[0]) != shape.num_tasks_of_a_rank:
            return found
        tasks, budget = self._whole
        rows = found[:size].reshape(NUM_ROWS, shape.num_chunks, shape.num_microbatches)
        before = 0
        for task in sorted(tasks):
            if task.chunk >= shape.num_chunks or task.microbatch >= shape.num_microbatches:
                return np.zeros(size + 1)
            place = task.chunk, task.microbatch
            rows[(_KINDS.index(Kind(task.kind)), *place)] = task.end_ns - task.start_ns
            if task.kind == Kind.F:
                rows[(3, *place)] = max(0, task.held_bytes - before)
            elif task.kind == Kind.B:
                rows[(4, *place)] = max(0.0, rows[(3, *place)] - (before - task.held_bytes))
            before = task.held_bytes
        found[size] = budget
        return found
