"""A stranger: a process without credentials that sends harmful data to ports. As a script it reads
orders from stdin, one JSON object per line, and answers each with a count of the outcomes.

It only ever connects to the addresses that it is ordered to.
"""

import errno
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

NOBODY = 65534
_MOST_AT_ONCE = 100
"""Connections that it opens at a time."""
_MOST_HELD = 60
"""Accepted connections that it keeps open."""
_ANSWER_S = 0.03
_NUM_GUESSES = 40
_STORE_MAGIC = 0x3C85F7CE
_VALIDATE, _SET = 0, 1
"""Query types in the protocol of torch's TCPStore."""


class Stranger:
    """The test's handle of a stranger, which ends with the `with` block."""

    def __init__(self, *, within: Sequence[str] = (), uid: int | None = None) -> None:
        """`within` goes before the command; `uid` is the user that it becomes."""
        self._process = subprocess.Popen(
            [*within, sys.executable, "-S", __file__, "" if uid is None else str(uid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def probe(
        self, address: str, port: int, times: int, *, planted: bytes = b"", source: str = ""
    ) -> Counter[str]:
        """Connect `times` times, from `source`, and send harmful data, among it `planted`. Returns
        how often it was `taken` (accepted), `refused` or `dropped`."""
        order = {"address": address, "port": port, "times": times, "source": source}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order | {"planted": planted.hex()}) + "\n")
        self._process.stdin.flush()
        return Counter(json.loads(self._process.stdout.readline()))


def messages(planted: bytes, chance: random.Random) -> Iterator[bytes]:
    """The messages that it sends, repeated indefinitely."""
    number = 0
    while True:
        # gloo trusts a sender that names the number of a pair.
        yield struct.pack("=q", number % _NUM_GUESSES)
        yield struct.pack("=q", number % _NUM_GUESSES) + chance.randbytes(200)
        yield b""
        yield chance.randbytes(chance.randrange(1, 3000))
        yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
        yield b"\xff" * 64  # lengths that no memory holds
        yield _set_in_store(f"rrfp/ranks/info/{number % 4}", planted)
        yield _set_in_store(str(number % 4), planted)
        number += 1


def _set_in_store(key: str, value: bytes) -> bytes:
    named = struct.pack("=Q", len(key)) + key.encode()
    return (
        struct.pack("=BIB", _VALIDATE, _STORE_MAGIC, _SET)
        + named
        + struct.pack("=Q", len(value))
        + value
    )


class _Visits:
    """The connections of a stranger, a bounded number at a time."""

    def __init__(self) -> None:
        self._chance = random.Random(1)
        self._under_way: dict[socket.socket, tuple[float, bytes]] = {}
        self._held: list[socket.socket] = []

    def probe(self, order: dict[str, Any]) -> Counter[str]:
        found: Counter[str] = Counter()
        say = messages(bytes.fromhex(order["planted"]), self._chance)
        for _ in range(order["times"]):
            while len(self._under_way) >= _MOST_AT_ONCE:
                self._look(found)
            self._connect(order, next(say), found)
        while self._under_way:
            self._look(found)
        return found

    def _connect(self, order: dict[str, Any], message: bytes, found: Counter[str]) -> None:
        family = socket.AF_INET6 if ":" in order["address"] else socket.AF_INET
        visit = socket.socket(family)
        visit.setblocking(False)
        if order["source"]:
            visit.bind((order["source"], 0))
        code = visit.connect_ex((order["address"], order["port"]))
        if code not in (0, errno.EINPROGRESS):
            visit.close()
            found["refused"] += 1
            return
        self._under_way[visit] = time.monotonic() + _ANSWER_S, message

    def _look(self, found: Counter[str]) -> None:
        _, ready, _ = select.select([], [*self._under_way], [], 0.005)
        for visit in ready:
            _, message = self._under_way.pop(visit)
            if visit.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                found["refused"] += 1
                visit.close()
                continue
            found["taken"] += 1
            with suppress(OSError):
                visit.send(message)
            self._part(visit)
        for visit, (deadline_s, _) in [*self._under_way.items()]:
            if time.monotonic() > deadline_s:
                del self._under_way[visit]
                visit.close()
                found["dropped"] += 1

    def _part(self, visit: socket.socket) -> None:
        """Stay, go, or go with a reset."""
        way: Callable[[], object] = self._chance.choice(
            [lambda: self._held.append(visit), visit.close, lambda: _reset(visit)]
        )
        way()
        while len(self._held) > _MOST_HELD:
            self._held.pop(0).close()


def _reset(visit: socket.socket) -> None:
    visit.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    visit.close()


def _main() -> None:
    if sys.argv[1]:
        os.setgroups([])
        os.setgid(int(sys.argv[1]))
        os.setuid(int(sys.argv[1]))
    visits = _Visits()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(visits.probe(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main()
