"""A Megatron job as its user has it, for tests: it trains a small GPT by a schedule that it asks
Megatron for, and knows nothing of how that runs.

    python tests/megatron_job.py OUT SETTINGS [--by-name] [--evaluate] [--install RUN]

`SETTINGS` are some of `rrfp train`'s, as JSON. Each rank writes what it saw to OUT/RANK.json.
`--by-name` imports the function that Megatron would choose, `--evaluate` evaluates after each step,
and `--install` calls `install()` by itself.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any


def main(arguments: list[str]) -> None:
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from rrfp.train.ranks.parallel import parallel_groups
    from rrfp.train.settings import TrainSettings
    from tests.training import SMALL

    if "--install" in arguments:
        import rrfp.megatron

        rrfp.megatron.install(
            rrfp.megatron.DispatchSettings(hint="bfw"),
            out=arguments[arguments.index("--install") + 1],
            steps="1:",
        )
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.schedules import (
        forward_backward_pipelining_without_interleaving,
    )

    settings = TrainSettings(**{**SMALL, **json.loads(arguments[1])})
    with parallel_groups(settings) as layout:
        schedule = forward_backward_pipelining_without_interleaving
        if "--by-name" not in arguments:
            schedule = get_forward_backward_func()
        seen = train(settings, layout, schedule, evaluates="--evaluate" in arguments)
    Path(arguments[0], f"{layout.rank}.json").write_text(json.dumps(seen))


def train(settings: Any, layout: Any, schedule: Any, *, evaluates: bool) -> dict[str, Any]:
    """What one rank sees of its training."""
    import torch

    from rrfp.train.data.open import open_data
    from rrfp.train.models.model import build_model
    from rrfp.train.training import Trainer, run_schedule

    data = open_data(settings)
    gpt = build_model(settings, layout, data)
    batches = data.batches(layout.dp_rank)
    trainer = Trainer(settings, layout, gpt, batches, schedule, lambda _: None)
    looked_at = [batches.batch(0, index) for index in range(settings.data.microbatches)]
    seen: dict[str, Any] = {"losses": [], "grad_norms": [], "evaluations": []}
    for step in range(settings.num_steps):
        result = trainer.train_step(step)
        seen["losses"].append(result.loss)
        seen["grad_norms"].append(result.grad_norm)
        if evaluates:
            with torch.no_grad():
                found = run_schedule(schedule, settings, gpt, looked_at, forward_only=True)
            seen["evaluations"].append([each["loss"].item() for each in found])
    digest = hashlib.sha256()
    for chunk in gpt.chunks:
        for parameter in chunk.parameters():
            digest.update(parameter.detach().view(torch.uint8).numpy().tobytes())
    seen["parameters_sha256"] = digest.hexdigest()
    return seen


if __name__ == "__main__":
    main(sys.argv[1:])
