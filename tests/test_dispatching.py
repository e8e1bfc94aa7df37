"""The drop-in's settings: what is refused, and credits that no link ever exceeds."""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.errors import UsageError
from rrfp.megatron.settings import DispatchSettings, GradOrder
from rrfp.megatron.step_policy import step_policy
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.hints import WeightGradients
from rrfp.schedule.named_hints import ALTERNATIONS, HINTS
from rrfp.schedule.policy import PAPER_LIMIT, AgreementRule, Dispatch
from rrfp.schedule.shape import Placement, Shape
from rrfp.schedule.tasks import ComputeIdle, InputArrived, RunTask, Task


def test_names_are_taken_as_text() -> None:
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
