"""A run is followed from its files, and the rank that became slow is named."""

import json
import os
import time
from dataclasses import replace
from math import log
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from rrfp.errors import RrfpError
from rrfp.runtime.recorder import Recorder
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Task
from rrfp.trace.merge import encode_run
from rrfp.trace.outcome import noting_outcome
from rrfp.trace.perfetto.writer import write_run_files
from rrfp.trace.records import Phase, PhaseRecord, RankInfo
from rrfp.trace.run_dir import RunDir
from rrfp.trace.spill import SpillWriter, segment_number, segments_in
from rrfp.watch import follow as follow_module
from rrfp.watch.alarms import Alert, Kind
from rrfp.watch.figures import extra_work
from rrfp.watch.follow import RunState
from rrfp.watch.slowness import WINDOW, Baseline, Changes, Detector, GridPart
from tests.analyze.slowed_runs import (
    SETTING,
    SLOW,
    Follow,
    Live,
    Setting,
    alerts_in,
    clean,
    figures_of,
    first_alert,
    follow,
    planted,
    record,
)
from tests.e2e.ranks import run_ranks
from tests.runtime.rank_rig import Work, open_rig
from tests.train.trained import rrfp_here

__all__ = ["follow"]


def test_a_run_is_followed_from_before_its_first_step(tmp_path: Path, follow: Follow) -> None:
    path = tmp_path / "run"
    path.mkdir()
    follower = follow(path)
    assert follower.state()[0] is RunState.WAITING
    assert follower.poll().steps == []
    recording = record(SETTING, 4)
    live = Live(path, recording)
    assert follower.poll().steps == []
    live.write(0, 1)
    live.write(2, ranks=(0, 1))
    assert [each.figures.step for each in follower.poll().steps] == [0, 1]
    assert follower.state()[0] is RunState.GOING
    assert follower.poll().steps == []
    live.write(2, ranks=(2, 3))
    assert [each.figures.step for each in follower.poll().steps] == [2]
    live.end()


def test_a_run_whose_records_are_bounded_is_followed_from_segment_to_segment(
    tmp_path: Path, follow: Follow
) -> None:
    live = Live(tmp_path / "run", record(SETTING, 12), most_bytes=40_000)
    follower = follow(live.run.path)
    seen: list[int] = []

    def look() -> None:
        while True:
            news = follower.poll()
            seen.extend(each.figures.step for each in news.steps)
            if not news.has_more:
                return

    for step in range(12):
        live.write(step)
        look()
        assert follower.state()[0] is RunState.GOING
    segments = segments_in(live.run.records)
    assert all(segment_number(paths[0]) > 1 for paths in segments.values())
    assert seen == [*range(12)]
    assert not follower.begins_late
    # One that comes later reads what is left.
    late = follow(live.run.path)
    while late.poll().has_more:
        continue
    assert late.begins_late
    assert late.steps[-1].step == 11
    live.end()


def test_figures_are_those_of_the_records(tmp_path: Path, follow: Follow) -> None:
    recording = record(SETTING, 2)
    live = Live(tmp_path / "run", recording)
    live.write(0, 1)
    follower = follow(live.run.path)
    figures = follower.poll().steps[1].figures
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
    ranks = follow(live.run.path).poll().steps[2].figures.ranks
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
    assert follower.poll().steps == []
    with file.open("ab") as more:
        more.write(whole[cut:])
    assert len(follower.poll().steps) == 1


def test_a_damaged_file_is_reported(tmp_path: Path, follow: Follow) -> None:
    live = Live(tmp_path / "run", record(replace(SETTING, shape=Shape(2, 2)), 1))
    with live.run.rank_records(0).open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(RrfpError, match=r"rank-0\.jsonl has a line that is not JSON"):
        follow(live.run.path).poll()
    told = rrfp_here(tmp_path, "watch", "run", "--once")
    assert told.returncode == 1
    assert told.stderr.startswith("rrfp: run/records/rank-0.jsonl has a line")
    live.end()


def test_a_line_that_is_too_long_is_reported(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow_module, "LONGEST_LINE_BYTES", 2 << 20)
    live = Live(tmp_path / "run", record(replace(SETTING, shape=Shape(2, 2)), 1))
    with live.run.rank_records(0).open("a") as file:
        file.write("x" * (3 << 20))
    with pytest.raises(RrfpError, match=r"rank-0\.jsonl has a line that is longer than 2 MiB"):
        follow(live.run.path).poll()
    live.end()


