"""A host that is silent is told; one that has ended is not, nor is one that beats."""

import threading
import time

import pytest
from torch.distributed import HashStore, Store

from rrfp.train.ranks import pulse
from rrfp.train.ranks.pulse import Pulse, beating


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_BEAT_S", 0.01)
    monkeypatch.setattr(pulse, "_SILENT_S", 0.5)


def await_loss(heard: Pulse) -> str:
    deadline_s = time.monotonic() + 20
    while not heard.lost():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return heard.lost()


def test_hosts_that_beat_are_heard_and_a_silent_one_is_named() -> None:
    store = HashStore()
    with beating(store, 0, 3) as here, beating(store, 1, 3), beating(store, 2, 3) as there:
        until_s = time.monotonic() + 1
        while time.monotonic() < until_s:
            assert not here.lost()
            assert not there.lost()
            time.sleep(0.01)
        there._ended.set()
        there._thread.join(20)
        store.set("rrfp/pulse/2", "7")  # as if it had not said that it leaves
        assert await_loss(here).startswith("host 2 was silent for 0.5 s; see whether it still runs")


def test_a_host_that_has_ended_is_not_lost() -> None:
    store = HashStore()
    with beating(store, 0, 2) as here:
        with beating(store, 1, 2):
            pass
        time.sleep(1)
        assert not here.lost()


class SilentStore:
    """A store at the other end of a dead link."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def add(self, *_: object) -> int:
        self.end.wait(60)
        raise RuntimeError("Connection reset by peer")


def test_a_store_that_does_not_answer_is_a_silent_host_0() -> None:
    silent = SilentStore()
    store: Store = silent  # type: ignore[assignment]
    with beating(store, 1, 2) as there:
        assert await_loss(there).startswith(
            "host 0 was silent for 0.5 s; see whether it still runs"
        )
    silent.end.set()
    there._thread.join(20)
    assert not there._thread.is_alive()
