"""What the writer and the reader of traces agree on."""

from rrfp.trace.records import RECORD_TYPES
from rrfp.trace.steps import STEP

VERSION = 3
"""The format version that is written. The reader refuses later ones and reads all earlier ones:
version 1 numbers evaluations among the training steps, and up to version 2 nobody says what a rank
never ended."""
RUN = "run"
"""The name and category of the instant that holds the run's settings."""
RANK = "rank"
"""The category of the instant that holds a rank's place in the layout."""
HINT = "hint"
"""The category of the slices that show what the hint wanted. They are derived, not records."""
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
"""The annotations of each record type: the name, and whether it is text. An evaluation has
`evaluation`, its number, instead of `step`."""

MOST_OF_A_KIND = 1 << 20
"""No run has more ranks, stages or microbatches. Readers allocate lists of these sizes, so a
damaged trace must not claim more."""
_PLACES = ("stage", "chunk", "microbatch", "peer", "member")
_MOST_NS = 1 << 53
"""104 days; sums of such times still fit."""
_MOST_STEPS = 1 << 53


def bounds_of(field: str) -> tuple[int, int]:
    """The range of a record's number; a value outside it means damage. -1 stands for none."""
    if field in ("start_ns", "end_ns", "time_ns"):
        return 0, _MOST_NS
    if field == STEP:
        return -_MOST_STEPS, _MOST_STEPS
    if field == "expected_in_ns":
        return -_MOST_NS, _MOST_NS
    return -1, MOST_OF_A_KIND if field in _PLACES else 1 << 53
