"""For how long one end of a link has heard nothing.

Time in which this very process was stopped is not the peer's silence: of each wait no more counts
than what the end was ready to wait.
"""

TRIES = 10
"""Of the silence after which a link is lost, this part may go to one attempt to connect again, and
to its first frame after that."""


class Quiet:
    """What the waits of one end come to since it has heard something."""

    def __init__(self, now_ns: int) -> None:
        self.total_ns = 0
        self.here_ns = 0
        """Over this connection."""
        self._asked_ns = now_ns
        self._patience_ns = 0

    def ask(self, now_ns: int, patience_ns: int) -> int:
        """A wait of at most so long begins; gives its length."""
        self._asked_ns, self._patience_ns = now_ns, patience_ns
        return patience_ns

    def answer(self, now_ns: int) -> None:
        """The wait is over, and nothing was heard."""
        quiet_ns = min(now_ns - self._asked_ns, self._patience_ns)
        self._asked_ns = now_ns
        self.total_ns += quiet_ns
        self.here_ns += quiet_ns

    def end(self) -> None:
        """Something was heard."""
        self.total_ns = self.here_ns = 0

    def begin_connection(self) -> None:
        """It waits over another connection from now on."""
        self.here_ns = 0
