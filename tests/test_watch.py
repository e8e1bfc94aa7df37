"""`rrfp watch`: a run is followed from its files, whatever becomes of it, and takes no notice."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from math import log
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from rrfp.errors import RrfpError
from rrfp.runtime.recorder import Recorder
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Task
from rrfp.trace.merge import encode_run
from rrfp.trace.outcome import noting_outcome
from rrfp.trace.records import Phase, PhaseRecord, RankInfo, Recording
from rrfp.trace.run_files import write_run_files
from rrfp.trace.rundir import RunDir
from rrfp.trace.segments import number_of, segments_in
from rrfp.trace.spill import SpillWriter, row_of
from rrfp.watch import follow as follow_module
from rrfp.watch.alarms import Kind
from rrfp.watch.follow import Follower, Stand
from tests.rank_rig import Work, open_rig
from tests.ranks import run_ranks
from tests.trained import rrfp_here
from tests.watched import Setting, record, step_of

ROOT = Path(__file__).parent.parent
SETTING = Setting(Shape(4, 8), replicas=1, hint="bf", seed=1, onset=12, scatter=0.05)
SLOW = replace(SETTING, cause=Kind.RANK, stage=2, times=1.5)


Follow = Callable[..., Follower]


@pytest.fixture
def follow() -> Iterator[Follow]:
    """Makes followers, and closes them."""
    made: list[Follower] = []

    def make(*arguments: Any) -> Follower:
        made.append(Follower(*arguments))
        return made[-1]

    yield make
    for follower in made:
        follower.close()


class Live:
    """A recording that is written as its ranks would write it, a step at a time."""

    def __init__(
        self,
        path: Path,
        recording: Recording,
        session: int = 1,
        most_bytes: int | None = None,
    ) -> None:
        self.run = RunDir(path, session)
        self._recording = recording
        path.mkdir(exist_ok=True)
        described = {**recording.settings, "settings": {"steps": 30}}
        self.run.run_json.write_text(json.dumps(described))
        self._writers = {
            records.info.rank: SpillWriter(
                self.run.rank_records(records.info.rank), records.info, most_bytes
            )
            for records in recording.ranks
        }

    def write(self, *steps: int, ranks: tuple[int, ...] | None = None) -> None:
        for step in steps:
            for records in step_of(self._recording, step):
                if ranks is None or records.info.rank in ranks:
                    writer = self._writers[records.info.rank]
                    for of_kind in records.by_name().values():
                        writer.append(map(row_of, of_kind))
                    writer.flush()

    def end(self) -> None:
        for writer in self._writers.values():
            writer.close()


def _write_run(path: Path, recording: Recording) -> None:
    path.mkdir()
    write_run_files(RunDir(path), recording)


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


def test_a_run_without_records_shows_its_metrics(tmp_path: Path) -> None:
    line = {"step": 4, "loss": 2.5, "step_time_s": 0.5, "tokens": 100, "busy_fraction": [0.5, 0.25]}
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(line)}\n")
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "outcome.json").write_text('{"outcome": "finished", "error": null}\n')
    shown = rrfp_here(tmp_path, "watch", str(tmp_path), "--once")
    assert "loss 2.5000  500 ms a step  200 tokens/s" in shown.stdout
    assert "There are no records" in shown.stdout
    lines = rrfp_here(tmp_path, "watch", str(tmp_path))
    assert lines.stdout.splitlines()[0].startswith("step 4  loss 2.5")


# On the command line.


def test_the_page_names_what_is_slow_in_24_lines(
    tmp_path: Path, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _write_run(tmp_path / "run", record(SLOW, 30))
    shown = rrfp_here(tmp_path, "watch", "run", "--once")
    lines = shown.stdout.splitlines()
    assert (shown.returncode, shown.stderr) == (0, "")
    page = "".join(f"{line.rstrip()}\n" for line in lines)
    golden("screens/watch.txt", page)
    assert page in (ROOT / "docs" / "guide" / "watch.md").read_text()
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines)
    told = " ".join(shown.stdout.split())
    assert "Slow: rank 2 (stage 2, replica 0, on simulated) takes" in told
    assert "longer than before, since step 12" in told


def test_lines_and_json_tell_each_step_and_alert_once(tmp_path: Path) -> None:
    _write_run(tmp_path / "run", record(SLOW, 30))
    lines = rrfp_here(tmp_path, "watch", "run").stdout.splitlines()
    assert [line for line in lines if line.startswith("step 7  ")]
    assert len(lines) == 1 + 30 + 1
    told = [json.loads(line) for line in _stdout(tmp_path, "watch", "run", "--format", "json")]
    assert [each["step"] for each in told if each["event"] == "step"] == [*range(30)]
    (slow,) = [each for each in told if each["event"] == "slow"]
    assert (slow["kind"], slow["ranks"], slow["since_step"]) == ("rank", [2], 12)
    last = next(each for each in reversed(told) if each["event"] == "step")
    assert last["slow"]["rank_2"] == pytest.approx(0.5, abs=0.1)
    assert 0 < last["bubble_fraction"] < 1


def test_alert_says_nothing_of_a_clean_run(tmp_path: Path) -> None:
    _write_run(tmp_path / "run", record(SETTING, 30))
    assert _stdout(tmp_path, "watch", "run", "--alert") == ["run: recorded, and over"]


def test_an_alert_runs_the_command(tmp_path: Path) -> None:
    _write_run(tmp_path / "run", record(SLOW, 30))
    command = 'echo "$RRFP_ALERT $RRFP_ALERT_KIND $RRFP_ALERT_RANKS $RRFP_ALERT_SINCE_STEP" >> told'
    done = rrfp_here(tmp_path, "watch", "run", "--alert", "--alert-command", command)
    assert done.returncode == 0
    assert (tmp_path / "told").read_text() == "slow rank 2 12\n"
    failed = rrfp_here(tmp_path, "watch", "run", "--alert", "--alert-command", "echo no; exit 4")
    assert failed.stderr == "note: the alert command ended with 4: no\n"


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("nowhere",), 1, "there is no run or trace at nowhere"),
        (("run.json",), 2, "run.json is not the directory of a run"),
        ((".", "--alert", "--once"), 2, "--alert waits for steps to come"),
        ((".", "--export", "prometeus:x"), 2, "did you mean 'prometheus'?"),
        ((".", "--export", "wandb"), 2, "--export wandb needs a directory"),
        ((), 1, "there is no run yet in runs"),
    ],
)
def test_what_cannot_be_watched_is_a_sentence(
    tmp_path: Path, arguments: tuple[str, ...], code: int, told: str
) -> None:
    (tmp_path / "run.json").write_text("{}")
    done = rrfp_here(tmp_path, "watch", *arguments)
    assert done.returncode == code
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_live_page_draws_and_leaves_with_the_run(tmp_path: Path) -> None:
    """In a terminal of 80 x 24, on a run that goes on meanwhile; then Ctrl-C on another one."""
    live = Live(tmp_path / "run", record(SLOW, 30))
    with noting_outcome(live.run):
        live.write(*range(10))
        screen = _Screen(tmp_path, "watch", "run")
        assert screen.shows("10 of 30 steps")
        live.write(*range(10, 30))
        assert screen.shows("30 of 30 steps")
        assert screen.shows("Slow: rank 2")
        live.end()
    assert screen.shows("finished")
    assert screen.ended() == 0
    (tmp_path / "other").mkdir()
    screen = _Screen(tmp_path, "watch", "other")
    assert screen.shows("nothing is recorded yet")
    screen.interrupt()
    assert screen.ended() == 130


def _stdout(directory: Path, *arguments: str) -> list[str]:
    return rrfp_here(directory, *arguments).stdout.splitlines()


class _Screen:
    """A command in a terminal."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._master, terminal = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rrfp", *arguments],
            cwd=directory,
            env={**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm"},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
        )
        os.close(terminal)
        self._shown = b""

    def shows(self, text: str, within_s: float = 60.0) -> bool:
        """Whether it comes to show this."""
        deadline_s = time.monotonic() + within_s
        while text.encode() not in self._shown:
            if time.monotonic() > deadline_s:
                raise AssertionError(f"{text!r} is not in {self._shown[-2000:].decode()}")
            self._read()
        return True

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def ended(self) -> int:
        deadline_s = time.monotonic() + 60
        while self._process.poll() is None and time.monotonic() < deadline_s:
            self._read()
        self._process.kill()
        os.close(self._master)
        return self._process.wait()

    def _read(self) -> None:
        ready, _, _ = select.select([self._master], [], [], 0.1)
        if ready:
            with suppress(OSError):
                self._shown += os.read(self._master, 65536)


