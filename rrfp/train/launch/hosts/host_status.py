"""Heartbeats between the hosts of a run: each host publishes its status until it ends.

Ranks notice a silent peer themselves, except in a gloo collective, which waits for minutes. When a
rank fails on another host they only see broken connections. So launchers exchange their status
through the run's store: each host writes it under its own key with a growing counter. Host 0 reads
the status of all other hosts, and they read the status of host 0.
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
from rrfp.train.launch.store import StoreClient

_BEAT_S = 1.0
_QUICK_BEAT_S = 0.1
"""The interval while hosts join and while they leave."""
_PAUSE_S = 2.0
"""A gap between two checks that only happens if this process itself was stopped."""
_OVERDUE_S = 4.0
_REASON_S = 8.0
"""How long a host whose ranks have lost a peer waits for the other host's explanation: longer than
that host takes to kill a rank that does not end."""
_DELIVERY_S = 2.0
"""How long a host that ends waits until host 0 has its status."""
_DELIVERY_0_S = 5.0
"""How long host 0 waits until the others have its status and end as well."""
_ALL_ENDED_S = 60.0
"""How long hosts whose ranks have ended wait for the others."""
_POLL_S = 0.05
_MAX_CHARS = 2000


class HostState(StrEnum):
    """The progress of a host, in this order."""

    HERE = "here"
    ENDED = "ended"
    """All of its ranks have ended successfully."""
    PARTED = "parted"
    """It knows that the ranks of all hosts have ended."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class HostStatus:
    """The status that a host publishes, as a JSON array of these fields."""

    beat: int
    state: HostState
    name: str
    """The host's own name."""
    sentence: str = ""
    """Why it failed."""
    culprit: FaultOrigin | None = None
    """The origin of the fault, if known."""

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read a published status, with its texts made printable. Raise ValueError for anything
        else."""
        beat, state, name, sentence, culprit = items(parsed(data), 5)
        return cls(
            integer(beat),
            HostState(text(state)),
            printable(text(name)),
            printable(text(sentence)),
            _decode_fault_origin(culprit),
        )

    @property
    def error(self) -> RrfpError:
        """The failure of this host as an error to raise on other hosts."""
        if self.culprit is None:
            return RrfpError(self.sentence)
        return RunFailedError(self.sentence, self.culprit)

    def has_reached(self, state: HostState) -> bool:
        """True if the host is in this state or a later one; FAILED is the last."""
        return [*HostState].index(self.state) >= [*HostState].index(state)


class HostHeartbeat:
    """One host's side of the exchange. A thread publishes and reads from `start` to `close`."""

    def __init__(
        self,
        connect: Callable[[], StoreClient],
        node_rank: int,
        num_hosts: int,
        silence_s: float,
    ) -> None:
        """`connect` opens a connection to the store, or raises RrfpError. A host without a new
        status for `silence_s` seconds is lost."""
        self._connect = connect
        self._node_rank = node_rank
        self._others = (0,) if node_rank > 0 else range(1, num_hosts)
        self.silence_s = silence_s
        self._own = HostStatus(0, HostState.HERE, socket.gethostname())
        self._published = HostState.HERE
        self._statuses: dict[int, HostStatus] = {}
        self._invalid_status = ""
        """Error sentence about a status that could not be decoded."""
        self._received_s: dict[int, float] = {}
        """Arrival time of the last new status of each joined host."""
        self._checked_s = 0.0
        self._stopped_for_s = 0.0
        """How long this process itself was stopped, if long enough for others to give it up."""
        self._stopped_until_s = -math.inf
        self._lock = threading.Lock()
        self._is_closed = False
        self._changed = threading.Event()
        # A daemon: a store at the other end of a dead link never answers.
        self._thread = threading.Thread(target=self._run, name="rrfp-pulse", daemon=True)

    def start(self) -> None:
        """Start the thread; on hosts other than 0, the silence of host 0 counts from now."""
        self._checked_s = time.monotonic()
        if self._node_rank > 0:
            self._received_s[0] = self._checked_s
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; wait for it at most one interval, 1 s."""
        self._is_closed = True
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join(_BEAT_S)

    def has_joined(self, host: int) -> bool:
        """True once a status of this host has arrived."""
        return host in self._statuses

    def lost(self) -> RrfpError | None:
        """Return the error to end this host with because another host failed, is silent or
        published an invalid status; None otherwise. Does not wait."""
        if self._invalid_status:
            return RrfpError(self._invalid_status)
        statuses = self._statuses.values()
        failed = (status.error for status in statuses if status.state is HostState.FAILED)
        silent = (self._silence_error(host) for host in self._others if self.is_silent(host))
        return next(chain(failed, silent), None)

    def is_silent(self, host: int) -> bool:
        """True if a joined host that has neither parted nor failed sent no status for too long:
        `silence_s`, or half of it once this host has failed and only waits for final messages."""
        share = 0.5 if self._own.state is HostState.FAILED else 1.0
        return self._silent_for_s(host) > share * self.silence_s

    def reason(self) -> RrfpError | None:
        """Wait up to 8 s for the reason why ranks here have lost peers on another host: that host's
        failure, or its silence for over 4 s; None if there is no such reason."""
        _await(lambda: self.lost() is not None, _REASON_S)
        overdue = [host for host in self._others if self._silent_for_s(host) > _OVERDUE_S]
        return self.lost() or (self._silence_error(overdue[0]) if overdue else None)

    @contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """If the block fails, publish the failure at once; it is raised in any case."""
        try:
            yield
        except BaseException as error:
            self.report_failure(error)
            raise

    def report_failure(self, error: BaseException) -> None:
        """Publish why this host ends, unless a failure has been published already. An error that
        another host published is forwarded unchanged."""
        if self._own.state is HostState.FAILED:
            return
        lost = self.lost()
        # Another host's sentence is forwarded unchanged.
        is_forwarded = lost is not None and str(lost) == str(error)
        self._set_state(
            HostState.FAILED,
            str(error) if is_forwarded else f"{self._describe()}: {_describe_error(error)}",
            error.culprit if isinstance(error, RunFailedError) else None,
        )

    def await_all_ended(self) -> None:
        """Publish that this host's ranks have ended, wait up to 60 s until those of all hosts have,
        and then publish PARTED. Raise RrfpError naming a host that fails, is silent, or takes
        longer."""
        self._set_state(HostState.ENDED)
        # Host 0 publishes PARTED once all others have ended.
        wanted = HostState.PARTED if self._node_rank > 0 else HostState.ENDED
        _await(lambda: self._all_reached(wanted) or self.lost() is not None, _ALL_ENDED_S)
        if error := self.lost():
            raise error
        if not self._all_reached(wanted):
            late = [host for host in self._others if not self._statuses[host].has_reached(wanted)]
            raise RrfpError(
                f"{self._describe(late[0])} still runs {_ALL_ENDED_S:g} s after this host's ranks "
                "have ended; see what its rrfp train says"
            )
        self._set_state(HostState.PARTED)

    def await_delivery(self) -> None:
        """Wait up to 2 s until host 0 can read how this host has ended. Host 0 waits up to 5 s
        until the others end as well. Does nothing without a running thread."""
        if not self._thread.is_alive():
            return
        if self._node_rank == 0:
            _await(lambda: self._all_reached(HostState.PARTED), _DELIVERY_0_S)
        else:
            _await(lambda: self._published is self._own.state or self.is_silent(0), _DELIVERY_S)

    def _all_reached(self, state: HostState) -> bool:
        """True if all joined hosts, except silent ones, have reached this state."""
        return all(
            status.has_reached(state) or self.is_silent(host)
            for host, status in self._statuses.items()
        )

    def _set_state(
        self, state: HostState, sentence: str = "", culprit: FaultOrigin | None = None
    ) -> None:
        """Set this host's state and failure, which the thread then publishes at once."""
        with self._lock:
            self._own = replace(self._own, state=state, sentence=sentence, culprit=culprit)
        self._changed.set()

    def _silent_for_s(self, host: int) -> float:
        """Return the seconds since the last new status of a joined host that has neither parted nor
        failed, else 0. Before the first status of host 0, its silence counts from `start`. Time in
        which this process itself was stopped does not count."""
        with self._lock:
            now_s = time.monotonic()
            if (paused_s := now_s - self._checked_s) > _PAUSE_S:
                self._received_s = {
                    other: min(at_s + paused_s, now_s) for other, at_s in self._received_s.items()
                }
                # The others count from the last beat that they received.
                if paused_s > self.silence_s - 2 * _BEAT_S:
                    self._stopped_for_s, self._stopped_until_s = paused_s, now_s
            self._checked_s = now_s
            status = self._statuses.get(host)
            has_ended = status is not None and status.has_reached(HostState.PARTED)
            return 0.0 if has_ended else now_s - self._received_s.get(host, now_s)

    def _silence_error(self, host: int) -> RrfpError:
        """Make the error for a silent host; if this process itself was stopped shortly before, the
        error says so instead of blaming that host."""
        silent_s = self._silent_for_s(host)
        # A status that the host published before it gave this one up may arrive only afterwards.
        if self._received_s[host] < self._stopped_until_s + _OVERDUE_S:
            return RrfpError(
                f"{self._describe()} stood still itself for {self._stopped_for_s:.0f} s, and has "
                f"received nothing from {self._describe(host)} since; see who "
                "stopped its rrfp train"
            )
        return RrfpError(
            f"{self._describe(host)} was silent for {silent_s:.0f} s towards "
            f"{self._describe()}; see whether it still runs, and the network between them"
        )

    def _describe(self, host: int | None = None) -> str:
        """Describe a host by number and, if it has joined, name; None is this one."""
        if host is None:
            return f"host {self._node_rank} ({self._own.name})"
        return (
            f"host {host} ({self._statuses[host].name})"
            if self.has_joined(host)
            else f"host {host}"
        )

    def _run(self) -> None:
        """Exchange status until closed, on the thread; after an error, with a new connection. On
        hosts other than 0 it ends once the final status is published."""
        store: StoreClient | None = None
        while not self._is_closed:
            try:
                store = store or self._connect()
                self._exchange(store)
            except (RrfpError, OSError, RuntimeError):
                # Files or threads may have run out for now. A new connection may also work where
                # the old one does not: TCP doubles the time between its retries, so a connection
                # that was cut stays dead for as long again.
                store = None
            if self._node_rank > 0 and self._published in (HostState.PARTED, HostState.FAILED):
                return  # the store of the next run may soon be at the same address
            is_steady = self._own.state is HostState.HERE and len(self._statuses) == len(
                self._others
            )
            self._changed.wait(_BEAT_S if is_steady else _QUICK_BEAT_S)
            self._changed.clear()

    def _exchange(self, store: StoreClient) -> None:
        """Publish this host's status with a new beat number, and read those of the other hosts."""
        with self._lock:
            own = self._own = replace(self._own, beat=self._own.beat + 1)
        store.set(_key(self._node_rank), json.dumps(astuple(own)))
        self._published = own.state
        for host in self._others:
            data = store.find(_key(host))
            if data is not None:
                self._receive(host, data)

    def _receive(self, host: int, data: bytes) -> None:
        """Keep a host's status and the time of its arrival, if its beat number is new. Invalid data
        is kept as an error for `lost`, not raised."""
        try:
            status = HostStatus.decode(data)
        except ValueError as error:
            self._invalid_status = (
                f"the value of '{_key(host)}' in the run's store is not what host {host} says "
                f"({error}); see whether it runs the same rrfp, and who else can reach that store"
            )
            return
        if not self.has_joined(host) or status.beat != self._statuses[host].beat:
            with self._lock:
                self._statuses = {**self._statuses, host: status}
                self._received_s[host] = time.monotonic()


def _await(holds: Callable[[], bool], within_s: float) -> None:
    """Poll a condition until it holds or the time is over, which is no error."""
    deadline_s = time.monotonic() + within_s
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)


def _describe_error(error: BaseException) -> str:
    """Describe an error in one line; anything but an Exception counts as a signal."""
    if isinstance(error, RrfpError):
        return first_line(str(error))
    if isinstance(error, Exception):
        return f"{type(error).__name__}: {first_line(str(error))}"
    return "it was stopped by a signal"


def _decode_fault_origin(value: object) -> FaultOrigin | None:
    """Read the fault origin of a status; None stays None. Raise ValueError for anything else."""
    if value is None:
        return None
    found_by, rank, link = items(value, 3)
    try:
        return FaultOrigin.decode({"found_by": found_by, "rank": rank, "link": link})
    except TypeError as error:
        raise ValueError(str(error)) from None


def printable(sentence: str) -> str:
    """Make a text of another host safe to print: at most 2,000 characters, and control characters
    become `?`."""
    return "".join(char if char.isprintable() else "?" for char in sentence[:_MAX_CHARS])


def _key(host: int) -> str:
    """Return the key of a host's status in the store."""
    return f"rrfp/pulse/{host}"
