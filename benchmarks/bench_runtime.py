"""Runtime overhead per task: `pytest --benchmark-only benchmarks/bench_runtime.py`.

Real ranks measure the figures, and pytest-benchmark reports them like its own timings.

*Own cost*: CPU time of the compute thread from the end of one task to the start of the next, apart
from sending, in a pipeline of 8 ranks whose tasks do nothing.

*Agreement*: the time from the moment at which the last member of a group could start a task (its
input is there, and its task before has ended) until the last member starts it. Three cases, on the
second of two stages: `round`, an input comes while all are idle, so that the whole round is seen,
reports to the leader and its decision back; `idle`, the inputs are there long before, and the
leader decides when its task has ended; `ahead`, the same, decided while the task before runs. A
group of one shows what of it is not agreement.
"""

import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from rrfp.runtime.protocols import Links, Message
from rrfp.schedule.shape import FORWARD_ONLY, Shape
from rrfp.schedule.tasks import Cause, Task
from rrfp.trace.records import ReceiveRecord, TaskRecord, WaitRecord
from tests.e2e.ranks import run_ranks
from tests.runtime.rank_rig import Work, open_rig

TIMEOUT_S = 300.0

pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


class Playback:
    """A clock for pytest-benchmark that makes its n-th round last as long as the n-th sample."""

    def __init__(self) -> None:
        self._times_s: Iterator[float] = iter(())

    def load(self, samples_ns: Iterable[int]) -> None:
        self._times_s = _stamps_s(samples_ns)

    def __call__(self) -> float:
        return next(self._times_s)


def _stamps_s(samples_ns: Iterable[int]) -> Iterator[float]:
    """A start and an end for each."""
    now_ns = 0
    for sample_ns in samples_ns:
        yield now_ns / 1e9
        now_ns += sample_ns
        yield now_ns / 1e9


PLAYBACK = Playback()


def report(benchmark: BenchmarkFixture, samples_ns: list[int]) -> None:
    PLAYBACK.load(samples_ns)
    # pytest-benchmark annotates only a part of itself.
    benchmark.pedantic(lambda: None, rounds=len(samples_ns))  # type: ignore[no-untyped-call]


# The runtime's own cost.

NUM_STEPS, NUM_WARM_STEPS = 10, 2


class CpuMeter:
    """CPU time of the compute thread from the end of a task to the start of the next one, without
    what the transport's `send` takes, and without what the readings of the clock take."""

    def __init__(self) -> None:
        self.samples_ns: list[int] = []
        self._since_ns = 0
        readings_ns = [time.thread_time_ns() for _ in range(200)]
        steps_ns = [later - earlier for earlier, later in pairwise(readings_ns)]
        self._reading_ns = round(statistics.median(steps_ns))

    def act(self, _: Task) -> None:
        self.samples_ns.append(time.thread_time_ns() - self._since_ns - self._reading_ns)
        self._since_ns = time.thread_time_ns()

    def leave_out(self, num_ns: int) -> None:
        """Leave out what lies between two readings of the clock."""
        self._since_ns += num_ns + self._reading_ns


class SendApart:
    """Links whose `send` does not count."""

    def __init__(self, links: Links, meter: CpuMeter) -> None:
        self._links = links
        self._meter = meter
        self.consumed = links.consumed
        self.forecast = links.forecast
        self.report = links.report
        self.decide = links.decide

    def send(self, peer: int, message: Message) -> None:
        start_ns = time.thread_time_ns()
        self._links.send(peer, message)
        self._meter.leave_out(time.thread_time_ns() - start_ns)


def own_costs(num_ranks: int, num_microbatches: int) -> list[int]:
    """This rank's samples of all but the first steps; the first task of a step has none."""
    meter = CpuMeter()
    samples_ns: list[int] = []

    def wrap(links: Links) -> Links:
        return SendApart(links, meter)

    with open_rig(num_ranks, wrap=wrap) as rig:
        for step in range(NUM_STEPS):
            meter.samples_ns.clear()
            rig.run_step(step, Shape(num_ranks, num_microbatches), Work(meter.act))
            if step >= NUM_WARM_STEPS:
                samples_ns += meter.samples_ns[1:]
    return samples_ns


