"""A transport in memory, in virtual time, between ranks of one process: for tests of its users.

It runs the protocol that the sockets run (`rrfp.runtime.link`), with no thread and no clock: time
passes and bytes move only when a test says so, one end of one link at a time. A seed decides what
the test leaves open: how late bytes are, and which of several ends moves first. So messages keep
their order on one link and not between links, and a run is the same each time.
"""

import random
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from rrfp.errors import UsageError
from rrfp.runtime.link.channel import Channel, LinkId, LinkOptions, Output
from rrfp.runtime.link.endpoint import Endpoint
from rrfp.runtime.link.receiver import Receiver
from rrfp.runtime.link.sender import Envelope, Sender
from rrfp.runtime.link.wire import MAX_FORECAST_NS, Purpose
from rrfp.runtime.planes.codec import sendable
from rrfp.runtime.planes.plane import Fetch, Release
from rrfp.runtime.protocols import Inbox, Message
from rrfp.schedule.tasks import Task
from rrfp.trace.records import NS_PER_S, ReceiveRecord, Record, SendRecord

HEARTBEAT_NS = NS_PER_S
SILENCE_NS = 20 * NS_PER_S
CLOSE_NS = 5 * NS_PER_S
_MAX_MESSAGE_BYTES = 2**30


@dataclass(slots=True, eq=False)
class _Pipe:
    """One way of a connection."""

    capacity: int
    chunks: deque[tuple[int, bytes]] = field(default_factory=deque)
    """Times of arrival, and bytes."""
    last_ns: int = 0
    """Time at which the last of them arrives."""
    is_shut: bool = False
    """Nothing more is written to it."""
    is_unread: bool = False
    """Nothing more is read from it."""
    is_stalled: bool = False
    """True while its chunks do not arrive."""

    def free_bytes(self) -> int:
        return self.capacity - sum(len(chunk) for _, chunk in self.chunks)

    def arrival_ns(self) -> int | None:
        """Return the time at which there is something to read, including the end of the pipe; None
        if nothing was written."""
        if self.is_stalled:
            return None
        if self.chunks:
            return self.chunks[0][0]
        return self.last_ns if self.is_shut else None

    def read_into(self, buffer: memoryview, now_ns: int) -> int | None:
        """Move bytes that have arrived, and return their number; 0 at the end of the pipe, None if
        more must arrive."""
        arrival_ns = self.arrival_ns()
        if arrival_ns is None or arrival_ns > now_ns:
            return None
        if not self.chunks:
            return 0
        _, chunk = self.chunks.popleft()
        num_bytes = min(len(chunk), len(buffer))
        buffer[:num_bytes] = chunk[:num_bytes]
        if num_bytes < len(chunk):
            self.chunks.appendleft((arrival_ns, chunk[num_bytes:]))
        return num_bytes


@dataclass(slots=True, eq=False)
class _End:
    """One end of a link, with its two pipes."""

    rank: int
    link: Endpoint[Any]
    incoming: _Pipe
    outgoing: _Pipe
    put_output: Callable[[Output], None]
    wake_ns: int
    """Time at which it handles its link again, even if nothing has arrived."""

    def next_ns(self) -> int:
        arrival_ns = self.incoming.arrival_ns()
        return self.wake_ns if arrival_ns is None else min(self.wake_ns, arrival_ns)


