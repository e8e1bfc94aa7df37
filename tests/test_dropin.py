"""How the drop-in is called: its links, its steps, what it refuses, and how it fails. What it then
learns stands in test_learns_the_same.py."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rrfp.errors import UsageError
from rrfp.megatron.settings import DispatchSettings
from rrfp.runtime.protocols import PeerLostError
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.shape import Placement, Shape
from rrfp.trace.records import PhaseRecord, Record, TaskRecord
from rrfp.train.data.batches import Batch
from tests.ranks import LASTING, run_ranks
from tests.rigs import (
    MICROBATCHES,
    TIMEOUT_S,
    Rig,
    backwards_in_reverse,
    native,
    on_rigs,
    ours,
    three_value_step,
)
from tests.training import SMALL

pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)

# How it is called: links, microbatches, refusals, failures.


def test_two_stages_are_called_in_many_ways(tmp_path: Path) -> None:
    settings = {**SMALL, "pp": 2}
    reverse = backwards_in_reverse(tmp_path / "reverse.csv", Shape(2, MICROBATCHES))
    for found in run_ranks(2, on_rigs, call_in_many_ways, settings, reverse, timeout_s=TIMEOUT_S):
        assert found == ["done"]


def call_in_many_ways(layout: Any, settings: dict[str, Any], reverse: str) -> list[str]:
    rig = Rig(settings, layout)
    share_the_links(rig)
    number_the_steps(rig)
    change_the_number_of_microbatches(rig)
    mark_the_first_microbatch(rig, reverse)
    refuse_before_the_first_task(rig, reverse)
    fail_and_go_on(rig)
    return ["done"]


def links() -> set[str]:
    """The names of the links' threads of this process."""
    names = {thread.name for thread in threading.enumerate() if not thread.name.startswith(LASTING)}
    return {name for name in names if name.startswith("rrfp-")}


def share_the_links(rig: Rig) -> None:
    """All that ask for one function get it; closed, it opens its links anew."""
    training, evaluation = ours(), ours()
    assert training is evaluation
    first = rig.run(training)
    opened = links()
    assert len(opened) == 4, "one each way, the outbox, and the listener"
    evaluation(
        forward_step_func=three_value_step,
        data_iterator=[rig.data(MICROBATCHES)],
        model=rig.gpt.chunks[0],
        num_microbatches=MICROBATCHES,
        seq_length=SMALL["seq_length"],
        micro_batch_size=1,
        forward_only=True,
    )
    assert links() == opened
    for _ in range(2):
        dist.barrier()
        training.close()
        assert not links()
        assert rig.run(training) == first
    training.close()


def number_the_steps(rig: Rig) -> None:
    """Records count steps as the loop trains, and evaluations apart, also where links are opened
    anew. The first rank runs ahead: it has done its part of an evaluation before the others."""
    from rrfp.megatron.dropin import get_forward_backward_func

    records: list[Record] = []
    schedule = get_forward_backward_func(settings=DispatchSettings(), record=records.append)
    # A layout that is refused leaves the records to the one that runs.
    with pytest.raises(UsageError, match="came with 2 model chunks"):
        rig.run(lambda **given: schedule(**{**given, "model": [rig.gpt.chunks[0]] * 2}))
    for forward_only in (False, True, True, False):
        with torch.set_grad_enabled(not forward_only):
            rig.run(schedule, forward_only=forward_only)
    dist.barrier()
    schedule.close()
    rig.run(schedule)
    schedule.close()
    phases = [each for each in records if isinstance(each, PhaseRecord)]
    assert [phase.step for phase in phases] == [0, -1, -2, 1, 2]
    num_tasks = Counter(each.step for each in records if isinstance(each, TaskRecord))
    assert num_tasks == {
        **dict.fromkeys((0, 1, 2), 2 * MICROBATCHES),
        **dict.fromkeys((-1, -2), MICROBATCHES),
    }


def change_the_number_of_microbatches(rig: Rig) -> None:
    """Links made for few microbatches serve many, also many more than the limit."""
    for settings in ({"limit": np.int64(2)}, {"hint": "gpipe", "dispatch": Dispatch.FIXED}):
        schedule = ours(**settings)
        numbers: list[Any] = [1, np.int64(6), torch.tensor(3)]
        for num_microbatches in numbers:
            expected = rig.run(native(), num_microbatches=num_microbatches)
            assert rig.run(schedule, num_microbatches=num_microbatches) == expected
        with torch.no_grad():
            for num_microbatches in (40, 2):
                evaluate = partial(rig.run, num_microbatches=num_microbatches, forward_only=True)
                assert evaluate(schedule).losses == evaluate(native()).losses
        with pytest.raises(UsageError, match=r"num_microbatches is 2\.5; it must be a whole"):
            rig.run(schedule, num_microbatches=2.5, data=rig.data(3))  # type: ignore[arg-type]
        schedule.close()


