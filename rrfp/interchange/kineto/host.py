"""What a profile tells of a rank's tasks where no range names them: Python functions (with_stack),
ranges of Megatron's names, the operators that autograd paired, transfers, and the GPU's kernels.

Names are those that torch 2.13 and 2.15 and Megatron-Core 0.16 and 0.19 give. The calls of
`c10d::send` and `c10d::recv_` are the host's; on gloo they move the data, on NCCL the kernels
`ncclDevKernel_SendRecv` do.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rrfp.interchange.json_stream import JsonStream
from rrfp.interchange.kineto.file import Event, event_of, start_of_times
from rrfp.interchange.unnamed.calls import Groups, Transfer, is_transfer, kind_of_call
from rrfp.interchange.unnamed.gpu import Kernel, is_nccl_transfer
from rrfp.interchange.unnamed.places import groups_of
from rrfp.schedule.tasks import Kind

_FRAME = re.compile(r"(?:.*/)?(\w+/\w+)\.py\(\d+\): (\w+)")
_CALL_FRAMES = {
    ("pipeline_parallel/schedules", "forward_step"): Kind.F,
    ("pipeline_parallel/schedules", "backward_step"): Kind.B,
    ("pipelining/stage", "forward_one_chunk"): Kind.F,
    ("pipelining/stage", "backward_one_chunk"): Kind.B,
}
_SCHEDULE_FRAMES = {
    ("pipeline_parallel/schedules", "forward_backward_pipelining_without_interleaving"),
    ("pipeline_parallel/schedules", "forward_backward_pipelining_with_interleaving"),
    ("pipelining/schedules", "_step_microbatches"),
}
_P2P_FRAMES = "pipeline_parallel/p2p_communication"
_SYNC_FRAMES = {("distributed/finalize_model_grads", "finalize_model_grads")}
_TRANSFERS = {"c10d::send": False, "c10d::recv_": True, "gloo:send": False, "gloo:recv": True}
"""The host's sends and receives, and whether they receive."""
EVALUATED = "autograd::engine::evaluate_function: "
"""How the names of a backward's nodes begin."""
MOST_SEQUENCE = 1 << 62
"""Above it are the numbers of what accumulates gradients, which belong to no forward."""


class Operator(NamedTuple):
    """An operator that has a number in autograd's sequence."""

    start_ns: int
    end_ns: int
    sequence: int


@dataclass(slots=True)
class HostProfile:
    """What one file tells besides the ranges of tasks."""

    path: Path
    groups: Groups = field(default_factory=Groups)
    frames: list[tuple[Event, Kind]] = field(default_factory=list)
    """Forwards and backwards by their Python function."""
    ranges: list[tuple[Event, Kind]] = field(default_factory=list)
    """The same by the names of ranges."""
    schedules: list[Event] = field(default_factory=list)
    syncs: list[Event] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    """Of the host."""
    forwards: list[Operator] = field(default_factory=list)
    backwards: list[Operator] = field(default_factory=list)
    """Nodes of the backward graph as autograd's engine evaluated them."""
    launches: dict[int, int] = field(default_factory=dict)
    """When the host launched each kernel, by its correlation."""
    kernels: list[Kernel] = field(default_factory=list)


def read_host_profile(path: Path) -> HostProfile:
    """Raises RrfpError when the file is no profile."""
    host = HostProfile(path)
    stream = JsonStream(path)
    base_ns = 0
    if stream.first() == "[":
        _keep(host, stream)
    else:
        for key in stream.keys():  # noqa: SIM118 (no mapping)
            if key == "traceEvents" and stream.first() == "[":
                _keep(host, stream)
                continue
            value = stream.value()
            if key == "baseTimeNanoseconds":
                base_ns = start_of_times(path, value)
            elif key == "distributedInfo" and isinstance(value, dict):
                host.groups = groups_of(_described(value))
    _count_from(host, base_ns)
    return host


def _described(told: Mapping[str, Any]) -> dict[str, list[int]]:
    """The ranks of each process group by its description."""
    described: dict[str, list[int]] = {}
    groups = told.get("pg_config")
    for group in groups if isinstance(groups, list) else ():
        if not isinstance(group, dict):
            continue
        name, ranks = group.get("pg_desc"), group.get("ranks")
        if isinstance(name, str) and isinstance(ranks, list) and set(map(type, ranks)) == {int}:
            described[name] = ranks
    return described


