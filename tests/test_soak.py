"""A long run takes no more memory, files, threads or room on disk than a short one."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from rrfp.trace.check import check_contents
from rrfp.trace.perfetto.reader import read_contents
from rrfp.train.checkpoints.directory import CheckpointDir
from tests.trained import START_S, Training, pid_of

STEPS = 20_000
TRACE_MB = 16
SMALLEST = (
    *("--model", "mlp", "--layers", "2", "--hidden", "8", "--heads", "1", "--seq-length", "8"),
    *("--microbatches", "2", "--pp", "2", "--trace-mb", str(TRACE_MB)),
)
_NUM_SAMPLES = 40
_STEP_S = 2.0
"""The most that such a step takes on a machine that does other things too."""
_MOST_GROWTH_KB = 4096
"""Of allocators that still find their size."""


class Sample(NamedTuple):
    """What a process has at one time."""

    rss_kb: int
    num_files: int
    num_threads: int


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_long_run_takes_no_more_than_a_short_one(tmp_path: Path) -> None:
    save_every = STEPS // 10
    flags = (*SMALLEST, "--save", str(tmp_path / "ck"), "--save-every", str(save_every))
    samples: dict[int, list[Sample]] = {}
    most_bytes = 0
    with Training(tmp_path / "run", *flags, "--steps", str(STEPS)) as training:
        training.await_steps(1)
        pids = [training.process.pid, *(pid_of(training.run, rank) for rank in range(2))]
        for step in range(STEPS // _NUM_SAMPLES, STEPS, STEPS // _NUM_SAMPLES):
            _await_step(training, step)
            for pid in pids:
                samples.setdefault(pid, []).append(_sample(pid))
            most_bytes = max(most_bytes, sum(_sizes(training.run)))
        code, _, said = training.ended(START_S + STEPS // _NUM_SAMPLES * _STEP_S)
    assert code == 0, said
    for taken in samples.values():
        # A third of the run, with three checkpoints, is to warm up.
        warm = taken[len(taken) // 3 :]
        early, late = warm[: len(warm) // 2], warm[len(warm) // 2 :]
        # A checkpoint that is being written has a thread and files of its own.
        for each in ("num_files", "num_threads"):
            assert min(getattr(s, each) for s in late) <= min(getattr(s, each) for s in early)
        growth_kb = min(s.rss_kb for s in late) - min(s.rss_kb for s in early)
        assert growth_kb < _MOST_GROWTH_KB, taken
    metrics = training.run / "metrics.jsonl"
    with metrics.open() as lines:
        assert [json.loads(line)["step"] for line in lines] == [*range(STEPS)]
    trace = training.run / "trace.pftrace"
    kept = sum(size for size in _sizes(training.run)) - metrics.stat().st_size
    assert most_bytes - metrics.stat().st_size < TRACE_MB << 20
    assert kept < TRACE_MB << 20
    contents = read_contents(trace)
    assert check_contents(contents) == []
    first = contents.recording.settings["first_kept_step"]
    assert isinstance(first, int)
    assert 0 < first < STEPS - 100
    found = CheckpointDir(tmp_path / "ck").newest()
    assert found is not None
    assert found.step == STEPS


def _await_step(training: Training, step: int) -> None:
    """Wait for a step by the metrics' last line: reading all of them each time takes long."""
    metrics = training.run / "metrics.jsonl"
    training.await_that(lambda: _last_step(metrics) >= step, f"step {step}")


def _last_step(metrics: Path) -> int:
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 4096))
        *_, last, _ = [b"", *file.read().split(b"\n")]
    return int(json.loads(last)["step"])


def _sample(pid: int) -> Sample:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    told = dict(line.split(":", 1) for line in status)
    files = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 # as many as there are
    return Sample(int(told["VmRSS"].split()[0]), files, int(told["Threads"]))


def _sizes(run: Path) -> Iterator[int]:
    for path in run.rglob("*"):
        if path.is_file():
            yield path.stat().st_size
