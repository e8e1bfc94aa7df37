"""Layers that torch.compile has compiled learn the same out of order, bit for bit."""

from dataclasses import asdict
from typing import Any

import pytest
import torch

from rrfp.train.settings import TrainSettings
from tests.one_chunk import SMALL
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(300)

IN_ORDER = {"hint": "zb-v", "dispatch": "fixed"}


def learn(hints: list[dict[str, Any]], compiled: str) -> list[dict[str, Any]]:
    """What one rank with two chunks learns under each of these, layers or their MLPs compiled."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from torch._dynamo.utils import counters

    from rrfp.runtime.pace import Delays
    from rrfp.train.launch.process_groups import parallel_groups
    from rrfp.verify import rank

    module: Any = rank  # it declares no such name
    build = module.build_model

    def build_compiled(*arguments: Any) -> Any:
        model = build(*arguments)
        for chunk in model.chunks:
            for layer in chunk.module.decoder.layers:
                # It traces and splits graphs as ever, and needs no compiler of C++.
                (layer.get_submodule(compiled) if compiled else layer).compile(backend="aot_eager")
        return model

    base = TrainSettings(**SMALL, chunks=2, placement="v", microbatches=4, steps=2, dropout=0.1)
    found: list[dict[str, Any]] = []
    with parallel_groups(base) as layout:
        for hint in hints:
            torch.compiler.reset()
            module.build_model = build_compiled if found else build
            num_compiled = counters["stats"]["unique_graphs"]
            learned = rank._learn(base.changed(**hint), layout, Delays(0, layout.rank, 0.0))
            found.append(asdict(learned))
            assert (counters["stats"]["unique_graphs"] > num_compiled) is (len(found) > 1)
    return found


@pytest.mark.parametrize("compiled", ["mlp", pytest.param("", marks=pytest.mark.slow)])
def test_compiled_layers_learn_the_same(compiled: str) -> None:
    hints = [IN_ORDER, {"hint": "zb-v"}, {"hint": "f-first"}]
    ((reference, *others),) = run_ranks(1, learn, hints, compiled, timeout_s=250)
    assert others == [reference] * 2
