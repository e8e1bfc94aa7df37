"""Context parallelism: attention over a sequence that two ranks share is a collective in a task,
on which these ranks must agree."""

import copy
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rrfp.megatron.settings import DispatchSettings
from rrfp.runtime.delays import Delays
from rrfp.schedule.policy import AgreementRule
from rrfp.train.data.batches import Batch
from tests.ranks import run_ranks
from tests.rigs import Outcome, Rig, native, three_value_step
from tests.training import SMALL

CP = 2
LENGTH = SMALL["seq_length"] // CP
VOCABULARY = 64

SCHEDULES = [
    DispatchSettings(),
    DispatchSettings("bfw"),
    DispatchSettings("f-first", limit=2),
    DispatchSettings("bfw", agreement=AgreementRule.UNANIMOUS),
]


@pytest.mark.timeout(400)
def test_ranks_that_share_a_sequence_agree() -> None:
    by_rank = run_ranks(2 * CP, compare_with_native, timeout_s=300)
    for expected, *found in by_rank:
        for settings, outcomes in zip(SCHEDULES, found, strict=True):
            assert outcomes == expected, settings
    # Each has seen its own part of the sequence, and all of them went into the gradients.
    mean, per_token = by_rank[-1][0]
    assert mean.losses != by_rank[-2][0][0].losses
    assert mean.gradients_sha256 != per_token.gradients_sha256
    assert mean.gradients_sha256 == by_rank[-2][0][0].gradients_sha256


def compare_with_native() -> list[list[Outcome]]:
    """Megatron's outcomes and then ours, with every task and message made late by chance."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from megatron.core import parallel_state

    from rrfp.megatron.dropin import get_forward_backward_func

    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2,
        context_parallel_size=CP,
        create_gloo_process_groups=False,
    )
    rig = ContextRig()
    own: list[Any] = [
        get_forward_backward_func(
            settings=settings, delays=Delays(index, dist.get_rank(), longest_s=5e-3)
        )
        for index, settings in enumerate(SCHEDULES)
    ]
    found = []
    for schedule in [native(), *own]:
        mean = rig.run(schedule)
        rig.gpt.config.calculate_per_token_loss = True
        found.append([mean, rig.run(schedule, three_value_step)])
        rig.gpt.config.calculate_per_token_loss = False
    for schedule in own:
        schedule.close()
    dist.destroy_process_group()
    return found


class ContextRig(Rig):
    """A GPT whose ranks have a part of each sequence, and gather keys and values for attention."""

    def __init__(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer import TransformerConfig

        config = TransformerConfig(
            num_layers=SMALL["layers"],
            hidden_size=SMALL["hidden"],
            num_attention_heads=SMALL["heads"],
            pipeline_model_parallel_size=2,
            context_parallel_size=CP,
            pipeline_dtype=torch.float32,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            deallocate_pipeline_outputs=True,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
        )
        model_parallel_cuda_manual_seed(1)
        torch.manual_seed(parallel_state.get_pipeline_model_parallel_rank())
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=_layer_that_gathers(),
            vocab_size=VOCABULARY,
            max_sequence_length=SMALL["seq_length"],
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
        )
        chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)
        config.no_sync_func = chunk.no_sync
        config.finalize_model_grads_func = finalize_model_grads
        self.gpt: Any = SimpleNamespace(chunks=[chunk], config=config)

    def data(self, num_microbatches: int) -> Iterator[Batch]:
        """This rank's part of each sequence; some labels do not count."""
        from megatron.core import parallel_state

        part = parallel_state.get_context_parallel_rank()
        generator = torch.Generator().manual_seed(7)
        for index in range(num_microbatches):
            whole = torch.randint(VOCABULARY, (1, CP * LENGTH + 1), generator=generator)
            start = part * LENGTH
            mask = torch.ones(1, LENGTH)
            mask[:, : 2 * index + part] = 0
            yield Batch(
                tokens=whole[:, start : start + LENGTH],
                labels=whole[:, start + 1 : start + LENGTH + 1],
                loss_mask=mask,
                position_ids=torch.arange(start, start + LENGTH).expand(1, LENGTH),
            )


def _layer_that_gathers() -> Any:
    """Megatron's local layer, whose attention is over one rank's part, made to gather the others'.
    Without a mask: what matters is that the parts are of one microbatch."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    class GatheringAttention(DotProductAttention):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            alone = copy.copy(config)
            alone.context_parallel_size = 1
            super().__init__(alone, *args, **kwargs)

        def forward(
            self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
        ) -> Any:
            group = parallel_state.get_context_parallel_group()
            key = gather_from_sequence_parallel_region(key, group=group)
            value = gather_from_sequence_parallel_region(value, group=group)
            return super().forward(query, key, value, None)

    layer = get_gpt_layer_local_spec()
    attention = layer.submodules.self_attention
    attention.params = {"attn_mask_type": AttnMaskType.no_mask}
    attention.submodules.core_attention = GatheringAttention
    return layer
