"""How much of a disk a run may take for what it records."""

from rrfp.trace.ending.flight import FILE_BYTES

DEFAULT_TRACE_MB = 2048
LEAST_MB_OF_A_RANK = 8
"""Room for a rank's flight record, and for some steps."""
_TRACE_PER_RECORDS = 5
"""At most: a trace takes three to five times as much as the records that it is made of."""


def records_bytes(trace_mb: int | None, num_ranks: int) -> int:
    """The most bytes of records that each rank keeps, so that they and their trace, of which there
    are both for a moment, take `trace_mb` MiB in all. None means the default; a rank needs some
    room in any case."""
    least_mb = LEAST_MB_OF_A_RANK * num_ranks
    most_bytes = max(trace_mb or DEFAULT_TRACE_MB, least_mb) << 20
    return (most_bytes // num_ranks - FILE_BYTES) // (1 + _TRACE_PER_RECORDS)
