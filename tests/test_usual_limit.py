"""The usual limit against 1F1B where nothing varies, and the price of one that is too low."""

import json
from dataclasses import replace

import pytest

from rrfp.inputs import resolve_hint
from rrfp.megatron.job.description import dispatched
from rrfp.megatron.settings import DispatchSettings
from rrfp.megatron.step_policy import StepPolicies
from rrfp.planning.candidates import candidates_of
from rrfp.schedule.hints import kinds_of
from rrfp.schedule.named_hints import HINTS, hint_named
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.rehearsal import fitted
from rrfp.schedule.shape import Placement, Shape
from rrfp.simulate.costs.model import Links
from rrfp.simulate.step import play
from rrfp.simulate.world import TaskTimes, World
from rrfp.trace.run_policy import stated_policy
from rrfp.train.settings import TrainSettings
from tests.called import Run, run

__all__ = ["run"]

TASK_NS = 20_000
LATENCIES_NS = (0, TASK_NS // 20)


def time_ns(policy: Policy, shape: Shape, latency_ns: int) -> int:
    """The time of a step of tasks that are all equally long."""
    rows = [[TASK_NS] * shape.num_microbatches] * shape.num_stages
    links = Links(latency_ns) if latency_ns else None
    return play(shape, policy, World(TaskTimes(rows, rows, rows), transfer=links)).makespan_ns


def usual_ns(name: str, shape: Shape, latency_ns: int) -> int:
    policy = Policy.with_usual_limit(resolve_hint(name, auto=True))
    return time_ns(*fitted(policy, shape, counts_places=False), latency_ns)


def megatrons_ns(shape: Shape, latency_ns: int) -> int:
    """Its order binds, and messages travel beside the work."""
    order = HINTS["1f1b" if shape.num_chunks == 1 else "interleaved"].on(shape)
    policy = Policy(order, dispatch=Dispatch.FIXED)
    return time_ns(policy, replace(shape, kinds=kinds_of(order)), latency_ns)


def check_never_loses(shape: Shape, *names: str) -> None:
    for latency_ns in LATENCIES_NS:
        native_ns = megatrons_ns(shape, latency_ns)
        for name in names:
            assert usual_ns(name, shape, latency_ns) <= 1.005 * native_ns, (name, latency_ns)


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 16, 24, 33, 48])
def test_the_default_never_loses_to_1f1b(num_ranks: int) -> None:
    for num_microbatches in {1, num_ranks - 1, num_ranks, num_ranks + 1, 2 * num_ranks + 3}:
        check_never_loses(Shape(num_ranks, num_microbatches), "bf", "bfw")
    check_never_loses(Shape(num_ranks, 5 * num_ranks), "bf", "bfw")


@pytest.mark.parametrize("num_ranks", [64, 128])
def test_the_default_never_loses_on_many_ranks(num_ranks: int) -> None:
    check_never_loses(Shape(num_ranks, 2 * num_ranks), "bf")


@pytest.mark.parametrize("num_chunks", [2, 4])
@pytest.mark.parametrize("num_ranks", [2, 4, 8, 12])
def test_the_default_never_loses_to_interleaving(num_ranks: int, num_chunks: int) -> None:
    for rounds in (1, 2, 3, 8):
        shape = Shape(num_ranks, rounds * num_ranks, num_chunks)
        check_never_loses(shape, "bf", "bfw", "bfw-deep", "interleaved")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "num_chunks"),
    [
        (64, 32, 1),
        (64, 512, 1),
        (256, 256, 1),
        (256, 1024, 1),
        (1024, 512, 1),
        (1024, 1024, 1),
        (1024, 1536, 1),
        (32, 256, 2),
        (64, 128, 2),
        (64, 64, 4),
        (128, 256, 2),
        (1024, 1024, 2),
    ],
)
def test_the_default_never_loses_on_very_many_ranks(
    num_ranks: int, num_microbatches: int, num_chunks: int
) -> None:
    check_never_loses(Shape(num_ranks, num_microbatches, num_chunks), "bf", "bfw")


