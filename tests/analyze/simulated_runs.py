"""Recordings of simulated runs, whose waits are known by construction."""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from rrfp.schedule.hints import Hint, kinds_of
from rrfp.schedule.named_hints import hint_named
from rrfp.schedule.policy import Dispatch, Policy, hold_as_json
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import FORWARD_ONLY, Shape
from rrfp.simulate.engine import StepConditions, TaskTimes
from rrfp.simulate.step import new_recording, simulate_step
from rrfp.trace.records import RankRecords, Recording, evaluation_step
from tests.properties.cases import Case

# Times of the tasks of a step, and runs made of them, for the simulator's tests.


TRACES = Path(__file__).parents[2] / "traces"
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


def simulated_run(
    policy: Policy,
    shape: Shape,
    worlds: Sequence[StepConditions],
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
        "hold": hold_as_json(policy.hold),
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
    named = hint_named(hint).for_shape(shape)
    shape = replace(shape, kinds=kinds_of(named))
    return Policy(named, order_of(named, shape), **bounds), shape  # type: ignore[arg-type]


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
    chosen = hint_named(hint).for_shape(shape) if isinstance(hint, str) else hint
    order = order_of(chosen, shape)
    if shape.kinds == FORWARD_ONLY:
        order = order.forwards()
    else:
        shape = replace(shape, kinds=kinds_of(chosen))
    policy = Policy(chosen, order, dispatch, limit)
    met = StepConditions(times or equal_times(shape, 10, 10, 10), **world)
    recording = new_recording(shape, met.num_members, 1, {"world": shape.num_ranks})
    for step in range(num_steps):
        simulate_step(shape, policy, [met], recording=recording, step=step)
    return recording


def simulated_loop(calls: str, shape: Shape, *, told: bool = True) -> Recording:
    """A run of 1F1B whose loop trains (T) and evaluates (E) in that sequence. Not `told`: all its
    steps are numbered as one, as earlier versions did."""
    order = order_of(hint_named("1f1b").for_shape(shape), shape)
    forwards = replace(shape, kinds=FORWARD_ONLY)
    settings = {"simulated": True, "settings": {"hint": "1f1b", "dispatch": "ready"}}
    recording = new_recording(shape, 1, 1, {"world": shape.num_ranks, **settings})
    numbers = []
    for call, sort in enumerate(calls):
        trains = sort == "T"
        own, own_order = (shape, order) if trains else (forwards, order.forwards())
        # Later calls take longer: none is like another.
        world = StepConditions(equal_times(own, 10 + call, 20, 10))
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
    met = StepConditions(times, num_members=case.num_members, **world)
    simulate_step(case.shape, policy, [met], recording=recording)
    return recording


# Costs, a model of them, and a run for `rrfp tune` to tune.


TRACE = Path(__file__).parents[2] / "traces/gpt-pp4-bf.pftrace"

MODEL = """
[language]
layers = 11
hidden = 256
ffn = 1024
heads = 8
vocabulary = 50000
tokens = { median = 512, sigma = 0.5, least = 16, most = 4096 }
[vision]
layers = 5
hidden = 128
ffn = 512
heads = 4
images = { median = 2 }
patches = { median = 256, sigma = 0.5, most = 1024 }
[device]
flops_per_s = 1e12
layer_s = 1e-4
[links]
latency_s = 1e-4
bandwidth_bytes_per_s = 1e9
"""

UNEVEN = """
seconds = { F = 0.020, B = 0.022, W = 0.014 }
bytes = 1000000
length = "text"
lengths = { text = 0.4 }
[[ranks]]
pp_ranks = "1"
seconds = { F = 0.030, B = 0.033, W = 0.021 }
[[ranks]]
pp_ranks = "3"
seconds = { F = 0.028, B = 0.028, W = 0.018 }
bytes = 1500000
"""


def written(directory: Path, text: str, name: str = "costs.toml") -> Path:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path
