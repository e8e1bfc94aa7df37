"""What the ranks of other hosts record, gathered on host 0 where `--out` is not shared.

Each host's launcher follows what its own ranks write, their records and logs, and puts what is new
into the run's store, in pieces. Host 0 takes them out and writes them beside those of its own
ranks. So its trace is whole, or has what came before a host was lost.
"""

import fcntl
import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

from rrfp.errors import RrfpError, UsageError, first_line, numbered
from rrfp.strict_json import items, text
from rrfp.trace.run_dir import RunDir
from rrfp.trace.safe_files import create_new, make_directory, open_own
from rrfp.trace.spill import NUM_SEGMENTS, lock_for_writing, segments_in
from rrfp.train.launch.hosts.host_status import Pulse, printable
from rrfp.train.launch.hosts.joining import Met
from rrfp.train.launch.store import AnsweringStore
from rrfp.train.settings import TrainSettings

_PIECE_BYTES = 2**18
_MOST_UNTAKEN = 16
"""Pieces of one host in the store."""
_LOOK_S = 0.2
_ANSWER_S = 120.0
"""How long a piece may be under way: on a bad wire, longer than a host may be silent."""
_END = b""
_LOG = ".log"
_RING = ".ring"
"""A flight record, which is written over and over until its rank has ended."""
_PREFIX = "rrfp/gathered"
_NAME = re.compile(
    r"(?:records(?:-\d+)?/rank-(\d+)(?:(?:\.\d+)?\.jsonl|\.ring)|logs/rank-(\d+)\.log)"
)
_log = logging.getLogger(__name__)

T = TypeVar("T")


@contextmanager
def gathering(met: Met, settings: TrainSettings, run: RunDir) -> Iterator[None]:
    """While the block runs, and until all is gathered or a host is silent. All hosts call it.

    Raises UsageError if `run` holds another run on a host other than 0, and RrfpError if a host
    is lost.
    """
    node_rank = settings.run.node_rank
    store = met.connect(_ANSWER_S)
    part: _Sender | _Receiver | None = None
    if node_rank == 0:
        if hosts := _hosts_apart(store, run, settings.run.nnodes, met.pulse):
            ranks_of = {host: _ranks_of(settings, host) for host in hosts}
            part = _Receiver(store, run, met.pulse, ranks_of)
    elif not _shares(store, run, node_rank, met.pulse):
        part = _Sender(store, run, met.pulse, node_rank, _ranks_of(settings, node_rank))
    if part is None:
        yield
        return
    part.start()
    try:
        yield
    finally:
        part.finish()


def _ranks_of(settings: TrainSettings, node_rank: int) -> range:
    num_own = settings.layout.world_size // settings.run.nnodes
    return range(node_rank * num_own, (node_rank + 1) * num_own)


# Who shares the directory.


def _hosts_apart(store: AnsweringStore, run: RunDir, num_hosts: int, pulse: Pulse) -> list[int]:
    """Host 0's part: the hosts that do not see its directory."""
    token = secrets.token_hex(8)
    mark = _mark(run, token)
    create_new(mark).close()
    try:
        store.set(f"{_PREFIX}/token", json.dumps(token))
        apart = []
        for host in range(1, num_hosts):
            is_shared, problem = _awaited(
                store, f"{_PREFIX}/answer/{host}", _decode_answer, host, pulse
            )
            if problem:
                raise UsageError(printable(problem))
            if not is_shared:
                apart.append(host)
        return apart
    finally:
        mark.unlink(missing_ok=True)


def _shares(store: AnsweringStore, run: RunDir, node_rank: int, pulse: Pulse) -> bool:
    """The part of another host."""
    token = _awaited(store, f"{_PREFIX}/token", _decode_token, 0, pulse)
    mark = _mark(run, token)
    problem = ""
    is_shared = mark.exists()
    if not is_shared and run.run_json.exists():
        problem = (
            f"{run.path} on host {node_rank} holds another run, and host 0's is not there; give "
            "that host another --out"
        )
    store.set(f"{_PREFIX}/answer/{node_rank}", json.dumps([is_shared, problem]))
    if problem:
        raise UsageError(problem)
    return is_shared


def _mark(run: RunDir, token: str) -> Path:
    return run.path / f".host-0-{token}"


