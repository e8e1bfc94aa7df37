"""Real ranks, one of which becomes slow: it is named while the run goes on."""

import json
import os
import time
from pathlib import Path
from threading import Thread

import pytest

from rrfp.runtime.recorder import Recorder
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Task
from rrfp.trace.records import Phase, PhaseRecord, RankInfo
from rrfp.trace.run_dir import RunDir
from rrfp.watch.alarms import Kind
from tests.followed import Follow, follow
from tests.rank_rig import Work, open_rig
from tests.ranks import run_ranks

__all__ = ["follow"]


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
