"""What the hosts of a run say to each other while it lasts: that they are there, how they failed,
and that they have ended.

Ranks notice a silent peer themselves, except in a collective of gloo's, which waits for minutes. Of
a rank that failed on another host they know only that its connections broke. So launchers talk,
through the run's store: each host publishes its word under a key of its own, with a number that
grows. Host 0 reads those of all others, and they read host 0's.
"""

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import Self

from rrfp.errors import RrfpError, first_line
from rrfp.strict_json import integer, items, parsed, text
from rrfp.trace.outcome import FaultOrigin, RunFailedError
from rrfp.train.launch.store import AnsweringStore

_BEAT_S = 1.0
_QUICK_BEAT_S = 0.1
"""While hosts come, and when they go."""
_PAUSE_S = 2.0
"""Nobody looks for so long only if this process itself was stopped."""
_OVERDUE_S = 4.0
_WORD_S = 8.0
"""How long a host whose ranks have lost a peer waits for another one to say why: longer than that
one takes to kill a rank that does not end."""
_TELL_S = 2.0
"""How long a host that ends waits for host 0 to have heard it."""
_HEAR_S = 5.0
"""How long host 0 waits for the others to have heard it, and to end as well."""
_PARTING_S = 60.0
"""How long hosts whose ranks have ended wait for the others."""
_LOOK_S = 0.05
_MOST_CHARS = 2000


class State(StrEnum):
    """How far a host is, in this order."""

    HERE = "here"
    ENDED = "ended"
    """Its ranks have ended well."""
    PARTED = "parted"
    """It knows that those of all hosts have."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Word:
    """What a host publishes."""

    beat: int
    state: State
    name: str
    """The host's own name."""
    sentence: str = ""
    """Why it failed."""
    culprit: FaultOrigin | None = None
    """Who is at fault, if it knows."""

    @classmethod
    def decoded(cls, data: bytes) -> Self:
        """Raises ValueError if these are no host's words."""
        beat, state, name, sentence, culprit = items(parsed(data), 5)
        said = printable(text(name)), printable(text(sentence))
        return cls(integer(beat), State(text(state)), *said, _culprit(culprit))

    @property
    def error(self) -> RrfpError:
        """Why it failed, for those who end because of it."""
        if self.culprit is None:
            return RrfpError(self.sentence)
        return RunFailedError(self.sentence, self.culprit)

    def has_come_to(self, state: State) -> bool:
        return [*State].index(self.state) >= [*State].index(state)


