"""Nothing that the dispatcher does to the order changes what is learned, to the last bit."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rrfp.schedule.order import Order, format_order
from rrfp.schedule.orders import ORDERS
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from tests.ranks import run_ranks
from tests.training import SMALL, RankRun, train_variants

STEPS = 5
MEGATRON = {"dispatch": "megatron"}
OURS: list[dict[str, Any]] = [
    {"dispatch": "fixed", "hint": "1f1b"},
    {"dispatch": "fixed", "hint": "gpipe"},
    {"dispatch": "fixed", "hint": "bf"},
    *({"hint": hint} for hint in ("bf", "fb", "b-first", "f-first", "1f1b", "gpipe")),
    {"hint": "bf", "limit": 1},
]


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 4},
        pytest.param({"pp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"pp": 2, "tp": 2, "variable_lengths": True, "seq_length": 128}, marks=pytest.mark.slow
        ),
        pytest.param({"pp": 1}, id="pp1", marks=pytest.mark.slow),
    ],
    ids=lambda layout: "-".join(f"{name}{value}" for name, value in layout.items()),
)
def test_every_dispatch_learns_the_same(layout: dict[str, Any]) -> None:
    settings = {**SMALL, "steps": STEPS, **layout}
    num_ranks = settings["pp"] * settings.get("tp", 1) * settings.get("dp", 1)
    by_rank = run_ranks(num_ranks, train_variants, settings, [MEGATRON, *OURS], timeout_s=110)
    for rank, (reference, *runs) in enumerate(by_rank):
        assert len(reference.losses) == STEPS
        assert reference.losses[-1] != reference.losses[0]
        for variant, run in zip(OURS, runs, strict=True):
            _assert_same(reference, run, f"rank {rank}, {variant}")


def test_backwards_out_of_order_learn_the_same(tmp_path: Path) -> None:
    """A hint may take microbatches in any order; gradients still add up in theirs."""
    shape = Shape(2, SMALL["microbatches"])
    hints = []
    for seed in range(3):
        path = tmp_path / f"shuffled-{seed}.csv"
        path.write_text(format_order(_shuffled(shape, seed)), encoding="utf-8")
        hints.append({"hint": str(path)})
    settings = {**SMALL, "steps": STEPS, "pp": 2}
    for reference, *runs in run_ranks(2, train_variants, settings, [MEGATRON, *hints]):
        for hint, run in zip(hints, runs, strict=True):
            _assert_same(reference, run, hint["hint"])
            assert _backwards(run) != sorted(_backwards(run))


def _assert_same(reference: RankRun, run: RankRun, which: str) -> None:
    assert run.losses == reference.losses, which
    assert run.grad_norms == reference.grad_norms, which
    assert run.parameters_sha256 == reference.parameters_sha256, which


def _backwards(run: RankRun) -> list[int]:
    """The microbatches of the first step's backwards, as they ran."""
    return [task.microbatch for task in run.tasks() if task.step == 0 and task.kind == Kind.B]


def _shuffled(shape: Shape, seed: int) -> Order:
    """GPipe with its microbatches renumbered at random, in one way for F and another for B."""
    forwards, backwards = (
        random.Random(f"{seed} {kind}").sample(
            range(shape.num_microbatches), shape.num_microbatches
        )
        for kind in "FB"
    )
    renumbered = {Kind.F: forwards, Kind.B: backwards}
    order = ORDERS["gpipe"](shape)
    rows = tuple(
        tuple(Task(stage, kind, renumbered[kind][microbatch]) for stage, kind, microbatch in row)
        for row in order.rows
    )
    return replace(order, rows=rows)