class MemoryNetwork:
    """The network that the transports of some ranks share: their links, the time, and the
    faults."""

    def __init__(
        self, seed: int = 0, *, longest_delay_ns: int = 0, pipe_bytes: int = 2**16
    ) -> None:
        """Bytes take up to `longest_delay_ns` to arrive; at most `pipe_bytes` are in flight each
        way of a link."""
        self.now_ns = 0
        self._draws = random.Random(seed)
        self._longest_delay_ns = longest_delay_ns
        self._pipe_bytes = pipe_bytes
        self._pipes: dict[tuple[int, int], tuple[_Pipe, _Pipe]] = {}
        self._ends: list[_End] = []
        self._stopped: set[int] = set()

    def clock(self) -> int:
        """The virtual time, as a `Clock`."""
        return self.now_ns

    # Time.

    def step(self, latest_ns: int) -> bool:
        """Do the next thing that happens by `latest_ns`: one end reads, waits or writes. If nothing
        happens before, set the time to `latest_ns`, and return False."""
        moving = [(end.next_ns(), end) for end in self._ends if end.rank not in self._stopped]
        next_ns = min((moment for moment, _ in moving), default=latest_ns + 1)
        if next_ns > latest_ns:
            self.now_ns = max(self.now_ns, latest_ns)
            return False
        self.now_ns = max(self.now_ns, next_ns)
        first = [end for moment, end in moving if moment <= self.now_ns]
        self._serve(self._draws.choice(first))
        return True

    def run_for(self, duration_ns: int) -> None:
        """Let this much time pass."""
        latest_ns = self.now_ns + duration_ns
        while self.step(latest_ns):
            pass

    # Faults.

    def cut(self, source: int, destination: int) -> None:
        """Break the connection of a link: bytes in flight are lost, and both ends find it
        closed."""
        for pipe in self._pipes[source, destination]:
            pipe.chunks.clear()
            pipe.last_ns = self.now_ns
            pipe.is_shut = pipe.is_unread = True

    def stall(self, source: int, destination: int) -> None:
        """Hold back bytes in flight on a link, both ways, until `release`."""
        for pipe in self._pipes[source, destination]:
            pipe.is_stalled = True

    def release(self, source: int, destination: int) -> None:
        """Deliver the bytes that `stall` held back."""
        for pipe in self._pipes[source, destination]:
            pipe.is_stalled = False

    def stop(self, rank: int) -> None:
        """Stop a rank's process, as a signal does: its links do nothing until `resume`."""
        self._stopped.add(rank)

    def resume(self, rank: int) -> None:
        """Let a stopped rank continue."""
        self._stopped.discard(rank)

    # For its transports.

    def pipes(self, source: int, destination: int) -> tuple[_Pipe, _Pipe]:
        """Return the pipes of a link: from its source and back. They exist before its ends do."""
        key = source, destination
        if key not in self._pipes:
            self._pipes[key] = _Pipe(self._pipe_bytes), _Pipe(self._pipe_bytes)
        return self._pipes[key]

    def add(self, end: _End) -> None:
        self._ends.append(end)

    def write(self, end: _End) -> None:
        """Write as much as the pipe takes."""
        link, pipe = end.link, end.outgoing
        while buffers := link.next_write(self.now_ns):
            if pipe.is_unread:
                _emit(end, link.write_failed())
                return
            data = bytes(buffers[0][: pipe.free_bytes()])
            if data:
                self._put(pipe, data)
            _emit(end, link.wrote(len(data), self.now_ns))
            if link.channel.has_written_all:
                pipe.is_shut = True
            if not data:
                return

    def _put(self, pipe: _Pipe, data: bytes) -> None:
        delay_ns = self._draws.randint(0, self._longest_delay_ns)
        pipe.last_ns = max(pipe.last_ns, self.now_ns + delay_ns)
        pipe.chunks.append((pipe.last_ns, data))

    def _serve(self, end: _End) -> None:
        """Do what a link's thread does between two waits."""
        link, now_ns = end.link, self.now_ns
        has_read = False
        while not link.is_over and not link.channel.is_broken:
            num_bytes = end.incoming.read_into(link.channel.next_read(), now_ns)
            if num_bytes is None:
                break
            has_read = True
            _emit(end, link.received(num_bytes, now_ns) or [])
        if has_read:
            self._wake_peer(end)
        else:
            _emit(end, link.channel.waited(now_ns))
        if link.channel.is_broken:
            _emit(end, link.channel.fail_by_gone_peer())
        self.write(end)
        if link.is_over:
            self._close(end)
            return
        end.wake_ns = now_ns + link.channel.patience_ns(now_ns)
        if link.due_ns is not None:
            end.wake_ns = min(end.wake_ns, max(now_ns, link.due_ns))

    def _wake_peer(self, end: _End) -> None:
        """Wake the peer: there is space again for what it writes to this end."""
        for each in self._ends:
            if each.outgoing is end.incoming:
                each.wake_ns = self.now_ns

    def _close(self, end: _End) -> None:
        for data in end.link.channel.final_bytes():
            if not end.outgoing.is_unread:
                self._put(end.outgoing, bytes(data))
        end.outgoing.is_shut = True
        end.incoming.is_unread = True
        self._ends.remove(end)


def _emit(end: _End, outputs: Collection[Output]) -> None:
    for output in outputs:
        end.put_output(output)


