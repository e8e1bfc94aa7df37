"""Hosts that meet, that do not come, that were asked for different things, and that part."""

import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from rrfp.errors import RrfpError, UsageError
from rrfp.train.launch.hosts import joining as module
from rrfp.train.launch.hosts.endpoint import obstacle_at
from rrfp.train.launch.hosts.joining import joined_hosts
from rrfp.train.launch.stopping import stopping_on_sigterm
from rrfp.train.settings import TrainSettings
from tests.train.trained import Training, free_port


def settings(
    port: int, node_rank: int, host: str = "127.0.0.1", nnodes: int = 2, **values: Any
) -> TrainSettings:
    endpoint = f"{host}:{port}"
    return TrainSettings(nnodes=nnodes, node_rank=node_rank, rdzv_endpoint=endpoint, **values)


def meet(chosen: TrainSettings, timeout_s: float = 20.0, data: str = "") -> Mapping[str, str]:
    """Join as one host, and end as soon as all have joined; returns the ranks' variables."""
    with joined_hosts(chosen, timeout_s, data) as hosts:
        return hosts.environment


@contextmanager
def both(port: int, **values: Any) -> Iterator[Callable[[], Any]]:
    """Let host 1 join in a thread; yields a function that awaits its result."""
    with ThreadPoolExecutor() as hosts:
        other = hosts.submit(meet, settings(port, 1, **values))
        yield lambda: other.result(timeout=20)


@pytest.mark.parametrize(("host", "plain"), [("127.0.0.1", "127.0.0.1"), ("[::1]", "::1")])
def test_hosts_meet_in_any_order(host: str, plain: str) -> None:
    if plain == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    port = free_port()
    with both(port, host=host) as other:
        with joined_hosts(settings(port, 0, host), 20.0) as joined:
            assert joined.environment["RRFP_STORE"] == f"tcp:{plain}:{port}"
            assert joined.environment["RRFP_ADDRESS"] == plain
            store = TCPStore(plain, port, is_master=False, wait_for_workers=False)
            store.set("word", "heard")
        assert other() == joined.environment


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_the_store_listens_at_the_endpoint_alone() -> None:
    port = free_port()
    with both(port) as other:
        with joined_hosts(settings(port, 0), 20.0):
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


def test_a_port_in_use_is_refused() -> None:
    words = r"cannot connect at 127.0.0.1:\d+ \(.*already in use.*\); give --rdzv-endpoint a"
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tokenizer.json").touch()
    port, digests = free_port(), iter(["a" * 64, "b" * 64])
    monkeypatch.setattr("rrfp.train.launch.hosts.joining.sha256_of", lambda path: next(digests))
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
        with pytest.raises(UsageError, match="--hint is bf on host 0 and fb on host 1"):
            meet(settings(port, 0))
        with pytest.raises(UsageError, match="--hint is bf on host 0 and fb on host 1"):
            other()


def test_hosts_with_other_data_are_refused_on_both() -> None:
    port, words = free_port(), r"content of --data is aa... on host 0 and bb... on host 1"
    with ThreadPoolExecutor() as hosts:
        other = hosts.submit(meet, settings(port, 1), data="bb")
        with pytest.raises(UsageError, match=words):
            meet(settings(port, 0), data="aa")
        with pytest.raises(UsageError, match=words):
            other.result(timeout=20)


