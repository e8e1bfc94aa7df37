"""Costs of tasks from the operation counts of a language model or a vision-language model.

Only matrix products count, with two operations per multiply-add (Narayanan et al. 2021, appendix):
the linear layers, the attention scores, and the head. A backward takes twice a forward. The input
gradient B takes as much as the forward for the linear layers and twice as much for the scores,
which have no weights; the weight gradient W takes as much as the forward's linear layers. All else,
such as normalization and kernel launches, is a fixed time per layer. Tensor parallelism divides the
operations and adds two collectives per layer in F and in B (Shoeybi et al. 2019).

The layers, vision before language, are cut into the pipeline's stages in model order. The head is
on the last stage, and the embedding costs nothing. Only the data varies: the length of a
microbatch's text and the number of patches in its images are drawn from the seed.

Activation bytes are divided among the stages in the same way. A split backward holds as many bytes
from B until W: apart from masks and logits, the inputs of the linear layers and the gradients of
their outputs are as many values as F holds. If B recomputes the forward, they are more than the one
input that F holds; the model ignores that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from rrfp.errors import UsageError
from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind
from rrfp.simulate.costs.model import (
    FACTORS,
    LONGEST_S,
    Links,
    StepCosts,
    check_sizes,
    check_takes_time,
)
from rrfp.simulate.costs.toml_files import Agreement, GradientSync, LinkSpeed, ranged, read_table
from rrfp.simulate.costs.unit_costs import Floats, UnitCosts
from rrfp.simulate.engine import TaskTimes
from rrfp.simulate.jitter import LARGEST_SIGMA, exp, normals
from rrfp.trace.records import NS_PER_S

# A model's layers: their sizes, operations and activation bytes.
#
# Activation bytes are counted as by Korthikanti et al. 2022 (arXiv 2205.05198), without sequence
# parallelism and for attention that computes its scores again, as flash attention does. With a
# feed-forward layer four times as wide as the hidden size, 16-bit values and dropout, it is their
# s b h (10 + 24 / t) bytes per layer.


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
        """Draw `num` lengths as whole numbers within the limits; the same key gives the same
        lengths. With a sigma of 0 all are the median."""
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
        """The width of all query heads together."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def key_width(self) -> int:
        """The width of all key heads together, which is also that of the values."""
        return self.query_width * (self.kv_heads or self.heads) // self.heads

    @property
    def _ffn_matrices(self) -> int:
        """The number of matrices of the feed-forward layer (3 with a gate, else 2); also how many
        tensors of its width it keeps."""
        return 3 if self.gated else 2

    @property
    def linear_flops(self) -> int:
        """The operations of the linear layers in one transformer layer, forward, for one token."""
        attention = self.hidden * 2 * (self.query_width + self.key_width)
        return 2 * (attention + self.hidden * self.ffn * self._ffn_matrices)

    def activation_bytes(self, value_bytes: int, tp_size: int, *, dropout: bool) -> float:
        """Return the activation bytes of one token in one transformer layer, from forward to
        backward.

        Every tensor-parallel rank holds all inputs and outputs of the two norms, and the two masks
        of dropout. It holds its share of queries, keys, values and the attention's output, of the
        output of the feed-forward layer's first matrices, and of the second's input.
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
        """Return the activation bytes of one token in the head: the last norm's input and output,
        and the rank's share of the logits in fp32, which the loss needs."""
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


_MOST_IMAGES = 1000
_MOST_PER_S = 1e18


class Split(StrEnum):
    """How the layers are cut into stages."""

    LAYERS = "layers"
    """The same number on each, whatever they cost; the last one also has the head."""
    FLOPS = "flops"
    """Balanced by the cost of a microbatch of median lengths."""


@dataclass(frozen=True, slots=True)
class Device:
    """The speed of one accelerator."""

    flops_per_s: float = ranged(1, _MOST_PER_S)
    """Operations per second that it reaches in matrix products, not its data sheet's figure."""
    layer_s: float = ranged(0, LONGEST_S, default=0.0)
    """Fixed time per task and layer, which does not grow with the length."""


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The ranks that share each layer, and their ring collectives over `size` ranks."""

    size: int = ranged(1, default=1)
    latency_s: float = ranged(0, LONGEST_S, default=0.0)
    bandwidth_bytes_per_s: float = ranged(1, _MOST_PER_S, default=_MOST_PER_S)

    def all_reduce_s(self, num_bytes: Floats) -> Floats:
        """Return the seconds of one ring all-reduce of these bytes; 0 on a single rank."""
        if self.size == 1:
            return num_bytes * 0.0
        share = 2 * (self.size - 1) / self.size
        return self.latency_s + num_bytes * share / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class Connections(LinkSpeed):
    """The links between neighboring pipeline ranks. A message is the share of one rank of a group,
    with the size of the language model's activation even between vision stages."""

    ranks_per_host: int | None = ranged(1, default=None)
    """Pipeline ranks per host; by default all are on one."""
    between_hosts_factor: float = ranged(*FACTORS, default=1.0)
    """How many times longer a message between two hosts takes."""


