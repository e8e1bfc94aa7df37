"""The identity of a link, and the sentences in which its errors name ranks and hosts."""

from dataclasses import dataclass

from rrfp.trace.outcome import FaultOrigin, FoundBy


@dataclass(frozen=True, slots=True)
class CrossHost:
    """Properties of a link between two hosts."""

    own_host: str
    peer_host: str
    is_encrypted: bool = False


@dataclass(frozen=True, slots=True)
class LinkId:
    """The two ranks of a link, seen from one of them."""

    own: int
    peer: int
    is_source: bool
    """True on the rank that sends."""
    cross_host: CrossHost | None = None
    """None for a link within a host."""

    @property
    def checks_tensors(self) -> bool:
        """True if nothing but a checksum protects the tensors on its sockets."""
        return self.cross_host is not None and not self.cross_host.is_encrypted

    def __str__(self) -> str:
        own, peer = f"rank {self.own}", f"rank {self.peer}"
        if self.cross_host is not None:
            own = f"{own} ({self.cross_host.own_host})"
            peer = f"{peer} ({self.cross_host.peer_host})"
        source, destination = (own, peer) if self.is_source else (peer, own)
        return f"the link from {source} to {destination}"

    @property
    def link_origin(self) -> FaultOrigin:
        """Fault origin: the link, reported by one of its ends."""
        ranks = (self.own, self.peer) if self.is_source else (self.peer, self.own)
        return FaultOrigin(FoundBy.LINK, link=ranks)

    @property
    def peer_origin(self) -> FaultOrigin:
        """Fault origin: the peer, reported over the link."""
        return FaultOrigin(FoundBy.LINK, rank=self.peer)

    def describe_lost(self, what: str) -> str:
        """Format the loss of the peer; `what` is what it did."""
        return (
            f"rank {self.peer} {what} (seen by rank {self.own}); see its own output for the cause"
        )

    def describe_down(self, silence_s: float, why: str) -> str:
        """Format a silence whose origin is unknown."""
        where = ""
        if self.cross_host is not None:
            where = f"whether {self.cross_host.peer_host} can be reached, and "
        return (
            f"{self} has been down for {silence_s:g} s ({why}); see {where}the output of rank"
            f" {self.peer} for the cause"
        )

    def describe_useless(self, num_connections: int, why: str) -> str:
        """Format a series of connections that broke before they carried anything."""
        return (
            f"{self} broke {num_connections} times in a row and carried nothing between (the last"
            f" time rank {self.peer} {why}); see what lies between the two, and the output of rank"
            f" {self.peer}"
        )

    def describe_unreadable(self, why: str) -> str:
        """Format bytes of the peer that are not of this protocol."""
        return (
            f"what rank {self.peer} sent to rank {self.own} cannot be read: {why}; see that all"
            " ranks run the same version of rrfp"
        )
