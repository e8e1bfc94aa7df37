"""The hosts of a run, where `rrfp train` itself is one of several processes of torchrun or srun.

Each of them launches its share of the ranks: one, if there are as many processes as ranks. So a
rank keeps the cores and the GPUs that its process was given, whatever has started that.
"""

from rrfp.errors import UsageError
from rrfp.runtime import variables
from rrfp.runtime.launchers.environment import started
from rrfp.runtime.launchers.started import Started
from rrfp.train.settings import TrainSettings


def among_started(settings: TrainSettings) -> TrainSettings:
    """The settings with the hosts that this process' environment tells; unchanged if they name
    their hosts themselves. Raises UsageError for an environment that does not fit."""
    place = None if settings.run.nnodes > 1 else started()
    if place is None or place.count == 1:
        return settings
    num_ranks = settings.layout.world_size
    if num_ranks % place.count:
        raise UsageError(
            f"{place.by} has started {place.count} processes, which cannot share {num_ranks} ranks "
            "evenly; start one a rank, or one a host"
        )
    host = variables.LOOPBACK if place.is_one_host else place.host
    shown = f"[{host}]" if ":" in host else host
    return settings.changed(
        nnodes=place.count,
        node_rank=place.index,
        rdzv_endpoint=settings.run.rdzv_endpoint or f"{shown}:{place.port}",
    )


def local_ranks(settings: TrainSettings) -> range:
    """This process' ranks by their numbers on the host, on which others may have started some,
    too."""
    num_own = settings.layout.world_size // settings.run.nnodes
    place = place_of(settings)
    first = 0 if place is None else place.local_index * num_own
    return range(first, first + num_own)


def place_of(settings: TrainSettings) -> Started | None:
    """What `among_started` took the hosts from; None if they stand for themselves."""
    place = None if settings.run.nnodes == 1 else started()
    is_it = place is not None and (place.count, place.index) == (
        settings.run.nnodes,
        settings.run.node_rank,
    )
    return place if is_it else None
