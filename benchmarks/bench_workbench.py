"""How long a look at a large trace takes: `pytest --benchmark-only benchmarks/bench_workbench.py`.

The trace has a million events of a BF run with jitter: tasks, waits, messages, stimuli, each with
all that it says. Each look is a process of its own, as on the command line; the first one reads the
trace and writes its tables beside it, the second one reads those.
"""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from rrfp.replay.cost_sources import resolve_costs
from rrfp.schedule.named_hints import hint_named
from rrfp.schedule.policy import PAPER_LIMIT, Policy
from rrfp.schedule.shape import Shape
from rrfp.simulate.engine import StepConditions
from rrfp.simulate.jitter import parse_jitter
from rrfp.simulate.step import new_recording, simulate_step
from rrfp.trace.perfetto.writer import write_trace

NUM_EVENTS = 1_000_000
SHAPE = Shape(8, 32)

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated run with at least this number of records, as a recording and as a replay."""
    settings = {"hint": "bf", "dispatch": "ready", "limit": PAPER_LIMIT}
    recording = new_recording(SHAPE, 1, 1, {"simulated": True, "settings": settings})
    policy = Policy(hint_named("bf").for_shape(SHAPE), limit=PAPER_LIMIT)
    costs, jitter = resolve_costs("language"), parse_jitter("lognormal:0.5")
    step = num_events = 0
    while num_events < NUM_EVENTS:
        times = jitter.times(costs.step(SHAPE, step, 0).times, SHAPE, step, 0)
        simulate_step(SHAPE, policy, [StepConditions(times)], recording=recording, step=step)
        step += 1
        num_events = sum(len(r) for rank in recording.ranks for r in rank.by_name().values())
    path = tmp_path_factory.mktemp("traces") / "trace.pftrace"
    write_trace(path, recording)
    return path


def _look(trace: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "rrfp", "analyze", "bubbles", str(trace), "--format", "json"],
        check=True,
        stdout=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("rounds", [1, 5], ids=["first", "again"])
def test_bubbles(benchmark: BenchmarkFixture, trace: Path, rounds: int) -> None:
    benchmark.pedantic(_look, (trace,), rounds=rounds)  # type: ignore[no-untyped-call]
    benchmark.extra_info["trace_mb"] = trace.stat().st_size / 1e6
    benchmark.extra_info["peak_memory_gb"] = (
        resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    )
