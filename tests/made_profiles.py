"""Profiles of torch.profiler made event by event, and those of real runs in tests/fixtures."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FIXTURES = Path(__file__).parent / "fixtures"
US = 1_000

Event = dict[str, Any]


def event(name: str, start_us: float, duration_us: float, **more: Any) -> Event:
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": name,
        "pid": 7,
        "tid": 7,
        "ts": start_us,
        "dur": duration_us,
        **more,
    }


def profile(events: list[Event], rank: int | None = 0, world_size: int = 1) -> dict[str, Any]:
    told = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": world_size}}
    return {"schemaVersion": 1, **told, "baseTimeNanoseconds": 5_000, "traceEvents": events}


@pytest.fixture
def put(tmp_path: Path) -> Callable[[str, Any], Path]:
    def write(name: str, content: Any) -> Path:
        path = tmp_path / name
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write
