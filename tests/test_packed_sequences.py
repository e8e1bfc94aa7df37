"""Packed sequences (`packed_seq_params`, Megatron's THD format) over pipeline stages: a loop builds
their bounds anew for every microbatch, on every stage, and microbatches differ in all of them."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rrfp.megatron.settings import DispatchSettings
from rrfp.runtime.pace import Delays
from rrfp.schedule.shape import Shape
from tests.own_attention import VOCABULARY, OwnAttentionRig
from tests.ranks import run_ranks
from tests.rigs import MICROBATCHES, Outcome, backwards_in_reverse, native, three_value_step

PACKS = ((5, 1, 9), (16,), (2, 3), (7, 6, 11, 8))
"""The lengths of the sequences of each microbatch."""


@pytest.mark.timeout(310)
def test_packed_sequences_learn_the_same(tmp_path: Path) -> None:
    assert len(PACKS) == MICROBATCHES
    reverse = backwards_in_reverse(tmp_path / "reverse.csv", Shape(2, MICROBATCHES))
    hints = ("bf", "bfw", reverse)
    for expected, *found in run_ranks(2, compare_with_native, hints, timeout_s=300):
        for hint, outcomes in zip(hints, found, strict=True):
            assert outcomes == expected, hint


def compare_with_native(hints: tuple[str, ...]) -> list[dict[str, Outcome]]:
    """Megatron's outcomes and then ours, with every task and message made late by chance."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from megatron.core import parallel_state

    from rrfp.megatron.dropin import get_forward_backward_func

    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, create_gloo_process_groups=False
    )
    rig = PackedRig(position_embedding="rope", variable_seq_lengths=True)
    own: list[Any] = [
        get_forward_backward_func(
            settings=DispatchSettings(hint),
            delays=Delays(index, dist.get_rank(), longest_s=5e-3),
        )
        for index, hint in enumerate(hints)
    ]
    found = [call(rig, schedule) for schedule in (native(), *own)]
    check_that_sequences_are_apart(rig, found[0]["mean"])
    for schedule in own:
        schedule.close()
    dist.destroy_process_group()
    return found


def call(rig: "PackedRig", schedule: Callable[..., Any]) -> dict[str, Outcome]:
    config = rig.gpt.config
    found = {"mean": rig.run(schedule, packed_step)}
    with torch.no_grad():
        found["evaluation"] = rig.run(schedule, packed_step, forward_only=True)
    config.recompute_granularity, config.recompute_method = "full", "uniform"
    config.recompute_num_layers = 1
    found["recomputed"] = rig.run(schedule, packed_step)
    config.recompute_granularity = config.recompute_method = config.recompute_num_layers = None
    return found


def check_that_sequences_are_apart(rig: "PackedRig", packed: Outcome) -> None:
    """Each has the loss that it has alone, so that none saw its neighbours."""
    number = sum(map(len, PACKS))
    with torch.no_grad():
        alone = rig.run(
            native(), three_value_step, num_microbatches=number, data=alone_of(), forward_only=True
        )
    if alone.losses:
        assert len({round(loss, 3) for loss in alone.losses}) == number
        losses = iter(alone.losses)
        expected = [sum(next(losses) for _ in pack) for pack in PACKS]
        assert packed.losses == pytest.approx(expected, rel=1e-5)


class PackedRig(OwnAttentionRig):
    """A GPT whose microbatches are sequences end to end."""

    def data(self, num_microbatches: int) -> Iterator[Any]:
        for pack in PACKS[:num_microbatches]:
            sequences = [sequence_of(length) for length in pack]
            fields = {
                name: torch.cat([each[name] for each in sequences], dim=1) for name in sequences[0]
            }
            yield {**fields, "lengths": torch.tensor(pack)}


def sequence_of(length: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(
        VOCABULARY, (1, length + 1), generator=torch.Generator().manual_seed(length)
    )
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": torch.ones(1, length),
        "position_ids": torch.arange(length)[None],
    }


def alone_of() -> Iterator[dict[str, torch.Tensor]]:
    """The same sequences, one a microbatch."""
    for pack in PACKS:
        yield from map(sequence_of, pack)


def packed_step(data_iterator: Iterator[dict[str, Any]], model: Any) -> tuple[torch.Tensor, Any]:
    """As loops on packed data do it: every stage builds the bounds of its own microbatch."""
    from megatron.core.packed_seq_params import PackedSeqParams

    batch = next(data_iterator)
    bounds = torch.cat((torch.zeros(1), batch["lengths"].cumsum(0))).int()
    longest = int(batch["lengths"].max())
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    output = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        packed_seq_params=packed,
    )

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total = losses.sum()
        return total, bounds[-1].clone(), {"loss": total.detach().clone()}

    return output, loss
