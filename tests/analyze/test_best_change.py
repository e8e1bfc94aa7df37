"""The first finding against a search over every change that a replay can make of a run."""

import json
import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from rrfp.errors import UsageError
from rrfp.interchange.formats import import_run
from rrfp.replay.bottlenecks import find_bottlenecks
from rrfp.replay.change import Change, replay
from rrfp.replay.measured import measure
from rrfp.replay.recorded import RecordedRun, read_run
from rrfp.schedule.admission import Admit
from rrfp.schedule.named_hints import HINTS, ORDERS
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.shape import SPLIT_BACKWARD, Shape
from rrfp.simulate.engine import StepConditions
from rrfp.trace.locate import resolve_trace
from rrfp.trace.perfetto.reader import read_trace
from rrfp.trace.records import Recording
from tests.analyze.planted import clean, planted
from tests.analyze.simulated_runs import MEGATRONS, OURS, policy_of, random_times, simulated_run
from tests.e2e.ranks import run_ranks
from tests.interchange.made_profiles import NUM_RANKS, profile_pipelining
from tests.megatron.native_runs import train
from tests.train.trained import trained_recording

pytestmark = pytest.mark.timeout(400)

RUNNABLE = Dispatch.READY, Dispatch.FIXED
BY_CHANCE = 0.03
"""Stages that are up to 2% apart in work are no suspects, and may save a little more than that."""


def all_changes(run: RecordedRun) -> Iterator[Change]:
    """Every change of one thing, but light microbatches for heavy ones, which takes work away."""
    shape, replicas = run.shape, run.steps[0].replicas
    yield from (Change(median_stage=stage) for stage in range(shape.num_stages))
    for sender in range(shape.num_ranks):
        yield from (Change(usual_link=(sender, to)) for to in shape.neighbors(sender))
    yield from (Change(usual_replica=number) for number in range(len(replicas)))
    for members in chain.from_iterable(replicas):
        yield from (Change(usual_rank=member.info.rank) for member in members)
    yield Change(even_microbatches=True)
    yield Change(admit=Admit.PYRAMID)
    yield Change(even_stages=True)
    yield Change(without_jitter=True)
    yield Change(free_links=True)
    for hint in HINTS.values():
        yield Change(hint)
        yield Change(hint, unbound=True)
    for order in ORDERS.values():
        if order.fits(shape):
            yield from (Change(order.for_shape(shape), dispatch) for dispatch in RUNNABLE)
    limit, hold = run.policy.limit, run.policy.hold
    yield Change(unbound=True)
    for times in (2, 4):
        if limit is not None:
            yield Change(limit=times * limit)
        if isinstance(hold, int):
            yield Change(hold=times * hold)


def check_first_finding(recording: Recording, steps: range | None = None) -> None:
    """It saves at least half of what the best of all changes does, where that is more than chance.
    Heavy microbatches count with what they take; evening them out gives part of it to the others.
    """
    run = read_run(recording, steps)
    measured = measure(run)
    own_ns = [replay(run, step).makespan_ns for step in measured]
    savings: dict[str, float] = {}
    for change in all_changes(run):
        try:
            change.check(run)
            policy, shape = change.policy(run) if change.has_policy else (None, None)
        except UsageError:
            continue  # This run cannot have it.
        name = f"{change.describe(run)} {change.knobs.get('dispatch', '')}"
        savings[name] = median(
            1 - replay(run, change.apply(step, run), policy, shape).makespan_ns / before_ns
            for step, before_ns in zip(measured, own_ns, strict=True)
        )
    best = max(savings, key=lambda name: savings[name])
    first = next(iter(find_bottlenecks(run, measured)), None)
    found = 0.0 if first is None else first.weight
    assert savings[best] < BY_CHANCE or found >= savings[best] / 2, (
        best,
        savings[best],
        first,
    )


@pytest.mark.parametrize("path", [OURS, MEGATRONS], ids=lambda path: path.stem)
def test_of_the_traces_beside_the_code(path: Path) -> None:
    check_first_finding(read_trace(path), range(1, 4))


