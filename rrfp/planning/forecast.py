"""Forecasts of task times and of activation sizes, fitted to the measured steps of a run.

A time or a size is predicted as a sum of nonnegative multiples of a microbatch's features, for each
stage and kind of task. Imports no torch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rrfp.errors import UsageError
from rrfp.planning.item_costs import Features
from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind
from rrfp.simulate.engine import TaskTimes
from rrfp.trace.records import Phase, PhaseRecord, Record, TaskRecord, is_evaluation

Numbers = npt.NDArray[np.float64]

# The measured tasks of a rank's last step, taken from its records as they come.


NUM_ROWS = 5
"""Rows of a table: the times of F, B and W in ns, then the bytes that F keeps and the bytes that
stay from B until W."""
_KINDS = (Kind.F, Kind.B, Kind.W)


class MeasuredTasks:
    """Passes a schedule's records on, and remembers the tasks of the last complete step."""

    def __init__(self, record: Callable[[Record], None]) -> None:
        """`record` receives every record."""
        self._record = record
        self._tasks: list[TaskRecord] = []
        self._complete: tuple[list[TaskRecord], int] | None = None

    def record(self, record: Record) -> None:
        """Remember a record of a task, and pass every record on. The record of a schedule's phase
        completes a step; evaluation steps are not remembered. Any thread may call this; the records
        of tasks come from one."""
        if isinstance(record, TaskRecord) and not is_evaluation(record.step):
            if self._tasks and self._tasks[0].step != record.step:
                self._tasks = []
            self._tasks.append(record)
        elif (
            isinstance(record, PhaseRecord)
            and record.phase == Phase.SCHEDULE
            and not is_evaluation(record.step)
        ):
            self._complete, self._tasks = (self._tasks, record.budget_bytes), []
        self._record(record)

    def table(self, shape: Shape) -> Numbers:
        """Return the last complete step on this rank: `NUM_ROWS` x chunks x microbatches numbers
        (times of F, B and W in ns, then the bytes that F keeps and those that stay from B until W),
        flattened and followed by the bound in bytes. Zeros if none of this shape was measured."""
        size = NUM_ROWS * shape.num_chunks * shape.num_microbatches
        found = np.zeros(size + 1)
        if self._complete is None or len(self._complete[0]) != shape.num_tasks_of_a_rank:
            return found
        tasks, budget = self._complete
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


# Least squares without negative coefficients.


_RESIDUAL_TOLERANCE = 1e-9


def nonnegative_least_squares(matrix: Numbers, values: Numbers) -> Numbers:
    """Return the coefficients of 0 or more that bring `matrix @ coefficients` nearest to `values`,
    by the active-set method of Lawson and Hanson.

    Columns should be of similar size. Of columns that depend on one another, any may get the
    weight.
    """
    num_columns = matrix.shape[1]
    coefficients = np.zeros(num_columns)
    is_free = np.zeros(num_columns, bool)
    # Each round frees a column and lowers the residual, so that no set of columns comes twice. The
    # bound on the rounds guards against rounding errors.
    for _ in range(3 * num_columns):
        slopes = matrix.T @ (values - matrix @ coefficients)
        slopes[is_free] = -np.inf
        column = int(np.argmax(slopes))
        if slopes[column] <= _RESIDUAL_TOLERANCE * max(float(np.linalg.norm(values)), 1.0):
            break
        is_free[column] = True
        while True:
            best = np.zeros(num_columns)
            best[is_free] = np.linalg.lstsq(matrix[:, is_free], values, rcond=None)[0]
            is_negative = is_free & (best <= 0.0)
            if not is_negative.any():
                break
            # Go towards the best as far as all stay at 0 or more; fix those that reach 0.
            start, end = coefficients[is_negative], best[is_negative]
            share = float(np.min(start / np.maximum(start - end, np.finfo(float).tiny)))
            coefficients = coefficients + share * (best - coefficients)
            is_free &= coefficients > _RESIDUAL_TOLERANCE * float(coefficients.max(initial=0.0))
            coefficients[~is_free] = 0.0
        coefficients = best
    return coefficients


