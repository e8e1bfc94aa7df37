"""Frames arrive bit for bit or are refused, and both ends of a link hold to the protocol."""

import socket
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from rrfp.errors import UsageError
from rrfp.runtime.link.channel import (
    CONNECTION_TRANSITIONS,
    TRANSITIONS,
    Change,
    Channel,
    Connection,
    LinkId,
    State,
)
from rrfp.runtime.link.endpoint import Endpoint
from rrfp.runtime.link.sender import Sender
from rrfp.runtime.link.wire import (
    MAX_FORECAST_NS,
    Frame,
    FrameReader,
    GarbledError,
    Header,
    Purpose,
    checksum_of,
    decode_prefix,
    encode_header,
)
from rrfp.runtime.planes.codec import (
    DTYPES,
    Form,
    FrameError,
    decode_forms,
    payload_bytes,
    sendable,
    tensor_bytes,
)
from rrfp.runtime.protocols import LinkFailed, Message, PeerLeft, monotonic
from rrfp.schedule.tasks import Kind, Task
from rrfp.trace.records import evaluation_step
from tests.runtime.link_world import HEARTBEAT_NS, OPTIONS, World, envelope

MAX_BYTES = 1 << 20
TASK = Task(2, Kind.B, 5)
PREFIX_BYTES = 60


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor | None:
    if draw(st.booleans()) and draw(st.booleans()):
        return None
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=5))
    seed = draw(st.integers(0, 2**31))
    num_bytes = torch.empty(shape, dtype=dtype).nbytes
    data = torch.randint(
        0,
        2 if dtype is torch.bool else 256,
        (num_bytes,),
        generator=torch.Generator().manual_seed(seed),
    )
    tensor = data.to(torch.uint8).view(dtype).reshape(shape)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


