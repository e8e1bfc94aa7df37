"""Megatron's own schedule on the CPU host: the training it does, and the records it leaves."""

from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from rrfp.schedule.causes import Cause
from rrfp.schedule.order import one_forward_one_backward
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.trace.records import Phase, PhaseRecord, TaskRecord, WaitRecord
from tests.ranks import run_ranks
from tests.training import SMALL, RankRun, train_natively

STEPS = 12


@cache
def alone() -> RankRun:
    """The reference: one process, all microbatches of the global batch."""
    return run_ranks(1, train_natively, {**SMALL, "pp": 1}, timeout_s=100)[0][0]


@cache
def pipeline() -> list[list[RankRun]]:
    """By rank, two runs from the same seed."""
    return run_ranks(4, train_natively, {**SMALL, "pp": 4, "steps": STEPS}, 2, timeout_s=100)


def test_four_stages_train_and_the_loss_falls() -> None:
    losses = pipeline()[0][0].losses
    assert losses[-1] < losses[0] - 0.5


def test_two_runs_are_equal_to_the_bit() -> None:
    for first, second in pipeline():
        assert first.losses == second.losses
        assert first.grad_norms == second.grad_norms


def test_every_rank_knows_the_same_numbers() -> None:
    runs = [first for first, _ in pipeline()]
    for run in runs:
        assert run.losses == runs[0].losses
        assert run.grad_norms == runs[0].grad_norms
        assert run.tokens == [SMALL["microbatches"] * SMALL["seq_length"]] * STEPS


def test_four_stages_agree_with_one_process() -> None:
    assert pipeline()[0][0].losses[: len(alone().losses)] == pytest.approx(alone().losses, rel=1e-5)


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2, "tp": 2},
        # Two replicas see the microbatches that one process saw.
        {"pp": 2, "dp": 2, "microbatches": SMALL["microbatches"] // 2},
    ],
    ids=["pp2-tp2", "pp2-dp2"],
)
def test_layouts_agree_with_one_process(layout: dict[str, Any]) -> None:
    runs = run_ranks(4, train_natively, {**SMALL, **layout}, timeout_s=100)
    for (run,) in runs:
        assert run.losses == pytest.approx(alone().losses, rel=1e-5)
        assert run.grad_norms == pytest.approx(alone().grad_norms, rel=1e-4)
        assert run.losses == runs[0][0].losses


def test_variable_lengths_train_on_a_tensor_parallel_pipeline() -> None:
    settings = {**SMALL, "pp": 2, "tp": 2, "seq_length": 256, "variable_lengths": True}
    runs = run_ranks(4, train_natively, settings, timeout_s=100)
    assert all(run.losses == runs[0][0].losses for (run,) in runs)
    full = SMALL["microbatches"] * 256
    assert all(0 < tokens < full for tokens in runs[0][0].tokens)


@pytest.mark.parametrize("pp_rank", range(4))
def test_tasks_are_recorded_in_the_order_of_1f1b(pp_rank: int) -> None:
    run = pipeline()[pp_rank][0]
    shape = Shape(4, SMALL["microbatches"])
    expected = one_forward_one_backward(shape).rows[pp_rank]
    for step in range(STEPS):
        tasks = [r for r in run.records if isinstance(r, TaskRecord) and r.step == step]
        assert tuple(Task(r.stage, Kind(r.kind), r.microbatch) for r in tasks) == expected
        assert [r.hint_position for r in tasks] == list(range(len(expected)))
        summary = run.summaries[step]
        assert summary is not None
        assert summary.peak_held == max(r.held for r in tasks) == 4 - pp_rank
        assert summary.busy_ns == sum(r.end_ns - r.start_ns for r in tasks)


@pytest.mark.parametrize("pp_rank", range(4))
def test_waits_fill_the_gaps_between_tasks_inside_the_step(pp_rank: int) -> None:
    records = pipeline()[pp_rank][0].records
    for step in range(STEPS):
        (window,) = (
            r
            for r in records
            if isinstance(r, PhaseRecord) and r.step == step and r.phase == Phase.SCHEDULE
        )
        spans = sorted(
            (r for r in records if isinstance(r, TaskRecord | WaitRecord) and r.step == step),
            key=lambda r: r.start_ns,
        )
        assert window.start_ns <= spans[0].start_ns
        assert spans[-1].end_ns <= window.end_ns
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(spans))
        tasks = [index for index, span in enumerate(spans) if isinstance(span, TaskRecord)]
        for index, span in enumerate(spans):
            if isinstance(span, WaitRecord):
                before_first, after_last = index < tasks[0], index > tasks[-1]
                allowed = {Cause.TRANSFER}
                if before_first:
                    allowed = {Cause.WARMUP}
                elif after_last:
                    allowed = {Cause.DRAIN, Cause.GRADIENT_SYNC}
                assert span.cause in allowed
        assert spans[-1] == next(
            r
            for r in records
            if isinstance(r, WaitRecord) and r.step == step and r.cause == Cause.GRADIENT_SYNC
        )


def test_the_functions_are_put_back_when_a_step_fails() -> None:
    assert run_ranks(1, fail_in_a_step, timeout_s=100) == [True]


def fail_in_a_step() -> bool:
    from rrfp.megatron.host import prepare_host

    prepare_host("cpu")
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from rrfp.megatron.model import build_gpt
    from rrfp.megatron.native import NativeSchedule
    from rrfp.megatron.parallel import parallel_groups
    from rrfp.megatron.settings import TrainSettings

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    def functions() -> tuple[object, ...]:
        return schedules.forward_step, schedules.backward_step, P2PCommunicator._communicate

    settings = TrainSettings(**{**SMALL, "pp": 1})
    before = functions()
    with parallel_groups(settings) as layout:
        stage = build_gpt(settings, layout, 257)
        finalize = stage.config.finalize_model_grads_func
        with pytest.raises(ZeroDivisionError):
            NativeSchedule(0, lambda _: None)(
                model=[stage.module],
                num_microbatches=1,
                forward_step_func=fails,
                data_iterator=iter(()),
                seq_length=8,
                micro_batch_size=1,
            )
        return functions() == before and stage.config.finalize_model_grads_func is finalize
