"""Who may connect to a port, decided before there is a connection."""

import os
import socket
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress

import pytest

from rrfp.runtime.net.source_filter import filter_refusal, let_in, let_in_nobody
from tests.sandbox import refusing

_DROPPED_S = 0.2

needs_filter = pytest.mark.skipif(
    bool(filter_refusal()), reason=f"this process may not filter ports: {filter_refusal()}"
)


def listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {address}")


def connect(listening: socket.socket, source: str | None = None) -> socket.socket:
    """From a source, which a machine's loopback has many of. Raises TimeoutError if dropped."""
    return socket.create_connection(listening.getsockname()[:2], _DROPPED_S, source and (source, 0))


def is_let_in(listening: socket.socket, source: str | None = None) -> bool:
    """Whether a megabyte comes through."""
    try:
        dialled = connect(listening, source)
    except TimeoutError:
        return False
    accepted, _ = listening.accept()
    data = bytes(range(256)) * 4096
    with dialled, accepted:
        return echoes(dialled, accepted, data)


def echoes(one: socket.socket, other: socket.socket, data: bytes) -> bool:
    for each in (one, other):
        each.setblocking(False)
    sent = 0
    found = b""
    while len(found) < len(data):
        if sent < len(data):
            with suppress(BlockingIOError):
                sent += one.send(data[sent:])
        with suppress(BlockingIOError):
            found += other.recv(2**16)
    return found == data


@needs_filter
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_nobody_then_anybody(address: str) -> None:
    with listen(address) as listening:
        let_in(listening, None)
        assert is_let_in(listening)
        let_in_nobody(listening)
        assert not is_let_in(listening)
        let_in(listening, None)
        assert is_let_in(listening)


@needs_filter
def test_who_was_let_in_stays() -> None:
    with listen("127.0.0.1") as listening:
        let_in(listening, ["127.0.0.1"])
        dialled = connect(listening)
        accepted, _ = listening.accept()
        with dialled, accepted:
            let_in_nobody(listening)
            assert echoes(dialled, accepted, b"a" * 10**6)
            assert echoes(accepted, dialled, b"b" * 10**6)


FAR = [f"10.0.{number // 256}.{number % 256}" for number in range(0, 2000, 2)]
FAR_6 = [f"fd00::{number:x}" for number in range(0, 2000, 2)]


@needs_filter
@pytest.mark.parametrize(
    ("address", "sources", "let"),
    [
        ("127.0.0.1", ["127.0.0.1"], {"127.0.0.1"}),
        ("127.0.0.1", ["127.0.0.2", "::1", "10.0.0.1"], {"127.0.0.2"}),
        ("127.0.0.1", ["127.0.0.2", "127.0.0.3"], {"127.0.0.2", "127.0.0.3"}),
        ("127.0.0.1", [], set()),
        ("127.0.0.1", ["::1", "::7f00:1"], set()),
        ("127.0.0.1", [*FAR[:60], "127.0.0.2"], {"127.0.0.2"}),
        # More hosts than a filter holds: their neighbours are let in as well.
        ("127.0.0.1", [*FAR, *FAR_6, "127.0.0.3"], {"127.0.0.2", "127.0.0.3"}),
        ("::1", ["::1"], {"::1"}),
        ("::1", ["fe80::1%lo", "127.0.0.1", "::1"], {"::1"}),
        ("::1", ["::2", "127.0.0.1"], set()),
        ("::1", [*FAR_6, "127.0.0.1"], set()),
    ],
)
def test_sources(address: str, sources: Collection[str], let: set[str]) -> None:
    others = ["::1"] if address == "::1" else ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    with listen(address) as listening:
        let_in(listening, sources)
        assert {source for source in others if is_let_in(listening, source)} == let


def test_where_no_filter_is_permitted_a_link_listens_all_the_same() -> None:
    """Those who connect still have to prove themselves."""
    code = (
        "from rrfp.runtime.net.source_filter import filter_refusal, let_in_nobody\n"
        "from rrfp.runtime.net.sockets import listen_tcp\n"
        "from tests.test_doorman import is_let_in\n"
        "with listen_tcp('127.0.0.1') as listening:\n"
        "    let_in_nobody(listening)\n"
        "    assert is_let_in(listening)\n"
        "print(filter_refusal())"
    )
    done = subprocess.run(
        [*refusing("setsockopt"), sys.executable, "-c", code],
        env={**os.environ, "RRFP_SOURCES": "192.0.2.1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "setsockopt(SO_ATTACH_FILTER): Operation not permitted\n", done.stderr