def same_bits(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return bytes(tensor_bytes(left.contiguous())) == bytes(tensor_bytes(right.contiguous()))


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    right.setblocking(False)
    with left, right:
        yield left, right


def read(reader: FrameReader, connection: socket.socket) -> Frame | None:
    """The next frame, if a non-blocking socket has all of it. Raises EOFError at its end."""
    frame: Frame | None = None
    while frame is None:
        try:
            num_bytes = connection.recv_into(reader.missing)
        except BlockingIOError:
            break
        if num_bytes == 0:
            raise EOFError
        frame = reader.fill(num_bytes, monotonic())
    return frame


@given(st.lists(tensors(), max_size=4), st.data())
def test_a_message_arrives_bit_for_bit_however_it_is_cut(
    sent: list[torch.Tensor | None], data: st.DataObject
) -> None:
    prepared, num_bytes = sendable(Message(7, TASK, tuple(sent)), MAX_BYTES)
    header = Header(Purpose.MESSAGE, 7, TASK, sequence=3)
    stream = encode_header(header, prepared) + b"".join(
        bytes(tensor_bytes(tensor)) for tensor in prepared if tensor is not None
    )
    assert num_bytes == payload_bytes(sent)
    frame: Frame | None = None
    with pair() as (left, right):
        reader = FrameReader(MAX_BYTES)
        while stream:
            assert frame is None
            cut = data.draw(st.integers(1, len(stream)))
            left.sendall(stream[:cut])
            stream = stream[cut:]
            frame = read(reader, right)
    assert frame is not None
    assert frame.header == Header(Purpose.MESSAGE, 7, TASK, 3, num_tensors=len(sent))
    assert frame.num_bytes == payload_bytes(sent)
    assert len(frame.tensors) == len(sent)
    assert all(same_bits(*both) for both in zip(sent, frame.tensors, strict=True))


def test_frames_follow_each_other_and_an_end_is_reported() -> None:
    headers = [
        Header(Purpose.CREDIT, 1, number=4),
        Header(Purpose.HEARTBEAT),
        Header(Purpose.REPORT, 2, TASK),
        Header(Purpose.DECISION, 2, TASK, number=9),
        Header(Purpose.FORECAST, 2, TASK, number=MAX_FORECAST_NS),
        *(Header(Purpose.MESSAGE, evaluation_step(number), TASK) for number in (0, 1 << 40)),
        Header(Purpose.REPORT, evaluation_step(0), TASK),
        Header(Purpose.DECISION, evaluation_step(0), TASK, number=9),
        Header(Purpose.CREDIT, evaluation_step(0), number=4),
        Header(Purpose.RELEASED, number=256),
        Header(Purpose.FAREWELL),
    ]
    with pair() as (left, right):
        left.sendall(b"".join(encode_header(header) for header in headers))
        reader = FrameReader(MAX_BYTES)
        frames = [read(reader, right) for _ in headers]
        assert [frame.header for frame in frames if frame is not None] == headers
        assert read(reader, right) is None
        left.close()
        with pytest.raises(EOFError):
            read(reader, right)


@pytest.mark.parametrize(
    ("offset", "layout", "value", "complaint"),
    [
        (0, "<4s", b"HTTP", "begins with b'HTTP'"),
        (4, "<B", 1, "version 1"),
        (5, "<B", 99, "unknown purpose 99"),
        (6, "<B", 4, "unknown kind 4"),
        (6, "<B", 0, "purpose MESSAGE has the kind 0"),
        (5, "<B", 3, "purpose HEARTBEAT has the kind 2"),
        (8, "<i", -1, "negative"),
        (12, "<i", -1, "negative"),
        (24, "<q", -1, "negative"),
        (32, "<q", -1, "negative"),
        (40, "<q", -1, "acknowledged -1"),
    ],
)
def test_a_malformed_prefix_is_refused(
    offset: int, layout: str, value: object, complaint: str
) -> None:
    data = bytearray(encode_header(Header(Purpose.MESSAGE, 1, TASK)))
    struct.pack_into(layout, data, offset, value)
    with pytest.raises(FrameError, match=complaint):
        decode_prefix(sealed(data))


def sealed(data: bytes | bytearray) -> bytes:
    """With the checksum that it should have."""
    fields = bytes(data[: PREFIX_BYTES - 4])
    return fields + struct.pack("<I", zlib.crc32(fields)) + bytes(data[PREFIX_BYTES:])


def stream_of(checks_tensors: bool) -> tuple[bytes, int]:
    """A message with a tensor, and how many of its bytes a checksum covers."""
    tensor = torch.arange(8, dtype=torch.uint8)
    payload = tensor_bytes(tensor)
    checksum = checksum_of([payload]) if checks_tensors else 0
    header = encode_header(Header(Purpose.MESSAGE, 1, TASK), [tensor], 3, checksum)
    return header + bytes(payload), len(header) + checks_tensors * len(payload)


@pytest.mark.parametrize("checks_tensors", [False, True])
@given(st.data())
def test_a_flipped_bit_is_found(checks_tensors: bool, data: st.DataObject) -> None:
    stream, num_covered = stream_of(checks_tensors)
    bit = data.draw(st.integers(0, 8 * num_covered - 1))
    changed = bytearray(stream)
    changed[bit // 8] ^= 1 << bit % 8
    reader = FrameReader(MAX_BYTES, checks_tensors=checks_tensors)
    with pair() as (left, right):
        left.sendall(changed)
        with pytest.raises(GarbledError):
            read(reader, right)


def test_a_report_with_tensors_and_an_empty_credit_are_refused() -> None:
    data = bytearray(encode_header(Header(Purpose.REPORT, 1, TASK)))
    data[7] = 1
    with pytest.raises(FrameError, match="REPORT has 1 tensors"):
        decode_prefix(sealed(data))
    with pytest.raises(FrameError, match="gives no credit"):
        decode_prefix(encode_header(Header(Purpose.CREDIT)))


def test_a_forecast_beyond_all_patience_is_refused() -> None:
    header = Header(Purpose.FORECAST, 1, TASK, number=MAX_FORECAST_NS + 1)
    with pytest.raises(FrameError, match="a forecast is of"):
        decode_prefix(encode_header(header))


def descriptor(code: int, num_dimensions: int, *dimensions: int) -> bytes:
    return struct.pack("<BB6x8q", code, num_dimensions, *dimensions, *[0] * (8 - len(dimensions)))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (descriptor(200, 1, 4), "unknown dtype 200"),
        (descriptor(1, 9), "9 dimensions"),
        (descriptor(1, 2, 3, -1), "shape"),
        (descriptor(1, 1, 3, 3), "shape"),
        (descriptor(0, 1, 3), "not there has 1 dimensions"),
        (descriptor(1, 2, 2**40, 2**40), "above the maximum"),
        (descriptor(1, 2, 0, 2**62), "above the maximum"),
        (descriptor(5, 1, MAX_BYTES) + descriptor(5, 1, 1), "above the maximum"),
    ],
)
def test_a_malformed_tensor_is_refused_before_it_is_allocated(data: bytes, complaint: str) -> None:
    with pytest.raises(FrameError, match=complaint):
        decode_forms(data, MAX_BYTES)


