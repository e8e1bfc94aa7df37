"""Merges the ranks' spill files into the run's one trace."""

import json
import shutil
from pathlib import Path
from typing import Any

from rrfp.errors import RrfpError
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import RankRecords, Recording
from rrfp.trace.rundir import RunDir
from rrfp.trace.spill import is_being_written, read_spill


def encode_run(directory: Path) -> Path:
    """Merge the records of a finished run into its trace, remove them, and return the trace's path.

    Ranks without records are left out. Raises RrfpError if the run is still going, if a file is
    corrupt, or if no rank recorded anything; the records then stay.
    """
    run = RunDir(directory)
    spills = sorted(run.records.glob("rank-*.jsonl"))
    for spill in spills:
        if is_being_written(spill):
            raise RrfpError(f"the run in {directory} is still going; its trace comes when it ends")
    found = [records for spill in spills if (records := read_spill(spill)) is not None]
    if not found:
        raise RrfpError(f"no rank of the run in {directory} has recorded anything")
    found.sort(key=lambda records: records.info.rank)
    _align(found)
    write_trace(run.trace, Recording(_read_settings(run.run_json), found))
    shutil.rmtree(run.records, ignore_errors=True)
    return run.trace


def _read_settings(path: Path) -> dict[str, object]:
    """The run's settings; empty if its launcher died before it wrote them."""
    try:
        settings = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RrfpError(f"{path} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise RrfpError(f"{path} is not a JSON object")
    return settings


def _align(ranks: list[RankRecords]) -> None:
    """Move all times to the reference clock, counting from the run's first record."""
    starts_ns = [
        record[0] + records.info.clock_offset_ns
        for records in ranks
        for found in records.by_name().values()
        for record in found
    ]
    origin_ns = min(starts_ns, default=0)
    for records in ranks:
        shift_ns = records.info.clock_offset_ns - origin_ns
        for found in records.by_name().values():
            found[:] = [_shifted(record, shift_ns) for record in found]


def _shifted(record: Any, shift_ns: int) -> Any:
    """The record with its times (its first one or two fields) shifted."""
    num_times = 2 if hasattr(record, "end_ns") else 1
    times = (time_ns + shift_ns for time_ns in record[:num_times])
    return type(record)(*times, *record[num_times:])
