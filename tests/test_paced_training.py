"""Real ranks at a pace: tasks take what the simulator drew for them, and training is unchanged."""

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from rrfp.replay.cost_sources import resolve_costs
from rrfp.schedule.admission import Admit
from rrfp.schedule.tasks import Kind
from rrfp.simulate.conditions import Conditions, conditions
from rrfp.simulate.jitter import parse_jitter
from rrfp.trace.records import SendRecord, StimulusRecord, TaskRecord, WaitRecord
from rrfp.train.settings import TrainSettings
from tests.ranks import run_ranks
from tests.training import SMALL, RankRun, train_natively, train_variants

MS = 1_000_000
PACED: dict[str, Any] = {
    **SMALL,
    "pp": 4,
    "steps": 2,
    "pace": "multimodal",
    "jitter": "lognormal:0.3+stop:2:0:0.2",
    "seed": 11,
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def over_ms(run: RankRun) -> list[float]:
    """By how much each task of a run took longer than the simulator's, stops left aside."""
    settings = TrainSettings(**PACED)
    costs, jitter = resolve_costs("multimodal"), parse_jitter(PACED["jitter"])
    met: dict[int, Conditions] = {
        step: conditions(costs, jitter, Admit.GIVEN, settings.shape, 11 + step, 0, step)
        for step in range(settings.num_steps)
    }

    def over_of(task: TaskRecord) -> float:
        rows = met[task.step].times.by_kind(split=False)[Kind(task.kind)]
        return (task.end_ns - task.start_ns - rows[task.stage][task.microbatch]) / MS

    return [over_of(task) for task in run.tasks()]


def test_tasks_take_their_modelled_times_under_every_dispatch() -> None:
    variants = [{"hint": "bf"}, {"hint": "1f1b", "dispatch": "fixed"}, {"dispatch": "megatron"}]
    by_rank = run_ranks(4, train_variants, PACED, variants, timeout_s=500)
    for pp_rank, runs in enumerate(by_rank):
        for run in runs:
            times_ms = over_ms(run)
            assert len(times_ms) == 2 * 2 * 4
            assert min(times_ms) >= 0
            # Two cores may be late for single tasks, not for most.
            assert median(times_ms) < 5
            for task in run.tasks() if pp_rank == 2 else ():
                summary = run.summaries[task.step]
                assert summary is not None
                # That rank is stopped at first; its pace begins shortly before its entry is noted.
                assert task.end_ns - summary.start_ns > 190 * MS
        assert {tuple(run.losses) for run in runs} == {tuple(runs[0].losses)}
        assert len({run.parameters_sha256 for run in runs}) == 1


def test_a_pace_does_not_change_what_is_learned() -> None:
    settings = {**SMALL, "pp": 2, "steps": 2, "seed": 11}
    paced = {"pace": "uniform", "jitter": "J3", "hint": "bfw"}
    (paced_runs, native_runs) = (
        run_ranks(2, train_variants, settings, [paced], timeout_s=300),
        run_ranks(2, train_natively, settings, timeout_s=300),
    )
    for (run,), (native,) in zip(paced_runs, native_runs, strict=True):
        assert run.losses == native.losses
        assert run.grad_norms == native.grad_norms
        assert run.parameters_sha256 == native.parameters_sha256


HOPS = """\
seconds = { F = 0.01, B = 0.01, W = 0.01 }
links = { latency_s = 3e-3 }
"""


def test_patience_does_not_change_what_is_learned(tmp_path: Path) -> None:
    costs = tmp_path / "hops.toml"
    costs.write_text(HOPS)
    settings = {**SMALL, "pp": 4, "layers": 8, "microbatches": 8, "chunks": 2, "placement": "v"}
    settings |= {"hint": "zb-v", "w": "ranked", "hold": 4, "pace": str(costs), "steps": 4}
    variants = [{"patience": patience} for patience in ("0", "auto", "4ms")]
    by_rank = run_ranks(4, train_variants, settings, variants, timeout_s=300)
    num_waits = [0] * 3
    for runs in by_rank:
        assert {tuple(run.losses) for run in runs} == {tuple(runs[0].losses)}
        assert {tuple(run.grad_norms) for run in runs} == {tuple(runs[0].grad_norms)}
        assert len({run.parameters_sha256 for run in runs}) == 1
        for number, run in enumerate(runs):
            waits = [r for r in run.records if isinstance(r, WaitRecord) and r.cause == "patience"]
            num_waits[number] += len(waits)
            names = [r.name for r in run.records if isinstance(r, StimulusRecord)]
            assert ("Announced" in names) is (number > 0)
            # Announcements are no messages.
            assert sum(isinstance(r, SendRecord) for r in run.records) < len(run.tasks())
    assert num_waits[0] == 0
    assert num_waits[2] > 0
