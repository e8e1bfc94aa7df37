"""Kills runs of `rrfp train` at random moments and resumes them under other policies, until they
are done: `python -m tests.train.killed_runs --runs 100`. With `--forked` only the ranks run,
forked from a server, and one of them is killed: a run then takes seconds.

The final parameters, the optimizer's state and the metrics must be those of a run that was never
killed, to the last bit; and what a finished save held must be there after every kill.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from rrfp.train.checkpoints.directory import CheckpointDir
from rrfp.train.checkpoints.reading import differences
from tests.e2e.ranks import RankFailedError
from tests.train.checkpointed import newest, tensors_of, train, train_prepared
from tests.train.trained import TINY, processes_of, read_metrics

STEPS = 12
COMMON = (*TINY, "--pp=2", "--dropout=0.1", f"--steps={STEPS}", "--save-every=1", "--no-trace")
POLICIES = (
    ("--hint=bf",),
    ("--hint=bfw",),
    ("--hint=bfw", "--hold=2"),
    ("--hint=f-first", "--limit=1"),
    ("--hint=zb-h1", "--w=ranked"),
    ("--hint=1f1b", "--dispatch=fixed"),
    ("--hint=gpipe",),
)
FORKED: dict[str, Any] = {"dropout": 0.1, "save_every": 1}
FORKED_POLICIES: tuple[dict[str, Any], ...] = (
    {"hint": "bf"},
    {"hint": "bfw"},
    {"hint": "bfw", "hold": 2},
    {"hint": "f-first", "limit": 1},
    {"hint": "zb-h1", "w": "ranked"},
    {"hint": "1f1b", "dispatch": "fixed"},
    {"hint": "gpipe"},
)
WAYS = ("launcher", "one rank", "everything", "SIGTERM")
MOST_KILLS = 2
"""The most kills of one run; then it may end."""
START_S = 400.0


class LostError(AssertionError):
    """A run did not come out as it must."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--forked", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rrfp-killed-") as name:
        run = run_forked if asked.forked else run_all
        tally = run(Path(name), asked.runs, asked.seed)
    print_tally(tally)


def print_tally(tally: Counter[str]) -> None:
    line = ", ".join(f"{count} {what}" for what, count in sorted(tally.items()))
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def run_all(directory: Path, num_runs: int, seed: int) -> Counter[str]:
    """Kill and resume `num_runs` runs. Counts the kinds of kills; raises LostError."""
    draw, tally = random.Random(seed), Counter[str]()
    whole = directory / "whole"
    whole.mkdir()
    started = start(whole, POLICIES[0])
    if started.wait(START_S) != 0:
        raise LostError(f"the run that nobody kills failed: {said(whole)}")
    for number in range(num_runs):
        killed = directory / f"killed-{number}"
        killed.mkdir()
        tally += kill_until_done(killed, draw)
        check_the_same(whole, killed, f"run {number} of seed {seed}")
        tally["runs the same to the last bit"] += 1
        print_tally(tally)
        shutil.rmtree(killed)
    return tally


def check_the_same(whole: Path, killed: Path, name: str) -> None:
    """Raises LostError unless the killed run ended as the one that was not."""
    different = differences(tensors_of(newest(whole)), tensors_of(newest(killed)))
    if different or figures_of(killed) != figures_of(whole):
        raise LostError(f"{name} differs: {different[:5]}")


def run_forked(directory: Path, num_runs: int, seed: int) -> Counter[str]:
    """The same with forked ranks."""
    draw, tally = random.Random(seed), Counter[str]()
    whole = directory / "whole"
    train(whole, STEPS, **FORKED)
    # The first one waited for the server of ranks.
    begin_s = time.monotonic()
    train(directory / "timed", STEPS, **FORKED)
    whole_s = time.monotonic() - begin_s
    for number in range(num_runs):
        killed = directory / f"killed-{number}"
        tally += kill_ranks_until_done(killed, draw, whole_s)
        check_the_same(whole, killed, f"run {number} of seed {seed}")
        tally["runs the same to the last bit"] += 1
        print_tally(tally)
        shutil.rmtree(killed)
    return tally


def kill_ranks_until_done(directory: Path, draw: random.Random, whole_s: float) -> Counter[str]:
    """Kill a rank of each session at a random moment, until one ends before that."""
    tally, reached = Counter[str](), 0
    while reached < STEPS:
        policy = {**FORKED, **draw.choice(FORKED_POLICIES), "save_async": draw.random() < 0.5}
        kill_rank = partial(kill_later, draw.randrange(2), draw.uniform(0, whole_s))
        try:
            train_prepared(directory, STEPS, kill_rank, resume=True, **policy)
        except RankFailedError as error:
            # The other rank may be the first to say that it has lost this one.
            told = (f"exit code {-signal.SIGALRM}", "PeerLostError", "by peer")
            if not any(each in str(error) for each in told):
                raise
            tally["killed by: one rank"] += 1
            if any((directory / "ck").glob(".saving-*")):
                tally["killed while saving"] += 1
        found = CheckpointDir(directory / "ck").newest()
        step = 0 if found is None else found.step
        if step < reached:
            raise LostError(f"the checkpoint of step {reached} was there and is lost")
        reached = step
    return tally


