"""Tests of the choice of a hint by simulation: its candidates, its memory bound, and that it is
never much slower than a binding order."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from rrfp.errors import RrfpError, UsageError
from rrfp.inputs import resolve_hint
from rrfp.megatron.job.description import describe_dispatch
from rrfp.megatron.settings import DispatchSettings
from rrfp.planning.candidates import (
    LEAST_GAIN,
    Candidate,
    MeasuredSteps,
    candidates_of,
    choose,
    describe_choice,
    fits,
)
from rrfp.planning.trials import Row, Setting, run_settings, with_budget, with_choice
from rrfp.replay.recorded import read_run
from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.hints import format_order, kinds_of
from rrfp.schedule.named_hints import AUTO, HINTS, AutoHint, hint_named
from rrfp.schedule.policy import PAPER_LIMIT, AgreementRule, Bytes, Dispatch, Policy, ShareOf1F1B
from rrfp.schedule.rehearsal import fitted, order_of
from rrfp.schedule.shape import Placement, Shape
from rrfp.simulate.costs.model import Links
from rrfp.simulate.costs.toml_files import preset
from rrfp.simulate.engine import StepConditions, TaskTimes
from rrfp.simulate.jitter import parse_jitter
from rrfp.simulate.memory_budgets import BoundWarning, unfilled
from rrfp.simulate.step import new_recording, play, simulate_step
from rrfp.trace.run_json import (
    FIRST_STEP,
    POLICIES,
    POLICY,
    description_of_steps,
    policies_by_step,
    stated_policy,
)
from rrfp.train.settings import TrainSettings
from tests.train.trained import Run, run

V = Shape(4, 8, 2, Placement.V)
LOOP = Shape(4, 8, 2)
ONE = Shape(4, 8)


def names(asked: Policy, shape: Shape, **more: Any) -> set[str]:
    return {describe_choice(each.policy) for each in candidates_of(asked, shape, **more)}


def test_auto_starts_with_a_hint_for_the_shape() -> None:
    assert [AUTO.for_shape(shape).name for shape in (V, LOOP, ONE)] == ["zb-v", "bfw-deep", "bfw"]
    assert AutoHint(first="gpipe").for_shape(V).name == "gpipe"
    assert not AutoHint(first="gpipe").splits_backward
    assert resolve_hint("auto", auto=True) is AUTO
    with pytest.raises(UsageError, match="set it to 2 or more"):
        AutoHint(every=1)
    with pytest.raises(UsageError, match="is neither a hint"):
        AutoHint(first="zb")
    with pytest.raises(UsageError, match="chosen while a run goes on"):
        resolve_hint("auto")


def test_candidates_fit_the_shape_and_the_bounds() -> None:
    assert {"zb-v fixed", "zb-v ready ranked", "v-half ready", "bf ready"} <= names(Policy(AUTO), V)
    assert "interleaved fixed" in names(Policy(AUTO), LOOP)
    assert not any(name.startswith("interleaved") for name in names(Policy(AUTO), V))
    assert {"1f1b fixed", "zb-h1 fixed"} <= names(Policy(AUTO), ONE)
    assert not any("-deep" in name for name in names(Policy(AUTO), ONE))
    # On rank 0 a binding 1F1B holds four microbatches.
    assert "1f1b fixed" not in names(Policy(AUTO, hold=3), ONE)
    assert "1f1b fixed" in names(Policy(AUTO, hold=4), ONE)
    assert "1f1b fixed" in names(Policy(AUTO, limit=PAPER_LIMIT), ONE)
    assert not any("fixed" in name for name in names(Policy(AUTO), ONE, may_bind=False))
    assert not any(
        "fixed" in name for name in names(Policy(AUTO, agreement=AgreementRule.UNANIMOUS), ONE)
    )
    whole = candidates_of(Policy(HINTS["bf"]), V, splits=False)
    assert whole
    assert not any(each.policy.hint.splits_backward for each in whole)
    for each in candidates_of(Policy(AUTO, hold=5), V):
        assert each.shape == replace(V, kinds=each.shape.kinds)
        if each.policy.dispatch is Dispatch.READY:
            assert each.policy.hold == 5


def playing(times: Mapping[str, Sequence[int | None]]) -> Callable[[Candidate, int], int | None]:
    """Return a player whose steps take these ns under named candidates, and 1000 ns otherwise."""
    return lambda candidate, step: times.get(describe_choice(candidate.policy), [1000] * 8)[step]


def test_the_candidate_that_is_best_over_all_steps_is_chosen() -> None:
    candidates = candidates_of(Policy(AUTO), V)
    lucky = [850] + [1200] * 7
    choice = choose(candidates, playing({"bf ready": lucky, "v-half ready": [900] * 8}), 8)
    assert choice is not None
    assert describe_choice(choice.chosen.candidate.policy) == "v-half ready"
    assert choice.chosen.mean_ns == 900
    assert choice.num_candidates > len(candidates)
    assert choice.num_simulations < 8 * choice.num_candidates


def test_the_policy_changes_only_for_a_gain_above_the_noise() -> None:
    candidates = candidates_of(Policy(AUTO), V)
    current = candidates[0]

    def chosen(times: Sequence[int | None]) -> str:
        choice = choose(candidates, playing({"bf ready": times}), 8, current)
        assert choice is not None
        assert choice.kept is not None
        return describe_choice(choice.chosen.candidate.policy)

    assert chosen([990] * 8) == "bf ready"
    assert chosen([round(1000 * (1 - LEAST_GAIN)) + 1] * 8) == "zb-v ready"
    noisy = [900, 1080, 900, 1080, 900, 1080, 900, 1080]
    assert chosen(noisy) == "zb-v ready"


def test_a_candidate_that_does_not_fit_is_never_chosen() -> None:
    candidates = candidates_of(Policy(AUTO), V)
    fails = {"bf ready": [500, 500, 500, None, None, None, None, None]}
    choice = choose(
        candidates,
        playing(fails),
        8,
        next(each for each in candidates if describe_choice(each.policy) == "bf ready"),
    )
    assert choice is not None
    assert choice.kept is None
    assert describe_choice(choice.chosen.candidate.policy) != "bf ready"
    assert choose(candidates, lambda *_: None, 8) is None


def test_each_candidate_counts_once_whether_or_not_it_fits() -> None:
    candidates = candidates_of(Policy(AUTO), V)
    counts = []
    for times in ({}, {"bf ready": [None] * 8}):
        choice = choose(candidates, playing(times), 1)
        assert choice is not None
        counts.append(choice.num_candidates)
    assert counts == [len(candidates)] * 2


def test_an_order_above_the_memory_budget_is_left_out() -> None:
    policy, shape = fitted(Policy(HINTS["zb-v"], None, Dispatch.FIXED), V)
    sizes = ActivationSizes([[10] * 8] * 8)
    (row,) = run_settings([Setting(shape=shape, policy=policy, costs=preset("uniform"))], [1])
    slots = max(row.trials[0].peak_held)
    assert fits(policy, shape, sizes, [10 * slots] * 4)
    assert not fits(policy, shape, sizes, [10 * slots - 1] * 4)
    assert fits(replace(policy, dispatch=Dispatch.READY), shape, sizes, [1] * 4)
    ones = TaskTimes(*([[[1] * 8] * 8] * 3))
    measured = MeasuredSteps([[lambda _: StepConditions(ones, sizes=sizes)]], [10 * slots - 1] * 4)
    assert measured.play(Candidate(policy, shape), 0) is None
    ready = replace(policy, dispatch=Dispatch.READY, hold=Bytes(10 * slots - 1))
    assert measured.play(Candidate(ready, shape), 0)


def simulate_binding(hint: str, shape: Shape, costs: str, jitter: str, seeds: range) -> Row:
    policy, shape = fitted(Policy(HINTS[hint], None, Dispatch.FIXED), shape)
    setting = Setting(shape=shape, policy=policy, costs=preset(costs), jitter=parse_jitter(jitter))
    return run_settings([setting], seeds)[0]


@pytest.mark.parametrize(
    ("costs", "jitter"),
    [
        ("uniform", "none"),
        ("language", "lognormal:0.1"),
        ("multimodal", "none"),
        ("uniform", "slow-stage:1:1.3+lognormal:0.5"),
    ],
)
def test_auto_is_never_slower_than_a_binding_order_with_the_same_bytes(
    costs: str, jitter: str
) -> None:
    seeds = range(1234, 1240)
    asked = Setting(
        shape=V,
        policy=Policy(AUTO, hold=ShareOf1F1B(Fraction(3, 2))),
        costs=preset(costs),
        jitter=parse_jitter(jitter),
    )
    budget = with_budget(asked, seeds).policy.hold_bytes
    assert budget is not None
    (row,) = run_settings([asked], seeds)
    assert row.peak_held_bytes is not None
    assert max(row.peak_held_bytes) <= budget
    peers = [
        each
        for hint, shape in (("1f1b", ONE), ("interleaved", LOOP), ("zb-v", V))
        if max((each := simulate_binding(hint, shape, costs, jitter, seeds)).peak_held_bytes or [0])
        <= budget
    ]
    assert peers
    assert row.mean_s <= 1.01 * min(each.mean_s for each in peers)


def test_a_choice_does_not_depend_on_the_simulated_steps() -> None:
    setting = Setting(shape=V, policy=Policy(AUTO), costs=preset("multimodal"))
    chosen = with_choice(setting, range(10, 14))
    assert chosen == with_choice(setting, [13])
    assert with_choice(chosen, [13]) is chosen
    assert chosen.policy.hint.name != "auto"


def test_steps_are_described_by_their_policies() -> None:
    one, two = {"hint": "bf"}, {"hint": "zb-v"}
    assert policies_by_step([one, one]) == {}
    assert policies_by_step([one, two, two, one]) == {
        POLICIES: [
            {FIRST_STEP: 0, POLICY: one},
            {FIRST_STEP: 1, POLICY: two},
            {FIRST_STEP: 3, POLICY: one},
        ]
    }
    described = {POLICY: {"hint": "auto"}, **policies_by_step([one, two, two, one])}
    assert description_of_steps(described, [1, 2])[POLICY] == two
    assert description_of_steps(described, [3])[POLICY] == one
    with pytest.raises(RrfpError, match="another one was chosen in step 3; choose"):
        description_of_steps(described, [2, 3])


def test_a_replay_uses_the_steps_of_the_last_choice() -> None:
    policies = []
    for name in ("bf", "bf-deep", "bf-deep"):
        policy, shape = fitted(Policy(HINTS[name]), V)
        policies.append(policy)
    described = {"settings": {"pp": 4}, POLICY: {"hint": "auto"}}
    described |= policies_by_step([each.described() for each in policies])
    recording = new_recording(shape, 1, 1, described)
    times = TaskTimes(*([[[1000] * 8] * 8] * 3))
    for step, policy in enumerate(policies):
        simulate_step(shape, policy, [StepConditions(times)], recording=recording, step=step)
    run = read_run(recording)
    assert (run.hint_name, [each.step for each in run.steps]) == ("bf-deep", [1, 2])
    first = read_run(recording, range(1))
    assert (first.hint_name, [each.step for each in first.steps]) == ("bf", [0])
    with pytest.raises(RrfpError, match="another one was chosen in step 1"):
        read_run(recording, range(2))


# The usual limit compared with 1F1B at constant times, and the cost of a limit that is too low.


__all__ = ["run"]

TASK_NS = 20_000
LATENCIES_NS = (0, TASK_NS // 20)


def time_ns(policy: Policy, shape: Shape, latency_ns: int) -> int:
    """Return the time in ns of a step whose tasks all take equally long."""
    rows = [[TASK_NS] * shape.num_microbatches] * shape.num_stages
    links = Links(latency_ns) if latency_ns else None
    return play(
        shape, policy, StepConditions(TaskTimes(rows, rows, rows), transfer=links)
    ).makespan_ns


def usual_ns(name: str, shape: Shape, latency_ns: int) -> int:
    policy = Policy(resolve_hint(name, auto=True)).with_usual_limit()
    return time_ns(*fitted(policy, shape, counts_places=False), latency_ns)


def megatrons_ns(shape: Shape, latency_ns: int) -> int:
    """Return the time in ns of a step under Megatron's binding order with asynchronous messages."""
    order = HINTS["1f1b" if shape.num_chunks == 1 else "interleaved"].for_shape(shape)
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
def test_auto_uses_only_policies_that_do_not_lose_to_1f1b(shape: Shape) -> None:
    asked = Policy(hint_named("bf")).with_usual_limit().of_shape(shape)
    reference = Shape(shape.num_ranks, shape.num_microbatches, shape.num_chunks)
    candidates = [each for each in candidates_of(asked, shape) if each.policy.hint.name == "bfw"]
    assert candidates
    for latency_ns in LATENCIES_NS:
        limit_ns = 1.005 * megatrons_ns(reference, latency_ns)
        assert usual_ns("auto", shape, latency_ns) <= limit_ns
        for each in candidates:
            assert time_ns(each.policy, each.shape, latency_ns) <= limit_ns