def test_the_last_records_are_read_after_they_became_a_trace(
    tmp_path: Path, follow: Follow
) -> None:
    live = Live(tmp_path / "run", record(SETTING, 4))
    with noting_outcome(live.run):
        live.write(0, 1)
        follower = follow(live.run.path)
        assert len(follower.poll().steps) == 2
        assert follower.state()[0] is RunState.GOING
        live.write(2, 3)
        live.end()
        encode_run(live.run.path)
    assert not live.run.records.exists()
    assert follower.state() == (RunState.ENDED, "finished")
    assert [each.figures.step for each in follower.poll().steps] == [2, 3]


def test_an_ended_run_is_read_from_its_trace(tmp_path: Path, follow: Follow) -> None:
    run = RunDir(tmp_path)
    write_run_files(run, record(SLOW, 30))
    follower = follow(tmp_path)
    news = follower.poll()
    assert len(news.steps) == 30
    assert [alert.alarm.pp_rank for alert in news.alerts] == [2]
    assert follower.state()[0] is RunState.ENDED
    assert follower.poll().steps == []


def test_a_killed_run_says_since_when_and_whose_records_stopped_first(
    tmp_path: Path, follow: Follow
) -> None:
    live = Live(tmp_path / "run", record(SETTING, 4))
    live.run.outcome.touch()
    live.write(0, 1)
    live.write(2, ranks=(0, 1, 3))
    follower = follow(live.run.path)
    follower.poll()
    live.end()
    stand, told = follower.state()
    assert stand is RunState.KILLED
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
    follower.poll()
    assert follower.state()[0] is RunState.GOING
    now_s += 31
    stand, told = follower.state()
    assert stand is RunState.SILENT
    assert told == "no step has ended for 31 s; step 2 is missing from rank 1 only"
    live.end()