def kill_later(rank: int, seconds: float) -> None:
    """On one rank, end this process after some seconds, wherever it is."""
    if os.environ["RANK"] == str(rank):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def kill_until_done(directory: Path, draw: random.Random) -> Counter[str]:
    """Start a run, kill it, resume it under another policy, and so on until it ends by itself."""
    tally = Counter[str]()
    reached = 0
    policy = draw.choice(POLICIES)
    for session in range(MOST_KILLS + 1):
        process = start(directory, policy)
        try:
            # The first session is always killed.
            if session < MOST_KILLS and not await_moment(process, directory, draw, session == 0):
                way = draw.choice(WAYS)
                asked = end(process, directory, way)
                tally[f"killed by: {way}"] += 1
                if asked and process.returncode != 0:
                    raise LostError(f"SIGTERM ended with {process.returncode}: {said(directory)}")
                if any((directory / "ck").glob(".saving-*")):
                    tally["killed while saving"] += 1
            elif process.wait(START_S) != 0:
                raise LostError(f"a resumed run failed: {said(directory)}")
        finally:
            kill_all(process, directory)
        found = CheckpointDir(directory / "ck").newest()
        step = 0 if found is None else found.step
        if step < reached:
            raise LostError(f"the checkpoint of step {reached} was there and is lost")
        reached = step
        if process.returncode == 0 and step == STEPS:
            return tally
        policy = draw.choice([each for each in POLICIES if each != policy])
        tally["resumed"] += 1
    raise LostError(f"the run did not end after {MOST_KILLS} kills")


def start(directory: Path, policy: tuple[str, ...]) -> subprocess.Popen[bytes]:
    flags = (*COMMON, *policy, f"--save={directory / 'ck'}", f"--out={directory / 'run'}")
    asynchronous = ("--save-async",) if len(policy) % 2 else ()
    with (directory / "stderr").open("ab") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "rrfp", "train", *flags, *asynchronous, "--resume"],
            stdout=subprocess.DEVNULL,
            stderr=err,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )


def await_moment(
    process: subprocess.Popen[bytes], directory: Path, draw: random.Random, is_first: bool
) -> bool:
    """Wait for a random moment: of the start, of the training, or of a save. Returns whether the
    run ended before."""
    phase = draw.choice(("start", "training", "saving", "saving"))
    if phase == "start" and not is_first:
        return ended_within(process, draw.uniform(0, 15))
    before = CheckpointDir(directory / "ck").newest()
    wanted = (0 if before is None else before.step) + draw.randint(1, 4)
    deadline_s = time.monotonic() + START_S
    while process.poll() is None:
        if time.monotonic() > deadline_s:
            raise LostError(f"nothing was trained within {START_S:g} s: {said(directory)}")
        if phase == "saving":
            is_there = any((directory / "ck").glob(f".saving-{wanted}-*"))
        else:
            lines = read_metrics(directory / "run")
            is_there = bool(lines) and lines[-1]["step"] + 1 >= wanted
        if is_there:
            return ended_within(process, draw.uniform(0, 0.15 if phase == "saving" else 0.5))
        time.sleep(0.001)
    return True


def ended_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def end(process: subprocess.Popen[bytes], directory: Path, way: str) -> bool:
    """End a run in some way. Returns whether it was asked to, and so must end well."""
    ranks = processes_of(directory / "run", "rrfp.train.launch.rank_process")
    if way == "SIGTERM":
        process.send_signal(signal.SIGTERM)
    elif way == "launcher" or not ranks:
        process.kill()
    elif way == "one rank":
        kill(random.choice(ranks))
    else:
        for pid in (process.pid, *ranks):
            kill(pid)
    process.wait(START_S)
    # SIGTERM before Python has its handlers ends the launcher as it ends any program.
    return way == "SIGTERM" and process.returncode != -signal.SIGTERM


def kill_all(process: subprocess.Popen[bytes], directory: Path) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
    # Ranks whose launcher is gone end by themselves; the next session must bear with them, so only
    # a run that failed is cleared.
    if sys.exc_info()[0] is not None:
        for pid in processes_of(directory / "run"):
            kill(pid)


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def figures_of(directory: Path) -> list[dict[str, Any]]:
    """The metrics of the training itself, one entry per step."""
    lines = read_metrics(directory / "run")
    return [
        {name: line[name] for name in ("step", "loss", "grad_norm", "tokens")} for line in lines
    ]


def said(directory: Path) -> str:
    return (directory / "stderr").read_text()[-2000:]


if __name__ == "__main__":
    main()
