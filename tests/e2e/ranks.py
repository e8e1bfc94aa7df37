"""Real ranks in a test: one process each, a common store, a time-out, and no orphan.

Importing torch and Megatron takes a process seconds, which most tests would spend on nothing else.
So ranks are forked from a server that lives as long as the session and has imported them once:
every rank is a process of its own all the same, and what it does to itself (process groups, random
states, patches, its environment) ends with it.
"""

import faulthandler
import multiprocessing
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver, reduction
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from torch.distributed import TCPStore

from rrfp.runtime.device.interface import HELPER

T = TypeVar("T")

HOST = "127.0.0.1"

AT_END = "rrfp-at-end"
"""The thread of `rrfp.runtime.exit_hooks`, which outlives all others."""

LASTING = (AT_END, HELPER, "tqdm_monitor", "ThreadPoolExecutor-")
"""Prefixes of the names of threads that may outlive a rank's work. The last two belong to torch's
compiler, which has a thread pool and a tqdm progress bar; no thread of rrfp has such names."""

DEATH_AFTER_RAISE_S = 5.0
"""How long after a rank has raised the death of another is waited for. A rank that dies closes its
connections before its process has ended, so its peers may raise before its death is seen."""

AT_END_S = 10.0
"""How long a rank that has returned its result may take to end before it is killed."""

LAST_THREADS_S = 2.0
"""How long the threads that a rank has told to end may take to do so."""


class RankFailedError(AssertionError):
    """A rank raised, died, or did not end in time; the message says which, and where it was."""


@dataclass(frozen=True, slots=True)
class _Raised:
    report: str


@dataclass(frozen=True, slots=True)
class _Rank:
    index: int
    process: BaseProcess
    results: Connection


def run_ranks(
    num_ranks: int,
    target: Callable[..., T],
    *args: object,
    timeout_s: float = 60.0,
    fresh: bool = False,
) -> list[T]:
    """Run `target(*args)` in `num_ranks` processes and give what they return, by rank.

    `target` is a function of a module. Each process has this one's environment and what torchrun
    gives a worker (RANK, WORLD_SIZE, MASTER_ADDR and so on), so that both
    `init_process_group("gloo")` and `torch.distributed.TCPStore` find the store, which lives here.
    The first rank that fails, leaves a thread running, or is late, ends them all and raises
    RankFailedError; a rank that died is named before one that raised. `fresh` starts interpreters
    that have imported nothing, for tests in which that matters: it takes seconds a rank, and gives
    each its own hash seed.
    """
    store = loopback_store()
    ranks: list[_Rank] = []
    try:
        ranks.extend(
            _start(index, num_ranks, store.port, target, args, timeout_s, fresh)
            for index in range(num_ranks)
        )
        results = _collect(ranks, time.monotonic() + timeout_s)
        for rank in ranks:
            # What was registered for the end of the process, such as the last flush of records.
            rank.process.join(AT_END_S)
        return results
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
    fresh: bool,
) -> _Rank:
    context = multiprocessing.get_context("spawn") if fresh else start_server()
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
    variables = os.environ | {name: str(value) for name, value in environment.items()}
    process = context.Process(
        target=_run_rank, args=(variables, _Output(), there, target, args, timeout_s)
    )
    process.start()
    there.close()
    return _Rank(index, process, here)  # pyright: ignore[reportArgumentType]


@cache
def start_server() -> ForkServerContext:
    """Start the server that forks ranks. It ends with this process, however that ends."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "tests.e2e.rank_server"])
    # The server must find our modules whatever its working directory is.
    ours = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (ours, os.environ.get("PYTHONPATH"))))
    with patch.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()
    return context


def _collect(ranks: list[_Rank], deadline_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    raised: str | None = None
    while len(results) < len(ranks):
        unfinished = [rank for rank in ranks if rank.index not in results]
        ready = wait([rank.results for rank in unfinished], max(0.0, deadline_s - time.monotonic()))
        if not ready:
            late = ", ".join(str(rank.index) for rank in unfinished)
            raise RankFailedError(
                raised or f"rank {late} did not end in time; stderr says where it was"
            )
        for rank in unfinished:
            if rank.results in ready:
                results[rank.index] = result = _result(rank)
                if isinstance(result, _Raised) and raised is None:
                    raised = f"rank {rank.index} raised\n{result.report}"
                    deadline_s = min(deadline_s, time.monotonic() + DEATH_AFTER_RAISE_S)
    if raised is not None:
        raise RankFailedError(raised)
    return [results[rank.index] for rank in ranks]


def _result(rank: _Rank) -> object:
    try:
        return rank.results.recv()
    except EOFError:
        rank.process.join()
        raise RankFailedError(
            f"rank {rank.index} died with exit code {rank.process.exitcode}"
        ) from None


class _Output:
    """The current output files of this process, as pytest has set them. A rank that receives this
    writes there, instead of to the output that the server had at its start."""

    def __getstate__(self) -> list[Any]:
        return [reduction.DupFd(descriptor) for descriptor in (1, 2)]

    def __setstate__(self, duplicates: list[Any]) -> None:
        for descriptor, duplicate in enumerate(duplicates, start=1):
            os.dup2(duplicate.detach(), descriptor)


def _run_rank(
    environment: dict[str, str],
    _: _Output,
    results: Connection,
    target: Callable[..., object],
    args: tuple[object, ...],
    timeout_s: float,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    # A rank's own children, as a loader's workers, start as they do outside of tests.
    multiprocessing.set_start_method(None, force=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    faulthandler.dump_traceback_later(0.9 * timeout_s)
    try:
        running = {*threading.enumerate()}
        result = target(*args)
        _await_end_of({*threading.enumerate()} - running)
        results.send(result)
    except BaseException:
        results.send(_Raised(traceback.format_exc()))
    finally:
        faulthandler.cancel_dump_traceback_later()


def _await_end_of(threads: set[threading.Thread]) -> None:
    deadline_s = time.monotonic() + LAST_THREADS_S
    others = [thread for thread in threads if not thread.name.startswith(LASTING)]
    for thread in others:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    left = sorted(thread.name for thread in others if thread.is_alive())
    assert not left, f"threads outlived what started them: {', '.join(left)}; close their owners"


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
