"""Data planes between real processes, and what is left of them when one is killed."""

import json
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import Store, TCPStore

from rrfp.errors import RrfpError, UsageError
from rrfp.runtime.device.interface import CPU, CpuDevice, Device, Stream
from rrfp.runtime.device.interface import Event as DeviceEvent
from rrfp.runtime.net.transport import SocketTransport, make_planes
from rrfp.runtime.planes.codec import (
    ALIGNMENT_BYTES,
    Form,
    Forms,
    aligned,
    forms_of,
    packed_bytes,
    unpacked,
)
from rrfp.runtime.planes.host_planes import BouncePlane, SharedMemoryPlane
from rrfp.runtime.planes.outbox import LEAST_STAGED_BYTES, Outbox, Slots
from rrfp.runtime.planes.plane import (
    Attachment,
    Completion,
    Offer,
    Plane,
    PlaneFailed,
    PlaneRefusal,
    Staged,
    Stager,
)
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.planes.selection import (
    NegotiationError,
    PlaneChoice,
    RankPlanes,
    answer_offer,
    offer_planes,
)
from rrfp.runtime.protocols import Inbox, LinkFailed, Message, MessageArrived
from rrfp.schedule.tasks import Kind, Task
from rrfp.trace.records import ReceiveRecord, SendRecord
from tests.e2e.ranks import run_ranks
from tests.runtime.link_pairs import Pair, needs_nixl, plane_choices, take
from tests.security.exposed import listeners_of

OUTBOX_BYTES = 8 * LEAST_STAGED_BYTES
SLAB = "rrfp-outbox"
planes = pytest.mark.parametrize(
    "name",
    [TransportName.SHM, TransportName.BOUNCE, pytest.param(TransportName.NIXL, marks=needs_nixl)],
)


def transport(
    rank: int, num_ranks: int, store: Store, inbox: Inbox, name: TransportName
) -> SocketTransport:
    """Linked to every other rank."""
    peers = [peer for peer in range(num_ranks) if peer != rank]
    made = SocketTransport(
        rank,
        store,
        peers,
        peers,
        inbox,
        num_credits=100,
        planes=RankPlanes(CPU, name, OUTBOX_BYTES),
    )
    made.open()
    return made


def message(number: int, *tensors: torch.Tensor | None) -> Message:
    return Message(0, Task(1, Kind.F, number), tensors)


def filled(num_bytes: int, number: int) -> torch.Tensor:
    return torch.full((num_bytes,), number % 256, dtype=torch.uint8)


def own_store() -> Store:
    return TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)


# What arrives.


def _exchange(name: TransportName) -> list[str]:
    rank, inbox = int(os.environ["RANK"]), Inbox()
    made = transport(rank, 2, own_store(), inbox, name)
    sizes = [1, LEAST_STAGED_BYTES, 3 * LEAST_STAGED_BYTES, OUTBOX_BYTES, 2 * OUTBOX_BYTES] * 3
    for number, size in enumerate(sizes):
        made.send(1 - rank, message(number, filled(size, number), None, filled(7, number)))
    kept = []
    for event in take(inbox, len(sizes))[: len(sizes)]:  # and then perhaps a farewell
        assert isinstance(event, MessageArrived), event
        first, second, third = event.message.tensors
        number = event.message.task.microbatch
        assert first is not None
        assert second is None
        assert third is not None
        assert first.numel() == sizes[number]
        assert bool((first == number).all())
        assert bool((third == number).all())
        made.consumed(1 - rank, 0)
        kept.append(first)
    # What has arrived is the receiver's own, however much is sent afterwards.
    assert sorted(int(tensor[0]) for tensor in kept) == [*range(len(sizes))]
    settled = plane_choices(made)[1 - rank]
    made.close()
    return [str(settled.plane), settled.why, str(bool(settled.gb_per_s))]


@planes
def test_messages_of_any_size_arrive(name: TransportName) -> None:
    measures = name is not TransportName.BOUNCE
    assert run_ranks(2, _exchange, name) == [[str(name), "", str(measures)]] * 2


class PlanePair(Pair):
    """Ranks 0 and 1 in one process, with data planes."""

    def __init__(
        self, name: TransportName, outbox_bytes: int = OUTBOX_BYTES, **options: object
    ) -> None:
        made = iter([RankPlanes(CPU, name, outbox_bytes) for _ in (0, 1)])
        super().__init__(make_planes=lambda: next(made), **options)


