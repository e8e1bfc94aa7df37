"""A stage of the multimodal model: vision stages, then language stages, in one chain.

A vision stage outputs one vector per patch, for all images of its microbatch end to end; patches
attend within their own image. The first language stage inserts them into the text. From there on
the output has one vector per position of the sequence; a position attends to earlier ones of its
own document. For a microbatch without images a vision stage outputs a tensor without rows.

The layers are Megatron-Core's, and language stages are its `GPTModel`. Rotary embeddings depend
only on the distance between positions, so packing documents does not affect them.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.enums import AttnMaskType, ModelType
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlock,
    TransformerBlockSubmodules,
)
from megatron.core.utils import make_viewless_tensor

from rrfp.train.data.batches import ImageBatch
from rrfp.train.launch.process_groups import Layout, virtual_pipeline_size
from rrfp.train.models.gpt import finish_chunk, gpt_stage, mean_loss
from rrfp.train.settings import TrainSettings, num_vision_stages

_NUM_COLORS = 3

_WAVELENGTHS = tuple(4.0 * 2**octave for octave in range(8))
"""Wavelengths, in patches, of the sines and cosines that encode a patch's row and column."""


def build_chunk(
    settings: TrainSettings, layout: Layout, config: Any, chunk: int, num_tokens: int
) -> Any:
    """Build and initialize one chunk of a rank's multimodal model: a vision stage, or a language
    stage for a vocabulary of `num_tokens`. All stages have the same number of layers."""
    stage = layout.stages[chunk]
    num_vision = num_vision_stages(layout.num_stages)
    num_layers = settings.model.layers // layout.num_stages
    num_before = stage * num_layers
    vp_stage = None if virtual_pipeline_size(settings) is None else chunk
    layer_spec = get_gpt_layer_local_spec()
    layer_spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.arbitrary
    if stage < num_vision:
        vision = VisionStage(
            config,
            TransformerBlockSubmodules([layer_spec] * num_layers, LayerNormImpl),
            patch_size=settings.data.patch_size,
            is_first=stage == 0,
            is_last=stage == num_vision - 1,
            vp_stage=vp_stage,
        )
        return finish_chunk(vision, vision.encoder.layers, settings, layout, num_before)
    gpt = gpt_stage(
        settings,
        config,
        layer_spec,
        num_layers=num_layers,
        num_tokens=num_tokens,
        is_first=stage == num_vision,
        is_last=stage == layout.num_stages - 1,
        vp_stage=vp_stage,
    )
    return finish_chunk(LanguageStage(gpt), gpt.decoder.layers, settings, layout, num_before)


