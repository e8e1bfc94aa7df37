"""A process that has imported Megatron once and forks the ranks of one run after another.

Importing torch and Megatron takes a rank's process five times as long as the steps of these runs.
A forked rank runs the same command otherwise, `python SCRIPT ARGS` or `python -m rrfp run ...`,
and ends as an interpreter does. A job is a line of JSON on stdin, its answer one on stdout.
"""

import argparse
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any

_GRACE_S = 20.0
"""How long the other ranks may go on once one has failed."""


def main() -> None:
    ours = os.environ["RRFP_LM_TESTS"]
    sys.path.insert(0, ours)
    from tests.megatron_lm import rank as prepared

    sys.path.remove(ours)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    prepared.prepare_megatron()
    _read_the_source_of_arguments_once()
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        rank = _fork_ranks(job)
        if rank is not None:
            prepared.begin()
            _end(_code_of(job["command"]))


def _read_the_source_of_arguments_once() -> None:
    """A quarter of a run went into parsing Megatron's sources for what `--help` says."""
    arguments: Any = importlib.import_module("megatron.training.arguments")
    factory = importlib.import_module("megatron.training.argument_utils").ArgumentGroupFactory
    read = factory._get_field_docstrings
    of_class = cache(lambda config_class: read(object.__new__(factory), config_class))
    factory._get_field_docstrings = lambda _, config_class: of_class(config_class)
    arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def _fork_ranks(job: dict[str, Any]) -> int | None:
    """The rank in its own process; None in the server's, once all have ended."""
    pids = []
    for rank in range(job["num_ranks"]):
        pid = os.fork()
        if not pid:
            _become(rank, job)
            return rank
        pids.append(pid)
    sys.stdout.write(json.dumps(_exit_codes(pids, job["limit_s"])) + "\n")
    sys.stdout.flush()
    return None


def _become(rank: int, job: dict[str, Any]) -> None:
    os.setpgid(0, 0)
    _end_with_parent()
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(file, descriptor)
    os.chdir(job["folder"])
    os.environ.update(job["environment"])
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})


def _code_of(command: list[str]) -> int:
    try:
        _run(command)
    except SystemExit as exit_:
        code: Any = exit_.code
        return code if isinstance(code, int) else int(code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> None:
    """As an interpreter ends: threads are joined, then what asked for it is called. It takes down
    no module, which would copy every page that is shared with the server."""
    private: Any = threading
    private._shutdown()
    functions: Any = atexit
    functions._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(command: list[str]) -> None:
    """As Python runs its own command line."""
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[0] = os.path.dirname(command[0])  # noqa: PTH120
        runpy.run_path(command[0], run_name="__main__")


def _exit_codes(pids: list[int], limit_s: float) -> list[int | None]:
    """By rank; None for one that did not end in time."""
    codes: dict[int, int] = {}
    deadline_s = time.monotonic() + limit_s
    has_failed = False
    while len(codes) < len(pids) and time.monotonic() < deadline_s:
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        if not has_failed and any(codes.values()):
            has_failed = True
            deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
        time.sleep(0.02)
    for pid in pids:
        if pid not in codes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [codes.get(pid) for pid in pids]


def _end_with_parent() -> None:
    parent = os.getppid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # It ended before it was asked about.
        os._exit(1)


if __name__ == "__main__":
    main()
