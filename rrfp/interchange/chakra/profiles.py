"""A run read from Chakra execution traces, a file a rank.

Nodes are read as the events of a torch profile: ranges that name tasks, sends and receives, and the
operators that autograd paired. An execution trace tells neither its rank, which the file's name may
tell (`rrfp.interchange.named_ranks`), nor its process groups.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rrfp.errors import RrfpError
from rrfp.interchange.chakra.nodes import Node, read_nodes
from rrfp.interchange.kineto.file import Event, Profile
from rrfp.interchange.kineto.host import EVALUATED, MOST_SEQUENCE, HostProfile, Operator
from rrfp.interchange.kineto.profiles import spans_of
from rrfp.interchange.named_ranks import ranks_by_name
from rrfp.interchange.ranges import is_overlapped, parse_profiler_step, parse_range
from rrfp.interchange.spans import RankSpans, Source
from rrfp.interchange.unnamed.calls import Transfer, kind_of_call
from rrfp.interchange.unnamed.gpu import Kernel, is_nccl_transfer

_NAME = "execution trace of Chakra"
_TRANSFERS = {"c10d::send": False, "c10d::recv_": True, "gloo:send": False, "gloo:recv": True}


def read_execution_traces(paths: Sequence[Path]) -> tuple[list[RankSpans], Source]:
    """The spans of a run from its execution traces. Raises RrfpError for files that are none, that
    tell no times, or no tasks."""
    profiles: list[Profile] = []
    hosts: dict[int, HostProfile] = {}
    numbers, notes = ranks_by_name(paths)
    for number, path in zip(numbers, paths, strict=True):
        nodes = read_nodes(path)
        profile = Profile(path, number=number)
        _keep_ranges(profile, nodes)
        hosts[id(profile)] = _host(path, nodes)
        profiles.append(profile)
    spans, source = spans_of(profiles, lambda profile: hosts[id(profile)], _NAME)
    if any(rank.tells_waits for rank in spans):
        return spans, source  # Our own ranges tell their rank.
    return spans, replace(source, notes=(*source.notes, *notes))


def _keep_ranges(profile: Profile, nodes: Sequence[Node]) -> None:
    for index, node in enumerate(nodes):
        if is_overlapped(node.name):
            raise RrfpError(
                f"{profile.path} has ranges of a forward and a backward at once, such as "
                f"'{node.name[:40]}', which nothing tells apart"
            )
        event = Event(node.start_ns, node.end_ns, node.name, index)
        if parse_profiler_step(node.name) is not None:
            profile.steps.append(event)
        elif parse_range(node.name) is not None:
            profile.on_cpu.append(event)


def _host(path: Path, nodes: Sequence[Node]) -> HostProfile:
    host = HostProfile(path)
    for index, (node, name) in enumerate((node, node.name) for node in nodes):
        start_ns, end_ns = node.start_ns, node.end_ns
        if node.launched_ns is not None:
            host.launches[index] = node.launched_ns
            host.kernels.append(Kernel(start_ns, end_ns, index, is_nccl_transfer(name)))
        elif kind := kind_of_call(name):
            host.ranges.append((Event(start_ns, end_ns, name, None), kind))
        elif name in _TRANSFERS:
            host.transfers.append(Transfer(start_ns, end_ns, _TRANSFERS[name]))
        elif name.startswith(EVALUATED):
            number = MOST_SEQUENCE if node.sequence is None else node.sequence
            host.backwards.append(Operator(start_ns, end_ns, number))
        elif node.sequence is not None and not name.startswith("c10d::"):
            host.forwards.append(Operator(start_ns, end_ns, node.sequence))
    return host
