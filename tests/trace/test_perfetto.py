"""A trace is its recording, exactly, in a form that any reader of Perfetto's format understands."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from rrfp.errors import RrfpError
from rrfp.trace.perfetto import reader as perfetto_reader
from rrfp.trace.perfetto.format import (
    MAX_SKIPPED_NAMED,
    HintedDispatch,
    assign_rows,
    bounds_of,
    compare_with_hint,
)
from rrfp.trace.perfetto.protobuf import DecodeError, Spans, buffer_of, find, read_fields
from rrfp.trace.perfetto.reader import read_contents, read_trace
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import RECORD_TYPES, RankInfo, RankRecords, Recording, TaskRecord
from tests.analyze.recordings import make_recording
from tests.analyze.simulated_runs import random_times, simulated_case
from tests.properties.cases import Case, cases, examples

_BEGIN, _END = pb.TrackEvent.TYPE_SLICE_BEGIN, pb.TrackEvent.TYPE_SLICE_END

_numbers = st.integers(-(2**63), 2**63 - 1)
_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)


def _records(record_type: Any) -> st.SearchStrategy[Any]:
    fields = [_field(name, kind) for name, kind in record_type.__annotations__.items()]
    return st.builds(lambda values: record_type(*values), st.tuples(*fields))


def _field(name: str, kind: type) -> st.SearchStrategy[Any]:
    if kind is str:
        return _texts
    return st.integers(0, 65_535) if name == "peer" else st.integers(*bounds_of(name))


@st.composite
def _ranks(draw: st.DrawFn, rank: int) -> RankRecords:
    stages = tuple(draw(st.lists(st.integers(0, 99), min_size=1, max_size=3)))
    places = draw(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 3)))
    info = RankInfo(
        rank, *places, stages, draw(_texts), draw(_numbers), draw(_numbers), draw(_numbers)
    )
    records = RankRecords(info)
    for name, found in records.by_name().items():
        found += draw(st.lists(_records(RECORD_TYPES[name]), max_size=3))
    return records


_settings = st.dictionaries(
    _texts, st.none() | st.booleans() | _numbers | st.floats(allow_nan=False) | _texts, max_size=3
)
_recordings = st.builds(
    lambda run_settings, ranks: Recording(run_settings, list(ranks)),
    _settings,
    st.integers(0, 3).flatmap(lambda num: st.tuples(*(_ranks(rank) for rank in range(num)))),
)


@settings(max_examples=60, deadline=None)
@given(_recordings)
def test_a_recording_is_read_exactly_as_written(recording: Recording) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.pftrace"
        write_trace(path, recording)
        assert read_contents(path).recording == recording
        assert list(Path(folder).iterdir()) == [path]


def _packets(path: Path) -> list[Any]:
    return list(pb.Trace.FromString(path.read_bytes()).packet)


@pytest.fixture
def packets(tmp_path: Path) -> list[Any]:
    """The packets of a run of three ranks."""
    path = tmp_path / "trace.pftrace"
    write_trace(path, make_recording(3, 4, 2))
    return _packets(path)


def _paths(packets: list[Any]) -> dict[int, tuple[str, ...]]:
    """The names from the top to each track."""
    paths: dict[int, tuple[str, ...]] = {0: ()}
    for packet in packets:
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            assert not track.HasField("process")
            assert track.child_ordering == pb.TrackDescriptor.EXPLICIT
            paths[track.uuid] = (*paths[track.parent_uuid], track.name)
    return paths


def _events(packets: list[Any], event_type: int) -> list[Any]:
    return [p for p in packets if p.HasField("track_event") and p.track_event.type == event_type]


def test_tracks_nest_as_pipeline_stage_and_what_happens_there(packets: list[Any]) -> None:
    paths = set(_paths(packets).values())
    for stage in ("stage 0", "stage 1", "stage 2"):
        for name in ("compute", "wait", "send", "receive", "counters", "phases"):
            assert ("pipeline", stage, name) in paths
        for name in ("stimuli", "recording"):
            assert ("pipeline", stage, "details", name) in paths
        for name in ("D", "held", "ready forwards", "ready backwards"):
            assert ("pipeline", stage, "counters", name) in paths
    assert ("pipeline", "stage 1", "send", "send to stage 2") in paths
    assert ("pipeline", "stage 1", "receive", "receive from stage 0") in paths


def test_siblings_stand_in_order(packets: list[Any]) -> None:
    paths = _paths(packets)
    places = {
        paths[p.track_descriptor.uuid]: p.track_descriptor.sibling_order_rank
        for p in packets
        if p.HasField("track_descriptor")
    }
    assert places["pipeline",] < places["run",]
    stages = [places["pipeline", f"stage {stage}"] for stage in range(3)]
    assert stages == sorted(set(stages))
    below = [
        places["pipeline", "stage 1", name]
        for name in ("compute", "wait", "send", "receive", "counters")
    ]
    assert below == sorted(set(below))


def test_every_sequence_begins_with_cleared_state(packets: list[Any]) -> None:
    first: dict[int, Any] = {}
    for packet in packets:
        first.setdefault(packet.trusted_packet_sequence_id, packet)
    assert len(first) == 4
    for packet in first.values():
        assert packet.sequence_flags == pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED


def test_a_task_says_what_it_is(packets: list[Any]) -> None:
    names = {"kind", "stage", "chunk", "microbatch", "step", "rank", "hint_position"}
    names |= {"ready", "skipped"}
    tasks = [
        packet.track_event
        for packet in _events(packets, pb.TrackEvent.TYPE_SLICE_BEGIN)
        if packet.track_event.name[0] in "FBW"
    ]
    assert len(tasks) == 3 * 2 * 4 * 2
    for task in tasks:
        notes = {note.name: note for note in task.debug_annotations}
        assert names <= notes.keys()
        assert task.name == f"{notes['kind'].string_value}{notes['microbatch'].int_value}"
        assert notes["rank"].int_value == notes["stage"].int_value


def _row(packets: list[Any], name: str) -> list[tuple[str, int, int]]:
    """The slices of the tracks of that name: their names, begins and ends."""
    paths = _paths(packets)
    found, begun = [], {}
    for packet in packets:
        track = packet.track_event.track_uuid
        if not packet.HasField("track_event") or paths[track][-1] != name:
            continue
        if packet.track_event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
            begun[track] = packet
        else:
            begin = begun.pop(track)
            found.append((begin.track_event.name, begin.timestamp, packet.timestamp))
    assert begun == {}
    return found


def _backwards(recording: Recording) -> Recording:
    """The same run, whose hint had every step the other way round."""
    for records in recording.ranks:
        num_tasks = len([task for task in records.tasks if task.step == 0])
        records.tasks = [
            task._replace(hint_position=num_tasks - 1 - task.hint_position)
            for task in records.tasks
        ]
    return recording


def test_the_order_of_the_hint_lies_under_the_order_that_happened(tmp_path: Path) -> None:
    path = tmp_path / "trace.pftrace"
    write_trace(path, _backwards(make_recording(1, 6, 1)))
    packets = _packets(path)
    ran, hinted = _row(packets, "compute"), _row(packets, "hint")
    assert [name for name, *_ in hinted] == [f"hint {name}" for name, *_ in reversed(ran)]
    assert [times for _, *times in hinted] == [times for _, *times in ran]


def test_a_task_names_those_that_it_skipped(tmp_path: Path) -> None:
    path = tmp_path / "trace.pftrace"
    recording = _backwards(make_recording(1, 6, 1))
    write_trace(path, recording)
    skipped = [
        {note.name: note.string_value for note in packet.track_event.debug_annotations}.get(
            "skipped_tasks"
        )
        for packet in _events(_packets(path), pb.TrackEvent.TYPE_SLICE_BEGIN)
        if packet.track_event.categories == ["task"]
    ]
    assert skipped[0] == "B5 F5 B4 F4 B3 F3 B2 F2 ..."
    assert skipped[-3:] == ["B5 F5", "B5", None]
    assert read_trace(path) == recording


def test_a_hint_that_is_not_known_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "trace.pftrace"
    recording = make_recording(2, 2, 1)
    first = recording.ranks[0]
    first.tasks = [task._replace(hint_position=-1, skipped=-1) for task in first.tasks]
    write_trace(path, recording)
    paths = set(_paths(_packets(path)).values())
    assert ("pipeline", "stage 1", "hint") in paths
    assert ("pipeline", "stage 0", "hint") not in paths


def test_the_chunk_is_in_the_name_when_there_are_chunks(tmp_path: Path) -> None:
    recording = make_recording(2, 1, 1)
    info = recording.ranks[0].info
    recording.ranks[0].info = RankInfo(0, 0, 0, 0, (0, 3), info.host, info.pid)
    path = tmp_path / "trace.pftrace"
    write_trace(path, recording)
    packets = _packets(path)
    names = {p.track_event.name for p in _events(packets, pb.TrackEvent.TYPE_SLICE_BEGIN)}
    assert {"F0.0", "B0.0", "send F0"} <= names
    assert ("pipeline", "stages 0 3", "compute") in _paths(packets).values()


def test_replicas_have_a_pipeline_each(tmp_path: Path) -> None:
    recording = make_recording(2, 1, 1)
    recording.ranks[1].info = RankInfo(1, 0, 1, 0, (0,), "node", 8)
    path = tmp_path / "trace.pftrace"
    write_trace(path, recording)
    tops = {path[0] for path in _paths(_packets(path)).values() if path}
    assert tops == {"run", "pipeline dp0 tp0", "pipeline dp0 tp1"}


def test_an_arrow_goes_from_send_to_receive_to_task(packets: list[Any]) -> None:
    begins = _events(packets, pb.TrackEvent.TYPE_SLICE_BEGIN)
    ends = [e.track_event for e in begins if e.track_event.terminating_flow_ids]
    passed: dict[int, list[Any]] = {}
    for packet in begins:
        for flow_id in packet.track_event.flow_ids:
            passed.setdefault(flow_id, []).append(packet)
    assert len(passed) == 2 * 2 * 4 * 2
    assert sorted(i for task in ends for i in task.terminating_flow_ids) == sorted(passed)
    for task in ends:
        (flow_id,) = task.terminating_flow_ids
        send, receive = sorted(passed[flow_id], key=lambda packet: int(packet.timestamp))
        assert send.track_event.name == f"send {task.name}"
        assert receive.track_event.name == f"recv {task.name}"


def test_events_of_an_arrow_are_written_in_its_direction(packets: list[Any]) -> None:
    """A viewer takes events of the same time in the order of the file."""
    places: dict[str, list[int]] = {}
    for place, packet in enumerate(_events(packets, pb.TrackEvent.TYPE_SLICE_BEGIN)):
        places.setdefault(packet.track_event.categories[0], []).append(place)
    assert max(places["send"]) < min(places["receive"])
    assert max(places["receive"]) < min(places["task"])


def test_stages_have_their_first_events_in_order(packets: list[Any]) -> None:
    """A viewer pins tracks in the order in which it met them, by time."""
    first: dict[str, Any] = {}
    paths = _paths(packets)
    events = [packet for packet in packets if packet.HasField("track_event")]
    for packet in sorted(events, key=lambda packet: int(packet.timestamp)):
        _, stage, *_ = *paths[packet.track_event.track_uuid], ""
        first.setdefault(stage, packet)
    assert [stage for stage in first if stage.startswith("stage")] == [
        "stage 0",
        "stage 1",
        "stage 2",
    ]


def test_a_negative_time_is_an_error(tmp_path: Path) -> None:
    recording = make_recording(1, 1, 1)
    recording.ranks[0].tasks[0] = recording.ranks[0].tasks[0]._replace(start_ns=-1)
    with pytest.raises(ValueError, match="must not be negative"):
        write_trace(tmp_path / "trace.pftrace", recording)


def test_slices_of_a_track_do_not_overlap(packets: list[Any]) -> None:
    running: dict[int, int] = {}
    events = [p for p in packets if p.HasField("track_event")]
    for packet in sorted(events, key=lambda p: int(p.timestamp)):
        track = packet.track_event.track_uuid
        if packet.track_event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
            running[track] = running.get(track, 0) + 1
        elif packet.track_event.type == pb.TrackEvent.TYPE_SLICE_END:
            running[track] -= 1
        assert running.get(track, 0) in (0, 1)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=12))
def test_rows_have_no_overlaps_and_are_as_few_as_possible(spans: list[tuple[int, int]]) -> None:
    intervals = [(start, start + length) for start, length in spans]
    lanes = assign_rows(intervals)
    deepest = 0
    for time in range(41):
        here = [
            lane for lane, (start, end) in zip(lanes, intervals, strict=True) if start <= time < end
        ]
        assert len(here) == len(set(here))
        deepest = max(deepest, len(here))
    assert len(set(lanes)) == deepest


def test_unknown_packets_and_events_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "trace.pftrace"
    recording = make_recording(2, 2, 1)
    write_trace(path, recording)
    trace = pb.Trace.FromString(path.read_bytes())
    trace.packet.add(timestamp=5).clock_snapshot.SetInParent()
    foreign = trace.packet.add(timestamp=5, trusted_packet_sequence_id=99).track_event
    foreign.type = pb.TrackEvent.TYPE_INSTANT
    foreign.name = "F0"
    path.write_bytes(trace.SerializeToString())
    assert read_trace(path) == recording


def test_bad_files_get_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "trace.pftrace"
    with pytest.raises(RrfpError, match="could not be read: No such file"):
        read_trace(path)
    with pytest.raises(RrfpError, match="could not be read"):
        read_trace(tmp_path)
    for content, fact in (
        (b"", "is empty"),
        (b"hello, world", "is not an uncompressed Perfetto trace"),
        (b"\x1f\x8b\x08\x00", "is not an uncompressed Perfetto trace"),
        (b"\x0a\x02\xff\xff", "is not an uncompressed Perfetto trace"),
        (b"\x0a\xff\xff\xff\xff\xff\xff", "is not an uncompressed Perfetto trace"),
        (b"\x0a\xff", "is truncated"),
        (b"\x0a\x02\x40\x05", "is a Perfetto trace, but not one of an rrfp run"),
    ):
        path.write_bytes(content)
        with pytest.raises(RrfpError, match=fact):
            read_trace(path)


def test_a_trace_cut_anywhere_gets_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "trace.pftrace"
    write_trace(path, make_recording(2, 1, 1))
    whole = path.read_bytes()
    for num_bytes in range(len(whole) - 1, 0, -37):
        path.write_bytes(whole[:num_bytes])
        with pytest.raises(RrfpError, match=r"truncated|not one of an rrfp run"):
            read_trace(path)


def test_a_trace_cut_between_packets_is_truncated_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.pftrace"
    write_trace(path, make_recording(2, 1, 1))
    trace = pb.Trace.FromString(path.read_bytes())
    del trace.packet[-2:]
    path.write_bytes(trace.SerializeToString())
    with pytest.raises(RrfpError, match="is truncated: its last events are missing"):
        read_trace(path)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.pftrace"
    write_trace(path, make_recording(2, 1, 1))
    trace = pb.Trace.FromString(path.read_bytes())
    begin = next(p for p in trace.packet if p.track_event.name == "F0")
    del begin.track_event.debug_annotations[0]
    path.write_bytes(trace.SerializeToString())
    with pytest.raises(RrfpError, match="has a damaged task 'F0'"):
        read_trace(path)


def test_a_folder_that_is_missing_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RrfpError, match="could not be written"):
        write_trace(tmp_path / "none" / "trace.pftrace", make_recording(1, 1, 1))


@pytest.mark.parametrize("batch", [1, 150, 1 << 20])
def test_slices_that_nest_or_end_late_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """Other tools write a slice's end where it ends, behind slices of its own and other tracks."""
    path = tmp_path / "trace.pftrace"
    recording = make_recording(2, 3, 1)
    write_trace(path, recording)
    trace = pb.Trace.FromString(path.read_bytes())
    head = [p for p in trace.packet if p.track_event.type not in (_BEGIN, _END)]
    slices = [p for p in trace.packet if p.track_event.type in (_BEGIN, _END)]
    # Begins in order of time, and ends last first: of one track they nest then.
    late = [p for p in slices if p.track_event.type == _BEGIN]
    late += reversed([p for p in slices if p.track_event.type == _END])
    mark = head.pop()
    path.write_bytes(pb.Trace(packet=[*head, *late, mark]).SerializeToString())
    monkeypatch.setattr(perfetto_reader, "_NUM_BYTES_OF_A_BATCH", batch)
    read = read_trace(path)
    for found, written in zip(read.ranks, recording.ranks, strict=True):
        for name, records in written.by_name().items():
            assert sorted(found.by_name()[name]) == sorted(records)