class Pulse:
    """One host's part. It beats on a thread of its own, from `start` to `close`."""

    def __init__(
        self,
        connect: Callable[[], AnsweringStore],
        node_rank: int,
        num_hosts: int,
        silence_s: float,
    ) -> None:
        """`connect` opens a connection to the store, or raises RrfpError. A host that is not heard
        for `silence_s` is lost."""
        self._connect = connect
        self._node_rank = node_rank
        self._others = (0,) if node_rank > 0 else range(1, num_hosts)
        self.silence_s = silence_s
        self._own = Word(0, State.HERE, socket.gethostname())
        self._published = State.HERE
        self._words: dict[int, Word] = {}
        self._misread = ""
        self._heard_s: dict[int, float] = {}
        """When hosts that have come were heard."""
        self._looked_s = 0.0
        self._stood_s = 0.0
        """How long this process was stopped itself, when others may have given it up for that."""
        self._stood_until_s = -math.inf
        self._lock = threading.Lock()
        self._is_closed = False
        self._changed = threading.Event()
        # A daemon: a store behind a dead link never answers.
        self._thread = threading.Thread(target=self._run, name="rrfp-pulse", daemon=True)

    def start(self) -> None:
        self._looked_s = time.monotonic()
        if self._node_rank > 0:
            self._heard_s[0] = self._looked_s
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join(_BEAT_S)

    def has_come(self, host: int) -> bool:
        return host in self._words

    def lost(self) -> RrfpError | None:
        """What ends this host because another one has failed, or was silent for too long."""
        if self._misread:
            return RrfpError(self._misread)
        failed = (word.error for word in self._words.values() if word.state is State.FAILED)
        silent = (self._silence(host) for host in self._others if self.is_silent(host))
        return next(chain(failed, silent), None)

    def is_silent(self, host: int) -> bool:
        """Whether a host that has come, and not ended, was not heard for too long: half as long
        where this one has failed, and only waits for what is left to say."""
        share = 0.5 if self._own.state is State.FAILED else 1.0
        return self._quiet_s(host) > share * self.silence_s

    def reason(self) -> RrfpError | None:
        """Why ranks of this host have lost those of another: what that host says, or that it is not
        heard itself. Waits for it, for a while; None if there is no such reason."""
        _await(lambda: self.lost() is not None, _WORD_S)
        overdue = [host for host in self._others if self._quiet_s(host) > _OVERDUE_S]
        return self.lost() or (self._silence(overdue[0]) if overdue else None)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other hosts at once if the block fails."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Tell the other hosts why this one ends, unless it has been told."""
        if self._own.state is State.FAILED:
            return
        told = self.lost()
        # What another host has said goes on as it is.
        is_anothers = told is not None and str(told) == str(error)
        self._become(
            State.FAILED,
            str(error) if is_anothers else f"{self._called()}: {_why(error)}",
            error.culprit if isinstance(error, RunFailedError) else None,
        )

    def part(self) -> None:
        """Wait until the ranks of all hosts have ended, for a while. Raises RrfpError naming a host
        that fails, is silent, or takes too long."""
        self._become(State.ENDED)
        # Host 0 tells the others once it has heard it of all.
        enough = State.PARTED if self._node_rank > 0 else State.ENDED
        _await(lambda: self._all_are(enough) or self.lost() is not None, _PARTING_S)
        if error := self.lost():
            raise error
        if not self._all_are(enough):
            late = [host for host in self._others if not self._words[host].has_come_to(enough)]
            raise RrfpError(
                f"{self._called(late[0])} still runs {_PARTING_S:g} s after this host's ranks have "
                "ended; see what its rrfp train says"
            )
        self._become(State.PARTED)

    def await_heard(self) -> None:
        """Wait, for a while, until the others know that this host has failed or parts: host 0 until
        they end as well."""
        if not self._thread.is_alive():
            return
        if self._node_rank == 0:
            _await(lambda: self._all_are(State.PARTED), _HEAR_S)
        else:
            _await(lambda: self._published is self._own.state or self.is_silent(0), _TELL_S)

    def _all_are(self, state: State) -> bool:
        """Whether all that have come are so far, as far as they are heard."""
        return all(
            word.has_come_to(state) or self.is_silent(host) for host, word in self._words.items()
        )

    def _become(self, state: State, sentence: str = "", culprit: FaultOrigin | None = None) -> None:
        with self._lock:
            self._own = replace(self._own, state=state, sentence=sentence, culprit=culprit)
        self._changed.set()

    def _quiet_s(self, host: int) -> float:
        """How long a host that has come, and not ended, was not heard."""
        with self._lock:
            now_s = time.monotonic()
            if (paused_s := now_s - self._looked_s) > _PAUSE_S:
                # Nobody could be heard meanwhile.
                self._heard_s = {
                    other: min(at_s + paused_s, now_s) for other, at_s in self._heard_s.items()
                }
                # The others count from the last beat that they heard.
                if paused_s > self.silence_s - 2 * _BEAT_S:
                    self._stood_s, self._stood_until_s = paused_s, now_s
            self._looked_s = now_s
            word = self._words.get(host)
            has_ended = word is not None and word.has_come_to(State.PARTED)
            return 0.0 if has_ended else now_s - self._heard_s.get(host, now_s)

    def _silence(self, host: int) -> RrfpError:
        quiet_s = self._quiet_s(host)
        # What that host said before it gave this one up may arrive only afterwards.
        if self._heard_s[host] < self._stood_until_s + _OVERDUE_S:
            return RrfpError(
                f"{self._called()} stood still itself for {self._stood_s:.0f} s, and has not heard "
                f"{self._called(host)} since; see who stopped its rrfp train"
            )
        return RrfpError(
            f"{self._called(host)} was silent for {quiet_s:.0f} s towards "
            f"{self._called()}; see whether it still runs, and the network between them"
        )

    def _called(self, host: int | None = None) -> str:
        """A host by number and name; None is this one."""
        if host is None:
            return f"host {self._node_rank} ({self._own.name})"
        return f"host {host} ({self._words[host].name})" if host in self._words else f"host {host}"

    def _run(self) -> None:
        store: AnsweringStore | None = None
        while not self._is_closed:
            try:
                store = store or self._connect()
                self._exchange(store)
            except (RrfpError, OSError, RuntimeError):
                # There may be no more files or threads for now. And a new connection may be heard
                # where this one is not: TCP doubles the time between its tries, so one that was cut
                # stays deaf for as long again.
                store = None
            if self._node_rank > 0 and self._published in (State.PARTED, State.FAILED):
                return  # before the store of the next meeting may be at the same place
            are_all_here = self._own.state is State.HERE and len(self._words) == len(self._others)
            self._changed.wait(_BEAT_S if are_all_here else _QUICK_BEAT_S)
            self._changed.clear()

    def _exchange(self, store: AnsweringStore) -> None:
        with self._lock:
            own = self._own = replace(self._own, beat=self._own.beat + 1)
        store.set(_key(self._node_rank), json.dumps(astuple(own)))
        self._published = own.state
        for host in self._others:
            data = store.find(_key(host))
            if data is not None:
                self._hear(host, data)

    def _hear(self, host: int, data: bytes) -> None:
        try:
            word = Word.decoded(data)
        except ValueError as error:
            self._misread = (
                f"the value of '{_key(host)}' in the run's store is not what host {host} says "
                f"({error}); see whether it runs the same rrfp, and who else can reach that store"
            )
            return
        if host not in self._words or word.beat != self._words[host].beat:
            with self._lock:
                self._words = {**self._words, host: word}
                self._heard_s[host] = time.monotonic()


def _await(holds: Callable[[], bool], within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)


def _why(error: BaseException) -> str:
    if isinstance(error, RrfpError):
        return first_line(str(error))
    if isinstance(error, Exception):
        return f"{type(error).__name__}: {first_line(str(error))}"
    return "it was stopped by a signal"


def _culprit(told: object) -> FaultOrigin | None:
    """Raises ValueError for what no host tells."""
    if told is None:
        return None
    found_by, rank, link = items(told, 3)
    try:
        return FaultOrigin.decode({"found_by": found_by, "rank": rank, "link": link})
    except TypeError as error:
        raise ValueError(str(error)) from None


def printable(told: str) -> str:
    """What another host says, as it may stand in a message."""
    return "".join(char if char.isprintable() else "?" for char in told[:_MOST_CHARS])


def _key(host: int) -> str:
    return f"rrfp/pulse/{host}"
