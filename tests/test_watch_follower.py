"""A run is followed from its files, whatever becomes of it, and takes no notice."""

import time
from dataclasses import replace
from math import log
from pathlib import Path

import pytest

from rrfp.errors import RrfpError
from rrfp.schedule.shape import Shape
from rrfp.trace.merge import encode_run
from rrfp.trace.outcome import noting_outcome
from rrfp.trace.perfetto.writer import write_run_files
from rrfp.trace.records import Phase, RankInfo
from rrfp.trace.run_dir import RunDir
from rrfp.trace.spill import SpillWriter, number_of, segments_in
from rrfp.watch import follow as follow_module
from rrfp.watch.follow import Stand
from tests.followed import SETTING, SLOW, Follow, Live, follow
from tests.trained import rrfp_here
from tests.watched import record

__all__ = ["follow"]


def test_a_run_is_followed_from_before_its_first_step(tmp_path: Path, follow: Follow) -> None:
    path = tmp_path / "run"
    path.mkdir()
    follower = follow(path)
    assert follower.stand()[0] is Stand.WAITING
    assert follower.look().steps == []
    recording = record(SETTING, 4)
    live = Live(path, recording)
    assert follower.look().steps == []
    live.write(0, 1)
    live.write(2, ranks=(0, 1))
    assert [each.figures.step for each in follower.look().steps] == [0, 1]
    assert follower.stand()[0] is Stand.GOING
    assert follower.look().steps == []
    live.write(2, ranks=(2, 3))
    assert [each.figures.step for each in follower.look().steps] == [2]
    live.end()


def test_a_run_whose_records_are_bounded_is_followed_from_segment_to_segment(
    tmp_path: Path, follow: Follow
) -> None:
    live = Live(tmp_path / "run", record(SETTING, 12), most_bytes=40_000)
    follower = follow(live.run.path)
    seen: list[int] = []

    def look() -> None:
        while True:
            news = follower.look()
            seen.extend(each.figures.step for each in news.steps)
            if not news.has_more:
                return

    for step in range(12):
        live.write(step)
        look()
        assert follower.stand()[0] is Stand.GOING
    segments = segments_in(live.run.records)
    assert all(number_of(paths[0]) > 1 for paths in segments.values())
    assert seen == [*range(12)]
    assert not follower.begins_late
    # One that comes later reads what is left.
    late = follow(live.run.path)
    while late.look().has_more:
        continue
    assert late.begins_late
    assert late.steps[-1].step == 11
    live.end()


def test_figures_are_those_of_the_records(tmp_path: Path, follow: Follow) -> None:
    recording = record(SETTING, 2)
    live = Live(tmp_path / "run", recording)
    live.write(0, 1)
    follower = follow(live.run.path)
    figures = follower.look().steps[1].figures
    schedules = [
        phase
        for records in recording.ranks
        for phase in records.phases
        if phase.step == 1 and phase.phase == Phase.SCHEDULE
    ]
    window_ns = max(each.end_ns for each in schedules) - min(each.start_ns for each in schedules)
    assert figures.window_s == pytest.approx(window_ns / 1e9)
    for records in recording.ranks:
        busy_ns = sum(t.end_ns - t.start_ns for t in records.tasks if t.step == 1)
        rank = figures.ranks[records.info.rank]
        assert rank.busy_fraction == pytest.approx(busy_ns / window_ns)
        waited_ns = sum(w.end_ns - w.start_ns for w in records.waits if w.step == 1)
        assert sum(rank.wait_fractions.values()) == pytest.approx(waited_ns / window_ns)
        assert rank.peak_held == max(t.held for t in records.tasks if t.step == 1)
        most_bytes = max(t.held_bytes for t in records.tasks if t.step == 1)
        assert rank.peak_held_bytes == most_bytes
    taken_ns = [
        receive.end_ns - receive.start_ns
        for receive in recording.ranks[1].receives
        if receive.step == 1 and receive.peer == 0
    ]
    assert figures.links[0, 1].fraction == pytest.approx(sum(taken_ns) / window_ns)
    live.end()


def test_a_task_that_was_stopped_counts_as_twice_the_median(tmp_path: Path, follow: Follow) -> None:
    recording = record(replace(SETTING, scatter=0.0), 3)
    for rank in (1, 2):
        tasks = recording.ranks[rank].tasks
        place = next(each for each, task in enumerate(tasks) if (task.step, task.kind) == (2, "B"))
        task = tasks[place]
        times = 100 if rank == 1 else 2
        took_ns = times * (task.end_ns - task.start_ns)
        tasks[place] = task._replace(end_ns=task.start_ns + took_ns)
    live = Live(tmp_path / "run", recording)
    live.write(0, 1, 2)
    ranks = follow(live.run.path).look().steps[2].figures.ranks
    assert ranks[1].log_task_s == pytest.approx(ranks[2].log_task_s)
    assert ranks[1].log_task_s == pytest.approx(ranks[0].log_task_s + log(2) / 16)
    live.end()


def test_a_line_is_read_when_it_is_whole(tmp_path: Path, follow: Follow) -> None:
    recording = record(replace(SETTING, shape=Shape(2, 2)), 2)
    live = Live(tmp_path / "run", recording)
    live.write(0)
    file = live.run.rank_records(1)
    whole = file.read_bytes()
    live.end()
    cut = len(whole) - 100
    file.write_bytes(whole[:cut])
    follower = follow(live.run.path)
    assert follower.look().steps == []
    with file.open("ab") as more:
        more.write(whole[cut:])
    assert len(follower.look().steps) == 1


