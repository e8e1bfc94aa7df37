"""How long the simulator takes a task: `pytest --benchmark-only benchmarks/bench_simulator.py`.

BF over uniform tasks and free links under the default limit: 64 stages by 512 microbatches are
65,536 tasks, 1,024 by 1,024 are 2.1 million. What plans are made of: a step of ZB-V over a V of 8
ranks by 32 microbatches with a hold of 8, its task times drawn. The time includes the making of the
dispatchers. `RRFP_COMPILED=0` measures the core interpreted.
"""

import resource
from random import Random

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from rrfp.schedule.hints import WeightGradients
from rrfp.schedule.named_hints import hint_named
from rrfp.schedule.policy import PAPER_LIMIT, Policy
from rrfp.schedule.rehearsal import fitted
from rrfp.schedule.shape import Placement, Shape
from rrfp.simulate.engine import PipelineRun, StepConditions, TaskTimes
from rrfp.simulate.step import play

MS = 1_000_000

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "rounds"), [(64, 512, 5), (1024, 1024, 1)]
)
def test_bf(
    benchmark: BenchmarkFixture, num_ranks: int, num_microbatches: int, rounds: int
) -> None:
    shape = Shape(num_ranks, num_microbatches)
    policy = Policy(hint_named("bf").for_shape(shape), limit=PAPER_LIMIT)
    times = [[20 * MS] * num_microbatches] * num_ranks
    world = StepConditions(TaskTimes(times, times, times))

    def simulate() -> PipelineRun:
        return play(shape, policy, world)

    run = benchmark.pedantic(simulate, rounds=rounds)  # type: ignore[no-untyped-call]
    num_tasks = shape.num_tasks_of_a_rank * num_ranks
    assert sum(run.busy_ns) == num_ranks * num_microbatches * 60 * MS
    assert benchmark.stats is not None
    benchmark.extra_info["us_a_task"] = benchmark.stats.stats.median * 1e6 / num_tasks
    benchmark.extra_info["peak_memory_gb"] = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    )


def test_zb_v(benchmark: BenchmarkFixture) -> None:
    shape = Shape(8, 32, 2, Placement.V)
    hint = hint_named("zb-v").for_shape(shape)
    policy, shape = fitted(Policy(hint, hold=8, w=WeightGradients.RANKED), shape)
    draw = Random(0)

    def rows() -> list[list[int]]:
        microbatches = range(shape.num_microbatches)
        return [
            [draw.randrange(10 * MS, 40 * MS) for _ in microbatches]
            for _ in range(shape.num_stages)
        ]

    world = StepConditions(TaskTimes(rows(), rows(), rows()))
    run = benchmark(play, shape, policy, world)
    assert run.peak_held == (16,) * shape.num_ranks
