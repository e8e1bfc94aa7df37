"""Meeting through the store: every wait bounded, clocks compared to within the stated error."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore, TCPStore

from rrfp.errors import RrfpError
from rrfp.runtime.protocols import PeerLostError
from rrfp.runtime.rendezvous import (
    ClockOffset,
    Rendezvous,
    clock_offset,
    exchange_hosts,
    files_identity,
    host_identity,
    reachable_address,
)


def test_a_wait_ends_and_names_the_rank() -> None:
    rendezvous = Rendezvous(HashStore(), "p", 0, 0.05)
    with pytest.raises(PeerLostError, match=r"rank 0 waited 0\.05 s for rank 3.*'p/thing'"):
        rendezvous.wait("thing", 3)


def test_values_are_bytes_below_their_prefix() -> None:
    store = HashStore()
    Rendezvous(store, "p", 0, 5).publish("thing", b"\x00\xff")
    assert Rendezvous(store, "p", 1, 5).wait("thing", 0) == b"\x00\xff"
    with pytest.raises(PeerLostError):
        Rendezvous(store, "q", 1, 0.01).wait("thing", 0)


def test_a_store_that_died_is_told_in_one_sentence() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    rendezvous = Rendezvous(client, "p", 1, 5)
    del server
    with pytest.raises(RrfpError, match="the rendezvous store failed") as caught:
        rendezvous.wait("thing", 0)
    assert "\n" not in str(caught.value)


def test_hosts_are_exchanged() -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        hosts = list(
            pool.map(lambda rank: exchange_hosts(store, "h", rank, 3, timeout_s=10), range(3))
        )
    assert hosts == [(host_identity(),) * 3] * 3
    assert files_identity().startswith(host_identity())


@pytest.mark.parametrize("skew_ns", [0, -7_000_000_000_000, 123_456_789_012])
def test_clock_offsets_hold_within_their_error(skew_ns: int) -> None:
    store = HashStore()
    hosts = ("a", "b", "a", "c", "b")
    skews_ns = {"a": 0, "b": skew_ns, "c": -skew_ns}

    def measure(rank: int) -> ClockOffset:
        return clock_offset(
            store,
            "c",
            rank,
            hosts,
            timeout_s=20,
            clock=lambda: time.monotonic_ns() + skews_ns[hosts[rank]],
        )

    with ThreadPoolExecutor(5) as pool:
        offsets = list(pool.map(measure, range(5)))
    assert offsets[0] == offsets[2] == (0, 0)
    assert offsets[1] == offsets[4]
    for rank in (1, 3, 4):
        assert offsets[rank].error_ns > 0
        assert abs(offsets[rank].offset_ns + skews_ns[hosts[rank]]) <= offsets[rank].error_ns
    assert json.loads(store.get("c/offset/1")) == list(offsets[1])


@pytest.mark.parametrize(("rank", "missing"), [(0, 1), (1, 0), (2, 1)])
def test_a_clock_comparison_without_its_partner_ends(rank: int, missing: int) -> None:
    with pytest.raises(PeerLostError, match=f"for rank {missing}"):
        clock_offset(HashStore(), "c", rank, ("a", "b", "b"), timeout_s=0.05)


@pytest.mark.parametrize("master", ["127.0.0.1", "no-such-host.invalid", ""])
def test_the_reachable_address_is_one_of_this_host(
    master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", master)
    address = reachable_address()
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((address, 0), family=family) as server:
        assert server.getsockname()[1] > 0
