"""Named orders as Nsight Systems, OpenTelemetry and Chakra record them, in files of their forms."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind
from tests.timed_orders import Timed, Told, operators, played

SHAPE = Shape(2, 4, 2)
ORIGIN_NS = 1_700_000_000_000_000_000


@pytest.fixture
def ran() -> list[list[Timed]]:
    return played("interleaved", SHAPE, 2)


def nsight_export(path: Path, told: Iterator[Told], *, late_ns: int | None = None) -> Path:
    """An export in the schema that Nsight Systems documents, with the ranges of emit_nvtx. With
    `late_ns` every range launches a kernel, which runs so much later and for as long."""
    with sqlite3.connect(path) as database:
        database.executescript(
            "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);"
            "CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT "
            "NULL, rangeId INTEGER, category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, "
            "endGlobalTid INTEGER, textId INTEGER, domainId INTEGER);"
        )
        if late_ns is not None:
            database.executescript(
                "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT "
                "NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER, "
                "nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL);"
                "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT "
                "NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT "
                "NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL, "
                "shortName INTEGER NOT NULL);"
            )
        process = 1 << 56 | 4242 << 24
        for number, (start_ns, end_ns, name, sequence) in enumerate(told):
            text = name if sequence is None else f"{name}, seq = {sequence}, op_id = {number}"
            database.execute("INSERT INTO StringIds VALUES (?, ?)", (number, text))
            database.execute(
                "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, 0, 0, 0, NULL, ?, NULL, ?, 0)",
                (start_ns, end_ns, process | 4242, number),
            )
            if late_ns is not None:
                database.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, 0, 0)",
                    (start_ns + 1, start_ns + 2, process | 4242, number),
                )
                database.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 1, 7, ?, ?, 0, 0)",
                    (start_ns + late_ns, end_ns + late_ns, number, process),
                )
    return path


def exports(ran: list[list[Timed]], directory: Path, late_ns: int | None = None) -> list[Path]:
    return [
        nsight_export(directory / f"report_{rank}.sqlite", operators(rows), late_ns=late_ns)
        for rank, rows in enumerate(ran)
    ]


def spans_file(
    path: Path, ran: list[list[Timed]], *, evaluates: bool = False, num_tensor_ranks: int = 1
) -> Path:
    """What the collector's file exporter writes of Megatron-LM's spans: a line an export."""
    lines = []
    for rank, rows in enumerate(ran):
        spans = []
        for step in sorted({row.step for row in rows}):
            own = [row for row in rows if row.step == step]
            is_test = evaluates and step == 1
            own = [row for row in own if row.task.kind is Kind.F] if is_test else own
            around = "megatron.evaluate.step" if is_test else "megatron.train.iteration"
            told = [{"key": "megatron.iteration", "value": {"intValue": str(step)}}]
            spans.append((own[0].start_ns - 5_000, own[-1].end_ns + 5_000, around, told))
            for start_ns, end_ns, _, task in own:
                kind = "forward" if task.kind is Kind.F else "backward"
                spans.append((start_ns, end_ns, f"megatron.microbatch.{kind}", []))
                spans.append((start_ns - 4_000, start_ns, f"megatron.p2p.recv_{kind}", []))
        resource = [
            {"key": "service.instance.id", "value": {"stringValue": f"job7-rank{rank}"}},
            {"key": "dl.pipeline_parallel.size", "value": {"intValue": "2"}},
            {"key": "dl.tensor_parallel.size", "value": {"intValue": str(num_tensor_ranks)}},
        ]
        exported = [
            {
                "name": name,
                "startTimeUnixNano": str(ORIGIN_NS + start_ns),
                "endTimeUnixNano": str(ORIGIN_NS + end_ns),
                "attributes": attributes,
            }
            for start_ns, end_ns, name, attributes in spans
        ]
        lines.append(
            {
                "resourceSpans": [
                    {"resource": {"attributes": resource}, "scopeSpans": [{"spans": exported}]}
                ]
            }
        )
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def execution_trace(rows: list[Timed]) -> dict[str, Any]:
    """What chakra_trace_link writes."""
    nodes = [
        {
            "id": number,
            "name": name,
            "ctrl_deps": 1,
            "ts": start_ns / 1_000,
            "inclusive_dur": (end_ns - start_ns) / 1_000,
            "attrs": [{"name": "seq_id", "type": "int64", "value": sequence}],
        }
        for number, (start_ns, end_ns, name, sequence) in enumerate(operators(rows))
    ]
    return {"schema": "1.1.1-chakra.0.0.4", "nodes": nodes}


def varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def protobuf(told: Iterator[Told], *, has_times: bool) -> bytes:
    """Nodes as et_def.proto has them, with their times rounded to microseconds."""
    messages = [field(1, b"0.0.4")]
    for number, (start_ns, end_ns, name, sequence) in enumerate(told):
        seq_id = field(1, b"seq_id") + field(9, sequence or 0)
        start_us = start_ns // 1_000
        times = field(6, start_us) + field(7, end_ns // 1_000 - start_us) if has_times else b""
        messages.append(
            field(1, number) + field(2, name.encode()) + field(3, 4) + times + field(10, seq_id)
        )
    return b"".join(varint(len(message)) + message for message in messages)