def _awaited(
    store: AnsweringStore, key: str, decode: Callable[[object], T], host: int, pulse: Pulse
) -> T:
    while (told := store.read(key, decode, f"host {host}")) is None:
        if error := pulse.lost():
            raise error
        time.sleep(_LOOK_S / 10)
    return told


def _decode_token(value: object) -> str:
    token = text(value)
    bytes.fromhex(token)  # it becomes a part of a path
    return token


def _decode_answer(value: object) -> tuple[bool, str]:
    is_shared, problem = items(value, 2)
    if not isinstance(is_shared, bool):
        raise ValueError(f"{is_shared!r} is neither true nor false")
    return is_shared, text(problem)


class _Part:
    """What one host does, on a thread of its own."""

    def __init__(
        self, store: AnsweringStore, run: RunDir, pulse: Pulse, work: Callable[[], None]
    ) -> None:
        self._store = store
        self._run = run
        self._pulse = pulse
        self._work = work
        self._is_ending = threading.Event()
        self._is_given_up = False
        self._moved_s = 0.0
        """When something moved last."""
        # A daemon: a store at the other end of a dead link answers after minutes, or never.
        self._thread = threading.Thread(target=self._try, name="rrfp-gather", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """This host's ranks have ended: move what is left, as long as the other side moves it."""
        self._moved_s = time.monotonic()
        self._is_ending.set()
        while self._thread.is_alive():
            if problem := self._problem():
                self._warn(problem)
                self._is_given_up = True
                break
            self._thread.join(_LOOK_S)
        self._close()

    def _try(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._warn(first_line(str(error)))

    def _warn(self, problem: str) -> None:
        if not self._is_given_up:
            _log.warning("%s; %s", problem, self._without())

    def _problem(self) -> str:
        """Why there is no use in waiting for the thread any more; empty if there is."""
        raise NotImplementedError

    def _without(self) -> str:
        """What comes of it if the thread does not get to its end."""
        raise NotImplementedError

    def _close(self) -> None:
        """Let go of what the thread has opened; it opens nothing any more."""


# Another host.


class _Sender(_Part):
    """Follows the files of a host's own ranks."""

    def __init__(
        self,
        store: AnsweringStore,
        run: RunDir,
        pulse: Pulse,
        node_rank: int,
        ranks: Sequence[int],
    ) -> None:
        super().__init__(store, run, pulse, self._send)
        self._key = f"{_PREFIX}/{node_rank}"
        self._ranks = ranks
        # What lies there is of earlier sessions: records were left by a host that could not send
        # them, and logs go on.
        self._old = {path for path in self._files() if path.suffix != _LOG}
        self._offsets = {path: path.stat().st_size for path in self._files()}
        self._num_sent = 0
        self._num_taken = 0

    def _files(self) -> Iterator[Path]:
        for rank in self._ranks:
            yield from self._run.path.glob(f"records*/rank-{rank}.jsonl")
            yield from self._run.path.glob(f"records*/rank-{rank}.*.jsonl")
            yield from self._run.path.glob(f"records*/rank-{rank}{_RING}")
            yield from self._run.path.glob(f"logs/rank-{rank}{_LOG}")

    def _new(self) -> set[Path]:
        return {*self._files()} - self._old

    def _problem(self) -> str:
        if self._pulse.is_silent(0):
            return "host 0 is not heard any more"
        if time.monotonic() > self._moved_s + self._pulse.silence_s:
            return f"host 0 took no records for {self._pulse.silence_s:g} s"
        return ""

    def _without(self) -> str:
        return f"what {numbered('rank', self._ranks)} recorded stays in {self._run.path}"

    def _send(self) -> None:
        while True:
            # Asked before a last look: what was written by then is sent.
            is_ending = self._is_ending.is_set()
            due = [path for path in self._new() if is_ending or path.suffix != _RING]
            due.sort(key=lambda path: path.suffix == _RING)
            has_sent = [self._send_next(path) for path in due]
            if not any(has_sent):
                if is_ending:
                    break
                self._is_ending.wait(_LOOK_S)
        self._put(_END)
        self._await_taken(self._num_sent)
        for path in self._new():
            if path.suffix != _LOG:
                path.unlink(missing_ok=True)
                with suppress(OSError):
                    path.parent.rmdir()

    def _send_next(self, path: Path) -> bool:
        """Send the next piece of a file; tells whether there was one."""
        try:
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                piece = file.read(_PIECE_BYTES)
        except FileNotFoundError:
            # A segment that went for room.
            return False
        if not piece and path in self._offsets:
            return False
        self._put(str(path.relative_to(self._run.path)).encode() + b"\n" + piece)
        self._offsets[path] = self._offsets.get(path, 0) + len(piece)
        return True

    def _put(self, piece: bytes) -> None:
        self._await_taken(self._num_sent - _MOST_UNTAKEN)
        self._store.set(f"{self._key}/{self._num_sent}", piece)
        self._num_sent += 1

    def _await_taken(self, num: int) -> None:
        """Wait until host 0 has taken so many pieces."""
        while (num_taken := self._store.count(f"{self._key}/taken", 0)) < num:
            if self._is_given_up:
                raise RrfpError("it is too late")
            if num_taken > self._num_taken:
                self._num_taken, self._moved_s = num_taken, time.monotonic()
            time.sleep(_LOOK_S / 10)


# Host 0.


class _Receiver(_Part):
    """Writes what other hosts send."""

    def __init__(
        self, store: AnsweringStore, run: RunDir, pulse: Pulse, ranks_of: dict[int, range]
    ) -> None:
        super().__init__(store, run, pulse, self._receive)
        self._ranks_of = ranks_of
        self._waiting = sorted(ranks_of)
        self._num_taken = dict.fromkeys(ranks_of, 0)
        self._lock = threading.Lock()
        """Held while files are opened, written or closed."""
        self._is_closed = False
        self._files: dict[str, IO[bytes]] = {}

    def _problem(self) -> str:
        waiting = [*self._waiting]
        hosts = ", ".join(map(str, waiting))
        if waiting and all(map(self._pulse.is_silent, waiting)):
            return f"host {hosts} is not heard any more"
        if time.monotonic() > self._moved_s + self._pulse.silence_s:
            return f"host {hosts} sent no records for {self._pulse.silence_s:g} s"
        return ""

    def _without(self) -> str:
        ranks = [rank for host in self._waiting for rank in self._ranks_of[host]]
        return f"the trace lacks the rest of {numbered('rank', ranks)}"

    def _receive(self) -> None:
        while self._waiting and not self._is_given_up:
            was_ending = self._is_ending.is_set()
            for host in [*self._waiting]:
                while (piece := self._next_of(host)) is not None:
                    self._moved_s = time.monotonic()
                    if piece == _END:
                        self._waiting.remove(host)
                        break
                    self._write(host, piece)
            if not was_ending:
                self._is_ending.wait(_LOOK_S)
            else:
                time.sleep(_LOOK_S / 10)

    def _next_of(self, host: int) -> bytes | None:
        piece = self._store.take(f"{_PREFIX}/{host}/{self._num_taken[host]}")
        if piece is not None:
            self._num_taken[host] += 1
            self._store.count(f"{_PREFIX}/{host}/taken", 1)
        return piece

    def _write(self, host: int, piece: bytes) -> None:
        name_bytes, _, data = piece.partition(b"\n")
        name = name_bytes.decode("ascii", "replace")
        match = _NAME.fullmatch(name)
        if match is None or int(match[1] or match[2]) not in self._ranks_of[host]:
            raise RrfpError(f"host {host} sent a file '{name[:60]}', which is none of its ranks'")
        with self._lock:
            if self._is_closed:
                return
            if name not in self._files:
                path = self._run.path / name
                make_directory(path.parent)
                self._files[name] = open_own(path, truncate=not match[2])
                if match[1]:
                    # Whoever reads the run sees that more is to come.
                    lock_for_writing(self._files[name])
                if match[1] and path.suffix != _RING:
                    self._remove_older(path, int(match[1]))
            self._files[name].write(data)
            self._files[name].flush()

    def _remove_older(self, path: Path, rank: int) -> None:
        """Remove the segments of a rank before this one that it has removed itself by now."""
        older = [each for each in segments_in(path.parent)[rank] if each != path]
        for each in older[:-NUM_SEGMENTS]:
            file = self._files.pop(str(each.relative_to(self._run.path)), None)
            if file is not None:
                file.close()
            each.unlink(missing_ok=True)

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True
            for file in self._files.values():
                fcntl.flock(file, fcntl.LOCK_UN)
                file.close()
