"""Simulated runs in which something becomes slow in some step, or nothing does, for `rrfp watch`.

Unlike those of `tests/analyze/planted.py` their steps differ: lengths of microbatches, jitter and
warm-up are drawn for each step, and the cause begins in the middle of the run.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from typing import Any

import pytest

from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Task
from rrfp.simulate.engine import StepConditions, TaskTimes, Transfer
from rrfp.simulate.step import new_recording, simulate_step
from rrfp.trace.records import RankRecords, Recording
from rrfp.trace.run_dir import RunDir
from rrfp.trace.spill import SpillWriter, row_of
from rrfp.watch.alarms import Alarms, Alert, Kind
from rrfp.watch.figures import StepAssembler, StepFigures
from rrfp.watch.follow import Follower
from rrfp.watch.slowness import WINDOW
from tests.analyze.simulated_runs import policy_of

KIND_NS = (10_000, 9_000, 6_000)
"""The mean times of F, B and W."""
GAP_NS = 1_000
"""The time between two steps."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A run, and what becomes slow in it."""

    shape: Shape
    replicas: int
    hint: str
    seed: int
    onset: int
    cause: Kind | None = None
    stage: int = 0
    replica: int = 0
    link: tuple[int, int] = (0, 1)
    times: float = 1.0
    scatter: float = 0.0
    """The lognormal scatter of tasks and messages."""
    stops: float = 0.0
    """The share of tasks that take 3 to 10 times as long, as on a machine with other work."""
    lengths: float = 0.0
    """The lognormal scatter of microbatches, the same on all stages of a replica."""
    layers: tuple[int, ...] = ()
    """The layers of each stage; empty if they are even."""
    message_ns: int = 300
    bounds: tuple[tuple[str, int], ...] = ()
    members: int = 1
    """The size of a tensor-parallel group."""
    scale: int = 1
    """How many times longer all of it takes."""

    def factor(self, step: int, replica: int, stage: int) -> float:
        """How many times longer a place takes in a step than it usually does."""
        if step < self.onset:
            return 1.0
        pp_rank = self.shape.rank_of(stage)
        is_slow = {
            Kind.RANK: (replica, pp_rank) == (self.replica, self.stage),
            Kind.STAGE: pp_rank == self.stage,
            Kind.REPLICA: replica == self.replica,
            Kind.LINK: False,
            None: False,
        }[self.cause]
        return self.times if is_slow else 1.0

    def is_named(self, alert: Alert) -> bool:
        """Whether an alert names the cause and its place."""
        alarm = alert.alarm
        match self.cause:
            case Kind.RANK:
                found = alarm.kind, alarm.pp_rank, alarm.dp_rank
                return found == (Kind.RANK, self.stage, self.replica)
            case Kind.STAGE:
                # Without replicas, a stage is a rank.
                kind = Kind.RANK if self.replicas == 1 else Kind.STAGE
                return (alarm.kind, alarm.pp_rank) == (kind, self.stage)
            case Kind.REPLICA:
                return (alarm.kind, alarm.dp_rank) == (Kind.REPLICA, self.replica)
            case Kind.LINK:
                return (alarm.kind, alarm.link) == (Kind.LINK, self.link)
            case None:
                return False


def record(setting: Setting, num_steps: int) -> Recording:
    """The recording of the run."""
    policy, shape = policy_of(setting.hint, setting.shape, **dict(setting.bounds))
    rng = random.Random(setting.seed)
    described = {
        "simulated": True,
        "settings": {"hint": setting.hint, "dispatch": "ready", **dict(setting.bounds)},
        "world": shape.num_ranks * setting.replicas * setting.members,
    }
    recording = new_recording(shape, setting.members, setting.replicas, described)
    cold = [[rng.uniform(1.2, 5) for _ in range(shape.num_stages)] for _ in range(setting.replicas)]
    for step in range(num_steps):
        worlds = [
            StepConditions(
                _times(setting, step, replica, cold[replica], rng),
                _transfer(setting, step, rng.randrange(2**30)),
                num_members=setting.members,
            )
            for replica in range(setting.replicas)
        ]
        simulate_step(
            shape,
            policy,
            worlds,
            gradient_sync_ns=GAP_NS if setting.replicas > 1 else 0,
            recording=recording,
            step=step,
        )
    return recording


