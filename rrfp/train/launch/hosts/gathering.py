"""Sends the records and logs of other hosts' ranks to host 0 where `--out` is not shared.

Each host's launcher follows the files that its own ranks write, and puts new bytes into the run's
store, in pieces. Host 0 takes the pieces out and writes them beside the files of its own ranks. So
its trace is complete, or has everything that arrived before a host was lost.
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
from rrfp.train.launch.hosts.endpoint import host_ranks
from rrfp.train.launch.hosts.host_status import HostHeartbeat, printable
from rrfp.train.launch.hosts.joining import JoinedHosts
from rrfp.train.launch.store import StoreClient
from rrfp.train.settings import TrainSettings

_PIECE_BYTES = 2**18
_MAX_IN_FLIGHT = 16
"""Most pieces of one host in the store that host 0 has not taken out yet."""
_POLL_S = 0.2
_ANSWER_S = 120.0
"""How long a piece may be in flight. On a bad network this is longer than a host may be silent."""
_END = b""
_LOG = ".log"
_RING = ".ring"
"""A flight record, which its rank overwrites in place until it ends."""
_PREFIX = "rrfp/gathered"
_NAME = re.compile(
    r"(?:records(?:-\d+)?/rank-(\d+)(?:(?:\.\d+)?\.jsonl|\.ring)|logs/rank-(\d+)\.log)"
)
_log = logging.getLogger(__name__)

T = TypeVar("T")


@contextmanager
def gathering_records(hosts: JoinedHosts, settings: TrainSettings, run: RunDir) -> Iterator[None]:
    """Transfer record and log files to host 0 from hosts that do not share its directory, while the
    block runs, and afterwards until all have arrived or the other side makes no more progress. All
    hosts call this.

    Raise UsageError, on that host and on host 0, if a host's own `run` directory holds another run,
    and RrfpError if a host is lost before the block. A failed transfer is only warned of.
    """
    node_rank, heartbeat = settings.run.node_rank, hosts.heartbeat
    store = hosts.connect(_ANSWER_S)
    transfer: _Sender | _Receiver | None = None
    if node_rank == 0:
        if senders := _hosts_with_own_directory(store, run, settings.run.nnodes, heartbeat):
            ranks_of = {host: host_ranks(settings, host) for host in senders}
            transfer = _Receiver(store, run, heartbeat, ranks_of)
    elif not _shares_directory(store, run, node_rank, heartbeat):
        transfer = _Sender(store, run, heartbeat, node_rank, host_ranks(settings, node_rank))
    if transfer is None:
        yield
        return
    transfer.start()
    try:
        yield
    finally:
        transfer.finish()


# Host 0 creates a marker file in its directory; each other host answers if it sees that file.


def _hosts_with_own_directory(
    store: StoreClient, run: RunDir, num_hosts: int, heartbeat: HostHeartbeat
) -> list[int]:
    """On host 0: list the hosts that do not see its directory, by a marker file that exists
    meanwhile. Raise UsageError with the problem of a host whose own directory holds another run."""
    token = secrets.token_hex(8)
    marker = _marker(run, token)
    create_new(marker).close()
    try:
        store.set(f"{_PREFIX}/token", json.dumps(token))
        separate = []
        for host in range(1, num_hosts):
            is_shared, problem = _await_value(
                store, f"{_PREFIX}/answer/{host}", _decode_answer, host, heartbeat
            )
            if problem:
                raise UsageError(printable(problem))
            if not is_shared:
                separate.append(host)
        return separate
    finally:
        marker.unlink(missing_ok=True)


def _shares_directory(
    store: StoreClient, run: RunDir, node_rank: int, heartbeat: HostHeartbeat
) -> bool:
    """On another host: return True if `run` is host 0's directory, and publish the answer for host
    0. Raise UsageError if it is not and holds another run."""
    token = _await_value(store, f"{_PREFIX}/token", _decode_token, 0, heartbeat)
    problem = ""
    is_shared = _marker(run, token).exists()
    if not is_shared and run.run_json.exists():
        problem = (
            f"{run.path} on host {node_rank} holds another run, and host 0's is not there; give "
            "that host another --out"
        )
    store.set(f"{_PREFIX}/answer/{node_rank}", json.dumps([is_shared, problem]))
    if problem:
        raise UsageError(problem)
    return is_shared


def _marker(run: RunDir, token: str) -> Path:
    """Return the path of the file by which other hosts recognize host 0's directory."""
    return run.path / f".host-0-{token}"


def _await_value(
    store: StoreClient,
    key: str,
    decode: Callable[[object], T],
    host: int,
    heartbeat: HostHeartbeat,
) -> T:
    """Wait until a host has published a value, and return it decoded. Raise RrfpError if a host is
    lost."""
    while (value := store.read(key, decode, f"host {host}")) is None:
        if error := heartbeat.lost():
            raise error
        time.sleep(_POLL_S / 10)
    return value


def _decode_token(value: object) -> str:
    """Read a token of hexadecimal digits, which becomes a part of a path. Raise ValueError for
    anything else."""
    token = text(value)
    bytes.fromhex(token)
    return token


