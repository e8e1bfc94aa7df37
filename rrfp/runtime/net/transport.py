"""The socket transport: tensors between the ranks of a run, without a wait for compute.

Ranks on one host meet at Unix sockets, others at TCP ports; the addresses travel through torch's
store. Each listener has a secret: a Unix socket's lies beside it, for this user alone; a TCP port's
travels through the store too, and protects the link as far as that store is protected. The wire is
authenticated when a connection is made; between hosts it is encrypted if that is asked for, and
else belongs on a cluster's own network.

The sockets carry small tensors of the CPU themselves. Large ones, and those of a device, a data
plane carries beside them (`rrfp.runtime.planes.plane`).
"""

import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from threading import Lock
from typing import Protocol, TypeVar

import torch
from torch.distributed import Store

from rrfp.errors import UsageError
from rrfp.runtime.device.cuda import CudaDevice
from rrfp.runtime.device.interface import CPU, Device
from rrfp.runtime.link.channel import Far, LinkOptions
from rrfp.runtime.link.receiver import DestinationLink, LinkPlane
from rrfp.runtime.link.sender import SourceLink
from rrfp.runtime.link.wire import MAX_FORECAST_NS, Purpose, payload_bytes, prepare_message
from rrfp.runtime.net.connecting import Awaiting, DialError, Dialling, Door, Listener, Where
from rrfp.runtime.net.driver import DestinationDriver, SourceDriver, Wrap
from rrfp.runtime.net.faults import wrapped
from rrfp.runtime.net.tls import Tunnels
from rrfp.runtime.pace import Delays
from rrfp.runtime.planes.host_memory import BouncePuller
from rrfp.runtime.planes.negotiation import Settled, SettlingError
from rrfp.runtime.planes.outbox import Outbox
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.planes.selection import RankPlanes
from rrfp.runtime.protocols import Failed, Inbox, Message, PeerLostError, Transport, monotonic
from rrfp.runtime.rendezvous import Rendezvous, files_identity
from rrfp.schedule.tasks import Task
from rrfp.trace.records import NS_PER_S, Record

