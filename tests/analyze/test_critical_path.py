"""The critical path against a second, naive one, and where transfers block."""

import random
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given

from rrfp.analyze.critical_path import LINK, critical_path, path_table
from rrfp.analyze.frame_files import load_frames
from rrfp.analyze.frames import SCHEMAS, Frames, frames_of
from rrfp.analyze.misalignment import misalignment, timed_messages
from rrfp.analyze.perfetto_overlay import TRACK, path_slices, path_track, replica_of
from rrfp.errors import RrfpError
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.shape import SPLIT_BACKWARD, Shape
from rrfp.schedule.tasks import Kind
from rrfp.simulate.engine import StepConditions, TaskTimes
from rrfp.trace.perfetto.reader import read_trace
from rrfp.trace.perfetto.writer import Slice, encode_track
from rrfp.trace.records import Recording, step_windows
from tests.analyze.recordings import make_recording
from tests.analyze.simulated_runs import (
    MEGATRONS,
    OURS,
    equal_times,
    policy_of,
    random_times,
    simulated_case,
    simulated_run,
)
from tests.e2e.trace_processor import MISSING, trace_processor
from tests.properties.cases import SEEDS, Case, cases, examples
from tests.properties.naive_analyses import naive_work, work_on_path
from tests.train.trained import trained_recording

BLOCKING = [
    ("gpipe", Shape(3, 5)),
    ("1f1b", Shape(2, 6)),
    ("1f1b", Shape(4, 8)),
    ("zb-h1", Shape(4, 8, kinds=SPLIT_BACKWARD)),
    ("interleaved", Shape(3, 6, 2)),
    ("interleaved", Shape(4, 8, 2)),
]