class MemoryTransport:
    """One rank's links in a network. Implements `rrfp.runtime.protocols.Transport`.

    A link whose other end is not open yet accepts messages, and delivers them once it is.
    """

    def __init__(
        self,
        network: MemoryNetwork,
        rank: int,
        sends_to: Collection[int],
        receives_from: Collection[int],
        inbox: Inbox,
        *,
        num_credits: int,
        record: Callable[[Record], None] | None = None,
        heartbeat_ns: int = HEARTBEAT_NS,
        silence_ns: int = SILENCE_NS,
        close_ns: int = CLOSE_NS,
    ) -> None:
        """`SocketTransport` documents the arguments."""
        self._network = network
        self._rank = rank
        self._sends_to = sends_to
        self._receives_from = receives_from
        self._inbox = inbox
        self._num_credits = num_credits
        self._record = record
        self._close_ns = close_ns
        self._options = LinkOptions(
            heartbeat_ns, silence_ns, _MAX_MESSAGE_BYTES, keeps_records=record is not None
        )
        self._sources: dict[int, tuple[Receiver, _End]] = {}
        self._destinations: dict[int, tuple[Sender, _End]] = {}

    def open(self) -> None:
        """Make this rank's ends; does not wait for peers."""
        rank, now_ns = self._rank, self._network.now_ns
        for peer in self._sends_to:
            there, back = self._network.pipes(rank, peer)
            channel = Channel(LinkId(rank, peer, is_source=True), self._options, now_ns)
            sender = Sender(channel)
            self._destinations[peer] = sender, self._add(Endpoint(channel, sender), back, there)
        for peer in self._receives_from:
            there, back = self._network.pipes(peer, rank)
            channel = Channel(LinkId(rank, peer, is_source=False), self._options, now_ns)
            receiver = Receiver(channel, self._num_credits)
            self._sources[peer] = receiver, self._add(Endpoint(channel, receiver), there, back)

    def _add(self, link: Endpoint[Any], incoming: _Pipe, outgoing: _Pipe) -> _End:
        end = _End(self._rank, link, incoming, outgoing, self._put_output, self._network.now_ns)
        self._network.add(end)
        return end

    def _put_output(self, output: Output) -> None:
        assert not isinstance(output, Fetch | Release), "a transport in memory has no data plane"
        if not isinstance(output, SendRecord | ReceiveRecord):
            self._inbox.put(output)
        elif self._record is not None:
            self._record(output)

    def send(self, peer: int, message: Message) -> None:
        """Send a message, as much of it as the pipe takes now."""
        link, end = self._destination(peer)
        tensors, num_bytes = sendable(message, self._options.max_message_bytes)
        now_ns = self._network.now_ns
        envelope = Envelope(
            message.step, message.task, tensors, num_bytes, now_ns, message.latency_ns
        )
        self._write_now(end, link.send(envelope))

    def forecast(self, peer: int, step: int, task: Task, remaining_ns: int) -> None:
        """Announce to `peer` when to expect a task's input."""
        link, end = self._destination(peer)
        number = min(remaining_ns, MAX_FORECAST_NS)
        self._write_now(end, link.announce(Purpose.FORECAST, step, task, number))

    def report(self, peer: int, step: int, task: Task) -> None:
        """Report to the group's leader `peer` that a task's input is here."""
        link, end = self._destination(peer)
        self._write_now(end, link.announce(Purpose.REPORT, step, task, 0))

    def decide(self, peer: int, step: int, position: int, task: Task) -> None:
        """Send the member `peer` the next task of the agreed sequence."""
        link, end = self._destination(peer)
        self._write_now(end, link.announce(Purpose.DECISION, step, task, position))

    def consumed(self, peer: int, step: int) -> None:
        """Return one credit to `peer`."""
        if peer not in self._sources:
            raise UsageError(
                f"rank {self._rank} does not receive from rank {peer}; it was not made with that"
                " link"
            )
        link, end = self._sources[peer]
        link.consumed(step)
        end.wake_ns = self._network.now_ns

    def grant(self, num_credits: int) -> None:
        """Raise every incoming link's credits."""
        for link, end in self._sources.values():
            link.grant(num_credits)
            end.wake_ns = self._network.now_ns

    def close(self, *, farewell: bool = True) -> None:
        """Begin to close every link; the network's next steps do the rest (`is_over`)."""
        now_ns = self._network.now_ns
        for end in self._ends():
            end.link.channel.begin_close(now_ns + self._close_ns, farewell=farewell)
            end.wake_ns = now_ns

    @property
    def is_over(self) -> bool:
        """True if every link of this rank is over."""
        return all(end.link.is_over for end in self._ends())

    def _ends(self) -> list[_End]:
        links = [*self._destinations.values(), *self._sources.values()]
        return [end for _, end in links]

    def _destination(self, peer: int) -> tuple[Sender, _End]:
        if peer not in self._destinations:
            raise UsageError(
                f"rank {self._rank} does not send to rank {peer}; it was not made with that link"
            )
        return self._destinations[peer]

    def _write_now(self, end: _End, outputs: list[Output]) -> None:
        """Write at once as much as the pipe takes."""
        _emit(end, outputs)
        self._network.write(end)
        end.wake_ns = self._network.now_ns
