"""Traces of runs that died: they state that, and show the step in which the runs died."""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rrfp.trace.check import Promise, check_contents
from rrfp.trace.flight_record import FlightRing, ring_of
from rrfp.trace.merge import encode_run
from rrfp.trace.outcome import Outcome
from rrfp.trace.perfetto.reader import read_contents, read_trace
from rrfp.trace.records import (
    BegunRecord,
    Doing,
    Phase,
    PhaseRecord,
    Recording,
    StimulusRecord,
    WaitRecord,
)
from rrfp.trace.run_dir import RunDir, create_run_dir
from rrfp.trace.spill import SpillWriter, row_of
from rrfp.train.settings import TrainSettings
from tests.analyze.recordings import make_recording
from tests.e2e.ranks import RankFailedError, run_ranks
from tests.train.checkpointed import SMALL, work
from tests.train.trained import ENDLESS, Training, rrfp_here

pytestmark = pytest.mark.timeout(300)

MS = 1_000_000
FATAL = 2
"""The step in which the made-up runs of this module end."""
ERROR = "rank 1 (pid 101) was killed by SIGKILL; its last output is in run/logs/rank-1.log"


def begun(start_ns: int, doing: str, *task: Any, step: int = FATAL) -> BegunRecord:
    return BegunRecord(start_ns, start_ns, step, doing, *task)


class DeadRun:
    """The files of a run of 4 ranks and 10 steps that ended in its third step."""

    def __init__(self, path: Path) -> None:
        self.run = RunDir(path)
        self.whole = make_recording(4, 6, FATAL + 1)
        path.mkdir()
        self.describe(10)
        self.end(Outcome.FAILED, ERROR)
        self.run.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(FATAL)))

    def describe(self, steps: int) -> None:
        described = {**self.whole.settings, "settings": {"steps": steps}}
        self.run.run_json.write_text(json.dumps(described))

    def end(self, outcome: Outcome, error: str | None = None) -> None:
        self.run.outcome.write_text(json.dumps({"outcome": outcome, "error": error}))

    def record(self, rank: int, *last: BegunRecord, until_ns: int | None = None) -> list[Any]:
        """Write the files of a rank that died: its finished steps in its spill file, and in its
        flight record also the fatal step's records up to `until_ns` and the activity it had
        begun."""
        records = self.whole.ranks[rank]
        everything = sorted(
            (r for found in records.by_name().values() for r in found if not _is_of_flush(r)),
            key=_ended_ns,
        )
        spill = self.run.rank_records(rank)
        writer = SpillWriter(spill, records.info)
        finished = [row_of(record) for record in everything if record.step < FATAL]
        if finished:
            writer.append(finished)
            writer.flush()
        writer.close()
        ring = FlightRing(ring_of(spill))
        taken = [
            record
            for record in everything
            if record.step < FATAL or (until_ns is not None and _ended_ns(record) <= until_ns)
        ]
        for record in (*taken, *last):
            ring.put(record)
        return [record for record in taken if record.step == FATAL]

    def recording(self) -> Recording:
        return read_trace(encode_run(self.run.path))

    def problems(self) -> list[str]:
        contents = read_contents(encode_run(self.run.path))
        promise = Promise.of_run(self.run.trace, contents.recording.settings)
        return check_contents(contents, promise)


def _is_of_flush(record: Any) -> bool:
    return type(record).__name__ in ("CostRecord", "LossRecord")


def _ended_ns(record: Any) -> int:
    return int(record[1] if hasattr(record, "end_ns") else record[0])


@pytest.fixture
def dead(tmp_path: Path) -> DeadRun:
    return DeadRun(tmp_path / "run")


def amid_fatal_step(dead: DeadRun) -> int:
    """The time in the middle of the fatal step."""
    tasks = [task for rank in dead.whole.ranks for task in rank.tasks if task.step == FATAL]
    return (min(t.start_ns for t in tasks) + max(t.end_ns for t in tasks)) // 2