def test_a_lent_slot_is_free_once_its_tensors_are_gone() -> None:
    # Neither heartbeats nor credits carry the release.
    pair = PlanePair(TransportName.SHM, heartbeat_s=100, silence_s=200)
    try:
        pair.transports[0].send(1, message(0, filled(LEAST_STAGED_BYTES, 1)))
        (arrived,) = take(pair.inboxes[1], 1)
        assert isinstance(arrived, MessageArrived)
        (outbox,) = pair.outboxes[0]
        taken = outbox.used_bytes
        assert taken >= LEAST_STAGED_BYTES
        (tensor,) = arrived.message.tensors
        del arrived
        pair.transports[1].consumed(0, 0)
        pair.transports[1].grant(200)  # It writes to the peer, and releases would go along.
        time.sleep(0.2)
        assert outbox.used_bytes == taken
        assert tensor is not None
        assert bool((tensor == 1).all())
        del tensor
        deadline_s = time.monotonic() + 10
        while outbox.used_bytes and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert outbox.used_bytes == 0
    finally:
        pair.close()


class HangingDevice(CpuDevice):
    """A device that is not synchronous, and on which nothing ends any more once it hangs."""

    is_synchronous = False

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = threading.Event()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def synchronize(self, event: DeviceEvent, *, soon: bool = False) -> None:
        self.is_asked.set()
        self.goes_on.wait()


def test_a_rank_that_fails_does_not_wait_for_a_device_that_hangs() -> None:
    devices = [HangingDevice(), HangingDevice()]
    made = iter([RankPlanes(device, TransportName.SHM, OUTBOX_BYTES) for device in devices])
    with ThreadPoolExecutor(1) as pool:
        pair = Pair(make_planes=lambda: next(made), close_s=0.5)
        try:
            receiver = pair.transports[1]
            of_receiver = next(each for each in devices if each is receiver._planes.device)
            of_receiver.goes_on.clear()
            of_receiver.is_asked.clear()
            pair.transports[0].send(1, message(0, filled(1000, 1)))
            assert of_receiver.is_asked.wait(10), "nothing was pulled"
            pool.submit(receiver.close, farewell=False).result(10)
        finally:
            of_receiver.goes_on.set()
            pair.close()


class DeviceBeside(CpuDevice):
    """Works beside the host, as far as transports see."""

    is_synchronous = False


@planes
def test_a_message_above_the_outbox_of_a_device_arrives(name: TransportName) -> None:
    device = DeviceBeside()
    made = iter([RankPlanes(device, name, 2**20) for _ in (0, 1)])
    pair = Pair(make_planes=lambda: next(made))
    sizes = [1000, 3 * 2**20, 600_000, 2**20 + 1, 600_000, 5]
    try:
        for number, size in enumerate(sizes):
            pair.transports[0].send(1, message(number, filled(size, number), None, filled(7, 9)))
        for number, event in enumerate(take(pair.inboxes[1], len(sizes))):
            assert isinstance(event, MessageArrived)
            assert event.message.task.microbatch == number
            first, second, third = event.message.tensors
            assert first is not None
            assert second is None
            assert third is not None
            assert torch.equal(first, filled(sizes[number], number))
            assert torch.equal(third, filled(7, 9))
    finally:
        pair.close()


def test_slots_that_receivers_keep_withhold_nothing() -> None:
    """Only half of an outbox is lent: messages arrive, however many are kept."""
    pair = PlanePair(TransportName.SHM)
    try:
        for number in range(30):
            pair.transports[0].send(1, message(number, filled(LEAST_STAGED_BYTES, number)))
        kept = take(pair.inboxes[1], 30)
        for event in kept:
            assert isinstance(event, MessageArrived)
            (tensor,) = event.message.tensors
            assert tensor is not None
            assert bool((tensor == event.message.task.microbatch).all())
    finally:
        pair.close()


