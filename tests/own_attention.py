"""Attention for trials on the CPU, of what Megatron leaves to Transformer Engine: over packed
sequences, and over one that ranks share. It is Megatron's own local attention under a mask of ours;
and one rank's part of a GPT with it."""

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.rigs import Rig
from tests.training import SMALL

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
