"""How long the simulator takes a task: `pytest --benchmark-only benchmarks/bench_simulator.py`.

BF over uniform tasks and free links under the default limit: 64 stages by 512 microbatches are
65,536 tasks, 1,024 by 1,024 are 2.1 million. The time includes the making of the dispatchers.
"""

import resource

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from rrfp.schedule.hints.table import hint_named
from rrfp.schedule.policy import DEFAULT_LIMIT, Policy
from rrfp.schedule.shape import Shape
from rrfp.simulate.engine import PipelineRun
from rrfp.simulate.play import play
from rrfp.simulate.world import TaskTimes, World

MS = 1_000_000

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "rounds"), [(64, 512, 5), (1024, 1024, 1)]
)
def test_bf(
    benchmark: BenchmarkFixture, num_ranks: int, num_microbatches: int, rounds: int
) -> None:
    shape = Shape(num_ranks, num_microbatches)
    policy = Policy(hint_named("bf").on(shape), limit=DEFAULT_LIMIT)
    times = [[20 * MS] * num_microbatches] * num_ranks
    world = World(TaskTimes(times, times, times))

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
