"""Drives the receiving end of a link: its thread alone writes."""

import socket
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from threading import current_thread

import torch

from rrfp.errors import RrfpError
from rrfp.runtime.links.destination_link import DestinationLink
from rrfp.runtime.links.states import Released
from rrfp.runtime.planes.plane import Pull, Puller
from rrfp.runtime.transport.driver import LinkDriver
from rrfp.runtime.transport.reconnecting import Awaiting


class DestinationDriver(LinkDriver[DestinationLink]):
    """The end that receives."""

    puller: Puller | None = None
    """What takes messages out of the peer's outbox; set before the thread starts."""

    lander: Puller | None = None
    """Likewise, what takes to the device the tensors that the socket has carried."""

    def _serve(self, output: Pull | Released) -> None:
        assert isinstance(output, Pull)
        puller = self.puller if output.inline is None else self.lander
        assert puller is not None
        # A tensor that is kept is not to keep this driver, its inbox and what waits there.
        release = partial(_release, self._link, weakref.ref(self))
        puller.pull(output, self._pulled, release)

    def _pulled(self, pull: Pull, pulled: Sequence[torch.Tensor | None] | RrfpError) -> None:
        with self._lock:
            if isinstance(pulled, RrfpError):
                outputs = self._link.fail(pulled)
            else:
                outputs = self._link.pulled(pull, pulled, self._clock())
            if current_thread() is not self._thread:
                self._wake()
        self._tell(outputs)

    def wake_if_free(self) -> None:
        """Have the thread look, unless somebody holds the lock now."""
        if self._lock.acquire(blocking=False):
            try:
                self._wake()
            finally:
                self._lock.release()

    def _let_go(self) -> None:
        with self._lock:
            may_detach, is_lost = self._link.may_detach, self._link.is_lost
        if self.puller is not None and may_detach:
            self.puller.detach(waits=not is_lost)
            with self._lock:
                self._link.let_go()

    def consumed(self, step: int) -> None:
        """The compute thread took a message: give its credit back."""
        with self._lock:
            if self._link.consumed(step):
                self._wake()

    def grant(self, num_credits: int) -> None:
        """Raise the bound on messages in flight; a smaller one changes nothing."""
        with self._lock:
            if self._link.grant(num_credits):
                self._wake()

    def offer(self, awaiting: Awaiting, connection: socket.socket, attempt: int) -> None:
        """The source has connected again; on a thread of the listener. Takes the connection."""
        if awaiting.offer(connection, attempt):
            with self._lock:
                self._wake()
            return
        # It has not heard the answer to its farewell.
        with connection, suppress(OSError):
            connection.sendall(self._link.parting_words())


def _release(
    link: DestinationLink, of_driver: "weakref.ref[DestinationDriver]", offset: int
) -> None:
    """The tensors in a lent slot are gone: have the peer told. Whoever drops the last of them calls
    this between any two instructions, perhaps of the driver's own under its lock: so nobody waits
    for that, and what is not told now goes with whatever is written next."""
    link.release(offset)
    driver = of_driver()
    if driver is not None:
        driver.wake_if_free()
