"""One end of a directed link: a channel, and the sender or the receiver that uses it.

Messages, reports, decisions and forecasts go from source to destination. Credits and released slots
return on the same connection; heartbeats and the farewell go both ways. Like its parts, an endpoint
has no thread, lock, socket or clock.
"""

from typing import Generic, Protocol, TypeVar

from rrfp.errors import RrfpError
from rrfp.runtime.link.channel import Channel, OutgoingFrame, Output, State
from rrfp.runtime.link.wire import Frame, GarbledError
from rrfp.runtime.planes.codec import FrameError
from rrfp.runtime.planes.plane import Completion


class Direction(Protocol):
    """The part of a link that depends on its direction: `Sender` or `Receiver`."""

    @property
    def num_queued(self) -> int:
        """Number of messages and announcements that must be written, or fetched, before the
        farewell."""
        ...

    @property
    def uses_plane(self) -> bool:
        """True while the data plane works on a message."""
        ...

    @property
    def awaits_plane(self) -> bool:
        """True while the peer's farewell must not be answered, because it may free memory then."""
        ...

    @property
    def due_ns(self) -> int | None:
        """Time at which the next frame may be written, if only that time holds it back."""
        ...

    @property
    def is_quick(self) -> bool:
        """True if the next frame may be written on the thread that queued it."""
        ...

    @property
    def waits_for_peer(self) -> bool:
        """True if there is nothing to write before the peer has sent something."""
        ...

    def next_frame(self, now_ns: int) -> OutgoingFrame | None:
        """Remove and return the next frame to write, if one may be written now; else None."""
        ...

    def written(self, frame: OutgoingFrame, now_ns: int) -> list[Output]:
        """Note that a frame was written whole, or has arrived, and return what to report; called
        once for each."""
        ...

    def acknowledged(self, frame: OutgoingFrame) -> list[Output]:
        """Note that the peer has received a frame, and return the requests and events that
        follow."""
        ...

    def received(self, frame: Frame, now_ns: int) -> list[Output]:
        """Handle a counted frame of the peer's, and return what follows from it. Raises FrameError
        for one that the peer must not send."""
        ...

    def complete(self, completion: Completion, now_ns: int) -> list[Output]:
        """Handle the result of a call of the data plane, and return what follows from it."""
        ...

    def peer_left(self) -> list[Output]:
        """Return what to report after a farewell of the peer's that ends the link."""
        ...


D = TypeVar("D", bound=Direction)