def members_end_apart(recording: Recording, rng: random.Random) -> None:
    """Let members end the tasks that they run together up to half a task early."""
    for rank in recording.ranks:
        rank.tasks[:] = [
            task._replace(end_ns=task.end_ns - rng.randint(0, (task.end_ns - task.start_ns) // 2))
            for task in rank.tasks
        ]


@examples(quick=40, thorough=2000)
@given(cases())
def test_the_tasks_are_those_of_the_naive_path(case: Case) -> None:
    recording = simulated_case(
        case,
        random_times(random.Random(case.seed), case.shape),
        transfer=lambda *_: case.seed % 150,
        lateness=lambda member, _: case.seed % 40 * member,
    )
    members_end_apart(recording, random.Random(case.seed))
    assert work_on_path(recording, 0) == naive_work(recording, 0)


def test_so_they_are_under_megatrons_own_schedule() -> None:
    recording = read_trace(MEGATRONS)
    for step in step_windows(recording):
        assert work_on_path(recording, step) == pytest.approx(naive_work(recording, step), abs=1000)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "flags",
    [
        "--pp 4 --hint bf",
        "--pp 4 --hint 1f1b --dispatch fixed",
        "--pp 2 --hint bf-deep --chunks 2",
        "--pp 2 --tp 2 --hint bf",
        "--pp 4 --dispatch megatron",
        "--pp 4 --chunks 2 --layers 8 --dispatch megatron",
        "--pp 2 --tp 2 --dispatch megatron",
    ],
)
def test_so_they_are_in_recorded_runs(flags: str, tmp_path: Path) -> None:
    recording = trained_recording(tmp_path, flags)
    for step in step_windows(recording):
        assert work_on_path(recording, step) == pytest.approx(naive_work(recording, step), abs=1000)


@pytest.mark.parametrize(("hint", "whole"), BLOCKING)
@examples(quick=8, thorough=500)
@given(SEEDS)
def test_where_transfers_take_no_time_the_path_is_work(hint: str, whole: Shape, seed: int) -> None:
    """A waiting rank waits for a task: the path follows the rank that came last to a transfer."""
    policy, shape = policy_of(hint, whole, dispatch=Dispatch.FIXED)
    world = StepConditions(random_times(random.Random(seed), shape), blocking=True)
    recording = simulated_run(policy, shape, [world], links="blocking")
    path = critical_path(frames_of(recording), 0)
    assert {segment.kind for segment in path.segments} <= set(Kind)
    assert all(before.end_ns == after.start_ns for before, after in pairwise(path.segments))


@pytest.mark.parametrize(("hint", "whole"), BLOCKING)
@examples(quick=8, thorough=500)
@given(SEEDS)
def test_what_transfers_take_is_theirs(hint: str, whole: Shape, seed: int) -> None:
    policy, shape = policy_of(hint, whole, dispatch=Dispatch.FIXED)
    rng = random.Random(seed)
    times = random_times(rng, shape)
    took_ns = {
        (rank, rank + step): rng.randrange(1, 200)
        for rank in range(shape.num_ranks)
        for step in (-1, 1, 1 - shape.num_ranks, shape.num_ranks - 1)
    }
    world = StepConditions(
        times, lambda sender, receiver, _: took_ns[sender, receiver], blocking=True
    )
    recording = simulated_run(policy, shape, [world], links="blocking")
    path = critical_path(frames_of(recording), 0)
    for segment in path.segments:
        assert segment.kind in (*Kind, LINK)
        if segment.kind == LINK:
            assert segment.sender is not None
            link = segment.sender, segment.pp_rank
            assert segment.end_ns - segment.start_ns == took_ns[link]


def test_where_transfers_block_work_is_queued_at_its_sender() -> None:
    policy, shape = policy_of("gpipe", Shape(2, 3), dispatch=Dispatch.FIXED)
    times = TaskTimes([[10] * 3, [30] * 3], [[10] * 3] * 2, [[0] * 3] * 2)
    recording = simulated_run(
        policy, shape, [StepConditions(times, blocking=True)], links="blocking"
    )
    messages = timed_messages(frames_of(recording)).sort("microbatch")
    forwards = messages.filter(direction="forward")
    # The second stage is there before the first message, and later than the others.
    assert forwards["queued_ns"].to_list() == [0, 20, 20]
    assert forwards["starved_ns"].to_list() == [10, 0, 0]


def test_links_to_a_stage_of_megatrons_run_are_reported() -> None:
    found = misalignment(frames_of(read_trace(MEGATRONS)), stage=1)
    assert found["to"].unique().to_list() == [1]


def test_a_stage_reports_its_share_and_the_whole_idles_as_before() -> None:
    frames = frames_of(read_trace(MEGATRONS))
    path = critical_path(frames)
    of_stages = [path.of_rank(rank) for rank in range(4)]
    assert {each.idle_fraction for each in of_stages} == {path.idle_fraction}
    stages = frames.stages
    shares = []
    for rank, each in enumerate(of_stages):
        (told,) = path_table(each, stages).conclusions
        found = re.search(rf"Stage {rank} takes ([\d.]+)% of it, most as \w+\.$", told)
        assert found is not None
        shares.append(float(found[1]))
    assert sum(shares) == pytest.approx(100, abs=0.21)
    own = tuple(each for each in path.segments if each.pp_rank != 3)
    without = replace(path, segments=own, pp_rank=3)
    assert (
        path_table(without, stages).conclusions[0].endswith("Stage 3 is not on the critical path.")
    )


def test_without_a_rank_the_path_goes_on_by_what_is_there() -> None:
    recording = read_trace(MEGATRONS)
    del recording.ranks[2]
    recording.settings.pop("world", None)
    frames = frames_of(recording)
    path = critical_path(frames, 1)
    assert sum(owner.time_ns for owner in path.owners) == path.length_ns
    with pytest.raises(RrfpError, match="the trace has no messages"):
        misalignment(frames)


def test_one_pipeline_rank_has_no_misalignment() -> None:
    frames = frames_of(make_recording(1, 4, 2))
    with pytest.raises(RrfpError, match=r"one pipeline rank, .* open a run with two or more"):
        misalignment(frames)


# The critical path as a track of its own: appended for a viewer, and the trace is as it was.


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
    worlds = [StepConditions(equal_times(shape, f, 8, 7), transfer=lambda *_: 2) for f in (10, 40)]
    frames = frames_of(simulated_run(policy, shape, worlds))
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
