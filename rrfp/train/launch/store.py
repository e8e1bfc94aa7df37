"""A run's store: its address, connections to it, and calls that end after a timeout.

On one host it is a file in a directory that only the user may enter, so nothing needs to listen.
Between hosts it is a port of host 0, at one address (`rrfp.train.launch.hosts.joining`).
"""

import os
import threading
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rrfp.errors import RrfpError, first_line
from rrfp.runtime import launchers as variables
from rrfp.strict_json import parsed

if TYPE_CHECKING:
    from torch.distributed import Store


def file_store(directory: Path) -> dict[str, str]:
    """Return the environment variables of the ranks of a single host: their store is a file in this
    directory, and they listen at loopback."""
    return {
        variables.STORE: f"file:{directory / 'store'}",
        variables.ADDRESS: variables.LOOPBACK,
    }


def port_store(
    host: str, port: int, own_address: str, sources: Collection[str] | None
) -> dict[str, str]:
    """Return the environment variables of a host's ranks: the port of host 0 with their store, the
    address of their own host at which they listen, and the addresses that they admit there (None:
    any)."""
    return {
        variables.STORE: f"tcp:{host}:{port}",
        variables.ADDRESS: own_address,
        **({} if sources is None else {variables.SOURCES: ",".join(sources)}),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def open_store(timeout_s: float) -> "Store | None":
    """Connect to the store that rrfp's launcher has named, a file or a port; None if it has named
    none, so that torch uses torchrun's variables. Raise RrfpError for an invalid name or if nobody
    answers there."""
    where = os.environ.get(variables.STORE)
    if where is None:
        return None
    from torch.distributed import FileStore, TCPStore

    kind, _, place = where.partition(":")
    store: Store
    if kind == "file":
        store = FileStore(place)
    elif kind == "tcp":
        host, _, port = place.rpartition(":")
        try:
            store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        except RuntimeError as error:
            raise RrfpError(
                f"the run's store at {place} cannot be reached ({first_line(str(error))}); see how "
                "rrfp train ended on host 0"
            ) from None
    else:
        raise RrfpError(
            f"{variables.STORE} is '{where}', which is neither file:PATH nor tcp:HOST:PORT; let "
            "'rrfp train' set it"
        )
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


# torch waits in C++ for an answer that may never come, from a store at the other end of a dead link
# or from a name server. So a daemon thread asks and Python waits: Ctrl-C, SIGTERM and a timeout end
# every wait.


T = TypeVar("T")

_THREAD_NAME = "rrfp-ask"


class NoAnswerError(RrfpError):
    """No answer within the timeout."""


def call_with_timeout(ask: Callable[[], T], within_s: float, whom: str) -> T:
    """Call `ask` in a daemon thread and return or raise what it does. Raise NoAnswerError, naming
    `whom`, if it does not end in time; the thread then goes on and its result is dropped."""
    answers: list[T] = []
    errors: list[Exception] = []

    def collect() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=collect, name=_THREAD_NAME, daemon=True)
    thread.start()
    thread.join(within_s)
    if errors:
        raise errors[0]
    if not answers:
        raise NoAnswerError(f"{whom} did not answer for {within_s:g} s; see whether it still runs")
    return answers[0]


def is_call_pending() -> bool:
    """True while a thread of `call_with_timeout` waits for an answer. Python must not end then: it
    would end that thread inside C++, which aborts the process."""
    return any(thread.name == _THREAD_NAME for thread in threading.enumerate())


class StoreClient:
    """The store of several hosts, as their launchers use it. Every call raises RrfpError if the
    store has gone, or does not answer within `within_s` seconds."""

    def __init__(self, store: "Store", where: str, within_s: float) -> None:
        self._store: Store | None = store
        self._where = where
        self._within_s = within_s

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        # torch declares str, but also accepts bytes and returns them unchanged.
        self._call(lambda store: store.set(key, value))  # type: ignore[arg-type]

    def find(self, key: str) -> bytes | None:
        """Return the value of a key; None, without waiting, if it has none."""
        return self._call(lambda store: bytes(store.get(key)) if store.check([key]) else None)

    def read(self, key: str, decode: Callable[[object], T], whose: str) -> T | None:
        """Return the decoded JSON value of a key; None, without waiting, if it has none. Raise
        RrfpError, naming `whose` value it should be, if it cannot be decoded (`decode` raises
        ValueError)."""
        data = self.find(key)
        if data is None:
            return None
        try:
            return decode(parsed(data))
        except ValueError:
            raise RrfpError(
                f"the value of '{key}' at {self._where} is not what {whose} says; see whether it "
                "runs the same rrfp, and who else can reach that port"
            ) from None

    def take(self, key: str) -> bytes | None:
        """Return the value of a key and delete the key; None if it has no value."""
        value = self.find(key)
        if value is not None:
            self._call(lambda store: store.delete_key(key))
        return value

    def claim(self, key: str, value: str) -> bytes:
        """Set a key unless it has a value; return the value that it has then."""
        return self._call(lambda store: bytes(store.compare_set(key, "", value)))

    def count(self, key: str, more: int) -> int:
        """Add `more`, which may be 0, to a counter that starts at 0, and return its value."""
        return self._call(lambda store: store.add(key, more))

    def close(self) -> None:
        """Drop the connection; later calls raise RrfpError. The process that serves the store stops
        serving it."""
        self._store = None

    def _call(self, call: Callable[["Store"], T]) -> T:
        """Call the store with a timeout. Raise RrfpError if it is closed, has gone or does not
        answer."""
        store, name = self._store, f"the run's store at {self._where}"
        if store is None:
            raise RrfpError(f"{name} is closed")
        try:
            return call_with_timeout(lambda: call(store), self._within_s, name)
        except RuntimeError as error:
            raise RrfpError(
                f"{name} has gone ({first_line(str(error))}); see how rrfp train ended on host 0"
            ) from None
