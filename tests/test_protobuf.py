"""The fields of many messages at once are those that protobuf's own parser finds in each."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from rrfp.trace.perfetto.protobuf import DecodeError, Spans, buffer_of, find, read_fields

_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_notes = st.builds(
    lambda name, value: pb.DebugAnnotation(name=name, **value),
    _texts,
    st.one_of(
        st.builds(lambda x: {"int_value": x}, st.integers(-(2**63), 2**63 - 1)),
        st.builds(lambda x: {"string_value": x}, _texts),
        st.builds(lambda x: {"double_value": x}, st.floats(allow_nan=False)),
    ),
)
_events = st.builds(
    lambda notes, flows, track: pb.TrackEvent(
        debug_annotations=notes, flow_ids=flows, track_uuid=track
    ),
    st.lists(_notes, max_size=4),
    st.lists(st.integers(0, 2**64 - 1), max_size=3),
    st.integers(0, 2**64 - 1),
)


def _spans(encoded: list[bytes]) -> Spans:
    ends = np.cumsum([0, *map(len, encoded)])
    return Spans(ends[:-1], ends[1:])


@given(st.lists(_events, max_size=6))
def test_fields_are_those_of_the_messages(events: list[Any]) -> None:
    encoded = [event.SerializeToString() for event in events]
    octets = b"".join(encoded)
    data = buffer_of(octets)
    fields = read_fields(data, _spans(encoded))
    number = {field.name: field.number for field in pb.TrackEvent.DESCRIPTOR.fields}
    tracks = fields.last(number["track_uuid"], len(events)).view(np.uint64)
    assert tracks.tolist() == [event.track_uuid for event in events]
    flows = fields.of(number["flow_ids"])
    for index, event in enumerate(events):
        assert flows.values[flows.owners == index].view(np.uint64).tolist() == list(event.flow_ids)
    notes = fields.of(number["debug_annotations"])
    found = [
        [octets[a:b] for a, b in zip(*notes.take(rows).spans, strict=True)]
        for rows in (np.flatnonzero(notes.owners == index) for index in range(len(events)))
    ]
    assert found == [[x.SerializeToString() for x in e.debug_annotations] for e in events]


@given(st.lists(_texts, max_size=8), st.lists(_texts, min_size=1, max_size=8, unique=True))
def test_a_text_is_found_among_names(texts: list[str], names: list[str]) -> None:
    known = tuple(name for name in names if len(name.encode()) <= 16) or ("F",)
    encoded = [text.encode() for text in [*texts, *known]]
    found = find(buffer_of(b"".join(encoded)), _spans(encoded), known)
    expected = [known.index(text) if text in known else -1 for text in [*texts, *known]]
    assert found.tolist() == expected


@pytest.mark.parametrize(
    "octets",
    [
        b"\x08",
        b"\x08\x80",
        b"\x08" + b"\x80" * 10 + b"\x01",
        b"\x0a\x05abc",
        b"\x0a" + b"\xff" * 9 + b"\x01",
        b"\x09\x01\x02",
        b"\x0d\x01",
        b"\x0b\x0c",
        b"\x0f",
    ],
    ids=[
        "no value",
        "cut number",
        "long number",
        "cut text",
        "huge text",
        "cut 64",
        "cut 32",
        "a group",
        "no such type",
    ],
)
def test_what_is_no_message_is_told(octets: bytes) -> None:
    with pytest.raises(DecodeError):
        read_fields(buffer_of(octets), _spans([octets]))
    with pytest.raises(DecodeError):
        read_fields(buffer_of(octets), _spans([b"\x08\x01", octets]))


@given(st.binary(max_size=40))
def test_any_bytes_are_fields_or_no_message(octets: bytes) -> None:
    try:
        fields = read_fields(buffer_of(octets), _spans([octets]))
    except DecodeError:
        return
    assert (fields.spans.ends <= len(octets)).all()


def test_a_message_of_more_fields_than_any_has_is_refused() -> None:
    """Each field takes a round, so that a message of a megabyte would take half a minute."""
    data = b"\x08\x01" * 500_000
    with pytest.raises(DecodeError):
        read_fields(buffer_of(data), Spans(np.array([0]), np.array([len(data)])))
