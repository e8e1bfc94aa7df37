"""Reads a run from Nsight Systems' SQLite exports (`nsys export --type sqlite`).

The schema is that of "SQLite Export Schema Reference" in NVIDIA's documentation of nsys-exporter
(docs.nvidia.com/nsight-systems, 2020 to 2025): `NVTX_EVENTS` has ranges, with their name in `text`
or by `textId` in `StringIds`; `CUPTI_ACTIVITY_KIND_KERNEL` has the GPU's kernels, and
`CUPTI_ACTIVITY_KIND_RUNTIME` the calls that launched them, joined by `correlationId`. Empty tables
are missing. Times are nanoseconds. A `globalTid` has the process id in its bits 24 to 47 and the
thread's in the lowest 24.
"""

import re
import sqlite3
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rrfp.errors import RrfpError
from rrfp.interchange.inferred_tasks import (
    Kernel,
    is_nccl_transfer,
    is_transfer,
)
from rrfp.interchange.kineto import spans_of_numbered
from rrfp.interchange.kineto_profile import (
    MOST_NS,
    Event,
    HostProfile,
    Profile,
)
from rrfp.interchange.range_names import (
    check_separable,
    parse_profiler_step,
    parse_range,
    ranks_by_name,
)
from rrfp.interchange.spans import RankSpans, Source

_STEPS_OF_A_BYTE, _LEAST_STEPS, _STEPS_AT_ONCE = 1000, 10**8, 10**6
"""The limit of steps of SQLite's virtual machine per byte of a file; reading takes a few."""
_RANGES = """
    SELECT event.start, event.end, coalesce(event.text, string.value), event.globalTid
    FROM NVTX_EVENTS AS event LEFT JOIN StringIds AS string ON string.id = event.textId
    WHERE event.eventType IN (59, 60, 70, 71) AND event.end IS NOT NULL
    ORDER BY event.start
"""
"""Ranges of push and pop (59, 70), and of start and end (60, 71)."""
_KERNELS = """
    SELECT kernel.start, kernel.end, kernel.correlationId, string.value, kernel.globalPid
    FROM CUPTI_ACTIVITY_KIND_KERNEL AS kernel
    LEFT JOIN StringIds AS string ON string.id = kernel.shortName
    ORDER BY kernel.start
"""
_LAUNCHES = """
    SELECT runtime.start, runtime.correlationId, runtime.globalTid
    FROM CUPTI_ACTIVITY_KIND_RUNTIME AS runtime
"""
_COLUMNS = {
    "NVTX_EVENTS": {"start", "end", "eventType", "text", "textId", "globalTid"},
    "StringIds": {"id", "value"},
    "CUPTI_ACTIVITY_KIND_KERNEL": {"start", "end", "correlationId", "shortName", "globalPid"},
    "CUPTI_ACTIVITY_KIND_RUNTIME": {"start", "correlationId", "globalTid"},
}


@dataclass(slots=True)
class Process:
    """The NVTX ranges and the kernels of one process."""

    pid: int
    ranges: list[Event] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    launches: dict[int, int] = field(default_factory=dict)
    """The launch time of each kernel, by its correlation."""


def read_processes(path: Path) -> list[Process]:
    """The processes in an export that have NVTX ranges, in the order of their ids. Raises RrfpError
    if the file is not such an export, is damaged, or has no NVTX ranges."""
    processes: dict[int, Process] = {}

    def process_of(global_id: int) -> Process:
        pid = global_id >> 24 & 0xFFFFFF
        return processes.setdefault(pid, Process(pid))

    try:
        # Open without journal and lock, as nsys itself may be using the file.
        location = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(location, uri=True)) as database:
            _bound(database, path.stat().st_size)
            tables = _tables(path, database)
            for start_ns, end_ns, name, thread in _rows(path, database, _RANGES, text_at=2):
                if isinstance(name, str):
                    process_of(thread).ranges.append(Event(start_ns, end_ns, name, None))
            if {"CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"} <= tables:
                for start_ns, end_ns, correlation, name, owner in _rows(
                    path, database, _KERNELS, text_at=3
                ):
                    kernel = Kernel(start_ns, end_ns, correlation, is_nccl_transfer(name or ""))
                    process_of(owner).kernels.append(kernel)
                for start_ns, correlation, thread in _rows(path, database, _LAUNCHES):
                    process_of(thread).launches[correlation] = start_ns
    # SQLite's error message may contain a name that is not valid UTF-8.
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise RrfpError(
            f"{path} cannot be read as SQLite ({error}); export it again with nsys export --type "
            "sqlite"
        ) from None
    found = [processes[pid] for pid in sorted(processes) if processes[pid].ranges]
    if not found:
        raise RrfpError(f"{path} {_WITHOUT_RANGES}")
    return found


