"""Times of the tasks of a step, and runs made of them, for the simulator's tests."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rrfp.schedule.hints import kinds_of
from rrfp.schedule.knobs import described_hold
from rrfp.schedule.named_hints import hint_named
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import Shape
from rrfp.simulate.recording import new_recording
from rrfp.simulate.step import simulate_step
from rrfp.simulate.world import TaskTimes, World
from rrfp.trace.records import Recording

TRACES = Path(__file__).parent.parent / "traces"
OURS = TRACES / "gpt-pp4-bf.pftrace"
MEGATRONS = TRACES / "gpt-pp4-megatron.pftrace"


def equal_times(shape: Shape, forward: int, input_gradient: int, weight_gradient: int) -> TaskTimes:
    """Every stage and microbatch alike."""
    forwards, input_gradients, weight_gradients = (
        [[time] * shape.num_microbatches] * shape.num_stages
        for time in (forward, input_gradient, weight_gradient)
    )
    return TaskTimes(forwards, input_gradients, weight_gradients)


def random_times(rng: random.Random, shape: Shape) -> TaskTimes:
    """Times that spread little or much, by task, by stage and by microbatch."""
    sigma = rng.choice([0.0, 0.1, 0.5, 2.0])
    by_stage = [rng.choice([1, 1, 1, 3]) for _ in range(shape.num_stages)]
    by_microbatch = [rng.choice([1, 1, 1, 5]) for _ in range(shape.num_microbatches)]
    forwards, input_gradients, weight_gradients = (
        [
            [
                1 + int(100 * of_stage * of_microbatch * rng.lognormvariate(0, sigma))
                for of_microbatch in by_microbatch
            ]
            for of_stage in by_stage
        ]
        for _ in range(3)
    )
    return TaskTimes(forwards, input_gradients, weight_gradients)


def simulated(
    policy: Policy,
    shape: Shape,
    worlds: Sequence[World],
    *,
    num_steps: int = 1,
    links: str = "async",
    hint: str | None = None,
) -> Recording:
    """The recording of a simulated run whose steps are alike."""
    settings = {
        "hint": hint or policy.hint.name,
        "dispatch": str(policy.dispatch),
        "links": links,
        "limit": policy.limit,
        "hold": described_hold(policy.hold),
        "w": str(policy.w),
        "agreement": str(policy.agreement),
    }
    described = {"simulated": True, "settings": settings}
    recording = new_recording(shape, worlds[0].num_members, len(worlds), described)
    sync_ns = 5 if len(worlds) > 1 else 0
    for step in range(num_steps):
        simulate_step(
            shape, policy, worlds, gradient_sync_ns=sync_ns, recording=recording, step=step
        )
    return recording


def policy_of(hint: str, shape: Shape, **bounds: int | Dispatch) -> tuple[Policy, Shape]:
    """A policy, and the shape split as its hint says."""
    named = hint_named(hint).on(shape)
    shape = replace(shape, kinds=kinds_of(named))
    return Policy(named, order_of(named, shape), **bounds), shape  # type: ignore[arg-type]
