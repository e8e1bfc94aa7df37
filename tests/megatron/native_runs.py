"""Training with Megatron's own schedule as somebody else's script would, traced or not."""

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from rrfp.trace.check import check_contents
from rrfp.trace.locate import resolve_trace
from rrfp.trace.perfetto.reader import TraceContents, read_contents
from rrfp.trace.records import Phase, Recording
from tests.megatron.training import SMALL


@dataclass(slots=True)
class NativeRun:
    """The results of a run on one rank."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    parameters_sha256: str = ""
    profile: dict[str, Any] = field(default_factory=dict)
    """All steps except the first."""


def train(
    settings: dict[str, Any],
    out: Path | None = None,
    export: Callable[[Any], dict[str, Any]] | None = None,
    *,
    evaluates: bool = False,
) -> NativeRun:
    """Train on this rank; runs in a process of its own. `out`: under trace_native; `export`: and
    under torch.profiler, whose profile it turns into JSON. `evaluates`: after each step."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from rrfp.megatron import trace_native
    from rrfp.train.launch.process_groups import parallel_groups
    from rrfp.train.settings import TrainSettings

    chosen = TrainSettings(**{**SMALL, **settings})
    if out is not None:
        trace_native(out)
    with parallel_groups(chosen) as layout:
        return run_steps(chosen, layout, export, evaluates=evaluates)


def run_steps(
    settings: Any,
    layout: Any,
    export: Callable[[Any], dict[str, Any]] | None = None,
    *,
    evaluates: bool = False,
) -> NativeRun:
    """The steps of a run, by whatever Megatron's function is at its usual place."""
    from megatron.core.pipeline_parallel import schedules

    from rrfp.train.data.batches import open_data
    from rrfp.train.launch.process_groups import seed_random_states
    from rrfp.train.loop import Trainer, run_schedule
    from rrfp.train.models.model import build_model
    from rrfp.train.ordered_batches import OrderedBatches

    seed_random_states(settings, layout)
    data = open_data(settings)
    gpt = build_model(settings, layout, data)
    batches = data.batches(layout.dp_rank)
    schedule = schedules.get_forward_backward_func()
    ordered = OrderedBatches(settings, layout, data)
    trainer = Trainer(settings, layout, gpt, ordered, schedule, lambda _: None)
    looked_at = [batches.batch(0, index) for index in range(settings.data.microbatches)]
    run = NativeRun()
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    for step in range(settings.num_steps):
        if step == 1 and export is not None:
            profiler.start()
        result = trainer.train_step(step)
        run.losses.append(result.loss)
        run.grad_norms.append(result.grad_norm)
        if evaluates:
            with torch.no_grad():
                run_schedule(schedule, settings, gpt, looked_at, forward_only=True)
        if step and export is not None:
            profiler.step()
    if export is not None:
        profiler.stop()
        run.profile = export(profiler)
    digest = hashlib.sha256()
    for chunk in gpt.chunks:
        for parameter in chunk.parameters():
            digest.update(parameter.detach().view(torch.uint8).numpy().tobytes())
    run.parameters_sha256 = digest.hexdigest()
    return run


# A Megatron job run by `rrfp run` on a test's ranks, and what its recording says.


ROOT = Path(__file__).parents[2]
JOB = ROOT / "tests" / "megatron" / "user_job.py"


def run_script(options: list[str], arguments: list[str]) -> None:
    """Run the job by `rrfp run` on this rank; in a process of its own."""
    from rrfp.cli.main import main
    from rrfp.runtime.exit_hooks import at_end

    sys.argv = ["rrfp", "run", *options, str(JOB), *arguments]
    assert main() == 0
    # The processes of a test end in another way than those of a job.
    at_end.run()


def run_script_beside(protobuf: str, options: list[str], arguments: list[str]) -> None:
    """The same in an environment that seems to have this version of protobuf."""
    real = metadata.version
    with patch.object(
        metadata, "version", lambda name: {"protobuf": protobuf}.get(name) or real(name)
    ):
        run_script(options, arguments)


def read_whole(run: Path) -> TraceContents:
    contents = read_contents(resolve_trace(run))
    assert check_contents(contents) == []
    return contents


def steps_of(recording: Recording) -> set[tuple[int, ...]]:
    """The steps that each rank recorded, in the order in which they ended."""
    return {
        tuple(phase.step for phase in rank.phases if phase.phase == Phase.SCHEDULE)
        for rank in recording.ranks
    }
