"""Recordings of simulated runs, whose waits are known by construction."""

from dataclasses import replace
from typing import Any

from rrfp.schedule.dispatcher import Dispatch
from rrfp.schedule.hints import Hint, hint_named, kinds_of
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import FORWARD_ONLY, Shape
from rrfp.simulate.recording import new_recording
from rrfp.simulate.step import simulate_step
from rrfp.simulate.world import Policy, TaskTimes, World
from rrfp.trace.records import Recording
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
    chosen = hint_named(hint, shape) if isinstance(hint, str) else hint
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


def simulated_case(case: Case, times: TaskTimes, **world: Any) -> Recording:
    """A random case, its hint's order given."""
    policy = Policy(case.hint, case.order, case.dispatch, case.limit, case.hold, case.w, case.rule)
    recording = new_recording(case.shape, case.num_members, 1, {})
    met = World(times, num_members=case.num_members, **world)
    simulate_step(case.shape, policy, [met], recording=recording)
    return recording
