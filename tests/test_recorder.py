"""The recorder: nothing is lost between threads, and no failure reaches the training."""

import logging
import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from rrfp.runtime.recorder import Recorder
from rrfp.trace.records import RankInfo, WaitRecord
from rrfp.trace.spill import SpillWriter, read_spill

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