def _decode_answer(value: object) -> tuple[bool, str]:
    """Read a host's answer: does it share the directory, and its problem, empty if none. Raise
    ValueError for anything else."""
    is_shared, problem = items(value, 2)
    if not isinstance(is_shared, bool):
        raise ValueError(f"{is_shared!r} is neither true nor false")
    return is_shared, text(problem)


class _Transfer:
    """One host's side of the transfer, on its own thread."""

    def __init__(self, store: StoreClient, run: RunDir, heartbeat: HostHeartbeat) -> None:
        self._store = store
        self._run = run
        self._heartbeat = heartbeat
        self._is_ending = threading.Event()
        self._is_given_up = False
        self._progress_s = 0.0
        """Time of the last progress."""
        # A daemon: a store at the other end of a dead link answers after minutes, or never.
        self._thread = threading.Thread(target=self._run_work, name="rrfp-gather", daemon=True)

    def start(self) -> None:
        """Start the thread that transfers."""
        self._thread.start()

    def finish(self) -> None:
        """Wait while the thread transfers what is left, for as long as the other side makes
        progress; else warn and give up. Called when this host's ranks have ended."""
        self._progress_s = time.monotonic()
        self._is_ending.set()
        while self._thread.is_alive():
            if problem := self._stall_reason():
                self._warn(problem)
                self._is_given_up = True
                break
            self._thread.join(_POLL_S)
        self._close()

    def _run_work(self) -> None:
        """Transfer until done, on the thread; any exception becomes a warning."""
        try:
            self._transfer()
        except Exception as error:
            self._warn(first_line(str(error)))

    def _warn(self, problem: str) -> None:
        """Log a problem and the records that are lost by it, unless the transfer was given up
        before."""
        if not self._is_given_up:
            _log.warning("%s; %s", problem, self._describe_loss())

    def _transfer(self) -> None:
        """Transfer pieces until all are transferred; subclasses define how."""
        raise NotImplementedError

    def _stall_reason(self) -> str:
        """Return the reason to stop waiting for the thread, or an empty text while it makes
        progress; subclasses define it."""
        raise NotImplementedError

    def _describe_loss(self) -> str:
        """Describe the records that are missing if the transfer stops now; subclasses define it."""
        raise NotImplementedError

    def _close(self) -> None:
        """Release what the thread has opened, and let it open nothing more; here there is nothing
        to release."""


class _Sender(_Transfer):
    """Follows the files of a host's own ranks and sends them to host 0."""

    def __init__(
        self,
        store: StoreClient,
        run: RunDir,
        heartbeat: HostHeartbeat,
        node_rank: int,
        ranks: Sequence[int],
    ) -> None:
        super().__init__(store, run, heartbeat)
        self._key = f"{_PREFIX}/{node_rank}"
        self._ranks = ranks
        # Files of earlier sessions: records that could not be sent, which stay, and logs, to which
        # this session appends.
        self._old = {path for path in self._files() if path.suffix != _LOG}
        self._offsets = {path: path.stat().st_size for path in self._files()}
        self._num_sent = 0
        self._num_received = 0

    def _files(self) -> Iterator[Path]:
        """Yield the record and log files of this host's ranks, of all sessions."""
        for rank in self._ranks:
            yield from self._run.path.glob(f"records*/rank-{rank}.jsonl")
            yield from self._run.path.glob(f"records*/rank-{rank}.*.jsonl")
            yield from self._run.path.glob(f"records*/rank-{rank}{_RING}")
            yield from self._run.path.glob(f"logs/rank-{rank}{_LOG}")

    def _new_files(self) -> set[Path]:
        """Return the files to send: logs, and records that this session has created."""
        return {*self._files()} - self._old

    def _stall_reason(self) -> str:
        """Return the reason to stop waiting: host 0 is silent, or has taken no pieces for
        `silence_s` seconds; else an empty text."""
        if self._heartbeat.is_silent(0):
            return "host 0 is silent"
        if time.monotonic() > self._progress_s + self._heartbeat.silence_s:
            return f"host 0 took no records for {self._heartbeat.silence_s:g} s"
        return ""

    def _describe_loss(self) -> str:
        """Say that the records of this host's ranks stay in its own directory."""
        return f"what {numbered('rank', self._ranks)} recorded stays in {self._run.path}"

    def _transfer(self) -> None:
        """Send new bytes until the ranks have ended, then the rest and the flight records; once
        host 0 has all of them, remove this session's record files here, but not the logs."""
        while True:
            # Read before the last pass over the files: everything written by then is sent.
            is_ending = self._is_ending.is_set()
            due = [path for path in self._new_files() if is_ending or path.suffix != _RING]
            due.sort(key=lambda path: path.suffix == _RING)
            has_sent = [self._send_next_piece(path) for path in due]
            if not any(has_sent):
                if is_ending:
                    break
                self._is_ending.wait(_POLL_S)
        self._put(_END)
        self._await_received(self._num_sent)
        for path in self._new_files():
            if path.suffix != _LOG:
                path.unlink(missing_ok=True)
                with suppress(OSError):
                    path.parent.rmdir()

    def _send_next_piece(self, path: Path) -> bool:
        """Send the next piece of a file, or an empty piece for a new empty file; return False if
        the file has no more bytes or is gone."""
        try:
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                piece = file.read(_PIECE_BYTES)
        except FileNotFoundError:
            # The rank removed this segment to free disk space.
            return False
        if not piece and path in self._offsets:
            return False
        self._put(str(path.relative_to(self._run.path)).encode() + b"\n" + piece)
        self._offsets[path] = self._offsets.get(path, 0) + len(piece)
        return True

    def _put(self, piece: bytes) -> None:
        """Put a piece into the store; first wait while 16 pieces are in flight."""
        self._await_received(self._num_sent + 1 - _MAX_IN_FLIGHT)
        self._store.set(f"{self._key}/{self._num_sent}", piece)
        self._num_sent += 1

    def _await_received(self, num_pieces: int) -> None:
        """Wait until host 0 has received this number of pieces. Raise RrfpError once the transfer
        is given up."""
        while (num_received := self._store.count(f"{self._key}/taken", 0)) < num_pieces:
            if self._is_given_up:
                raise RrfpError("it is too late")
            if num_received > self._num_received:
                self._num_received, self._progress_s = num_received, time.monotonic()
            time.sleep(_POLL_S / 10)