@pytest.mark.parametrize("shape", [Shape(40, 80), Shape(8, 32, 2), Shape(8, 32, 2, Placement.V)])
def test_auto_begins_and_chooses_among_policies_that_do_not_lose(shape: Shape) -> None:
    asked = Policy.with_usual_limit(hint_named("bf")).of_shape(shape)
    reference = Shape(shape.num_ranks, shape.num_microbatches, shape.num_chunks)
    candidates = [each for each in candidates_of(asked, shape) if each.policy.hint.name == "bfw"]
    assert candidates
    for latency_ns in LATENCIES_NS:
        limit_ns = 1.005 * megatrons_ns(reference, latency_ns)
        assert usual_ns("auto", shape, latency_ns) <= limit_ns
        for each in candidates:
            assert time_ns(each.policy, each.shape, latency_ns) <= limit_ns


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--pp 48 --limit 32", "limit 32 cannot fill a pipeline of 48 stages"),
        ("--pp 48 --hold 20 --hint bfw", "use 96 or more, or leave --hold out"),
        ("--pp 8 --chunks 2 --limit 32", "choose a hint that needs less, such as bfw-deep"),
        ("--pp 8 --chunks 2 --limit 20 --hint interleaved", "use 46 or more"),
    ],
)
def test_a_bound_that_cannot_fill_the_pipeline_tells_its_price(
    run: Run, given: str, told: str
) -> None:
    code, _, err = run("simulate", "--microbatches", "192", *given.split())
    assert code == 0
    assert err.count("Warning: ") == 1
    assert told in " ".join(err.split())


def test_the_price_is_what_a_step_takes(run: Run) -> None:
    arguments = ("simulate", "--pp", "48", "--microbatches", "192")
    _, out, err = run(*arguments, "--row", "limit=32", "--row", "limit=none", "--format", "json")
    slow, fast = (each["makespan_s"]["mean"] for each in json.loads(out)["rows"])
    assert f"takes about {slow / fast:.3g} times as long" in " ".join(err.split())


@pytest.mark.parametrize(
    "given",
    [
        "--pp 48",
        "--pp 48 --limit 96",
        "--pp 48 --limit none",
        "--pp 8 --hold 8 --hint bfw",
        "--pp 8 --chunks 2",
        "--pp 48 --hint 1f1b --dispatch fixed --limit 48",
        "--pp 8 --chunks 2 --placement v --hint zb-v --hold 8",
    ],
)
def test_a_bound_that_fills_the_pipeline_needs_no_warning(run: Run, given: str) -> None:
    code, _, err = run("simulate", "--microbatches", "96", *given.split())
    assert (code, err) == (0, "")


def test_a_job_is_warned_once(caplog: pytest.LogCaptureFixture) -> None:
    policies = StepPolicies(DispatchSettings(limit=4).policy)
    for _ in range(2):
        policies.warn_once(Shape(8, 32))
    StepPolicies(DispatchSettings().policy).warn_once(Shape(64, 512))
    (told,) = caplog.messages
    assert "limit 4 cannot fill a pipeline of 8 stages" in told
    assert "use 16 or more, or leave --limit out" in told


def test_a_job_is_told_once_that_it_may_keep_nearly_all_microbatches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policies = StepPolicies(DispatchSettings().policy)
    for _ in range(2):
        policies.warn_once(Shape(8, 64, 2))
    for quiet, shape in [
        (DispatchSettings(), Shape(8, 24, 2)),
        (DispatchSettings(), Shape(8, 64)),
        (DispatchSettings(hint="interleaved"), Shape(8, 64, 2)),
        (DispatchSettings(hint="bfw-deep"), Shape(8, 64, 2)),
        (DispatchSettings(hint="auto"), Shape(8, 64, 2)),
        (DispatchSettings(hold=64), Shape(8, 64, 2)),
    ]:
        StepPolicies(quiet.policy).warn_once(shape)
    (told,) = caplog.messages
    assert "bf over 2 chunks fills the pipeline only without a limit" in told
    assert "nearly all 64 microbatches, where interleaved 1F1B keeps those of about 12" in told


def test_runs_state_the_limit_that_they_had() -> None:
    asked: dict[str, object] = {"pp": 40, "microbatches": 8, "chunks": 1}
    assert dispatched(DispatchSettings()).policy(asked)["limit"] == 80
    assert TrainSettings(pp=40, layers=40).effective_policy.limit == 80
    assert TrainSettings(pp=16, layers=16).effective_policy.limit == 32
    # Earlier versions did not state it.
    assert stated_policy({"settings": {"dispatch": "ready", "pp": 40}})["limit"] == 32