def test_the_largest_message_is_accepted() -> None:
    assert decode_forms(descriptor(5, 1, MAX_BYTES), MAX_BYTES) == (
        Form(torch.uint8, (MAX_BYTES,)),
    )


@given(st.binary(min_size=PREFIX_BYTES, max_size=PREFIX_BYTES), st.booleans())
def test_random_bytes_are_refused_or_read(data: bytes, begins_well: bool) -> None:
    data = sealed(b"RRFP\x05" + data[5:]) if begins_well else data
    try:
        header, *_ = decode_prefix(data)
    except FrameError:
        return
    assert encode_header(header)[:7] == data[:7]


@given(st.binary(min_size=72, max_size=72))
def test_random_descriptors_are_refused_or_bounded(data: bytes) -> None:
    try:
        (form,) = decode_forms(data, MAX_BYTES)
    except FrameError:
        return
    if form is not None:
        dtype, shape = form
        assert torch.empty(shape, dtype=dtype).nbytes <= MAX_BYTES


def test_a_message_keeps_its_memory_when_data_is_replaced() -> None:
    tensor = torch.arange(6.0, requires_grad=True)
    ((kept,), _) = sendable(Message(0, TASK, (tensor,)), MAX_BYTES)
    tensor.data = torch.empty(1)
    assert kept is not None
    assert kept.tolist() == [0, 1, 2, 3, 4, 5]
    assert not kept.requires_grad


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        ((torch.empty(2, dtype=torch.complex64),), "complex64"),
        ((torch.empty(2, device="meta"),), "on meta"),
        ((torch.eye(2).to_sparse(),), "sparse"),
        ((torch.empty([1] * 9),), "9 dimensions"),
        ((torch.empty(MAX_BYTES + 1, dtype=torch.uint8),), "above the maximum"),
        ((None,) * 256, "256 tensors"),
    ],
)
def test_what_cannot_travel_is_refused_at_once(
    sent: tuple[torch.Tensor | None, ...], complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint):
        sendable(Message(0, TASK, sent), MAX_BYTES)


# The link protocol without a socket: both ends, a wire of bytes, and every interleaving of them.
#
# `pytest --hypothesis-profile thorough tests/runtime/test_protocol.py` runs 100,000 programs.


NUM_EXAMPLES = 100_000 if settings().max_examples >= 1000 else 400


@settings(max_examples=NUM_EXAMPLES)
@given(
    num_credits=st.integers(1, 9),
    program=st.binary(min_size=40, max_size=160),
    is_far=st.booleans(),
)
@pytest.mark.timeout(1200)
def test_every_interleaving_keeps_what_a_link_promises(
    num_credits: int, program: bytes, is_far: bool
) -> None:
    world = World(num_credits, is_far=is_far)
    try:
        world.run(program[:-1])
        world.end(program[-1])
    except BaseException:
        note(
            "\n".join(
                [f"num_credits {num_credits}, is_far {is_far}", *world.story, f"end({program[-1]})"]
            )
        )
        raise


# Single moves, one by one.


def open_ends() -> World:
    """A link whose destination has given one credit."""
    world = World(1)
    world.settle()
    return world


def test_the_states_of_an_end_that_closes() -> None:
    world = open_ends()
    world.send(0)
    world.send(0)
    world.begin_close(world.source, farewell=True)
    states = [world.source.state]
    world.settle()
    states.append(world.source.state)
    assert states == [State.DRAINING, State.OVER]
    world.check_that_all_came()
    assert PeerLeft(0) in world.destination.outputs
    # The destination was open, and answered.
    assert world.destination.written[-1] is Purpose.FAREWELL
    assert world.source.written[-1] is Purpose.FAREWELL


def test_an_end_lingers_until_its_peer_has_read_the_farewell() -> None:
    world = open_ends()
    world.begin_close(world.source, farewell=True)
    world.write(254)
    states = [world.source.state]
    world.send(0)
    assert not world.source.link.next_write(0), "its last word is said"
    world.settle()
    states.append(world.source.state)
    assert states == [State.LINGERING, State.OVER]
    assert not world.source.outputs


