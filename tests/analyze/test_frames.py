"""A run as tables: nothing is lost on the way, and the tables beside a trace are those of it."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from rrfp.analyze import bubbles as structural
from rrfp.analyze import frame_files as cache
from rrfp.analyze import frame_files as parquet
from rrfp.analyze import frames as module
from rrfp.analyze.bubbles import bubbles
from rrfp.analyze.deviations import deviations
from rrfp.analyze.frame_files import TABLES, CachedTrace, export_tables, load_frames
from rrfp.analyze.frames import COUNTERS, MESSAGES, RUN, SCHEMAS, Frames, frames_of, recording_of
from rrfp.errors import RrfpError, UsageError
from rrfp.replay.measured import StepSample
from rrfp.schedule.shape import Shape
from rrfp.trace.perfetto import reader as perfetto_reader
from rrfp.trace.perfetto.reader import read_trace
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import Recording, step_windows
from tests.analyze.recordings import make_recording
from tests.analyze.simulated_runs import simulated

SAMPLE = Path(__file__).parents[2] / "traces" / "gpt-pp4-bf.pftrace"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.pftrace"
    write_trace(path, make_recording(3, 4, 5))
    return path


def _assert_same(found: Frames, expected: Frames) -> None:
    for name in SCHEMAS:
        assert_frame_equal(found.table(name), expected.table(name))
    assert_frame_equal(found.messages, expected.messages)
    assert_frame_equal(found.run, expected.run)


def test_every_table_has_the_columns_of_its_schema() -> None:
    for frames in (frames_of(make_recording()), frames_of(Recording({}, []))):
        for name, schema in SCHEMAS.items():
            assert frames.table(name).schema == pl.Schema(schema)
        assert frames.messages.schema == pl.Schema(MESSAGES)
        assert frames.counters.schema == pl.Schema(COUNTERS)
        assert frames.run.schema == pl.Schema(RUN)


@pytest.mark.parametrize(
    "recording",
    [make_recording(), simulated("bfw", Shape(2, 3), num_steps=2), read_trace(SAMPLE)],
    ids=["made up", "simulated", "real"],
)
def test_the_tables_hold_the_recording(recording: Recording, tmp_path: Path) -> None:
    assert recording_of(frames_of(recording)) == recording
    path = tmp_path / "trace.pftrace"
    write_trace(path, recording)
    found = load_frames(path, with_warm_up=True)
    _assert_same(found, frames_of(recording))
    assert recording_of(found) == recording


def test_counters_are_those_of_the_tasks() -> None:
    recording = make_recording(2, 3, 1)
    counters = frames_of(recording).counters.filter(pl.col("rank") == 1)
    for name in ("depth", "held", "ready_forwards", "ready_backwards"):
        values = counters.filter(pl.col("name") == name)["value"].to_list()
        assert values == [getattr(task, name) for task in recording.ranks[1].tasks]


def test_the_windows_are_those_of_the_recording() -> None:
    recording = make_recording(3, 3, 3)
    recording.ranks[1].phases[:] = [each for each in recording.ranks[1].phases if each.step != 1]
    found = {step: (start, end) for step, start, end in frames_of(recording).windows.iter_rows()}
    assert found == step_windows(recording)
    assert sorted(found) == [0, 2]


def test_of_steps_and_stages_only_theirs_are_there(trace: Path) -> None:
    frames = load_frames(trace, range(1, 3))
    assert frames.steps == [1, 2]
    assert set(frames.messages["step"]) == {1, 2}
    stage = frames.of_stage(1)
    assert set(stage.tasks["stage"]) == {1}
    assert set(stage.messages["to_pp_rank"]) == {1}
    assert stage.run["pp_rank"].to_list() == [1]
    assert set(frames.of_steps([2]).phases["step"]) == {2}
    with pytest.raises(UsageError, match="none of the steps asked for; it has those from 0 to 4"):
        load_frames(trace, range(7, 9))
    with pytest.raises(UsageError, match="no tasks of stage 3; its stages are 0, 1, 2"):
        frames.of_stage(3)


def test_a_second_look_reads_no_trace(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_frames(trace)
    shares = CachedTrace(trace).structural()
    monkeypatch.setattr(perfetto_reader, "TraceReader", None)
    monkeypatch.setattr("rrfp.analyze.bubbles.structural_of", None)
    _assert_same(load_frames(trace), first)
    assert CachedTrace(trace).structural() == shares


def test_a_trace_that_changed_gets_new_tables(trace: Path) -> None:
    load_frames(trace)
    write_trace(trace, make_recording(2, 3, 2))
    assert load_frames(trace).steps == [0, 1]
    folder = trace.with_name("trace.pftrace.frames")
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("name", ["br[1]", "st*r", "step=5", "100%"])
def test_a_path_is_a_name(tmp_path: Path, name: str) -> None:
    for folder in (name, "stXr"):
        (tmp_path / folder).mkdir()
        write_trace(tmp_path / folder / "trace.pftrace", make_recording(2, 3, 1))
    expected = load_frames(tmp_path / "stXr" / "trace.pftrace")
    found = load_frames(tmp_path / name / "trace.pftrace")
    _assert_same(found, expected)
    assert found.run.height == 2


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


def lengthen_tasks(path: Path) -> None:
    pl.read_parquet(path).with_columns(pl.col("end_ns") + 5).write_parquet(path)


def lose_a_column(path: Path) -> None:
    pl.read_parquet(path).drop("end_ns").write_parquet(path)


def add_a_file(path: Path) -> None:
    shutil.copy(path, path.with_name("task-00001.parquet"))


def lose_the_ranks(path: Path) -> None:
    path.with_name("run.parquet").unlink()


@pytest.mark.parametrize(
    "damage", [Path.unlink, truncate, lengthen_tasks, lose_a_column, add_a_file, lose_the_ranks]
)
def test_damaged_tables_are_made_anew(trace: Path, damage: Callable[[Path], None]) -> None:
    whole = load_frames(trace)
    (folder,) = trace.with_name("trace.pftrace.frames").iterdir()
    damage(folder / "task-00000.parquet")
    _assert_same(load_frames(trace), whole)
    assert list(trace.with_name("trace.pftrace.frames").iterdir()) == [folder]


def test_tables_of_another_trace_are_not_used(trace: Path) -> None:
    whole = load_frames(trace)
    (folder,) = trace.with_name("trace.pftrace.frames").iterdir()
    other = trace.with_name("other.pftrace")
    write_trace(other, make_recording(2, 3, 2))
    load_frames(other)
    (others,) = other.with_name("other.pftrace.frames").iterdir()
    shutil.rmtree(folder)
    others.rename(folder)
    _assert_same(load_frames(trace), whole)


def test_an_export_leaves_the_tables_as_they_are(trace: Path, tmp_path: Path) -> None:
    frames = load_frames(trace)
    for _ in range(2):
        assert len([*export_tables(frames, tmp_path / "out")]) == len(TABLES)
        _assert_same(frames, load_frames(trace))


def another_share(note: bytes) -> bytes:
    return note.replace(b"[[", b"[[0.5, ").replace(b"0.5, ]", b"0.5]")


@pytest.mark.parametrize("damage", [lambda _: b"[[0.", another_share])
def test_a_damaged_note_of_replays_is_none(trace: Path, damage: Callable[[bytes], bytes]) -> None:
    expected = CachedTrace(trace).structural()
    (path,) = trace.with_name("trace.pftrace.frames").glob("*/structural-*.json")
    path.write_bytes(damage(path.read_bytes()))
    assert CachedTrace(trace).structural() == expected


def test_what_another_process_makes_meanwhile_is_used(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = frames_of(read_trace(trace))
    make = cache._make
    begun: list[Path] = []

    def made_twice(path: Path, folder: Path) -> None:
        """Another process finishes first."""
        if not begun:
            begun.append(folder)
            with monkeypatch.context() as patch:
                patch.setattr("os.getpid", lambda: 1)
                _assert_same(load_frames(path), expected)
        make(path, folder)

    monkeypatch.setattr(cache, "_make", made_twice)
    _assert_same(load_frames(trace), expected)
    assert len(list(trace.with_name("trace.pftrace.frames").iterdir())) == 1


def test_tables_are_made_where_nothing_can_be_written(trace: Path) -> None:
    trace.with_name("trace.pftrace.frames").write_text("in the way")
    _assert_same(load_frames(trace), frames_of(read_trace(trace)))


def test_a_trace_that_is_cut_off_leaves_no_tables(trace: Path) -> None:
    recording = make_recording(3, 4, 5)
    write_trace(trace, recording)
    octets = trace.read_bytes()
    trace.write_bytes(octets[: len(octets) // 2])
    with pytest.raises(RrfpError, match="is truncated"):
        load_frames(trace)
    assert not list(trace.with_name("trace.pftrace.frames").iterdir())


def test_small_batches_files_and_pieces_change_nothing(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_frames(trace)
    expected = bubbles(whole)
    monkeypatch.setattr(perfetto_reader, "_NUM_BYTES_OF_A_BATCH", 300)
    monkeypatch.setattr(parquet, "_NUM_ROWS_OF_A_FILE", 7)
    monkeypatch.setattr(module, "_MOST_TASKS_AT_ONCE", 50)
    assert read_trace(trace) == recording_of(whole)
    copy = trace.with_name("copy.pftrace")
    copy.write_bytes(trace.read_bytes())
    frames = load_frames(copy)
    _assert_same(frames, whole)
    pieces = list(frames.piecewise())
    assert len(pieces) > 1
    assert sorted(step for piece in pieces for step in piece.steps) == frames.steps
    assert bubbles(frames) == expected


def test_structural_and_excess_are_the_bubble(tmp_path: Path) -> None:
    trace = CachedTrace(SAMPLE)
    report = bubbles(trace.frames())
    assert all(rank.structural_ns is None and rank.excess_ns is None for rank in report.ranks)
    shares, why_not = trace.structural()
    assert why_not == ""
    for rank in report.with_structural(shares).ranks:
        assert rank.structural_ns is not None
        assert rank.excess_ns is not None
        assert rank.structural_ns + rank.excess_ns == rank.bubble_ns
    path = tmp_path / "trace.pftrace"
    recording = read_trace(SAMPLE)
    write_trace(path, dataclasses.replace(recording, settings={}))
    shares, why_not = CachedTrace(path).structural()
    assert shares == []
    assert "settings" in why_not


def test_a_run_without_jitter_is_all_structural(tmp_path: Path) -> None:
    recording = simulated("1f1b", Shape(4, 8), num_steps=2)
    recording.settings |= {"simulated": True, "settings": {"hint": "1f1b", "dispatch": "ready"}}
    path = tmp_path / "trace.pftrace"
    write_trace(path, recording)
    shares, why_not = CachedTrace(path).structural()
    assert why_not == ""
    report = bubbles(load_frames(path)).with_structural(shares)
    assert [rank.excess_ns for rank in report.ranks] == [0] * 4


def test_steps_that_only_test_leave_the_structural_part_of_the_others(tmp_path: Path) -> None:
    recording = simulated("1f1b", Shape(2, 4), num_steps=3)
    recording.settings |= {"simulated": True, "settings": {"hint": "1f1b", "dispatch": "ready"}}
    for rank in recording.ranks:
        rank.tasks[:] = [task for task in rank.tasks if task.step != 1 or task.kind == "F"]
    path = tmp_path / "trace.pftrace"
    write_trace(path, recording)
    shares, why_not = CachedTrace(path).structural()
    assert why_not == ""
    assert shares == CachedTrace(path).structural(range(2, 3))[0]
    assert structural.structural_of(load_frames(path)).whole.structural == pytest.approx(shares[0])
    with pytest.raises(RrfpError, match="have no backward"):
        structural.structural_of(load_frames(path, evaluations=True))


def test_of_a_long_run_steps_from_its_middle_are_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replayed = []

    def read_run(recording: Recording) -> None:
        replayed.append({task.step for rank in recording.ranks for task in rank.tasks})
        raise RrfpError("enough")

    monkeypatch.setattr(structural, "read_run", read_run)
    frames = frames_of(make_recording(2, 3, 9))
    for num_tasks in (1, 36, 1000):
        monkeypatch.setattr(structural, "_SAMPLE", StepSample(num_tasks, 40_000))
        with pytest.raises(RrfpError, match="enough"):
            structural.structural_of(frames)
    assert replayed == [{4}, {1, 4, 7}, set(range(9))]


def test_deviations_are_read_from_tables_too(trace: Path) -> None:
    assert_frame_equal(deviations(load_frames(trace)), deviations(frames_of(read_trace(trace))))
