"""The choice of a hint by simulation: what it may choose from, that it keeps to the memory, and
that it is never much slower than an order that binds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from rrfp.errors import RrfpError, UsageError
from rrfp.inputs import resolve_hint
from rrfp.planning.candidates import (
    LEAST_GAIN,
    Candidate,
    KnownSteps,
    candidates_of,
    choose,
    fits,
    in_words,
)
from rrfp.planning.trials import Row, Setting, run_settings, with_budget, with_choice
from rrfp.replay.recorded import read_run
from rrfp.schedule.bounds import Sizes
from rrfp.schedule.knobs import Bytes, ShareOf1F1B
from rrfp.schedule.named_hints import AUTO, HINTS, AutoHint
from rrfp.schedule.policy import PAPER_LIMIT, AgreementRule, Dispatch, Policy
from rrfp.schedule.rehearsal import fitted
from rrfp.schedule.shape import Placement, Shape
from rrfp.simulate.costs.toml_files import preset
from rrfp.simulate.jitter import parse_jitter
from rrfp.simulate.recording import new_recording
from rrfp.simulate.step import simulate_step
from rrfp.simulate.world import TaskTimes, World
from rrfp.trace.run_policy import FIRST_STEP, POLICIES, POLICY, policies_by_step
from rrfp.trace.sessions import description_of_steps

V = Shape(4, 8, 2, Placement.V)
LOOP = Shape(4, 8, 2)
ONE = Shape(4, 8)


def names(asked: Policy, shape: Shape, **more: Any) -> set[str]:
    return {in_words(each.policy) for each in candidates_of(asked, shape, **more)}


def test_auto_begins_with_what_is_good_in_most_cases() -> None:
    assert [AUTO.on(shape).name for shape in (V, LOOP, ONE)] == ["zb-v", "bfw-deep", "bfw"]
    assert AutoHint(first="gpipe").on(V).name == "gpipe"
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
    # On rank 0 a binding 1F1B keeps four microbatches.
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
    """What steps take, by candidate; 1000 ns under others."""
    return lambda candidate, step: times.get(in_words(candidate.policy), [1000] * 8)[step]


def test_the_best_one_on_all_steps_is_chosen() -> None:
    candidates = candidates_of(Policy(AUTO), V)
    lucky = [850] + [1200] * 7
    choice = choose(candidates, playing({"bf ready": lucky, "v-half ready": [900] * 8}), 8)
    assert choice is not None
    assert in_words(choice.chosen.candidate.policy) == "v-half ready"
    assert choice.chosen.mean_ns == 900
    assert choice.num_candidates > len(candidates)
    assert choice.num_simulations < 8 * choice.num_candidates


def test_it_changes_only_for_a_gain_above_the_noise() -> None:
    candidates = candidates_of(Policy(AUTO), V)
    current = candidates[0]

    def chosen(times: Sequence[int | None]) -> str:
        choice = choose(candidates, playing({"bf ready": times}), 8, current)
        assert choice is not None
        assert choice.kept is not None
        return in_words(choice.chosen.candidate.policy)

    assert chosen([990] * 8) == "bf ready"
    assert chosen([round(1000 * (1 - LEAST_GAIN)) + 1] * 8) == "zb-v ready"
    noisy = [900, 1080, 900, 1080, 900, 1080, 900, 1080]
    assert chosen(noisy) == "zb-v ready"


def test_what_does_not_fit_is_never_chosen() -> None:
    candidates = candidates_of(Policy(AUTO), V)
    fails = {"bf ready": [500, 500, 500, None, None, None, None, None]}
    choice = choose(
        candidates,
        playing(fails),
        8,
        next(each for each in candidates if in_words(each.policy) == "bf ready"),
    )
    assert choice is not None
    assert choice.kept is None
    assert in_words(choice.chosen.candidate.policy) != "bf ready"
    assert choose(candidates, lambda *_: None, 8) is None


def test_an_order_that_keeps_too_much_in_bytes_is_left_out() -> None:
    policy, shape = fitted(Policy(HINTS["zb-v"], None, Dispatch.FIXED), V)
    sizes = Sizes([[10] * 8] * 8)
    (row,) = run_settings([Setting(shape=shape, policy=policy, costs=preset("uniform"))], [1])
    slots = max(row.trials[0].peak_held)
    assert fits(policy, shape, sizes, [10 * slots] * 4)
    assert not fits(policy, shape, sizes, [10 * slots - 1] * 4)
    assert fits(replace(policy, dispatch=Dispatch.READY), shape, sizes, [1] * 4)
    ones = TaskTimes(*([[[1] * 8] * 8] * 3))
    known = KnownSteps([[lambda _: World(ones, sizes=sizes)]], [10 * slots - 1] * 4)
    assert known.play(Candidate(policy, shape), 0) is None
    ready = replace(policy, dispatch=Dispatch.READY, hold=Bytes(10 * slots - 1))
    assert known.play(Candidate(ready, shape), 0)


def peer(hint: str, shape: Shape, costs: str, jitter: str, seeds: range) -> Row:
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
def test_it_is_never_slower_than_what_binds_at_the_same_bytes(costs: str, jitter: str) -> None:
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
        if max((each := peer(hint, shape, costs, jitter, seeds)).peak_held_bytes or [0]) <= budget
    ]
    assert peers
    assert row.mean_s <= 1.01 * min(each.mean_s for each in peers)


def test_a_choice_does_not_look_at_the_steps_that_are_played() -> None:
    setting = Setting(shape=V, policy=Policy(AUTO), costs=preset("multimodal"))
    chosen = with_choice(setting, range(10, 14))
    assert chosen == with_choice(setting, [13])
    assert with_choice(chosen, [13]) is chosen
    assert chosen.policy.hint.name != "auto"


def test_steps_are_described_by_what_steered_them() -> None:
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


def test_a_replay_takes_the_steps_of_the_last_choice() -> None:
    policies = []
    for name in ("bf", "bf-deep", "bf-deep"):
        policy, shape = fitted(Policy(HINTS[name]), V)
        policies.append(policy)
    described = {"settings": {"pp": 4}, POLICY: {"hint": "auto"}}
    described |= policies_by_step([each.described() for each in policies])
    recording = new_recording(shape, 1, 1, described)
    times = TaskTimes(*([[[1000] * 8] * 8] * 3))
    for step, policy in enumerate(policies):
        simulate_step(shape, policy, [World(times)], recording=recording, step=step)
    run = read_run(recording)
    assert (run.hint_name, [each.step for each in run.steps]) == ("bf-deep", [1, 2])
    first = read_run(recording, range(1))
    assert (first.hint_name, [each.step for each in first.steps]) == ("bf", [0])
    with pytest.raises(RrfpError, match="another one was chosen in step 1"):
        read_run(recording, range(2))