def died(dead: DeadRun) -> int:
    """Make files in which every rank died within the fatal step; returns the time."""
    middle_ns = amid_fatal_step(dead)
    waits = begun(middle_ns - 50_000, "backward_input", "B", 1, 2, 1)
    dead.record(0, waits, until_ns=middle_ns)
    dead.record(1, begun(middle_ns - 20_000, Doing.TASK, "F", 1, 5), until_ns=middle_ns)
    waits = begun(middle_ns - 12_000, "forward_input", "F", 1, 5, 1)
    dead.record(2, waits, until_ns=middle_ns)
    dead.record(3, begun(middle_ns - 40_000, "forward_input"), until_ns=middle_ns)
    return middle_ns


def test_the_records_of_the_fatal_step_are_in_the_trace(dead: DeadRun) -> None:
    middle_ns = amid_fatal_step(dead)
    lost = [dead.record(rank, until_ns=middle_ns) for rank in range(4)]
    found = dead.recording()
    assert all(len(each) > 3 for each in lost)
    for rank, expected in zip(found.ranks, lost, strict=True):
        of_step = [r for each in rank.by_name().values() for r in each if r.step == FATAL]
        assert len(of_step) == len(expected)
        original = dead.whole.ranks[rank.info.rank]
        assert [task[2:] for task in rank.tasks] == [
            task[2:] for task in original.tasks if task.step < FATAL or task.end_ns <= middle_ns
        ]
    assert not dead.run.records.exists()


def test_a_dead_run_is_not_whole_and_says_why(dead: DeadRun) -> None:
    died(dead)
    assert dead.problems() == [
        f"incomplete: the run failed: {ERROR}",
        "missing: steps 2 to 9 of the 10 that the run was to make",
        "incomplete: the run ended in step 2, which 4 ranks (0; 1; 2; ...) did not finish",
        "unfinished: 4 ranks ended amid something (rank 0: backward_input, for B2 of rank 1 in "
        "step 2; rank 1: F5 in step 2; rank 2: forward_input, for F5 of rank 1 in step 2; ...)",
    ]


def test_an_unended_activity_lasts_to_the_end_of_the_run(dead: DeadRun) -> None:
    died(dead)
    found = dead.recording()
    ends_ns = {each.end_ns for rank in found.ranks for each in rank.begun}
    last_ns = max(
        _ended_ns(r) for rank in found.ranks for each in rank.by_name().values() for r in each
    )
    assert ends_ns == {last_ns}
    (task,) = found.ranks[1].begun
    assert task.start_ns < last_ns
    assert task[2:] == (FATAL, "task", "F", 1, 5, -1)


def test_records_only_in_a_flight_record_may_be_the_first_of_a_run(dead: DeadRun) -> None:
    """In a run that ended in its first step, one rank has files, and another one only began."""
    whole, other = dead.whole.ranks[:2]
    first_ns = min(task.start_ns for task in whole.tasks)
    for records in (whole, other):
        writer = SpillWriter(dead.run.rank_records(records.info.rank), records.info)
        if records is whole:
            writer.append([row_of(task) for task in whole.tasks if task.step == 0])
            writer.flush()
        writer.close()
    ring = FlightRing(ring_of(dead.run.rank_records(other.info.rank)))
    ring.put(begun(first_ns - 5_000, Doing.SETTING_UP, step=0))
    found = dead.recording()
    assert [each.start_ns for each in found.ranks[1].begun] == [0]
    assert min(task.start_ns for task in found.ranks[0].tasks) == 5_000


F3 = ("F", 1, 3)