def mark_the_first_microbatch(rig: Rig, reverse: str) -> None:
    """Modules that cache weights are told of the first forward that runs, whichever it is."""
    chunk = rig.gpt.chunks[0]
    events: list[str] = []
    chunk.set_is_first_microbatch = partial(events.append, "first")

    def step(data_iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
        events.append("forward")
        return three_value_step(data_iterator, model)

    schedule = ours(hint=reverse)
    rig.run(schedule, step)
    assert events == ["first"] + ["forward"] * MICROBATCHES
    with torch.no_grad():
        for first_val_step, first in ((True, ["first"]), (False, [])):
            events.clear()
            rig.run(schedule, step, forward_only=True, first_val_step=first_val_step)
            assert events == first + ["forward"] * MICROBATCHES
    schedule.close()
    del chunk.set_is_first_microbatch


@contextmanager
def changed(owner: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, before)


class FullyShardedDataParallel(torch.nn.Module):
    """Stands for the wrappers of that name."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def refuse_before_the_first_task(rig: Rig, reverse: str) -> None:
    chunk = rig.gpt.chunks[0]
    for hint, name, value, complaint in (
        ("fb", "overlap_moe_expert_parallel_comm", True, "cannot run readiness-first"),
        ("fb", "num_microbatches_with_partial_activation_checkpoints", 0, "cannot run readiness"),
        ("fb", "fine_grained_activation_offloading", True, "cannot run readiness-first"),
        ("fb", "hybrid_context_parallel", True, "cannot run readiness-first"),
        ("fb", "fp4", "e2m1", "cannot run readiness-first"),
        ("fb", "cuda_graph_impl", "local", "cannot run readiness-first"),
        ("fb", "delay_wgrad_compute", True, "splits the backward, which fb does not"),
        ("bfw", "defer_embedding_wgrad_compute", True, "cannot follow bfw"),
        (reverse, "defer_embedding_wgrad_compute", True, "cannot follow .*reverse.csv"),
    ):
        with (
            changed(rig.gpt.config, name, value),
            pytest.raises(UsageError, match=f"{name}.* {complaint}"),
        ):
            rig.run(ours(hint=hint), never_called)
    in_a_v: dict[str, Any] = {"model": [chunk] * 2, "data_iterator": [iter(())] * 2}
    for settings, arguments, complaint in (
        ({}, {"model": [chunk] * 2}, "1 data iterators came with 2 model chunks"),
        ({}, {"data_iterator": [iter(())] * 2}, "2 data iterators came with 1 model chunks"),
        ({}, {"p2p_communicator": object()}, "come together or not at all"),
        ({}, {"model": FullyShardedDataParallel(chunk)}, "frees gradients in its own order"),
        ({"hint": "zb-v"}, {}, "zb-v needs 2 chunks per rank in placement v"),
        ({"placement": "v"}, {}, "placement v takes 2 chunks per rank, not 1"),
        ({"placement": "v"}, in_a_v, "two copies of an embedding"),
        ({}, {"model": [chunk] * 2, "data_iterator": [object()] * 2}, "several chunks share one"),
    ):
        schedule = ours(**settings)
        with (
            changed(chunk.module, "share_embeddings_and_output_weights", arguments is in_a_v),
            pytest.raises(UsageError, match=complaint),
        ):
            rig.run(
                lambda schedule=schedule, arguments=arguments, **given: schedule(
                    **{**given, **arguments}
                )
            )
    assert not links()
    from rrfp.megatron.dropin import get_forward_backward_func

    with pytest.raises(UsageError, match="placement v takes 2 chunks per rank"):
        get_forward_backward_func(2, 3, settings=DispatchSettings(placement=Placement.V))


def never_called(*_: object) -> None:
    raise AssertionError("a task has begun")


def fail_and_go_on(rig: Rig) -> None:
    """What a stage raises comes out there, its neighbour is told at once, and both can go on."""
    schedule = ours(hint="b-first")
    expected = rig.run(schedule)

    def short() -> Iterator[Batch]:
        yield from rig.data(2)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    for failing_stage, step, data, error, complaint in (
        (0, None, short, UsageError, "the data iterator ended after 2 microbatches"),
        (1, None, short, UsageError, "the data iterator ended after 2 microbatches"),
        (0, broken, None, ZeroDivisionError, ""),
        (1, broken, None, ZeroDivisionError, ""),
    ):
        if rig.layout.pp_rank == failing_stage:
            with pytest.raises(error, match=complaint):
                rig.run(schedule, step, data=data and data())
        else:
            with pytest.raises(PeerLostError, match=f"rank {failing_stage} closed its connection"):
                rig.run(schedule)
        assert not links()
        dist.barrier()
        assert rig.run(schedule) == expected
    schedule.close()
