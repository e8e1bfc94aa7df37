"""The sections that all forms of costs in TOML share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rrfp.simulate.costs.model import LONGEST_S, Links
from rrfp.simulate.costs.toml_tables import ranged
from rrfp.trace.records import NS_PER_S


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The speed of the links between neighbouring ranks: the keys that every `[links]` has."""

    latency_s: float = ranged(0, LONGEST_S, default=0.0)
    bandwidth_bytes_per_s: float | None = ranged(1, 1e15, default=None)
    """By default, bytes take no time."""

    def links(self, num_bytes: Sequence[int], factors: Mapping[tuple[int, int], float]) -> Links:
        """Links of this speed. `num_bytes` are message sizes by microbatch; `factors` slow down
        links, by (sender, receiver)."""
        bandwidth = self.bandwidth_bytes_per_s
        return Links(
            round(self.latency_s * NS_PER_S),
            NS_PER_S / bandwidth if bandwidth else 0.0,
            num_bytes,
            factors,
        )


@dataclass(frozen=True, slots=True)
class Agreement:
    """The rounds of a group that must agree: `[agreement]`."""

    seconds: float = ranged(0, LONGEST_S, default=0.0)
    lateness_s: float = ranged(0, LONGEST_S, default=0.0)
    """The most by which a message reaches another member later than the first."""


@dataclass(frozen=True, slots=True)
class GradientSync:
    """The reduction of gradients between replicas at the end of a step: `[gradient_sync]`."""

    seconds: float = ranged(0, LONGEST_S, default=0.0)