_END_S = 1.0
"""How long after the deadline of its close a thread may end; one waits for a device that hangs."""
_LAST_WORDS_S = 0.1
"""How long those of a rank that fails may take to be with the system, under TLS."""
_KNOCK_S = 1.0
_Driver = TypeVar("_Driver", SourceDriver, DestinationDriver)


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
        wrap: Wrap = wrapped,
    ) -> None:
        """Every rank that has links makes its transport under the same `prefix`. `num_credits` is
        how many messages each incoming link must be able to hold that were not `consumed` yet: all
        of a step's in fixed dispatch, or a rank waits for ever behind the wrong microbatch. It
        holds up to an eighth more. `record` is called by the links' threads and by whoever sends.
        `allow_unix=False` takes TCP also within a host; `address` is where this rank listens for
        other hosts. `planes` are its own from here on; None: the sockets carry all tensors. With
        `tls` connections at TCP ports are encrypted. `wrap` is given every connected socket. Raises
        UsageError for settings that cannot work.
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
        self._doors: dict[int, Door] = {}
        self._fars: dict[int, Far | None] = {}
        self._sources: dict[int, DestinationDriver] = {}
        self._awaiting: dict[int, Awaiting] = {}
        self._destinations: dict[int, SourceDriver] = {}

    def open(self) -> None:
        """Connect every link; returns when all are there.

        Raises PeerLostError naming the rank that did not come within `connect_s`, or that said by
        `Rendezvous.fail` that it will not, and UsageError for an address that cannot be listened
        at.
        """
        try:
            self._connect(Rendezvous(self._store, self._prefix, self._rank, self._connect_s))
        except BaseException:
            self.close(farewell=False)
            raise

    def _connect(self, rendezvous: Rendezvous) -> None:
        rank = self._rank
        place = files_identity() if self._allow_unix else f"tcp/{rank}"
        rendezvous.publish(f"place/{rank}", place)
        rendezvous.awaited = peers = sorted({*self._sends_to, *self._receives_from})
        is_near = {peer: rendezvous.wait_text(f"place/{peer}", peer) == place for peer in peers}
        # Links run as soon as they are connected: a peer that is done connecting listens for
        # this rank's heartbeats while this rank still waits for slower ones.
        self._planes.open(
            has_near=any(is_near.values()),
            has_far=not all(is_near.values()),
            encrypts=self._tunnels is not None,
        )
        self._listener = listener = Listener(
            rank,
            self._receives_from,
            self._connected,
            unix=any(is_near.values()),
            tcp=not all(is_near.values()),
            address=self._address,
            tunnels=self._tunnels,
        )
        listener.open()
        try:
            own = replace(listener.where, transport=self._planes.asked)
            rendezvous.publish(f"address/{rank}", own.to_json())
            for peer in peers:
                self._find(peer, own, rendezvous, is_near=is_near[peer])
            listener.accept()
            for peer in self._sends_to:
                connection = self._doors[peer].dial(max(rendezvous.remaining_s, 0.001))
                outbox = self._offer(connection, peer, rendezvous, is_near=is_near[peer])
                self._open_destination(peer, connection, outbox)
            listener.wait(rendezvous, self._connect_s, self._raise_if_gone)
        except PeerLostError:
            # It says why, where it could.
            rendezvous.raise_if_failed()
            raise
        # Who has dialled this rank has found its door before, and who was dialled by it, too.
        listener.hide()

    def _raise_if_gone(self, peer: int) -> None:
        """Raise PeerLostError if nobody listens any more at the door of a peer."""
        try:
            self._doors[peer].knock(_KNOCK_S)
        except DialError as error:
            if error.is_gone:
                raise

    def _find(self, peer: int, own: Where, rendezvous: Rendezvous, *, is_near: bool) -> None:
        """Find a peer's door."""
        where = rendezvous.wait_json(f"address/{peer}", peer, Where.decode)
        self._check_is_same(peer, where)
        self._doors[peer] = Door(self._rank, peer, where, unix=is_near, tunnels=self._tunnels)
        self._fars[peer] = None
        if not is_near:
            assert own.tcp is not None
            assert where.tcp is not None
            is_encrypted = self._tunnels is not None
            self._fars[peer] = Far(own.tcp.host, where.tcp.host, is_encrypted=is_encrypted)

    def _check_is_same(self, peer: int, where: Where) -> None:
        if where.transport != self._planes.asked:
            raise UsageError(
                f"rank {self._rank} has transport {self._planes.asked} and rank {peer}"
                f" {where.transport}; give all ranks the same"
            )

        if where.tcp is not None:
            own, told = (
                "on" if has_tls else "off"
                for has_tls in (self._tunnels is not None, where.tcp.fingerprint is not None)
            )
            if own != told:
                raise UsageError(
                    f"rank {self._rank} has tls {own} and rank {peer} {told}; give all ranks the"
                    " same"
                )

    def _offer(
        self, connection: socket.socket, peer: int, rendezvous: Rendezvous, *, is_near: bool
    ) -> Outbox | None:
        if not self._planes.settles:
            self._planes.settle(peer, Settled(TransportName.INLINE), is_near=is_near)
            return None
        try:
            left_s = max(rendezvous.remaining_s, 0.001)
            return self._planes.offer(connection, peer, is_near=is_near, timeout_s=left_s)
        except SettlingError as error:
            connection.close()
            raise self._unsettled(peer, error) from None

    def _unsettled(self, peer: int, error: SettlingError) -> PeerLostError:
        return PeerLostError(
            f"rank {self._rank} settled on no data plane with rank {peer}: {error}; see rank"
            f" {peer}'s own output for the cause"
        )

    def _open_destination(
        self, peer: int, connection: socket.socket, outbox: Outbox | None
    ) -> None:
        connection.settimeout(None)
        draw = None if self._delays is None else self._delays.draws(f"messages to {peer}")
        plane = TransportName.INLINE if outbox is None else outbox.plane.name
        link = SourceLink(
            self._rank, peer, self._options, monotonic(), draw, plane, self._fars[peer]
        )
        driver = SourceDriver(
            *(link, self._rank, Dialling(self._doors[peer]), self._inbox, self._record),
            *(f"rrfp-send-to-{peer}", self._wrap),
        )
        driver.outbox = outbox
        driver.start(connection)
        self._destinations[peer] = driver

    def _connected(self, peer: int, connection: socket.socket, attempt: int) -> None:
        """A source has connected, or once more; on a thread of the listener."""
        if attempt == 0:
            self._open_source(peer, connection)
        else:
            self._sources[peer].offer(self._awaiting[peer], connection, attempt)

    def _open_source(self, peer: int, connection: socket.socket) -> None:
        """Settle on a plane and start the link."""
        served = None
        if self._planes.settles:
            try:
                served = self._planes.answer(connection, peer, self._connect_s)
            except SettlingError as error:
                # The source says it, too; this rank finds a link that is over.
                self._inbox.put(Failed(self._unsettled(peer, error)))
            connection.settimeout(None)
        plane = None
        if served is not None:
            # On a device a message may be too large for the outbox, and come over the socket.
            is_inline, device = served[0].is_inline, self._planes.device
            lands = is_inline or not device.is_synchronous
            plane = LinkPlane(str(served[0].name), lands, frees_slots=is_inline)
        link = DestinationLink(
            *(self._rank, peer, self._options, monotonic(), self._num_credits),
            *(plane, self._fars[peer]),
        )
        awaiting = Awaiting(self._doors[peer])
        driver = DestinationDriver(
            *(link, self._rank, awaiting, self._inbox, self._record),
            *(f"rrfp-receive-from-{peer}", self._wrap),
        )
        if served is not None:
            driver.puller = served[1]
            driver.lander = BouncePuller(self._planes.device)
        driver.start(connection)
        self._awaiting[peer] = awaiting
        self._sources[peer] = driver

    def send(self, peer: int, message: Message) -> None:
        """Send a message, or what of it can be sent without waiting; the link's thread sends the
        rest. A tensor that is not contiguous is copied here.

        Raises UsageError for tensors that cannot travel (not on the CPU, of an unknown dtype, too
        large) and for a peer that this rank does not send to.
        """
        prepared = prepare_message(message, self._options.max_message_bytes, self._device_type)
        driver = _driver(self._destinations, peer, f"rank {self._rank} does not send to")
        outbox = driver.outbox
        if outbox is None or not self._planes.posts(
            outbox, prepared, payload_bytes(prepared.tensors)
        ):
            driver.send(prepared)
        else:
            outbox.put(driver, prepared)

    def consumed(self, peer: int, step: int) -> None:
        """Give the link peer -> here one credit back: the compute thread took a message of it."""
        _driver(self._sources, peer, f"rank {self._rank} does not receive from").consumed(step)

    def grant(self, num_credits: int) -> None:
        """Raise every incoming link's credits to `num_credits`, for a step with more in flight;
        a smaller number changes nothing. Its sources need not know."""
        for source in self._sources.values():
            source.grant(num_credits)

    def forecast(self, peer: int, step: int, task: Task, left_ns: int) -> None:
        """Tell `peer` when to expect the input of a task that is still to be sent."""
        destination = _driver(self._destinations, peer, f"rank {self._rank} does not send to")
        destination.announce(Purpose.FORECAST, step, task, min(left_ns, MAX_FORECAST_NS))

    def report(self, peer: int, step: int, task: Task) -> None:
        """Tell the group's leader `peer` that the input of a task is here."""
        destination = _driver(self._destinations, peer, f"rank {self._rank} does not send to")
        destination.announce(Purpose.REPORT, step, task, 0)

    def decide(self, peer: int, step: int, position: int, task: Task) -> None:
        """Tell the member `peer` the next task of the agreed sequence."""
        destination = _driver(self._destinations, peer, f"rank {self._rank} does not send to")
        destination.announce(Purpose.DECISION, step, task, position)

    @property
    def settled(self) -> dict[int, Settled]:
        """What carries the tensors of each link from this rank, by peer."""
        return self._planes.settled

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
        patience_s = self._close_s if farewell else 0.0
        deadline_ns = monotonic() + round(patience_s * NS_PER_S)
        if farewell:
            self._planes.drain(self._close_s)
        elif self._listener is not None:
            # Who finds a connection closed looks here whether this rank is lost.
            self._listener.close()
        drivers: list[SourceDriver | DestinationDriver]
        drivers = [*self._destinations.values(), *self._sources.values()]
        for driver in drivers:
            driver.begin_close(deadline_ns, farewell=farewell)
        end_ns = deadline_ns + round(_END_S * NS_PER_S)
        have_left = [driver.join(max(0, end_ns - monotonic()) / NS_PER_S) for driver in drivers]
        if self._listener is not None:
            self._listener.close()
        for door in self._doors.values():
            door.close()
        if self._tunnels is not None:
            self._tunnels.close(self._close_s if farewell else _LAST_WORDS_S)
        # Each peer has let go of this rank's memory before its farewell.
        self._planes.close(max(patience_s, _END_S), are_detached=all(have_left))


