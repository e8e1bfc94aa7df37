"""Reads a run from Chakra execution traces: JSON of torch and chakra_trace_link, or protobuf.

The JSON is an object with `schema` and `nodes`; chakra_trace_link (mlcommons/chakra) adds `ts` and
`inclusive_dur`, in microseconds, to the output of torch's ExecutionTraceObserver. The protobuf is
that of `et_def.proto`: a GlobalMetadata, then Nodes, each after its length as a varint; times are
`start_time_micros` (6) and `duration_micros` (7).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rrfp.errors import RrfpError
from rrfp.interchange.inferred_tasks import Kernel, is_nccl_transfer
from rrfp.interchange.json_stream import JsonStream, open_bytes
from rrfp.interchange.kineto import spans_of_numbered
from rrfp.interchange.kineto_profile import (
    NS_PER_US,
    TRANSFERS,
    Event,
    HostProfile,
    Profile,
    ns_of_us,
    whole_number,
)
from rrfp.interchange.range_names import (
    check_separable,
    parse_profiler_step,
    parse_range,
    ranks_by_name,
)
from rrfp.interchange.spans import RankSpans, Source

_MOST_US = 1 << 51
_MOST_BYTES = 1 << 30
_ATTRIBUTE_NAME, _INT64 = 1, 9
"""Field numbers of an AttributeProto."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node with its time."""

    start_ns: int
    end_ns: int
    name: str
    sequence: int | None
    """The number in autograd's sequence; None without one."""
    launched_ns: int | None
    """For work of the GPU: the start of the node that launched it; None on the host."""


def read_nodes(path: Path) -> list[Node]:
    """The nodes with a time, in the order of their starts; the file is protobuf if its name ends in
    .et, otherwise JSON. Raises RrfpError if it is not an execution trace, or contains no times."""
    found = _of_protobuf(path) if path.suffix == ".et" else _of_json(path)
    nodes = sorted(found, key=lambda node: (node.start_ns, node.end_ns))
    if not nodes:
        raise RrfpError(
            f"{path} is an execution trace without times, as torch's ExecutionTraceObserver and "
            "chakra_converter write it; import the profile of torch.profiler that was taken with "
            "it, or what chakra_trace_link made of both"
        )
    return nodes


def _of_json(path: Path) -> Iterator[Node]:
    """Yield the nodes with a time in a JSON file; others are skipped. Work of the GPU is launched
    when its parent (`ctrl_deps`) starts, or else when it starts itself. Raises RrfpError if the
    file is not valid JSON."""
    stream = JsonStream(path)
    starts_us: dict[object, float] = {}
    timed: list[tuple[float, float, dict[str, Any]]] = []
    for key in stream.keys():  # noqa: SIM118 (no mapping)
        if key != "nodes" or stream.first() != "[":
            stream.value()
            continue
        for node in stream.items():
            start_us, duration_us = _time(node, "ts"), _time(node, "inclusive_dur")
            if start_us is not None and duration_us is not None:
                timed.append((start_us, duration_us, node))
                if isinstance(node.get("id"), int):
                    starts_us[node["id"]] = start_us
    for start_us, duration_us, node in timed:
        parent = node.get("ctrl_deps")
        launched_us = starts_us.get(parent) if isinstance(parent, int) else None
        on_gpu = node.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        yield Node(
            ns_of_us(start_us),
            ns_of_us(start_us) + ns_of_us(duration_us),
            str(node.get("name")),
            _sequence(node),
            ns_of_us(launched_us if launched_us is not None else start_us) if on_gpu else None,
        )


