"""Recordings of simulated runs, whose waits are known by construction."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

from rrfp.schedule.hints import Hint, kinds_of
from rrfp.schedule.named_hints import hint_named
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import FORWARD_ONLY, Shape
from rrfp.simulate.recording import new_recording
from rrfp.simulate.step import simulate_step
from rrfp.simulate.world import TaskTimes, World
from rrfp.trace.records import RankRecords, Recording, evaluation_step
from tests.cases import Case
from tests.step_times import equal_times


def simulated(
    hint: str | Hint,
    shape: Shape,
    times: TaskTimes | None = None,
    *,
    dispatch: Dispatch = Dispatch.READY,
    num_steps: int = 1,
    limit: int | None = None,
    **world: Any,
) -> Recording:
    """A run whose tasks take 10 ns each unless other times are given. A step without backward keeps
    its kinds, another one gets those of the hint."""
    chosen = hint_named(hint).on(shape) if isinstance(hint, str) else hint
    order = order_of(chosen, shape)
    if shape.kinds == FORWARD_ONLY:
        order = order.forwards()
    else:
        shape = replace(shape, kinds=kinds_of(chosen))
    policy = Policy(chosen, order, dispatch, limit)
    met = World(times or equal_times(shape, 10, 10, 10), **world)
    recording = new_recording(shape, met.num_members, 1, {"world": shape.num_ranks})
    for step in range(num_steps):
        simulate_step(shape, policy, [met], recording=recording, step=step)
    return recording


def simulated_loop(calls: str, shape: Shape, *, told: bool = True) -> Recording:
    """A run of 1F1B whose loop trains (T) and evaluates (E) in that sequence. Not `told`: all its
    steps are numbered as one, as earlier versions did."""
    order = order_of(hint_named("1f1b").on(shape), shape)
    forwards = replace(shape, kinds=FORWARD_ONLY)
    settings = {"simulated": True, "settings": {"hint": "1f1b", "dispatch": "ready"}}
    recording = new_recording(shape, 1, 1, {"world": shape.num_ranks, **settings})
    numbers = []
    for call, sort in enumerate(calls):
        trains = sort == "T"
        own, own_order = (shape, order) if trains else (forwards, order.forwards())
        # Later calls take longer: none is like another.
        world = World(equal_times(own, 10 + call, 20, 10))
        policy = Policy(own_order, own_order, Dispatch.READY, None)
        simulate_step(own, policy, [world], recording=recording, step=call)
        number = calls[:call].count(sort)
        numbers.append(number if trains else evaluation_step(number))
    for rank in recording.ranks:
        for name, records in rank.by_name().items():
            if told:
                records[:] = [record._replace(step=numbers[record.step]) for record in records]
            if name in ("send", "receive"):
                sequences: defaultdict[int, count[int]] = defaultdict(count)
                records[:] = [r._replace(sequence=next(sequences[r.peer])) for r in records]
    return recording


def without(recording: Recording, leave_out: Callable[[int], bool]) -> Recording:
    """The same run without the records of some steps."""
    ranks = [RankRecords(rank.info) for rank in recording.ranks]
    for rank, whole in zip(ranks, recording.ranks, strict=True):
        for name, records in whole.by_name().items():
            rank.by_name()[name].extend(each for each in records if not leave_out(each.step))
    return Recording(recording.settings, ranks)


def simulated_case(case: Case, times: TaskTimes, **world: Any) -> Recording:
    """A random case, its hint's order given."""
    policy = case.policy(case.order)
    recording = new_recording(case.shape, case.num_members, 1, {})
    met = World(times, num_members=case.num_members, **world)
    simulate_step(case.shape, policy, [met], recording=recording)
    return recording
