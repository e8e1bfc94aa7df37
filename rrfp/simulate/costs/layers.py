"""A model's layers: their sizes, what they compute, and what they keep for a microbatch.

What is kept is counted as by Korthikanti et al. 2022 (arXiv 2205.05198), without sequence
parallelism and for attention that computes its scores again, as flash attention does. With a
feed-forward layer four times as wide as the hidden size, 16-bit values and dropout, it is their
s b h (10 + 24 / t) bytes per layer.
"""

from dataclasses import dataclass

import numpy as np

from rrfp.errors import UsageError
from rrfp.simulate.costs.toml_tables import ranged
from rrfp.simulate.draws import LARGEST_SIGMA, Floats, exp, normals

_MOST_LAYERS = 1000
_MOST_LENGTH = 10**7


@dataclass(frozen=True, slots=True)
class Lengths:
    """The distribution of a length: lognormal about its median, clipped at both ends."""

    median: float = ranged(0, _MOST_LENGTH)
    sigma: float = ranged(0, LARGEST_SIGMA, default=0.0)
    """The standard deviation of its logarithm; 0: always the median."""
    least: int = ranged(0, _MOST_LENGTH, default=0)
    most: int = ranged(0, _MOST_LENGTH, default=_MOST_LENGTH)

    def __post_init__(self) -> None:
        if not self.least <= self.median <= self.most:
            raise UsageError(
                f"a length's median is {self.median:g}, at least {self.least} and at most "
                f"{self.most}; put the three in ascending order"
            )

    def draw(self, num: int, *key: int | str) -> Floats:
        """`num` lengths, as whole numbers."""
        drawn = np.full(num, float(self.median))
        if self.sigma:
            drawn = drawn * exp(self.sigma * normals(num, *key))
        return np.asarray(np.rint(np.clip(drawn, self.least, self.most)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """A stack of transformer layers of one kind."""

    layers: int = ranged(1, _MOST_LAYERS)
    hidden: int = ranged(1)
    ffn: int = ranged(1)
    heads: int = ranged(1)
    kv_heads: int | None = ranged(1, default=None)
    """Heads of keys and values; by default, as many as query heads."""
    head_dim: int | None = ranged(1, default=None)
    """By default, hidden / heads."""
    gated: bool = False
    """The feed-forward layer has a gate, so three matrices instead of two."""

    @property
    def query_width(self) -> int:
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def key_width(self) -> int:
        return self.query_width * (self.kv_heads or self.heads) // self.heads

    @property
    def _ffn_matrices(self) -> int:
        """The matrices of the feed-forward layer; also how many tensors of its width it keeps."""
        return 3 if self.gated else 2

    @property
    def linear_flops(self) -> int:
        """Operations of the linear layers in one transformer layer, forward, for one token."""
        attention = self.hidden * 2 * (self.query_width + self.key_width)
        return 2 * (attention + self.hidden * self.ffn * self._ffn_matrices)

    def kept_bytes(self, value_bytes: int, tp_size: int, *, dropout: bool) -> float:
        """What one transformer layer keeps of one token until its backward.

        Every tensor-parallel rank keeps all of the inputs and outputs of the two norms, and the two
        masks of dropout. It keeps its share of queries, keys, values and the attention's output, of
        what the feed-forward layer's first matrices put out, and of the second's input.
        """
        whole = 4 * self.hidden
        shared = 2 * (self.query_width + self.key_width) + self._ffn_matrices * self.ffn
        masks_bytes = 2 * self.hidden if dropout else 0
        return value_bytes * (whole + shared / tp_size) + masks_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Language(Layers):
    """The language model: layers with causal attention, then the head."""

    vocabulary: int = ranged(1)
    tokens: Lengths
    """Text tokens in a microbatch."""

    def head_bytes(self, value_bytes: int, tp_size: int) -> float:
        """What the head keeps of one token: the last norm's input and output, and the rank's share
        of the logits in fp32, which the loss needs."""
        return value_bytes * 2 * self.hidden + 4 * self.vocabulary / tp_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision(Layers):
    """The vision model before it: layers that attend within each image."""

    images: Lengths = Lengths(1)
    """Images in a microbatch; capped at 1,000."""
    patches: Lengths
    """Patches in an image."""
    patches_per_token: int = ranged(1, default=1)
    """How many patches become one token of the language model."""
