"""Ranks that share a collective inside a task: tensor parallel under sequence parallelism, whose W
gathers its input again, and experts that are spread over replicas."""

from typing import Any

import pytest

from rrfp.schedule.dispatcher import AgreementRule, Dispatch
from tests.ranks import run_ranks
from tests.rigs import TIMEOUT_S, Outcome, Rig, native, on_rigs, ours
from tests.training import SMALL

pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)

SCHEDULES: list[dict[str, Any]] = [
    {},
    {"hint": "bfw"},
    {"hint": "bfw", "agreement": AgreementRule.UNANIMOUS},
    {"hint": "f-first", "limit": 1},
    {"hint": "zb-h1", "dispatch": Dispatch.FIXED},
]


@pytest.mark.slow
def test_sequence_parallel_weight_gradients_are_agreed_on() -> None:
    settings = {**SMALL, "pp": 2, "tp": 2, "sequence_parallel": True}
    for expected, *found in run_ranks(
        4, on_rigs, compare_with_native, settings, timeout_s=TIMEOUT_S
    ):
        for schedule, outcome in zip(SCHEDULES, found, strict=True):
            assert outcome == expected, schedule


@pytest.mark.slow
def test_experts_are_agreed_on_and_their_balance_is_logged_alike() -> None:
    settings = {**SMALL, "pp": 2, "dp": 2, "ep": 2, "experts": 4}
    for expected, *found in run_ranks(
        4, on_rigs, compare_with_native, settings, timeout_s=TIMEOUT_S
    ):
        assert any(expected[1])
        for schedule, outcome in zip(SCHEDULES, found, strict=True):
            assert outcome == expected, schedule


def compare_with_native(layout: Any, settings: dict[str, Any]) -> list[tuple[Outcome, list[float]]]:
    """Megatron's outcome and then ours, each with the auxiliary losses that it leaves to log."""
    from megatron.core.transformer.moe.moe_utils import (
        clear_aux_losses_tracker,
        get_moe_layer_wise_logging_tracker,
    )

    rig = Rig(settings, layout)
    found = []
    own = [ours(**chosen) for chosen in SCHEDULES]
    for schedule in [native(), *own]:
        clear_aux_losses_tracker()
        outcome = rig.run(schedule)
        logged = get_moe_layer_wise_logging_tracker().values()
        found.append((outcome, [value for loss in logged for value in loss["values"].tolist()]))
    for schedule in own:
        schedule.close()
    return found
