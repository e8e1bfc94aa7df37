"""`rrfp train --admit plan`: training under planned orders is that of the same orders from a file,
to the bit, and the file that a run writes is read back."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

from rrfp.errors import UsageError
from rrfp.schedule.admission import format_admission, parse_admission
from rrfp.trace.records import Phase, PhaseRecord
from rrfp.train.checks import check_settings
from rrfp.train.launch.process_groups import Layout
from rrfp.train.planning import AdmissionFile
from rrfp.train.settings import TrainSettings
from tests.ranks import run_ranks
from tests.training import SMALL, RankRun, train_variant

PLANNED: dict[str, Any] = {
    **SMALL,
    "pp": 2,
    "microbatches": 6,
    "variable_lengths": True,
    "seq_length": 48,
    "hint": "bfw",
    "steps": 6,
}

pytestmark = pytest.mark.timeout(310)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"plan_ms": 5.0}, "--admit given plans nothing; add --admit plan or leave"),
        ({"admit": "plan", "plan_ms": 0.0}, "it must be a finite number above 0"),
        ({"admit": "plan", "dispatch": "megatron"}, "choose --admit pyramid or another"),
        ({"admit": "plan", "dp": 2, "admit_across": "replicas"}, "deals it others; choose"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        check_settings(TrainSettings(**{**SMALL, "pp": 2, **settings}))


def test_training_is_that_of_the_order() -> None:
    ranks = run_ranks(2, plan_then_repeat, timeout_s=300)
    for planned, listed in ranks:
        assert listed.losses == planned.losses
        assert listed.grad_norms == planned.grad_norms
        assert listed.parameters_sha256 == planned.parameters_sha256
        # The first steps have nothing to plan by.
        assert planned.plans[0] is None
        assert planned.plans[-1] is not None
    phases = [each for each in ranks[0][0].records if isinstance(each, PhaseRecord)]
    searches = [each for each in phases if each.phase == Phase.PLAN]
    assert len(searches) == sum(plan is not None for plan in ranks[0][0].plans)


def plan_then_repeat() -> tuple[RankRun, RankRun]:
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from rrfp.train.launch.process_groups import parallel_groups

    settings = TrainSettings(**{**PLANNED, "admit": "plan", "plan_ms": 60.0})
    with (
        parallel_groups(settings) as layout,
        tempfile.NamedTemporaryFile("w", suffix=".csv") as file,
    ):
        planned = train_variant(settings, layout)
        file.write("".join(format_admission([order]) for order in planned.orders))
        file.flush()
        return planned, train_variant(settings.changed(admit=file.name, plan_ms=None), layout)


def test_a_run_that_goes_on_goes_on_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "admission.csv"
    layout = Layout(
        pp=1, tp=1, dp=1, ep=1, chunks=1, placement=TrainSettings().layout.placement,
        pp_rank=0, tp_rank=0, dp_rank=0, ep_rank=0,
    )  # fmt: skip

    def write(first_step: int, *orders: list[int]) -> tuple[tuple[int, ...], ...]:
        file = AdmissionFile(path, layout, 3, first_step)
        for order in orders:
            file.write(order)
        file.close()
        return parse_admission(path.read_text(), "file").orders

    assert write(0, [2, 1, 0], [1, 0, 2]) == ((2, 1, 0), (1, 0, 2))
    # Half a line is left by a run that was killed, and steps are run again.
    path.write_text(path.read_text() + "0 1")
    assert write(1, [0, 2, 1]) == ((2, 1, 0), (0, 2, 1))
    # Steps that another run has planned, or none.
    assert write(4, [1, 2, 0]) == ((2, 1, 0), (0, 2, 1), (0, 1, 2), (0, 1, 2), (1, 2, 0))
