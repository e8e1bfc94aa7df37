"""The link protocol without a socket: both ends, a wire of bytes, and every interleaving of them.

`pytest --hypothesis-profile thorough tests/test_link_protocol.py` runs 100,000 programs.
"""

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from rrfp.runtime.link.channel import NEXT_STATES, State
from rrfp.runtime.link.sender import SourceLink
from rrfp.runtime.link.wire import Header, Purpose, encode_header
from rrfp.runtime.protocols import Failed, Left, Message
from rrfp.schedule.tasks import Kind, Task
from tests.link_end import HEARTBEAT_NS, OPTIONS
from tests.link_world import World

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
    states = [world.source_link.state]
    world.settle()
    states.append(world.source_link.state)
    assert states == [State.DRAINING, State.OVER]
    world.check_that_all_came()
    assert Left(0) in world.destination.outputs
    # The destination was open, and answered.
    assert world.destination.written[-1] is Purpose.FAREWELL
    assert world.source.written[-1] is Purpose.FAREWELL


def test_an_end_lingers_until_its_peer_has_read_the_farewell() -> None:
    world = open_ends()
    world.begin_close(world.source, farewell=True)
    world.write(254)
    states = [world.source_link.state]
    world.send(0)
    assert not world.source_link.next_write(0), "its last word is said"
    world.settle()
    states.append(world.source_link.state)
    assert states == [State.LINGERING, State.OVER]
    assert not world.source.outputs


def test_no_state_leads_back() -> None:
    for before, states in NEXT_STATES.items():
        assert before not in states
        assert states in (frozenset(), frozenset({State.OVER})) or State.OVER in states
    order = list(State)
    assert all(
        order.index(after) > order.index(before)
        for before in order
        for after in NEXT_STATES[before]
    )


def test_a_farewell_that_comes_during_a_write_is_acted_on_when_the_write_has_ended() -> None:
    world = open_ends()
    world.send(0)
    world.begin_write(0)
    world.begin_close(world.destination, farewell=True)
    world.serve(1)
    world.source.read(1000, 0)
    # The end of the pipe, behind the farewell, is no news.
    world.source.read(1000, 0)
    states = [world.source_link.state]
    world.source.end_write(1000, 0)
    states.append(world.source_link.state)
    assert states == [State.OPEN, State.OVER]
    world.check()
    assert not world.source.failure, "the message was written before the link was over"


def test_what_a_write_leaves_when_the_peer_has_left_is_told() -> None:
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
    """Who cannot write any more still hears the farewell that came before."""
    world = open_ends()
    world.begin_close(world.destination, farewell=True)
    world.serve(1)
    world.source.outgoing.is_unread = True
    world.advance(HEARTBEAT_NS)
    world.write(0)
    states = [world.source_link.state]
    world.source.read(1000, world.now_ns)
    states.append(world.source_link.state)
    assert states == [State.OPEN, State.OVER]
    world.check()
    assert not world.source.failure


def test_a_delay_holds_messages_back_one_after_the_other_and_reports_overtake_it() -> None:
    delays_s = iter([20e-9, 30e-9])
    link = SourceLink(0, 1, OPTIONS, 0, lambda: next(delays_s))
    link._num_credits = 2
    for index in range(2):
        link.send(Message(0, Task(1, Kind.F, index), ()), 0)
    written: list[tuple[int, int]] = []
    for now_ns in range(0, 60, 5):
        if now_ns == 10:
            link.announce(Purpose.REPORT, 0, Task(1, Kind.B, 7), 0)
        while buffers := link.next_write(now_ns):
            data = b"".join(buffers)
            if data[5] != Purpose.HEARTBEAT:
                written.append((now_ns, data[5]))
            link.wrote(len(data), now_ns)
    message, report = int(Purpose.MESSAGE), int(Purpose.REPORT)
    assert written == [(10, report), (20, message), (50, message)]


def test_what_is_no_frame_is_told_and_ends_the_link() -> None:
    world = open_ends()
    world.destination.incoming.data += encode_header(Header(Purpose.CREDIT, number=1))
    world.destination.read(1000, 0)
    (failed,) = world.destination.outputs
    assert isinstance(failed, Failed)
    assert world.destination_link.state is State.OVER
    assert "what rank 0 sent to rank 1 cannot be read" in str(failed.error)


def test_tensors_are_handed_over_where_they_lie() -> None:
    world = open_ends()
    big = torch.zeros(1000, dtype=torch.uint8)
    world.source_link.send(Message(0, Task(1, Kind.F, 0), (big,)), 0)
    _, payload = world.source_link.next_write(0)
    big.fill_(7)
    assert bytes(payload) == b"\7" * 1000
