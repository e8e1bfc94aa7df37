"""Ends runs of `rrfp train` at random moments, in random ways, and asks what their traces tell of
it: `python -m tests.dead_runs --runs 47`.

A run that died has records of the step in which it did, of every rank that had begun to record,
and `rrfp trace check` does not call it whole.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rrfp.trace.perfetto.reader import read_trace
from tests.trained import Training, await_no_process, pid_of, processes_of, rrfp_here

LAYOUTS = (
    ("--pp=4",),
    ("--pp=2", "--dp=2"),
    ("--pp=2", "--tp=2"),
    ("--pp=2", "--chunks=2"),
)
DISPATCHES = ("ready", "fixed", "megatron")
WAYS = ("one rank", "launcher", "everything", "SIGTERM", "one rank stops, and dies")
STEPS = 400
MOST_S = 6.0
"""How long after its first step a run is left alone at most."""


class CalledWholeError(AssertionError):
    """A run that died is called whole, or nothing is left of its last step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=47)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rrfp-dead-") as name:
        tally = end_runs(Path(name), asked.runs, asked.seed)
    sys.stdout.write(f"{tally}\n")


def end_runs(directory: Path, num_runs: int, seed: int) -> Counter[str]:
    """End so many runs. Returns what was met; raises CalledWholeError."""
    draw, tally = random.Random(seed), Counter[str]()
    for number in range(num_runs):
        flags = (*draw.choice(LAYOUTS), "--dispatch", draw.choice(DISPATCHES))
        way, rank, after_s = draw.choice(WAYS), draw.randrange(2), draw.uniform(0, MOST_S)
        with Training(directory / f"run-{number}", f"--steps={STEPS}", *flags) as training:
            training.await_steps(1)
            time.sleep(after_s)
            end(training, way, rank)
            what = f"run {number} of seed {seed}: {way}, rank {rank}, {' '.join(flags)}"
            tally += judged(training.run, what)
            tally[f"ended by: {way}"] += 1
        sys.stdout.write(f"{what}: {dict(tally)}\n")
        sys.stdout.flush()
    return tally


def end(training: Training, way: str, rank: int) -> None:
    """End a run, and wait until nothing of it is left."""
    pid = pid_of(training.run, rank)
    match way:
        case "one rank":
            os.kill(pid, signal.SIGKILL)
        case "one rank stops, and dies":
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.5)
            os.kill(pid, signal.SIGKILL)
        case "launcher":
            training.process.kill()
        case "SIGTERM":
            training.process.terminate()
        case "everything":
            pids = processes_of(training.run)
            training.process.kill()
            for each in {*pids} - {training.process.pid}:
                os.kill(each, signal.SIGKILL)
    training.process.wait(60)
    await_no_process(training.run, timeout_s=30)


def judged(run: Path, what: str) -> Counter[str]:
    """What the trace of a dead run tells; raises CalledWholeError if that is too little."""
    if not problems_of(run):
        raise CalledWholeError(f"{what}: called whole")
    recording = read_trace(run / "trace.pftrace")
    last = max(each.step for rank in recording.ranks for each in rank.begun)
    silent = [rank.info.rank for rank in recording.ranks if not rank.begun]
    if silent:
        raise CalledWholeError(f"{what}: nothing is known of the end of ranks {silent}")
    of_step = [
        any(task.step == last for task in rank.tasks)
        or any(each.step == last for each in rank.begun)
        for rank in recording.ranks
    ]
    return Counter(
        {
            "runs that are not called whole": 1,
            "runs with records of the fatal step": any(of_step),
            "ranks with records of the fatal step": sum(of_step),
            "ranks": len(of_step),
        }
    )


def problems_of(run: Path) -> list[str]:
    """What `rrfp trace check` finds; merges the records if nobody has."""
    checked = rrfp_here(run.parent, "trace", "check", str(run))
    problems = checked.stdout.splitlines() if checked.returncode else []
    assert checked.returncode in (0, 1), checked.stderr
    return problems


if __name__ == "__main__":
    main()
