"""A Megatron job as its user has it, for tests: it trains a small GPT by a schedule that it asks
Megatron for, and knows nothing of how that runs.

    python tests/megatron/user_job.py OUT SETTINGS [--by-name] [--evaluate] [--install RUN]

`SETTINGS` are some of `rrfp train`'s, as JSON. Each rank writes what it saw to OUT/RANK.json.
`--by-name` imports the function that Megatron would choose, `--evaluate` evaluates after each step,
and `--install` calls `install()` by itself.
"""

import hashlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any


def main(arguments: list[str]) -> None:
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from rrfp.train.launch.process_groups import parallel_groups
    from rrfp.train.settings import TrainSettings
    from tests.megatron.training import SMALL

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
    """The training results of one rank."""
    import torch

    from rrfp.train.data.batches import open_data
    from rrfp.train.loop import Trainer, run_schedule
    from rrfp.train.models.model import build_model
    from rrfp.train.ordered_batches import OrderedBatches

    data = open_data(settings)
    gpt = build_model(settings, layout, data)
    batches = data.batches(layout.dp_rank)
    ordered = OrderedBatches(settings, layout, data)
    trainer = Trainer(settings, layout, gpt, ordered, schedule, lambda _: None)
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


# Another job, in processes that have imported nothing yet.

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
NOT_OF_A_JOB = ("typer", "rich", "polars", "perfetto", "google.protobuf", "PIL", "tokenizers")


def run_example(run: str, *, installs: bool) -> list[str]:
    """Train and record the example on this rank, by `rrfp run` or by `install()`, and return the
    loaded packages that no job needs. An import of such a package by rrfp fails at once."""
    sys.meta_path.insert(0, _OnlyOfAJob())
    arguments = [str(EXAMPLE), "--pp", "2", "--steps", "3"]
    if installs:
        from rrfp.megatron import DispatchSettings, install

        install(DispatchSettings(hint="bfw"), out=run, steps="1:", at_import=True)
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        from rrfp.cli.main import main

        sys.argv = ["rrfp", "run", "--hint", "bfw", "--out", run, "--steps", "1:", *arguments]
        assert main() == 0
    from rrfp.runtime.exit_hooks import at_end

    # The processes of a test end in another way than those of a job.
    at_end.run()
    return [name for name in NOT_OF_A_JOB if name in sys.modules]


class _OnlyOfAJob:
    """Refuses imports by rrfp of packages other than torch, Megatron-Core, NumPy and Python's."""

    def find_spec(self, name: str, *_: object) -> None:
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename and frame.f_back is not None:
            frame = frame.f_back
        whose = str(frame.f_globals.get("__name__"))
        allowed = {"rrfp", "torch", "megatron", "numpy", *sys.stdlib_module_names}
        if whose.startswith("rrfp") and name.partition(".")[0] not in allowed:
            raise AssertionError(f"{whose} imports {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
