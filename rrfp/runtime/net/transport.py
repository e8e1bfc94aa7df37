"""The socket transport: tensors between the ranks of a run, without a wait for compute.

Ranks on one host connect by Unix sockets, others by TCP; they publish their addresses in torch's
store. Both sides of a connection authenticate (`rrfp.runtime.net.connecting`). A TCP link is as
safe as the store, which has its secret. Between hosts it is encrypted on request; otherwise use a
private network.

The sockets carry small CPU tensors themselves. A data plane carries large ones, and those of a
device (`rrfp.runtime.planes.plane`).
"""

import socket
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Protocol, TypeVar

import torch
from torch.distributed import Store

from rrfp.errors import UsageError
from rrfp.runtime.device.cuda import CudaDevice
from rrfp.runtime.device.interface import CPU, Device
from rrfp.runtime.link.channel import Channel, CrossHost, LinkId, LinkOptions
from rrfp.runtime.link.driver import LinkDriver
from rrfp.runtime.link.endpoint import Endpoint
from rrfp.runtime.link.receiver import PlaneUse, Receiver
from rrfp.runtime.link.sender import Envelope, Sender
from rrfp.runtime.link.wire import MAX_FORECAST_NS, Purpose
from rrfp.runtime.net.connecting import (
    DestinationReconnector,
    DialError,
    Listener,
    ListenerAddress,
    PeerAddress,
    SourceReconnector,
)
from rrfp.runtime.net.faults import with_faults
from rrfp.runtime.net.tls import Tunnels
from rrfp.runtime.pace import Delays
from rrfp.runtime.planes.codec import sendable
from rrfp.runtime.planes.plane import Stager
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.planes.selection import Incoming, NegotiationError, RankPlanes
from rrfp.runtime.protocols import Inbox, LinkFailed, Message, PeerLostError, Transport, monotonic
from rrfp.runtime.rendezvous import Rendezvous, files_identity
from rrfp.schedule.tasks import Task
from rrfp.trace.records import NS_PER_S, Record

_END_S = 1.0
"""Time after the deadline of its close in which a thread may end; one may wait for a device that
hangs."""
_FINAL_BYTES_S = 0.1
"""Time in which the last bytes of a failing rank may pass through TLS."""
_LISTENING_CHECK_S = 1.0

Wrap = Callable[[socket.socket, int, int], socket.socket]
"""Function of a connected socket, this rank and the peer that returns the socket to use."""


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """A link from this rank."""

    driver: LinkDriver[Sender]
    sender: Sender
    stager: Stager | None
    """Stages the messages that the socket does not carry."""

    def send(self, envelope: Envelope) -> None:
        """Send a message: stage it if the data plane accepts it, and otherwise queue it for the
        socket and write as much as that takes without waiting."""
        driver, stager = self.driver, self.stager
        if stager is None or not stager.accepts(envelope.tensors, envelope.num_bytes):
            driver.submit(lambda: self.sender.send(envelope))
        else:
            # The stager alone keeps the tensors alive, until they are copied.
            tensors, envelope.tensors = envelope.tensors, ()
            driver.change(self.sender.begin_staging)
            stager.stage(tensors, envelope, driver)


@dataclass(frozen=True, slots=True)
class _Incoming:
    """A link to this rank."""

    driver: LinkDriver[Receiver]
    receiver: Receiver
    reconnector: DestinationReconnector
    channel: Channel

    def reconnected(self, connection: socket.socket, attempt: int) -> None:
        """Offer a further connection of the source to the link's thread; if the link is over,
        answer the source's farewell again, if it said one, and close the connection. A thread of
        the listener calls it."""
        if self.reconnector.offer(connection, attempt):
            self.driver.note_other_connection()
            return
        # The source did not receive the answer to its farewell.
        with connection, suppress(OSError):
            connection.sendall(self.channel.reply_to_reconnect())