def test_the_records_name_the_plane_and_split_the_time() -> None:
    pair = PlanePair(TransportName.SHM)
    try:
        for size in (10, LEAST_STAGED_BYTES):
            pair.transports[0].send(1, message(size, filled(size, 1)))
        take(pair.inboxes[1], 2)
    finally:
        pair.close()
    sends = [each for each in pair.records[0] if isinstance(each, SendRecord)]
    receives = [each for each in pair.records[1] if isinstance(each, ReceiveRecord)]
    for records in (sends, receives):
        planes = {record.microbatch: record.plane for record in records}
        assert planes == {10: "inline", LEAST_STAGED_BYTES: "shm"}
    send = max(sends, key=lambda each: each.num_bytes)
    receive = max(receives, key=lambda each: each.num_bytes)
    for record in (send, receive):
        assert record.num_bytes == LEAST_STAGED_BYTES
        assert record.queued_ns >= 0
        assert 0 <= record.copy_ns <= record.end_ns - record.start_ns
    assert send.queued_ns > 0
    assert send.copy_ns > 0


# What is not there.


def test_ranks_that_were_asked_for_different_transports_say_so() -> None:
    names = iter((TransportName.SHM, TransportName.INLINE))
    with pytest.raises(UsageError, match=r"rank \d has transport .* and rank \d .*; give all"):
        Pair(make_planes=lambda: RankPlanes(CPU, next(names), OUTBOX_BYTES), connect_s=3.0)


def test_a_plane_that_is_not_there_is_replaced_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    pair = PlanePair(TransportName.SHM)
    try:
        pair.transports[0].send(1, message(0, filled(LEAST_STAGED_BYTES, 5)))
        assert isinstance(take(pair.inboxes[1], 1)[0], MessageArrived)
        why = "this system has no memfd_create"
        assert plane_choices(pair.transports[0]) == {
            1: PlaneChoice(TransportName.INLINE, None, why)
        }
        assert f"the link to rank 1 takes inline: {why}" in caplog.text
    finally:
        pair.close()


def test_a_plane_of_another_device_is_refused() -> None:
    with pytest.raises(UsageError, match="transport cuda-ipc does not carry tensors on cpu"):
        make_planes(torch.device("cpu"), TransportName.CUDA_IPC, 1)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match=r"the model is on cuda:1 and .*choose device cpu"):
            make_planes(torch.device("cuda", 1), TransportName.AUTO, 1)


def _doors() -> list[bool]:
    """Whether each port at which NIXL listens is this host's own."""
    mine = RankPlanes(CPU, TransportName.NIXL, OUTBOX_BYTES)
    before = listeners_of(os.getpid())
    mine.open(has_same_host=True, has_other_host=False)
    found = [listener.is_loopback for listener in listeners_of(os.getpid()) - before]
    mine.close(5.0, are_detached=True)
    return found


@needs_nixl
def test_nixl_on_one_host_listens_at_loopback_only() -> None:
    for found in run_ranks(2, _doors):
        assert found
        assert all(found)


# Who is killed.


def _until_killed(name: TransportName, kills_after_s: float) -> tuple[str, float, bool]:
    """Kill rank 1 during messages both ways. Return rank 0's error, the time until then in s, and
    whether it has a slab left."""
    told, seconds = _exchange_until_killed(name, kills_after_s)
    return told, seconds, SLAB in Path("/proc/self/maps").read_text()


def _exchange_until_killed(name: TransportName, kills_after_s: float) -> tuple[str, float]:
    rank, inbox = int(os.environ["RANK"]), Inbox()
    made = transport(rank, 2, own_store(), inbox, name)
    killed_s = time.monotonic() + kills_after_s
    for number in range(4):
        made.send(1 - rank, message(number, filled(LEAST_STAGED_BYTES, number)))
    while True:
        for event in inbox.take(0.001):
            if isinstance(event, LinkFailed):
                made.close(farewell=False)
                return str(event.error), time.monotonic() - killed_s
            assert isinstance(event, MessageArrived)
            made.consumed(1 - rank, 0)
            made.send(1 - rank, message(0, filled(LEAST_STAGED_BYTES, 0)))
        if rank == 1 and time.monotonic() > killed_s:
            os.kill(os.getpid(), signal.SIGKILL)
        assert time.monotonic() < killed_s + 20


def _watched(name: TransportName, kills_after_s: float) -> tuple[str, float, bool] | None:
    """Rank 0's findings; its peer is a child of rank 1's, which outlives it."""
    if os.environ["RANK"] == "1":
        child = os.fork()
        if child == 0:
            _until_killed(name, kills_after_s)
        os.waitpid(child, 0)
        return None
    return _until_killed(name, kills_after_s)


