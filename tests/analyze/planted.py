"""Simulated runs with one planted cause and what is found in them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from rrfp.replay.bottlenecks import BACKGROUND, Bottleneck, BottleneckKind, find_bottlenecks
from rrfp.replay.measured import measure
from rrfp.replay.recorded import RecordedRun, read_run
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Task
from rrfp.simulate.engine import StepConditions, TaskTimes
from rrfp.trace.records import Recording, step_windows
from tests.analyze.simulated_runs import policy_of, simulated_run

F_NS, B_NS, W_NS = 10_000, 9_000, 6_000
Factor = Callable[[int, int, int], float]
"""How many times longer a task takes, by replica, stage and microbatch."""


def run_of(
    shape: Shape,
    factor: Factor = lambda *_: 1,
    *,
    hint: str = "bf",
    replicas: int = 1,
    scatter: float = 0.0,
    seed: int = 0,
    slow_link: tuple[tuple[int, int], float] | None = None,
    message_ns: int = 300,
    **policy_bounds: int | Dispatch,
) -> Recording:
    """Three steps whose tasks take their mean times, but for `factor` and a lognormal scatter."""
    policy, shape = policy_of(hint, shape, **policy_bounds)
    rng = random.Random(seed)

    def rows(replica: int, mean_ns: int) -> list[list[int]]:
        return [
            [
                max(1, round(mean_ns * factor(replica, stage, m) * rng.lognormvariate(0, scatter)))
                for m in range(shape.num_microbatches)
            ]
            for stage in range(shape.num_stages)
        ]

    def transfer(sender: int, receiver: int, task: Task) -> int:
        is_slow = slow_link is not None and slow_link[0] == (sender, receiver)
        return round(message_ns * (slow_link[1] if slow_link and is_slow else 1))

    worlds = [
        StepConditions(TaskTimes(*(rows(replica, ns) for ns in (F_NS, B_NS, W_NS))), transfer)
        for replica in range(replicas)
    ]
    return simulated_run(policy, shape, worlds, num_steps=3)


def first(recording: Recording) -> tuple[Bottleneck, RecordedRun]:
    run = read_run(recording)
    return find_bottlenecks(run, measure(run))[0], run


def found_in(recording: Recording) -> list[Bottleneck]:
    run = read_run(recording)
    return find_bottlenecks(run, measure(run))


@dataclass(frozen=True)
class Planted:
    """A run, and what is wrong with it."""

    kind: BottleneckKind
    shape: Shape
    factor: Factor
    places: Sequence[object] = ()
    """Any of these names the place; nothing where the kind says it all."""
    replicas: int = 1
    slow_link: tuple[tuple[int, int], float] | None = None
    message_ns: int = 300
    hint: str = "bf"
    bounds: dict[str, int | Dispatch] = field(default_factory=dict)
    scatter: float = 0.0
    seed: int = 0

    def recording(self, *, is_planted: bool = True) -> Recording:
        return run_of(
            self.shape,
            self.factor if is_planted else lambda *_: 1,
            hint=self.hint,
            replicas=self.replicas,
            scatter=self.scatter,
            seed=self.seed,
            slow_link=self.slow_link if is_planted else None,
            message_ns=self.message_ns,
            **(self.bounds if is_planted else {}),
        )

    @property
    def cost(self) -> float:
        """The share of a step that it takes, for the same work where it only shifts work."""
        with_it, without = (
            float(_step_ns(self.recording(is_planted=planted))) for planted in (True, False)
        )
        if self.kind in (BottleneckKind.UNEVEN_LAYERS, BottleneckKind.UNEVEN_MICROBATCHES):
            without *= fmean(
                self.factor(0, stage, microbatch)
                for stage in range(self.shape.num_stages)
                for microbatch in range(self.shape.num_microbatches)
            )
        return 1 - without / with_it

    def is_found(self) -> bool:
        recording = self.recording()
        found = next(iter(found_in(recording)), None)
        if found is None:
            return False
        if self.kind is BottleneckKind.UNEVEN_LAYERS:
            kinds = BottleneckKind.UNEVEN_LAYERS, BottleneckKind.SLOW_STAGE
            return found.kind in kinds and found.pp_rank in self.places
        if found.kind is not self.kind:
            return False
        change = found.change
        rank = None
        if change.usual_rank is not None:
            rank = read_run(recording).place_of(change.usual_rank)
        told = (change.median_stage, rank, change.usual_replica, change.usual_link)
        return not self.places or any(place in self.places for place in told if place is not None)


def planted(seed: int) -> Planted:
    """A cause that costs at least 2% of a step, drawn from a seed."""
    rng = random.Random(seed)
    while True:
        drawn = _draw(rng)
        if drawn.cost >= 0.02:
            return drawn


def clean(seed: int) -> Recording:
    """A run with nothing wrong, drawn from a seed. Its steps are alike, so that what scatters does
    so little that no stage is truly slow by chance."""
    drawn = _draw(random.Random(seed))
    return replace(drawn, scatter=min(drawn.scatter, 0.05)).recording(is_planted=False)


def alarms(recording: Recording) -> list[Bottleneck]:
    """Return the findings without causes of every pipeline, and without effects of task scatter."""
    by_chance = (
        BottleneckKind.SLOW_STAGE,
        BottleneckKind.UNEVEN_LAYERS,
        BottleneckKind.UNEVEN_MICROBATCHES,
    )
    return [
        each
        for each in found_in(recording)
        if each.kind not in BACKGROUND
        and (each.kind not in by_chance or max(each.excess, each.saving) > 0.05)
    ]


def _draw(rng: random.Random) -> Planted:
    num_ranks = rng.choice([2, 4, 8])
    shape = Shape(num_ranks, num_ranks * rng.choice([2, 4]))
    stage, replica, times = rng.randrange(num_ranks), rng.randrange(3), rng.uniform(1.15, 3)
    heavy = set(rng.sample(range(shape.num_microbatches), shape.num_microbatches // 4))
    layers = [rng.choice([2, 3, 4]) for _ in range(num_ranks)]
    sender = rng.randrange(num_ranks - 1)
    link = rng.choice([(sender, sender + 1), (sender + 1, sender)])
    even = Planted(
        BottleneckKind.BOUND,
        shape,
        lambda *_: 1,
        hint=rng.choice(["bf", "bfw", "1f1b"]),
        scatter=rng.choice([0, 0.02, 0.05, 0.1]),
        seed=rng.randrange(10**6),
    )

    def slow(is_hit: Callable[[int, int, int], bool]) -> Factor:
        return lambda *place: times if is_hit(*place) else 1

    kind = rng.choice([kind for kind in BottleneckKind if kind not in BACKGROUND])
    match kind:
        case BottleneckKind.SLOW_STAGE:
            hit = slow(lambda _, s, __: s == stage)
            return replace(even, kind=kind, factor=hit, places=[stage], replicas=rng.choice([1, 3]))
        case BottleneckKind.SLOW_RANK:
            hit = slow(lambda r, s, _: (r, s) == (replica, stage))
            return replace(even, kind=kind, factor=hit, places=[(replica, stage)], replicas=3)
        case BottleneckKind.REPLICA:
            hit = slow(lambda r, *_: r == replica)
            return replace(even, kind=kind, factor=hit, places=[replica], replicas=3)
        case BottleneckKind.UNEVEN_LAYERS:
            most = [each for each in range(num_ranks) if layers[each] == max(layers)]
            return replace(even, kind=kind, factor=lambda _, s, __: layers[s], places=most)
        case BottleneckKind.SLOW_LINK if num_ranks > 2:
            return replace(
                even,
                kind=kind,
                places=[link],
                slow_link=(link, times),
                message_ns=rng.choice([3_000, 10_000]),
            )
        case BottleneckKind.UNEVEN_MICROBATCHES:
            return replace(even, kind=kind, factor=slow(lambda _, __, m: m in heavy))
        case BottleneckKind.ORDER:
            return replace(
                even,
                kind=kind,
                factor=lambda _, s, m: 1 + times if (s + m) % 3 == 0 else 1,
                hint="1f1b",
                bounds={"dispatch": Dispatch.FIXED},
            )
        case _:
            limit = rng.choice([1, max(1, num_ranks // 2)])
            return replace(even, hint="bf", bounds={"limit": limit})


def _step_ns(recording: Recording) -> int:
    return sum(end_ns - start_ns for start_ns, end_ns in step_windows(recording).values())
