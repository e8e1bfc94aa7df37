"""What the writer and the reader of traces agree on."""

from rrfp.trace.records import RECORD_TYPES

RUN = "run"
"""The name and category of the instant that holds the run's settings."""
RANK = "rank"
"""The category of the instant that holds a rank's place in the layout."""
END_MARK = "end of trace"
"""The name of the last event, which holds the number of records written."""

FIELDS = {
    name: tuple(
        (field, record_type.__annotations__[field] is str)
        for field in record_type._fields
        if field not in ("start_ns", "end_ns", "time_ns")
    )
    for name, record_type in RECORD_TYPES.items()
}
"""The annotations of each record type: the name, and whether it is a text."""