def _bound(database: sqlite3.Connection, num_bytes: int) -> None:
    """Make SQLite abort when it works too long for a file of this size, because the pages of a
    damaged file may form a cycle."""
    left = iter(range((num_bytes * _STEPS_OF_A_BYTE + _LEAST_STEPS) // _STEPS_AT_ONCE))
    database.set_progress_handler(lambda: next(left, None) is None, _STEPS_AT_ONCE)


_WITHOUT_RANGES = (
    "has no NVTX ranges, which alone tell what a kernel belongs to; profile with --trace=cuda,nvtx "
    "and torch.autograd.profiler.emit_nvtx()"
)


def _tables(path: Path, database: sqlite3.Connection) -> set[str]:
    """The names of the existing tables. Raises RrfpError if they lack columns, if StringIds is
    missing, or if the file is not an export with NVTX ranges."""
    rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    found = {name for (name,) in rows}
    if "NVTX_EVENTS" not in found:
        known = found & {"StringIds", "TARGET_INFO_SYSTEM_ENV", "META_DATA_CAPTURE", *_COLUMNS}
        raise RrfpError(
            f"{path} {_WITHOUT_RANGES}"
            if known
            else f"{path} is a database, and not one of Nsight Systems; export a report with nsys "
            "export --type sqlite"
        )
    for table, columns in _COLUMNS.items():
        has = {row[1] for row in database.execute(f'PRAGMA table_info("{table}")')}
        if table in found and not columns <= has:
            raise RrfpError(
                f"{path} has a table {table} without {', '.join(sorted(columns - has))}; export it "
                "with Nsight Systems 2022.1 or newer"
            )
    if "StringIds" not in found:
        raise RrfpError(f"{path} has no table StringIds; export it again")
    return found


def _rows(
    path: Path, database: sqlite3.Connection, query: str, *, text_at: int | None = None
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a query whose columns are whole numbers, except column `text_at`, if given.
    Rows with text begin with the start and the end of an interval. Raises RrfpError for a damaged
    row."""
    for row in database.execute(query):
        numbers = [value for index, value in enumerate(row) if index != text_at]
        if any(type(value) is not int or abs(value) > MOST_NS for value in numbers) or (
            text_at is not None and row[1] < row[0]
        ):
            raise RrfpError(f"{path} has a row {str(row)[:60]} that is damaged; export it again")
        yield row


# Spans from exports: one file per rank, or one file per host with several processes.
#
# Ranges are read like those of a torch profile: `rrfp.megatron.trace_native`'s, those of
# torch.distributed.pipelining, Megatron's own (`--nvtx-ranges`), and those of every operator that
# `torch.autograd.profiler.emit_nvtx` writes, `aten::addmm, seq = 42, op_id = 7`. NCCL's own ranges
# (`ncclSend`, `ncclRecv`) are transfers.


_NAME = "export of Nsight Systems"
_OF_EMIT_NVTX = re.compile(r"(?P<name>.*?)(?:, seq = (?P<sequence>\d{1,19}))?(?:, op_id = \d+.*)?")
_TRANSFERS = {
    "c10d::send": False,
    "nccl:send": False,
    "ncclSend": False,
    "c10d::recv_": True,
    "nccl:recv": True,
    "ncclRecv": True,
}


def read_exports(paths: Sequence[Path]) -> tuple[list[RankSpans], Source]:
    """The spans of a run from its exports. Ranks follow from the files' names if each file has one
    process, otherwise from the order of files and of process ids. Raises RrfpError for files that
    are not exports or contain no tasks."""
    found = [(path, process) for path in paths for process in read_processes(path)]
    if len(found) == len(paths):
        numbers, notes = ranks_by_name(paths)
    else:
        numbers = list(range(len(found)))
        notes = [
            "several processes share a file: ranks are numbered in the order of their process ids"
        ]
    profiles = [
        (_profile(path, process, number), _host(path, process))
        for number, (path, process) in zip(numbers, found, strict=True)
    ]
    return spans_of_numbered(profiles, _NAME, notes)


def _profile(path: Path, process: Process, number: int) -> Profile:
    """The ranges of tasks, with GPU times from the kernels launched in each, as in a profile of
    torch.profiler. Raises RrfpError for a range of a forward and a backward at once."""
    profile = Profile(path, number=number, pid=process.pid)
    launched = sorted((time_ns, number) for number, time_ns in process.launches.items())
    times_ns = [time_ns for time_ns, _ in launched]
    kernels = {kernel.correlation: kernel for kernel in process.kernels}
    for index, each in enumerate(process.ranges):
        name = _split_name(each.name)[0]
        check_separable(path, name)
        event = each._replace(name=name, external_id=index)
        if parse_profiler_step(name) is not None:
            profile.steps.append(event)
        elif parse_range(name) is not None:
            profile.on_cpu.append(event)
            inside = launched[
                bisect_left(times_ns, each.start_ns) : bisect_left(times_ns, each.end_ns)
            ]
            ran = [kernels[number] for _, number in inside if number in kernels]
            if ran:
                first, last = min(ran).start_ns, max(kernel.end_ns for kernel in ran)
                profile.on_gpu.append(Event(first, last, name, index))
    return profile


def _host(path: Path, process: Process) -> HostProfile:
    """The calls, transfers, operators and kernels of a process."""
    host = HostProfile(path, kernels=sorted(process.kernels), launches=process.launches)
    for each in process.ranges:
        name, sequence = _split_name(each.name)
        is_receive = _TRANSFERS.get(name, "recv" in name if is_transfer(name) else None)
        is_operator = not name.startswith(("c10d::", "nccl:"))
        host.add(each._replace(name=name), sequence if is_operator else None, is_receive)
    return host


def _split_name(name: str) -> tuple[str, int | None]:
    """Split a range's name into the name before emit_nvtx's additions and the number in autograd's
    sequence, None without one."""
    match = _OF_EMIT_NVTX.fullmatch(name)
    if match is None:
        return name, None
    sequence = match["sequence"]
    return match["name"], None if sequence is None else int(sequence)
