"""Heartbeats between hosts: each notices that another is alive, silent, failed or has ended."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest
from torch.distributed import HashStore, Store

from rrfp.errors import RrfpError
from rrfp.trace.outcome import FaultOrigin, FoundBy, RunFailedError
from rrfp.train.launch import store as run_store
from rrfp.train.launch.hosts import host_status
from rrfp.train.launch.hosts.host_status import HostHeartbeat
from rrfp.train.launch.store import StoreClient

SILENCE_S = 1.0
NAME = socket.gethostname()


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_BEAT_S", "_QUICK_BEAT_S", "_POLL_S"):
        monkeypatch.setattr(host_status, name, 0.01)
    monkeypatch.setattr(host_status, "_OVERDUE_S", 0.3)
    monkeypatch.setattr(host_status, "_REASON_S", 0.6)


class Wire:
    """Connections to a store that can be cut; after a cut only a new one works."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.is_open = threading.Event()
        self.is_open.set()
        self.num_connections = 0

    def connect(self) -> StoreClient:
        self.num_connections += 1
        return StoreClient(_Connection(self), "the wire", 0.1)  # type: ignore[arg-type]


class _Connection:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._is_dead = not wire.is_open.is_set()

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            self._is_dead = self._is_dead or not self._wire.is_open.is_set()
            if self._is_dead:
                time.sleep(2)
                raise RuntimeError("Connection reset by peer")
            return getattr(self._wire.store, name)(*arguments)

        return call


@contextmanager
def beating(wire: Wire, node_rank: int, num_hosts: int = 2) -> Iterator[HostHeartbeat]:
    beat = HostHeartbeat(wire.connect, node_rank, num_hosts, SILENCE_S)
    beat.start()
    try:
        yield beat
    finally:
        beat.close()


@pytest.fixture
def wire() -> Wire:
    return Wire(HashStore())


