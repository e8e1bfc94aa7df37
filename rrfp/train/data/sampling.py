"""The order of samples: each comes once per epoch, without a permutation in memory."""

import math
from functools import lru_cache

import numpy as np

_GOLDEN_SECTION = (math.sqrt(5) - 1) / 2


def sample_at(index: int, num_samples: int, seed: int) -> int:
    """The sample at a place of the endless sequence. An epoch visits all samples in long strides,
    from a start of its own."""
    epoch, place = divmod(index, num_samples)
    start, stride = _strides_of_epoch(seed, epoch, num_samples)
    return (start + place * stride) % num_samples


@lru_cache(maxsize=8)
def _strides_of_epoch(seed: int, epoch: int, num_samples: int) -> tuple[int, int]:
    """Where an epoch starts, and its stride. The stride is coprime to the number of samples, so
    every sample comes once, and near the golden section, so successive samples are far apart in the
    data."""
    stride = round(num_samples * _GOLDEN_SECTION)
    while math.gcd(stride, num_samples) != 1:
        stride += 1
    return int(np.random.default_rng((seed, epoch)).integers(num_samples)), stride
