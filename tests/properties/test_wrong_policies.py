"""Tests of deliberately wrong policies, to show that the checks of steps can fail: they must catch
each of these policies."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import permutations, product
from typing import Any

import pytest

from rrfp.schedule.dispatcher import Dispatcher, Group
from rrfp.schedule.hints import Order, kinds_of
from rrfp.schedule.named_hints import HINTS, Alternation, hint_named
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.shape import Placement, Shape
from rrfp.schedule.tasks import (
    ComputeIdle,
    InputArrived,
    Instruction,
    Kind,
    RunTask,
    StepDone,
    Stimulus,
    Task,
    TaskAgreed,
    Wait,
    Waited,
)
from tests.properties.cases import Case, an_order, random_case, random_order
from tests.properties.naive_dispatcher import Checked, NaiveDispatcher
from tests.properties.virtual_time import Node, Sets, VirtualConditions, check_step, play


def unit(_node: Node, _task: Task) -> int:
    return 1


# Bounds.


class PlainCap(NaiveDispatcher):
    """Withholds all forwards once the slots are in use, without a reserve for deeper chunks."""

    def permits(self, task: Task) -> bool:
        return task.kind is not Kind.F or self.hold is None or self.held() < self.hold


class LimitWithoutDrain(NaiveDispatcher):
    """Withholds forwards at the limit, and still ranks the backwards of every microbatch."""

    def drains(self) -> bool:
        return False


class Unbounded(NaiveDispatcher):
    """Withholds nothing."""

    def permitted(self, arrived: set[Task]) -> list[Task]:
        return self.here(arrived)


def test_a_plain_cap_stalls_and_the_hold_does_not() -> None:
    shape = Shape(2, 2, num_chunks=2)
    bf = HINTS["bf"]
    history = play(shape, [[PlainCap(shape, rank, Policy(bf, hold=1))] for rank in range(2)], unit)
    with pytest.raises(AssertionError, match="the step stalled"):
        check_step(history, hold=2)  # 0F0 and 0F1 have taken both slots, and 2F0 has none
    history = play(
        shape, [[Dispatcher(shape, rank, Policy(bf, hold=1))] for rank in range(2)], unit
    )
    check_step(history, hold=2)


def test_a_limit_without_drain_mode_stalls_with_several_chunks() -> None:
    shape = Shape(2, 2, num_chunks=2)
    bf = HINTS["bf"]
    history = play(
        shape, [[LimitWithoutDrain(shape, rank, Policy(bf, limit=2))] for rank in range(2)], unit
    )
    with pytest.raises(AssertionError, match="the step stalled"):
        check_step(history, limit=2)
    history = play(
        shape, [[Dispatcher(shape, rank, Policy(bf, limit=2))] for rank in range(2)], unit
    )
    check_step(history, limit=2)


def interleaved_cases() -> Iterator[Case]:
    for seed, num_chunks in product(range(40), (2, 3, 4)):
        yield random_case(seed, max_members=1, num_chunks=num_chunks, dispatch=Dispatch.READY)


def test_a_plain_cap_stalls_in_many_random_steps() -> None:
    tight = [
        replace(case, limit=None, hold=2 * case.shape.num_chunks)
        for case in interleaved_cases()
        if Kind.B in case.shape.kinds and case.shape.num_microbatches > 4
    ]
    assert len(tight) > 20
    assert not any(stalls(case, Dispatcher) for case in tight)
    assert sum(stalls(case, PlainCap) for case in tight) > len(tight) / 4


def stalls(case: Case, make: Callable[..., Any]) -> bool:
    return not case.play(case.deciders(make)).is_whole


# Policies that break one rule, which must be caught in at least one random step.


class PrefersOtherChunks(NaiveDispatcher):
    def preference(self, task: Task) -> tuple[int, int]:
        preference, microbatch = super().preference(task)
        return (-preference, microbatch)


class PrefersLaterMicrobatches(NaiveDispatcher):
    def preference(self, task: Task) -> tuple[int, int]:
        preference, microbatch = super().preference(task)
        return (preference, -microbatch)


class EagerWeightGradients(NaiveDispatcher):
    """Runs W before the second direction of a round."""

    def kinds_in_sequence(self, hint: Alternation) -> Iterable[Kind]:
        first, second, last = super().kinds_in_sequence(hint)
        return (first, last, second)


class WithholdsWeightGradients(NaiveDispatcher):
    """Withholds W under a bound, too."""

    def permitted(self, arrived: set[Task]) -> list[Task]:
        permitted = super().permitted(arrived)
        return [task for task in permitted if task.kind is not Kind.W or not self.is_at_limit()]


class RoundOutlivesWait(NaiveDispatcher):
    def handle(self, now_ns: int, stimulus: Stimulus) -> tuple[Instruction, ...]:
        half_done = self.round_is_half_done
        answer = super().handle(now_ns, stimulus)
        if answer and isinstance(answer[-1], Wait):
            self.round_is_half_done = half_done
        return answer


class RoundEndsWithPatience(NaiveDispatcher):
    def wait(self, now_ns: int, wait: Wait) -> tuple[Instruction, ...]:
        self.round_is_half_done = False
        return super().wait(now_ns, wait)


class NoPatience(NaiveDispatcher):
    def awaited(self, now_ns: int, choice: Task) -> Task | None:
        return None


class BlindPatience(NaiveDispatcher):
    """Waits for any announced task, also for one that ranks below a ready task."""

    def awaited(self, now_ns: int, choice: Task) -> Task | None:
        windows = {task: self.window(task) for task in self.announced}
        soon = [
            task for task, (from_ns, until_ns) in windows.items() if from_ns <= now_ns < until_ns
        ]
        return next((task for task in soon if task not in self.done | self.arrived[0]), None)


class EarlyPatience(NaiveDispatcher):
    """Starts to wait earlier than its patience allows."""

    def window(self, task: Task) -> tuple[int, int]:
        return 0, super().window(task)[1]


class EndlessPatience(NaiveDispatcher):
    """Waits for announced tasks without a deadline."""

    def window(self, task: Task) -> tuple[int, int]:
        return super().window(task)[0], 10**18


class PatienceBeyondBounds(NaiveDispatcher):
    """Waits for tasks that the bound would withhold."""

    def awaited(self, now_ns: int, choice: Task) -> Task | None:
        permitted, self.permitted = self.permitted, self.here  # type: ignore[method-assign]
        try:
            return super().awaited(now_ns, choice)
        finally:
            self.permitted = permitted  # type: ignore[method-assign]


class HoldOffByOne(NaiveDispatcher):
    def held(self) -> int:
        return super().held() - (self.hold is not None)


class OwnPick(NaiveDispatcher):
    """A leader that decides by its own arrivals only."""

    def choice(self) -> Task | None:
        return self.first_pick(self.arrived[0]) if self.group.leads else None


class IgnoresFirstPicks(NaiveDispatcher):
    """Decides by the intersection although the rule is unanimous."""

    def choice(self) -> Task | None:
        if not self.group.leads:
            return None
        return self.first_pick(set.intersection(*self.arrived))


@pytest.mark.parametrize(
    "wrong",
    [
        PlainCap,
        LimitWithoutDrain,
        Unbounded,
        PrefersOtherChunks,
        PrefersLaterMicrobatches,
        EagerWeightGradients,
        WithholdsWeightGradients,
        RoundOutlivesWait,
        RoundEndsWithPatience,
        NoPatience,
        BlindPatience,
        EarlyPatience,
        EndlessPatience,
        PatienceBeyondBounds,
        HoldOffByOne,
        OwnPick,
        IgnoresFirstPicks,
    ],
)
def test_a_policy_that_breaks_one_rule_is_caught(wrong: type[NaiveDispatcher]) -> None:
    def checked(*args: Any, **kwargs: Any) -> Checked:
        return Checked(wrong(*args, **kwargs), NaiveDispatcher(*args, **kwargs))

    for seed in range(400):
        case = random_case(seed)
        if case.shape.num_microbatches > 16:
            continue  # The specification is slow on many microbatches.
        try:
            case.play(case.deciders(checked, case.order))
        except AssertionError:
            return
    raise AssertionError("no step distinguishes the policy from the correct one")


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (Unbounded, "above|slots of"),
        (HoldOffByOne, "slots of|states"),
        (OwnPick, "which it needs"),
    ],
)
def test_the_effect_of_a_broken_rule_is_caught(wrong: type[NaiveDispatcher], fault: str) -> None:
    def check_all() -> None:
        for seed in range(400):
            case = random_case(seed)
            if case.shape.num_microbatches <= 16:
                history = case.play(case.deciders(wrong, case.order))
                check_step(history, limit=case.bound_on_depth, hold=case.bound_on_held)

    with pytest.raises(AssertionError, match=fault):
        check_all()


# Groups.


class IndependentMember:
    """A member of a group that decides for itself."""

    def __init__(self, shape: Shape, rank: int) -> None:
        self._dispatcher = Dispatcher(shape, rank, Policy(HINTS["bf"]))

    def handle(self, now_ns: int, stimulus: Stimulus) -> tuple[Instruction, ...]:
        if isinstance(stimulus, InputArrived) and stimulus.member > 0:
            return ()
        if isinstance(stimulus, TaskAgreed):
            return self._dispatcher.handle(now_ns, ComputeIdle())
        return self._dispatcher.handle(now_ns, stimulus)


def test_members_that_decide_for_themselves_are_caught() -> None:
    shape = Shape(3, 8)
    deciders = [[IndependentMember(shape, rank) for _ in range(2)] for rank in range(3)]
    slow = Node(1, 1)
    conditions = VirtualConditions(unit, lambda _sender, receiver: 9 * (receiver == slow))
    with pytest.raises(AssertionError, match="left its group's sequence"):
        check_step(play(shape, deciders, conditions))


@pytest.mark.parametrize("agrees_everywhere", [True, False])
def test_replicas_that_agree_only_on_coupled_stages_stall(agrees_everywhere: bool) -> None:
    shape = Shape(2, 2)
    by_index = an_order(shape, "0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
    by_cost = an_order(shape, "0F1 0F0 0B1 0B0", "1F0 1F1 1B0 1B1")
    coupled_on_stage_1: list[Sets] = [[[0], [1]], [[0, 1]]]
    groups = [[[0, 1]], [[0, 1]]] if agrees_everywhere else coupled_on_stage_1
    # Each replica admits one microbatch, and the replicas rank microbatches differently.
    deciders = [
        [
            Dispatcher(
                shape,
                rank,
                Policy((by_index, by_cost)[member], limit=1),
                group=Group(2, leads=member == 0) if [0, 1] in groups[rank] else None,
            )
            for member in range(2)
        ]
        for rank in range(2)
    ]
    conditions = VirtualConditions(unit, groups=groups, collectives=coupled_on_stage_1)
    assert play(shape, deciders, conditions).is_whole is agrees_everywhere


# Readiness, stalls, idle time and hints.


class IgnoresArrivals:
    """Runs its order without regard to arrivals."""

    def __init__(self, order: Order, rank: int) -> None:
        self._left = list(order.rows[rank])
        self._depth = 0

    def handle(self, now_ns: int, stimulus: Stimulus) -> tuple[Instruction, ...]:
        if isinstance(stimulus, InputArrived):
            return ()
        if not self._left:
            return (StepDone(),)
        task = self._left.pop(0)
        self._depth += {Kind.F: 1, Kind.B: -1, Kind.W: 0}[task.kind]
        return (RunTask(task, 0, -1, 1, -1, self._depth, self._depth, 0, 0),)


class OmitsWaits:
    """Ends its waits without recording them."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def handle(self, now_ns: int, stimulus: Stimulus) -> tuple[Instruction, ...]:
        instructions = self._dispatcher.handle(now_ns, stimulus)
        return tuple(each for each in instructions if not isinstance(each, Waited))


