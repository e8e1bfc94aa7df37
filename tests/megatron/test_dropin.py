"""How the drop-in is called: its links, its steps, what it refuses, and how it fails. What it then
learns stands in megatron/test_learns_the_same.py."""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rrfp.errors import UsageError
from rrfp.megatron.settings import DispatchSettings, GradOrder
from rrfp.runtime.protocols import PeerLostError
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.hints import WeightGradients
from rrfp.schedule.named_hints import ALTERNATIONS, HINTS
from rrfp.schedule.policy import KNOBS, PAPER_LIMIT, AgreementRule, Dispatch, Policy
from rrfp.schedule.rehearsal import step_policy
from rrfp.schedule.shape import Placement, Shape
from rrfp.schedule.tasks import ComputeIdle, InputArrived, RunTask, Task
from rrfp.trace.records import PhaseRecord, Record, TaskRecord
from rrfp.train.data.batches import Batch
from tests.e2e.ranks import LASTING, run_ranks
from tests.megatron.training import (
    MICROBATCHES,
    SMALL,
    TIMEOUT_S,
    Outcome,
    Rig,
    backwards_in_reverse,
    native,
    on_rigs,
    ours,
    three_value_step,
)

# How it is called: links, microbatches, refusals, failures.


pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)


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
    """Equal arguments give the same function. After a close, it opens its links again."""
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
    """Records number training steps and evaluations separately, also after links are opened again.
    The first rank runs ahead: it finishes its part of an evaluation before the others."""
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
    """Modules that cache weights get a flag for the first forward that runs, of any microbatch."""
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
    """An error of a stage is raised there, its neighbor gets it at once, and both can continue."""
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


# The drop-in's settings: what is refused, and credits that no link ever exceeds.