def _keep(host: HostProfile, stream: JsonStream) -> None:
    for event in stream.items():
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        name = event.get("name")
        if not isinstance(name, str):
            continue
        match event.get("cat"):
            case "python_function":
                _keep_frame(host, event, name)
            case "user_annotation":
                _keep_range(host, event, name)
            case "cpu_op":
                _keep_operator(host, event, name)
            case "cuda_runtime" | "cuda_driver":
                correlation = _number(event, "correlation")
                if correlation is not None:
                    launched = event_of(host.path, event, name)
                    host.launches[correlation] = launched.start_ns
            case "kernel" | "gpu_memcpy" | "gpu_memset":
                correlation = _number(event, "correlation")
                if correlation is not None:
                    ran = event_of(host.path, event, name)
                    host.kernels.append(
                        Kernel(ran.start_ns, ran.end_ns, correlation, is_nccl_transfer(name))
                    )


def _keep_frame(host: HostProfile, event: dict[str, Any], name: str) -> None:
    match = _FRAME.fullmatch(name)
    if match is None:
        return
    found = match[1], match[2]
    if kind := _CALL_FRAMES.get(found):
        host.frames.append((event_of(host.path, event, name), kind))
    elif found in _SCHEDULE_FRAMES:
        host.schedules.append(event_of(host.path, event, name))
    elif found in _SYNC_FRAMES:
        host.syncs.append(event_of(host.path, event, name))
    elif found[0] == _P2P_FRAMES and is_transfer(found[1]):
        _keep_transfer(host, event_of(host.path, event, name), "recv" in name)


def _keep_range(host: HostProfile, event: dict[str, Any], name: str) -> None:
    if kind := kind_of_call(name):
        host.ranges.append((event_of(host.path, event, name), kind))
    elif name in _TRANSFERS:
        _keep_transfer(host, event_of(host.path, event, name), _TRANSFERS[name])
    elif is_transfer(name):
        _keep_transfer(host, event_of(host.path, event, name), "recv" in name)


def _keep_operator(host: HostProfile, event: dict[str, Any], name: str) -> None:
    if name in _TRANSFERS:
        _keep_transfer(host, event_of(host.path, event, name), _TRANSFERS[name])
        return
    sequence = _number(event, "Sequence number")
    if sequence is None or name.startswith(("c10d::", "gloo:", "nccl:")):
        return
    told = event_of(host.path, event, name)
    operator = Operator(told.start_ns, told.end_ns, sequence)
    if name.startswith(EVALUATED):
        host.backwards.append(operator)
    elif sequence < MOST_SEQUENCE and not _number(event, "Fwd thread id"):
        host.forwards.append(operator)


def _keep_transfer(host: HostProfile, event: Event, is_receive: bool) -> None:
    host.transfers.append(Transfer(event.start_ns, event.end_ns, is_receive))


def _number(event: dict[str, Any], name: str) -> int | None:
    arguments = event.get("args")
    value = arguments.get(name) if isinstance(arguments, dict) else None
    return value if type(value) is int and value >= 0 else None


def _count_from(host: HostProfile, base_ns: int) -> None:
    """Let all times count from 1970, in the order of their beginnings."""
    for found in (host.frames, host.ranges):
        found[:] = sorted(((_later(event, base_ns), kind) for event, kind in found), key=_start)
    for events in (host.schedules, host.syncs):
        events[:] = sorted((_later(event, base_ns) for event in events), key=lambda each: each[:2])
    host.transfers = sorted(_later(each, base_ns) for each in host.transfers)
    host.forwards = sorted(_later(each, base_ns) for each in host.forwards)
    host.backwards = sorted(_later(each, base_ns) for each in host.backwards)
    host.kernels = sorted(_later(each, base_ns) for each in host.kernels)
    host.launches = {key: start_ns + base_ns for key, start_ns in host.launches.items()}


def _start(found: tuple[Event, Kind]) -> int:
    return found[0].start_ns


_Span = TypeVar("_Span", Event, Transfer, Operator, Kernel)


def _later(span: _Span, by_ns: int) -> _Span:
    return span._replace(start_ns=span.start_ns + by_ns, end_ns=span.end_ns + by_ns)
