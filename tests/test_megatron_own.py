"""Megatron-Core's own tests of its pipelines pass with ours in place, but for those that assert
which function they were given."""

import os
from pathlib import Path

import pytest

from tests.megatron_own.harness import check_checkout, run

VARIABLE = "RRFP_MEGATRON_LM"

NUM_TESTS = {"install": 18, "names": 10}
"""As many as a run of theirs tells apart."""

OURS = "assert <rrfp.megatron.dropin.ForwardBackward object> == "


def identity(function: str, line: int) -> str:
    """Why a test fails that asserts, on this line, that it was given this function of Megatron's
    and no other."""
    return f"{OURS}<function {function}> (test_schedules.py:{line})"


PLAIN = "forward_backward_no_pipelining"
PIPELINED = "forward_backward_pipelining_without_interleaving"
INTERLEAVED = "forward_backward_pipelining_with_interleaving"

# The assertion comes before what the test is about, which `names` shows.
FAILURES = {
    "install": {
        "test_get_forward_backward_func": identity(PLAIN, 45),
        "test_forward_backward_func_without_pipeline_parallel": identity(PLAIN, 210),
        "test_forward_backward_func_with_pipeline_parallel": identity(PIPELINED, 262),
        "test_forward_backward_func_with_interleaving": identity(INTERLEAVED, 328),
        "test_forward_backward_func_with_uneven_interleaving": identity(INTERLEAVED, 436),
        f"test_{INTERLEAVED}_with_custom_pgs": identity(INTERLEAVED, 644),
        f"test_{PLAIN}_with_custom_pgs": identity(PLAIN, 751),
    },
    # Megatron's interleaving asks for a multiple of the pipeline's size; ours runs 7 microbatches.
    "names": {
        "test_forward_backward_func_with_interleaving": (
            "Failed: DID NOT RAISE RuntimeError (test_schedules.py:371)"
        ),
    },
}


@pytest.fixture
def checkout() -> Path:
    path = os.environ.get(VARIABLE)
    if not path:
        pytest.skip(f"{VARIABLE} names no checkout of Megatron-LM at core_v0.16.1")
    reason = check_checkout(Path(path))
    assert reason is None, reason
    return Path(path)


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("schedule", FAILURES)
def test_what_fails_asserts_which_function_it_was_given(
    checkout: Path, schedule: str, tmp_path: Path
) -> None:
    outcomes = run(checkout, schedule, tmp_path)
    told = {name: (one.outcome, one.reason) for name, one in outcomes.items()}
    expected = {name: ("failed", reason) for name, reason in FAILURES[schedule].items()}
    assert told == {name: expected.get(name, ("passed", "")) for name in outcomes}
    assert len(outcomes) == NUM_TESTS[schedule]
    assert FAILURES[schedule].keys() <= outcomes.keys()