def test_a_rank_that_records_nothing_is_named(tmp_path: Path, follow: Follow) -> None:
    live = Live(tmp_path / "run", record(SETTING, 4))
    live.write(0, 1, ranks=(0, 2, 3))
    follower = follow(live.run.path)
    follower.poll()
    assert follower.state() == (
        RunState.WAITING,
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
    follower.poll()
    stand, told = follower.state()
    assert stand is RunState.ENDED
    assert told.startswith("over; records stop at")


def test_a_resumed_run_is_followed_in_its_last_session(tmp_path: Path, follow: Follow) -> None:
    recording = record(SLOW, 30)
    live = Live(tmp_path / "run", recording)
    live.write(*range(5))
    follower = follow(live.run.path)
    assert len(follower.poll().steps) == 5
    live.end()
    again = Live(tmp_path / "run", recording, session=2)
    again.write(*range(3, 28))
    news = follower.poll()
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
        seen += [each.figures.step for each in follower.poll().steps]
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
    follower.poll()
    follower.state()
    assert asked == []
    writer = SpillWriter(run.rank_records(0), RankInfo(0, 0, 0, 0, (0,), "here", 1))
    follower.poll()
    follower.state()
    assert asked == [run.rank_records(0)]
    writer.close()


# Real ranks, one of which becomes slow: it is named while the run goes on.


def _train_with_a_slow_rank(
    path: str, slow: int, onset: int, num_steps: int, task_s: float
) -> None:
    """Run one of four ranks, whose tasks take `task_s`; those of `slow` twice that from step
    `onset` on."""
    rank = int(os.environ["RANK"])
    info = RankInfo(rank, rank, 0, 0, (rank,), "here", os.getpid())
    recorder = Recorder(RunDir(Path(path)).rank_records(rank), info)
    shape = Shape(4, 8)
    with open_rig(4, record=recorder.record) as rig:
        for step in range(num_steps):
            seconds = 2 * task_s if rank == slow and step >= onset else task_s

            def work(_: Task, seconds: float = seconds) -> None:
                time.sleep(seconds)

            summary = rig.run_step(step, shape, Work(work))
            times_ns = summary.start_ns, summary.end_ns
            recorder.record(PhaseRecord(*times_ns, step, Phase.SCHEDULE))
            recorder.flush(step)
    recorder.close()


@pytest.mark.timeout(240)
def test_a_real_rank_that_becomes_slow_is_named_while_the_run_goes_on(
    tmp_path: Path, follow: Follow
) -> None:
    slow, onset, num_steps = 2, 15, 35
    failures: list[BaseException] = []

    def train(run: Path, task_s: float) -> None:
        try:
            run_ranks(
                4, _train_with_a_slow_rank, str(run), slow, onset, num_steps, task_s, timeout_s=100
            )
        except BaseException as error:
            failures.append(error)

    named: list[Alert] = []
    # A busy machine delays sleeps by as much as tasks of 3 ms take; then they have to be longer.
    for task_s in (0.003, 0.03):
        run = tmp_path / str(task_s)
        run.mkdir()
        (run / "run.json").write_text(json.dumps({"world": 4}))
        ranks = Thread(target=train, args=(run, task_s))
        ranks.start()
        follower = follow(run)
        alerts = []
        while ranks.is_alive():
            alerts += follower.poll().alerts
            time.sleep(0.05)
        ranks.join()
        alerts += follower.poll().alerts
        assert not failures
        assert follower.last_step == num_steps - 1
        named = [
            alert
            for alert in alerts
            if alert.alarm.kind is Kind.RANK and alert.alarm.pp_rank == slow
        ]
        if named:
            break
    assert named
    assert onset <= named[0].step < onset + 10
    assert abs(named[0].alarm.since_step - onset) <= 2


# Who became slow: the statistics alone, and simulated runs with one cause or none.


EVEN = Setting(Shape(4, 8), replicas=1, hint="bf", seed=1, onset=12, scatter=0.05)


Grid = tuple[int, int, int]


def changes_of(
    detector: Detector, shape: Grid, shifts: dict[int, float], where: Grid, num_steps: int
) -> list[Changes]:
    """Return a detector's changes for samples with 1% scatter and one place shifted later."""
    rng = np.random.default_rng(3)
    found, shift = [], 0.0
    for step in range(num_steps):
        shift = shifts.get(step, shift)
        sample = rng.normal(0, 0.01, shape)
        sample[where] += np.log1p(shift)
        found.append(detector.add_sample(step, sample, np.full(shape, 0.6)))
    return found


def test_a_slow_place_is_reported_once_with_its_rise_and_its_first_step() -> None:
    changes = changes_of(Detector(1, 4, 1), (1, 4, 1), {20: 0.5}, (0, 2, 0), 60)
    told = [(step, slow) for step, each in enumerate(changes) for slow in each.slow]
    assert len(told) == 1
    step, slow = told[0]
    assert 20 + 8 <= step + 1 <= 20 + WINDOW
    assert (slow.where, slow.against, slow.since) == (GridPart(None, 2), Baseline.PAST, 20)
    assert slow.rise == pytest.approx(0.5, abs=0.03)


def test_a_recovery_is_reported_and_the_place_may_become_slow_again() -> None:
    detector = Detector(1, 4, 1)
    changes = changes_of(detector, (1, 4, 1), {20: 0.5, 40: 0.0, 60: 0.4}, (0, 1, 0), 75)
    events = [
        (step, "slow" if each.slow else "recovered")
        for step, each in enumerate(changes)
        if each.slow or each.recovered
    ]
    assert [name for _, name in events] == ["slow", "recovered", "slow"]
    assert 40 + 8 <= events[1][0] + 1 <= 40 + WINDOW
    assert 60 + 8 <= events[2][0] + 1 <= 60 + WINDOW
    assert [slow.since for slow in detector.active] == [60]


def test_it_stays_slow_for_as_long_as_it_is() -> None:
    """A long slowness does not become the norm."""
    detector = Detector(1, 4, 1)
    changes = changes_of(detector, (1, 4, 1), {20: 0.3}, (0, 1, 0), 300)
    assert sum(len(each.slow) + len(each.recovered) for each in changes) == 1
    assert detector.active


@pytest.mark.parametrize("num_slow", [1, 5])
def test_a_few_long_steps_are_no_slowness(num_slow: int) -> None:
    changes = changes_of(Detector(3, 4, 2), (3, 4, 2), {20: 2.0, 20 + num_slow: 0.0}, (1, 2, 0), 60)
    assert not any(each.slow for each in changes)


def test_a_member_is_distinguished_from_its_tensor_parallel_peers() -> None:
    changes = changes_of(Detector(2, 2, 4), (2, 2, 4), {0: 0.2}, (1, 0, 3), 12)
    (slow,) = [slow for each in changes for slow in each.slow]
    assert (slow.where, slow.against) == (GridPart(1, 0, 3), Baseline.MEMBERS)


def test_peers_reveal_what_was_slow_from_the_first_step() -> None:
    changes = changes_of(Detector(3, 4, 1), (3, 4, 1), {0: 0.3}, (2, 1, 0), 12)
    (slow,) = [slow for each in changes for slow in each.slow]
    assert (slow.where, slow.against, slow.since) == (GridPart(2, 1), Baseline.PEERS, 0)


def test_longer_data_are_no_place_s_fault() -> None:
    """From step 20 on everything takes twice as long, and in one replica of two lengths scatter."""
    rng = np.random.default_rng(5)
    detector = Detector(2, 4, 1)
    for step in range(80):
        sample = rng.normal(0, 0.01, (2, 4, 1)) + (np.log(2) if step >= 20 else 0.0)
        sample[1] += rng.normal(0, 0.2)
        changes = detector.add_sample(step, sample, np.full((2, 4, 1), 0.6))
        assert not changes.slow


def test_a_slow_place_without_cost_is_not_reported() -> None:
    detector = Detector(1, 4, 1)
    for step in range(40):
        sample = np.zeros((1, 4, 1))
        sample[0, 1] += 1.0 if step >= 20 else 0.0
        assert not detector.add_sample(step, sample, np.full((1, 4, 1), 0.01)).slow
    assert detector.leading is not None


def test_a_place_that_is_missing_counts_as_its_peers() -> None:
    detector = Detector(2, 3, 1)
    for step in range(40):
        sample = np.zeros((2, 3, 1))
        sample[1, 2] = np.nan
        assert detector.add_sample(step, sample, np.full((2, 3, 1), 0.5)) == Changes()


def test_a_single_rank_has_nobody_to_be_compared_with() -> None:
    detector = Detector(1, 1, 1)
    for step in range(40):
        sample = np.full((1, 1, 1), float(step > 20))
        assert detector.add_sample(step, sample, np.ones((1, 1, 1))) == Changes()


@pytest.mark.parametrize(
    "setting",
    [
        replace(EVEN, cause=Kind.RANK, stage=2, times=1.3),
        replace(EVEN, cause=Kind.RANK, stage=0, replica=1, times=1.15, replicas=2),
        replace(EVEN, cause=Kind.STAGE, stage=3, times=1.5, replicas=3),
        replace(EVEN, cause=Kind.REPLICA, replica=1, times=1.2, replicas=2),
        replace(EVEN, cause=Kind.LINK, link=(2, 1), times=2, message_ns=5_000),
    ],
    ids=lambda setting: f"{setting.cause}-{setting.replicas}",
)
def test_a_cause_is_named_within_ten_steps(setting: Setting) -> None:
    alert = first_alert(setting)
    assert alert is not None
    assert setting.is_named(alert), alert.text
    assert setting.onset <= alert.step < setting.onset + WINDOW
    assert abs(alert.alarm.since_step - setting.onset) <= 1
    assert alert.alarm.rise == pytest.approx(setting.times - 1, abs=0.1)


def test_a_tensor_parallel_group_is_named_as_one() -> None:
    """The ranks run the same tasks, so the slow one cannot be identified."""
    setting = replace(EVEN, cause=Kind.RANK, stage=1, times=1.5, replicas=2, members=2)
    alert = first_alert(setting)
    assert alert is not None
    assert alert.alarm.place == "ranks 4, 5 (stage 1, replica 0, on simulated)"
    told = alert.alarm.text.removeprefix(alert.alarm.place)
    assert told == " take 48% longer than their peers in other replicas, since step 12"


def test_several_chunks_a_rank_are_no_stages() -> None:
    shape = Shape(2, 4, num_chunks=2)
    setting = replace(EVEN, shape=shape, hint="bf-deep", cause=Kind.RANK, stage=1, times=1.5)
    alert = first_alert(setting)
    assert alert is not None
    assert alert.alarm.place == "rank 1 (pipeline rank 1, replica 0, on simulated)"


def test_uneven_layers_are_reported_as_work_and_never_as_slow() -> None:
    recording = record(replace(EVEN, layers=(2, 2, 3, 2)), 30)
    assert alerts_in(recording) == []
    extra = extra_work(figures_of(recording)[-WINDOW:])
    assert max(extra, key=lambda stage: extra[stage]) == 2
    assert extra[2] == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_a_clean_run_raises_no_alarm(seed: int) -> None:
    assert alerts_in(record(clean(seed), 40)) == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_500_causes_are_named_within_ten_steps() -> None:
    missed = []
    for seed in range(500):
        setting = planted(seed)
        alert = first_alert(setting)
        if alert is None or not setting.is_named(alert) or alert.step < setting.onset:
            missed.append((seed, setting, alert))
    assert len(missed) <= 25, missed


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_100_clean_runs_raise_no_alarm() -> None:
    found = [(seed, told) for seed in range(100) if (told := alerts_in(record(clean(seed), 60)))]
    assert found == []
