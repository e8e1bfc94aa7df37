"""What a run's own tasks teach about the next ones: the time of a task, and what a microbatch
keeps, as sums of nonnegative multiples of its features, for each stage and kind.

What was measured counts less with every step that follows, so that a model keeps up with a run that
changes. It takes a fixed room, and a step is learned in a few milliseconds.

Imports no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rrfp.planning.memory_model import nonnegative_least_squares
from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind
from rrfp.simulate.engine import TaskTimes
from rrfp.trace.records import Phase, PhaseRecord, Record, TaskRecord, is_evaluation

# What the tasks of a rank's last steps took and kept, taken from its records as they come.
#
# Imports no torch.


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


_FORGETS = 0.9
"""What a step counts for after another one."""
_TOLERANCE = 1e-10
_LEAST = 1.0
"""The least time in ns, and size in bytes, that relative errors are taken of."""
_NORMAL_MAD = 1.4826
"""The standard deviation of normal draws over their median distance from the median."""
_MOST_NOISE = 1.0


class _Fit:
    """One amount as a function of features, by the sums that least squares needs."""

    def __init__(self, num_features: int) -> None:
        self._gram = np.zeros((num_features, num_features))
        self._right = np.zeros(num_features)
        self.coefficients = np.zeros(num_features)

    def learn(self, features: Numbers, amounts: Numbers) -> None:
        """Take in a step's microbatches; amounts count by their relative error."""
        rows = features / np.maximum(amounts, _LEAST)[:, None]
        shares = amounts / np.maximum(amounts, _LEAST)
        self._gram = _FORGETS * self._gram + rows.T @ rows
        self._right = _FORGETS * self._right + rows.T @ shares
        scale = np.sqrt(np.maximum(np.diag(self._gram), np.finfo(float).tiny))
        values, vectors = np.linalg.eigh(self._gram / np.outer(scale, scale))
        is_known = values > _TOLERANCE * values[-1]
        roots = np.sqrt(values[is_known])
        matrix = roots[:, None] * vectors[:, is_known].T
        target = (vectors[:, is_known].T @ (self._right / scale)) / roots
        self.coefficients = nonnegative_least_squares(matrix, target) / scale


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a step's microbatches are expected to cost, in the order of the data."""

    times: TaskTimes
    sizes: ActivationSizes | None
    noise: float
    """The standard deviation of the logarithm of real times over predicted ones."""


class CostModel:
    """The costs of one pipeline's steps."""

    def __init__(self) -> None:
        self._fits: dict[tuple[int, int], _Fit] = {}
        """By row of the measured table, and stage."""
        self._form: tuple[int, ...] = ()
        self._noise: float | None = None
        self._keeps = False

    @property
    def is_fitted(self) -> bool:
        return bool(self._fits)

    @property
    def noise(self) -> float:
        """How far predictions were off lately."""
        return 0.0 if self._noise is None else self._noise

    def learn(self, features: Numbers, measured: Numbers) -> None:
        """Take in a step: the features of its microbatches, `[microbatch][feature]`, and what was
        measured, `[row][stage][microbatch]` with the rows of
        `rrfp.planning.forecast`."""
        form = (features.shape[1], measured.shape[1])
        if form != self._form:
            # Another model, or another function of features.
            self.__init__()  # type: ignore[misc]
            self._form = form
        if self.is_fitted:
            now = self._error(features, measured)
            before = now if self._noise is None else self._noise
            self._noise = before + (now - before) / 4
        self._keeps = bool(measured[3].any())
        for row, of_row in enumerate(measured):
            for stage, amounts in enumerate(of_row):
                fit = self._fits.setdefault((row, stage), _Fit(features.shape[1]))
                fit.learn(features, amounts)
        if self._noise is None:
            self._noise = self._error(features, measured)

    def predict(self, features: Numbers) -> Predicted:
        """The costs of a step with these features. Call it when fitted, with as many features."""
        table = np.rint(self._table(features)).astype(np.int64)
        forward, input_gradient, weight_gradient, kept, owed = table
        sizes = None
        if self._keeps:
            sizes = ActivationSizes(kept.tolist(), np.minimum(owed, kept).tolist())
        times = TaskTimes(
            np.maximum(forward, 1).tolist(), input_gradient.tolist(), weight_gradient.tolist()
        )
        return Predicted(times, sizes, self.noise)

    def _table(self, features: Numbers) -> Numbers:
        num_stages = self._form[1]
        rows = range(len(self._fits) // num_stages)
        coefficients = np.array(
            [[self._fits[row, stage].coefficients for stage in range(num_stages)] for row in rows]
        )
        return np.asarray(coefficients @ features.T)

    def _error(self, features: Numbers, measured: Numbers) -> float:
        """The spread of what tasks took over what was predicted: by the median, as a few outliers
        say little of the others."""
        predicted = self._table(features)[:3]
        is_task = (measured[:3] > 0) & (predicted > 0)
        logs = np.log(measured[:3][is_task] / predicted[is_task])
        if not logs.size:
            return 0.0
        spread = _NORMAL_MAD * float(np.median(np.abs(logs - np.median(logs))))
        return min(spread, _MOST_NOISE)