def await_that(holds: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def watch(*pulses: HostHeartbeat, for_s: float = 2 * SILENCE_S) -> None:
    """Check as launchers do that nobody is lost."""
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s:
        assert [each.lost() for each in pulses] == [None] * len(pulses)
        time.sleep(0.01)


def test_a_silent_host_is_named_and_a_beating_one_is_not(wire: Wire) -> None:
    with beating(wire, 0, 3) as here, beating(wire, 1, 3) as there:
        with beating(wire, 2, 3) as third:
            await_that(lambda: here.has_joined(1) and here.has_joined(2))
            watch(here, there, third)
        await_that(here.lost)
        assert here.is_silent(2)
        assert not here.is_silent(1)
        assert str(here.lost()) == (
            f"host 2 ({NAME}) was silent for 1 s towards host 0 ({NAME}); see whether it still "
            "runs, and the network between them"
        )


def test_a_host_that_has_not_come_yet_is_not_lost(wire: Wire) -> None:
    with beating(wire, 0) as here:
        watch(here)


def test_a_cut_wire_is_reported_on_both_ends(wire: Wire) -> None:
    own = Wire(wire.store)
    with beating(own, 0) as here, beating(wire, 1) as there:
        await_that(lambda: here.has_joined(1) and there.has_joined(0))
        wire.is_open.clear()
        await_that(lambda: here.lost() and there.lost())
        assert str(here.lost()).startswith(f"host 1 ({NAME}) was silent for 1 s towards host 0 (")
        assert str(there.lost()).startswith(f"host 0 ({NAME}) was silent for 1 s towards host 1 (")


def test_a_wire_that_comes_back_works_over_a_new_connection(wire: Wire) -> None:
    own = Wire(wire.store)
    with beating(own, 0) as here, beating(wire, 1) as there:
        await_that(lambda: here.has_joined(1) and there.has_joined(0))
        wire.is_open.clear()
        watch(here, there, for_s=SILENCE_S / 2)
        wire.is_open.set()
        watch(here, there)
        assert wire.num_connections > 1


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_host_that_was_stopped_itself_takes_nobody_for_lost_and_says_so(
    stopped: int, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_status, "_PAUSE_S", 0.5)
    own = Wire(wire.store)
    with beating(own, stopped) as here, beating(wire, 1 - stopped):
        await_that(lambda: here.has_joined(1 - stopped))
        watch(here, for_s=0.1)
        own.is_open.clear()
        time.sleep(2 * SILENCE_S)  # nobody checks, and nothing arrives
        assert here.lost() is None
        await_that(here.lost)
        assert str(here.lost()) == (
            f"host {stopped} ({NAME}) stood still itself for 2 s, and has received "
            f"nothing from host {1 - stopped} ({NAME}) since; see who stopped its rrfp train"
        )


def test_a_host_that_beat_after_a_stop_is_named_when_it_is_silent(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_status, "_PAUSE_S", 0.5)
    with beating(wire, 0) as here:
        with beating(wire, 1):
            await_that(lambda: here.has_joined(1))
            time.sleep(2 * SILENCE_S)  # nobody looks
            watch(here)
        await_that(here.lost)
        assert str(here.lost()).startswith(f"host 1 ({NAME}) was silent for 1 s towards host 0 (")


@pytest.mark.parametrize(
    "culprit",
    [
        None,
        FaultOrigin(FoundBy.COLLECTIVE),
        FaultOrigin(FoundBy.LAUNCHER, 2),
        FaultOrigin(FoundBy.LINK, link=(1, 2)),
    ],
)
def test_a_failure_arrives_with_its_sentence_and_its_fault_origin(
    wire: Wire, culprit: FaultOrigin | None
) -> None:
    with beating(wire, 0, 3) as here, beating(wire, 1, 3) as there, beating(wire, 2, 3) as third:
        await_that(lambda: here.has_joined(1) and here.has_joined(2))
        sentence = "rank 2 failed: no \x1b[31mluck\nand its stack"
        there.report_failure(
            RrfpError(sentence) if culprit is None else RunFailedError(sentence, culprit)
        )
        await_that(here.lost)
        reason = here.reason()
        assert str(reason) == str(here.lost()) == f"host 1 ({NAME}): rank 2 failed: no ?[31mluck"
        assert isinstance(reason, RrfpError)
        here.report_failure(reason)
        await_that(third.lost)
        for error in (reason, third.lost()):
            assert str(error) == str(reason)
            assert (error.culprit if isinstance(error, RunFailedError) else None) == culprit


def test_an_interruption_is_a_failure_elsewhere(wire: Wire) -> None:
    with beating(wire, 0) as here, beating(wire, 1) as there:
        with pytest.raises(KeyboardInterrupt), there.reporting_failure():
            raise KeyboardInterrupt
        await_that(here.lost)
        assert str(here.lost()) == f"host 1 ({NAME}): it was stopped by a signal"


def test_a_host_that_is_killed_is_the_reason_before_its_silence_is_over(wire: Wire) -> None:
    with beating(wire, 0) as here:
        with beating(wire, 1):
            await_that(lambda: here.has_joined(1))
            assert here.reason() is None
        assert str(here.reason()).startswith(f"host 1 ({NAME}) was silent for ")
        assert not here.is_silent(1)


def test_hosts_leave_when_all_have_ended(wire: Wire) -> None:
    with beating(wire, 0) as here, beating(wire, 1) as there:
        await_that(lambda: here.has_joined(1))
        parts = [threading.Thread(target=each.await_all_ended) for each in (here, there)]
        parts[0].start()
        time.sleep(0.3)
        assert parts[0].is_alive()
        parts[1].start()
        for part in parts:
            part.join(20)
            assert not part.is_alive()
        for each in (there, here):
            each.await_delivery()


def test_a_host_that_fails_at_the_end_is_no_success_elsewhere(wire: Wire) -> None:
    with beating(wire, 0) as here, beating(wire, 1) as there:
        await_that(lambda: here.has_joined(1))
        there.report_failure(RrfpError("rank 3 was killed"))
        with pytest.raises(RrfpError, match=r"^host 1 \(.*\): rank 3 was killed$"):
            here.await_all_ended()


def test_a_host_that_does_not_end_is_named(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_status, "_ALL_ENDED_S", 0.3)
    with beating(wire, 0) as here, beating(wire, 1):
        await_that(lambda: here.has_joined(1))
        with pytest.raises(RrfpError, match=r"^host 1 \(.*\) still runs 0.3 s after this host's"):
            here.await_all_ended()


def test_a_host_that_is_lost_at_the_end_is_named(wire: Wire) -> None:
    with beating(wire, 0) as here:
        with beating(wire, 1):
            await_that(lambda: here.has_joined(1))
        with pytest.raises(RrfpError, match=r"^host 1 \(.*\) was silent for 1 s"):
            here.await_all_ended()


@pytest.mark.parametrize(
    "planted",
    [
        *(b"\x80\x04}.", b"[]", b'"', b'[1,"here","x",""]'),
        *(b'[1,"gone","x","",null]', b'["1","here","x","",null]', b'[1,"here","x","",7]'),
        b'[1,"failed","x","",["launcher","2",null]]',
        b'[1,"failed","x","",["nobody",2,null]]',
        b'[1,"failed","x","",["link",null,[1]]]',
        b'[1,"failed","x","",["link",null,1]]',
    ],
)
def test_an_invalid_status_ends_the_run_in_a_sentence(wire: Wire, planted: bytes) -> None:
    with beating(wire, 0) as here:
        wire.store.set("rrfp/pulse/1", planted)  # type: ignore[arg-type]
        await_that(here.lost)
        assert str(here.lost()).startswith(
            "the value of 'rrfp/pulse/1' in the run's store is not what"
        )


def test_a_host_without_threads_for_a_while_beats_again(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_refused = 0

    def refuse(*_: object) -> NoReturn:
        nonlocal num_refused
        num_refused += 1
        raise RuntimeError("can't start new thread")

    with beating(wire, 0) as here, beating(wire, 1):
        await_that(lambda: here.has_joined(1))
        with monkeypatch.context() as patch:
            patch.setattr(run_store, "call_with_timeout", refuse)
            await_that(lambda: num_refused > 3)
        watch(here)


def test_a_name_is_shown_without_control_characters(wire: Wire) -> None:
    with beating(wire, 0) as here:
        status = [1, "failed", "x", "\x1b]0;owned\x07", None]
        wire.store.set("rrfp/pulse/1", json.dumps(status))
        await_that(here.lost)
        assert str(here.lost()) == "?]0;owned?"
