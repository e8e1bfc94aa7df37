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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, cast

from torch.distributed import Store

from rrfp.errors import RrfpError, UsageError, first_line
from rrfp.runtime.decoding import parsed
from rrfp.trace.rundir import RunDir
from rrfp.trace.segments import segments_in
from rrfp.trace.spill import NUM_SEGMENTS, hold
from rrfp.train.settings import TrainSettings

_PIECE_BYTES = 2**18
_MOST_UNTAKEN = 16
"""Pieces of one host in the store."""
_LOOK_S = 0.2
_ANSWER_S = 30.0
"""How long hosts that have just met wait for each other."""
_SILENCE_S = 15.0
"""How long either side waits for the other, once this host's ranks have ended."""
_STUCK_S = 2.0
_END = b""
_PREFIX = "rrfp/gathered"
_NAME = re.compile(r"(?:records(?:-\d+)?/rank-(\d+)(?:\.\d+)?\.jsonl|logs/rank-(\d+)\.log)")
_log = logging.getLogger(__name__)


@contextmanager
def gathering(store: Store, settings: TrainSettings, run: RunDir) -> Iterator[None]:
    """While the block runs, and until all is gathered or a host is silent. All hosts call it.

    Raises UsageError if `run` holds another run on a host other than 0, and RrfpError if a host
    does not answer.
    """
    node_rank = settings.run.node_rank
    part: _Sender | _Receiver | None = None
    if node_rank == 0:
        if hosts := _hosts_apart(store, run, settings.run.nnodes):
            part = _Receiver(store, run, {host: _ranks_of(settings, host) for host in hosts})
    elif not _shares(store, run, node_rank):
        part = _Sender(store, run, node_rank, _ranks_of(settings, node_rank))
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


def _hosts_apart(store: Store, run: RunDir, num_hosts: int) -> list[int]:
    """Host 0's part: the hosts that do not see its directory."""
    token = secrets.token_hex(8)
    mark = _mark(run, token)
    mark.touch()
    try:
        store.set(f"{_PREFIX}/token", token)
        apart = []
        for host in range(1, num_hosts):
            answer = parsed(_awaited(store, f"{_PREFIX}/answer/{host}", host))
            if isinstance(answer, str):
                raise UsageError(answer)
            if answer is False:
                apart.append(host)
        return apart
    finally:
        mark.unlink(missing_ok=True)


def _shares(store: Store, run: RunDir, node_rank: int) -> bool:
    """The part of another host."""
    token = _awaited(store, f"{_PREFIX}/token", 0).decode()
    mark = _mark(run, token)
    problem = None
    is_shared = mark.exists()
    if not is_shared and run.run_json.exists():
        problem = (
            f"{run.path} on host {node_rank} holds another run, and host 0's is not there; give "
            "that host another --out"
        )
    store.set(f"{_PREFIX}/answer/{node_rank}", json.dumps(problem or is_shared))
    if problem is not None:
        raise UsageError(problem)
    return is_shared


def _mark(run: RunDir, token: str) -> Path:
    return run.path / f".host-0-{token}"


def _awaited(store: Store, key: str, host: int) -> bytes:
    deadline_s = time.monotonic() + _ANSWER_S
    while not store.check([key]):
        if time.monotonic() > deadline_s:
            raise RrfpError(
                f"host {host} came and then did not say for {_ANSWER_S:g} s whether it has the "
                "same --out; see what it says"
            )
        time.sleep(_LOOK_S / 10)
    return bytes(store.get(key))


