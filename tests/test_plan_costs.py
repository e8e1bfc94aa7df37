"""The cost model of a planner: what tasks took, gathered from records, and fitted."""

import numpy as np
import pytest

from rrfp.planning.forecast import CostModel, MeasuredTasks
from rrfp.schedule.shape import SPLIT_BACKWARD, Shape
from rrfp.schedule.tasks import Kind
from rrfp.trace.records import Phase, PhaseRecord, Record, TaskRecord

NUM_STAGES, NUM = 4, 16


def features_of(random: np.random.Generator) -> np.ndarray:
    tokens = random.integers(20, 200, NUM).astype(float)
    patches = random.integers(1, 60, NUM).astype(float)
    return np.column_stack([np.ones(NUM), tokens, tokens**2, patches, np.full(NUM, 3.0)])


def measured_of(features: np.ndarray, random: np.random.Generator, noise: float) -> np.ndarray:
    """Language stages take tokens and their squares, vision stages patches."""
    found = np.zeros((5, NUM_STAGES, NUM))
    for stage in range(NUM_STAGES):
        weights = [5e4, 2e3, 20, 0, 0] if stage else [1e5, 0, 0, 4e4, 0]
        for row, factor in enumerate((1.0, 1.2, 0.7, 50.0, 20.0)):
            found[row, stage] = factor * (features @ weights)
    found[:3] *= np.exp(noise * random.standard_normal((3, NUM_STAGES, NUM)))
    return found


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_costs_are_found_in_the_features(noise: float) -> None:
    random, model = np.random.default_rng(7), CostModel()
    assert not model.is_fitted
    for _ in range(6):
        features = features_of(random)
        model.learn(features, measured_of(features, random, noise))
    features = features_of(random)
    expected = measured_of(features, random, 0.0)
    found = model.predict(features)
    times = np.array([found.times.forward, found.times.input_gradient, found.times.weight_gradient])
    assert np.abs(times / expected[:3] - 1).max() < 0.02 + noise
    assert found.noise == pytest.approx(noise, abs=0.03)
    assert found.sizes is not None
    assert np.allclose(found.sizes.kept, expected[3], rtol=0.02)
    assert found.sizes.owed is not None
    assert np.allclose(found.sizes.owed, expected[4], rtol=0.02)


def test_a_run_that_becomes_slower_is_followed() -> None:
    random, model = np.random.default_rng(3), CostModel()
    for step in range(60):
        features = features_of(random)
        model.learn(features, measured_of(features, random, 0.05) * (1 if step < 30 else 2))
    features = features_of(random)
    found = np.array(model.predict(features).times.forward)
    assert np.median(found / measured_of(features, random, 0.0)[0]) == pytest.approx(2, rel=0.1)


def test_other_features_begin_anew() -> None:
    random, model = np.random.default_rng(3), CostModel()
    features = features_of(random)
    model.learn(features, measured_of(features, random, 0.0))
    measured = measured_of(features, random, 0.0)
    model.learn(features[:, :2], measured)
    assert len(model.predict(features[:, :2]).times.forward[0]) == NUM


def test_a_table_is_of_the_last_whole_step() -> None:
    shape = Shape(2, 2, kinds=SPLIT_BACKWARD)
    taken: list[Record] = []
    measured = MeasuredTasks(taken.append)
    assert not measured.table(shape).any()
    tasks = [
        task_of(Kind.F, 0, 10, held=100),
        task_of(Kind.F, 1, 20, held=300),
        task_of(Kind.B, 1, 30, held=180),
        task_of(Kind.W, 1, 40, held=100),
        task_of(Kind.B, 0, 50, held=60),
        task_of(Kind.W, 0, 60, held=0),
    ]
    for start_ns, task in enumerate(tasks):
        measured.record(task._replace(start_ns=100 * start_ns, end_ns=100 * start_ns + task.end_ns))
    assert not measured.table(shape).any()
    measured.record(PhaseRecord(0, 600, 0, Phase.SCHEDULE, 4096))
    measured.record(task_of(Kind.F, 0, 10, held=5)._replace(step=1))
    *numbers, budget = measured.table(shape).tolist()
    # F, B and W, then what is kept from F on, and what is owed to W.
    assert numbers == [10, 20, 50, 30, 60, 40, 100, 200, 60, 80]
    assert budget == 4096
    assert not measured.table(Shape(2, 3, kinds=SPLIT_BACKWARD)).any()
    assert len(taken) == len(tasks) + 2


def task_of(kind: Kind, microbatch: int, time_ns: int, held: int) -> TaskRecord:
    return TaskRecord(
        *(0, time_ns, 0, kind, 0, 0, microbatch, 0, 1, 0, 1, 1, 1, 0), held_bytes=held
    )
