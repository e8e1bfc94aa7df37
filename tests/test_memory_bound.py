"""The hold in bytes on ranks that train: never a byte over it, by an independent count."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rrfp.schedule.knobs import Bytes
from rrfp.trace.records import Phase, PhaseRecord
from rrfp.train.settings import TrainSettings
from tests.ranks import run_ranks
from tests.saved_memory import GPT, MOE, VLM, documents, watched_memory
from tests.training import RankRun, train_variant, train_variants

__all__ = ["documents"]

MIB = 2**20


def trained(settings: dict[str, Any], hold: str) -> tuple[RankRun, RankRun, list[list[list[int]]]]:
    """A run under the hold, the same run without one, and what its microbatches kept from F to B,
    by step, chunk and microbatch, as hooks on autograd see it."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from rrfp.train.launch.process_groups import parallel_groups

    chosen = TrainSettings(**settings)
    kept: list[list[list[int]]] = []
    with parallel_groups(chosen) as layout:
        bound = train_variant(chosen.changed(hold=hold), layout)
        with watched_memory(kept):
            free = train_variant(chosen, layout)
    return bound, free, kept


def peaks_of(run: RankRun, kept: list[list[list[int]]]) -> Iterator[int]:
    """By step that trains: the most bytes at once, in the order in which the tasks ran."""
    for step, sizes in enumerate(kept):
        held = peak = 0
        for task in sorted(task for task in run.tasks() if task.step == step):
            size = sizes[task.chunk][task.microbatch]
            held += size if task.kind == "F" else -size
            peak = max(peak, held)
        assert held == 0
        yield peak


def check(settings: dict[str, Any], hold: str, *, steps: int) -> None:
    settings = {**settings, "steps": steps}
    runs = run_ranks(settings["pp"], trained, settings, hold, timeout_s=10 + 3 * steps)
    budget = TrainSettings(**settings, hold=hold).policy.hold
    assert isinstance(budget, Bytes)
    num_overlapping = 0
    for bound, free, kept in runs:
        peaks = [*peaks_of(bound, kept)]
        assert len(peaks) == steps
        assert max(peaks) <= budget.num
        heaviest = max(max(map(max, step)) for step in kept)
        num_overlapping += sum(peak > heaviest for peak in peaks)
        # The same training, to the last bit.
        assert (bound.losses, bound.grad_norms) == (free.losses, free.grad_norms)
        assert bound.parameters_sha256 == free.parameters_sha256
    # The bound lets in more than one microbatch at a time.
    assert num_overlapping > steps / 4


@pytest.mark.timeout(200)
def test_a_few_steps_stay_within_the_hold(documents: dict[str, Any]) -> None:
    check({**GPT, **documents, "microbatches": 6}, "3MiB", steps=6)


def test_gradients_that_wait_take_room_from_later_steps(tmp_path: Path) -> None:
    order = tmp_path / "backwards-last-first.csv"
    rows = ("0F0,0F1,0F2,0F3,0B3,0B2,0B1,0B0", "1F0,1F1,1F2,1F3,1B3,1B2,1B1,1B0")
    order.write_text("\n".join(rows))
    settings = {**GPT, "variable_lengths": False, "hint": str(order), "steps": 8}
    [run] = run_ranks(2, train_variants, settings, [{"hold": "64MiB"}], timeout_s=90)[1]
    waiting = [
        max(task.waiting_bytes for task in run.tasks() if task.step == step) for step in range(8)
    ]
    budgets = [
        record.budget_bytes
        for record in run.records
        if isinstance(record, PhaseRecord) and record.phase == Phase.SCHEDULE and record.step >= 0
    ]
    # The first step lets one microbatch through at a time, in their order.
    assert waiting[0] == 0 < max(waiting)
    assert budgets == [64 * MIB - max(waiting[:step], default=0) for step in range(8)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("settings", "hold"),
    [(GPT, "4MiB"), ({**VLM, "layers": 8}, "10MiB"), (MOE, "4MiB")],
    ids=["gpt", "vlm", "moe"],
)
def test_500_steps_stay_within_the_hold(
    settings: dict[str, Any], hold: str, documents: dict[str, Any]
) -> None:
    own = documents if settings.get("model") != "vlm" else {}
    check({**settings, **own}, hold, steps=500)
