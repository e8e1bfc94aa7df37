"""The worker's loop, with scripted arrivals: what it does, in which order, and what it leaves."""

from itertools import pairwise

import pytest

from rrfp.schedule.shape import FORWARD_ONLY, WHOLE_BACKWARD, Placement, Shape
from rrfp.trace.records import (
    AgreementRecord,
    StimulusRecord,
    TaskRecord,
    WaitRecord,
    evaluation_step,
    is_evaluation,
)
from tests.worker_world import TICK_NS, World, arrived, task


def test_a_middle_stage_takes_runs_and_passes_on() -> None:
    world = World(script=[[arrived("1F1"), arrived("1F0")], [arrived("1B1", peer=2)]])
    world.during[task("1B1")] = [arrived("1B0", peer=2)]
    summary = world.run_step(Shape(3, 2))
    assert world.calls == [
        *("consumed from 0 in 0", "run 1F0 on [0.0]", "send 100.0 to 2 for 2F0"),
        *("consumed from 0 in 0", "run 1F1 on [1.0]", "send 101.0 to 2 for 2F1"),
        *("consumed from 2 in 0", "run 1B1 on [1.0]", "send 101.0 to 0 for 0B1"),
        *("consumed from 2 in 0", "run 1B0 on [0.0]", "send 100.0 to 0 for 0B0"),
    ]
    assert summary.peak_held == 2
    assert summary.busy_ns == 4 * TICK_NS
    assert summary.start_ns < summary.end_ns


def test_a_step_is_recorded() -> None:
    world = World(script=[[arrived("1F0")], [arrived("1B0", peer=2)]])
    world.run_step(Shape(3, 1))
    assert world.causes() == ["warmup", "backward_input"]
    spans = [record for record in world.records if isinstance(record, WaitRecord | TaskRecord)]
    assert [type(span) for span in spans] == [WaitRecord, TaskRecord] * 2
    assert all(before.end_ns < after.start_ns for before, after in pairwise(spans))
    tasks = [record for record in spans if isinstance(record, TaskRecord)]
    assert [(run.kind, run.stage, run.chunk, run.microbatch) for run in tasks] == [
        ("F", 1, 0, 0),
        ("B", 1, 0, 0),
    ]
    assert [(run.hint_position, run.ready, run.skipped, run.depth) for run in tasks] == [
        (0, 1, 0, 1),
        (1, 1, 0, 0),
    ]
    stimuli = [record for record in world.records if isinstance(record, StimulusRecord)]
    # A wait asks anew once something has come; the last one finds the step done.
    assert [stimulus.name for stimulus in stimuli] == [
        *("ComputeIdle", "InputArrived", "ComputeIdle"),
        *("ComputeIdle", "InputArrived", "ComputeIdle"),
        "ComputeIdle",
    ]
    assert not any(isinstance(record, AgreementRecord) for record in world.records)


def test_messages_of_the_next_step_wait_for_it() -> None:
    """A neighbour may be a step ahead; even then nothing is lost or mixed up."""
    shape = Shape(3, 1, kinds=FORWARD_ONLY)
    early = arrived("1F0", step=1)
    world = World(script=[[early, arrived("1F0", step=0), arrived("1F0", step=2)]])
    for step in range(3):
        world.run_step(shape, step)
    assert world.calls == [
        call
        for step in range(3)
        for call in (
            f"consumed from 0 in {step}",
            "run 1F0 on [0.0]",
            "send 100.0 to 2 for 2F0",
        )
    ]


@pytest.mark.parametrize(
    ("step", "next_step"),
    [
        (4, evaluation_step(0)),
        (evaluation_step(0), evaluation_step(1)),
        (evaluation_step(1), 5),
        (4, 5),
    ],
    ids=["an evaluation", "another evaluation", "training again", "training"],
)
def test_a_neighbour_may_be_ahead_by_a_step_of_either_sort(step: int, next_step: int) -> None:
    world = World(rank=2, script=[[arrived("2F0", next_step, peer=1), arrived("2F0", step, 1)]])
    world.run_step(shape_of(step), step)
    assert world.calls[:2] == [f"consumed from 1 in {step}", "run 2F0 on [0.0]"]
    assert f"consumed from 1 in {next_step}" not in world.calls
    del world.calls[:]
    world.run_step(shape_of(next_step), next_step)
    assert world.calls[:2] == [f"consumed from 1 in {next_step}", "run 2F0 on [0.0]"]
    assert {record.step for record in world.records if isinstance(record, TaskRecord)} == {
        step,
        next_step,
    }


def shape_of(step: int) -> Shape:
    return Shape(3, 1, kinds=FORWARD_ONLY if is_evaluation(step) else WHOLE_BACKWARD)


def test_adjacent_stages_on_one_rank_hand_over_without_a_message() -> None:
    world = World(rank=0, num_ranks=1)
    summary = world.run_step(Shape(1, 1, num_chunks=2, placement=Placement.V))
    assert world.calls == [
        "run 0F0 on []",
        "run 1F0 on [0.0]",
        "run 1B0 on []",
        "run 0B0 on [100.0]",
    ]
    assert summary.peak_held == 1
