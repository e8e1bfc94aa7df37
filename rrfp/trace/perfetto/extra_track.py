"""A track that a viewer shows beside those of a trace, and that is not part of the trace.

Perfetto reads concatenated traces as one, so what is encoded here is appended to a trace's bytes on
their way to a viewer; the file stays as it was recorded.
"""

from collections.abc import Iterable
from io import BytesIO
from typing import NamedTuple

from rrfp.trace.perfetto.packets import PacketWriter, notes_of

_SEQUENCE = 1 << 30
"""Beyond those of any trace of ours, which has one a rank."""
_FIRST_TRACK = 1 << 40
"""Likewise beyond its tracks."""
_GROUP = "analysis"
_CATEGORY = "derived"


class Slice(NamedTuple):
    """A slice of the track; slices neither overlap nor go back in time."""

    start_ns: int
    end_ns: int
    name: str
    notes: tuple[tuple[str, int | str], ...]


def encode_track(name: str, slices: Iterable[Slice]) -> bytes:
    """The packets of a track of that name, above all others; empty without slices."""
    file = BytesIO()
    out = PacketWriter(file, first_track=_FIRST_TRACK)
    track = None
    for each in slices:
        if track is None:
            out.go_to_sequence(_SEQUENCE)
            # A track without a group would be filed under the viewer's "Global Track Events".
            track = out.track((-1, _GROUP), (0, name))
        notes = notes_of(each.notes)
        out.slice(each.start_ns, each.end_ns, track, each.name, _CATEGORY, notes)
    out.flush()
    return file.getvalue()
