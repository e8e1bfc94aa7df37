import json
import pickle
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rrfp.errors import UsageError
from rrfp.schedule.shape import (
    FORWARD_ONLY,
    SPLIT_BACKWARD,
    WHOLE_BACKWARD,
    Placement,
    Shape,
    shape_of_stages,
)
from rrfp.schedule.tasks import Kind, Task, parse_task


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    num_chunks = draw(st.integers(1, 4))
    placement = draw(st.sampled_from(list(Placement) if num_chunks == 2 else [Placement.LOOP]))
    kinds = draw(st.sampled_from([FORWARD_ONLY, WHOLE_BACKWARD, SPLIT_BACKWARD]))
    return Shape(draw(st.integers(1, 6)), draw(st.integers(1, 5)), num_chunks, placement, kinds)


def all_tasks(shape: Shape) -> list[Task]:
    return list(chain.from_iterable(shape.tasks_of(rank) for rank in range(shape.num_ranks)))


def tasks(texts: str) -> tuple[Task, ...]:
    return tuple(parse_task(text)[0] for text in texts.split())


def test_a_loop_gives_each_rank_every_nth_stage() -> None:
    shape = Shape(3, 1, num_chunks=2)
    assert [shape.stages_of(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]


def test_a_v_turns_at_the_last_rank() -> None:
    shape = Shape(3, 1, num_chunks=2, placement=Placement.V)
    assert [shape.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


def test_tasks_come_by_kind_chunk_and_microbatch() -> None:
    shape = Shape(2, 2, num_chunks=2, kinds=SPLIT_BACKWARD)
    assert tuple(shape.tasks_of(0)) == tasks("0F0 0F1 2F0 2F1 0B0 0B1 2B0 2B1 0W0 0W1 2W0 2W1")


@pytest.mark.parametrize(
    ("task", "needed"),
    [
        ("0F1", ""),
        ("1F1", "0F1"),
        ("2B1", "2F1"),
        ("1B1", "1F1 2B1"),
        ("0B1", "0F1 1B1"),
        ("1W1", "1B1"),
    ],
)
def test_prerequisites_are_those_of_the_method(task: str, needed: str) -> None:
    shape = Shape(3, 2, kinds=SPLIT_BACKWARD)
    assert shape.prerequisites(*tasks(task)) == tasks(needed)


@given(shapes())
def test_stages_chunks_and_ranks_map_onto_each_other(shape: Shape) -> None:
    seen = []
    for rank in range(shape.num_ranks):
        for chunk, stage in enumerate(shape.stages_of(rank)):
            assert (shape.rank_of(stage), shape.chunk_of(stage)) == (rank, chunk)
            seen.append(stage)
    assert sorted(seen) == list(range(shape.num_stages))


@given(shapes())
def test_every_task_is_held_by_exactly_one_rank(shape: Shape) -> None:
    every = all_tasks(shape)
    assert len(set(every)) == len(every) == shape.num_ranks * shape.num_tasks_of_a_rank
    for task in every:
        holders = [rank for rank in range(shape.num_ranks) if shape.holds(rank, task)]
        assert holders == [shape.rank_of(task.stage)]


@given(shapes())
def test_senders_and_receivers_mirror_each_other_and_are_prerequisites(shape: Shape) -> None:
    for task in all_tasks(shape):
        receiver = shape.receiver(task)
        if receiver is not None:
            assert shape.sender(receiver) == task
            assert task in shape.prerequisites(receiver)
        sender = shape.sender(task)
        from_elsewhere = [
            needed for needed in shape.prerequisites(task) if needed.stage != task.stage
        ]
        assert from_elsewhere == ([] if sender is None else [sender])


@given(shapes())
def test_prerequisites_are_tasks_of_the_step_and_make_no_circle(shape: Shape) -> None:
    every = set(all_tasks(shape))
    done: set[Task] = set()
    while done != every:
        able = {task for task in every - done if done.issuperset(shape.prerequisites(task))}
        assert able
        done |= able


@pytest.mark.parametrize(
    "task", [Task(3, Kind.F, 0), Task(-1, Kind.F, 0), Task(1, Kind.F, 2), Task(1, Kind.W, 0)]
)
def test_what_is_not_in_the_step_is_held_by_nobody(task: Task) -> None:
    shape = Shape(3, 2)
    assert not any(shape.holds(rank, task) for rank in range(3))


def test_sizes_below_1_are_refused() -> None:
    with pytest.raises(UsageError, match="num_ranks is 0; it must be at least 1"):
        Shape(0, 1)
    with pytest.raises(UsageError, match="num_microbatches is -2; it must be at least 1"):
        Shape(1, -2)
    with pytest.raises(UsageError, match="num_chunks is 0; it must be at least 1"):
        Shape(1, 1, num_chunks=0)


def test_numbers_of_any_library_are_taken() -> None:
    shape = Shape(np.int64(2), torch.tensor(3), np.array(2))
    assert shape == Shape(2, 3, 2)
    assert json.dumps([shape.num_ranks, shape.num_microbatches, shape.num_chunks]) == "[2, 3, 2]"
    assert pickle.loads(pickle.dumps(shape)) == shape
    with pytest.raises(UsageError, match=r"num_ranks is 2\.5; it must be a whole number"):
        Shape(2.5, 3)  # type: ignore[arg-type]


def test_other_sets_of_kinds_are_refused() -> None:
    with pytest.raises(UsageError, match="is not F, F B or F B W"):
        Shape(1, 1, kinds=(Kind.B,))


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_a_v_has_two_chunks(num_chunks: int) -> None:
    with pytest.raises(UsageError, match=f"placement v takes 2 chunks per rank, not {num_chunks}"):
        Shape(2, 2, num_chunks=num_chunks, placement=Placement.V)


@given(shapes())
def test_a_link_leads_from_the_rank_of_the_sender_to_that_of_the_task(shape: Shape) -> None:
    links = set()
    for task in all_tasks(shape):
        sender, link = shape.sender(task), shape.link(task)
        ranks = None if sender is None else (shape.rank_of(sender.stage), shape.rank_of(task.stage))
        assert link == (None if ranks is None or ranks[0] == ranks[1] else ranks)
        links.add(link)
    reached = {frozenset(link) for link in links if link is not None}
    for rank in range(shape.num_ranks):
        assert {frozenset((rank, other)) for other in shape.neighbours(rank)} == {
            link for link in reached if rank in link
        }


@given(shapes())
def test_a_shape_is_found_by_its_stages(shape: Shape) -> None:
    stages = {rank: shape.stages_of(rank) for rank in range(shape.num_ranks)}
    found = shape_of_stages(stages, shape.num_microbatches, shape.kinds)
    assert found is not None
    assert {rank: found.stages_of(rank) for rank in range(found.num_ranks)} == stages
    stages[0] = tuple(stage + 1 for stage in stages[0])
    assert shape_of_stages(stages, shape.num_microbatches, shape.kinds) is None