@pytest.mark.parametrize(
    ("given", "warning"),
    [
        ("--pp 48 --limit 32", "limit 32 cannot fill a pipeline of 48 stages"),
        ("--pp 48 --hold 20 --hint bfw", "use 96 or more, or leave --hold out"),
        ("--pp 8 --chunks 2 --limit 32", "choose a hint that needs less, such as bfw-deep"),
        ("--pp 8 --chunks 2 --limit 20 --hint interleaved", "use 46 or more"),
    ],
)
def test_a_bound_that_cannot_fill_the_pipeline_warns_of_the_cost(
    run: Run, given: str, warning: str
) -> None:
    code, _, err = run("simulate", "--microbatches", "192", *given.split())
    assert code == 0
    assert err.count("Warning: ") == 1
    assert warning in " ".join(err.split())


def test_the_reported_cost_of_a_low_bound_is_the_simulated_one(run: Run) -> None:
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


def test_an_order_file_is_priced_in_its_own_shape(tmp_path: Path) -> None:
    shape = Shape(2, 32)
    order = order_of(HINTS["bf"], shape)
    path = tmp_path / "order.csv"
    path.write_text(format_order(order))
    settings = DispatchSettings(hint=str(path), limit=1)
    found = unfilled(settings.policy, shape)
    assert found == unfilled(replace(settings.policy, hint=order), shape)
    assert found is not None
    assert found.price > 1.9