def test_names_may_be_text() -> None:
    settings: Any = {
        "hint": "zb-v",
        "w": "ranked",
        "agreement": "unanimous",
        "patience": "5ms",
        "grad_order": "arrival",
        "placement": "v",
    }
    assert DispatchSettings(**settings) == DispatchSettings(
        hint="zb-v",
        w=WeightGradients.RANKED,
        agreement=AgreementRule.UNANIMOUS,
        patience=5_000_000,
        grad_order=GradOrder.ARRIVAL,
        placement=Placement.V,
    )
    assert DispatchSettings(**settings).placement is Placement.V
    fixed: Any = {"dispatch": "fixed"}
    assert DispatchSettings(**fixed).policy.dispatch is Dispatch.FIXED


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"placement": "w"}, "placement is 'w'; choose one of loop, v"),
        ({"w": "never"}, "w is 'never'; choose one of idle, ranked"),
        ({"grad_order": None}, "grad_order is 'None'; choose one of canonical, arrival"),
        ({"limit": 0}, "the limit is 0; it must be a whole number, at least 1"),
        ({"limit": "3"}, "the limit is '3'; it must be a whole number, at least 1"),
        ({"stall_s": 0.0}, "stall_s is 0.0; it must be a number of seconds above 0"),
        ({"hold": -1}, "the hold is -1; it must be a whole number, at least 1"),
        ({"patience": "5"}, "the patience is '5'; write auto, 0"),
        ({"patience": "auto", "dispatch": "fixed"}, "leave --patience out"),
        ({"limit": 3, "hold": 2}, "a limit of 3 and a hold of 2 exclude each other"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        DispatchSettings(**settings)


def test_one_bound_withholds_at_most() -> None:
    assert DispatchSettings().policy.of_shape(Shape(16, 64)).limit == PAPER_LIMIT
    assert DispatchSettings().policy.of_shape(Shape(64, 64)).limit == 2 * 64
    assert DispatchSettings(hold=3).policy.limit is None
    assert DispatchSettings(hold=3).policy.hold_slots(2) == 6
    assert DispatchSettings(dispatch=Dispatch.FIXED).policy.limit is None


@given(st.integers(0, 2**32 - 1))
def test_no_link_ever_holds_more_messages_than_its_credits(seed: int) -> None:
    draw = random.Random(seed)
    num_chunks = draw.choice([1, 2, 3])
    is_v = num_chunks == 2 and draw.random() < 0.5
    placement = Placement.V if is_v else Placement.LOOP
    shape = Shape(draw.randint(1, 4), draw.randint(1, 6), num_chunks, placement)
    bound: dict[str, Any] = draw.choice(
        [{}, {"limit": draw.randint(1, 4)}, {"hold": draw.randint(1, 4)}]
    )
    settings = DispatchSettings(draw.choice(sorted(ALTERNATIONS)), **bound)
    forward_only = draw.random() < 0.2
    most = most_messages_on_a_link(settings, shape, draw, forward_only=forward_only)
    num_credits = settings.policy.num_in_flight(
        shape.num_microbatches, num_chunks, forward_only=forward_only
    )
    assert most <= num_credits


@pytest.mark.parametrize("hint", HINTS)
def test_a_fixed_order_fits_the_credits(hint: str) -> None:
    draw = random.Random(hint)
    settings = DispatchSettings(hint, dispatch=Dispatch.FIXED)
    for num_ranks, num_chunks, placement in ((2, 1, "loop"), (2, 2, "loop"), (3, 2, "v")):
        shape = Shape(num_ranks, 6, num_chunks, Placement(placement))
        try:
            most = most_messages_on_a_link(settings, shape, draw, forward_only=False)
        except UsageError:
            continue  # no such order for this shape
        assert most <= settings.policy.num_in_flight(6, num_chunks, forward_only=False)


def most_messages_on_a_link(
    settings: DispatchSettings, shape: Shape, draw: random.Random, *, forward_only: bool
) -> int:
    """Play one step with ranks and messages of random slowness: the most messages sent over any
    directed link that were not consumed yet."""
    steering = step_policy(settings.policy, shape, forward_only=forward_only)
    shape = steering.shape
    dispatchers = [Dispatcher(shape, rank, steering.policy) for rank in range(shape.num_ranks)]
    speeds = [draw.choice([1, 1, 30]) for _ in dispatchers]
    links: dict[tuple[int, int], list[Task]] = {}
    held: Counter[tuple[int, int]] = Counter()
    most = num_run = 0
    while num_run < shape.num_ranks * shape.num_tasks_of_a_rank:
        (rank,) = draw.choices(range(shape.num_ranks), speeds)
        for (_, receiver), queue in links.items():
            while receiver == rank and queue and draw.random() < 0.7:
                dispatchers[rank].handle(0, InputArrived(queue.pop(0)))
        for run in dispatchers[rank].handle(0, ComputeIdle()):
            if not isinstance(run, RunTask):
                continue
            num_run += 1
            sent, taken = shape.receiver(run.task), shape.sender(run.task)
            if taken is not None and shape.rank_of(taken.stage) != rank:
                held[shape.rank_of(taken.stage), rank] -= 1
            if sent is not None and shape.rank_of(sent.stage) != rank:
                link = rank, shape.rank_of(sent.stage)
                links.setdefault(link, []).append(sent)
                held[link] += 1
                most = max(most, held[link])
    return most


# Several model chunks a rank: in a V, which Megatron lacks, held against the same model on other
# stages. Loops are rows of megatron/test_learns_the_same.py.


# At two ranks Megatron's own interleaving mixes up its messages over gloo.
LOOP = Shape(3, 6, 2)
LOOP_SETTINGS = {**SMALL, "layers": 6, "pp": 3, "chunks": 2}

STRAIGHT = {**SMALL, "pp": 2}
SEVERAL_STAGES_A_RANK: list[dict[str, Any]] = [
    {**STRAIGHT, "chunks": 2, "placement": Placement.V},
    # Both directions between the same two ranks, and stages that follow each other on one rank.
    {**STRAIGHT, "chunks": 2},
]


def test_a_sum_in_the_order_of_arrival_is_another(tmp_path: Path) -> None:
    hint = backwards_in_reverse(tmp_path / "reverse.csv", LOOP)
    for canonical, arrival in run_ranks(
        3, on_rigs, in_both_orders, LOOP_SETTINGS, hint, timeout_s=TIMEOUT_S
    ):
        assert arrival.losses == canonical.losses
        # The order of the sum is the only difference that there may be.
        assert arrival.gradients_sha256 != canonical.gradients_sha256


def in_both_orders(layout: Any, settings: dict[str, Any], hint: str) -> list[Outcome]:
    """Megatron's outcome, and ours where gradients are added up as they come."""
    rig = Rig(settings, layout)
    schedule = ours(hint=hint, grad_order="arrival", dispatch="fixed")
    found = [rig.run(each, num_microbatches=LOOP.num_microbatches) for each in (native(), schedule)]
    schedule.close()
    return found


def test_a_models_gradients_do_not_depend_on_where_its_stages_are() -> None:
    expected = run_ranks(2, on_rigs, gradients_by_name, STRAIGHT, [None], timeout_s=TIMEOUT_S)
    for settings in SEVERAL_STAGES_A_RANK:
        hints = ["bf", "gpipe", "bfw-deep"]
        found = run_ranks(2, on_rigs, gradients_by_name, settings, hints, timeout_s=TIMEOUT_S)
        for case, by_hint in merged(found).items():
            for losses_and_gradients in by_hint:
                assert losses_and_gradients == merged(expected)[case][0], (settings, case)
    # One rank alone hands everything over to itself, and reaches the same.
    alone = run_ranks(
        1, on_rigs, gradients_by_name, {**SMALL, "pp": 1, "chunks": 2}, ["bfw"], timeout_s=TIMEOUT_S
    )
    assert merged(alone) == merged(expected)


ByCase = dict[str, list[tuple[list[float], dict[str, str]]]]


def gradients_by_name(layout: Any, settings: dict[str, Any], hints: list[str | None]) -> ByCase:
    """By case, the losses and gradients on this rank under each hint; None is Megatron's own."""
    rig = Rig(settings, layout)
    found: ByCase = {"mean": [], "per token": []}
    for hint in hints:
        placement = settings.get("placement", Placement.LOOP)
        schedule: Any = native() if hint is None else ours(hint=hint, placement=placement)
        for case in found:
            rig.gpt.config.calculate_per_token_loss = case == "per token"
            losses = rig.run(schedule, three_value_step).losses
            found[case].append((losses, rig.gradients()))
        if hint is not None:
            schedule.close()
    return found


def merged(by_rank: list[ByCase]) -> ByCase:
    """The whole pipeline's losses and gradients."""
    first, *others = by_rank
    for other in others:
        first = {
            case: [
                (losses + more_losses, gradients | more)
                for (losses, gradients), (more_losses, more) in zip(
                    by_hint, other[case], strict=True
                )
            ]
            for case, by_hint in first.items()
        }
    return first


def test_settings_hold_a_policy_and_take_its_knobs_as_keywords() -> None:
    policy = Policy(HINTS["bfw"], hold=4)
    assert DispatchSettings(policy=policy).policy is policy
    knobs: dict[str, Any] = {"limit": 3, "hold": None}
    changed = replace(DispatchSettings(policy=policy, outbox_mb=8), **knobs)
    assert (changed.policy.hint, changed.policy.limit, changed.policy.hold) == (
        HINTS["bfw"],
        3,
        None,
    )
    assert changed.outbox_mb == 8
    names = [*signature(DispatchSettings).parameters]
    assert names[: len(KNOBS)] == [*KNOBS]
    assert {each.name for each in fields(DispatchSettings)} - {"policy"} == set(names) - {*KNOBS}
    with pytest.raises(TypeError, match="no keyword 'limt'"):
        DispatchSettings(limt=3)
