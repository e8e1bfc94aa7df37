"""Random draws that are the same to the bit on every machine.

A draw depends only on its key, that is, on what it is for and never on when it is made. So
everything compared under one seed meets the same draws. The bits come from a counter-based
generator (Philox, whose stream numpy guarantees). They are processed only with operations that IEEE
754 rounds exactly (+ - * / sqrt, comparisons, scaling by powers of two), because the logarithms and
exponentials of C libraries differ between machines in their last bit.
"""

import json
from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import factorial

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LARGEST_SIGMA = 3.0
"""Of a lognormal factor. One deviation is a factor of e**3 = 20; more is a typing error."""

_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
"""ln 2 in two parts; the first ends in zeros, so that a whole number times it is exact."""
_LOG2_E = 1.44269504088896340736
_SQRT_HALF = 0.70710678118654752440
_EXP = [1 / factorial(n) for n in range(15)]
"""e**r as a polynomial in r, whose size is at most ln(2) / 2."""
_LOG = [2 / n for n in range(1, 24, 2)]
"""log((1 + f) / (1 - f)) / f as a polynomial in f * f, where f is at most 0.172."""


def uniforms(num: int, *key: int | str) -> Floats:
    """`num` draws from [0, 1); a larger `num` only appends draws."""
    return uniforms_in_parts(*key)(num)


def uniforms_in_parts(*key: int | str) -> Callable[[int], Floats]:
    """A function that returns the draws of `uniforms` piece by piece: the next `num` at each
    call."""
    digest = blake2b(json.dumps(key).encode(), digest_size=16).digest()
    bits = np.random.Philox(key=int.from_bytes(digest, "little"))
    return lambda num: np.asarray((bits.random_raw(num) >> np.uint64(11)) * 2.0**-53)


def normals(num: int, *key: int | str) -> Floats:
    """`num` draws of mean 0 and standard deviation 1; a larger `num` only appends draws.

    Marsaglia's polar method: of points in a square, those inside the circle are used, 79 in 100.
    """
    num_points = num + num // 2 + 64
    while True:
        x, y = 2 * uniforms(2 * num_points, *key).reshape(-1, 2).T - 1
        square = x * x + y * y
        is_inside = (square > 0) & (square < 1)
        if is_inside.sum() >= num:
            x, square = x[is_inside][:num], square[is_inside][:num]
            return np.asarray(x * np.sqrt(-2 * log(square) / square))
        num_points *= 2


def lognormals(num: int, sigma: float, *key: int | str) -> Floats:
    """`num` factors of mean 1 whose logarithms have the standard deviation `sigma`."""
    return exp(sigma * normals(num, *key) - sigma * sigma / 2)


def exp(x: Floats) -> Floats:
    """e**x to within two units in the last place, for x between -700 and 700."""
    power = np.rint(x * _LOG2_E)
    rest = (x - power * _LN2_HIGH) - power * _LN2_LOW
    return np.ldexp(_polynomial(_EXP, rest), power.astype(np.int32))


def log(x: Floats) -> Floats:
    """The natural logarithm of normal positive numbers, to within two units in the last place."""
    mantissa, power = np.frexp(x)
    is_low = mantissa < _SQRT_HALF
    mantissa, power = np.where(is_low, 2 * mantissa, mantissa), power - is_low
    f = (mantissa - 1) / (mantissa + 1)
    return np.asarray(power * _LN2_HIGH + (f * _polynomial(_LOG, f * f) + power * _LN2_LOW))


def _polynomial(coefficients: Sequence[float], x: Floats) -> Floats:
    """Horner's rule; the coefficient of x**0 comes first."""
    value = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value