@pytest.mark.parametrize(
    ("taken", "open_", "since_ns"),
    [
        ([begun(5, Doing.TASK, *F3)], "task", 5),
        ([begun(5, "drain"), WaitRecord(5, 9, FATAL, "drain")], None, 0),
        # A message does not end the wait, which is recorded again and begins at its first record.
        ([begun(5, "warmup"), begun(7, "warmup"), begun(9, "warmup", *F3, 0)], "warmup", 5),
        ([begun(5, "warmup"), begun(7, "forward_input")], "forward_input", 7),
        ([begun(5, Doing.TASK, *F3), begun(7, Doing.TASK, *F3)], "task", 7),
        # Around the tasks there is the schedule, and after it what follows.
        (
            [begun(1, Phase.SCHEDULE), begun(5, "drain"), WaitRecord(5, 9, 2, "drain")],
            "schedule",
            1,
        ),
        (
            [begun(1, Phase.SCHEDULE), PhaseRecord(2, 3, FATAL, Phase.DATA)],
            "schedule",
            1,
        ),
        (
            [begun(1, Phase.SCHEDULE), PhaseRecord(1, 3, FATAL, Phase.SCHEDULE)],
            "between phases",
            3,
        ),
        # On a GPU the records of a step may come after the next one has begun.
        (
            [begun(1, Phase.SCHEDULE), begun(4, Doing.TASK, *F3), WaitRecord(0, 3, 1, "drain")],
            "task",
            4,
        ),
        ([begun(1, Phase.SCHEDULE), begun(4, Phase.OPTIMIZER)], "optimizer", 4),
        ([begun(1, Doing.METRICS), begun(4, Phase.DATA, step=3)], "data", 4),
    ],
)
def test_the_activity_that_a_rank_never_ended(
    dead: DeadRun, taken: list[Any], open_: str | None, since_ns: int
) -> None:
    info = dead.whole.ranks[0].info
    SpillWriter(dead.run.rank_records(0), info).close()
    ring = FlightRing(ring_of(dead.run.rank_records(0)))
    # The first record of a run is at 0 in its trace.
    for record in (StimulusRecord(0, FATAL, "ComputeIdle", "", -1, -1, 0), *taken):
        ring.put(record)
    found = [] if open_ is None else [(open_, since_ns)]
    assert [(each.doing, each.start_ns) for each in dead.recording().ranks[0].begun] == found


