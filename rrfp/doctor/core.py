"""How fast the dispatcher and the simulator are: compiled, or not."""

import time

from rrfp.compiled import Core, core
from rrfp.doctor.check import Check, State
from rrfp.schedule.hints.table import HINTS
from rrfp.schedule.policy import PAPER_LIMIT, Policy
from rrfp.schedule.shape import Shape
from rrfp.simulate.play import play
from rrfp.simulate.world import TaskTimes, World

_SHAPE = Shape(8, 32)
_NUM_ROUNDS = 5
_COMPILE = "in a checkout 'make setup' compiles it, where a C compiler is there"


def compiled_core(found: Core | None = None) -> Check:
    """What a task takes in a simulated step; how the core runs is found out unless it is given."""
    found = core() if found is None else found
    rows = [[1] * _SHAPE.num_microbatches] * _SHAPE.num_stages
    policy = Policy(HINTS["bf"].on(_SHAPE), limit=PAPER_LIMIT)
    taken_s = []
    for _ in range(_NUM_ROUNDS):
        start_s = time.perf_counter()
        play(_SHAPE, policy, World(TaskTimes(rows, rows, rows)))
        taken_s.append(time.perf_counter() - start_s)
    num_tasks = _SHAPE.num_ranks * _SHAPE.num_tasks_of_a_rank
    is_compiled = found is Core.COMPILED
    return Check(
        "core",
        State.OK if is_compiled else State.SLOW,
        round(min(taken_s) / num_tasks * 1e6, 1),
        "us",
        f"a simulated task; {found}" if is_compiled else f"a simulated task; {found}; {_COMPILE}",
    )