_Link = TypeVar("_Link", _Outgoing, _Incoming)


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
        max_message_bytes: int = 2**40,
        allow_unix: bool = True,
        address: str | None = None,
        delays: Delays | None = None,
        planes: RankPlanes | None = None,
        tls: bool = False,
        wrap: Wrap = with_faults,
    ) -> None:
        """Every rank that has links makes its transport under the same `prefix`.

        `num_credits` is the number of messages that each incoming link must be able to hold before
        they are `consumed`: all of a step's in fixed dispatch, or a rank may wait indefinitely
        behind the wrong microbatch. A link holds up to an eighth more. The links' threads call
        `record`, and so do threads that send. `allow_unix=False` uses TCP also within a host;
        `address` is this rank's listener address for other hosts. The transport owns `planes`;
        without them the sockets carry all tensors. With `tls` connections by TCP are encrypted.
        `wrap` is called with every connected socket. Raises UsageError for settings that cannot
        work.
        """
        _check(rank, sends_to, receives_from, num_credits, heartbeat_s, silence_s)
        self._rank = rank
        self._store = store
        self._sends_to = sends_to
        self._receives_from = receives_from
        self._inbox = inbox
        self._num_credits = num_credits
        self._prefix = prefix
        self._record = record
        self._connect_s = connect_s
        self._close_s = close_s
        self._options = LinkOptions(
            heartbeat_ns=round(heartbeat_s * NS_PER_S),
            silence_ns=round(silence_s * NS_PER_S),
            max_message_bytes=max_message_bytes,
            keeps_records=record is not None,
        )
        self._allow_unix = allow_unix
        self._address = address
        self._delays = delays
        self._planes = planes or RankPlanes(CPU, TransportName.INLINE, 0)
        self._tunnels = Tunnels() if tls else None
        self._wrap = wrap
        self._device_type = self._planes.device.torch_device.type
        self._lock = Lock()
        self._is_closed = False
        self._listener: Listener | None = None
        self._addresses: dict[int, PeerAddress] = {}
        self._cross_hosts: dict[int, CrossHost | None] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._outgoing: dict[int, _Outgoing] = {}

    def open(self) -> None:
        """Connect every link; return when all are connected. Any error closes everything.

        Raises PeerLostError naming a rank that did not connect within `connect_s` or that called
        `Rendezvous.fail`, and UsageError for an address that this host does not have, or for a peer
        with other settings.
        """
        try:
            self._connect(Rendezvous(self._store, self._prefix, self._rank, self._connect_s))
        except BaseException:
            self.close(farewell=False)
            raise

    def _connect(self, rendezvous: Rendezvous) -> None:
        """Publish this rank's address, wait for those of its peers, and connect every link, within
        the rendezvous' deadline. Raises PeerLostError or UsageError."""
        rank = self._rank
        place = files_identity() if self._allow_unix else f"tcp/{rank}"
        rendezvous.publish(f"place/{rank}", place)
        rendezvous.awaited = peers = sorted({*self._sends_to, *self._receives_from})
        is_same_host = {
            peer: rendezvous.wait_text(f"place/{peer}", peer) == place for peer in peers
        }
        # Links run as soon as they are connected: a peer that is done connecting listens for
        # this rank's heartbeats while this rank still waits for slower ones.
        self._planes.open(
            has_same_host=any(is_same_host.values()),
            has_other_host=not all(is_same_host.values()),
            encrypts=self._tunnels is not None,
        )
        self._listener = listener = Listener(
            rank,
            self._receives_from,
            self._connected,
            unix=any(is_same_host.values()),
            tcp=not all(is_same_host.values()),
            address=self._address,
            tunnels=self._tunnels,
        )
        listener.open()
        try:
            own = replace(listener.address, transport=self._planes.requested)
            rendezvous.publish(f"address/{rank}", own.to_json())
            for peer in peers:
                self._find_peer(peer, own, rendezvous, is_same_host=is_same_host[peer])
            listener.accept()
            for peer in self._sends_to:
                connection = self._addresses[peer].dial(max(rendezvous.remaining_s, 0.001))
                stager = self._offer(connection, peer, rendezvous, is_same_host=is_same_host[peer])
                self._open_outgoing(peer, connection, stager)
            listener.wait(rendezvous, self._connect_s, self._raise_if_gone)
        except PeerLostError:
            # Prefer the failed rank's own reason, if it has published one.
            rendezvous.raise_if_failed()
            raise
        # All peers have opened its files by now.
        listener.remove_files()

    def _raise_if_gone(self, peer: int) -> None:
        """Raise PeerLostError if no process listens at a peer's address; ignore other failures to
        connect."""
        try:
            self._addresses[peer].check_listening(_LISTENING_CHECK_S)
        except DialError as error:
            if error.is_gone:
                raise

    def _find_peer(
        self, peer: int, own: ListenerAddress, rendezvous: Rendezvous, *, is_same_host: bool
    ) -> None:
        """Wait for a peer's address, and store it. Raises UsageError if the peer has another
        transport or TLS setting."""
        address = rendezvous.wait_json(f"address/{peer}", peer, ListenerAddress.decode)
        self._check_same_settings(peer, address)
        self._addresses[peer] = PeerAddress(
            self._rank, peer, address, unix=is_same_host, tunnels=self._tunnels
        )
        self._cross_hosts[peer] = None
        if not is_same_host:
            assert own.tcp is not None
            assert address.tcp is not None
            is_encrypted = self._tunnels is not None
            self._cross_hosts[peer] = CrossHost(
                own.tcp.host, address.tcp.host, is_encrypted=is_encrypted
            )

    def _check_same_settings(self, peer: int, address: ListenerAddress) -> None:
        """Raise UsageError if a peer has another transport or, where it listens at a TCP port,
        another TLS setting."""
        requested = self._planes.requested
        if address.transport != requested:
            raise UsageError(
                f"rank {self._rank} has transport {requested} and rank {peer}"
                f" {address.transport}; give all ranks the same"
            )
        if address.tcp is not None:
            own = "off" if self._tunnels is None else "on"
            other = "off" if address.tcp.fingerprint is None else "on"
            if own != other:
                raise UsageError(
                    f"rank {self._rank} has tls {own} and rank {peer} {other}; give all ranks the"
                    " same"
                )

    def _offer(
        self, connection: socket.socket, peer: int, rendezvous: Rendezvous, *, is_same_host: bool
    ) -> Stager | None:
        """Negotiate a plane for a link from this rank, and return its stager; None: the socket
        carries all tensors. If the negotiation fails, close the connection and raise
        PeerLostError."""
        try:
            left_s = max(rendezvous.remaining_s, 0.001)
            return self._planes.offer(connection, peer, is_same_host=is_same_host, timeout_s=left_s)
        except NegotiationError as error:
            connection.close()
            raise self._make_negotiation_error(peer, error) from None

    def _make_negotiation_error(self, peer: int, error: NegotiationError) -> PeerLostError:
        """Make, but not raise, the error for a failed negotiation with a peer."""
        return PeerLostError(
            f"rank {self._rank} settled on no data plane with rank {peer}: {error}; see rank"
            f" {peer}'s own output for the cause"
        )

    def _channel(self, peer: int, *, is_source: bool) -> Channel:
        """Make the channel of this rank's end of a link with a peer."""
        link = LinkId(self._rank, peer, is_source, self._cross_hosts[peer])
        return Channel(link, self._options, monotonic())

    def _open_outgoing(self, peer: int, connection: socket.socket, stager: Stager | None) -> None:
        """Start the link to a peer over this connection, with the stager of its plane, if any. The
        link's driver then owns the connection."""
        connection.settimeout(None)
        draw = None if self._delays is None else self._delays.generator(f"messages to {peer}")
        plane = TransportName.INLINE if stager is None else stager.plane
        channel = self._channel(peer, is_source=True)
        sender = Sender(channel, draw, plane)
        driver = LinkDriver(
            Endpoint(channel, sender, has_plane=stager is not None),
            SourceReconnector(self._addresses[peer]),
            self._inbox,
            self._record,
            f"rrfp-send-to-{peer}",
            stager=stager,
            wrap=lambda connection: self._wrap(connection, self._rank, peer),
        )
        driver.start(connection)
        self._outgoing[peer] = _Outgoing(driver, sender, stager)

    def _connected(self, peer: int, connection: socket.socket, attempt: int) -> None:
        """Use a connection of a source, its first (attempt 0) or a later one; a thread of the
        listener calls it."""
        if attempt == 0:
            self._open_incoming(peer, connection)
        else:
            self._incoming[peer].reconnected(connection, attempt)

    def _open_incoming(self, peer: int, connection: socket.socket) -> None:
        """Negotiate a plane and start a link to this rank. If the negotiation fails, put
        `LinkFailed` into the inbox and start the link without a plane."""
        incoming: Incoming | None = None
        try:
            incoming = self._planes.answer(connection, peer, self._connect_s)
        except NegotiationError as error:
            # The source reports it, too; this rank finds a link that is over.
            self._inbox.put(LinkFailed(self._make_negotiation_error(peer, error)))
        connection.settimeout(None)
        plane, fetcher = None, None
        if incoming is not None:
            plane = PlaneUse(str(incoming.name), incoming.lands, incoming.is_carried)
            fetcher = incoming.fetcher
        channel = self._channel(peer, is_source=False)
        receiver = Receiver(channel, self._num_credits, plane)
        reconnector = DestinationReconnector(self._addresses[peer])
        driver = LinkDriver(
            Endpoint(channel, receiver, has_plane=fetcher is not None),
            reconnector,
            self._inbox,
            self._record,
            f"rrfp-receive-from-{peer}",
            fetcher=fetcher,
            wrap=lambda connection: self._wrap(connection, self._rank, peer),
        )
        driver.start(connection)
        self._incoming[peer] = _Incoming(driver, receiver, reconnector, channel)

    def send(self, peer: int, message: Message) -> None:
        """Send a message: this thread writes as much as the socket takes without waiting, and the
        link's thread the rest; a data plane may carry the tensors. A tensor that is not contiguous
        is copied here.

        Raises UsageError for tensors that cannot travel (on another type of device, of an unknown
        dtype, too large) and for a peer that this rank does not send to.
        """
        tensors, num_bytes = sendable(message, self._options.max_message_bytes, self._device_type)
        link = _link(self._outgoing, peer, f"rank {self._rank} does not send to")
        link.send(
            Envelope(
                message.step, message.task, tensors, num_bytes, monotonic(), message.latency_ns
            )
        )

    def consumed(self, peer: int, step: int) -> None:
        """Count one credit as free for `peer`, because the compute thread took one of its messages;
        credits are sent in batches. Raises UsageError for a peer that this rank does not receive
        from."""
        link = _link(self._incoming, peer, f"rank {self._rank} does not receive from")
        link.driver.change(partial(link.receiver.consumed, step))

    def grant(self, num_credits: int) -> None:
        """Raise every incoming link's bound on messages in flight to `num_credits`, for a step with
        more of them; a smaller number changes nothing. Its sources need not know."""
        for link in self._incoming.values():
            link.driver.change(partial(link.receiver.grant, num_credits))

    def forecast(self, peer: int, step: int, task: Task, remaining_ns: int) -> None:
        """Announce to `peer` in how many ns to expect a task's input; more than an hour is
        announced as an hour."""
        self._announce(peer, Purpose.FORECAST, step, task, min(remaining_ns, MAX_FORECAST_NS))

    def report(self, peer: int, step: int, task: Task) -> None:
        """Report to the group's leader `peer` that the input of a task is here."""
        self._announce(peer, Purpose.REPORT, step, task, 0)

    def decide(self, peer: int, step: int, position: int, task: Task) -> None:
        """Send the member `peer` the next task of the agreed sequence."""
        self._announce(peer, Purpose.DECISION, step, task, position)

    def _announce(self, peer: int, purpose: Purpose, step: int, task: Task, number: int) -> None:
        """Queue an announcement with its number, and write as much as the socket takes. Raises
        UsageError for a peer that this rank does not send to."""
        link = _link(self._outgoing, peer, f"rank {self._rank} does not send to")
        link.driver.submit(partial(link.sender.announce, purpose, step, task, number))

    def close(self, *, farewell: bool = True) -> None:
        """Write what is queued, say farewell on every link, and stop every thread; each of these
        waits for at most about `close_s`. A second call does nothing.

        With `farewell=False`, for a rank that fails, it waits for no peer, and the peers learn at
        once that this rank is lost.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        patience_s = self._close_s if farewell else 0.0
        deadline_ns = monotonic() + round(patience_s * NS_PER_S)
        if farewell:
            self._planes.drain(self._close_s)
        elif self._listener is not None:
            # A peer whose connection is closed checks here whether this rank is lost.
            self._listener.close()
        drivers: list[LinkDriver[Sender] | LinkDriver[Receiver]] = [
            *(link.driver for link in self._outgoing.values()),
            *(link.driver for link in self._incoming.values()),
        ]
        for driver in drivers:
            driver.begin_close(deadline_ns, farewell=farewell)
        end_ns = deadline_ns + round(_END_S * NS_PER_S)
        have_left = [driver.join(max(0, end_ns - monotonic()) / NS_PER_S) for driver in drivers]
        if self._listener is not None:
            self._listener.close()
        for address in self._addresses.values():
            address.close()
        if self._tunnels is not None:
            self._tunnels.close(self._close_s if farewell else _FINAL_BYTES_S)
        # Each peer has detached from this rank's memory before its farewell.
        self._planes.close(max(patience_s, _END_S), are_detached=all(have_left))


def _link(links: dict[int, _Link], peer: int, otherwise: str) -> _Link:
    """Return the link with a peer. Raises UsageError that begins with `otherwise` without one."""
    try:
        return links[peer]
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
    """Raise UsageError for a link to the rank itself, less than one credit, or a `heartbeat_s` that
    is not above 0 and below `silence_s`."""
    if rank in sends_to or rank in receives_from:
        raise UsageError(f"rank {rank} has a link to itself; pass its own outputs on directly")
    if num_credits < 1:
        raise UsageError(f"num_credits is {num_credits}; it must be at least 1")
    if not 0 < heartbeat_s < silence_s:
        raise UsageError(
            f"heartbeat_s is {heartbeat_s:g} and silence_s {silence_s:g}; heartbeats must come"
            " more often than the silence that is taken for a loss"
        )


# The parts of a run's transport: its constructor, the device of its tensors, their planes.


class TransportFactory(Protocol):
    """Constructor of a transport, which contacts no peer before `open`. `SocketTransport` documents
    the arguments."""

    def __call__(
        self,
        rank: int,
        store: Store,
        sends_to: Collection[int],
        receives_from: Collection[int],
        inbox: Inbox,
        *,
        num_credits: int,
        prefix: str,
        record: Callable[[Record], None] | None,
        connect_s: float,
        silence_s: float,
        delays: Delays | None,
        planes: RankPlanes | None,
        tls: bool,
    ) -> Transport: ...


DEVICES: Mapping[str, Callable[[torch.device], Device]] = {
    "cpu": lambda _: CPU,
    "cuda": CudaDevice,
}
"""Constructor of the runtime's device, by the type of torch's device."""


def check_device(device: torch.device) -> None:
    """Raise UsageError for a device of a type other than CPU and CUDA; its existence is not
    checked."""
    if device.type not in DEVICES:
        served = " and ".join(name.upper() for name in DEVICES)
        raise UsageError(
            f"the model is on {device} and messages carry {served} tensors only; there is no"
            " transport for other devices in this version"
        )


def make_device(device: torch.device) -> Device:
    """Make the runtime's device for one of torch's. Raises UsageError for a device that is missing,
    or of a type without a transport."""
    check_device(device)
    return DEVICES[device.type](device)


def make_planes(device: torch.device, requested: TransportName, outbox_mb: int) -> RankPlanes:
    """Make the data planes of a rank for the requested transport, with outboxes of this many MiB.
    Raises UsageError for a missing device, or for a transport that does not carry tensors on it."""
    return RankPlanes(make_device(device), requested, outbox_mb * 2**20)