def test_a_step_whose_first_records_are_lost_is_never_complete(
    dead: DeadRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the ring was overwritten since its rank last spilled, only the running step is used."""
    monkeypatch.setattr("rrfp.trace.flight_record.MOST_RECORDS", 12)
    end_ns = max(phase.end_ns for rank in dead.whole.ranks for phase in rank.phases)
    dead.record(0, begun(end_ns, Phase.OPTIMIZER), until_ns=end_ns)
    for rank in range(1, 4):
        dead.record(rank, until_ns=end_ns)
    (first, *_) = dead.recording().ranks
    assert {phase.step for phase in first.phases if phase.phase == Phase.SCHEDULE} == {0, 1}
    assert 0 < len([task for task in first.tasks if task.step == FATAL]) < 12
    assert "missing: steps 2 to 9 of the 10 that the run was to make" in dead.problems()


def test_a_rank_that_was_killed_between_steps_lacks_nothing(dead: DeadRun) -> None:
    for rank in range(4):
        dead.record(rank, begun(10**9, Doing.METRICS, step=FATAL - 1))
    dead.describe(FATAL)
    assert dead.problems() == [
        f"incomplete: the run failed: {ERROR}",
        "unfinished: 4 ranks ended amid something (rank 0: metrics in step 1; rank 1: metrics in "
        "step 1; rank 2: metrics in step 1; ...)",
    ]


# The steps that a run promised.


def finished(dead: DeadRun) -> DeadRun:
    """Make files of a run that finished after the third step."""
    dead.describe(FATAL + 1)
    dead.end(Outcome.FINISHED)
    dead.run.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(FATAL + 1)))
    for records in dead.whole.ranks:
        writer = SpillWriter(dead.run.rank_records(records.info.rank), records.info)
        writer.append(row_of(r) for found in records.by_name().values() for r in found)
        writer.flush()
        writer.close()
    return dead


def test_a_run_that_came_to_its_end_is_whole(dead: DeadRun) -> None:
    assert finished(dead).problems() == []


def test_steps_that_were_trained_and_not_recorded_are_lost(dead: DeadRun) -> None:
    finished(dead).describe(8)
    steps = [*range(5), 7]
    dead.run.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in steps) + '{"st')
    assert dead.problems() == [
        "lost: steps 3 to 4, 7, which metrics.jsonl says were trained",
        "missing: steps 5 to 6 of the 8 that the run was to make",
    ]


def test_a_trace_without_its_run_is_checked_by_its_description(
    dead: DeadRun, tmp_path: Path
) -> None:
    finished(dead).describe(4)
    shutil.move(encode_run(dead.run.path), tmp_path / "bare.pftrace")
    contents = read_contents(tmp_path / "bare.pftrace")
    promise = Promise.of_run(tmp_path / "bare.pftrace", contents.recording.settings)
    assert check_contents(contents, promise) == [
        "missing: step 3 of the 4 that the run was to make"
    ]


@pytest.mark.parametrize(
    ("outcome", "error", "told"),
    [
        (Outcome.STOPPED, None, []),
        (
            Outcome.STOPPED,
            "the run was stopped by SIGTERM",
            ["incomplete: the run was stopped by SIGTERM"],
        ),
        (Outcome.INTERRUPTED, None, ["incomplete: the run was interrupted"]),
    ],
)
def test_a_run_that_was_stopped(
    dead: DeadRun, outcome: Outcome, error: str | None, told: list[str]
) -> None:
    """A run that stopped on request after a step may be resumed, and its trace is complete."""
    finished(dead).describe(5)
    dead.end(outcome, error)
    lacks = ["missing: steps 3 to 4 of the 5 that the run was to make"] if told else []
    assert dead.problems() == [*told, *lacks]


def test_a_killed_launcher_is_reported(dead: DeadRun) -> None:
    finished(dead)
    dead.run.outcome.write_text("")
    assert dead.problems() == [
        "incomplete: the run's launcher was killed, and nobody wrote how it ended"
    ]


@pytest.mark.parametrize("reason", ["[Errno 28] No space left on device", "x" * 400])
def test_a_rank_that_switched_recording_off_is_reported(dead: DeadRun, reason: str) -> None:
    """As on a full disk; later steps do not report it again."""
    finished(dead)
    records = dead.whole.ranks[2]
    writer = SpillWriter(dead.run.rank_records(2), records.info)
    writer.append(row_of(r) for each in records.by_name().values() for r in each if r.step < 1)
    writer.flush()
    writer.close()
    ring = FlightRing(ring_of(dead.run.rank_records(2)))
    ring.note_off(1, reason)
    ring.close()
    assert dead.problems() == [
        "lost: steps 1 to 2, which metrics.jsonl says were trained",
        f"incomplete: 1 rank (2) switched recording off in step 1: {reason}",
    ]


def test_a_recording_that_was_cut_on_all_ranks_is_not_whole(dead: DeadRun) -> None:
    """A check of the records alone cannot find this."""
    finished(dead)
    for records in dead.whole.ranks:
        rank = records.info.rank
        writer = SpillWriter(dead.run.rank_records(rank), records.info)
        writer.append(row_of(r) for each in records.by_name().values() for r in each if r.step < 1)
        writer.flush()
        writer.close()
    assert dead.problems() == ["lost: steps 1 to 2, which metrics.jsonl says were trained"]


def test_ranks_whose_records_end_early_are_named_once(dead: DeadRun) -> None:
    finished(dead)
    records = dead.whole.ranks[3]
    writer = SpillWriter(dead.run.rank_records(3), records.info)
    writer.append(row_of(r) for each in records.by_name().values() for r in each if r.step < 1)
    writer.flush()
    writer.close()
    assert dead.problems() == [
        "lost: steps 1 to 2, which metrics.jsonl says were trained",
        "incomplete: the records of 1 rank (3) end with step 0, others' with step 2",
    ]


def test_a_damaged_flight_record_is_reported_and_loses_nothing_else(dead: DeadRun) -> None:
    finished(dead)
    ring_of(dead.run.rank_records(1)).write_bytes(b"\xff" * 5000)
    assert dead.problems() == ["lost: the flight record of 1 rank (1), which is damaged"]


def test_a_session_must_have_its_steps_up_to_the_next_session(dead: DeadRun) -> None:
    trace = encode_run(finished(dead).run.path)
    description = json.loads(dead.run.run_json.read_text())
    description["settings"]["steps"] = 20
    later = {**description, "session": 2, "first_step": 3, "sessions": [description]}
    dead.run.run_json.write_text(json.dumps(later))
    dead.run.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(20)))
    contents = read_contents(trace)
    assert check_contents(contents, Promise.of_run(trace, description)) == []
    later["first_step"] = 5
    dead.run.run_json.write_text(json.dumps(later))
    assert check_contents(contents, Promise.of_run(trace, description)) == [
        "lost: steps 3 to 4, which metrics.jsonl says were trained"
    ]


def test_a_joined_trace_must_have_the_steps_of_all_sessions(dead: DeadRun) -> None:
    trace = encode_run(finished(dead).run.path)
    steps = [*range(6)]
    dead.run.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in steps))
    contents = read_contents(trace)
    own = contents.recording.settings
    contents.recording.settings = {**own, "session": 2, "first_step": 5, "sessions": [own]}
    promise = Promise.of_run(dead.run.joined_trace, contents.recording.settings)
    assert check_contents(contents, promise) == [
        "lost: steps 3 to 5, which metrics.jsonl says were trained"
    ]


# The first view of `rrfp analyze`.


def shown(dead: DeadRun, *arguments: str) -> str:
    done = rrfp_here(dead.run.path.parent, "analyze", "run", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_dead_run_opens_on_its_last_moments(
    dead: DeadRun, golden: Callable[[str, str], None]
) -> None:
    died(dead)
    screen = shown(dead)
    golden("screens/dead-run.txt", "\n".join(line.rstrip() for line in screen.splitlines()) + "\n")
    assert all(len(line) <= 80 for line in screen.splitlines())
    told = json.loads(shown(dead, "--format", "json"))
    assert told["fatal"]["sentence"] == f"the run failed: {ERROR}"
    assert told["fatal"]["step"] == FATAL
    waits = {
        each["rank"]: (each["amid"], each["awaited_task"], each["awaited_rank"])
        for each in told["fatal"]["ranks"]
    }
    assert waits == {
        0: ("backward_input", "B2", 1),
        1: ("F5", None, None),
        2: ("forward_input", "F5", 1),
        3: ("forward_input", None, None),
    }
    assert told["findings"] is not None
    # Its finished steps are those of any run.
    assert "A step takes" in shown(dead, "--steps", "0:")


def test_a_run_that_died_in_its_first_step_can_be_looked_at(dead: DeadRun) -> None:
    records = dead.whole.ranks[0]
    SpillWriter(dead.run.rank_records(0), records.info).close()
    ring = FlightRing(ring_of(dead.run.rank_records(0)))
    ring.put(begun(5, Phase.SCHEDULE, step=0))
    assert "schedule" in shown(dead)
    assert json.loads(shown(dead, "--format", "json"))["fatal"]["step"] == 0


def test_bubbles_are_those_of_whole_steps_only(dead: DeadRun) -> None:
    died(dead)
    done = rrfp_here(dead.run.path.parent, "analyze", "bubbles", "run", "--format", "json")
    assert done.returncode == 0
    assert "left out, as not every rank finished them: step 2" in done.stderr


# Real runs.


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["ready", "fixed", "megatron"])
def test_a_rank_that_is_killed_within_a_step(tmp_path: Path, dispatch: str) -> None:
    with Training(tmp_path / "run", *ENDLESS, "--pp=4", "--dispatch", dispatch) as training:
        training.await_steps(3)
        pid = training.stop_amid_tasks(1)
        step = training.num_steps
        os.kill(pid, signal.SIGKILL)
        code, _, _ = training.ended(timeout_s=60)
        assert code == 1
        problems = problems_of(training.run)
        assert problems[0].startswith(f"incomplete: the run failed: rank 1 (pid {pid}) was killed")
        found = read_trace(training.run / "trace.pftrace")
        for records in found.ranks:
            assert [each.step for each in records.begun] == [step]
            assert [task for task in records.tasks if task.step == step]
        shown = rrfp_here(tmp_path, "analyze", "run", "--format", "json")
        fatal = json.loads(shown.stdout)["fatal"]
        assert (fatal["step"], len(fatal["ranks"])) == (step, 4)
        assert 1 in {each["awaited_rank"] for each in fatal["ranks"]}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_that_die_at_random_moments(tmp_path: Path) -> None:
    tally = end_runs(tmp_path, 6, seed=3)
    assert tally["of which the last step is known"] == 6


# Runs killed at random moments: `python -m tests.trace.test_dead_runs --runs 47`. One rank dies, or
# all die at once, without a chance to write anything. The trace of a run that died must have
# records of its last step from every rank, and `rrfp trace check` must not call it complete.


LAYOUTS: tuple[dict[str, Any], ...] = (
    {"pp": 4},
    {"pp": 2, "dp": 2},
    {"pp": 2, "tp": 2},
    {"pp": 2, "chunks": 2},
)
DISPATCHES = ("ready", "fixed", "megatron")
STEPS = 30
TIMEOUT_S = 300.0


class CalledWholeError(AssertionError):
    """A run that died is called complete, or its last step has no records."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=47)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rrfp-dead-") as name:
        end_runs(Path(name), asked.runs, asked.seed)


