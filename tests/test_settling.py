"""How the two ends of a link settle on a plane when one does not come about."""

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rrfp.runtime.device.interface import CPU, Device
from rrfp.runtime.planes.host_memory import BouncePlane
from rrfp.runtime.planes.negotiation import Settled, SettlingError, answer_offer, offer_planes
from rrfp.runtime.planes.plane import Offer, Plane, PlaneRefusal, Puller
from rrfp.runtime.planes.registry import TransportName

LIMIT_S = 1.0
DESCRIPTORS = Path("/proc/self/fd")


class SilentPlane:
    """Reaches no peer, as where a firewall drops what one-sided reads send. Implements
    `rrfp.runtime.planes.plane.Plane`."""

    name = TransportName.NIXL
    device: Device = CPU
    lends = is_inline = False
    reserved_bytes = 0
    slab = torch.empty(0, dtype=torch.uint8)

    def offer(self) -> Offer:
        return Offer(self.name, {})

    def attach(self, offer: Offer, peer: int, timeout_s: float) -> tuple[Puller, None]:
        time.sleep(timeout_s)
        raise PlaneRefusal("nothing was read in time")

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
    answered: list[Settled] = []

    def answer() -> None:
        # Its own limit is longer: it began to wait later.
        by_name = {plane.name: plane for plane in planes}
        answered.append(answer_offer(ends[1], by_name, 0, 10 * LIMIT_S)[0])

    answering = threading.Thread(target=answer)
    answering.start()
    settled = offer_planes(ends[0], planes, "", LIMIT_S)
    answering.join()
    assert answered == [settled]
    assert settled == Settled(TransportName.BOUNCE, None, "nothing was read in time")


def test_what_was_attached_is_let_go_of_where_nobody_can_be_told(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    detached: list[bool] = []
    puller = SimpleNamespace(detach=lambda: detached.append(True))

    class Breaking(SilentPlane):
        """Its peer goes while it attaches itself."""

        def attach(self, offer: Offer, peer: int, timeout_s: float) -> tuple[Any, None]:
            ends[0].close()
            return puller, None

    plane = Breaking()
    told = json.dumps(
        {"why": "", "timeout_s": 9, "offers": [{"plane": plane.name, "values": {}, "files": 0}]}
    ).encode()
    ends[0].sendall(struct.pack("<II", len(told), 0) + told)
    with pytest.raises(SettlingError, match="the connection broke"):
        answer_offer(ends[1], {plane.name: plane}, 0, LIMIT_S)
    assert detached == [True]


def test_no_file_of_a_broken_offer_stays_open(ends: tuple[socket.socket, socket.socket]) -> None:
    with Path("/dev/null").open() as file:
        socket.send_fds(ends[0], [b"\0"], [file.fileno()])
        ends[0].close()
    before = len([*DESCRIPTORS.iterdir()])
    with pytest.raises(SettlingError, match="closed"):
        answer_offer(ends[1], {}, 0, LIMIT_S)
    assert len([*DESCRIPTORS.iterdir()]) == before
