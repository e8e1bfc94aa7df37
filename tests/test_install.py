"""`rrfp.megatron.install()`: the one line that a Megatron training script adds."""

import sys
from types import ModuleType
from typing import Any

from tests.ranks import run_ranks
from tests.training import SMALL


def test_a_training_loop_finds_ours_and_learns_the_same() -> None:
    for found_names, native, ours in run_ranks(2, train_before_and_after_installing, timeout_s=110):
        assert found_names == ["ForwardBackward"] * 3
        assert ours == native


def train_before_and_after_installing() -> tuple[list[str], list[float], list[float]]:
    """The classes of what the known places give once installed, and a run's losses before and
    after."""
    from rrfp.megatron.host import prepare_host

    prepare_host("cpu")
    from megatron.core import pipeline_parallel
    from megatron.core.pipeline_parallel import schedules

    import rrfp.megatron
    from rrfp.megatron.parallel import parallel_groups
    from rrfp.megatron.settings import TrainSettings

    # Megatron-LM's loop has imported the name by the time its user's script runs.
    loop: Any = ModuleType("megatron.training.training")
    loop.get_forward_backward_func = schedules.get_forward_backward_func
    sys.modules[loop.__name__] = loop

    settings = TrainSettings(**{**SMALL, "pp": 2})
    with parallel_groups(settings, timeout_s=60.0) as layout:
        native = _losses(settings, layout, loop.get_forward_backward_func())
        rrfp.megatron.install(rrfp.megatron.DispatchSettings(hint="fb"))
        found = [
            place.get_forward_backward_func() for place in (pipeline_parallel, schedules, loop)
        ]
        ours = _losses(settings, layout, found[-1])
        found[-1].close()
    return [type(function).__name__ for function in found], native, ours


def _losses(settings: Any, layout: Any, schedule: Any) -> list[float]:
    from rrfp.megatron.data import open_data
    from rrfp.megatron.model import build_model
    from rrfp.megatron.training import Trainer

    data = open_data(settings)
    gpt = build_model(settings, layout, data)
    batches = data.batches(layout.dp_rank)
    trainer = Trainer(settings, layout, gpt, batches, schedule, lambda _: None)
    return [trainer.train_step(step).loss for step in range(settings.num_steps)]
