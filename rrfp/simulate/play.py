"""Plays one pipeline's step over its world's links."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace

from rrfp.schedule.patience.punctuality import punctuality_of
from rrfp.schedule.policy import Policy
from rrfp.schedule.shape import Shape
from rrfp.simulate.announcing import Announcing
from rrfp.simulate.blocking import BlockingStep
from rrfp.simulate.engine import Log, PipelineRun
from rrfp.simulate.travelling import TravellingStep
from rrfp.simulate.world import World


def play(shape: Shape, policy: Policy, world: World, log: Log | None = None) -> PipelineRun:
    """Run one step of one pipeline, from 0 ns until no events are left.

    Raises RrfpError if tasks are left then, because a binding order deadlocks over its links.
    """
    with _collector_paused():
        if world.blocking:
            return BlockingStep(shape, policy, world, log).play()
        announcing = _announcing_after_a_step(shape, policy, world)
        return TravellingStep(shape, policy, world, log, announcing).play()


def _announcing_after_a_step(shape: Shape, policy: Policy, world: World) -> Announcing | None:
    """Announcements between ranks that have run this step before: in the runtime, too, all steps
    but the first have some to learn from. None where no rank ever waits."""
    heard = [punctuality_of(policy, shape.num_chunks) for _ in range(shape.num_ranks)]
    patient = [each for each in heard if each is not None]
    if not patient:
        return None
    announcing = Announcing(shape, world, patient)
    # What stretches tasks counts what was run, and begins anew with the step that counts.
    before = replace(world, stretch=deepcopy(world.stretch))
    TravellingStep(shape, policy, before, None, announcing).play()
    return announcing


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
