"""The GPT: every layout starts from the same function."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rrfp.train.settings import TrainSettings
from tests.ranks import run_ranks
from tests.training import SMALL

VOCABULARY = 257
PADDED_VOCABULARY = 320

Arrays = dict[str, tuple[int | None, npt.NDArray[np.float32]]]


def initial_parameters(settings: dict[str, Any]) -> Arrays:
    """This rank's parameters by their name in the whole model, each with the dimension it is cut
    along, if it is cut."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from megatron.core.utils import unwrap_model

    from rrfp.train.launch.process_groups import parallel_groups
    from rrfp.train.models.model import build_model

    chosen = TrainSettings(**settings)
    num_layers = chosen.model.layers // (chosen.layout.pp * chosen.layout.chunks)
    num_experts = (chosen.model.experts or 0) // chosen.layout.ep
    with parallel_groups(chosen) as layout:
        arrays: Arrays = {}
        chunks = unwrap_model(
            build_model(chosen, layout, SimpleNamespace(vocab_size=VOCABULARY)).chunks
        )
        for stage, gpt in zip(layout.stages, chunks, strict=True):
            first_layer = stage * num_layers
            numbers = [layer.layer_number for layer in gpt.decoder.layers]
            assert numbers == list(range(first_layer + 1, first_layer + num_layers + 1))
            for name, parameter in gpt.named_parameters():
                parts = name.split(".")
                if parts[:2] == ["decoder", "layers"]:
                    parts[2] = str(int(parts[2]) + first_layer)
                if "local_experts" in parts:
                    parts[6] = str(int(parts[6]) + layout.ep_rank * num_experts)
                is_cut = getattr(parameter, "tensor_model_parallel", False)
                dimension = parameter.partition_dim if is_cut else None
                arrays[".".join(parts)] = (dimension, parameter.detach().float().numpy().copy())
        return arrays


@cache
def whole(**flags: Any) -> Arrays:
    (arrays,) = run_ranks(1, initial_parameters, {**SMALL, "pp": 1, **flags}, timeout_s=60)
    return arrays


@pytest.mark.slow
def test_stages_hold_the_layers_of_the_whole_model_and_slices_its_columns() -> None:
    reference = whole()
    stages = run_ranks(2, initial_parameters, {**SMALL, "pp": 2}, timeout_s=60)
    assert not stages[0].keys() & stages[1].keys()
    assert stages[0].keys() | stages[1].keys() == reference.keys()
    for stage in stages:
        for name, (_, values) in stage.items():
            assert np.array_equal(values, reference[name][1]), name

    slices = run_ranks(2, initial_parameters, {**SMALL, "pp": 1, "tp": 2}, timeout_s=60)
    num_cut = 0
    for name, (_, values) in reference.items():
        dimension, first = slices[0][name]
        second = slices[1][name][1]
        if dimension is None:
            assert np.array_equal(first, values), name
            assert np.array_equal(second, values), name
        else:
            num_cut += 1
            assert np.array_equal(np.concatenate((first, second), dimension), values), name
    assert num_cut > 4 * SMALL["layers"]


@pytest.mark.parametrize(
    ("layout", "placement"),
    [({"pp": 2, "placement": "v"}, [{0, 3}, {1, 2}]), ({"pp": 2}, [{0, 2}, {1, 3}])],
    ids=["v", "loop"],
)
def test_chunks_hold_the_layers_of_their_stages(
    layout: dict[str, Any], placement: list[set[int]]
) -> None:
    reference = whole()
    ranks = run_ranks(2, initial_parameters, {**SMALL, "chunks": 2, **layout}, timeout_s=60)
    for arrays, layers in zip(ranks, placement, strict=True):
        names = {
            name
            for name in reference
            if name.startswith("decoder.layers.") and int(name.split(".")[2]) in layers
        }
        if 0 in layers:
            names.add("embedding.word_embeddings.weight")
        if 3 in layers:
            names |= {name for name in reference if "final_layernorm" in name}
            names.add("output_layer.weight")
        assert arrays.keys() == names
        for name, (_, values) in arrays.items():
            assert np.array_equal(values, reference[name][1]), name


def test_chunks_on_a_single_rank_are_the_whole_model() -> None:
    assert_same(whole(chunks=4), whole())


@pytest.mark.slow
def test_experts_are_numbered_over_the_ranks_that_share_them() -> None:
    reference = whole(experts=4)
    ranks = run_ranks(
        2, initial_parameters, {**SMALL, "pp": 1, "ep": 2, "experts": 4}, timeout_s=60
    )
    shared = ranks[0].keys() & ranks[1].keys()
    assert not any("local_experts" in name for name in shared)
    assert sum("local_experts" in name for name in ranks[1]) == SMALL["layers"] * 2 * 2
    assert_same(ranks[0] | ranks[1], reference)
    for name in shared:
        assert np.array_equal(ranks[0][name][1], ranks[1][name][1]), name


@pytest.mark.slow
def test_a_tied_output_layer_starts_as_the_embedding() -> None:
    first, last = run_ranks(
        2, initial_parameters, {**SMALL, "pp": 2, "tie_embeddings": True}, timeout_s=60
    )
    embedding = first["embedding.word_embeddings.weight"][1]
    assert np.array_equal(last["output_layer.weight"][1], embedding)
    assert "output_layer.weight" not in whole(tie_embeddings=True)
    assert np.array_equal(whole()["embedding.word_embeddings.weight"][1], embedding)


def test_bf16_starts_from_the_rounded_parameters() -> None:
    rounded = {
        name: (dimension, torch.from_numpy(values).bfloat16().float().numpy())
        for name, (dimension, values) in whole().items()
    }
    assert_same(whole(dtype="bf16"), rounded)


def assert_same(arrays: Arrays, reference: Arrays) -> None:
    assert arrays.keys() == reference.keys()
    for name, (_, values) in arrays.items():
        assert np.array_equal(values, reference[name][1]), name


def test_parameters_have_megatrons_scales_and_padded_vocabulary() -> None:
    reference = {name: values for name, (_, values) in whole().items()}
    assert reference["embedding.word_embeddings.weight"].shape == (
        PADDED_VOCABULARY,
        SMALL["hidden"],
    )
    scaled = 0.02 / np.sqrt(2 * SMALL["layers"])
    for name, values in reference.items():
        if values.ndim == 2:
            expected = scaled if name.endswith(("proj.weight", "fc2.weight")) else 0.02
            assert abs(values.std() / expected - 1) < 0.1, name
        else:
            assert np.array_equal(values, np.full_like(values, "norm.weight" in name)), name
    matrices = [values for values in reference.values() if values.shape == (32, 32)]
    assert len({values.tobytes() for values in matrices}) == len(matrices)
    other = run_ranks(1, initial_parameters, {**SMALL, "pp": 1, "seed": 1}, timeout_s=60)[0]
    name = "output_layer.weight"
    assert not np.array_equal(other[name][1], reference[name])