@pytest.mark.parametrize(
    "number", [2, pytest.param(60, marks=pytest.mark.slow)], ids=lambda number: f"{number}"
)
def test_of_runs_with_a_planted_cause(number: int) -> None:
    for seed in range(number):
        check_first_finding(planted(seed).recording())


@pytest.mark.slow
def test_of_runs_with_nothing_wrong() -> None:
    for seed in range(50):
        check_first_finding(clean(seed))


LAYOUTS = [
    ("bf", Shape(4, 8)),
    ("1f1b", Shape(4, 8)),
    ("gpipe", Shape(3, 6)),
    ("zb-h1", Shape(4, 8, kinds=SPLIT_BACKWARD)),
    ("bf-deep", Shape(3, 6, 2)),
    ("interleaved", Shape(4, 8, 2)),
]
WITH_LINKS = [
    *((*layout, "async") for layout in LAYOUTS),
    *((*layout, "blocking") for layout in LAYOUTS if layout[0] in ORDERS),  # They bind.
]


@pytest.mark.parametrize(
    "number", [1, pytest.param(25, marks=pytest.mark.slow)], ids=lambda number: f"{number}"
)
@pytest.mark.parametrize(("hint", "whole", "links"), WITH_LINKS)
def test_of_runs_whose_links_and_tasks_differ_at_random(
    hint: str, whole: Shape, links: str, number: int
) -> None:
    """Work of any sizes over links that each take another time."""
    dispatch = Dispatch.FIXED if hint in ORDERS else Dispatch.READY
    policy, shape = policy_of(hint, whole, dispatch=dispatch)
    for seed in range(number):
        rng = random.Random(seed)
        most_ns = rng.choice([2, 50, 300])
        took_ns = {
            (sender, to): rng.randrange(1, most_ns)
            for sender in range(shape.num_ranks)
            for to in shape.neighbors(sender)
        }
        world = StepConditions(
            random_times(rng, shape),
            lambda sender, to, _, took_ns=took_ns: took_ns[sender, to],
            blocking=links == "blocking",
        )
        check_first_finding(simulated_run(policy, shape, [world], links=links))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--pp 4 --hint bf",
        "--pp 4 --hint 1f1b --dispatch fixed",
        "--pp 2 --hint bf-deep --chunks 2",
        "--pp 2 --tp 2 --hint bf",
        "--pp 2 --dp 2 --hint bfw",
    ],
)
def test_of_runs_of_our_own(flags: str, tmp_path: Path) -> None:
    check_first_finding(trained_recording(tmp_path, flags), range(1, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_chunks"),
    [
        ("ScheduleGPipe", 1),
        ("Schedule1F1B", 1),
        ("ScheduleInterleaved1F1B", 2),
        ("ScheduleInterleavedZeroBubble", 2),
        ("ScheduleZBVZeroBubble", 2),
    ],
)
def test_of_torchs_profiles(name: str, num_chunks: int, tmp_path: Path) -> None:
    ranks = run_ranks(NUM_RANKS, profile_pipelining, name, num_chunks, False, timeout_s=120)
    for number, rank in enumerate(ranks):
        (tmp_path / f"rank-{number}.json").write_text(json.dumps(rank.profile))
    check_first_finding(import_run([*tmp_path.glob("*.json")]).recording)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"pp": 4, "microbatches": 8},
        {"pp": 2, "chunks": 2, "microbatches": 4},
        {"pp": 2, "tp": 2},
    ],
)
def test_of_megatrons_own_schedule(settings: dict[str, Any], tmp_path: Path) -> None:
    num_ranks = settings["pp"] * settings.get("tp", 1)
    run_ranks(num_ranks, train, {**settings, "steps": 4}, tmp_path / "run", timeout_s=200)
    check_first_finding(read_trace(resolve_trace(tmp_path / "run")), range(1, 4))
