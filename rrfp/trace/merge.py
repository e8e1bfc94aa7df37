"""Merges the ranks' spill files into the run's one trace.

The files are read twice, and never held in memory as a whole. The first time tells what the trace
must say before its records: when the run began, and which of its steps are kept on all ranks. The
second time the records go into the trace, some steps of all ranks at a time.
"""

import shutil
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from rrfp.errors import RrfpError
from rrfp.trace.completeness import description_of_trace, end_begun, flight_of, missing_from
from rrfp.trace.flight_record import MOST_RECORDS
from rrfp.trace.outcome import why_without_records
from rrfp.trace.perfetto.reader import read_trace
from rrfp.trace.perfetto.writer import trace_writer, write_trace
from rrfp.trace.records import RankRecords, num_times
from rrfp.trace.run_dir import RunDir, update_latest
from rrfp.trace.run_json import describe_recording
from rrfp.trace.sessions import joined
from rrfp.trace.spill import KeptSteps, SpilledRank, is_being_written, kept_steps, segments_in

_PART_BYTES = 2 << 20
"""Of all ranks' files that are in memory at a time; their records take twenty times as much."""


def encode_run(directory: Path, elsewhere: Path | None = None) -> Path:
    """Merge what the sessions of a run have recorded into their traces, and return the path of the
    run's: that of its one session, or of all of them joined. With `elsewhere`, traces that the run
    lacks are made in that directory, and the run is left as it is.

    Raises RrfpError if the run is still going, if a file is corrupt, if no rank recorded anything,
    or if the sessions cannot be joined; the records of a session without a trace then stay.
    """
    sessions = RunDir(directory).sessions()
    traces = [trace for session in sessions if (trace := _encoded(session, elsewhere)) is not None]
    if not traces:
        raise RrfpError(why_without_records(RunDir(directory)))
    if len(traces) == 1:
        return traces[0]
    whole = RunDir(elsewhere or directory).joined_trace
    if not whole.exists():
        write_trace(whole, joined([read_trace(trace) for trace in traces]))
    return whole


def encode_session(run: RunDir) -> bool:
    """Merge one session's records into its trace, if that has not been done, and remove them.
    Returns whether there is a trace; raises RrfpError as `encode_run` does."""
    return _encoded(run, None) is not None


def _encoded(run: RunDir, elsewhere: Path | None) -> Path | None:
    segments = segments_in(run.records)
    for segment in chain.from_iterable(segments.values()):
        if is_being_written(segment):
            raise RrfpError(
                f"the run in {run.path} is still going ({segment.name} is being written), and the "
                "first command that opens it when it has ended makes its trace; follow it with "
                "'rrfp watch', or take another that 'rrfp runs' lists"
            )
    ranks = [rank for paths in segments.values() if (rank := SpilledRank.of(paths)) is not None]
    if not ranks:
        return run.trace if run.trace.exists() else None
    if elsewhere is not None:
        trace = RunDir(elsewhere, run.session).trace
        _merge(run, ranks, trace)
        return trace
    describe_recording(run, _merge(run, ranks, run.trace))
    run.joined_trace.unlink(missing_ok=True)
    shutil.rmtree(run.records, ignore_errors=True)
    update_latest(run.path.parent)
    return run.trace


def _merge(run: RunDir, ranks: Sequence[SpilledRank], trace: Path) -> dict[str, Any]:
    """Write the trace of a session, and return its description."""
    description = description_of_trace(run)
    recovered = [_surveyed(run, rank, description) for rank in ranks]
    kept = kept_steps([rank.ended_steps for rank in ranks if rank.begins_late])
    if kept is not None:
        description |= kept.described(description)
    first_ns = min(
        (
            each_ns + rank.info.clock_offset_ns
            for rank, records in zip(ranks, recovered, strict=True)
            for each_ns in (rank.first_ns, _first_ns(records))
            if each_ns is not None
        ),
        default=0,
    )
    last_ns = max(
        max(rank.last_ns, _last_ns(records)) + rank.info.clock_offset_ns
        for rank, records in zip(ranks, recovered, strict=True)
    )
    for records in recovered:
        end_begun(records, last_ns - records.info.clock_offset_ns)
        _leave(records, kept)
    shifts_ns = [rank.info.clock_offset_ns - first_ns for rank in ranks]
    infos = [rank.info for rank in ranks]
    with trace_writer(trace, description, infos, shifts_ns) as writer:
        for part in _parts(ranks, kept):
            writer.write(part, is_last=False)
        writer.write(recovered, is_last=True)
    return description


def _surveyed(run: RunDir, rank: SpilledRank, description: dict[str, Any]) -> RankRecords:
    """Find out what a rank has spilled, and return what only its flight record holds."""
    flight = flight_of(run, rank.info.rank, description)
    recent = rank.survey(MOST_RECORDS if flight is not None else 0)
    return RankRecords(rank.info) if flight is None else missing_from(recent, flight)


def _parts(ranks: Sequence[SpilledRank], kept: KeptSteps | None) -> Iterator[list[RankRecords]]:
    """The records that are kept, some flushes of all ranks at a time."""
    num_bytes = sum(rank.num_bytes for rank in ranks)
    num_flushes = max(rank.num_flushes for rank in ranks)
    num_of_a_part = max(1, num_flushes * _PART_BYTES // max(1, num_bytes))
    by_rank = [rank.parts(num_of_a_part) for rank in ranks]
    for part in zip_longest(*by_rank):
        records = [
            RankRecords(rank.info) if each is None else each
            for rank, each in zip(ranks, part, strict=True)
        ]
        for each in records:
            _leave(each, kept)
        yield records


def _leave(records: RankRecords, kept: KeptSteps | None) -> None:
    """Leave only what is kept."""
    if kept is not None:
        for found in records.by_name().values():
            found[:] = [record for record in found if kept.has(record.step)]


def _first_ns(records: RankRecords) -> int | None:
    """When the first of these records began."""
    return min(
        (record[0] for found in records.by_name().values() for record in found), default=None
    )


def _last_ns(records: RankRecords) -> int:
    """When the last of these records ended."""
    return max(
        (record[num_times(record) - 1] for found in records.by_name().values() for record in found),
        default=0,
    )
