"""Readers of what other programs record."""

import gzip
import json
import pickle
from pathlib import Path

import polars as pl

from rrfp.schedule.shape import Shape
from tests.flight_dumps import DONE, PIPELINE, STARTED, WORLD, dump
from tests.foreign_traces import execution_trace, exports, protobuf, spans_file
from tests.fuzz.reader import Reader, rrfp
from tests.test_interchange_table import steps_of_two_stages, written
from tests.timed_orders import operators, plain_profile, played

_RAN = played("1f1b", Shape(2, 3), 2)
_IMPORT = (rrfp("trace", "import", "given", "-o", "run"),)
_HANG = (
    rrfp("trace", "import", "--flight-recorder", "given"),
    rrfp("trace", "import", "--flight-recorder", "given", "--format", "json"),
)


def _given(directory: Path) -> Path:
    made = directory / "given"
    made.mkdir()
    return made


def _profiles(directory: Path) -> None:
    given = _given(directory)
    for rank, rows in enumerate(_RAN):
        told = plain_profile(rows, rank, 2, pg_config=[{"pg_desc": "pp", "ranks": [0, 1]}])
        (given / f"rank_{rank}.json").write_text(json.dumps(told))


def _packed_profiles(directory: Path) -> None:
    given = _given(directory)
    for rank, rows in enumerate(_RAN):
        told = json.dumps(plain_profile(rows, rank, 2)).encode()
        (given / f"rank_{rank}.json.gz").write_bytes(gzip.compress(told, 1, mtime=0))


def _exports(directory: Path) -> None:
    exports(_RAN, _given(directory), late_ns=7_000)


def _spans(directory: Path) -> None:
    spans_file(_given(directory) / "spans.jsonl", _RAN)


def _nodes(directory: Path) -> None:
    given = _given(directory)
    for rank, rows in enumerate(_RAN):
        (given / f"linked.{rank}.json").write_text(json.dumps(execution_trace(rows)))


def _binary_nodes(directory: Path) -> None:
    given = _given(directory)
    for rank, rows in enumerate(_RAN):
        (given / f"job.{rank}.et").write_bytes(protobuf(operators(rows), has_times=True))


def _table(directory: Path) -> None:
    rows = [row for step in range(3) for row in steps_of_two_stages(step)]
    written(_given(directory) / "t.csv", rows)


def _parquet_table(directory: Path) -> None:
    _table(directory)
    csv = directory / "given" / "t.csv"
    pl.read_csv(csv).write_parquet(csv.with_suffix(".parquet"))
    csv.unlink()


def _dumps(directory: Path) -> None:
    given = _given(directory)
    for rank in range(3):
        entries = [
            ("all_reduce", WORLD, 1, DONE),
            (f"recv {rank}<-{rank + 1}", PIPELINE, 1, STARTED),
            ("p2p:coalesced", PIPELINE, 2, STARTED),
        ]
        content = dump(entries[: 3 - rank % 2])
        (given / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content, protocol=2))


def _json_dumps(directory: Path) -> None:
    _dumps(directory)
    for file in (directory / "given").iterdir():
        content = pickle.loads(file.read_bytes())
        (directory / "given" / f"rank_{file.name[-1]}.json").write_text(json.dumps(content))
        file.unlink()


READERS = (
    Reader("profiles", _profiles, ("given/*",), _IMPORT, 2),
    Reader("packed profiles", _packed_profiles, ("given/*",), _IMPORT),
    Reader("exports of Nsight Systems", _exports, ("given/*",), _IMPORT, 2),
    Reader("spans of OpenTelemetry", _spans, ("given/*",), _IMPORT, 2),
    Reader("execution traces", _nodes, ("given/*",), _IMPORT, 2),
    Reader("execution traces in protobuf", _binary_nodes, ("given/*",), _IMPORT, 2),
    Reader("tables of StragglerAnalysis", _table, ("given/*",), _IMPORT, 2),
    Reader("the same in Parquet", _parquet_table, ("given/*",), _IMPORT, 2),
    Reader("dumps of a flight recorder", _dumps, ("given/*",), _HANG, 5),
    Reader("the same in JSON", _json_dumps, ("given/*",), _HANG, 5),
)
