"""A run read from Nsight Systems' exports: a file a rank, or a file a host with several processes.

Ranges are read as those of a torch profile: `rrfp.megatron.trace_native`'s, those of
torch.distributed.pipelining, Megatron's own (`--nvtx-ranges`), and what
`torch.autograd.profiler.emit_nvtx` writes of every operator, `aten::addmm, seq = 42, op_id = 7`.
NCCL's own ranges (`ncclSend`, `ncclRecv`) tell of transfers.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rrfp.errors import RrfpError
from rrfp.interchange.kineto.file import Event, Profile
from rrfp.interchange.kineto.host import EVALUATED, MOST_SEQUENCE, HostProfile, Operator
from rrfp.interchange.kineto.profiles import spans_of
from rrfp.interchange.named_ranks import ranks_by_name
from rrfp.interchange.nsight.tables import Process, Range, read_processes
from rrfp.interchange.ranges import is_overlapped, parse_profiler_step, parse_range
from rrfp.interchange.spans import RankSpans, Source
from rrfp.interchange.unnamed.calls import Transfer, is_transfer, kind_of_call

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
    """The spans of a run from its exports. Raises RrfpError for files that are no exports, or that
    tell no tasks."""
    found = [(path, process) for path in paths for process in read_processes(path)]
    if len(found) == len(paths):
        numbers, notes = ranks_by_name(paths)
    else:
        numbers = list(range(len(found)))
        notes = [
            "several processes share a file: ranks are numbered in the order of their process ids"
        ]
    profiles: list[Profile] = []
    hosts: dict[int, HostProfile] = {}
    for number, (path, process) in zip(numbers, found, strict=True):
        profile = _profile(path, process, number)
        hosts[id(profile)] = _host(path, process)
        profiles.append(profile)
    spans, source = spans_of(profiles, lambda profile: hosts[id(profile)], _NAME)
    if any(rank.tells_waits for rank in spans):
        return spans, source  # Our own ranges tell their rank.
    return spans, replace(source, notes=(*source.notes, *notes))


def _profile(path: Path, process: Process, number: int) -> Profile:
    """The ranges that name tasks, with the GPU's time of each as torch's profiler gives it."""
    profile = Profile(path, number=number, pid=process.pid)
    launched = sorted((time_ns, number) for number, time_ns in process.launches.items())
    times_ns = [time_ns for time_ns, _ in launched]
    kernels = {kernel.correlation: kernel for kernel in process.kernels}
    for index, told in enumerate(process.ranges):
        name = _plain(told)[0]
        if is_overlapped(name):
            raise RrfpError(
                f"{path} has ranges of a forward and a backward at once, such as '{name[:40]}', "
                "which nothing tells apart; profile a schedule without OVERLAP_F_B"
            )
        event = Event(told.start_ns, told.end_ns, name, index)
        if parse_profiler_step(name) is not None:
            profile.steps.append(event)
        elif parse_range(name) is not None:
            profile.on_cpu.append(event)
            inside = launched[
                bisect_left(times_ns, told.start_ns) : bisect_left(times_ns, told.end_ns)
            ]
            ran = [kernels[number] for _, number in inside if number in kernels]
            if ran:
                first, last = min(ran).start_ns, max(kernel.end_ns for kernel in ran)
                profile.on_gpu.append(Event(first, last, name, index))
    return profile


def _host(path: Path, process: Process) -> HostProfile:
    """What tells tasks where no range names them."""
    host = HostProfile(path, kernels=sorted(process.kernels), launches=process.launches)
    for told in process.ranges:
        name, sequence = _plain(told)
        event = Event(told.start_ns, told.end_ns, name, None)
        if kind := kind_of_call(name):
            host.ranges.append((event, kind))
        elif name in _TRANSFERS or is_transfer(name):
            is_receive = _TRANSFERS.get(name, "recv" in name)
            host.transfers.append(Transfer(told.start_ns, told.end_ns, is_receive))
        elif name.startswith(EVALUATED):
            number = MOST_SEQUENCE if sequence is None else sequence
            host.backwards.append(Operator(told.start_ns, told.end_ns, number))
        elif sequence is not None and not name.startswith(("c10d::", "nccl:")):
            host.forwards.append(Operator(told.start_ns, told.end_ns, sequence))
    return host


def _plain(told: Range) -> tuple[str, int | None]:
    """A range's name without what emit_nvtx adds to it, and its number in autograd's sequence."""
    match = _OF_EMIT_NVTX.fullmatch(told.name)
    if match is None:
        return told.name, None
    sequence = match["sequence"]
    return match["name"], None if sequence is None else int(sequence)