def _check_kill(name: TransportName, seed: int) -> None:
    kills_after_s = random.Random(seed).uniform(0.0, 0.3)
    found, _ = run_ranks(2, _watched, name, kills_after_s)
    assert found is not None
    told, seconds, has_slab = found
    assert "rank 1 " in told
    assert seconds < 10
    assert not has_slab


@planes
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 1 else pytest.mark.slow) for seed in range(10)]
)
def test_a_killed_peer_is_named_and_nothing_is_left(name: TransportName, seed: int) -> None:
    _check_kill(name, seed)


# What an idle rank costs.


def _idle(name: TransportName) -> float:
    rank, inbox = int(os.environ["RANK"]), Inbox()
    made = transport(rank, 2, own_store(), inbox, name)
    made.send(1 - rank, message(0, filled(LEAST_STAGED_BYTES, 1)))
    assert isinstance(take(inbox, 1)[0], MessageArrived)
    time.sleep(0.5)
    begun_s, used_s = time.monotonic(), time.process_time()
    time.sleep(2.0)
    share = (time.process_time() - used_s) / (time.monotonic() - begun_s)
    made.close()
    return share


@planes
@pytest.mark.slow
def test_an_idle_rank_takes_under_a_hundredth_of_a_core(name: TransportName) -> None:
    assert max(run_ranks(2, _idle, name)) < 0.01


# How the two ends of a link settle on a plane when one does not come about.


LIMIT_S = 1.0
DESCRIPTORS = Path("/proc/self/fd")


class SilentPlane:
    """Reaches no peer, as where a firewall drops what one-sided reads send. Implements
    `rrfp.runtime.planes.plane.Plane`."""

    name = TransportName.NIXL
    device: Device = CPU
    is_carried = False
    reserved_bytes = 0

    def offer(self) -> Offer:
        return Offer(self.name, {})

    def attach(self, offer: Offer, peer: int, timeout_s: float) -> Attachment:
        time.sleep(timeout_s)
        raise PlaneRefusal("nothing was read in time")

    def stager(self, answer: Offer | None, peer: int) -> Stager:
        raise AssertionError("no link takes it")

    def close(self, *, are_detached: bool) -> None: ...


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


