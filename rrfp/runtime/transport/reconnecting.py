"""How an end comes to another connection: a source dials, and a destination waits to be dialled.

Each `attempt` is one step, on the link's own thread, within the time that it is given. It gives a
connection, or says why there is none yet, or that the peer is gone.
"""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Protocol

from rrfp.runtime.transport.door import DialError, Door

_KNOCK_S = 0.25
"""How often a destination that waits looks whether its source is still there."""
_DIAL_AGAIN_S = 0.05
_LONGEST_PAUSE_S = 1.0

Pause = Callable[[float], None]
"""Waits so many seconds, or until the link's thread is woken."""


class NotYetError(Exception):
    """There is no connection yet; a sentence says why."""


class PeerGoneError(Exception):
    """There will never be one."""


class Reconnecting(Protocol):
    """Of one end of a link."""

    def attempt(self, timeout_s: float, num_useless: int, pause: Pause) -> socket.socket:
        """Another connection. Raises NotYetError or PeerGoneError. `num_useless`: so many have
        broken in a row and carried nothing."""

    @property
    def has_other(self) -> bool:
        """Whether the peer has connected again, although this end's connection may seem whole."""

    def close(self) -> None:
        """The link is over: no other connection is taken."""


class Dialling:
    """A source's."""

    has_other = False

    def __init__(self, door: Door) -> None:
        self._door = door
        self._num_attempts = 0

    def attempt(self, timeout_s: float, num_useless: int, pause: Pause) -> socket.socket:
        if num_useless > 1:
            pause(min(timeout_s, _DIAL_AGAIN_S * 2**num_useless, _LONGEST_PAUSE_S))
        began_s = time.monotonic()
        self._num_attempts += 1
        try:
            return self._door.dial(timeout_s, self._num_attempts)
        except DialError as error:
            if error.is_gone:
                raise PeerGoneError from None
            # Whoever refuses does it at once, and may not do it soon.
            pause(max(0.0, began_s + _DIAL_AGAIN_S - time.monotonic()))
            raise NotYetError(str(error)) from None

    def close(self) -> None:
        pass


class Awaiting:
    """A destination's."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._lock = Lock()
        # Guarded by the lock, but that `has_other` may look.
        self._other: socket.socket | None = None
        self._last_attempt = 0
        self._is_closed = False

    @property
    def has_other(self) -> bool:
        return self._other is not None

    def offer(self, connection: socket.socket, attempt: int) -> bool:
        """The source has connected again; on a thread of the listener. Takes the connection, unless
        a later one is here or the link is over, which it tells."""
        with self._lock:
            if self._is_closed:
                return False
            dropped: socket.socket | None = connection
            if attempt > self._last_attempt:
                dropped, self._other = self._other, connection
                self._last_attempt = attempt
        if dropped is not None:
            dropped.close()
        return True

    def attempt(self, timeout_s: float, num_useless: int, pause: Pause) -> socket.socket:
        if not self.has_other:
            pause(min(timeout_s, _KNOCK_S))
        with self._lock:
            other, self._other = self._other, None
        if other is not None:
            return other
        try:
            self._door.knock(min(timeout_s, _KNOCK_S))
        except DialError as error:
            if error.is_gone:
                raise PeerGoneError from None
            raise NotYetError(str(error)) from None
        raise NotYetError("its source has not connected again")

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            other, self._other = self._other, None
        if other is not None:
            with suppress(OSError):
                other.close()