# Times and sizes of a whole step. A measured step counts less with every later one, so that a model
# follows a run that changes. It takes constant memory, and learns a step in a few milliseconds.


_DECAY = 0.9
"""The weight of a step relative to the next one."""
_TOLERANCE = 1e-10
_LEAST = 1.0
"""The least time in ns, and size in bytes, to which errors are relative."""
_NORMAL_MAD = 1.4826
"""The standard deviation of normal draws over their median distance from the median."""
_MOST_NOISE = 1.0


class _DecayingFit:
    """A time or a size as a function of features, fitted by the normal equations."""

    def __init__(self, num_features: int) -> None:
        self._gram = np.zeros((num_features, num_features))
        self._right = np.zeros(num_features)
        self.coefficients = np.zeros(num_features)

    def learn(self, features: Numbers, amounts: Numbers) -> None:
        """Add a step's microbatches, give earlier steps 0.9 of their weight, and compute the
        coefficients again. Amounts count by their relative error."""
        rows = features / np.maximum(amounts, _LEAST)[:, None]
        shares = amounts / np.maximum(amounts, _LEAST)
        self._gram = _DECAY * self._gram + rows.T @ rows
        self._right = _DECAY * self._right + rows.T @ shares
        scale = np.sqrt(np.maximum(np.diag(self._gram), np.finfo(float).tiny))
        values, vectors = np.linalg.eigh(self._gram / np.outer(scale, scale))
        is_known = values > _TOLERANCE * values[-1]
        roots = np.sqrt(values[is_known])
        matrix = roots[:, None] * vectors[:, is_known].T
        target = (vectors[:, is_known].T @ (self._right / scale)) / roots
        self.coefficients = nonnegative_least_squares(matrix, target) / scale


@dataclass(frozen=True, slots=True)
class PredictedCosts:
    """The expected costs of a step's microbatches, in the order of the data."""

    times: TaskTimes
    sizes: ActivationSizes | None
    noise: float
    """The standard deviation of the logarithm of real times over predicted ones."""