def _driver(drivers: dict[int, _Driver], peer: int, otherwise: str) -> _Driver:
    try:
        return drivers[peer]
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


# Which transport carries a rank's messages: the one place where a transport is registered.


class TransportMaker(Protocol):
    """Makes a transport that is not open yet. `SocketTransport` says what the arguments mean."""

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


TRANSPORTS: Mapping[str, TransportMaker] = {
    "cpu": SocketTransport,
    "cuda": SocketTransport,
}
"""By the type of the device on which a message's tensors lie; a GPU's go by a data plane. Where a
peer is, each transport asks when it opens, link by link, for a rank can have peers on its own host
and on others: the sockets take a Unix socket or a TCP port."""


DEVICES: Mapping[str, Callable[[torch.device], Device]] = {
    "cpu": lambda _: CPU,
    "cuda": CudaDevice,
}
"""What stands for a device of this type, whatever lies on it."""


def device_at(device: torch.device) -> Device:
    """The runtime's device where tensors lie on this one of torch's. Raises UsageError for one that
    is not there, or of a type that nothing serves."""
    if device.type not in DEVICES:
        raise _unserved(device)
    return DEVICES[device.type](device)


def data_planes(device: torch.device, asked: TransportName, outbox_mb: int) -> RankPlanes:
    """What carries large messages, and those of a device, as a user asked for it. Raises UsageError
    for what does not go together, or is not there."""
    return RankPlanes(device_at(device), asked, outbox_mb * 2**20)


def transport_maker(device: torch.device) -> TransportMaker:
    """What makes transports for tensors on this device. Raises UsageError for a device that none
    serves."""
    if device.type not in TRANSPORTS:
        raise _unserved(device)
    return TRANSPORTS[device.type]


def _unserved(device: torch.device) -> UsageError:
    served = " and ".join(name.upper() for name in TRANSPORTS)
    return UsageError(
        f"the model is on {device} and messages carry {served} tensors only; there is no"
        " transport for other devices in this version"
    )
