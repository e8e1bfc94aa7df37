"""The critical path as a track of its own: appended for a viewer, and the trace is as it was."""

from pathlib import Path

import pytest

from rrfp.analyze.critical_path import critical_path
from rrfp.analyze.frame_files import load_frames
from rrfp.analyze.frames import SCHEMAS, Frames, frames_of
from rrfp.analyze.perfetto_overlay import TRACK, path_slices, path_track, replica_of
from rrfp.schedule.shape import Shape
from rrfp.simulate.world import World
from rrfp.trace.perfetto.reader import read_trace
from rrfp.trace.perfetto.writer import Slice, encode_track
from tests.step_times import MEGATRONS, OURS, equal_times, policy_of, simulated
from tests.trace_processor import MISSING, trace_processor


@pytest.mark.parametrize("trace", [OURS, MEGATRONS], ids=["ours", "megatrons"])
def test_slices_are_the_path_named_after_its_tasks(trace: Path) -> None:
    frames = load_frames(trace)
    for step in frames.steps:
        segments = critical_path(frames, step).segments
        slices = list(path_slices(frames, [step]))
        assert [each[:2] for each in slices] == [each[:2] for each in segments]
        tasks = {
            f"{stage}{kind}{microbatch}"
            for stage, kind, microbatch in frames.tasks.filter(step=step)
            .select("stage", "kind", "microbatch")
            .iter_rows()
        }
        for segment, shown in zip(segments, slices, strict=True):
            if segment.kind in ("F", "B"):
                assert shown.name in tasks
                assert shown.name.startswith(f"{segment.pp_rank}{segment.kind}")
            elif segment.kind == "link":
                assert shown.name == f"link {segment.sender} → {segment.pp_rank}"
            else:
                assert shown.name == segment.kind


def test_steps_come_in_order_of_time_and_a_long_run_has_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frames = load_frames(OURS, with_warm_up=True)
    track, steps = path_track(frames)
    assert steps == [0, 1, 2, 3]
    assert track
    monkeypatch.setattr("rrfp.analyze.perfetto_overlay._MOST_TASKS", 2 * 64)
    fewer, steps = path_track(frames, shown=3)
    assert len(steps) == 2
    assert 3 in steps
    assert steps == sorted(steps)
    assert 0 < len(fewer) < len(track)


def test_a_run_without_steps_has_no_track() -> None:
    frames = load_frames(OURS)
    empty = Frames(frames.run, {name: frames.scan(name).limit(0) for name in SCHEMAS})
    assert path_track(empty) == (b"", [])
    assert encode_track(TRACK, []) == b""


def test_of_replicas_the_one_on_the_path_is_named() -> None:
    policy, shape = policy_of("bf", Shape(2, 3))
    worlds = [World(equal_times(shape, f, 8, 7), transfer=lambda *_: 2) for f in (10, 40)]
    frames = frames_of(simulated(policy, shape, worlds))
    segments = critical_path(frames, 0).segments
    assert replica_of(frames, 0, segments) == 1
    assert {dict(each.notes).get("dp_rank", 1) for each in path_slices(frames, [0])} == {1}


def test_a_trace_with_the_track_behind_it_is_still_that_trace(tmp_path: Path) -> None:
    track, _ = path_track(load_frames(OURS, with_warm_up=True))
    path = tmp_path / "shown.pftrace"
    path.write_bytes(OURS.read_bytes() + track)
    assert read_trace(path) == read_trace(OURS)


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_perfetto_finds_the_slices_on_the_track() -> None:
    slices = [Slice(10, 20, "2F3", (("stage", 2),)), Slice(20, 25, "link 0 → 1", ())]
    with trace_processor() as perfetto:
        perfetto.load(OURS.read_bytes() + encode_track(TRACK, slices))
        found = perfetto.query(
            "select slice.name, dur from slice join track on slice.track_id = track.id "
            f"where track.name = '{TRACK}' order by ts"
        )
        others = perfetto.query("select count(*) from slice")
        perfetto.load(OURS.read_bytes())
        assert perfetto.query("select count(*) from slice") == [(others[0][0] - 2,)]
    assert found == [("2F3", 10), ("link 0 → 1", 5)]
