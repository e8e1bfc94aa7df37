"""Real ranks in a test: one process each, a common store, a time-out, and no orphan."""

import faulthandler
import multiprocessing
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from torch.distributed import TCPStore

T = TypeVar("T")

HOST = "127.0.0.1"


class RankFailedError(AssertionError):
    """A rank raised, died, or did not end in time; the message says which, and where it was."""


@dataclass(frozen=True, slots=True)
class _Raised:
    report: str


@dataclass(frozen=True, slots=True)
class _Rank:
    index: int
    process: SpawnProcess
    results: Connection


def run_ranks(
    num_ranks: int, target: Callable[..., T], *args: object, timeout_s: float = 60.0
) -> list[T]:
    """Run `target(*args)` in `num_ranks` spawned processes and give what they return, by rank.

    `target` is a function of a module. Each process has the environment that torchrun gives a
    worker (RANK, WORLD_SIZE, MASTER_ADDR and so on), so that both
    `init_process_group("gloo")` and `torch.distributed.TCPStore` find the store, which lives here.
    The first rank that fails, or the time-out, ends them all and raises RankFailedError.
    """
    store = loopback_store()
    ranks: list[_Rank] = []
    try:
        ranks.extend(
            _start(index, num_ranks, store.port, target, args, timeout_s)
            for index in range(num_ranks)
        )
        return _collect(ranks, time.monotonic() + timeout_s)
    finally:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join()
            rank.process.close()
            rank.results.close()


def loopback_store() -> TCPStore:
    """A store that this process serves. By itself torch's listens at every address of the host."""
    listening = socket.create_server((HOST, 0))
    port = listening.getsockname()[1]
    return TCPStore(
        HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def _start(
    index: int,
    num_ranks: int,
    port: int,
    target: Callable[..., object],
    args: tuple[object, ...],
    timeout_s: float,
) -> _Rank:
    environment = {
        "RANK": index,
        "LOCAL_RANK": index,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": HOST,
        "MASTER_PORT": port,
        # The store is served by the parent, as torchrun's agent does it: no port is chosen first
        # and bound later, by when another process may have taken it.
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "OMP_NUM_THREADS": 1,
        # gloo by itself listens at the address of the host's name.
        "GLOO_SOCKET_IFNAME": "lo",
    }
    here, there = multiprocessing.Pipe(duplex=False)
    variables = {name: str(value) for name, value in environment.items()}
    process = multiprocessing.get_context("spawn").Process(
        target=_run_rank, args=(variables, there, target, args, timeout_s)
    )
    process.start()
    there.close()
    return _Rank(index, process, here)


def _collect(ranks: list[_Rank], deadline_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        unfinished = [rank for rank in ranks if rank.index not in results]
        ready = wait([rank.results for rank in unfinished], max(0.0, deadline_s - time.monotonic()))
        if not ready:
            late = ", ".join(str(rank.index) for rank in unfinished)
            raise RankFailedError(f"rank {late} did not end in time; stderr says where it was")
        for rank in unfinished:
            if rank.results in ready:
                results[rank.index] = _result(rank)
    return [results[rank.index] for rank in ranks]


def _result(rank: _Rank) -> object:
    try:
        result = rank.results.recv()
    except EOFError:
        rank.process.join()
        raise RankFailedError(
            f"rank {rank.index} died with exit code {rank.process.exitcode}"
        ) from None
    if isinstance(result, _Raised):
        raise RankFailedError(f"rank {rank.index} raised\n{result.report}")
    return result


def _run_rank(
    environment: dict[str, str],
    results: Connection,
    target: Callable[..., object],
    args: tuple[object, ...],
    timeout_s: float,
) -> None:
    os.environ.update(environment)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    faulthandler.dump_traceback_later(0.9 * timeout_s)
    try:
        results.send(target(*args))
    except BaseException:
        results.send(_Raised(traceback.format_exc()))
    finally:
        faulthandler.cancel_dump_traceback_later()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
