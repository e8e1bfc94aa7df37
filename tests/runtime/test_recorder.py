"""The recorder: nothing is lost between threads, and no failure reaches the training."""

import errno
import logging
import multiprocessing
import os
import signal
import struct
import threading
import time
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.runtime.recorder import Recorder
from rrfp.schedule.tasks import Cause
from rrfp.trace import flight_record as flight
from rrfp.trace.flight_record import FILE_BYTES, Flight, FlightRing, read_flight, ring_of
from rrfp.trace.perfetto.format import bounds_of
from rrfp.trace.records import (
    RECORD_TYPES,
    BegunRecord,
    Doing,
    RankInfo,
    Record,
    SendRecord,
    TaskRecord,
    WaitRecord,
    num_times,
)
from rrfp.trace.spill import SpillWriter
from tests.trace.test_spill import read_spill

INFO = RankInfo(0, 0, 0, 0, (0,), "node", 7)


def _waits(path: Path) -> list[WaitRecord]:
    records = read_spill(path)
    assert records is not None
    return records.waits


def test_a_flush_writes_what_was_recorded_and_its_cost(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    recorder = Recorder(path, INFO, clock=count().__next__)
    first, second = WaitRecord(0, 1, 0, "drain"), WaitRecord(2, 3, 1, "drain")
    recorder.record(first)
    recorder.flush(0)
    assert _waits(path) == [first]
    recorder.record(second)
    recorder.flush(1)
    recorder.close()
    records = read_spill(path)
    assert records is not None
    assert records.waits == [first, second]
    assert [(cost.step, cost.num_records) for cost in records.costs] == [(0, 1), (1, 2)]
    assert 0 < records.costs[0].cost_ns < records.costs[1].cost_ns <= recorder.cost_ns


def test_closing_writes_what_came_after_the_last_flush(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    recorder = Recorder(path, INFO)
    late = WaitRecord(0, 1, 4, "drain")
    recorder.flush(4)
    recorder.record(late)
    recorder.close()
    recorder.close()
    assert _waits(path) == [late]


def test_without_a_path_nothing_is_recorded() -> None:
    recorder = Recorder(None, INFO)
    recorder.record(WaitRecord(0, 1, 0, "drain"))
    recorder.flush(0)
    recorder.close()
    assert not recorder.is_on
    assert recorder.cost_ns == 0


def test_no_record_is_lost_between_threads(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    recorder = Recorder(path, INFO)

    def record(thread: int) -> None:
        for number in range(2000):
            recorder.record(WaitRecord(number, number, thread, "drain"))

    threads = [threading.Thread(target=record, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        recorder.flush(0)
    for thread in threads:
        thread.join(timeout=30)
    recorder.close()
    found = _waits(path)
    for number in range(3):
        assert [w.start_ns for w in found if w.step == number] == list(range(2000))


def test_what_a_step_has_no_room_for_is_counted_and_later_steps_are_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rank-0.jsonl"
    recorder = Recorder(path, INFO, capacity=3)
    counts = {0: 3, 1: 5, 2: 2, 3: 4}
    with caplog.at_level(logging.WARNING):
        for step, count in counts.items():
            for number in range(count):
                recorder.record(WaitRecord(number, number, step, "drain"))
            recorder.flush(step)
        recorder.close()
    records = read_spill(path)
    assert records is not None
    assert [(wait.step, wait.start_ns) for wait in records.waits] == [
        (step, number) for step, count in counts.items() for number in range(min(count, 3))
    ]
    assert [loss[1:] for loss in records.losses] == [(1, 2), (3, 1)]
    assert [cost.num_records for cost in records.costs] == [3, 6, 8, 11]
    assert [record.message for record in caplog.records] == [
        "step 1 recorded more than 3 records on this rank; its last 2 are lost, and the trace "
        "counts what later steps lose"
    ]


def test_what_several_threads_lose_is_counted_whole(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    recorder = Recorder(path, INFO, capacity=100)

    def record() -> None:
        for number in range(3000):
            recorder.record(WaitRecord(number, number, 0, "drain"))

    threads = [threading.Thread(target=record) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        recorder.flush(0)
    recorder.flush(0)
    recorder.close()
    records = read_spill(path)
    assert records is not None
    assert len(records.waits) + sum(loss.num_lost for loss in records.losses) == 9000


def test_a_full_disk_switches_recording_off_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rank-0.jsonl"
    recorder = Recorder(path, INFO)
    recorder.record(WaitRecord(0, 1, 0, "drain"))
    recorder.flush(0)

    def refuse(self: SpillWriter, rows: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SpillWriter, "append", refuse)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 4):
            recorder.record(WaitRecord(0, 1, step, "drain"))
            recorder.flush(step)
        recorder.close()
    assert [record.message for record in caplog.records] == [
        f"recording is switched off in step 1, as its records cannot be written ({path}: No space "
        "left on device); the training goes on, and the trace lacks what comes from there on"
    ]
    assert not recorder.is_on
    assert _waits(path) == [WaitRecord(0, 1, 0, "drain")]


def test_a_folder_that_cannot_be_made_switches_recording_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "records").write_text("in the way")
    recorder = Recorder(tmp_path / "records" / "rank-0.jsonl", INFO)
    recorder.record(WaitRecord(0, 1, 0, "drain"))
    recorder.flush(0)
    recorder.close()
    assert len(caplog.records) == 1


# The flight record: what a rank recorded last is there however it ended, and nothing else is.


TEXTS = {
    "kind": st.sampled_from(["F", "B", "W", ""]),
    "cause": st.sampled_from([each.value for each in Cause]),
}
TAKEN = [each for name, each in RECORD_TYPES.items() if name not in ("cost", "loss")]


@st.composite
def records(draw: st.DrawFn) -> Record:
    """Any record that the recorder takes."""
    record_type: Any = draw(st.sampled_from(TAKEN))
    record = record_type(
        *(
            draw(TEXTS.get(name, st.sampled_from(["inline", "shm", "InputArrived", "task"])))
            if record_type.__annotations__[name] is str
            else draw(st.integers(*bounds_of(name)))
            for name in record_type._fields
        )
    )
    if num_times(record) == 2:
        times_ns = sorted(record[:2])
        record = record._replace(start_ns=times_ns[0], end_ns=times_ns[1])
    found: Record = record
    return found


def task(number: int) -> TaskRecord:
    return TaskRecord(number, number + 1, 0, "F", 3, 0, number, number, 2, 1, 3, 3, 1, 1)


def flown(path: Path) -> Flight:
    found = read_flight(path)
    assert found is not None
    return found


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of slots of a small ring."""
    monkeypatch.setattr(flight, "MOST_RECORDS", 7)
    return 7


@given(taken=st.lists(records(), max_size=30))
def test_the_last_records_are_there_as_they_were_made(
    tmp_path_factory: pytest.TempPathFactory, taken: list[Record]
) -> None:
    path = tmp_path_factory.mktemp("ring") / "rank-0.ring"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(flight, "MOST_RECORDS", 11)
        ring = FlightRing(path)
        for record in taken:
            ring.put(record)
        found = flown(path)
    kept = taken[-11:]
    assert found.records == kept
    assert [type(record) for record in found.records] == [type(record) for record in kept]
    assert found.is_whole == (len(taken) <= 11)
    assert found.off is None


def test_of_a_torn_record_nothing_is_read(tmp_path: Path, small: int) -> None:
    """However much of the slot was written: of the new record, or of the one before."""
    path, before = tmp_path / "rank-0.ring", tmp_path / "before.ring"
    for target, num in ((before, small + 2), (path, small + 3)):
        ring = FlightRing(target)
        for number in range(1, num + 1):
            ring.put(task(number))
    old, new = before.read_bytes(), path.read_bytes()
    changed = [place for place in range(len(new)) if old[place] != new[place]]
    assert len(changed) > 3
    whole = [task(number) for number in range(4, small + 4)]
    for num_written in range(1, len(changed)):
        cut = changed[num_written]
        path.write_bytes(new[:cut] + old[cut:])
        assert flown(path).records == whole[:-1]
    path.write_bytes(new)
    assert flown(path).records == whole


@given(data=st.data())
def test_a_damaged_file_holds_whole_records_or_none(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("ring") / "rank-0.ring"
    ring = FlightRing(path)
    taken = [SendRecord(5, 9, 0, "F", 1, 2, 1, number, 64) for number in range(40)]
    for each in taken:
        ring.put(each)
    octets = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        place = data.draw(st.integers(0, 4096 + 50 * 144))
        octets[place] = data.draw(st.integers(0, 255))
    path.write_bytes(octets[: data.draw(st.sampled_from([len(octets), 9, 5000]))])
    found = read_flight(path)
    read = [] if found is None else found.records
    for record in read:
        assert all(
            least <= value <= most
            for name, value in zip(record._fields, record, strict=True)
            if isinstance(value, int)
            for least, most in [bounds_of(name)]
        )
        assert all(each.isprintable() for each in record if isinstance(each, str))


@pytest.mark.parametrize("octets", [b"", b"rrfpring", b"x" * 4 * 2**20, b"\0" * (4 * 2**20 + 1)])
def test_what_is_no_flight_record_is_none(tmp_path: Path, octets: bytes) -> None:
    path = tmp_path / "rank-0.ring"
    path.write_bytes(octets)
    assert read_flight(path) is None


def test_a_flight_record_of_version_1_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.ring"
    content = bytearray(FILE_BYTES)
    struct.pack_into("<8sI?", content, 0, b"rrfpring", 1, False)
    struct.pack_into("<?q400p", content, 64, True, 7, b"no space")
    path.write_bytes(content)
    assert read_flight(path) == Flight([], True, (7, "no space"))


def test_no_record_of_several_threads_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.ring"
    ring = FlightRing(path)

    def put(thread: int) -> None:
        for number in range(3000):
            ring.put(WaitRecord(number, number, thread, f"cause {number % 20}"))

    threads = [threading.Thread(target=put, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    found = flown(path).records
    for which in range(3):
        own = [record for record in found if record.step == which]
        assert own == [
            WaitRecord(number, number, which, f"cause {number % 20}") for number in range(3000)
        ]


def put_without_end(path: Path) -> None:
    ring = FlightRing(path)
    number = 0
    while True:
        number += 1
        ring.put(task(number))


def test_a_process_that_is_killed_leaves_its_last_records(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.ring"
    process = multiprocessing.get_context("fork").Process(target=put_without_end, args=(path,))
    process.start()
    deadline_s = time.monotonic() + 60

    def has_gone_round() -> bool:
        """A record that is being written is skipped, so the first one alone says nothing."""
        found = read_flight(path) if path.exists() else None
        last = found.records[-1] if found is not None and found.records else None
        return isinstance(last, TaskRecord) and last.microbatch > flight.MOST_RECORDS

    while not has_gone_round():
        assert time.monotonic() < deadline_s
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(timeout=30)
    numbers = [
        record.microbatch for record in flown(path).records if isinstance(record, TaskRecord)
    ]
    gaps = [later - earlier for earlier, later in pairwise(numbers)]
    # One may have been under way.
    assert len(numbers) >= flight.MOST_RECORDS - 1
    assert set(gaps) == {1}


def test_what_does_not_fit_is_left_out_and_harms_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.ring"
    ring = FlightRing(path)
    ring.put(WaitRecord(1, 2, 3, "x" * 50))
    ring.put(WaitRecord(1, 1 << 70, 3, "drain"))
    for number in range(200):
        ring.put(WaitRecord(number, number, 0, f"cause {number}"))
    assert flown(path).records == [WaitRecord(n, n, 0, f"cause {n}") for n in range(95)]


# The recorder's part.


def test_a_rank_that_closes_its_records_leaves_no_flight_record(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    with Recorder(path, INFO) as recorder:
        assert flown(ring_of(path)) == Flight([], True, None)
        recorder.record(task(1))
        recorder.flush(0)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_rank_that_fails_writes_what_it_has_and_leaves_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"

    def fail() -> None:
        with Recorder(path, INFO) as recorder:
            recorder.record(task(1))
            recorder.begin(3, Doing.EVALUATION)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert b'"task",1,2,' in path.read_bytes()
    first, second = flown(ring_of(path)).records
    assert first == task(1)
    assert isinstance(second, BegunRecord)
    assert second[2:] == (3, "evaluation", "", -1, -1, -1)
    assert b"begun" not in path.read_bytes()


def test_of_very_many_records_a_rank_that_fails_writes_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rrfp.runtime.recorder._MAX_AT_FAILURE", 10)
    path = tmp_path / "rank-0.jsonl"
    recorder = Recorder(path, INFO)
    for number in range(25):
        recorder.record(task(number)._replace(step=4))
    recorder.abandon()
    text = path.read_text()
    assert text.count('"task"') == 10
    assert '"loss"' in text
    assert ",4,15]" in text


def test_without_room_for_a_flight_record_recording_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    path = tmp_path / "rank-0.jsonl"
    with caplog.at_level(logging.WARNING), Recorder(path, INFO) as recorder:
        recorder.record(task(1))
        recorder.begin(0, Doing.CLOSING)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert b'"task",1,2,' in path.read_bytes()
    (record,) = caplog.records
    assert record.message == (
        f"there is no room for the flight record {ring_of(path)} (No space left on device); the "
        "training goes on without it, but if the run dies, the records of its last step are lost"
    )


def test_why_recording_was_switched_off_is_noted_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rank-0.jsonl"
    recorder = Recorder(path, INFO)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rrfp.trace.spill.SpillWriter.append", refuse)
    recorder.flush(9)
    recorder.record(task(1))
    told = 9, f"{path}: No space left on device"
    assert flown(ring_of(path)) == Flight([task(1)], True, told)
    recorder.close()
    assert flown(ring_of(path)) == Flight([], True, told)


def test_a_run_that_is_not_recorded_leaves_no_file(tmp_path: Path) -> None:
    recorder = Recorder(None, INFO)
    recorder.begin(0, Doing.CLOSING)
    recorder.abandon()
    assert not list(tmp_path.iterdir())
