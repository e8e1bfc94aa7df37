"""Features of newer releases of Megatron-Core: supported, or refused with the reason."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from rrfp.errors import UsageError
from rrfp.schedule.shape import Shape
from tests.e2e.ranks import run_ranks
from tests.megatron.training import (
    MICROBATCHES,
    SMALL,
    TIMEOUT_S,
    Rig,
    backwards_in_reverse,
    native,
    on_rigs,
    ours,
)

pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)

ROOT = Path(__file__).parents[2]

PP2 = {**SMALL, "pp": 2}


VARIABLE = "RRFP_MEGATRON_MAIN"
"""The environment variable with a checkout of Megatron-LM's branch `main`."""


@pytest.mark.slow
@pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no checkout")
def test_on_the_branch_main() -> None:
    """Megatron-Core without a release. The Python that runs this must fit the checkout."""
    tests = (
        "test_compatibility.py",
        "test_gradient_hooks.py",
        "test_weight_gradients.py",
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
        + [str(Path(__file__).with_name(name)) for name in tests],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ[VARIABLE]}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout


def outcomes(rig: Rig, reverse: str) -> list[Any]:
    """A step under Megatron's own schedule, and under ours in three orders."""
    schedules = [native(), ours(), ours(hint="bfw"), ours(hint=reverse)]
    found = [rig.run(schedule) for schedule in schedules]
    for schedule in schedules[1:]:
        schedule.close()
    return found


def has(module: str) -> bool:
    return find_spec(f"megatron.core.{module}") is not None


@pytest.fixture
def reverse(tmp_path: Path) -> str:
    return backwards_in_reverse(tmp_path / "reverse.csv", Shape(2, MICROBATCHES))


@pytest.mark.skipif(not has("models.hybrid"), reason="HybridModel came after this Megatron-Core")
def test_a_hybrid_model_learns_the_same(reverse: str) -> None:
    """It replaces GPTModel, whose layers are halved there: attention is one, the MLP another."""
    for expected, *found in run_ranks(2, on_rigs, run_hybrid, PP2, reverse, timeout_s=TIMEOUT_S):
        assert found == [expected] * len(found)


def run_hybrid(layout: Any, settings: dict[str, Any], reverse: str) -> list[Any]:
    from megatron.core.models import gpt
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def model(**given: Any) -> Any:
        (spec, *_) = given.pop("transformer_layer_spec").layer_specs
        given["position_embedding_type"] = "rope"
        return HybridModel(
            **given, hybrid_stack_spec=stack_spec(spec), hybrid_layer_pattern="*-*-|*-*-"
        )

    with (
        patch.object(gpt, "GPTModel", model),
        # A stack's last norm is Transformer Engine's, whatever its layers are made of.
        patch.object(hybrid_block, "TENorm", WrappedTorchNorm),
    ):
        rig = Rig(settings, layout)
    assert type(rig.gpt.chunks[0].module).__name__ == "HybridModel"
    return outcomes(rig, reverse)


def stack_spec(layer: Any) -> Any:
    """The halves of a layer of GPT's as the layers of a stack."""
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    whole = layer.submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=whole.input_layernorm,
        self_attention=whole.self_attention,
        self_attn_bda=whole.self_attn_bda,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=whole.pre_mlp_layernorm, mlp=whole.mlp, mlp_bda=whole.mlp_bda
    )
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        ),
    )


def test_scales_of_their_own_for_auxiliary_losses(reverse: str) -> None:
    """`moe_grad_scale_func`: older releases leave it alone, newer ones call it."""
    for expected, *found in run_ranks(2, on_rigs, run_scaled, PP2, reverse, timeout_s=TIMEOUT_S):
        assert found == [expected] * len(found)


def run_scaled(layout: Any, settings: dict[str, Any], reverse: str) -> list[Any]:
    rig = Rig({**settings, "experts": 4}, layout)
    rig.gpt.config.moe_grad_scale_func = lambda: torch.tensor(3.0)
    return outcomes(rig, reverse)


def test_loops_pass_the_groups_of_the_schedule() -> None:
    run_ranks(1, on_rigs, ask_with_groups, {**SMALL, "pp": 1}, timeout_s=TIMEOUT_S)


def ask_with_groups(layout: Any, settings: dict[str, Any]) -> None:
    """The third argument of `get_forward_backward_func`: of one model, and of several."""
    from megatron.core import process_groups_config
    from megatron.core.process_groups_config import ProcessGroupCollection

    from rrfp.megatron import get_forward_backward_func

    one = ProcessGroupCollection()
    schedule = get_forward_backward_func(schedule_pg_collection=one)
    rig = Rig(settings, layout)
    assert rig.run(schedule) == rig.run(native())
    several = getattr(process_groups_config, "MultiModuleProcessGroupCollection", None)
    if several is None:
        return
    modules = several({"encoder": one, "llm": one}, language_model_module_name="llm")
    with pytest.raises(UsageError, match=r"a multi-module pipeline \(encoder, llm\) cannot run"):
        get_forward_backward_func(schedule_pg_collection=modules)
    with pytest.raises(UsageError, match=r"a multi-module pipeline \(encoder, llm\) cannot run"):
        rig.run(schedule, p2p_communicator=object(), pg_collection=modules)


@pytest.mark.parametrize("pattern", ["Ett|tL", "Et|ttL", "Ettt|L"])
def test_layers_laid_out_unevenly(pattern: str, reverse: str) -> None:
    """`pipeline_model_parallel_layout`, to a last stage of the loss alone."""
    for expected, *found in run_ranks(
        2, on_rigs, run_laid_out, {**PP2, "layers": 3}, pattern, reverse, timeout_s=TIMEOUT_S
    ):
        assert found == [expected] * len(found)


def run_laid_out(layout: Any, settings: dict[str, Any], pattern: str, reverse: str) -> list[Any]:
    from megatron.core import transformer
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    configured: Callable[..., Any] = partial(
        transformer.TransformerConfig, pipeline_model_parallel_layout=pattern
    )

    def chunk(_settings: Any, layout: Any, config: Any, _chunk: int, num_tokens: int) -> Any:
        return GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=-(-num_tokens // 64) * 64,
            max_sequence_length=settings["seq_length"],
            pre_process=layout.pp_rank == 0,
            post_process=layout.pp_rank == 1,
        )

    torch.manual_seed(dist.get_rank())
    with (
        patch.object(transformer, "TransformerConfig", configured),
        patch("rrfp.train.models.gpt.build_chunk", chunk),
    ):
        rig = Rig(settings, layout)
    num_layers = len(rig.gpt.chunks[0].module.decoder.layers)
    assert num_layers == pattern.split("|")[layout.pp_rank].count("t")
    return outcomes(rig, reverse)
