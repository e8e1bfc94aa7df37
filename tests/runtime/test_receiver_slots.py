"""Planes whose receiver owns the slots: the same promises as where the sender owns them."""

import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from rrfp.runtime.device.interface import CPU
from rrfp.runtime.planes import registry
from rrfp.runtime.planes import selection as rank_planes
from rrfp.runtime.planes.plane import PlaneRefusal
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.planes.selection import RankPlanes
from rrfp.runtime.protocols import MessageArrived, PeerLostError
from rrfp.trace.records import ReceiveRecord, SendRecord
from tests.doubles.receiver_slots import ReceiverSlotsPlane
from tests.doubles.simulated_device import POISON, SimulatedDevice
from tests.e2e.ranks import run_ranks
from tests.runtime.link_pairs import Findings, Mistake, exchange, pair, take
from tests.runtime.test_links_break import Wires, check_nothing_else_came, cutting, exchanged
from tests.runtime.test_planes import OUTBOX_BYTES, _exchange, _watched, filled, message
from tests.runtime.test_simulated_device import MISTAKES, seeds

SHM = TransportName.SHM


class WatchedSlots(ReceiverSlotsPlane):
    """Knows which senders are attached to its slabs when it frees them."""

    def __init__(self, device: SimulatedDevice, slab_bytes: int, findings: Findings) -> None:
        super().__init__(device, slab_bytes)
        self._findings = findings

    def attached(self, slab: int) -> None:
        self._findings.attached[slab] += 1

    def detached(self, slab: int) -> None:
        self._findings.attached[slab] -= 1

    def close(self, *, are_detached: bool) -> None:
        for file, memory in self.own.items():
            self._findings.num_freed_attached += self._findings.attached[os.fstat(file).st_ino]
            memory[:] = bytes([POISON]) * len(memory)
        super().close(are_detached=are_detached)


@seeds
def test_nothing_is_corrupt(seed: int) -> None:
    findings = exchange(seed, 500, Mistake(), make_plane=WatchedSlots)
    assert findings.num_arrived == 500
    assert findings.are_clean
    assert len(findings.attached) == 2


@pytest.mark.parametrize("name", MISTAKES)
@seeds
def test_a_broken_rule_is_found(name: str, seed: int) -> None:
    found = exchange(seed, 400, MISTAKES[name], until_found=True, make_plane=WatchedSlots)
    assert not found.are_clean


@pytest.fixture
def receiver_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_planes, "load_plane", lambda _: ReceiverSlotsPlane)


def planes() -> RankPlanes:
    return RankPlanes(CPU, SHM, OUTBOX_BYTES)


@pytest.mark.usefixtures("receiver_slots")
def test_a_slot_in_use_is_free_once_its_tensors_are_gone() -> None:
    with pair(make_planes=planes, heartbeat_s=100, silence_s=200) as made:
        made.transports[0].send(1, message(0, filled(OUTBOX_BYTES // 4, 7)))
        (arrived,) = take(made.inboxes[1], 1)
        assert isinstance(arrived, MessageArrived)
        (outbox,) = made.outboxes[0]
        assert outbox.used_bytes >= OUTBOX_BYTES // 4
        (tensor,) = arrived.message.tensors
        assert tensor is not None
        assert bool((tensor == 7).all())
        del arrived, tensor
        deadline_s = time.monotonic() + 10
        while outbox.used_bytes and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert outbox.used_bytes == 0
    planes_of = [
        record.plane
        for records in made.records
        for record in records
        if isinstance(record, SendRecord | ReceiveRecord)
    ]
    assert planes_of == ["shm", "shm"]


@pytest.mark.usefixtures("receiver_slots")
def test_slots_that_a_receiver_holds_block_no_message() -> None:
    with pair(make_planes=planes) as made:
        for number in range(20):
            made.transports[0].send(1, message(number, filled(OUTBOX_BYTES // 8, number)))
        kept = take(made.inboxes[1], 20)
        for number, event in enumerate(kept):
            assert isinstance(event, MessageArrived)
            (tensor,) = event.message.tensors
            assert tensor is not None
            assert bool((tensor == number).all())


@pytest.mark.usefixtures("receiver_slots")
def test_no_slot_is_filled_or_released_twice_when_connections_are_cut() -> None:
    wires = Wires()
    with pair(make_planes=planes, wrap=wires.wrap, num_credits=5) as made:
        exchanged(made, 30, cutting(wires, 3), sizes=(OUTBOX_BYTES // 8, OUTBOX_BYTES // 7))
        assert len(wires.made) > 8, "no connection was made again"
    check_nothing_else_came(made, 30)


def in_a_rank() -> None:
    patch.object(rank_planes, "load_plane", lambda _: ReceiverSlotsPlane).start()


def _exchange_in_rank() -> list[str]:
    in_a_rank()
    return _exchange(SHM)


def test_messages_of_any_size_arrive_between_processes() -> None:
    assert run_ranks(2, _exchange_in_rank) == [["shm", "", "False"]] * 2


def _watched_in_rank() -> tuple[str, float, bool] | None:
    in_a_rank()
    return _watched(SHM, 0.2)


def test_a_killed_peer_is_named_and_nothing_is_left() -> None:
    found, _ = run_ranks(2, _watched_in_rank)
    assert found is not None
    told, seconds, has_slab = found
    assert "rank 1 " in told
    assert seconds < 10
    assert not has_slab


def test_a_slab_that_the_sender_cannot_map_is_an_error_of_the_opening(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refusing(ReceiverSlotsPlane):
        def stager(self, *_: Any) -> Any:
            raise PlaneRefusal("it cannot be mapped here")

    monkeypatch.setattr(rank_planes, "load_plane", lambda _: Refusing)
    files = len([*Path("/proc/self/fd").iterdir()])
    with (
        pytest.raises(PeerLostError, match=r"settled on no data plane .* it cannot be mapped here"),
        pair(make_planes=planes, connect_s=3.0),
    ):
        pass
    assert registry.CHOICES["cpu"][SHM]
    assert len([*Path("/proc/self/fd").iterdir()]) <= files
