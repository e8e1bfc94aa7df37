"""Plays one pipeline's step over its world's links."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from rrfp.schedule.policy import Policy
from rrfp.schedule.shape import Shape
from rrfp.simulate.blocking import BlockingStep
from rrfp.simulate.engine import AsyncStep, Log, PipelineRun
from rrfp.simulate.world import World


def play(shape: Shape, policy: Policy, world: World, log: Log | None = None) -> PipelineRun:
    """Run one step of one pipeline, from 0 ns until no events are left.

    Raises RrfpError if tasks are left then, because a binding order deadlocks over its links.
    """
    step = (BlockingStep if world.blocking else AsyncStep)(shape, policy, world, log)
    with _collector_paused():
        return step.play()


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the garbage collector: a step makes millions of tuples, and no cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
