"""Several model chunks a rank: in a V, which Megatron lacks, held against the same model on other
stages. Loops are rows of test_learns_the_same.py."""

from pathlib import Path
from typing import Any

import pytest

from rrfp.schedule.shape import Placement, Shape
from tests.ranks import run_ranks
from tests.rigs import (
    TIMEOUT_S,
    Outcome,
    Rig,
    backwards_in_reverse,
    native,
    on_rigs,
    ours,
    three_value_step,
)
from tests.training import SMALL

pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)

# At two ranks Megatron's own interleaving mixes up its messages over gloo.
LOOP = Shape(3, 6, 2)
LOOP_SETTINGS = {**SMALL, "layers": 6, "pp": 3, "chunks": 2}

STRAIGHT = {**SMALL, "pp": 2}
SEVERAL_STAGES_A_RANK: list[dict[str, Any]] = [
    {**STRAIGHT, "chunks": 2, "placement": Placement.V},
    # Both directions between the same two ranks, and stages that follow each other on one rank.
    {**STRAIGHT, "chunks": 2},
]


def test_a_sum_in_the_order_of_arrival_is_another(tmp_path: Path) -> None:
    hint = backwards_in_reverse(tmp_path / "reverse.csv", LOOP)
    for canonical, arrival in run_ranks(
        3, on_rigs, in_both_orders, LOOP_SETTINGS, hint, timeout_s=TIMEOUT_S
    ):
        assert arrival.losses == canonical.losses
        # The order of the sum is the only difference that there may be.
        assert arrival.gradients_sha256 != canonical.gradients_sha256


def in_both_orders(layout: Any, settings: dict[str, Any], hint: str) -> list[Outcome]:
    """Megatron's outcome, and ours where gradients are added up as they come."""
    rig = Rig(settings, layout)
    schedule = ours(hint=hint, grad_order="arrival", dispatch="fixed")
    found = [rig.run(each, num_microbatches=LOOP.num_microbatches) for each in (native(), schedule)]
    schedule.close()
    return found


def test_a_models_gradients_do_not_depend_on_where_its_stages_are() -> None:
    expected = run_ranks(2, on_rigs, gradients_by_name, STRAIGHT, [None], timeout_s=TIMEOUT_S)
    for settings in SEVERAL_STAGES_A_RANK:
        hints = ["bf", "gpipe", "bfw-deep"]
        found = run_ranks(2, on_rigs, gradients_by_name, settings, hints, timeout_s=TIMEOUT_S)
        for case, by_hint in merged(found).items():
            for losses_and_gradients in by_hint:
                assert losses_and_gradients == merged(expected)[case][0], (settings, case)
    # One rank alone hands everything over to itself, and reaches the same.
    alone = run_ranks(
        1, on_rigs, gradients_by_name, {**SMALL, "pp": 1, "chunks": 2}, ["bfw"], timeout_s=TIMEOUT_S
    )
    assert merged(alone) == merged(expected)


ByCase = dict[str, list[tuple[list[float], dict[str, str]]]]


def gradients_by_name(layout: Any, settings: dict[str, Any], hints: list[str | None]) -> ByCase:
    """By case, the losses and gradients on this rank under each hint; None is Megatron's own."""
    rig = Rig(settings, layout)
    found: ByCase = {"mean": [], "per token": []}
    for hint in hints:
        placement = settings.get("placement", Placement.LOOP)
        schedule: Any = native() if hint is None else ours(hint=hint, placement=placement)
        for case in found:
            rig.gpt.config.calculate_per_token_loss = case == "per token"
            losses = rig.run(schedule, three_value_step).losses
            found[case].append((losses, rig.gradients()))
        if hint is not None:
            schedule.close()
    return found


def merged(by_rank: list[ByCase]) -> ByCase:
    """The whole pipeline's losses and gradients."""
    first, *others = by_rank
    for other in others:
        first = {
            case: [
                (losses + more_losses, gradients | more)
                for (losses, gradients), (more_losses, more) in zip(
                    by_hint, other[case], strict=True
                )
            ]
            for case, by_hint in first.items()
        }
    return first
