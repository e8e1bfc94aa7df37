"""Context parallelism and packed sequences, by an attention that runs on the CPU."""

import copy
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist

from rrfp.megatron.settings import DispatchSettings
from rrfp.runtime.pace import Delays
from rrfp.schedule.policy import AgreementRule
from rrfp.schedule.shape import Shape
from rrfp.train.data.batches import Batch
from tests.e2e.ranks import run_ranks
from tests.megatron.training import (
    MICROBATCHES,
    SMALL,
    Outcome,
    Rig,
    backwards_in_reverse,
    native,
    three_value_step,
)

VOCABULARY = 64


def layer_with_own_attention() -> Any:
    """Megatron's local layer, whose attention can be over packed sequences or a shared one."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnMaskType

    layer = get_gpt_layer_local_spec()
    attention = layer.submodules.self_attention
    attention.params = {"attn_mask_type": AttnMaskType.arbitrary}
    attention.submodules.core_attention = _own_attention()
    return layer


def _own_attention() -> type[Any]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    gather = partial(gather_from_sequence_parallel_region, tensor_parallel_output_grad=True)

    class OwnAttention(DotProductAttention):  # type: ignore[misc]
        """[length, 1, heads, head size], or without the 1 where sequences are packed: a place sees
        itself and the earlier ones of its sequence."""

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            # Megatron's own refuses more: it sees one rank's part only.
            alone = copy.copy(config)
            alone.context_parallel_size = 1
            super().__init__(alone, *args, **kwargs)

        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            *_: Any,
            packed_seq_params: Any = None,
            **__: Any,
        ) -> Any:
            if packed_seq_params is not None:
                hidden = hidden_in_packed(packed_seq_params.cu_seqlens_q)
                whole = (each.unsqueeze(1) for each in (query, key, value))
                return super().forward(*whole, hidden)
            group = parallel_state.get_context_parallel_group()
            places = places_of_ranks(len(query), group.size())
            hidden = places[group.rank()][:, None] < torch.cat(places)
            if group.size() > 1:
                key, value = (gather(each, group=group) for each in (key, value))
            return super().forward(query, key, value, hidden[None, None])

    return OwnAttention


def hidden_in_packed(bounds: torch.Tensor) -> torch.Tensor:
    """[1, 1, length, length]: what a place (a row) must not see: later places, and those of other
    sequences, which begin at `bounds`."""
    places = torch.arange(int(bounds[-1]))
    sequences = torch.bucketize(places, bounds, right=True)
    hides = (sequences[:, None] != sequences) | (places[:, None] < places)
    return hides[None, None]


def places_of_ranks(length: int, num_ranks: int) -> list[torch.Tensor]:
    """The places of each rank's part of `length` in the sequence that ranks share, as Megatron cuts
    it: one piece from the front and one from the back, so that causal work is even."""
    if num_ranks == 1:
        return [torch.arange(length)]
    pieces = torch.arange(num_ranks * length).chunk(2 * num_ranks)
    return [torch.cat((pieces[rank], pieces[-1 - rank])) for rank in range(num_ranks)]


class OwnAttentionRig(Rig):
    """One rank's chunk of a GPT over two stages, whose parameters follow from the stage alone; its
    data are the subclass's."""

    def __init__(self, *, position_embedding: str, **config: Any) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer import TransformerConfig

        chosen = TransformerConfig(
            num_layers=SMALL["layers"],
            hidden_size=SMALL["hidden"],
            num_attention_heads=SMALL["heads"],
            pipeline_model_parallel_size=2,
            context_parallel_size=parallel_state.get_context_parallel_world_size(),
            pipeline_dtype=torch.float32,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            deallocate_pipeline_outputs=True,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            apply_rope_fusion=False,
            # Megatron demands it for variable lengths, in dense models too.
            moe_token_dispatcher_type="alltoall",
            **config,
        )
        stage = parallel_state.get_pipeline_model_parallel_rank()
        model_parallel_cuda_manual_seed(1 + stage, force_reset_rng=True)
        torch.manual_seed(stage)
        gpt = GPTModel(
            config=chosen,
            transformer_layer_spec=layer_with_own_attention(),
            vocab_size=VOCABULARY,
            max_sequence_length=SMALL["seq_length"],
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
            position_embedding_type=position_embedding,
        )
        chunk = DistributedDataParallel(chosen, DistributedDataParallelConfig(), gpt)
        chosen.no_sync_func = chunk.no_sync
        chosen.finalize_model_grads_func = finalize_model_grads
        self.gpt: Any = SimpleNamespace(chunks=[chunk], config=chosen)

    def flat_gradients(self) -> npt.NDArray[np.float32]:
        """This rank's gradients end to end."""
        (chunk,) = self.gpt.chunks
        return np.concatenate([each.main_grad.flatten().numpy() for each in chunk.parameters()])


# Context parallelism: causal attention over a sequence that two ranks share, cut as Megatron cuts
# it, is a collective in a task, on which these ranks must agree.


CP = 2
LENGTH = SMALL["seq_length"]


class Found(NamedTuple):
    """The results on one rank."""

    outcomes: list[list[Outcome]]
    """By schedule, Megatron's first: of the mean loss, and of the loss per token."""
    gradients: npt.NDArray[np.float32]
    """Under Megatron's own schedule, per token."""
    whole: Outcome
    """The results of Megatron's own schedule per token, if each rank has whole sequences."""
    whole_gradients: npt.NDArray[np.float32]


