"""A Megatron-Core training script, as small as one can be: a GPT that learns to count.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --pp 2

It knows nothing of rrfp's schedule: `rrfp run` takes it as it is (docs/your-job.md). Without a GPU,
rrfp lends Megatron-Core what it lacks on the CPU; that is the one thing it imports from there.
"""

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist

from rrfp.megatron.cpu.patches import prepare_cpu

prepare_cpu()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

VOCABULARY, SEQUENCE, MICROBATCHES = 64, 64, 8


def batches() -> Iterator[torch.Tensor]:
    """Sequences that count up from a random number, modulo the vocabulary."""
    generator = torch.Generator().manual_seed(1)
    while True:
        start = torch.randint(VOCABULARY, (1, 1), generator=generator)
        yield (start + torch.arange(SEQUENCE + 1)) % VOCABULARY


def mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.mean()
    return loss, {"loss": loss.detach().clone()}


def forward_step(data: Iterator[torch.Tensor], model: torch.nn.Module):
    tokens = next(data)
    places = torch.arange(SEQUENCE)[None]
    losses = model(tokens[:, :-1], places, None, labels=tokens[:, 1:])
    return losses, mean


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=2, help="pipeline ranks")
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=asked.pp)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2 * asked.pp,
        hidden_size=128,
        num_attention_heads=4,
        pipeline_model_parallel_size=asked.pp,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, params_dtype=torch.float32),
        [model],
        use_gloo_process_groups=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = model.no_sync
    config.grad_scale_func = optimizer.scale_loss

    schedule, data = get_forward_backward_func(), batches()
    for step in range(asked.steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = schedule(
            forward_step_func=forward_step,
            data_iterator=data,
            model=[model],
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=1,
        )
        optimizer.step()
        if losses:  # on the last stage
            loss = sum(each["loss"].item() for each in losses) / len(losses)
            print(f"step {step}: loss {loss:.6f}", flush=True)  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