def end_runs(directory: Path, num_runs: int, seed: int) -> Counter[str]:
    """Kill `num_runs` runs. Returns counts of the outcomes; raises CalledWholeError."""
    draw, tally = random.Random(seed), Counter[str]()
    # Measure the second run, because the first one waits for the server of ranks.
    for _ in range(2):
        begin_s = time.monotonic()
        run = train(directory / "whole", {"pp": 4, "dispatch": "ready"})
        whole_s = time.monotonic() - begin_s
        if problems := check_contents(read_contents(encode_run(run.path))):
            raise AssertionError(f"a run that came to its end is not whole: {problems}")
    while tally["died while it recorded"] < num_runs:
        flags = {**draw.choice(LAYOUTS), "dispatch": draw.choice(DISPATCHES)}
        ranks = {draw.randrange(2)} if draw.random() < 0.7 else set(range(4))
        after_s = draw.uniform(0, whole_s)
        run = train(directory / "dead", flags, partial(die_later, ranks, after_s))
        tally += judged(run, f"{flags}, ranks {ranks} after {after_s:.3f} s, seed {seed}")
        sys.stdout.write(f"{', '.join(f'{count} {what}' for what, count in tally.items())}\n")
        sys.stdout.flush()
    return tally


def train(path: Path, flags: dict[str, Any], cut: partial[None] | None = None) -> RunDir:
    """Train on forked ranks, on each of which `cut` is called first, to make some die."""
    shutil.rmtree(path, ignore_errors=True)
    run = create_run_dir(path, False, "")
    settings = TrainSettings(**{**SMALL, **flags}, steps=STEPS, out=path)
    settings = settings.changed(no_trace=False, save_every=None)
    with suppress(*(() if cut is None else (RankFailedError,))):
        world = settings.layout.world_size
        run_ranks(world, work, run, settings.to_json(), cut, timeout_s=TIMEOUT_S)
    return run


