"""Least squares without negative coefficients."""

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

_TOLERANCE = 1e-9


def nonnegative_least_squares(matrix: Numbers, values: Numbers) -> Numbers:
    """The coefficients of 0 or more that bring `matrix @ coefficients` nearest to `values`, by the
    active-set method of Lawson and Hanson.

    Columns should be of like size. Of columns that depend on one another, any may get the weight.
    """
    num_columns = matrix.shape[1]
    coefficients = np.zeros(num_columns)
    is_free = np.zeros(num_columns, bool)
    # Each round frees a column and lowers the residual, so that no set of columns comes twice. The
    # bound is for what rounding may do to that.
    for _ in range(3 * num_columns):
        slopes = matrix.T @ (values - matrix @ coefficients)
        slopes[is_free] = -np.inf
        column = int(np.argmax(slopes))
        if slopes[column] <= _TOLERANCE * max(float(np.linalg.norm(values)), 1.0):
            break
        is_free[column] = True
        while True:
            best = np.zeros(num_columns)
            best[is_free] = np.linalg.lstsq(matrix[:, is_free], values, rcond=None)[0]
            is_negative = is_free & (best <= 0.0)
            if not is_negative.any():
                break
            # Go towards the best as far as all stay at 0 or more; what reaches 0 is fixed there.
            start, end = coefficients[is_negative], best[is_negative]
            share = float(np.min(start / np.maximum(start - end, np.finfo(float).tiny)))
            coefficients = coefficients + share * (best - coefficients)
            is_free &= coefficients > _TOLERANCE * float(coefficients.max(initial=0.0))
            coefficients[~is_free] = 0.0
        coefficients = best
    return coefficients
