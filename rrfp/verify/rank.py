"""The work of a rank of `rrfp verify`: train every variant from the same initial state."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from rrfp.megatron.pipeline import discard
from rrfp.runtime.pace import Delays
from rrfp.trace.run_dir import RunDir
from rrfp.trace.safe_files import create_new
from rrfp.train.data.batches import open_data
from rrfp.train.launch.process_groups import Layout, seed_random_states
from rrfp.train.loop import Trainer, schedule_of
from rrfp.train.models.gpt import whole_name
from rrfp.train.models.model import build_model
from rrfp.train.ordered_batches import OrderedBatches
from rrfp.train.settings import TrainSettings
from rrfp.verify.sameness import RankResult, learned_file, variants_file

_MAX_DELAY_S = 1e-3


def work(run: RunDir, settings: TrainSettings, layout: Layout) -> None:
    """Train every variant of the run's file on this rank, one after another from the same initial
    state, each with its own random delays. Append each result to this rank's new file. Sets torch's
    number of threads to OMP_NUM_THREADS."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    lines = variants_file(run).read_text(encoding="utf-8").splitlines()
    with create_new(learned_file(run, layout.rank)) as file:
        for index, line in enumerate(lines):
            delays = Delays(index, layout.rank, _MAX_DELAY_S)
            result = _train(TrainSettings.from_json(line), layout, delays)
            file.write(f"{json.dumps(asdict(result))}\n".encode())
            file.flush()


def _train(settings: TrainSettings, layout: Layout, delays: Delays) -> RankResult:
    """Train one variant, with random delays, from newly seeded random states. Return its losses,
    gradient norms, and digests of the final parameters and of the first step's gradients. Closes
    the links at the end."""
    seed_random_states(settings, layout)
    data = open_data(settings)
    model = build_model(settings, layout, data)
    schedule = schedule_of(settings, layout.pp_rank, discard, delays)
    batches = OrderedBatches(settings, layout, data)
    gradients: dict[str, str] = {}

    def schedule_with_digests(**arguments: Any) -> list[Any]:
        losses = schedule(**arguments)
        if not gradients:
            gradients.update(gradients_sha256(model.chunks, settings, layout))
        return losses

    trainer = Trainer(settings, layout, model, batches, schedule_with_digests, discard)
    results = [trainer.train_step(step) for step in range(settings.num_steps)]
    schedule.close()
    return RankResult(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        parameters_sha256(model.chunks),
        gradients,
    )


def gradients_sha256(
    chunks: Sequence[Any], settings: TrainSettings, layout: Layout
) -> dict[str, str]:
    """SHA-256 of each parameter's `main_grad` on this rank, by the parameter's name in the whole
    model."""
    return {
        whole_name(name, chunk.module, settings, layout): hashlib.sha256(
            _tensor_bytes(parameter.main_grad)
        ).hexdigest()
        for chunk in chunks
        for name, parameter in chunk.module.named_parameters()
    }


def parameters_sha256(chunks: Sequence[Any]) -> str:
    """One SHA-256 of all parameters of a rank's model chunks."""
    digest = hashlib.sha256()
    for chunk in chunks:
        for parameter in chunk.parameters():
            digest.update(_tensor_bytes(parameter))
    return digest.hexdigest()


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements, copied to the CPU."""
    return tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()