def die_later(ranks: set[int], seconds: float) -> None:
    """Kill this process after this many seconds if it is one of these ranks, by a signal without a
    handler, which acts like SIGKILL."""
    if int(os.environ["RANK"]) in ranks:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))


def judged(run: RunDir, what: str) -> Counter[str]:
    """Count the outcome of a run that died; raises CalledWholeError if its trace lacks
    information."""
    if not list(run.records.glob("rank-*.ring")):
        return Counter({"died before, or came to their end": 1})
    trace = encode_run(run.path)
    contents = read_contents(trace)
    recording = contents.recording
    if not check_contents(contents, Promise.of_run(trace, recording.settings)):
        raise CalledWholeError(f"called whole: {what}")
    begun = {rank.info.rank: rank.begun for rank in recording.ranks}
    if silent := [rank for rank, found in begun.items() if not found]:
        raise CalledWholeError(f"nothing is known of the end of ranks {silent}: {what}")
    last = max(each.step for found in begun.values() for each in found)
    num_amid = sum(any(task.step == last for task in rank.tasks) for rank in recording.ranks)
    return Counter(
        {
            "died while it recorded": 1,
            "called whole": 0,
            "of which the last step is known": 1,
            "with tasks of it": num_amid > 0,
        }
    )


def problems_of(run: Path) -> list[str]:
    """The findings of `rrfp trace check`, which makes the trace if needed."""
    checked = rrfp_here(run.parent, "trace", "check", str(run))
    assert checked.returncode in (0, 1), checked.stderr
    return checked.stdout.splitlines() if checked.returncode else []


if __name__ == "__main__":
    main()