def test_a_trace_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.pftrace"
    write_trace(path, make_recording(2, 3, 1))
    trace = pb.Trace.FromString(path.read_bytes())
    (version,) = (
        note
        for packet in trace.packet
        for note in packet.track_event.debug_annotations
        if note.name == "version"
    )
    version.int_value = 7
    path.write_bytes(trace.SerializeToString())
    with pytest.raises(RrfpError, match="is of version 7, and this rrfp reads up to 3; update"):
        read_trace(path)


@pytest.mark.parametrize("text", ["a\0", "\x01", "", "b", "\0" * 9])
def test_texts_of_any_characters_stay_different(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.pftrace"
    recording = make_recording(2, 3, 1)
    waits = recording.ranks[0].waits
    waits[:] = [
        wait._replace(cause=cause)
        for wait, cause in zip(waits, ["b", text, "", "b"] * 9, strict=False)
    ]
    write_trace(path, recording)
    assert read_trace(path) == recording


def test_a_lone_surrogate_becomes_a_question_mark(tmp_path: Path) -> None:
    """JSON may hold such halves, and names of files, too."""
    path = tmp_path / "trace.pftrace"
    recording = make_recording(2, 3, 1)
    records = recording.ranks[0]
    records.info = replace(records.info, host="a\ud800b")
    records.waits[0] = records.waits[0]._replace(cause="\udcff")
    write_trace(path, recording)
    found = read_trace(path).ranks[0]
    assert (found.info.host, found.waits[0].cause) == ("a?b", "?")


# The fields of many messages at once are those that protobuf's own parser finds in each.


_short_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_notes = st.builds(
    lambda name, value: pb.DebugAnnotation(name=name, **value),
    _short_texts,
    st.one_of(
        st.builds(lambda x: {"int_value": x}, st.integers(-(2**63), 2**63 - 1)),
        st.builds(lambda x: {"string_value": x}, _short_texts),
        st.builds(lambda x: {"double_value": x}, st.floats(allow_nan=False)),
    ),
)
_any_event = st.builds(
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


@given(st.lists(_any_event, max_size=6))
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


@given(
    st.lists(_short_texts, max_size=8), st.lists(_short_texts, min_size=1, max_size=8, unique=True)
)
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
def test_bytes_that_are_not_a_message_are_an_error(octets: bytes) -> None:
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


# What the hint wanted in the place of each dispatch, and what each dispatch skipped.


def _tasks(*positions: int, step: int = 0) -> list[TaskRecord]:
    """Tasks whose microbatch is their place in the hint, dispatched in this order."""
    return [
        TaskRecord(10 * place, 10 * place + 9, step, "F", 0, 0, position, position, *[0] * 6)
        for place, position in enumerate(positions)
    ]


def _known(tasks: Sequence[TaskRecord]) -> list[HintedDispatch]:
    return [dispatch for dispatch in compare_with_hint(tasks) if dispatch is not None]


def test_a_dispatch_has_the_task_in_the_hints_order() -> None:
    dispatches = _known(_tasks(2, 0, 3, 1))
    assert [each.wanted.microbatch for each in dispatches] == [0, 1, 2, 3]
    assert [each.wanted_place for each in dispatches] == [1, 3, 0, 2]
    assert [[task.microbatch for task in each.skipped] for each in dispatches] == [
        [0, 1],
        [],
        [1],
        [],
    ]


def test_steps_are_apart_and_one_that_was_cut_short_is_compared_as_far_as_it_ran() -> None:
    dispatches = _known([*_tasks(1, 0), *_tasks(7, 3, step=1)])
    assert [each.wanted.hint_position for each in dispatches] == [0, 1, 3, 7]
    assert [len(each.skipped) for each in dispatches] == [1, 0, 1, 0]


def test_a_step_whose_hint_is_not_known_is_passed_over() -> None:
    assert compare_with_hint([*_tasks(-1, -1), *_tasks(0, step=1)])[:2] == [None, None]
    assert len(_known([*_tasks(-1, -1), *_tasks(0, step=1)])) == 1


def test_at_most_one_more_task_is_listed_than_named() -> None:
    first, *_ = _known(_tasks(20, *range(20)))
    assert [task.microbatch for task in first.skipped] == list(range(MAX_SKIPPED_NAMED + 1))


@examples(quick=20, thorough=300)
@given(cases())
def test_as_many_tasks_are_named_as_the_dispatcher_counted(case: Case) -> None:
    recording = simulated_case(case, random_times(random.Random(case.seed), case.shape))
    for records in recording.ranks:
        dispatches = _known(records.tasks)
        assert len(dispatches) == len(records.tasks)
        for task, dispatch in zip(records.tasks, dispatches, strict=True):
            assert len(dispatch.skipped) == min(task.skipped, MAX_SKIPPED_NAMED + 1)
        wanted = [each.wanted.hint_position for each in dispatches]
        assert wanted == sorted(task.hint_position for task in records.tasks)
