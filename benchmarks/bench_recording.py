"""Overhead of recording: `pytest --benchmark-only benchmarks/bench_recording.py`.

Shares and ratios are in `extra_info`, which `--benchmark-json FILE` writes.

*A record*: from taking it to its line in the file, by the recorder's own way: 100,000 of them in a
second, once as fast as they go and once at that pace.

*A step*: 8 real ranks whose tasks sleep for 10 ms, every other pair of steps recorded, so that both
kinds of steps meet the same moods of the machine. The ratio of their medians has the interval that
its bootstrap gives. Beside it stands what the recorder states of itself: its records times their
measured cost, as a share of the time in the schedule, on the rank where it is largest.
"""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.bench_runtime import PLAYBACK, report
from rrfp.analyze.compare import estimate, resampled_medians
from rrfp.runtime.recorder import Recorder
from rrfp.schedule.shape import Shape
from rrfp.trace.check import recording_fraction
from rrfp.trace.records import (
    Phase,
    PhaseRecord,
    RankInfo,
    ReceiveRecord,
    Record,
    Recording,
    SendRecord,
    StimulusRecord,
    TaskRecord,
)
from tests.e2e.ranks import run_ranks
from tests.runtime.rank_rig import Work, open_rig
from tests.trace.test_spill import read_spill

TIMEOUT_S = 300.0
INFO = RankInfo(0, 0, 0, 0, (0,), "node", 1)

pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


# A record.

RECORDS_A_SECOND = 100_000
NUM_RECORDS_OF_A_TASK = 5


def record_a_task(recorder: Recorder, number: int) -> None:
    """The five records that a task in the middle of a pipeline makes, with their times."""
    clock = time.monotonic_ns
    microbatch = number % 64
    recorder.record(ReceiveRecord(clock(), clock(), 0, "F", 3, microbatch, 2, number, 65_536))
    recorder.record(StimulusRecord(clock(), 0, "InputArrived", "F", 3, microbatch, 0))
    recorder.record(StimulusRecord(clock(), 0, "ComputeIdle", "", -1, -1, 0))
    recorder.record(
        TaskRecord(clock(), clock(), 0, "F", 3, 0, microbatch, number, 2, 1, 3, 3, 1, 1)
    )
    recorder.record(SendRecord(clock(), clock(), 0, "F", 4, microbatch, 4, number, 65_536))


def test_a_second_s_records_at_once(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "rank-0.jsonl", INFO)

    def one_step() -> None:
        for number in range(RECORDS_A_SECOND // NUM_RECORDS_OF_A_TASK):
            record_a_task(recorder, number)
        recorder.flush(0)

    # pytest-benchmark annotates only a part of itself.
    benchmark.pedantic(one_step, rounds=10)  # type: ignore[no-untyped-call]
    recorder.close()
    assert benchmark.stats is not None
    benchmark.extra_info["us_a_record"] = benchmark.stats.stats.median / RECORDS_A_SECOND * 1e6


NUM_SECONDS = 5
NUM_TASKS_OF_A_BURST = 20


@pytest.mark.benchmark(timer=PLAYBACK)
def test_none_is_lost_at_that_pace(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Bursts of a hundred records, one a millisecond, and a flush a second. A burst that is late,
    as all are that follow a flush, comes at once."""
    path = tmp_path / "rank-0.jsonl"
    recorder = Recorder(path, INFO)
    num_bursts = RECORDS_A_SECOND // (NUM_RECORDS_OF_A_TASK * NUM_TASKS_OF_A_BURST)
    seconds_ns = []
    begin_ns = time.monotonic_ns()
    for second in range(NUM_SECONDS):
        start_ns = time.monotonic_ns()
        for burst in range(num_bursts):
            due_ns = begin_ns + (second * num_bursts + burst) * 1_000_000
            time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
            for task in range(NUM_TASKS_OF_A_BURST):
                record_a_task(recorder, burst * NUM_TASKS_OF_A_BURST + task)
        recorder.flush(second)
        seconds_ns.append(time.monotonic_ns() - start_ns)
    took_ns = time.monotonic_ns() - begin_ns
    recorder.close()
    records = read_spill(path)
    assert records is not None
    num_found = len(records.receives) + len(records.stimuli) + len(records.tasks)
    assert (num_found + len(records.sends), records.losses) == (NUM_SECONDS * RECORDS_A_SECOND, [])
    benchmark.extra_info["records_a_second"] = NUM_SECONDS * RECORDS_A_SECOND / took_ns * 1e9
    benchmark.extra_info["recording_fraction"] = recorder.cost_ns / took_ns
    report(benchmark, seconds_ns)


# A step.

SHAPE = Shape(8, 16)
TASK_S = 0.010
NUM_STEPS, NUM_WARM_STEPS = 160, 4


def is_recorded(step: int) -> bool:
    """On, off, off, on: a drift of the machine is no difference between the two."""
    return step % 4 in (0, 3)


class Switch:
    """A recorder that is on or off."""

    def __init__(self, on: Recorder) -> None:
        self.on = on
        self._off = Recorder(None, INFO)
        self.chosen = on

    def turn(self, on: bool) -> None:
        self.chosen = self.on if on else self._off

    def record(self, record: Record) -> None:
        self.chosen.record(record)


def paced_steps(folder: Path) -> list[int]:
    """This rank's steps, each from its entry to the end of its flush, in ns."""
    rank = int(os.environ["RANK"])
    switch = Switch(Recorder(folder / f"rank-{rank}.jsonl", INFO))
    work = Work(lambda _: time.sleep(TASK_S))
    steps_ns: list[int] = []
    with open_rig(SHAPE.num_ranks, record=switch.record) as rig:
        for step in range(NUM_STEPS):
            switch.turn(is_recorded(step))
            summary = rig.run_step(step, SHAPE, work)
            times_ns = summary.start_ns, summary.end_ns
            switch.record(PhaseRecord(*times_ns, step, Phase.SCHEDULE))
            switch.chosen.flush(step)
            steps_ns.append(time.monotonic_ns() - summary.start_ns)
    switch.on.close()
    return steps_ns


@pytest.mark.benchmark(timer=PLAYBACK)
def test_steps_with_and_without(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    # The first stage is the first one to begin a step and the last one to end it.
    steps_ns = run_ranks(SHAPE.num_ranks, paced_steps, tmp_path, timeout_s=TIMEOUT_S, fresh=True)[0]
    bare_ns, recorded_ns = (
        [steps_ns[step] for step in range(NUM_WARM_STEPS, NUM_STEPS) if is_recorded(step) is on]
        for on in (False, True)
    )
    bare, recorded = (
        resampled_medians({"length": np.array(each, float)}, which)["length"]
        for which, each in enumerate((bare_ns, recorded_ns))
    )
    ratio = estimate(recorded / bare)
    benchmark.extra_info["recorded_over_bare"] = ratio.as_json()
    spilled = [read_spill(path) for path in sorted(tmp_path.glob("rank-*.jsonl"))]
    ranks = [records for records in spilled if records is not None]
    benchmark.extra_info["stated_fraction"] = recording_fraction(Recording({}, ranks))
    benchmark.extra_info["records_a_task"] = sum(
        records.costs[-1].num_records for records in ranks
    ) / sum(len(records.tasks) for records in ranks)
    report(benchmark, recorded_ns)