class StepModel:
    """Predicts the task times and activation sizes of one pipeline's steps."""

    def __init__(self) -> None:
        self._fits: dict[tuple[int, int], _DecayingFit] = {}
        """By row of the measured table, and stage."""
        self._form: tuple[int, ...] = ()
        """Numbers of features and of stages."""
        self._noise: float | None = None
        self._has_sizes = False

    @property
    def is_fitted(self) -> bool:
        """True once a step was learned."""
        return bool(self._fits)

    @property
    def noise(self) -> float:
        """The recent error of the predictions, as `PredictedCosts.noise`; 0 before the first
        step."""
        return 0.0 if self._noise is None else self._noise

    def learn(self, features: Numbers, measured: Numbers) -> None:
        """Add a step, and update the noise by the error of its prediction (for the first step, of
        its fit): `features` are those of its microbatches, `[microbatch][feature]`, and `measured`
        is the table of all stages, `[row][stage][microbatch]`. Another number of features or stages
        starts the model over."""
        form = (features.shape[1], measured.shape[1])
        if form != self._form:
            self.__init__()  # type: ignore[misc]
            self._form = form
        if self.is_fitted:
            now = self._error(features, measured)
            before = now if self._noise is None else self._noise
            self._noise = before + (now - before) / 4
        self._has_sizes = bool(measured[3].any())
        for row, stages in enumerate(measured):
            for stage, amounts in enumerate(stages):
                fit = self._fits.setdefault((row, stage), _DecayingFit(features.shape[1]))
                fit.learn(features, amounts)
        if self._noise is None:
            self._noise = self._error(features, measured)

    def predict(self, features: Numbers) -> PredictedCosts:
        """Predict the costs of a step with these features. The model must be fitted, with as many
        features."""
        table = np.rint(self._table(features)).astype(np.int64)
        return PredictedCosts(
            times_of(table), sizes_of(table) if self._has_sizes else None, self.noise
        )

    def _table(self, features: Numbers) -> Numbers:
        """Return the predicted table of a step with these features, `[row][stage][microbatch]`."""
        num_stages = self._form[1]
        rows = range(len(self._fits) // num_stages)
        coefficients = np.array(
            [[self._fits[row, stage].coefficients for stage in range(num_stages)] for row in rows]
        )
        return np.asarray(coefficients @ features.T)

    def _error(self, features: Numbers, measured: Numbers) -> float:
        """Return the spread of measured over predicted times of F, B and W, as
        `PredictedCosts.noise`, at most 1. It is estimated by the median, which a few outliers do
        not move."""
        predicted = self._table(features)[:3]
        is_task = (measured[:3] > 0) & (predicted > 0)
        logs = np.log(measured[:3][is_task] / predicted[is_task])
        if not logs.size:
            return 0.0
        spread = _NORMAL_MAD * float(np.median(np.abs(logs - np.median(logs))))
        return min(spread, _MOST_NOISE)


def times_of(table: npt.NDArray[np.int64]) -> TaskTimes:
    """Return the times in a table `[row][stage][microbatch]`, which are its first three rows. A
    forward takes 1 ns or more."""
    forward, input_gradient, weight_gradient = table[:3]
    return TaskTimes(
        np.maximum(forward, 1).tolist(), input_gradient.tolist(), weight_gradient.tolist()
    )


def sizes_of(table: npt.NDArray[np.int64]) -> ActivationSizes:
    """Return the sizes in a table `[row][stage][microbatch]`, which are its last two rows. Bytes
    that stay from B until W are at most those that F keeps."""
    kept, owed = table[3:]
    return ActivationSizes(kept.tolist(), np.minimum(owed, kept).tolist())


# The activation bytes of a single microbatch on a chunk, and an upper bound on them.
#
# Two bounds follow from the features, and the smaller one holds:
#
# - With `x[j] <= r * f[j]` for all features of a measured microbatch, the size of x is at most r
#   times the measured one. This needs one measurement and no coefficients.
# - Once enough sizes are known, the fitted sum, with a margin for its observed error. It counts
#   only if x lies in the span of the measured features, and the margin grows with its distance.


_MOST_SAMPLES = 1024
"""Different features that are remembered, of each chunk."""

_LEAST_CHECKS = 3
"""Predictions that were compared with a measured size, before the margin is trusted."""

_MANY_CHECKS = 16
"""Measurements of repeated features after which they alone decide how much sizes vary."""

_GROWTH = 1.25
"""The coefficients are computed again when the number of samples has grown by this factor."""

_RANK_TOLERANCE = 1e-9
_SPAN_TOLERANCE = 1e-6


class Bound(NamedTuple):
    """The bytes that a microbatch keeps on a chunk: a prediction or an upper bound."""

    kept: int
    """From F on."""
    owed: int
    """From B until W, at most `kept`."""


class SizeModel:
    """Predicts and bounds the activation bytes of the microbatches of one chunk."""

    def __init__(self) -> None:
        self._kept = _SizeFit()
        self._owed = _SizeFit()
        self._num_features: int | None = None

    def take(self, features: Features, kept: int, owed: int = 0) -> None:
        """Add a measured microbatch. Bytes that W needs beyond those that F kept count from F on.
        Raises UsageError if there are more or fewer features than before."""
        if self._num_features not in (None, len(features)):
            raise UsageError(
                f"a microbatch has {len(features) - 1} numbers that its size depends on, and "
                f"another had {self._num_features - 1}; let the size function give as many for each"
            )
        self._num_features = len(features)
        self._kept.take(features, max(kept, owed))
        self._owed.take(features, owed)

    def predict(self, features: Features) -> Bound:
        """Predict the sizes, without a margin; 0 before the first fit."""
        kept, owed = (round(fit.predict(features)) for fit in (self._kept, self._owed))
        return Bound(max(kept, owed), owed)

    def bound(self, features: Features) -> Bound | None:
        """Return an upper bound on the sizes. None if nothing measured gives one: there is no
        measurement, or none that has all of these features (such as images)."""
        kept, owed = self._kept.bound(features), self._owed.bound(features)
        if kept is None or owed is None:
            return None
        return Bound(max(kept, owed), owed)

    @property
    def is_fitted(self) -> bool:
        """True once three predictions, or three sizes of repeated features, have been compared with
        measured ones."""
        return self._kept.is_trusted and self._owed.is_trusted


@dataclass(slots=True)
class _Excess:
    """The relative excess of sizes over their predictions. Sizes below the prediction do not count:
    a microbatch without images may keep nothing at all."""

    num_checks: int = 0
    largest: float = 0.0
    _num: int = 0
    _squares: float = 0.0

    def take(self, predicted: float, size: float, spread: float) -> None:
        """Compare a size with its prediction, and remember the excess if it is larger. `spread` is
        the factor by which the prediction's own uncertainty adds to the size's."""
        self.num_checks += 1
        share = (size - predicted) / max(predicted, 1.0) / spread
        if share > 0:
            self.largest = max(self.largest, share)
            self._num += 1
            self._squares += share**2

    @property
    def margin(self) -> float:
        """The relative margin to add to a prediction; 0 where nothing varies.

        Where experts are chosen, sizes vary by chance. Four standard deviations are exceeded once
        in 30,000 normal draws; an estimate from few draws gets more, as it may be too small. A
        quarter above the largest is for draws with heavier tails.
        """
        if self._num == 0:
            return 0.0
        deviation = math.sqrt(self._squares / self._num)
        return max(1.25 * self.largest, 4.0 * deviation * (1.0 + 4.0 / self._num))


@dataclass(slots=True)
class _Sample:
    """The measured sizes of microbatches with the same features."""

    num: int
    mean: float
    largest: float

    @property
    def spread(self) -> float:
        """The factor by which the uncertainty of the mean adds to a size's."""
        return math.sqrt(1.0 + 1.0 / self.num)


class _SizeFit:
    """One size as a function of features."""

    def __init__(self) -> None:
        self._samples: dict[Features, _Sample] = {}
        """By features, the least recently measured first."""
        self._repeats = _Excess()
        """The excess over the mean of earlier sizes with the same features."""
        self._checks = _Excess()
        """The excess of the other sizes over the prediction."""
        self._num_fitted = 0
        self._known: tuple[Numbers, Numbers] | None = None
        """The measured features, and the largest size for each, measured or predicted."""
        self._coefficients: Numbers | None = None
        self._scale: Numbers = np.ones(1)
        self._span: Numbers = np.zeros((1, 1))
        self._covariance: Numbers = np.zeros((1, 1))

    def take(self, features: Features, size: int) -> None:
        """Add a measured size, and compute the coefficients again once there are a quarter more
        samples. With features that were measured before, only their own sample changes. Beyond
        1,024 samples the least recently measured one is dropped."""
        sample = self._samples.pop(features, None)
        if sample is not None:
            self._repeats.take(sample.mean, size, sample.spread)
            sample.num += 1
            sample.mean += (size - sample.mean) / sample.num
            sample.largest = max(sample.largest, size)
            self._samples[features] = sample
            self._known = None
            return
        if (spread := self._spread(features)) is not None:
            self._checks.take(self.predict(features), size, spread)
        self._samples[features] = _Sample(1, float(size), float(size))
        self._known = None
        if len(self._samples) > _MOST_SAMPLES:
            del self._samples[next(iter(self._samples))]
            self._num_fitted -= 1  # So that the coefficients are computed again, in spite of it.
        if len(self._samples) >= _GROWTH * self._num_fitted:
            self._compute()

    def predict(self, features: Features) -> float:
        """Predict a size: the mean of measured ones, the fitted sum, or 0 before the first fit."""
        if (sample := self._samples.get(features)) is not None:
            return sample.mean
        if self._coefficients is None:
            return 0.0
        return float(np.asarray(features) / self._scale @ self._coefficients)

    def bound(self, features: Features) -> int | None:
        """Return an upper bound on a size; None if nothing measured gives one. Features that were
        measured before are bounded by their own sizes and a margin; others by the smaller one of a
        measured size scaled up and, once it is trusted, the fitted sum, each with a margin."""
        if (sample := self._samples.get(features)) is not None:
            varies = self._repeats if self._repeats.num_checks >= _MANY_CHECKS else self._worst
            allowed = sample.mean * (1.0 + varies.margin * sample.spread)
            return math.ceil(max(sample.largest, allowed))
        bound = self._scaled_up(features) * (1.0 + self._worst.margin)
        spread = self._spread(features)
        if spread is not None and self._checks.num_checks >= _LEAST_CHECKS:
            predicted = self.predict(features) * (1.0 + self._checks.margin * spread)
            bound = min(bound, predicted)
        return None if math.isinf(bound) else math.ceil(bound)

    @property
    def is_trusted(self) -> bool:
        """True once three predictions, or three sizes of repeated features, have been compared with
        measured ones."""
        return max(self._checks.num_checks, self._repeats.num_checks) >= _LEAST_CHECKS

    @property
    def _worst(self) -> _Excess:
        """The excess with the larger margin: of repeated features, or of the predictions."""
        return max(self._checks, self._repeats, key=lambda excess: excess.margin)

    def _scaled_up(self, features: Features) -> float:
        """The least product of a measured size, or its larger prediction, and the largest ratio of
        the features to its own (at least 1). Infinite without measurements, or if every measured
        microbatch lacks a feature."""
        if not self._samples:
            return math.inf
        if self._known is None:
            matrix = np.array([*self._samples])
            sizes = np.array([sample.largest for sample in self._samples.values()])
            if self._coefficients is not None:
                # Not the one that was smallest by chance.
                sizes = np.maximum(sizes, matrix / self._scale @ self._coefficients)
            self._known = matrix, sizes
        known, sizes = self._known
        wanted = np.asarray(features)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.where(wanted > 0, wanted / known, 1.0).max(axis=1)
            return float(np.where(np.isinf(ratios), np.inf, np.maximum(ratios, 1.0) * sizes).min())

    def _compute(self) -> None:
        """Compute the coefficients, and the data from which `_spread` estimates their uncertainty.
        Sizes count by their relative error."""
        means = np.array([max(sample.mean, 1.0) for sample in self._samples.values()])
        relative = np.array([*self._samples]) / means[:, None]
        norms = np.linalg.norm(relative, axis=0)
        self._scale = np.where(norms > 0, norms, 1.0)
        matrix = relative / self._scale
        shares = np.array([sample.mean for sample in self._samples.values()]) / means
        self._coefficients = nonnegative_least_squares(matrix, shares)
        _, singular, rows = np.linalg.svd(matrix, full_matrices=False)
        is_known = singular > _RANK_TOLERANCE * singular[0]
        known = rows[is_known]
        self._span = known.T @ known
        self._covariance = known.T @ np.diag(singular[is_known] ** -2.0) @ known
        self._num_fitted = len(self._samples)

    def _spread(self, features: Features) -> float | None:
        """The factor by which the relative error of a prediction exceeds that of a size, because
        few samples determine the coefficients; None if they do not determine the prediction."""
        if self._coefficients is None:
            return None
        scaled = np.asarray(features) / self._scale
        outside = scaled - self._span @ scaled
        if np.abs(outside).max() > _SPAN_TOLERANCE * np.abs(scaled).max():
            return None
        predicted = max(float(scaled @ self._coefficients), 1.0)
        variance = float(scaled @ self._covariance @ scaled) / predicted**2
        return math.sqrt(1.0 + variance)