class _Part:
    """What one host does, on a thread of its own."""

    def __init__(self, store: Store, run: RunDir, work: Callable[[], None], without: str) -> None:
        """`without` says what comes of it if the store does not answer."""
        self._store = store
        self._run = run
        self._without = without
        self._is_ending = threading.Event()
        self._moved_s = 0.0
        """When something moved last."""
        # A daemon: a store at the other end of a dead link answers after minutes, or never.
        self._thread = threading.Thread(target=work, name="rrfp-gather", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """This host's ranks have ended: move what is left, and wait for it."""
        self._moved_s = time.monotonic()
        self._is_ending.set()
        while self._thread.is_alive():
            # The thread itself waits for the other side, but not where a call does not return.
            if time.monotonic() > self._moved_s + _SILENCE_S + _STUCK_S:
                _log.warning(
                    "the run's store has not answered for %g s; %s",
                    _SILENCE_S + _STUCK_S,
                    self._without,
                )
                return
            self._thread.join(_LOOK_S)


# Another host.


class _Sender(_Part):
    """Follows the files of a host's own ranks."""

    def __init__(self, store: Store, run: RunDir, node_rank: int, ranks: Sequence[int]) -> None:
        stays = f"what ranks {', '.join(map(str, ranks))} recorded stays in {run.path}"
        super().__init__(store, run, self._send, stays)
        self._key = f"{_PREFIX}/{node_rank}"
        self._ranks = ranks
        # What lies there is of earlier sessions: records were left by a host that could not send
        # them, and logs go on.
        self._old = {path for path in self._files() if path.suffix == ".jsonl"}
        self._offsets = {path: path.stat().st_size for path in self._files()}
        self._num_sent = 0

    def _files(self) -> Iterator[Path]:
        for rank in self._ranks:
            yield from self._run.path.glob(f"records*/rank-{rank}.jsonl")
            yield from self._run.path.glob(f"records*/rank-{rank}.*.jsonl")
            yield from self._run.path.glob(f"logs/rank-{rank}.log")

    def _send(self) -> None:
        try:
            while True:
                # Asked before a last look: what was written by then is sent.
                is_ending = self._is_ending.is_set()
                has_sent = [self._send_next(path) for path in {*self._files()} - self._old]
                if not any(has_sent):
                    if is_ending:
                        break
                    self._is_ending.wait(_LOOK_S)
            self._put(_END)
            self._await_taken(self._num_sent)
        except (RrfpError, RuntimeError, OSError) as error:
            _log.warning(
                "host 0 takes no more records (%s); %s", first_line(str(error)), self._without
            )
            return
        for path in {*self._files()} - self._old:
            if path.suffix == ".jsonl":
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
        # torch's store takes bytes, which its annotations do not say.
        self._await_taken(self._num_sent - _MOST_UNTAKEN)
        self._store.set(f"{self._key}/{self._num_sent}", cast(str, piece))
        self._num_sent += 1

    def _await_taken(self, num: int) -> None:
        """Wait until host 0 has taken so many pieces. Raises RrfpError if it takes none."""
        num_taken = 0
        self._moved_s = time.monotonic()
        while (now_taken := self._store.add(f"{self._key}/taken", 0)) < num:
            if now_taken > num_taken:
                num_taken, self._moved_s = now_taken, time.monotonic()
            if time.monotonic() > self._moved_s + _SILENCE_S:
                raise RrfpError(f"it took nothing for {_SILENCE_S:g} s")
            time.sleep(_LOOK_S / 10)


# Host 0.


class _Receiver(_Part):
    """Writes what other hosts send."""

    def __init__(self, store: Store, run: RunDir, ranks_of: dict[int, range]) -> None:
        super().__init__(store, run, self._receive, "the trace lacks the rest")
        self._ranks_of = ranks_of
        self._num_taken = dict.fromkeys(ranks_of, 0)
        self._files: dict[str, IO[bytes]] = {}

    def _receive(self) -> None:
        with ExitStack() as stack:
            stack.callback(self._close)
            try:
                self._take_all()
            except (RrfpError, RuntimeError, OSError, ValueError) as error:
                _log.warning(
                    "other hosts' records are gathered no more (%s); %s",
                    first_line(str(error)),
                    self._without,
                )

    def _take_all(self) -> None:
        waiting = {*self._ranks_of}
        while waiting:
            was_ending = self._is_ending.is_set()
            for host in sorted(waiting):
                while (piece := self._next_of(host)) is not None:
                    self._moved_s = time.monotonic()
                    if piece == _END:
                        waiting.discard(host)
                        break
                    self._write(host, piece)
            if not was_ending:
                self._is_ending.wait(_LOOK_S)
            elif time.monotonic() > self._moved_s + _SILENCE_S:
                raise RrfpError(
                    f"host {', '.join(map(str, sorted(waiting)))} sent nothing for {_SILENCE_S:g} s"
                )
            else:
                time.sleep(_LOOK_S / 10)

    def _next_of(self, host: int) -> bytes | None:
        key = f"{_PREFIX}/{host}/{self._num_taken[host]}"
        if not self._store.check([key]):
            return None
        piece = bytes(self._store.get(key))
        self._store.delete_key(key)
        self._num_taken[host] += 1
        self._store.add(f"{_PREFIX}/{host}/taken", 1)
        return piece

    def _write(self, host: int, piece: bytes) -> None:
        name_bytes, _, data = piece.partition(b"\n")
        name = name_bytes.decode("ascii", "replace")
        match = _NAME.fullmatch(name)
        if match is None or int(match[1] or match[2]) not in self._ranks_of[host]:
            raise RrfpError(f"host {host} sent a file '{name[:60]}', which is none of its ranks'")
        file = self._files.get(name)
        if file is None:
            path = self._run.path / name
            path.parent.mkdir(exist_ok=True)
            file = path.open("ab" if match[2] else "wb+")
            self._files[name] = file
            if match[1]:
                # Whoever reads the run sees that more is to come.
                hold(file)
                self._remove_older(path, int(match[1]))
        file.write(data)
        file.flush()

    def _remove_older(self, path: Path, rank: int) -> None:
        """Remove the segments of a rank before this one that it has removed itself by now."""
        older = [each for each in segments_in(path.parent)[rank] if each != path]
        for each in older[:-NUM_SEGMENTS]:
            file = self._files.pop(str(each.relative_to(self._run.path)), None)
            if file is not None:
                file.close()
            each.unlink(missing_ok=True)

    def _close(self) -> None:
        for file in self._files.values():
            fcntl.flock(file, fcntl.LOCK_UN)
            file.close()
