"""The schedules of torch.distributed.pipelining that ours are compared with, and what each needs.

Imports no torch: the command line refuses what cannot run before it starts any rank.
"""

from dataclasses import dataclass

from rrfp.errors import UsageError
from rrfp.schedule.shape import SPLIT_BACKWARD, WHOLE_BACKWARD, Placement, Shape
from rrfp.train.setting_groups import ModelKind
from rrfp.train.settings import TrainSettings


@dataclass(frozen=True, slots=True)
class Peer:
    """One of torch's schedules, and the layout that it runs on here."""

    schedule: str
    """Its class in torch.distributed.pipelining."""
    chunks: int
    """Model chunks per pipeline rank."""
    placement: Placement
    splits: bool
    """Whether it always splits weight gradients off the backward."""

    def shape(self, num_ranks: int, num_microbatches: int) -> Shape:
        """The tasks of one of its steps."""
        kinds = SPLIT_BACKWARD if self.splits else WHOLE_BACKWARD
        return Shape(num_ranks, num_microbatches, self.chunks, self.placement, kinds)


PEERS = {
    "1f1b": Peer("Schedule1F1B", 1, Placement.LOOP, splits=False),
    "interleaved": Peer("ScheduleInterleaved1F1B", 2, Placement.LOOP, splits=False),
    "interleaved-zb": Peer("ScheduleInterleavedZeroBubble", 2, Placement.LOOP, splits=True),
    "zbv": Peer("ScheduleZBVZeroBubble", 2, Placement.V, splits=True),
}
"""The peers by the names that they have here."""


def check_peer(name: str, settings: TrainSettings) -> None:
    """Raise UsageError if the peer of that name cannot train with these settings."""
    if name not in PEERS:
        raise UsageError(
            f"'{name}' is not a schedule of torch.distributed.pipelining that can run here "
            f"({', '.join(PEERS)})"
        )
    peer = PEERS[name]
    _require(
        settings.layout.pp > 1,
        f"torch's {name} has nothing to schedule on --pp {settings.layout.pp}; use 2 ranks or more",
    )
    _require(
        (settings.layout.chunks, settings.layout.placement) == (peer.chunks, peer.placement),
        f"torch's {name} runs on {peer.chunks} chunk(s) per rank in a {peer.placement}, not "
        f"{settings.layout.chunks} in a {settings.layout.placement}; give --chunks {peer.chunks} "
        f"--placement {peer.placement}",
    )
    _require(
        not settings.data.variable_lengths and settings.model.kind != ModelKind.VLM,
        f"torch's {name} exchanges messages of one shape; leave --variable-lengths and "
        f"--model {ModelKind.VLM} to the others",
    )
    _check_microbatches(name, settings)


def _check_microbatches(name: str, settings: TrainSettings) -> None:
    number, num_ranks = settings.data.microbatches, settings.layout.pp
    if name == "1f1b":
        _require(
            number >= num_ranks,
            f"torch's 1f1b needs at least one microbatch per rank, {num_ranks}, not {number}; "
            "change --microbatches",
        )
    elif PEERS[name].placement is Placement.LOOP:
        num_rounds = max(1, number // num_ranks)
        _require(
            number % num_rounds == 0,
            f"torch's {name} runs {number} microbatches on {num_ranks} ranks in {num_rounds} "
            f"rounds, which do not divide them; make --microbatches a multiple of {num_ranks}",
        )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)
