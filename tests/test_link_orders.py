"""Links obey what `rrfp chaos` orders them, and outlive it."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rrfp.runtime import launchers as variables
from rrfp.runtime.net.faults import LinkFault, order, shown_links, wrapped
from rrfp.runtime.protocols import Arrived, Message
from tests.link_pairs import PATIENCE_S, Pair, nothing_left, pair, take, task

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with nothing_left(monkeypatch):
        yield


def test_without_the_variable_a_socket_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(variables.FAULTS, raising=False)
    one, other = socket.socketpair()
    with one, other:
        assert wrapped(one, 0, 1) is one


def sent(made: Pair, index: int) -> torch.Tensor:
    """What arrives of a message that is sent now."""
    made.transports[0].send(1, Message(0, task(index), (torch.full((1000,), float(index)),)))
    (event,) = take(made.inboxes[1], 1)
    assert isinstance(event, Arrived)
    made.transports[1].consumed(0, 0)
    (tensor,) = event.message.tensors
    assert tensor is not None
    return tensor


@pytest.mark.parametrize("link", ["0-1", "1-0"], ids=["sender", "receiver"])
@pytest.mark.parametrize(
    ("fault", "number"), [(LinkFault.DROP, 0), (LinkFault.DELAY, 0.5), (LinkFault.CORRUPT, 77)]
)
def test_a_link_obeys_and_goes_on(
    fault: LinkFault, number: float, link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = tmp_path / "orders"
    orders.mkdir()
    monkeypatch.setenv(variables.FAULTS, str(orders))
    with pair(heartbeat_s=0.1) as made:
        assert shown_links(orders) == ["0-1", "1-0"]
        assert sent(made, 1).eq(1).all()
        pending = order(orders, link, fault, number)
        deadline_s = time.monotonic() + PATIENCE_S
        # A heartbeat is enough.
        while pending.exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        for index in range(2, 6):
            assert sent(made, index).eq(index).all()
        assert not [*made.inboxes[0].take(), *made.inboxes[1].take()]


def test_a_delayed_link_takes_nothing_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = tmp_path / "orders"
    orders.mkdir()
    monkeypatch.setenv(variables.FAULTS, str(orders))
    with pair(heartbeat_s=0.1) as made:
        # Two links lead from the receiver to the sender's rank, and each order is obeyed by one.
        begun_s = time.monotonic()
        for _ in range(2):
            pending = order(orders, "1-0", LinkFault.DELAY, 1.0)
            while pending.exists():
                time.sleep(0.01)
        assert sent(made, 1).eq(1).all()
        assert time.monotonic() - begun_s >= 1.0
