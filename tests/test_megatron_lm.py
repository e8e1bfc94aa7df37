"""Megatron-LM's own `pretrain_gpt.py` comes to the same under `rrfp run` as under Megatron's own
schedule, bit for bit, and each run leaves a trace that can be checked and explained."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.megatron_lm.cases import CASES, HINTS, RECORDED, Case
from tests.megatron_lm.harness import Ranks, Records, compare, differences
from tests.megatron_own.harness import check_checkout

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
