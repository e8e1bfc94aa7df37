"""A run's store: where the launcher puts it, and how a rank finds it.

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
    """The variables that tell the ranks of a single host that their store is in this directory and
    that they listen at loopback."""
    return {
        variables.STORE: f"file:{directory / 'store'}",
        variables.ADDRESS: variables.LOOPBACK,
    }


def port_store(
    host: str, port: int, own_address: str, sources: Collection[str] | None
) -> dict[str, str]:
    """The variables that tell a host's ranks that their store is at a port of host 0, at which
    address of their own host they listen, and whom they let in there (None: anybody)."""
    return {
        variables.STORE: f"tcp:{host}:{port}",
        variables.ADDRESS: own_address,
        **({} if sources is None else {variables.SOURCES: ",".join(sources)}),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def open_store(timeout_s: float) -> "Store | None":
    """The store that our launcher has named; None if torch is to find its own by the variables that
    torchrun sets."""
    where = os.environ.get(variables.STORE)
    return None if where is None else store_at(where, timeout_s)


def store_at(where: str, timeout_s: float) -> "Store":
    """The store at such a place: `file:PATH` or `tcp:HOST:PORT`. Raises RrfpError if nobody answers
    there."""
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


# Calls of a store that end after a timeout.


T = TypeVar("T")

_NAME = "rrfp-ask"


class NoAnswerError(RrfpError):
    """Nobody answered in time."""


def answer_of(ask: Callable[[], T], within_s: float, whom: str) -> T:
    """What `ask` returns or raises. Raises NoAnswerError if it has not ended by then; its thread
    goes on, and what comes of it is dropped."""
    answers: list[T] = []
    errors: list[Exception] = []

    def note() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=note, name=_NAME, daemon=True)
    thread.start()
    thread.join(within_s)
    if errors:
        raise errors[0]
    if not answers:
        raise NoAnswerError(f"{whom} did not answer for {within_s:g} s; see whether it still runs")
    return answers[0]


def is_asking() -> bool:
    """Whether a thread still waits for an answer. Python must not end then: it would end that
    thread within C++, which aborts the process."""
    return any(thread.name == _NAME for thread in threading.enumerate())


class AnsweringStore:
    """The store of several hosts, as their launchers use it. Every call raises RrfpError if the
    store has gone, or does not answer within `within_s`."""

    def __init__(self, store: "Store", where: str, within_s: float) -> None:
        self._store: Store | None = store
        self._where = where
        self._within_s = within_s

    def set(self, key: str, value: str | bytes) -> None:
        # torch declares str, but also takes bytes and returns them unchanged.
        self._ask(lambda store: store.set(key, value))  # type: ignore[arg-type]

    def find(self, key: str) -> bytes | None:
        """The value of a key; None if it has none."""
        return self._ask(lambda store: bytes(store.get(key)) if store.check([key]) else None)

    def read(self, key: str, decode: Callable[[object], T], whose: str) -> T | None:
        """What `decode` makes of the JSON under a key; None if there is none. Raises RrfpError if
        that is not what `whose` rrfp writes there (`decode` raises ValueError)."""
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
        """The same, and the key is gone."""
        value = self.find(key)
        if value is not None:
            self._ask(lambda store: store.delete_key(key))
        return value

    def claim(self, key: str, value: str) -> bytes:
        """Give the key this value unless it has one; returns the one that it has."""
        return self._ask(lambda store: bytes(store.compare_set(key, "", value)))

    def count(self, key: str, more: int) -> int:
        """Add to a number that begins at 0, and return it."""
        return self._ask(lambda store: store.add(key, more))

    def close(self) -> None:
        """Let go of the store: whoever serves it serves no more."""
        self._store = None

    def _ask(self, ask: Callable[["Store"], T]) -> T:
        store = self._store
        if store is None:
            raise RrfpError(f"the run's store at {self._where} is closed")
        try:
            return answer_of(
                lambda: ask(store), self._within_s, f"the run's store at {self._where}"
            )
        except RuntimeError as error:
            raise RrfpError(
                f"the run's store at {self._where} has gone ({first_line(str(error))}); see how "
                "rrfp train ended on host 0"
            ) from None