class _Receiver(_Transfer):
    """Writes the pieces of other hosts to files, on host 0."""

    def __init__(
        self,
        store: StoreClient,
        run: RunDir,
        heartbeat: HostHeartbeat,
        ranks_of: dict[int, range],
    ) -> None:
        super().__init__(store, run, heartbeat)
        self._ranks_of = ranks_of
        self._unfinished = sorted(ranks_of)
        self._num_received = dict.fromkeys(ranks_of, 0)
        self._lock = threading.Lock()
        """Held while files are opened, written or closed."""
        self._is_closed = False
        self._files: dict[str, IO[bytes]] = {}

    def _stall_reason(self) -> str:
        """Return the reason to stop waiting: all unfinished hosts are silent, or no piece has
        arrived for `silence_s` seconds; else an empty text."""
        unfinished = [*self._unfinished]
        hosts = ", ".join(map(str, unfinished))
        if unfinished and all(map(self._heartbeat.is_silent, unfinished)):
            return f"host {hosts} is silent"
        if time.monotonic() > self._progress_s + self._heartbeat.silence_s:
            return f"host {hosts} sent no records for {self._heartbeat.silence_s:g} s"
        return ""

    def _describe_loss(self) -> str:
        """Say that the trace lacks the rest of the ranks of unfinished hosts."""
        ranks = [rank for host in self._unfinished for rank in self._ranks_of[host]]
        return f"the trace lacks the rest of {numbered('rank', ranks)}"

    def _transfer(self) -> None:
        """Write the pieces of other hosts to files until all have sent their last one or the
        transfer is given up."""
        while self._unfinished and not self._is_given_up:
            was_ending = self._is_ending.is_set()
            for host in [*self._unfinished]:
                while (piece := self._next_piece(host)) is not None:
                    self._progress_s = time.monotonic()
                    if piece == _END:
                        self._unfinished.remove(host)
                        break
                    self._write(host, piece)
            if not was_ending:
                self._is_ending.wait(_POLL_S)
            else:
                time.sleep(_POLL_S / 10)

    def _next_piece(self, host: int) -> bytes | None:
        """Remove the next piece of a host from the store, count it as received there, and return
        it; None if it has not arrived."""
        piece = self._store.take(f"{_PREFIX}/{host}/{self._num_received[host]}")
        if piece is not None:
            self._num_received[host] += 1
            self._store.count(f"{_PREFIX}/{host}/taken", 1)
        return piece

    def _write(self, host: int, piece: bytes) -> None:
        """Append a piece to its file, which the first piece creates, locks for records, and empties
        unless it is a log; a new segment of records removes the rank's oldest ones. Do nothing once
        closed. Raise RrfpError for a file that belongs to none of the host's ranks."""
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
                    # The lock shows readers of the run that more records will come.
                    lock_for_writing(self._files[name])
                if match[1] and path.suffix != _RING:
                    self._remove_older(path, int(match[1]))
            self._files[name].write(data)
            self._files[name].flush()

    def _remove_older(self, path: Path, rank: int) -> None:
        """Close and remove a rank's segments of records except `path` and the 8 newest others; the
        rank itself has removed them by now."""
        older = [each for each in segments_in(path.parent)[rank] if each != path]
        for each in older[:-NUM_SEGMENTS]:
            file = self._files.pop(str(each.relative_to(self._run.path)), None)
            if file is not None:
                file.close()
            each.unlink(missing_ok=True)

    def _close(self) -> None:
        """Unlock and close all files; pieces that arrive later are dropped."""
        with self._lock:
            self._is_closed = True
            for file in self._files.values():
                fcntl.flock(file, fcntl.LOCK_UN)
                file.close()
