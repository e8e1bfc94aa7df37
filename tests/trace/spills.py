"""Reads a whole spill file, for tests and benchmarks."""

from pathlib import Path

from rrfp.trace.records import RankRecords
from rrfp.trace.spill import add_flush, header_of, iter_lines


def read_spill(path: Path) -> RankRecords | None:
    """All records in a spill file, on the rank's own clock; None if the rank died before its header
    was complete. Raises RrfpError, with the line, for corruption other than a torn last line."""
    lines = iter_lines(path)
    first = next(lines, None)
    if first is None:
        return None
    records = RankRecords(header_of(path, first.value))
    lists = records.by_name()
    for line in lines:
        add_flush(path, line.number, line.value, lists)
    return records