def test_a_job_is_warned_once(caplog: pytest.LogCaptureFixture) -> None:
    policies = BoundWarning(DispatchSettings(limit=4).policy)
    for _ in range(2):
        policies.warn_once(Shape(8, 32))
    BoundWarning(DispatchSettings().policy).warn_once(Shape(64, 512))
    (warning,) = caplog.messages
    assert "limit 4 cannot fill a pipeline of 8 stages" in warning
    assert "use 16 or more, or leave --limit out" in warning


def test_a_job_is_warned_once_that_it_may_hold_nearly_all_microbatches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policies = BoundWarning(DispatchSettings().policy)
    for _ in range(2):
        policies.warn_once(Shape(8, 64, 2))
    for without_warning, shape in [
        (DispatchSettings(), Shape(8, 24, 2)),
        (DispatchSettings(), Shape(8, 64)),
        (DispatchSettings(hint="interleaved"), Shape(8, 64, 2)),
        (DispatchSettings(hint="bfw-deep"), Shape(8, 64, 2)),
        (DispatchSettings(hint="auto"), Shape(8, 64, 2)),
        (DispatchSettings(hold=64), Shape(8, 64, 2)),
    ]:
        BoundWarning(without_warning.policy).warn_once(shape)
    (warning,) = caplog.messages
    assert "bf over 2 chunks fills the pipeline only without a limit" in warning
    assert "nearly all 64 microbatches, where interleaved 1F1B keeps those of about 12" in warning


def test_runs_record_their_limit() -> None:
    asked: dict[str, object] = {"pp": 40, "microbatches": 8, "chunks": 1}
    assert describe_dispatch(DispatchSettings()).policy(asked)["limit"] == 80
    assert TrainSettings(pp=40, layers=40).effective_policy.limit == 80
    assert TrainSettings(pp=16, layers=16).effective_policy.limit == 32
    # Earlier versions did not record it.
    assert stated_policy({"settings": {"dispatch": "ready", "pp": 40}})["limit"] == 32