def test_a_plane_that_hangs_leaves_time_for_the_next_one(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    planes: list[Plane] = [SilentPlane(), BouncePlane(CPU, 1)]
    answered: list[PlaneChoice] = []

    def answer() -> None:
        # Its own limit is longer: it began to wait later.
        by_name = {plane.name: plane for plane in planes}
        answered.append(answer_offer(ends[1], by_name, 0, 10 * LIMIT_S)[0])

    answering = threading.Thread(target=answer)
    answering.start()
    choice, answer_of_receiver = offer_planes(ends[0], planes, "", LIMIT_S)
    answering.join()
    assert answered == [choice]
    assert answer_of_receiver is None
    assert choice == PlaneChoice(TransportName.BOUNCE, None, "nothing was read in time")


def test_an_attachment_is_detached_if_the_answer_cannot_be_sent(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    detached: list[bool] = []
    fetcher: Any = SimpleNamespace(detach=lambda: detached.append(True))

    class Breaking(SilentPlane):
        """A plane whose peer ends while it attaches."""

        def attach(self, offer: Offer, peer: int, timeout_s: float) -> Attachment:
            ends[0].close()
            return Attachment(fetcher)

    plane = Breaking()
    told = json.dumps(
        {"why": "", "timeout_s": 9, "offers": [{"plane": plane.name, "values": {}, "files": 0}]}
    ).encode()
    ends[0].sendall(struct.pack("<II", len(told), 0) + told)
    with pytest.raises(NegotiationError, match="the connection broke"):
        answer_offer(ends[1], {plane.name: plane}, 0, LIMIT_S)
    assert detached == [True]


def test_no_file_of_a_broken_offer_stays_open(ends: tuple[socket.socket, socket.socket]) -> None:
    with Path("/dev/null").open() as file:
        socket.send_fds(ends[0], [b"\0"], [file.fileno()])
        ends[0].close()
    before = len([*DESCRIPTORS.iterdir()])
    with pytest.raises(NegotiationError, match="closed"):
        answer_offer(ends[1], {}, 0, LIMIT_S)
    assert len([*DESCRIPTORS.iterdir()]) == before


# The slots of a slab, and how tensors lie in one: no two overlap, and nothing is lost.


SLAB_BYTES = 20 * ALIGNMENT_BYTES


@given(st.lists(st.one_of(st.integers(1, SLAB_BYTES // 2), st.integers(-20, -1)), max_size=60))
def test_slots_do_not_overlap_and_come_back(program: list[int]) -> None:
    """A positive number allocates this many bytes; a negative one releases one of the slots in
    use."""
    slots = Slots(SLAB_BYTES)
    taken: dict[int, int] = {}
    for number in program:
        if number < 0:
            if taken:
                offset = sorted(taken)[number % len(taken)]
                assert slots.release(offset)
                assert not slots.release(offset)
                del taken[offset]
            continue
        fits = slots.allocate(number)
        if fits is None:
            # First fit finds any gap that is large enough.
            assert aligned(number) > _largest_gap(taken)
            continue
        assert fits % ALIGNMENT_BYTES == 0
        assert fits + aligned(number) <= SLAB_BYTES
        for offset, size in taken.items():
            assert fits + aligned(number) <= offset or offset + size <= fits
        taken[fits] = aligned(number)
    assert slots.used_bytes == sum(taken.values())
    for offset in taken:
        assert slots.release(offset)
    assert slots.allocate(SLAB_BYTES) == 0


def _largest_gap(taken: dict[int, int]) -> int:
    edges = [0, *(edge for offset in sorted(taken) for edge in (offset, offset + taken[offset]))]
    edges.append(SLAB_BYTES)
    return max(end - begin for begin, end in zip(edges[::2], edges[1::2], strict=True))


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
forms = st.lists(
    st.none() | st.builds(Form, st.sampled_from((torch.uint8, torch.bfloat16, torch.int64)), shapes)
).map(tuple)


@given(forms)
def test_tensors_come_out_of_a_slot_as_they_went_in(packed: Forms) -> None:
    slot = torch.zeros(packed_bytes(packed), dtype=torch.uint8)
    assert forms_of(unpacked(slot, packed)) == packed
    for number, tensor in enumerate(unpacked(slot, packed)):
        if tensor is not None:
            tensor.fill_(number % 100)
    for number, tensor in enumerate(unpacked(slot, packed)):
        assert tensor is None or bool((tensor == number % 100).all())


# What an outbox says when it cannot go on.


PATIENCE_S = 20.0
MESSAGE = message(0, torch.zeros(100, dtype=torch.uint8))


class BrokenDevice(CpuDevice):
    """A device whose second copy fails, as a GPU's does after an error of any kernel."""

    def __init__(self) -> None:
        super().__init__()
        self._num_copies = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        self._num_copies += 1
        if self._num_copies > 1:
            raise RuntimeError("CUDA error: an illegal memory access\nand much more")


class Ending:
    """The queue of a link that sends."""

    def __init__(self) -> None:
        self.has_staged = threading.Event()
        self.has_failed = threading.Event()
        self.error: RrfpError | None = None

    def put(self, completion: Completion) -> None:
        if isinstance(completion, Staged):
            self.has_staged.set()
            return
        assert isinstance(completion, PlaneFailed)
        self.error = completion.error
        self.has_failed.set()


@pytest.mark.timeout(2 * PATIENCE_S)
def test_an_outbox_that_fails_fails_every_link_also_those_that_send_later() -> None:
    plane = SharedMemoryPlane(BrokenDevice(), 2**20)
    outbox = Outbox(plane.name, plane.device, plane.slab)
    outbox.open()
    ends = idle, sending, later = Ending(), Ending(), Ending()
    try:
        outbox.stage(MESSAGE.tensors, MESSAGE, idle)
        assert idle.has_staged.wait(PATIENCE_S)
        outbox.stage(MESSAGE.tensors, MESSAGE, sending)
        assert sending.has_failed.wait(PATIENCE_S)
        outbox.stage(MESSAGE.tensors, MESSAGE, later)
        for end in ends:
            assert end.has_failed.wait(PATIENCE_S)
            assert str(end.error) == (
                "the outbox of plane shm failed with RuntimeError: CUDA error: an illegal memory"
                " access"
            )
        outbox.drain(PATIENCE_S)
    finally:
        outbox.close(PATIENCE_S)
        plane.close(are_detached=True)