def _time(node: object, key: str) -> float | None:
    """A time of a JSON node in microseconds; None if it is missing, negative or impossibly
    great."""
    value = node.get(key) if isinstance(node, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if 0 <= value <= _MOST_US else None


def _sequence(node: dict[str, Any]) -> int | None:
    """A JSON node's number in autograd's sequence, its attribute `seq_id`; None without a valid
    one."""
    attributes = node.get("attrs")
    for attribute in attributes if isinstance(attributes, list) else ():
        if isinstance(attribute, dict) and attribute.get("name") == "seq_id":
            return whole_number(attribute.get("value"))
    return None


def _of_protobuf(path: Path) -> Iterator[Node]:
    """Yield the nodes with a time in a protobuf file, after its first message, the metadata. Raises
    RrfpError if it is damaged, or larger than 1 GiB."""
    data = bytearray()
    for chunk in open_bytes(path):
        data += chunk
        if len(data) > _MOST_BYTES:
            raise RrfpError(f"{path} is larger than {_MOST_BYTES >> 30} GiB; import its JSON")
    view = memoryview(data)
    position = 0
    is_first = True
    try:
        while position < len(view):
            size, position = _varint(view, position)
            if position + size > len(view):
                raise ValueError("a message is cut off")
            if not is_first and (node := _node(view[position : position + size])) is not None:
                yield node
            is_first = False
            position += size
    except (ValueError, IndexError) as error:
        raise RrfpError(
            f"{path} is no execution trace of Chakra, or cut off ({error}); import it as "
            "chakra_converter wrote it"
        ) from None


def _node(message: memoryview) -> Node | None:
    """Decode a protobuf node; None if its start is missing or 0, or a time is impossibly great.
    Raises ValueError or IndexError if it is damaged."""
    name, start_us, duration_us, sequence = "", 0, 0, None
    for number, value in _fields(message):
        match number, value:
            case (2, memoryview()):
                name = bytes(value).decode(errors="replace")
            case (6, int()):
                start_us = value
            case (7, int()):
                duration_us = value
            case (10, memoryview()):
                attribute = dict(_fields(value))
                label, found = attribute.get(_ATTRIBUTE_NAME), attribute.get(_INT64)
                if isinstance(label, memoryview) and bytes(label) == b"seq_id":
                    sequence = found if isinstance(found, int) and found < 1 << 63 else None
    if not start_us or max(start_us, duration_us) > _MOST_US:
        return None
    start_ns = start_us * NS_PER_US
    return Node(start_ns, start_ns + duration_us * NS_PER_US, name, sequence, None)


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the number and the value of each varint and length-delimited field of a message; fields
    of fixed size are skipped. Raises ValueError or IndexError if it is damaged."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        match tag & 7:
            case 0:
                value, position = _varint(message, position)
                yield tag >> 3, value
            case 2:
                size, position = _varint(message, position)
                if position + size > len(message):
                    raise ValueError("a field is cut off")
                yield tag >> 3, message[position : position + size]
                position += size
            case 1:
                position += 8
            case 5:
                position += 4
            case kind:
                raise ValueError(f"a field of kind {kind}")


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """Decode a varint. Returns its value and the position after it. Raises ValueError if it has
    more than 10 bytes, and IndexError at the end of the data."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")


# Spans from execution traces, one file per rank.
#
# Nodes are read like the events of a torch profile: ranges of tasks, sends and receives, and
# operators paired by autograd. An execution trace contains neither its rank, which the file's name
# may contain (`ranks_by_name`), nor its process groups.


_NAME = "execution trace of Chakra"


def read_execution_traces(paths: Sequence[Path]) -> tuple[list[RankSpans], Source]:
    """The spans of a run from its execution traces, one per rank, ranked by their files' names.
    Raises RrfpError for files that are not execution traces, or contain no times or no tasks."""
    profiles: list[tuple[Profile, HostProfile]] = []
    numbers, notes = ranks_by_name(paths)
    for number, path in zip(numbers, paths, strict=True):
        nodes = read_nodes(path)
        profile = Profile(path, number=number)
        _add_ranges(profile, nodes)
        profiles.append((profile, _host(path, nodes)))
    return spans_of_numbered(profiles, _NAME, notes)


def _add_ranges(profile: Profile, nodes: Sequence[Node]) -> None:
    """Add the ranges of tasks and the profiler's own steps to a profile; other nodes are skipped.
    Raises RrfpError for a range of a forward and a backward at once."""
    for index, node in enumerate(nodes):
        check_separable(profile.path, node.name)
        event = Event(node.start_ns, node.end_ns, node.name, index)
        if parse_profiler_step(node.name) is not None:
            profile.steps.append(event)
        elif parse_range(node.name) is not None:
            profile.on_cpu.append(event)


def _host(path: Path, nodes: Sequence[Node]) -> HostProfile:
    """The calls, transfers, operators and kernels of an execution trace."""
    host = HostProfile(path)
    for index, node in enumerate(nodes):
        start_ns, end_ns, name = node.start_ns, node.end_ns, node.name
        if node.launched_ns is not None:
            host.launches[index] = node.launched_ns
            host.kernels.append(Kernel(start_ns, end_ns, index, is_nccl_transfer(name)))
        else:
            sequence = None if name.startswith("c10d::") else node.sequence
            host.add(Event(start_ns, end_ns, name, None), sequence, TRANSFERS.get(name))
    return host
