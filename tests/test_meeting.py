"""Hosts that meet, that do not come, that were asked for different things, and that part."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from torch.distributed import TCPStore

from rrfp.errors import RrfpError, UsageError
from rrfp.train.ranks.meeting import meeting
from rrfp.train.settings import TrainSettings
from tests.trained import free_port


def settings(port: int, node_rank: int, host: str = "127.0.0.1", **values: Any) -> TrainSettings:
    return TrainSettings(nnodes=2, node_rank=node_rank, rdzv_endpoint=f"{host}:{port}", **values)


def meet(chosen: TrainSettings, timeout_s: float = 20.0) -> dict[str, str]:
    """One host's part, from the meeting to the parting."""
    with meeting(chosen, timeout_s) as environment:
        return environment


@contextmanager
def both(port: int, **values: Any) -> Iterator[Callable[[], Any]]:
    """Host 1 meets in a thread; gives what waits for it."""
    with ThreadPoolExecutor() as hosts:
        other = hosts.submit(meet, settings(port, 1, **values))
        yield lambda: other.result(timeout=20)


@pytest.mark.parametrize(("host", "plain"), [("127.0.0.1", "127.0.0.1"), ("[::1]", "::1")])
def test_hosts_meet_in_any_order(host: str, plain: str) -> None:
    if plain == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    port = free_port()
    with both(port, host=host) as other:
        with meeting(settings(port, 0, host), 20.0) as environment:
            assert environment["RRFP_STORE"] == f"tcp:{plain}:{port}"
            assert environment["RRFP_ADDRESS"] == plain
            store = TCPStore(plain, port, is_master=False, wait_for_workers=False)
            store.set("word", "heard")
        assert other() == environment


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_the_store_listens_at_the_endpoint_alone() -> None:
    port = free_port()
    with both(port) as other:
        with meeting(settings(port, 0), 20.0):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            # Another address of the same host, that needs no second interface.
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", port), timeout=5)
        other()


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_an_endpoint_at_every_address_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match="which stands for every address of host 0; name the one"):
        meet(settings(free_port(), 0, host))


def test_a_name_that_leads_only_to_this_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(UsageError, match=r"means 127\.0\.1\.1, where no other host reaches it"):
        meet(settings(free_port(), 0, "node0"))


def test_a_port_that_is_taken_is_told() -> None:
    words = r"cannot meet at 127.0.0.1:\d+ \(.*already in use.*\); give --rdzv-endpoint a free port"
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UsageError, match=words):
        meet(settings(taken.getsockname()[1], 0))


@pytest.mark.parametrize("node_rank", [0, 1])
def test_a_host_that_does_not_come_is_named(node_rank: int) -> None:
    with pytest.raises(RrfpError) as refused:
        meet(settings(free_port(), node_rank), 0.3)
    assert f"host {1 - node_rank} did not come to 127.0.0.1:" in str(refused.value)
    assert f"--node-rank {1 - node_rank}" in str(refused.value)


@pytest.mark.parametrize("named", [{"admit": "order.txt"}, {"tokenizer": "tokenizer.json"}])
def test_hosts_with_other_files_are_refused_on_both(
    monkeypatch: pytest.MonkeyPatch, named: dict[str, str]
) -> None:
    port, digests = free_port(), iter(["a" * 64, "b" * 64])
    monkeypatch.setattr("rrfp.train.ranks.meeting.sha256_of", lambda path: next(digests))
    ((flag, path),) = named.items()
    words = rf"content of --{flag} {path} is \w+... on host 0 and \w+... on host 1"
    with both(port, **named) as other:
        with pytest.raises(UsageError, match=words):
            meet(settings(port, 0, **named))
        with pytest.raises(UsageError, match=words):
            other()


def test_hosts_that_differ_are_refused_on_both() -> None:
    port = free_port()
    with both(port, hint="fb") as other:
        with pytest.raises(UsageError, match="hint is bf on host 0 and fb on host 1"):
            meet(settings(port, 0))
        with pytest.raises(UsageError, match="hint is bf on host 0 and fb on host 1"):
            other()


@pytest.mark.parametrize("planted", [b"\x80\x04}.", b"[]", b'"', b"[" * 100_000, b"\xff"])
def test_what_is_no_hosts_settings_is_told(planted: bytes) -> None:
    """In the place of host 1, somebody who writes what they like."""
    port = free_port()

    def plant() -> None:
        while not can_connect(port):
            time.sleep(0.02)
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        store.set("rrfp/meeting/1", planted)  # type: ignore[arg-type]

    with ThreadPoolExecutor() as hosts:
        planting = hosts.submit(plant)
        with pytest.raises(
            RrfpError, match=r"value of 'rrfp/meeting/1' at .* cannot be read as that of host 1"
        ):
            meet(settings(port, 0))
        planting.result(timeout=20)


def can_connect(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def test_host_0_keeps_the_store_until_the_others_have_left() -> None:
    port, may_leave = free_port(), threading.Event()
    last_words: list[bytes] = []

    def be_host_1() -> None:
        with meeting(settings(port, 1), 20.0):
            may_leave.wait(20)
            # Host 0's ranks have ended by now, and this host's still need the store.
            store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
            store.set("word", "last")
            last_words.append(store.get("word"))

    with ThreadPoolExecutor() as hosts:
        other = hosts.submit(be_host_1)
        first = hosts.submit(meet, settings(port, 0))
        time.sleep(0.5)
        assert not first.done()
        may_leave.set()
        other.result(timeout=20)
        first.result(timeout=20)
    assert last_words == [b"last"]


def test_hosts_that_meet_again_do_not_find_the_store_before() -> None:
    """As those of a race, which launches its ranks several times."""
    port = free_port()

    def meet_again_and_again(node_rank: int) -> None:
        for steps in (1, 2, 3):
            meet(settings(port, node_rank, steps=steps))

    with ThreadPoolExecutor() as hosts:
        for ended in [hosts.submit(meet_again_and_again, node_rank) for node_rank in (0, 1)]:
            ended.result(timeout=30)


def test_a_failed_run_waits_for_nobody() -> None:
    port, may_leave = free_port(), threading.Event()

    def be_host_1() -> None:
        with meeting(settings(port, 1), 20.0):
            may_leave.wait(20)

    with ThreadPoolExecutor() as hosts:
        other = hosts.submit(be_host_1)
        with pytest.raises(RrfpError, match="rank 0 failed"), meeting(settings(port, 0), 20.0):
            raise RrfpError("rank 0 failed")
        assert not other.done()
        may_leave.set()
        # The store is gone, and that is no failure of host 1.
        other.result(timeout=20)