def test_no_state_leads_back() -> None:
    order = list(State)
    for before, changes in TRANSITIONS.items():
        assert changes[Change.END] is State.OVER
        for after in changes.values():
            assert order.index(after) >= order.index(before)
    assert set(TRANSITIONS) == set(State)
    assert set(TRANSITIONS[State.OVER].values()) == {State.OVER}


def test_a_connection_is_whole_again_only_by_a_resume() -> None:
    assert set(CONNECTION_TRANSITIONS) == set(Connection)
    leads_to_whole = {
        (before, change)
        for before, changes in CONNECTION_TRANSITIONS.items()
        for change, after in changes.items()
        if after is Connection.WHOLE
    }
    assert leads_to_whole == {(Connection.RESUMING, Change.RESUME)}
    assert all(before not in changes.values() for before, changes in CONNECTION_TRANSITIONS.items())


def test_an_event_that_is_missing_from_the_table_is_an_error() -> None:
    channel = Channel(LinkId(0, 1, is_source=True), OPTIONS, 0)
    with pytest.raises(AssertionError, match=r"ATTACH.* cannot occur in .*WHOLE"):
        channel.attach()


def test_a_farewell_that_comes_during_a_write_is_acted_on_when_the_write_has_ended() -> None:
    world = open_ends()
    world.send(0)
    world.begin_write(0)
    world.begin_close(world.destination, farewell=True)
    world.serve(1)
    world.source.read(1000, 0)
    # The end of the pipe, behind the farewell, is no news.
    world.source.read(1000, 0)
    states = [world.source.state]
    world.source.end_write(1000, 0)
    states.append(world.source.state)
    assert states == [State.OPEN, State.OVER]
    world.check()
    assert not world.source.failure, "the message was written before the link was over"


def test_frames_left_by_a_write_when_the_peer_has_left_are_a_loss() -> None:
    world = open_ends()
    world.send(0)
    world.begin_write(0)
    world.begin_close(world.destination, farewell=True)
    world.serve(1)
    world.source.read(1000, 0)
    world.source.end_write(5, 0)
    world.check()
    assert "rank 1 said farewell while 1 frames waited for it" in world.source.failure


def test_a_broken_wire_is_read_to_its_end() -> None:
    """An end that cannot write any more still reads the farewell that came before."""
    world = open_ends()
    world.begin_close(world.destination, farewell=True)
    world.serve(1)
    world.source.outgoing.is_unread = True
    world.advance(HEARTBEAT_NS)
    world.write(0)
    states = [world.source.state]
    world.source.read(1000, world.now_ns)
    states.append(world.source.state)
    assert states == [State.OPEN, State.OVER]
    world.check()
    assert not world.source.failure


def test_a_delay_holds_messages_back_one_after_the_other_and_reports_overtake_it() -> None:
    delays_s = iter([20e-9, 30e-9])
    channel = Channel(LinkId(0, 1, is_source=True), OPTIONS, 0)
    sender = Sender(channel, lambda: next(delays_s))
    sender._num_credits = 2
    link = Endpoint(channel, sender)
    for index in range(2):
        sender.send(envelope(Message(0, Task(1, Kind.F, index), ()), 0))
    written: list[tuple[int, int]] = []
    for now_ns in range(0, 60, 5):
        if now_ns == 10:
            sender.announce(Purpose.REPORT, 0, Task(1, Kind.B, 7), 0)
        while buffers := link.next_write(now_ns):
            data = b"".join(buffers)
            if data[5] != Purpose.HEARTBEAT:
                written.append((now_ns, data[5]))
            link.wrote(len(data), now_ns)
    message, report = int(Purpose.MESSAGE), int(Purpose.REPORT)
    assert written == [(10, report), (20, message), (50, message)]


def test_bytes_that_are_not_a_frame_are_an_error_and_end_the_link() -> None:
    world = open_ends()
    world.destination.incoming.data += encode_header(Header(Purpose.CREDIT, number=1))
    world.destination.read(1000, 0)
    (failed,) = world.destination.outputs
    assert isinstance(failed, LinkFailed)
    assert world.destination.state is State.OVER
    assert "what rank 0 sent to rank 1 cannot be read" in str(failed.error)


def test_tensors_are_handed_over_where_they_lie() -> None:
    world = open_ends()
    big = torch.zeros(1000, dtype=torch.uint8)
    world.sender.send(envelope(Message(0, Task(1, Kind.F, 0), (big,)), 0))
    _, payload = world.source.link.next_write(0)
    big.fill_(7)
    assert bytes(payload) == b"\7" * 1000
