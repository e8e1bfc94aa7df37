"""Meeting through the store: every wait bounded, clocks compared to within the stated error."""

import json
import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore

from rrfp.errors import RrfpError
from rrfp.runtime.device.interface import CPU, CpuDevice
from rrfp.runtime.protocols import PeerLostError
from rrfp.runtime.rendezvous import (
    ClockOffset,
    Rendezvous,
    default_store,
    exchange_hosts,
    files_identity,
    host_identity,
    measure_clock_offset,
    publish_rank_info,
    reachable_address,
    wait_for_rank_infos,
)
from rrfp.strict_json import integer, number
from rrfp.trace.records import RankInfo
from tests.e2e.ranks import loopback_store


def test_a_wait_ends_and_names_the_rank() -> None:
    rendezvous = Rendezvous(HashStore(), "p", 0, 0.05)
    with pytest.raises(PeerLostError, match=r"rank 0 waited 0\.05 s for rank 3.*'p/thing'"):
        rendezvous.wait("thing", 3)


def test_the_rest_of_a_timeout_is_rounded_in_messages() -> None:
    with pytest.raises(PeerLostError, match=r"rank 0 waited 0\.02 s for rank 3"):
        Rendezvous(HashStore(), "p", 0, 0.0199152).wait("thing", 3)


def test_values_are_bytes_below_their_prefix() -> None:
    store = HashStore()
    Rendezvous(store, "p", 0, 5).publish("thing", b"\x00\xff")
    assert Rendezvous(store, "p", 1, 5).wait("thing", 0) == b"\x00\xff"
    assert Rendezvous(store, "p", 1, 5).has("thing")
    assert not Rendezvous(store, "q", 1, 5).has("thing")
    with pytest.raises(PeerLostError):
        Rendezvous(store, "q", 1, 0.01).wait("thing", 0)


def test_a_store_that_died_is_reported_in_one_sentence() -> None:
    server = loopback_store()
    client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    rendezvous = Rendezvous(client, "p", 1, 5)
    del server
    with pytest.raises(RrfpError, match="the rendezvous store failed") as caught:
        rendezvous.wait("thing", 0)
    assert "\n" not in str(caught.value)


def test_a_rank_that_fails_ends_every_wait_with_its_reason() -> None:
    """At once, and not at the deadline; the first one to fail is named."""
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Rendezvous(store, "p", 0, 60).wait, "thing", 1)
        Rendezvous(store, "other", 3, 60).fail("no part of this meeting")
        Rendezvous(store, "p", 2, 60).fail("the loss is nan; try a smaller --lr")
        Rendezvous(store, "p", 3, 60).fail("rank 2 was lost")
        words = "^rank 2 failed while the ranks met: the loss is nan; try a smaller --lr$"
        with pytest.raises(PeerLostError, match=words):
            waiting.result(timeout=20)
    # What is there already is still given.
    Rendezvous(store, "p", 1, 5).publish("thing", "x")
    assert Rendezvous(store, "p", 0, 5).wait("thing", 1) == b"x"


def test_a_long_wait_names_the_missing_ranks_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rrfp.runtime.rendezvous._NOTICE_S", 0.1)
    store = HashStore()

    def wait(rank: int) -> None:
        rendezvous = Rendezvous(store, "p", rank, 60)
        rendezvous.publish(f"place/{rank}", "x")
        rendezvous.awaited = range(4)
        for peer in range(4):
            rendezvous.wait(f"place/{peer}", peer)

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(wait, rank) for rank in (0, 2)]
        while not caplog.records:
            time.sleep(0.01)
        for rank in (1, 3):
            Rendezvous(store, "p", rank, 60).publish(f"place/{rank}", "x")
        for each in waiting:
            each.result(timeout=20)
    lines = [record.getMessage() for record in caplog.records]
    assert re.match(
        "ranks 1, 3 have not come to the first step after .* given up after 60 s", lines[0]
    )
    # One line each time, from any of the ranks.
    assert len({line.split(";")[0] for line in lines}) == len(lines)


def test_a_rank_that_fails_says_so_even_without_a_store() -> None:
    server = loopback_store()
    client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    del server
    Rendezvous(client, "p", 1, 5).fail("no memory")


def test_what_a_failed_rank_says_must_be_readable() -> None:
    store = HashStore()
    store.set("p/failed", PICKLE)  # type: ignore[arg-type]
    with pytest.raises(RrfpError, match="what a rank published as 'p/failed' cannot be read"):
        Rendezvous(store, "p", 0, 5).wait("thing", 1)


