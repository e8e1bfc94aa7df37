"""Merges the ranks' spill files into the run's one trace."""

import shutil
from pathlib import Path
from typing import Any

from rrfp.errors import RrfpError
from rrfp.trace.outcome import why_without_records
from rrfp.trace.perfetto.reader import read_trace
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import RankRecords, Recording, num_times
from rrfp.trace.rundir import RunDir, update_latest
from rrfp.trace.sessions import description_of, joined
from rrfp.trace.spill import is_being_written, read_spill


def encode_run(directory: Path) -> Path:
    """Merge what the sessions of a run have recorded into their traces, and return the path of the
    run's: that of its one session, or of all of them joined.

    Raises RrfpError if the run is still going, if a file is corrupt, if no rank recorded anything,
    or if the sessions cannot be joined; the records of a session without a trace then stay.
    """
    sessions = RunDir(directory).sessions()
    recorded = [session for session in sessions if encode_session(session)]
    if not recorded:
        raise RrfpError(why_without_records(RunDir(directory)))
    if len(recorded) == 1:
        return recorded[0].trace
    whole = recorded[-1].joined_trace
    if not whole.exists():
        write_trace(whole, joined([read_trace(session.trace) for session in recorded]))
    return whole


def encode_session(run: RunDir) -> bool:
    """Merge one session's records into its trace, if that has not been done, and remove them.
    Returns whether there is a trace; raises RrfpError as `encode_run` does."""
    spills = sorted(run.records.glob("rank-*.jsonl"))
    for spill in spills:
        if is_being_written(spill):
            raise RrfpError(
                f"the run in {run.path} is still going ({spill.name} is being written), and the "
                "first command that opens it when it has ended makes its trace; follow it with "
                "'rrfp watch', or take another that 'rrfp runs' lists"
            )
    found = [records for spill in spills if (records := read_spill(spill)) is not None]
    if not found:
        return run.trace.exists()
    found.sort(key=lambda records: records.info.rank)
    _align(found)
    write_trace(run.trace, Recording(description_of(run), found))
    run.joined_trace.unlink(missing_ok=True)
    shutil.rmtree(run.records, ignore_errors=True)
    update_latest(run.path.parent)
    return True


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
    num = num_times(record)
    times = (time_ns + shift_ns for time_ns in record[:num])
    return type(record)(*times, *record[num:])