def test_a_policy_that_ignores_readiness_is_caught() -> None:
    shape = Shape(3, 4)
    order = random_order(shape, 0, valid=True)
    history = play(shape, [[IgnoresArrivals(order, rank)] for rank in range(3)], unit)
    with pytest.raises(AssertionError, match="which it needs"):
        check_step(history)


def test_a_policy_that_stalls_is_caught() -> None:
    shape = Shape(2, 2)
    order = an_order(shape, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    history = play(
        shape,
        [[Dispatcher(shape, rank, Policy(order, dispatch=Dispatch.FIXED))] for rank in range(2)],
        unit,
    )
    with pytest.raises(AssertionError, match="the step stalled"):
        check_step(history, order=order)


def test_a_missing_idle_interval_is_caught() -> None:
    shape = Shape(3, 4)
    deciders = [[OmitsWaits(Dispatcher(shape, rank, Policy(HINTS["bf"])))] for rank in range(3)]
    with pytest.raises(AssertionError, match="is in no interval"):
        check_step(play(shape, deciders, unit))


ONE_CHUNK = Shape(4, 16)
IN_A_V = Shape(4, 16, num_chunks=2, placement=Placement.V)


@pytest.mark.parametrize(
    ("shape", "ran", "claimed"),
    [
        # As rankings of ready tasks, f-first and gpipe are the same.
        *[
            (ONE_CHUNK, *pair)
            for pair in permutations(("bf", "fb", "b-first", "f-first", "1f1b", "gpipe"), 2)
            if set(pair) != {"f-first", "gpipe"}
        ],
        (IN_A_V, "bf", "bf-deep"),
        *[(IN_A_V, *pair) for pair in permutations(("bfw", "bfw-deep", "zb-v"), 2)],
        (ONE_CHUNK, "bfw", "zb-h1"),
    ],
)
def test_a_policy_that_follows_another_hint_is_caught(shape: Shape, ran: str, claimed: str) -> None:
    hint, other = hint_named(ran).for_shape(shape), hint_named(claimed).for_shape(shape)
    shape = replace(shape, kinds=kinds_of(hint))
    # bf and fb differ only after a wait that ends with tasks of both directions ready.
    for seed in range(50):
        case = replace(
            random_case(seed, max_members=1, dispatch=Dispatch.READY),
            shape=shape,
            hint=hint,
            limit=None,
            hold=None,
            collectives=(),
        )
        claims = replace(case, hint=other)
        ranks = zip(case.deciders(Dispatcher), claims.deciders(NaiveDispatcher), strict=True)
        try:
            case.play([[Checked(does, says)] for [does], [says] in ranks])
        except AssertionError:
            return
    raise AssertionError(f"no step tells {ran} from {claimed}")