PICKLE = b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0btouch /tmp/x\x85R."


@pytest.mark.parametrize(
    ("planted", "read"),
    [
        *(
            (planted, integer)
            for planted in (PICKLE, b"", b"{", b"[1, 2]", b"true", b"1.5", b"[" * 100_000)
        ),
        (b"1" + b"0" * 400, number),
    ],
)
def test_a_value_that_cannot_be_read_is_reported_with_its_key_and_rank(
    planted: bytes, read: Callable[[object], float]
) -> None:
    rendezvous = Rendezvous(HashStore(), "p", 0, 5)
    rendezvous.publish("thing", planted)
    words = "what rank 3 published as 'p/thing' cannot be read .*; see whether every rank runs"
    with pytest.raises(RrfpError, match=words) as caught:
        rendezvous.wait_json("thing", 3, read)
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, PeerLostError)


def test_text_must_be_text() -> None:
    rendezvous = Rendezvous(HashStore(), "p", 0, 5)
    rendezvous.publish("thing", b"\xff")
    with pytest.raises(RrfpError, match="what rank 3 published as 'p/thing' cannot be read"):
        rendezvous.wait_text("thing", 3)


INFO = RankInfo(1, 1, 0, 0, (1, 3), "host", 77)


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        {},
        asdict(INFO) | {"stages": "13"},
        asdict(INFO) | {"stages": [1.0]},
        asdict(INFO) | {"pid": True},
        asdict(INFO) | {"host": 7},
        asdict(INFO) | {"more": 7},
        asdict(INFO) | {"rank": 2},
    ],
)
def test_only_a_whole_introduction_is_one(values: object) -> None:
    store = HashStore()
    store.set("p/info/0", json.dumps(asdict(replace(INFO, rank=0))))
    store.set("p/info/1", json.dumps(asdict(INFO)))
    assert wait_for_rank_infos(store, "p", 0, 2, timeout_s=5) == [replace(INFO, rank=0), INFO]
    store.set("p/info/1", json.dumps(values))
    with pytest.raises(RrfpError, match="what rank 1 published as 'p/info/1' cannot be read"):
        wait_for_rank_infos(store, "p", 0, 2, timeout_s=5)


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
        return measure_clock_offset(
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
        measure_clock_offset(HashStore(), "c", rank, ("a", "b", "b"), timeout_s=0.05)


@pytest.mark.parametrize("master", ["127.0.0.1", "no-such-host.invalid", ""])
def test_the_reachable_address_is_one_of_this_host(
    master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RRFP_ADDRESS", raising=False)
    monkeypatch.setenv("MASTER_ADDR", master)
    address = reachable_address()
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((address, 0), family=family) as server:
        assert server.getsockname()[1] > 0


def test_the_address_that_is_named_is_the_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.7")
    monkeypatch.setenv("RRFP_ADDRESS", "127.0.0.3")
    assert reachable_address() == "127.0.0.3"


def test_a_job_that_torchrun_starts_again_reads_nothing_of_its_first_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: kept)
    Rendezvous(default_store(), "p", 0, 1.0).publish("address", "gone")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert Rendezvous(default_store(), "p", 1, 1.0).wait("address", 0) == b"gone"
    # Several nodes may count differently.
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    with pytest.raises(PeerLostError, match=r"waited 0\.01 s for rank 0"):
        Rendezvous(default_store(), "p", 1, 0.01).wait("address", 0)


# What a rank says of itself when it introduces itself.


class OwnClock(CpuDevice):
    """A device whose clock is related to the host's to within 7 us."""

    def synchronize_clocks(self) -> None:
        self.clock_error_ns = 7000


def test_times_are_as_uncertain_as_the_clock_of_the_device() -> None:
    store = HashStore()
    own = [RankInfo(rank, rank, 0, 0, (rank,), "host", 1) for rank in (0, 1)]
    meet = partial(publish_rank_info, store, "ranks", num_ranks=2, timeout_s=10)
    with ThreadPoolExecutor(2) as pool:
        told = [pool.submit(meet, own[0], device=CPU), pool.submit(meet, own[1], device=OwnClock())]
    assert [each.result().clock_error_ns for each in told] == [0, 7000]
    heard = wait_for_rank_infos(store, "ranks", 0, 2, timeout_s=2)
    assert [each.clock_error_ns for each in heard] == [0, 7000]
