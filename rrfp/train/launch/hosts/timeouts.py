"""Answers that may never come: from a store at the other end of a dead link, or a name server.

torch waits for them in C++, some of them for ever. Here a daemon thread asks and Python waits, so
that Ctrl-C, SIGTERM and a time-out end every wait.
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from rrfp.errors import RrfpError, first_line
from rrfp.strict_json import parsed

if TYPE_CHECKING:
    from torch.distributed import Store


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
