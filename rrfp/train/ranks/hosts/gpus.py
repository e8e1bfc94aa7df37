"""Which GPUs the ranks of all launchers take, compared before any of them starts a rank.

A launcher that torchrun or srun has started is one of several on its host, and these may all see
the same GPUs, or each its own. NCCL takes no two ranks on one, and would say so only in the middle
of a run's start.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Self

from rrfp.errors import UsageError
from rrfp.runtime.decoding import items, text
from rrfp.runtime.rendezvous import host_identity
from rrfp.train.device_checks import gpus_here, index_of_gpu, too_few_gpus
from rrfp.train.ranks.hosts.pulse import printable
from rrfp.train.ranks.place import local_ranks
from rrfp.train.settings import TrainSettings


@dataclass(frozen=True, slots=True)
class Taken:
    """The GPUs of one launcher, by their UUIDs."""

    host: str
    """Its identity."""
    seen: tuple[str, ...]
    taken: tuple[str, ...]
    """By rank."""

    @classmethod
    def by(cls, settings: TrainSettings) -> Self:
        """Those of this process."""
        seen = tuple(gpu.uuid for gpu in gpus_here())
        taken = (seen[index_of_gpu(each, len(seen))] for each in local_ranks(settings))
        return cls(host_identity(), seen, tuple(taken))

    @classmethod
    def decoded(cls, value: object) -> Self:
        """Raises ValueError for what no launcher tells."""
        host, seen, taken = items(value, 3)
        return cls(text(host), tuple(map(text, items(seen))), tuple(map(text, items(taken))))

    def told(self) -> tuple[object, ...]:
        """As JSON takes it."""
        return astuple(self)


def check_apart(told: Sequence[Taken], own: int) -> None:
    """Raise UsageError if two ranks of the run take the same GPU. `told` is by launcher, in the
    order of their ranks, and `own` the number of this one."""
    takers: dict[str, int] = {}
    for rank, (gpu, host) in enumerate((gpu, each.host) for each in told for gpu in each.taken):
        other = takers.setdefault(gpu, rank)
        if other == rank:
            continue
        beside = [each for each in told if each.host == host]
        num_ranks = sum(len(each.taken) for each in beside)
        num_gpus = len({seen for each in beside for seen in each.seen})
        if num_ranks > num_gpus:
            where = "this host" if host == told[own].host else printable(host.partition("/")[0])
            raise too_few_gpus(num_ranks, num_gpus, where)
        raise UsageError(
            f"ranks {other} and {rank} take the same GPU, {printable(gpu)}, and NCCL takes no two "
            "on one; show each a GPU of its own with CUDA_VISIBLE_DEVICES, or start them with a "
            "launcher that sets LOCAL_RANK"
        )