def _times(
    setting: Setting, step: int, replica: int, cold: list[float], rng: random.Random
) -> TaskTimes:
    """The times of a replica's tasks; the first two steps are slower."""
    num_microbatches = setting.shape.num_microbatches
    lengths = [rng.lognormvariate(0, setting.lengths) for _ in range(num_microbatches)]

    def drawn(mean_ns: float) -> int:
        stopped = rng.uniform(3, 10) if rng.random() < setting.stops else 1.0
        return max(1, round(mean_ns * stopped * rng.lognormvariate(0, setting.scatter)))

    def rows(kind_ns: int) -> list[list[int]]:
        found = []
        for stage in range(setting.shape.num_stages):
            warm = {0: cold[stage], 1: cold[stage] ** 0.2}.get(step, 1.0)
            layers = setting.layers[stage] if setting.layers else 1
            factor = setting.factor(step, replica, stage)
            mean_ns = setting.scale * kind_ns * layers * warm * factor
            found.append([drawn(mean_ns * length) for length in lengths])
        return found

    return TaskTimes(*map(rows, KIND_NS))


def _transfer(setting: Setting, step: int, seed: int) -> Transfer:
    def transfer(sender: int, receiver: int, task: Task) -> int:
        is_slow = setting.cause is Kind.LINK and step >= setting.onset
        times = setting.times if is_slow and (sender, receiver) == setting.link else 1.0
        noise = random.Random(f"{seed} {sender} {task}").gauss(0, setting.scatter)
        return round(setting.scale * setting.message_ns * times * exp(noise))

    return transfer


def figures_of(recording: Recording) -> list[StepFigures]:
    assembly = StepAssembler()
    for records in recording.ranks:
        assembly.add(records, is_aligned=True)
    return list(assembly.pop_finished(len(recording.ranks)))


def alerts_in(recording: Recording) -> list[Alert]:
    """Return the alerts from watching the whole run."""
    alarms = Alarms(records.info for records in recording.ranks)
    return [alert for step in figures_of(recording) for alert in alarms.add_step(step)]


def step_of(recording: Recording, step: int) -> list[RankRecords]:
    """Return the records of one step."""
    found = []
    for records in recording.ranks:
        of_step = RankRecords(records.info)
        for name, of_kind in records.by_name().items():
            of_step.by_name()[name].extend(each for each in of_kind if each.step == step)
        found.append(of_step)
    return found


def planted(seed: int) -> Setting:
    """A run with one cause, 1.15 to 3 times, that costs something, drawn from a seed."""
    rng = random.Random(seed)
    num_ranks = rng.choice([2, 4, 8])
    cause = rng.choice([Kind.RANK, Kind.STAGE, Kind.REPLICA, Kind.LINK])
    sender = rng.randrange(num_ranks - 1)
    link = (sender, sender + 1) if rng.random() < 0.5 else (sender + 1, sender)
    replicas = rng.choice([2, 3]) if cause is Kind.REPLICA else rng.choice([1, 1, 2, 3])
    return Setting(
        shape=Shape(num_ranks, num_ranks * rng.choice([2, 4])),
        replicas=replicas,
        hint=rng.choice(["bf", "bfw", "1f1b"]),
        seed=seed,
        onset=rng.randrange(8, 20),
        cause=cause,
        stage=rng.randrange(num_ranks),
        replica=rng.randrange(replicas),
        link=link,
        times=rng.uniform(1.15, 3),
        scatter=rng.choice([0.0, 0.02, 0.05, 0.1]),
        stops=rng.choice([0.0, 0.0, 0.05]),
        lengths=rng.choice([0.0, 0.0, 0.05]),
        message_ns=rng.choice([3_000, 10_000]) if cause is Kind.LINK else 300,
    )


def clean(seed: int) -> Setting:
    """A run in which nothing becomes slow, with more that varies."""
    rng = random.Random(seed)
    num_ranks = rng.choice([2, 4, 8])
    return Setting(
        shape=Shape(num_ranks, num_ranks * rng.choice([1, 2, 4])),
        replicas=rng.choice([1, 1, 2, 3]),
        hint=rng.choice(["bf", "bfw", "1f1b"]),
        seed=seed,
        onset=0,
        scatter=rng.choice([0.0, 0.05, 0.1, 0.3, 0.6]),
        stops=rng.choice([0.0, 0.0, 0.1]),
        lengths=rng.choice([0.0, 0.1, 0.6]),
        layers=tuple(rng.choice([2, 3, 4]) for _ in range(num_ranks)) if rng.random() < 0.5 else (),
        message_ns=rng.choice([0, 300, 3_000, 10_000]),
        bounds=(("limit", 1),) if rng.random() < 0.1 else (),
    )


def first_alert(setting: Setting) -> Alert | None:
    """The first alert within ten steps of the onset."""
    return next(iter(alerts_in(record(setting, setting.onset + WINDOW))), None)


# Recordings written as their ranks would, a step at a time, and followers of them.


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