@pytest.mark.benchmark(timer=PLAYBACK)
def test_own_cost_of_a_task_at_pp8(benchmark: BenchmarkFixture) -> None:
    ranks = run_ranks(8, own_costs, 8, 32, timeout_s=TIMEOUT_S, fresh=True)
    report(benchmark, [sample for samples in ranks for sample in samples])


# Agreement.

NUM_MICROBATCHES = 40
MARGIN_NS = 500_000
"""Inputs that came so long before their task could start were there long before."""


@dataclass(frozen=True, slots=True)
class Case:
    """How long the tasks of the two stages sleep, and whether the leaders decide ahead."""

    first_s: float
    second_s: float
    decides_ahead: bool


CASES = {
    "round": Case(0.004, 0.001, decides_ahead=True),
    "idle": Case(0.001, 0.004, decides_ahead=False),
    "ahead": Case(0.001, 0.004, decides_ahead=True),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One task on one member: since when it could start, by its input and by the task before."""

    came_ns: int
    free_ns: int
    start_ns: int


@dataclass(frozen=True, slots=True)
class MemberReport:
    """The measurements of one rank; the first steps are separate."""

    runs: list[Run]
    step_ns: list[int]
    coordination_ns: int


def agreed_runs(num_members: int, case: Case) -> MemberReport:
    """Run the steps on this rank; what its tasks waited for, in the sequence in which they ran."""
    with open_rig(2, num_members, decides_ahead=case.decides_ahead) as rig:
        sleep_s = (case.first_s, case.second_s)[rig.place.pp_rank]
        work = Work(lambda _: time.sleep(sleep_s))
        shape = Shape(2, NUM_MICROBATCHES, kinds=FORWARD_ONLY)
        summaries = [rig.run_step(step, shape, work) for step in range(NUM_STEPS)]
    records = [record for record in rig.records if getattr(record, "step", 0) >= NUM_WARM_STEPS]
    came_ns = {
        (record.step, record.microbatch): record.end_ns
        for record in records
        if isinstance(record, ReceiveRecord)
    }
    tasks = [record for record in records if isinstance(record, TaskRecord)]
    return MemberReport(
        [
            Run(came_ns.get((task.step, task.microbatch), 0), before.end_ns, task.start_ns)
            for before, task in pairwise(tasks)
            if before.step == task.step
        ],
        [summary.end_ns - summary.start_ns for summary in summaries[NUM_WARM_STEPS:]],
        sum(
            record.end_ns - record.start_ns
            for record in records
            if isinstance(record, WaitRecord) and record.cause == Cause.COORDINATION
        ),
    )


@pytest.mark.benchmark(timer=PLAYBACK)
@pytest.mark.parametrize("num_members", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_agreement(benchmark: BenchmarkFixture, name: str, num_members: int) -> None:
    reports = run_ranks(
        2 * num_members, agreed_runs, num_members, CASES[name], timeout_s=TIMEOUT_S, fresh=True
    )
    second_stage = reports[num_members:]
    samples_ns = []
    for runs in zip(*(member.runs for member in second_stage), strict=True):
        came_ns = max(run.came_ns for run in runs)
        free_ns = max(run.free_ns for run in runs)
        came_late = came_ns - free_ns > MARGIN_NS
        came_early = free_ns - came_ns > MARGIN_NS
        if came_late if name == "round" else came_early:
            started_ns = max(run.start_ns for run in runs)
            samples_ns.append(started_ns - max(came_ns, free_ns))
    assert len(samples_ns) > NUM_MICROBATCHES, "too few tasks were of this case"
    step_ns = [took for member in second_stage for took in member.step_ns]
    benchmark.extra_info["step_ms"] = statistics.median(step_ns) / 1e6
    benchmark.extra_info["coordination_us_a_task"] = statistics.mean(
        member.coordination_ns / len(member.runs) / 1e3 for member in second_stage
    )
    report(benchmark, samples_ns)
