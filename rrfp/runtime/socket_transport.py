"""The socket transport: CPU tensors between the ranks of a run, without a wait for compute.

Ranks on one host meet at Unix sockets, others at TCP ports; the addresses travel through torch's
store. Each listener has a secret: a Unix socket's lies beside it, for this user alone; a TCP port's
travels through the store too, and protects the link as far as that store is protected. The wire is
authenticated when a connection is made, not encrypted: it belongs on a cluster's own network.
"""

import socket
import time
from collections.abc import Callable, Collection
from threading import Lock
from typing import TypeVar

from torch.distributed import Store

from rrfp.errors import UsageError
from rrfp.runtime.connecting import Listener, dial
from rrfp.runtime.delays import Delays
from rrfp.runtime.destination_end import DestinationEnd
from rrfp.runtime.links import LinkEnd, LinkOptions
from rrfp.runtime.protocols import Inbox, Message, PeerLostError
from rrfp.runtime.rendezvous import Rendezvous, files_identity
from rrfp.runtime.source_end import SourceEnd
from rrfp.runtime.whereabouts import Where
from rrfp.runtime.wire import Purpose, prepare_message
from rrfp.schedule.tasks import Task
from rrfp.trace.records import Record

_End = TypeVar("_End", bound=LinkEnd)