def forward_step(
    data_iterator: Iterator[ImageBatch], model: Any
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
    """Run a chunk on the iterator's next microbatch, as Megatron's `forward_step_func`: return the
    output and the function that makes the loss of it."""
    batch = next(data_iterator)
    return model(batch), partial(mean_loss, batch["loss_mask"])


class _Stage(MegatronModule):  # type: ignore[misc]
    """A module with the attributes that Megatron's schedules and gradient finalization need."""

    def __init__(
        self, config: Any, *, pre_process: bool, post_process: bool, vp_stage: int | None
    ) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process = pre_process
        self.post_process = post_process
        self.vp_stage = vp_stage
        self.share_embeddings_and_output_weights = False
        self._input: Any = None

    def set_input_tensor(self, input_tensor: list[torch.Tensor | None]) -> None:
        """Keep the output of the previous stage, the only item of the list, [patches or length, 1,
        hidden], as the input of the next forward; the first stage gets None."""
        (self._input,) = input_tensor


class VisionStage(_Stage):
    """Layers over the patches of a microbatch. The first stage also embeds patches; the last one
    projects to the language model's space."""

    def __init__(
        self,
        config: Any,
        layers: TransformerBlockSubmodules,
        *,
        patch_size: int,
        is_first: bool,
        is_last: bool,
        vp_stage: int | None,
    ) -> None:
        super().__init__(config, pre_process=is_first, post_process=False, vp_stage=vp_stage)
        if is_first:
            num_values = _NUM_COLORS * patch_size**2
            self.embedding = _linear(config, num_values + 4 * len(_WAVELENGTHS))
            # A buffer, because a copy from the host would wait for a GPU's other work.
            self.register_buffer("_wavelengths", torch.tensor(_WAVELENGTHS), persistent=False)
        # With `pre_process`, every stage takes its input as an argument.
        self.encoder = TransformerBlock(
            config, layers, pre_process=True, post_process=is_last, vp_stage=vp_stage
        )
        self._is_last = is_last
        if is_last:
            self.projection = _linear(config, config.hidden_size)

    def forward(self, batch: ImageBatch) -> torch.Tensor:
        """Run the stage on a microbatch; patches attend within their own image. Return [patches, 1,
        hidden], without rows if the microbatch has no images."""
        hidden = self._patches(batch) if self.pre_process else self._input
        # Without `output_size` the host would wait for a GPU to compute it.
        image_ids = torch.repeat_interleave(
            batch["patch_counts"], output_size=len(batch["patches"])
        )
        is_empty = len(image_ids) == 0
        if is_empty:
            # Megatron's attention does not accept an empty sequence. The gradients of this row are
            # zero, which also gives every parameter a gradient in every microbatch.
            hidden = torch.cat((hidden, hidden.new_zeros(1, *hidden.shape[1:])))
            image_ids = image_ids.new_zeros(1)
        if self.pre_process:
            hidden, _ = self.embedding(hidden)
        hidden = self.encoder(hidden, (image_ids[:, None] != image_ids)[None, None])
        if self._is_last:
            hidden, _ = self.projection(hidden)
        if is_empty:
            hidden = hidden[:0]
        # Megatron's schedule frees outputs once they are sent, and cannot free a view.
        return make_viewless_tensor(  # type: ignore[no-any-return]
            hidden, requires_grad=True, keep_graph=True
        )

    def _patches(self, batch: ImageBatch) -> torch.Tensor:
        """Return the input of the embedding, [patches, 1, values]: each patch's pixels, and sines
        and cosines of its row and column."""
        values = torch.cat(
            (batch["patches"], _waves(batch["patch_places"], self._wavelengths)), dim=1
        )
        return values.to(self.config.params_dtype)[:, None]


class LanguageStage(_Stage):
    """Layers over the sequence of a microbatch. The first stage also embeds text and inserts the
    images; the last one has the head and the losses."""

    def __init__(self, gpt: Any) -> None:
        super().__init__(
            gpt.config,
            pre_process=False,
            post_process=gpt.post_process,
            vp_stage=gpt.vp_stage,
        )
        self.gpt = gpt

    def forward(self, batch: ImageBatch) -> torch.Tensor:
        """Run the stage on a microbatch; a position attends to earlier ones of its own document.
        Return [length, 1, hidden], or in the last stage the losses of all labels, [1, length]."""
        document_ids = batch["document_ids"][0]
        places = torch.arange(len(document_ids), device=document_ids.device)
        hides = (document_ids[:, None] != document_ids) | (places[:, None] < places)
        embedded = None
        if self.gpt.pre_process:
            text = self.gpt.embedding(batch["tokens"], batch["position_ids"])
            embedded = text.index_copy(0, batch["image_slots"], self._input)
        else:
            self.gpt.set_input_tensor(self._input)
        return self.gpt(  # type: ignore[no-any-return]
            batch["tokens"],
            batch["position_ids"],
            hides[None, None],
            decoder_input=embedded,
            labels=batch["labels"],
        )


def _linear(config: Any, num_inputs: int) -> ColumnParallelLinear:
    """Make a linear layer to the hidden size, with the whole output on every tensor-parallel
    rank."""
    return ColumnParallelLinear(
        num_inputs,
        config.hidden_size,
        config=config,
        init_method=config.init_method,
        gather_output=True,
    )


def _waves(places: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Encode rows and columns [patches, 2] as sines and cosines of these wavelengths, [patches, 4 *
    wavelengths]."""
    # Powers of two are exact in bf16.
    angles = 2 * torch.pi * places[:, :, None] / lengths.float()
    return torch.cat((angles.sin(), angles.cos()), dim=2).flatten(1)