@pytest.mark.parametrize("planted", [b"\x80\x04}.", b"[]", b'"', b"[" * 100_000, b"\xff"])
def test_an_invalid_status_of_a_host_is_an_error(planted: bytes) -> None:
    """In the place of host 1, somebody who writes what they like."""
    port = free_port()

    def plant() -> None:
        while not can_connect(port):
            time.sleep(0.02)
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        store.set("rrfp/pulse/1", planted)  # type: ignore[arg-type]

    with ThreadPoolExecutor() as hosts:
        planting = hosts.submit(plant)
        with pytest.raises(
            RrfpError, match=r"value of 'rrfp/pulse/1' in .* is not what host 1 says"
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
        with joined_hosts(settings(port, 1), 20.0):
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


def test_a_failed_run_is_reported_and_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrfp.train.launch.hosts.host_status._DELIVERY_0_S", 2.0)
    port, may_leave = free_port(), threading.Event()

    def be_host_1() -> None:
        with joined_hosts(settings(port, 1), 20.0):
            may_leave.wait(20)

    with ThreadPoolExecutor() as hosts:
        other = hosts.submit(be_host_1)
        with pytest.raises(RrfpError, match="rank 0 failed"), joined_hosts(settings(port, 0), 20.0):
            raise RrfpError("rank 0 failed")
        assert not other.done()
        may_leave.set()
        with pytest.raises(RrfpError, match=r"^host 0 \(.*\): rank 0 failed$"):
            other.result(timeout=20)


def test_a_failure_reaches_all_hosts_unchanged() -> None:
    port = free_port()

    def be(node_rank: int, error: str = "") -> None:
        with joined_hosts(settings(port, node_rank, nnodes=3, pp=6), 20.0) as joined:
            while not (joined.heartbeat.lost() or error):
                time.sleep(0.02)
            raise RrfpError(error or joined.heartbeat.lost())

    with ThreadPoolExecutor() as hosts:
        three = [hosts.submit(be, 0), hosts.submit(be, 2), hosts.submit(be, 1, "rank 2 failed")]
        told = [str(each.exception(timeout=20)) for each in three]
    assert told == [f"host 1 ({socket.gethostname()}): rank 2 failed"] * 2 + ["rank 2 failed"]


def test_a_second_host_with_the_same_number_is_refused_on_all_hosts() -> None:
    port = free_port()
    with ThreadPoolExecutor() as hosts:
        three = [
            hosts.submit(meet, settings(port, node_rank, nnodes=3, pp=6)) for node_rank in (0, 1, 1)
        ]
        told = [str(each.exception(timeout=20)) for each in three]
    words = f"--node-rank 1 is taken: {socket.gethostname()} (process {os.getpid()}) came to "
    assert [words in each for each in told] == [True] * 3, told


def test_a_host_too_many_is_refused_there_and_on_host_0() -> None:
    port, words = free_port(), "--nnodes is 2 on host 0 and 3 on host 2"
    with ThreadPoolExecutor() as hosts:
        other = hosts.submit(meet, settings(port, 2, nnodes=3, pp=6))
        with pytest.raises(UsageError, match=words):
            meet(settings(port, 0, pp=6))
        with pytest.raises(UsageError, match=words):
            other.result(timeout=20)


def test_host_0_elsewhere_is_refused() -> None:
    # An address of TEST-NET-1, which no host has.
    with pytest.raises(
        UsageError, match=r"192\.0\.2\.1 is no address of this host, which is host 0"
    ):
        meet(settings(free_port(), 0, "192.0.2.1"))


def test_a_host_that_comes_and_is_lost_is_named_while_others_are_awaited() -> None:
    port = free_port()

    def come_and_go() -> None:
        while not can_connect(port):
            time.sleep(0.02)
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        store.set("rrfp/pulse/1", '[1, "here", "node1", "", null]')

    with ThreadPoolExecutor() as hosts:
        coming = hosts.submit(come_and_go)
        with pytest.raises(RrfpError, match=r"host 1 \(node1\) was silent for 1 s towards host 0"):
            meet(settings(port, 0, nnodes=3, pp=6, silence=1.0), 300.0)
        coming.result(timeout=20)


def answering(listening: socket.socket, answer: Callable[[socket.socket], object]) -> None:
    """Accept connections for as long as the socket is open, and do that with each."""

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                answer(connection)

    threading.Thread(target=accept, daemon=True).start()


def speak_http(connection: socket.socket) -> None:
    connection.recv(1000)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_S", 1.0)
    monkeypatch.setattr("rrfp.train.launch.hosts.endpoint._PROBE_S", 0.5)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (speak_http, "something else listens there, which answers b'HTTP/1.1 400 Bad Request"),
        (lambda connection: connection.recv(1000), "listens there and closes every connection"),
        (lambda connection: time.sleep(5), "something listens there and says nothing"),
    ],
    ids=["http", "closes", "silent"],
)
def test_a_server_that_is_no_store_is_an_error(
    answer: Callable[[socket.socket], object], words: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        answering(listening, answer)
        with pytest.raises(UsageError, match="cannot connect at .*" + re.escape(words)):
            meet(settings(listening.getsockname()[1], 1, silence=1.0), 300.0)


@pytest.mark.usefixtures("impatient")
def test_the_store_of_another_job_is_an_error() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(UsageError, match="no host 0 of rrfp's has come to it"):
        meet(settings(store.port, 1, silence=1.0), 300.0)


@pytest.mark.usefixtures("impatient")
def test_a_mistyped_host_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"the name 'nosuchhost\.invalid' is not known here"):
        meet(settings(free_port(), 1, "nosuchhost.invalid", silence=1.0), 300.0)


@pytest.mark.usefixtures("impatient")
def test_a_host_that_does_not_answer_is_an_error() -> None:
    with ExitStack() as stack:
        # A queue that is full drops packets, as a host does that is not there.
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(full.getsockname())
        with pytest.raises(UsageError, match=r"nothing answers at 127\.0\.0\.1 \(timed out\)"):
            meet(settings(full.getsockname()[1], 1, silence=1.0), 300.0)


def test_a_store_of_torchs_answers_as_one() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert obstacle_at("127.0.0.1", store.port, 1.0) is None


def test_a_host_may_have_more_addresses_than_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        unused = bound.getsockname()
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", address)
        for address in (unused, ("127.0.0.1", store.port))
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert obstacle_at("host0", store.port, 1.0) is None


def test_a_long_wait_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_WARN_AFTER_S", 0.2)
    with pytest.raises(RrfpError, match="host 1 did not come"):
        meet(settings(free_port(), 0), 1.0)
    (told,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert told.startswith("host 1 has not come to 127.0.0.1:")


def test_ctrl_c_ends_a_wait_inside_torch(tmp_path: Path) -> None:
    is_inside = threading.Event()

    def greet_and_stand_still(connection: socket.socket) -> None:
        """As a store whose host is cut off once torch's client has come in."""
        hello = connection.recv(10)
        connection.sendall(hello[-4:])
        while connection.recv(1000):
            is_inside.set()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        answering(listening, greet_and_stand_still)
        endpoint = f"127.0.0.1:{listening.getsockname()[1]}"
        flags = ("--nnodes=2", "--node-rank=1", f"--rdzv-endpoint={endpoint}")
        with Training(tmp_path / "run", *flags) as host:
            host.await_that(is_inside.is_set, "call of torch's client")
            host.process.send_signal(signal.SIGINT)
            code, _, err = host.ended(timeout_s=10)
    assert (code, err.splitlines()[-1]) == (130, "rrfp: interrupted"), err


def test_sigterm_makes_no_success_of_a_failed_rendezvous() -> None:
    def fail() -> None:
        try:
            meet(settings(free_port(), 0), 0.3)
        finally:
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    try:
        with stopping_on_sigterm(), pytest.raises(RrfpError, match="host 1 did not come"):
            fail()
    finally:
        signal.signal(signal.SIGTERM, before)
