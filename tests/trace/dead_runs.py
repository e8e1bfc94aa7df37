"""Kills runs at random moments, and checks their traces: `python -m tests.trace.dead_runs --runs
47`.

One rank dies, or all die at once, without a chance to write anything. The trace of a run that died
must have records of its last step from every rank, and `rrfp trace check` must not call it
complete.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rrfp.trace.check import Promise, check_contents
from rrfp.trace.merge import encode_run
from rrfp.trace.perfetto.reader import read_contents
from rrfp.trace.run_dir import RunDir, create_run_dir
from rrfp.train.settings import TrainSettings
from tests.e2e.ranks import RankFailedError, run_ranks
from tests.train.checkpointed import SMALL, work
from tests.train.trained import rrfp_here

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