@dataclass(frozen=True, slots=True)
class _LayerCosts:
    """Seconds of one layer, or of the head, and the bytes that it keeps, by microbatch."""

    forward: Floats
    input_gradient: Floats
    weight_gradient: Floats
    activations: Floats

    @property
    def whole_s(self) -> float:
        """The seconds of its first microbatch, all kinds together."""
        return float(self.forward[0] + self.input_gradient[0] + self.weight_gradient[0])


@dataclass(frozen=True, slots=True)
class FlopCosts:
    """A `Costs`: a model on devices and links with given figures."""

    language: Language
    device: Device
    vision: Vision | None = None
    split: Split = Split.LAYERS
    precision_bytes: int = ranged(1, 8, default=2)
    """Bytes per value of an activation, in messages and collectives."""
    recompute: bool = False
    """B runs the forward again, so that a layer keeps its input alone."""
    dropout: bool = False
    """A layer has dropout after its attention and after its feed-forward layer, and keeps the
    masks, of a byte per value."""
    tensor_parallel: TensorParallel = TensorParallel()
    links: Connections = field(default_factory=Connections)
    gradient_sync: GradientSync = field(default_factory=GradientSync)
    agreement: Agreement = field(default_factory=Agreement)

    def step(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        """Compute the costs of one step of one replica, with lengths drawn from the seed; equal
        arguments give equal costs.

        Raises UsageError if the pipeline has more stages than the model has layers, if no task
        takes any time, and for more than 2**50 bytes on a stage.
        """
        self._check(shape)
        num = shape.num_microbatches
        text = self.language.tokens.draw(num, seed, replica, "text")
        patches, squares = self._images(num, seed, replica)
        seen = text if self.vision is None else text + patches // self.vision.patches_per_token
        vision, language, head = self._layer_costs(seen, patches, squares)
        cuts = self._cuts(shape.num_stages)

        def by_stage(name: str, units: int) -> list[list[int]]:
            of_vision, of_language = getattr(vision, name), getattr(language, name)
            amounts = [seeing * of_vision + reading * of_language for seeing, reading in cuts]
            amounts[-1] = amounts[-1] + getattr(head, name)
            return [[round(each * units) for each in row.tolist()] for row in amounts]

        kinds = ("forward", "input_gradient", "weight_gradient")
        task_times = TaskTimes(*(by_stage(kind, NS_PER_S) for kind in kinds))
        check_takes_time(task_times, "the model")
        sizes = ActivationSizes(by_stage("activations", 1))
        check_sizes(sizes, "the model")
        return StepCosts(
            task_times,
            self._links(shape, seen),
            agreement_ns=round(self.agreement.seconds * NS_PER_S),
            lateness_ns=round(self.agreement.lateness_s * NS_PER_S),
            gradient_sync_ns=round(self.gradient_sync.seconds * NS_PER_S),
            sizes=sizes,
        )

    @property
    def num_layers(self) -> int:
        """The number of vision and language layers together."""
        return self._num_vision + self.language.layers

    @property
    def _num_vision(self) -> int:
        """The number of vision layers; 0 without a vision model."""
        return self.vision.layers if self.vision else 0

    @property
    def fixed_ns(self) -> dict[Kind, Floats]:
        """The part of each unit's task times that does not depend on the length, in ns by kind: the
        fixed time of a layer, and the latency of collectives; with `recompute`, B repeats that of
        F. The units are the embedding (0), the layers and the head (B's latency only)."""
        rest_s = self.device.layer_s
        tp = self.tensor_parallel
        latency_s = tp.latency_s if tp.size > 1 else 0.0
        forward_s = rest_s + 2 * latency_s
        backward_s = forward_s + (forward_s if self.recompute else 0.0)

        def row(layer_s: float, head_s: float) -> Floats:
            return np.array([0.0, *[layer_s] * self.num_layers, head_s]) * NS_PER_S

        return {
            Kind.F: row(forward_s, 0.0),
            Kind.B: row(backward_s, latency_s),
            Kind.W: row(rest_s, 0.0),
        }

    def slowness(self, num_ranks: int) -> Sequence[float]:
        """Return 1 for every rank, as all have the same device."""
        return [1.0] * num_ranks

    def units(self, num_ranks: int, num_microbatches: int, seed: int, replica: int) -> UnitCosts:
        """Compute the costs of each layer and of the head, with lengths drawn as for `step`; the
        embedding costs nothing (`rrfp.simulate.costs.unit_costs.Layered`)."""
        text = self.language.tokens.draw(num_microbatches, seed, replica, "text")
        patches, squares = self._images(num_microbatches, seed, replica)
        seen = text if self.vision is None else text + patches // self.vision.patches_per_token
        vision, language, head = self._layer_costs(seen, patches, squares)

        def rows(name: str) -> Floats:
            layers = [getattr(vision, name)] * self._num_vision
            layers += [getattr(language, name)] * self.language.layers
            return np.vstack([np.zeros(num_microbatches), *layers, getattr(head, name)])

        shape = Shape(num_ranks, num_microbatches)
        empty = TaskTimes((), (), ())
        return UnitCosts(
            {
                Kind.F: rows("forward") * NS_PER_S,
                Kind.B: rows("input_gradient") * NS_PER_S,
                Kind.W: rows("weight_gradient") * NS_PER_S,
            },
            rows("activations"),
            None,
            StepCosts(
                empty,
                self._links(shape, seen),
                agreement_ns=round(self.agreement.seconds * NS_PER_S),
                lateness_ns=round(self.agreement.lateness_s * NS_PER_S),
                gradient_sync_ns=round(self.gradient_sync.seconds * NS_PER_S),
            ),
        )

    def split_over(self, num_stages: int) -> tuple[int, ...]:
        """Return the number of layers of each stage, vision and language together."""
        return tuple(map(sum, self._cuts(num_stages)))

    def _check(self, shape: Shape) -> None:
        """Raise UsageError if the pipeline has more stages than the model has layers."""
        if shape.num_stages > self.num_layers:
            raise UsageError(
                f"the model has {self.num_layers} layers for {shape.num_stages} stages; choose "
                f"--pp and --chunks whose product is at most {self.num_layers}"
            )

    def _images(self, num: int, seed: int, replica: int) -> tuple[Floats, Floats]:
        """Draw the images of each microbatch; return its number of patches, and the sum of the
        squares of its images' patches. Zeros without a vision model."""
        total, squares = np.zeros(num), np.zeros(num)
        if self.vision is None:
            return total, squares
        counts = np.minimum(self.vision.images.draw(num, seed, replica, "images"), _MOST_IMAGES)
        for image in range(int(counts.max())):
            # Draw for every image, even where a microbatch has no such image.
            drawn = self.vision.patches.draw(num, seed, replica, "patches", image)
            patches = np.where(counts > image, drawn, 0.0)
            total, squares = total + patches, squares + patches * patches
        return total, squares

    def _layer_costs(
        self, tokens: Floats, patches: Floats, squares: Floats
    ) -> tuple[_LayerCosts, _LayerCosts, _LayerCosts]:
        """Compute the costs of a vision layer, a language layer and the head, for these lengths by
        microbatch. Without a vision model, the language layer's stand for the vision layer's."""
        # Causal attention needs scores for half of all pairs.
        language = self._costs_of(self.language, tokens, tokens * tokens / 2)
        vision = language if self.vision is None else self._costs_of(self.vision, patches, squares)
        head_s = self._seconds(tokens * (2 * self.language.hidden * self.language.vocabulary))
        collective_s = self._all_reduce_s(tokens, self.language)
        kept = tokens * self.language.head_bytes(self.precision_bytes, self.tensor_parallel.size)
        return vision, language, _LayerCosts(head_s, head_s + collective_s, head_s, kept)

    def _costs_of(self, layers: Layers, tokens: Floats, pairs: Floats) -> _LayerCosts:
        """Compute the costs of one layer by microbatch, from its tokens and its pairs of tokens
        with attention scores. With `recompute` the input gradient includes the forward."""
        linear_s = self._seconds(tokens * layers.linear_flops)
        scores_s = self._seconds(pairs * (4 * layers.query_width))
        collectives_s = 2 * self._all_reduce_s(tokens, layers)
        rest_s = self.device.layer_s
        forward_s = linear_s + scores_s + collectives_s + rest_s
        backward_s = linear_s + 2 * scores_s + collectives_s + rest_s
        if self.recompute:
            backward_s = backward_s + forward_s
        kept = tokens * self._layer_bytes(layers)
        return _LayerCosts(forward_s, backward_s, linear_s + rest_s, kept)

    def _layer_bytes(self, layers: Layers) -> float:
        """Return the activation bytes of one token in one layer; with `recompute` the input's
        alone."""
        if self.recompute:
            return layers.hidden * self.precision_bytes
        size = self.tensor_parallel.size
        return layers.activation_bytes(self.precision_bytes, size, dropout=self.dropout)

    def _seconds(self, flops: Floats) -> Floats:
        """Return the seconds of these operations, divided among the tensor-parallel ranks."""
        return flops / (self.device.flops_per_s * self.tensor_parallel.size)

    def _all_reduce_s(self, tokens: Floats, layers: Layers) -> Floats:
        """Return the seconds of one all-reduce of the hidden values of these tokens."""
        return self.tensor_parallel.all_reduce_s(tokens * (layers.hidden * self.precision_bytes))

    def _median_microbatch(self) -> tuple[Floats, Floats, Floats]:
        """Return the tokens (patches that became tokens included), the patches and the sum of their
        squares, for one microbatch all of whose lengths are the median."""
        tokens = np.array([self.language.tokens.median])
        if self.vision is None:
            return tokens, np.zeros(1), np.zeros(1)
        images = min(self.vision.images.median, _MOST_IMAGES)
        patches = self.vision.patches.median
        seen = tokens + images * patches / self.vision.patches_per_token
        return seen, np.array([images * patches]), np.array([images * patches * patches])

    def _cuts(self, num_stages: int) -> list[tuple[int, int]]:
        """Return the numbers of vision and of language layers of every stage: equal numbers of
        layers, give or take one, or balanced by the time of a median microbatch."""
        num_vision, num_layers = self._num_vision, self.num_layers
        if self.split is Split.LAYERS:
            # The last stage, which has the head, gets no more layers than others.
            ends = [-(-stage * num_layers // num_stages) for stage in range(num_stages + 1)]
        else:
            vision, language, head = self._layer_costs(*self._median_microbatch())
            weights = [vision.whole_s] * num_vision + [language.whole_s] * self.language.layers
            ends = [*_even_cut(tuple(weights), head.whole_s, num_stages)]
        of_vision = [min(end, num_vision) for end in ends]
        return [
            (vision_after - vision_before, after - before - (vision_after - vision_before))
            for (before, after), (vision_before, vision_after) in zip(
                pairwise(ends), pairwise(of_vision), strict=True
            )
        ]

    def _links(self, shape: Shape, tokens: Floats) -> Links:
        """Return the links of the pipeline's ranks, with messages as large as these tokens' hidden
        values. Those between hosts are slower by their factor."""
        links = self.links
        factors = {}
        ranks = range(shape.num_ranks)
        if links.ranks_per_host is not None and links.between_hosts_factor != 1:
            factors = {
                (sender, receiver): links.between_hosts_factor
                for sender in ranks
                for receiver in ((sender + 1) % shape.num_ranks, (sender - 1) % shape.num_ranks)
                if sender // links.ranks_per_host != receiver // links.ranks_per_host
            }
        num_bytes = np.rint(tokens * (self.language.hidden * self.precision_bytes))
        return links.links([int(each) for each in num_bytes.tolist()], factors)


@cache
def _even_cut(weights: tuple[float, ...], head: float, num_stages: int) -> tuple[int, ...]:
    """Find the cut into contiguous stages with the smallest largest load and, among those, the most
    even loads; return the layer at which each stage begins, and the end. Every stage has at least
    one layer, except that the last one may have only the head. Cached.

    Dynamic programming over the stages.
    """
    num_layers = len(weights)
    sums = list(accumulate(weights, initial=0.0))
    # By the number of layers that the stages so far have: their largest load, the sum of the
    # squares of their loads, and where they begin.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        own_head = head if stage == num_stages - 1 else 0.0
        fewest = 0 if own_head else 1
        longer = {}
        for end in range(stage + fewest, num_layers + 1):
            cuts = []
            for begin, (most, squares, begins) in best.items():
                if begin <= end - fewest:
                    load = sums[end] - sums[begin] + own_head
                    cuts.append((max(most, load), squares + load * load, (*begins, begin)))
            longer[end] = min(cuts)
        best = longer
    return (*best[num_layers][2], num_layers)


def parse_flops(document: Mapping[str, Any], name: str) -> FlopCosts:
    """Read the FLOP model in a parsed TOML document; `name` is what errors call it.

    Raises UsageError for an unknown or missing key, for a value of the wrong type or out of range,
    and for heads that do not divide the hidden size (without `head_dim`) or `kv_heads` that do not
    divide them.
    """
    costs = read_table(FlopCosts, document, name)
    for part, where in ((costs.language, "language"), (costs.vision, "vision")):
        if part is None:
            continue
        if part.head_dim is None and part.hidden % part.heads:
            raise UsageError(
                f"{name}, [{where}]: hidden is {part.hidden}, which {part.heads} heads do not "
                "divide; give head_dim"
            )
        if part.kv_heads is not None and part.heads % part.kv_heads:
            raise UsageError(
                f"{name}, [{where}]: heads is {part.heads}, which {part.kv_heads} kv_heads do not "
                "divide; change one of them"
            )
    return costs