@pytest.mark.timeout(400)
def test_ranks_that_share_a_sequence_agree(tmp_path: Path) -> None:
    schedules = [
        DispatchSettings(),
        DispatchSettings("bfw"),
        DispatchSettings(backwards_in_reverse(tmp_path / "reverse.csv", Shape(2, MICROBATCHES))),
        DispatchSettings("f-first", limit=2),
        DispatchSettings("bfw", agreement=AgreementRule.UNANIMOUS),
    ]
    by_rank = run_ranks(2 * CP, compare_with_native, schedules, timeout_s=300)
    for rank in by_rank:
        expected, *found = rank.outcomes
        for settings, outcomes in zip(schedules, found, strict=True):
            assert outcomes == expected, settings
    # Each has seen its own part of the sequence, and all of them went into the gradients.
    first, second = by_rank[-2:]
    mean, per_token = second.outcomes[0]
    assert mean.losses != first.outcomes[0][0].losses
    assert mean.gradients_sha256 != per_token.gradients_sha256
    assert mean.gradients_sha256 == first.outcomes[0][0].gradients_sha256
    # The parts add up to what a rank finds that has the whole.
    parts = zip(first.outcomes[0][1].losses, per_token.losses, strict=True)
    assert [sum(each) for each in parts] == pytest.approx(second.whole.losses, rel=1e-5)
    for rank in by_rank:
        np.testing.assert_allclose(rank.gradients, rank.whole_gradients, rtol=1e-4, atol=1e-6)


def test_a_sequence_is_cut_as_megatron_cuts_it() -> None:
    places = [each.tolist() for each in places_of_ranks(4, 2)]
    assert places == [[0, 1, 6, 7], [2, 3, 4, 5]]


def compare_with_native(schedules: list[DispatchSettings]) -> Found:
    """Megatron's outcomes and then ours, with every task and message made late by chance; then
    those of two replicas that have the same whole sequences."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from megatron.core import parallel_state

    from rrfp.megatron.dropin import get_forward_backward_func

    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    join_groups(CP)
    rig = ContextRig(position_embedding="learned_absolute")
    own: list[Any] = [
        get_forward_backward_func(
            settings=settings, delays=Delays(index, dist.get_rank(), longest_s=5e-3)
        )
        for index, settings in enumerate(schedules)
    ]
    outcomes = [[rig.run(schedule), per_token(rig, schedule)] for schedule in own]
    expected = [rig.run(native()), per_token(rig, native())]
    gradients = rig.flat_gradients()
    for schedule in own:
        schedule.close()
    parallel_state.destroy_model_parallel()
    join_groups(1)
    rig = ContextRig(position_embedding="learned_absolute")
    found = Found([expected, *outcomes], gradients, per_token(rig, native()), rig.flat_gradients())
    dist.destroy_process_group()
    return found


def join_groups(num_ranks: int) -> None:
    """Two stages whose sequences are each split over several ranks."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2,
        context_parallel_size=num_ranks,
        create_gloo_process_groups=False,
    )


def per_token(rig: "ContextRig", schedule: Any) -> Outcome:
    rig.gpt.config.calculate_per_token_loss = True
    outcome = rig.run(schedule, three_value_step)
    rig.gpt.config.calculate_per_token_loss = False
    return outcome


class ContextRig(OwnAttentionRig):
    """A GPT whose ranks have a part of each sequence."""

    def data(self, num_microbatches: int) -> Iterator[Batch]:
        """This rank's part of each sequence, as Megatron cuts it; some labels do not count."""
        from megatron.core import parallel_state
        from megatron.core.utils import get_batch_on_this_cp_rank

        # From 0.18 on it cuts in several ways.
        several = "is_hybrid_cp" in signature(get_batch_on_this_cp_rank).parameters
        cut = partial(
            get_batch_on_this_cp_rank,
            cp_group=parallel_state.get_context_parallel_group(),
            **({"is_hybrid_cp": False} if several else {}),
        )
        generator = torch.Generator().manual_seed(7)
        for index in range(num_microbatches):
            tokens = torch.randint(VOCABULARY, (1, LENGTH + 1), generator=generator)
            mask = torch.ones(1, LENGTH)
            mask[:, : 5 * index] = 0
            yield cut(
                Batch(
                    tokens=tokens[:, :-1],
                    labels=tokens[:, 1:],
                    loss_mask=mask,
                    position_ids=torch.arange(LENGTH)[None],
                )
            )


# Packed sequences (`packed_seq_params`, Megatron's THD format) over pipeline stages: a loop builds
# their bounds again for every microbatch, on every stage, and microbatches differ in all of them.


PACKS = ((5, 1, 9), (16,), (2, 3), (7, 6, 11, 8))
"""The lengths of the sequences of each microbatch."""


@pytest.mark.timeout(310)
def test_packed_sequences_learn_the_same(tmp_path: Path) -> None:
    assert len(PACKS) == MICROBATCHES
    reverse = backwards_in_reverse(tmp_path / "reverse.csv", Shape(2, MICROBATCHES))
    hints = ("bf", "bfw", reverse)
    for expected, *found in run_ranks(2, compare_packed_with_native, hints, timeout_s=300):
        for hint, outcomes in zip(hints, found, strict=True):
            assert outcomes == expected, hint


def compare_packed_with_native(hints: tuple[str, ...]) -> list[dict[str, Outcome]]:
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
