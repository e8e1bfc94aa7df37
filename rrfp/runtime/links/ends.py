"""How a link is told to people: by the rank at fault, or by both where the link is."""

from dataclasses import dataclass

from rrfp.trace.outcome import Culprit, FoundBy


@dataclass(frozen=True, slots=True)
class Far:
    """What a link between two hosts has of its own."""

    own_host: str
    peer_host: str
    is_encrypted: bool = False


@dataclass(frozen=True, slots=True)
class Ends:
    """The two ranks of a link, as one of them sees it."""

    own: int
    peer: int
    is_source: bool
    """Whether it sends."""
    far: Far | None = None
    """None: within a host."""

    @property
    def checks_tensors(self) -> bool:
        """Whether nothing but a checksum vouches for the tensors on its sockets."""
        return self.far is not None and not self.far.is_encrypted

    def __str__(self) -> str:
        own, peer = f"rank {self.own}", f"rank {self.peer}"
        if self.far is not None:
            own, peer = f"{own} ({self.far.own_host})", f"{peer} ({self.far.peer_host})"
        source, destination = (own, peer) if self.is_source else (peer, own)
        return f"the link from {source} to {destination}"

    @property
    def culprit(self) -> Culprit:
        """The link, found by one of its ends."""
        ranks = (self.own, self.peer) if self.is_source else (self.peer, self.own)
        return Culprit(FoundBy.LINK, link=ranks)

    @property
    def lost_culprit(self) -> Culprit:
        """The peer, found over the link."""
        return Culprit(FoundBy.LINK, rank=self.peer)

    def lost(self, what: str) -> str:
        """The peer did this, and is lost."""
        return (
            f"rank {self.peer} {what} (seen by rank {self.own}); see its own output for the cause"
        )

    def down(self, silence_s: float, why: str) -> str:
        """Nothing has come for so long, and nobody knows whose fault it is."""
        where = "" if self.far is None else f"whether {self.far.peer_host} can be reached, and "
        return (
            f"{self} has been down for {silence_s:g} s ({why}); see {where}the output of rank"
            f" {self.peer} for the cause"
        )

    def useless(self, num_connections: int, why: str) -> str:
        """Connection after connection broke before it carried anything."""
        return (
            f"{self} broke {num_connections} times in a row and carried nothing between (the last"
            f" time rank {self.peer} {why}); see what lies between the two, and the output of rank"
            f" {self.peer}"
        )

    def unreadable(self, why: str) -> str:
        """The peer does not speak this protocol."""
        return (
            f"what rank {self.peer} sent to rank {self.own} cannot be read: {why}; see that all"
            " ranks run the same version of rrfp"
        )
