"""What `rrfp run` adds to a step, beside a script that calls `install()` itself:
`python -m benchmarks.run_overhead [SITTINGS]`.

In each sitting four jobs of two ranks train the same GPT of two stages on the CPU and take turns, a
step each, in an order that rotates: so all meet the same moods of the machine. The first is started
by python and calls `install()`; so does the second, which shows what chance alone does; the others
are started by `rrfp run`, with `--no-trace` and recorded. A sitting's ratio is the median over its
rounds of a job's step beside that of the first, in time and in processor time of the first rank
(all its threads), which other processes disturb less. Processes that run the same code differ by
about 1% for as long as they live, so the sittings, each with processes of its own, are what is
averaged: the interval is that of 95 of 100 bootstrap samples of them.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import IO, Any

import numpy as np

from rrfp.runtime.launchers import LOOPBACK

ROOT = Path(__file__).parent.parent
NUM_SITTINGS = 20
NUM_ROUNDS = 50
NUM_WARMUPS = 5
NUM_SAMPLES = 2000
NUM_RANKS = 2
STARTED = {
    "install()": [],
    "install() again": [],
    "rrfp run --no-trace": ["-m", "rrfp", "run", "--no-trace"],
    "rrfp run": ["-m", "rrfp", "run", "--out", "run"],
}


class Job:
    """The ranks of a job; its first rank takes a step for each line that it is given."""

    def __init__(self, options: list[str], where: Path) -> None:
        with socket.create_server((LOOPBACK, 0)) as server:
            port = server.getsockname()[1]
        self._ranks = [
            subprocess.Popen(
                [sys.executable, *options, __file__, "job", *(["install"] * (not options))],
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(NUM_RANKS),
                    "MASTER_ADDR": LOOPBACK,
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=where,
            )
            for rank in range(NUM_RANKS)
        ]

    @property
    def _first(self) -> tuple[IO[str], IO[str]]:
        given, told = self._ranks[0].stdin, self._ranks[0].stdout
        assert given is not None
        assert told is not None
        return given, told

    def step(self) -> tuple[float, float]:
        """Run a step; its time and its processor time, in seconds."""
        given, told = self._first
        print("go", file=given, flush=True)
        line = told.readline()
        if not line:
            raise SystemExit("a job has failed; see above")
        seconds, busy_s = map(float, line.split())
        return seconds, busy_s

    def close(self) -> None:
        """End the ranks."""
        for rank in self._ranks:
            rank.communicate(timeout=100)


def work() -> None:
    """One rank of a job."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    if "install" in sys.argv:
        import rrfp.megatron

        rrfp.megatron.install()
    import torch
    import torch.distributed as dist
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from rrfp.train.data.batches import open_data
    from rrfp.train.launch.process_groups import parallel_groups
    from rrfp.train.loop import Trainer
    from rrfp.train.models.model import build_model
    from rrfp.train.ordered_batches import OrderedBatches
    from rrfp.train.settings import TrainSettings

    torch.set_num_threads(1)
    settings = TrainSettings(pp=NUM_RANKS, layers=4, hidden=128, seq_length=128, microbatches=8)
    with parallel_groups(settings) as layout:
        data = open_data(settings)
        gpt = build_model(settings, layout, data)
        schedule: Any = get_forward_backward_func()
        batches = OrderedBatches(settings, layout, data)
        trainer = Trainer(settings, layout, gpt, batches, schedule, lambda _: None)
        step = 0
        while True:
            # The first rank hears when to go on, and tells the others.
            goes_on = torch.tensor(layout.rank != 0 or bool(sys.stdin.readline()))
            dist.broadcast(goes_on, 0)
            if not goes_on:
                break
            start_s, start_busy_s = time.perf_counter(), time.process_time()
            trainer.train_step(step)
            seconds, busy_s = time.perf_counter() - start_s, time.process_time() - start_busy_s
            if layout.rank == 0:
                print(seconds, busy_s, flush=True)
            step += 1


def sitting(where: Path) -> list[np.ndarray]:
    """The ratios of each job to the first, in time and in processor time, a column each."""
    jobs = [Job(options, where) for options in STARTED.values()]
    rounds = []
    order = deque(range(len(jobs)))
    for _ in range(NUM_WARMUPS + NUM_ROUNDS):
        taken = {index: jobs[index].step() for index in order}
        rounds.append([taken[index] for index in range(len(jobs))])
        order.rotate()
    for job in jobs:
        job.close()
    steps = np.array(rounds[NUM_WARMUPS:])
    return list(np.median(steps / steps[:, :1], axis=0))


def main(num_sittings: int) -> None:
    """Let the jobs take turns, and print what was found."""
    found = []
    for _ in range(num_sittings):
        with tempfile.TemporaryDirectory() as where:
            found.append(sitting(Path(where)))
    ratios = np.array(found)
    draws = np.random.default_rng(0).integers(num_sittings, size=(NUM_SAMPLES, num_sittings))
    for column, what in enumerate(("time", "processor time")):
        for job, name in enumerate(STARTED):
            own = ratios[:, job, column]
            low, high = np.quantile(own[draws].mean(axis=1), [0.025, 0.975])
            told = {
                "of": what,
                "job": name,
                "ratio": round(float(own.mean()), 4),
                "interval": [round(float(low), 4), round(float(high), 4)],
            }
            print(json.dumps(told))


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        work()
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else NUM_SITTINGS)
