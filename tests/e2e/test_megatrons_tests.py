"""Megatron-Core's own tests and Megatron-LM's own script pass under rrfp's schedule."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.megatron_lm.cases import CASES, HINTS, RECORDED, Case
from tests.megatron_lm.harness import Ranks, Records, compare, differences
from tests.megatron_own.harness import check_checkout, run, version_of

# Megatron-LM's own `pretrain_gpt.py` comes to the same under `rrfp run` as under Megatron's own
# schedule, bit for bit, and each run leaves a trace that can be checked and explained.


VARIABLE = "RRFP_MEGATRON_LM"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    path = os.environ.get(VARIABLE)
    if not path:
        pytest.skip(f"{VARIABLE} names no checkout of Megatron-LM")
    reason = check_checkout(Path(path))
    assert reason is None, reason
    with Ranks(Path(path), tmp_path_factory.mktemp("bytecode")) as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_script_comes_to_the_same(ranks: Ranks, case: Case, tmp_path: Path) -> None:
    if not (ranks.checkout / case.script).is_file():
        pytest.skip(f"{ranks.checkout} has no {case.script}")
    outcomes = compare(ranks, case, tmp_path)
    assert {one.schedules: one.failures for one in outcomes} == {
        schedules: [] for schedules in case.schedules
    }


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_torchrun_starts_it_as_well(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = compare(ranks, CASES[0], tmp_path, only=[*HINTS, RECORDED], torchrun=True)
    assert [one.failures for one in outcomes] == [[], [], []]


def test_one_bit_is_seen() -> None:
    def records(gradient: str, *more: str) -> Records:
        steps = [{"step": [{"lm loss": ["0x1.8p+2"]}], "gradients": [one]} for one in ("a", *more)]
        return [steps, [{"step": [{}], "gradients": [gradient]}]]

    assert differences(records("b"), records("b")) == []
    assert differences(records("b"), records("c")) == [
        "rank 1, line 0: gradients: ['c'] and not ['b']"
    ]
    assert differences(records("b", "b"), records("b")) == ["rank 0 wrote 1 lines instead of 2"]


NUM_TESTS = {
    "0.16": {"install": 18, "names": 10},
    "0.19": {"install": 28, "names": 20},
}
"""The numbers of tests that a run of Megatron's distinguishes."""

OURS = "assert <rrfp.megatron.dropin.ForwardBackward object> == "


def identity(function: str) -> str:
    """Why a test fails that asserts that it was given this function of Megatron's and no other."""
    return f"{OURS}<function {function}>"


PLAIN = "forward_backward_no_pipelining"
PIPELINED = "forward_backward_pipelining_without_interleaving"
INTERLEAVED = "forward_backward_pipelining_with_interleaving"

# The assertion comes before what the test is about, which `names` shows.
ASSERT_WHICH = {
    "test_get_forward_backward_func": identity(PLAIN),
    "test_forward_backward_func_without_pipeline_parallel": identity(PLAIN),
    "test_forward_backward_func_with_pipeline_parallel": identity(PIPELINED),
    "test_forward_backward_func_with_interleaving": identity(INTERLEAVED),
    "test_forward_backward_func_with_uneven_interleaving": identity(INTERLEAVED),
    f"test_{INTERLEAVED}_with_custom_pgs": identity(INTERLEAVED),
    f"test_{PLAIN}_with_custom_pgs": identity(PLAIN),
}

# Megatron's interleaving asks for a multiple of the pipeline's size; ours runs 7 microbatches.
RUNS_MORE = {"test_forward_backward_func_with_interleaving": "Failed: DID NOT RAISE RuntimeError"}

# Multi-module pipelines, whose stages exchange dicts of tensors.
REFUSED = {
    f"test_{encoders}_{num_ranks}gpu": "rrfp.errors.UsageError: a multi-module pipeline"
    for encoders in ("single_encoder", "dual_encoder")
    for num_ranks in (2, 8)
}

FAILURES = {
    "0.16": {"install": ASSERT_WHICH, "names": RUNS_MORE},
    "0.19": {"install": ASSERT_WHICH | REFUSED, "names": RUNS_MORE | REFUSED},
}
"""By release and schedule, how the reason of each test that fails begins."""


@pytest.fixture
def checkout() -> Path:
    path = os.environ.get(VARIABLE)
    if not path:
        pytest.skip(f"{VARIABLE} names no checkout of Megatron-LM")
    reason = check_checkout(Path(path))
    assert reason is None, reason
    return Path(path)


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("schedule", ["install", "names"])
def test_what_fails_asserts_which_function_it_was_given(
    checkout: Path, schedule: str, tmp_path: Path
) -> None:
    release = (version_of(checkout) or "").rpartition(".")[0]
    outcomes = run(checkout, schedule, tmp_path)
    failures = FAILURES[release][schedule]
    told = {
        name: (one.outcome, one.reason[: len(failures.get(name, one.reason))])
        for name, one in outcomes.items()
    }
    expected = {name: ("failed", reason) for name, reason in failures.items()}
    assert told == {name: expected.get(name, ("passed", "")) for name in outcomes}
    assert len(outcomes) == NUM_TESTS[release][schedule]
    assert failures.keys() <= outcomes.keys()
