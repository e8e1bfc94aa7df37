"""What a run's own tasks teach about the next ones: the time of a task, and what a microbatch
keeps, as sums of nonnegative multiples of its features, for each stage and kind.

What was measured counts less with every step that follows, so that a model keeps up with a run that
changes. It takes a fixed room, and a step is learned in a few milliseconds.

Imports no torch.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rrfp.megatron.memory.least_squares import nonnegative_least_squares
from rrfp.schedule.sizes import Sizes
from rrfp.simulate.world import TaskTimes

Numbers = npt.NDArray[np.float64]

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
    sizes: Sizes | None
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
        `rrfp.megatron.planning.measured`."""
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
            sizes = Sizes(kept.tolist(), np.minimum(owed, kept).tolist())
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