def test_a_damaged_file_is_told(tmp_path: Path, follow: Follow) -> None:
    live = Live(tmp_path / "run", record(replace(SETTING, shape=Shape(2, 2)), 1))
    with live.run.rank_records(0).open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(RrfpError, match=r"rank-0\.jsonl has a line that is not JSON"):
        follow(live.run.path).look()
    told = rrfp_here(tmp_path, "watch", "run", "--once")
    assert told.returncode == 1
    assert told.stderr.startswith("rrfp: run/records/rank-0.jsonl has a line")
    live.end()


def test_the_last_records_are_read_after_they_became_a_trace(
    tmp_path: Path, follow: Follow
) -> None:
    live = Live(tmp_path / "run", record(SETTING, 4))
    with noting_outcome(live.run):
        live.write(0, 1)
        follower = follow(live.run.path)
        assert len(follower.look().steps) == 2
        assert follower.stand()[0] is Stand.GOING
        live.write(2, 3)
        live.end()
        encode_run(live.run.path)
    assert not live.run.records.exists()
    assert follower.stand() == (Stand.ENDED, "finished")
    assert [each.figures.step for each in follower.look().steps] == [2, 3]


def test_an_ended_run_is_read_from_its_trace(tmp_path: Path, follow: Follow) -> None:
    run = RunDir(tmp_path)
    write_run_files(run, record(SLOW, 30))
    follower = follow(tmp_path)
    news = follower.look()
    assert len(news.steps) == 30
    assert [alert.alarm.pp_rank for alert in news.alerts] == [2]
    assert follower.stand()[0] is Stand.ENDED
    assert follower.look().steps == []


def test_a_killed_run_says_since_when_and_whose_records_stopped_first(
    tmp_path: Path, follow: Follow
) -> None:
    live = Live(tmp_path / "run", record(SETTING, 4))
    live.run.outcome.touch()
    live.write(0, 1)
    live.write(2, ranks=(0, 1, 3))
    follower = follow(live.run.path)
    follower.look()
    live.end()
    stand, told = follower.stand()
    assert stand is Stand.KILLED
    since = time.strftime("%H:%M", time.localtime())
    assert told.startswith("killed; records stop at ")
    assert "rank 2 on simulated writes nothing since" in told
    assert "after step 1" in told
    assert since[:2] in told


def test_a_silent_run_names_whom_it_waits_for(tmp_path: Path, follow: Follow) -> None:
    now_s = time.time()
    live = Live(tmp_path / "run", record(SETTING, 4))
    live.write(0, 1)
    live.write(2, ranks=(0, 2, 3))
    follower = follow(live.run.path, lambda: now_s)
    follower.look()
    assert follower.stand()[0] is Stand.GOING
    now_s += 31
    stand, told = follower.stand()
    assert stand is Stand.SILENT
    assert told == "no step has ended for 31 s; step 2 is missing from rank 1 only"
    live.end()


def test_a_rank_that_records_nothing_is_named(tmp_path: Path, follow: Follow) -> None:
    live = Live(tmp_path / "run", record(SETTING, 4))
    live.write(0, 1, ranks=(0, 2, 3))
    follower = follow(live.run.path)
    follower.look()
    assert follower.stand() == (
        Stand.WAITING,
        "no step is whole: others are at step 1, but not rank 1",
    )
    live.end()


def test_a_job_that_closed_its_records_is_over_and_not_killed(
    tmp_path: Path, follow: Follow
) -> None:
    live = Live(tmp_path / "run", record(SETTING, 2))
    live.write(0, 1)
    live.end()
    follower = follow(live.run.path)
    follower.look()
    stand, told = follower.stand()
    assert stand is Stand.ENDED
    assert told.startswith("over; records stop at")


def test_a_resumed_run_is_followed_in_its_last_session(tmp_path: Path, follow: Follow) -> None:
    recording = record(SLOW, 30)
    live = Live(tmp_path / "run", recording)
    live.write(*range(5))
    follower = follow(live.run.path)
    assert len(follower.look().steps) == 5
    live.end()
    again = Live(tmp_path / "run", recording, session=2)
    again.write(*range(3, 28))
    news = follower.look()
    assert [each.figures.step for each in news.steps] == [*range(3, 28)]
    assert follower.session == 2
    assert [alert.alarm.since_step for alert in news.alerts] == [12]
    again.end()


def test_of_a_long_run_the_last_steps_are_read(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Live(tmp_path / "run", record(replace(SETTING, shape=Shape(2, 4)), 60))
    live.write(*range(60))
    size = live.run.rank_records(0).stat().st_size
    monkeypatch.setattr(follow_module, "_FIRST_LOOK", 1)
    monkeypatch.setattr(follow_module, "_LEAST_FIRST_LOOK", size // 3)
    follower = follow(live.run.path)
    seen = []
    for _ in range(5):
        seen += [each.figures.step for each in follower.look().steps]
    assert seen == [*range(seen[0], 60)]
    assert 30 < seen[0] < 45
    assert follower.begins_late
    live.end()


def test_nothing_is_held_before_a_rank_holds_it(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was asked in the moment in which its rank begins it could not be begun."""
    asked: list[Path] = []

    def ask(path: Path) -> bool:
        asked.append(path)
        return True

    monkeypatch.setattr(follow_module, "is_being_written", ask)
    run = RunDir(tmp_path)
    run.records.mkdir()
    run.rank_records(0).touch()
    follower = follow(tmp_path)
    follower.look()
    follower.stand()
    assert asked == []
    writer = SpillWriter(run.rank_records(0), RankInfo(0, 0, 0, 0, (0,), "here", 1))
    follower.look()
    follower.stand()
    assert asked == [run.rank_records(0)]
    writer.close()
