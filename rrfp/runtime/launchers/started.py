"""The place of a process among those that a launcher has started together."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What a launcher tells a process about itself."""

    by: str
    """The launcher's name."""
    index: int
    count: int
    local_index: int
    """Among those of this host."""
    local_count: int | None
    """How many there are on this host; None if the launcher does not say."""
    is_one_host: bool
    """Whether all of them are on this host."""
    host: str
    """Where the first of them is."""
    port: int
    """Where they may meet on that host."""
    serves_store: bool = False
    """Whether the launcher itself listens at that port, with a store of torch's."""

    @property
    def as_of_torch(self) -> dict[str, str]:
        """The same in the variables by which torch's process groups find each other."""
        local = {} if self.local_count is None else {"LOCAL_WORLD_SIZE": str(self.local_count)}
        return {
            "RANK": str(self.index),
            "WORLD_SIZE": str(self.count),
            "LOCAL_RANK": str(self.local_index),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            **local,
        }
