"""`--hint auto` on real ranks: the hint changes while the run goes on, on all ranks alike, and what
is trained does not."""

from dataclasses import replace
from typing import Any

import pytest

from rrfp.errors import UsageError
from rrfp.megatron.settings import DispatchSettings
from rrfp.schedule.named_hints import AUTO, AutoHint
from rrfp.train.checks import check_settings
from rrfp.train.settings import TrainSettings
from tests.ranks import run_ranks
from tests.training import SMALL, train_variants

CHOSEN = AutoHint(first="gpipe", every=5, waits=True)
"""It begins with a hint that nobody would choose, so that it has to change."""

PACED = {"pace": "uniform", "jitter": "slow-stage:1:1.5"}
"""So that what tasks take does not depend on who else uses this machine."""

pytestmark = pytest.mark.timeout(310)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"dispatch": "megatron"}, "--dispatch megatron runs 1f1b only, not 'auto'"),
        ({"dispatch": "fixed"}, "--hint auto chooses what binds as well"),
        ({"grad_order": "arrival"}, "lets the sums of gradients depend on the order of tasks"),
        ({"w": "ranked"}, "--w ranked needs an order"),
    ],
)
def test_what_would_decide_otherwise_is_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        check_settings(TrainSettings(**{**SMALL, "pp": 2, "hint": "auto", **settings}))


def test_the_drop_in_refuses_it_too() -> None:
    assert DispatchSettings(hint="auto").policy.hint is AUTO
    with pytest.raises(UsageError, match="choose canonical"):
        DispatchSettings(hint="auto", grad_order="arrival")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="leave --dispatch out"):
        DispatchSettings(hint="auto", dispatch="fixed")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"pp": 2, "dp": 2, "chunks": 2, "placement": "v"}, id="V on two replicas"),
        pytest.param({"pp": 2, "hold": 4}, id="one chunk under a hold", marks=pytest.mark.slow),
    ],
)
def test_hints_change_and_the_training_does_not(layout: dict[str, Any]) -> None:
    settings = {**SMALL, **layout, "microbatches": 6, "steps": 12} | PACED
    num_ranks = layout["pp"] * layout.get("dp", 1)
    variants = [{"hint": "bf", "pace": None, "jitter": "none"}, {"hint": CHOSEN}]
    ranks = run_ranks(num_ranks, train_variants, settings, variants, timeout_s=300)
    for plain, chosen in ranks:
        assert chosen.losses == plain.losses
        assert chosen.grad_norms == plain.grad_norms
        assert chosen.parameters_sha256 == plain.parameters_sha256
    steered = [[replace(each, choice=None) for each in chosen.policies] for _, chosen in ranks]
    assert all(each == steered[0] for each in steered)
    names = [each.hint_name for each in steered[0]]
    # One step warms up, three are measured, and their tables come two steps later.
    assert names[:6] == ["gpipe"] * 6
    assert "gpipe" not in names[6:]
    choices = [each.choice for each in ranks[0][1].policies]
    assert [number for number, choice in enumerate(choices) if choice is not None] == [6, 11]
    first = choices[6]
    assert first is not None
    assert first.predicted_s < first.kept_s
    assert first.num_candidates > 3