# With real ranks.


def _train_with_a_slow_rank(path: str, slow: int, onset: int, num_steps: int) -> None:
    """A rank of four, whose tasks take 3 ms, and on one rank from some step on 6 ms."""
    rank = int(os.environ["RANK"])
    info = RankInfo(rank, rank, 0, 0, (rank,), "here", os.getpid())
    recorder = Recorder(RunDir(Path(path)).rank_records(rank), info)
    shape = Shape(4, 8)
    with open_rig(4, record=recorder.record) as rig:
        for step in range(num_steps):
            is_slow = rank == slow and step >= onset

            def work(_: Task, seconds: float = 0.006 if is_slow else 0.003) -> None:
                time.sleep(seconds)

            summary = rig.run_step(step, shape, Work(work))
            times_ns = summary.start_ns, summary.end_ns
            recorder.record(PhaseRecord(*times_ns, step, Phase.SCHEDULE))
            recorder.flush(step)
    recorder.close()


@pytest.mark.timeout(120)
def test_a_real_rank_that_becomes_slow_is_named_while_the_run_goes_on(
    tmp_path: Path, follow: Follow
) -> None:
    onset, num_steps = 15, 35
    (tmp_path / "run.json").write_text(json.dumps({"world": 4}))
    failures: list[BaseException] = []

    def train() -> None:
        try:
            run_ranks(4, _train_with_a_slow_rank, str(tmp_path), 2, onset, num_steps)
        except BaseException as error:
            failures.append(error)

    ranks = Thread(target=train)
    ranks.start()
    follower = follow(tmp_path)
    alerts = []
    while ranks.is_alive():
        alerts += follower.look().alerts
        time.sleep(0.05)
    ranks.join()
    alerts += follower.look().alerts
    assert not failures
    assert follower.last_step == num_steps - 1
    named = [each for each in alerts if each.alarm.kind is Kind.RANK and each.alarm.pp_rank == 2]
    assert named, alerts
    assert onset <= named[0].step < onset + 10
    assert abs(named[0].alarm.since_step - onset) <= 2