class Endpoint(Generic[D]):
    """One end of a link.

    To write: `next_write`, carry as many of its bytes as possible, `wrote`, until nothing is left
    or nothing can be carried. To read: fill the channel's `next_read`, `received`. To wait: at most
    the channel's `patience_ns`, and not beyond `due_ns`; then its `waited`, unless there is
    something to read. While the channel `is_broken`: no write or read; its `attach` when there is
    another connection. Any other call may fall between any two of these.
    """

    def __init__(self, channel: Channel, direction: D, *, has_plane: bool = False) -> None:
        """With `has_plane` the farewell waits for `detached`."""
        self.channel = channel
        self.direction = direction
        self._is_detached = not has_plane

    @property
    def is_over(self) -> bool:
        """True once the link is over, by farewells, a loss or the close deadline."""
        return self.channel.state is State.OVER

    @property
    def is_lost(self) -> bool:
        """True if it is over and the peer has not said farewell."""
        return self.is_over and not self.channel.has_peer_left

    @property
    def may_detach(self) -> bool:
        """True if the data plane is not detached yet, and is to be: the link is over, or this end
        closes and the plane has nothing more to do."""
        if self._is_detached or self.channel.state is State.OPEN:
            return False
        return self.channel.state is State.OVER or not self.direction.uses_plane

    def detached(self) -> None:
        """Note that this rank has detached from the peer's memory, so that it may say farewell."""
        self._is_detached = True

    @property
    def awaits_plane_only(self) -> bool:
        """True if the peer has left, and its last messages are still being fetched."""
        return self.channel.has_peer_left and self.direction.awaits_plane

    @property
    def may_write_at_once(self) -> bool:
        """True if the thread that queues a frame may write it: no frame is half written, and none
        is to be written again."""
        return self.direction.is_quick and self.channel.may_begin_at_once

    @property
    def waits_for_peer(self) -> bool:
        """True if there is nothing to do before the peer has sent something."""
        return not self.channel.is_busy and self.direction.waits_for_peer

    @property
    def due_ns(self) -> int | None:
        """Time at which the next frame may be written, if only that time holds it back."""
        if self.channel.is_busy or not self.channel.may_write_new:
            return None
        return self.direction.due_ns

    def complete(self, completion: Completion, now_ns: int) -> list[Output]:
        """Handle the result of a call of the data plane, and answer the peer's farewell if that
        waited for it."""
        outputs = self.direction.complete(completion, now_ns)
        if self.channel.has_peer_left:
            outputs += self._answer_farewell()
        return outputs

    # Writing.

    def next_write(self, now_ns: int) -> list[memoryview]:
        """Return the bytes to write now, of one frame; empty if there is nothing. If none is half
        written it begins the next one of the direction, or else a due one of the channel. If it
        returns any bytes, `wrote` or `write_failed` must follow."""
        channel = self.channel
        if channel.takes_frame(now_ns):
            frame = self.direction.next_frame(now_ns)
            if frame is not None:
                channel.begin(frame)
            else:
                may_leave = self._is_detached and self.direction.num_queued == 0
                channel.begin_own(now_ns, may_leave=may_leave)
        return channel.next_write(now_ns)

    def wrote(self, num_bytes: int, now_ns: int) -> list[Output]:
        """End a write of this many bytes; 0 if the peer reads none now. Pass a frame that is now
        whole to the direction, and answer the peer's farewell, if it has left; return what
        follows."""
        frame = self.channel.wrote(num_bytes, now_ns)
        outputs: list[Output] = []
        if frame is not None:
            outputs += self.direction.written(frame, now_ns)
        if self.channel.has_peer_left:
            outputs += self._answer_farewell()
        return outputs

    def write_failed(self) -> list[Output]:
        """End a write after which the peer reads nothing more, and answer its farewell, if it has
        left."""
        self.channel.write_failed()
        return self._answer_farewell()

    # Reading.

    def received(self, num_bytes: int, now_ns: int) -> list[Output] | None:
        """Account for bytes in the channel's `next_read`; 0 if the peer closed its connection.
        Return None while more of a frame must come first. A close or garbled bytes break the
        connection, a frame against the protocol ends the link, and an end that reads no more
        ignores them."""
        channel = self.channel
        if not channel.reads:
            return []
        if num_bytes == 0:
            return channel.break_connection("closed its connection without a farewell")
        try:
            frame = channel.read(num_bytes, now_ns)
            return None if frame is None else self._handle(frame, now_ns)
        except GarbledError as error:
            return channel.break_connection(f"sent what came garbled ({error})")
        except FrameError as error:
            return channel.fail(RrfpError(channel.link.describe_unreadable(str(error))))

    def _handle(self, frame: Frame, now_ns: int) -> list[Output]:
        """Apply a frame's acknowledgement, pass the frame to the direction unless it is the
        channel's own, and answer a farewell; return what follows from all that."""
        channel, direction = self.channel, self.direction
        outputs: list[Output] = []
        for each in channel.acknowledge(frame):
            if channel.mark_out(each):
                outputs += direction.written(each, now_ns)
            outputs += direction.acknowledged(each)
        if channel.accept(frame):
            outputs += direction.received(frame, now_ns)
        elif channel.has_peer_left:
            outputs += self._answer_farewell()
        return outputs

    def _answer_farewell(self) -> list[Output]:
        """Answer the peer's farewell, once it has left, and end the link; not while a write is in
        progress, as its frame may be the last, or messages are being fetched. Frames that still
        wait for the peer make it a loss."""
        channel = self.channel
        if not channel.has_peer_left or channel.is_writing or channel.state is State.OVER:
            return []
        if self.direction.awaits_plane:
            return []
        failed = channel.answer_farewell(self.direction.num_queued)
        if failed or channel.is_closing:
            return failed
        return self.direction.peer_left()