class SocketTransport:
    """One rank's links. Implements `rrfp.runtime.protocols.Transport`.

    A message's tensors must not be written to after `send`: contiguous ones are sent from where
    they lie. Replacing a tensor's `.data`, as Megatron's deallocation does, is no such write.
    """

    def __init__(
        self,
        rank: int,
        store: Store,
        sends_to: Collection[int],
        receives_from: Collection[int],
        inbox: Inbox,
        *,
        num_credits: int,
        prefix: str = "rrfp/transport",
        record: Callable[[Record], None] | None = None,
        connect_s: float = 60.0,
        heartbeat_s: float = 1.0,
        silence_s: float = 20.0,
        close_s: float = 5.0,
        max_message_bytes: int = 4 * 2**30,
        allow_unix: bool = True,
        address: str | None = None,
        delays: Delays | None = None,
    ) -> None:
        """Connect every link; returns when all are there.

        Every rank that has links makes its transport under the same `prefix`. `num_credits` is how
        many messages each incoming link must be able to hold that were not `consumed` yet: all of a
        step's in fixed dispatch, or a rank waits for ever behind the wrong microbatch. It holds up
        to an eighth more. `record` is called by the links' threads and by whoever sends.
        `allow_unix=False` takes TCP also within a host; `address` is where this rank listens for
        other hosts.

        Raises PeerLostError naming the rank that did not come within `connect_s`, or that said by
        `Rendezvous.fail` that it will not, and UsageError for settings that cannot work.
        """
        _check(rank, sends_to, receives_from, num_credits, heartbeat_s, silence_s)
        self._rank = rank
        self._options = LinkOptions(
            heartbeat_s=heartbeat_s,
            silence_s=silence_s,
            close_s=close_s,
            max_message_bytes=max_message_bytes,
            record=record,
            delays=delays,
        )
        self._inbox = inbox
        self._num_credits = num_credits
        self._lock = Lock()
        self._is_closed = False
        self._sources: dict[int, DestinationEnd] = {}
        self._destinations: dict[int, SourceEnd] = {}
        try:
            self._connect(
                Rendezvous(store, prefix, rank, connect_s),
                sends_to,
                receives_from,
                connect_s,
                files_identity() if allow_unix else f"tcp/{rank}",
                address,
            )
        except BaseException:
            self.close(farewell=False)
            raise

    def _connect(
        self,
        rendezvous: Rendezvous,
        sends_to: Collection[int],
        receives_from: Collection[int],
        connect_s: float,
        place: str,
        address: str | None,
    ) -> None:
        rank = self._rank
        rendezvous.publish(f"place/{rank}", place)
        peers = sorted({*sends_to, *receives_from})
        is_near = {peer: rendezvous.wait_text(f"place/{peer}", peer) == place for peer in peers}
        # Links run as soon as they are connected: a peer that is done connecting listens for
        # this rank's heartbeats while this rank still waits for slower ones.
        listener = Listener(
            rank,
            receives_from,
            self._open_source,
            unix=any(is_near[peer] for peer in receives_from),
            tcp=not all(is_near[peer] for peer in receives_from),
            address=address,
        )
        try:
            rendezvous.publish(f"address/{rank}", listener.where.to_json())
            for peer in sends_to:
                where = rendezvous.wait_json(f"address/{peer}", peer, Where.decode)
                connection = dial(
                    rank,
                    peer,
                    where,
                    unix=is_near[peer],
                    timeout_s=max(rendezvous.remaining_s, 0.001),
                )
                self._destinations[peer] = SourceEnd(
                    rank, peer, connection, self._inbox, self._options
                )
            listener.wait(rendezvous, connect_s)
        except PeerLostError:
            # It says why, where it could.
            rendezvous.raise_if_failed()
            raise
        finally:
            listener.close()

    def _open_source(self, peer: int, connection: socket.socket) -> None:
        self._sources[peer] = DestinationEnd(
            self._rank, peer, connection, self._inbox, self._options, self._num_credits
        )

    def send(self, peer: int, message: Message) -> None:
        """Send a message, or what of it can be sent without waiting; the link's thread sends the
        rest. A tensor that is not contiguous is copied here.

        Raises UsageError for tensors that cannot travel (not on the CPU, of an unknown dtype, too
        large) and for a peer that this rank does not send to.
        """
        prepared = prepare_message(message, self._options.max_message_bytes)
        _end(self._destinations, peer, f"rank {self._rank} does not send to").send(prepared)

    def consumed(self, peer: int, step: int) -> None:
        """Give the link peer -> here one credit back: the compute thread took a message of it."""
        _end(self._sources, peer, f"rank {self._rank} does not receive from").consumed(step)

    def grant(self, num_credits: int) -> None:
        """Raise every incoming link's credits to `num_credits`, for a step with more in flight;
        a smaller number changes nothing. Its sources need not know."""
        for source in self._sources.values():
            source.grant(num_credits)

    def report(self, peer: int, step: int, task: Task) -> None:
        """Tell the group's leader `peer` that the input of a task is here."""
        destination = _end(self._destinations, peer, f"rank {self._rank} does not send to")
        destination.announce(Purpose.REPORT, step, task, 0)

    def decide(self, peer: int, step: int, position: int, task: Task) -> None:
        """Tell the member `peer` the next task of the agreed sequence."""
        destination = _end(self._destinations, peer, f"rank {self._rank} does not send to")
        destination.announce(Purpose.DECISION, step, task, position)

    def close(self, *, farewell: bool = True) -> None:
        """Write what is queued, say farewell on every link, and stop every thread, within about
        `close_s`; a second call does nothing.

        With `farewell=False`, for a rank that fails, nothing is waited for, and the peers are told
        at once that this rank is lost.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        ends: list[LinkEnd] = [*self._destinations.values(), *self._sources.values()]
        deadline_s = time.monotonic() + self._options.close_s
        for end in ends:
            end.begin_close(deadline_s, farewell=farewell)
        for end in ends:
            end.join()


def _end(ends: dict[int, _End], peer: int, otherwise: str) -> _End:
    try:
        return ends[peer]
    except KeyError:
        raise UsageError(f"{otherwise} rank {peer}; it was not made with that link") from None


def _check(
    rank: int,
    sends_to: Collection[int],
    receives_from: Collection[int],
    num_credits: int,
    heartbeat_s: float,
    silence_s: float,
) -> None:
    if rank in sends_to or rank in receives_from:
        raise UsageError(f"rank {rank} has a link to itself; hand its own outputs over directly")
    if num_credits < 1:
        raise UsageError(f"num_credits is {num_credits}; it must be at least 1")
    if not 0 < heartbeat_s < silence_s:
        raise UsageError(
            f"heartbeat_s is {heartbeat_s:g} and silence_s {silence_s:g}; heartbeats must come"
            " more often than the silence that is taken for a loss"
        )
