"""Whole pipelines in memory: workers, agreement and the links' protocol together."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.runtime.protocols import PeerLostError
from rrfp.schedule.shape import FORWARD_ONLY, SPLIT_BACKWARD, WHOLE_BACKWARD, Shape
from rrfp.schedule.tasks import Task, parse_task
from rrfp.trace.records import NS_PER_S, Record, TaskRecord, evaluation_step
from tests.doubles.memory_transport import MemoryNetwork
from tests.rank_rig import RankRig, Work, run_in_memory


@given(
    seed=st.integers(0, 2**32),
    num_pp_ranks=st.integers(1, 4),
    num_chunks=st.integers(1, 2),
    hint_name=st.sampled_from(["bf", "fb", "bfw", "bf-deep"]),
)
def test_a_pipeline_runs_every_task_of_every_step(
    seed: int, num_pp_ranks: int, num_chunks: int, hint_name: str
) -> None:
    """Tasks and messages take their time, and evaluations stand between the training steps."""
    draws = random.Random(seed)
    kinds = SPLIT_BACKWARD if hint_name == "bfw" else WHOLE_BACKWARD
    training = Shape(num_pp_ranks, 4, num_chunks, kinds=kinds)
    steps = {0: training, evaluation_step(0): replace(training, kinds=FORWARD_ONLY), 1: training}

    def run(rig: RankRig) -> list[TaskRecord]:
        work = Work(lambda _: rig.sleep(draws.uniform(0, 1e-3)))
        for step, shape in steps.items():
            rig.run_step(step, shape, work, hint_name)
        return [record for record in rig.records if isinstance(record, TaskRecord)]

    ranks = run_in_memory(run, num_pp_ranks, seed=seed, longest_delay_ns=1_000_000)
    for rank, records in enumerate(ranks):
        assert [*dict.fromkeys(record.step for record in records)] == [*steps]
        for step, shape in steps.items():
            ran = [(run.stage, run.kind, run.microbatch) for run in records if run.step == step]
            assert sorted(ran) == sorted((*task,) for task in shape.tasks_of(rank))


def test_the_same_seed_gives_the_same_records() -> None:
    def run(rig: RankRig) -> list[Record]:
        rig.run_step(0, Shape(3, 4), Work(lambda _: rig.sleep(1e-3)))
        return rig.records

    def records(seed: int) -> list[list[Record]]:
        return run_in_memory(run, 3, seed=seed, longest_delay_ns=1_000_000)

    assert records(1) == records(1)
    assert records(1) != records(2)


def test_a_link_that_is_cut_fails_both_of_its_ranks() -> None:
    network = MemoryNetwork()

    def run(rig: RankRig) -> str:
        def act(task: Task) -> None:
            rig.sleep(1e-3)
            if task == parse_task("1F2")[0]:
                network.cut(0, 1)

        with pytest.raises(PeerLostError) as lost:
            rig.run_step(0, Shape(2, 4), Work(act))
        return str(lost.value)

    told = run_in_memory(run, 2, network=network)
    assert "rank 1 closed its connection without a farewell (seen by rank 0)" in told[0]
    assert "rank 0 closed its connection without a farewell (seen by rank 1)" in told[1]


def test_a_rank_whose_process_is_stopped_is_missed_and_does_not_blame_the_others() -> None:
    """The others lose it after 20 s; when it goes on, they have closed without a farewell."""
    network = MemoryNetwork()

    def run(rig: RankRig) -> tuple[str, float]:
        def act(task: Task) -> None:
            if task == parse_task("1F2")[0]:
                network.stop(1)
                rig.sleep(60)
                network.resume(1)

        with pytest.raises(PeerLostError) as lost:
            rig.run_step(0, Shape(3, 4), Work(act))
        told = str(lost.value), rig.clock() / NS_PER_S
        # As the drop-in does after a failure.
        rig.transport.close(farewell=False)
        return told

    (first, first_s), (stopped, stopped_s), (last, last_s) = run_in_memory(
        run, 3, network=network, stall_s=600.0
    )
    for told, at_s in ((first, first_s), (last, last_s)):
        assert "rank 1 was silent for 20 s" in told
        assert at_s == pytest.approx(20, abs=1.1)
    assert "closed its connection without a farewell" in stopped
    assert stopped_s == pytest.approx(60, abs=1.1)
