"""The GPT: every layout starts from the same function."""

from typing import Any

import numpy as np
import numpy.typing as npt

from rrfp.megatron.settings import TrainSettings
from tests.ranks import run_ranks
from tests.training import SMALL

VOCABULARY = 257
PADDED_VOCABULARY = 320

Arrays = dict[str, tuple[int | None, npt.NDArray[np.float32]]]


def initial_parameters(settings: dict[str, Any]) -> Arrays:
    """This rank's parameters by their name in the whole model, each with the dimension it is cut
    along, if it is cut."""
    from rrfp.megatron.host import prepare_host

    prepare_host("cpu")
    from megatron.core.utils import unwrap_model

    from rrfp.megatron.model import build_gpt
    from rrfp.megatron.parallel import parallel_groups

    chosen = TrainSettings(**settings)
    with parallel_groups(chosen) as layout:
        gpt = unwrap_model(build_gpt(chosen, layout, VOCABULARY).module)
        first_layer = layout.pp_rank * (chosen.layers // chosen.pp)
        arrays: Arrays = {}
        for name, parameter in gpt.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(int(parts[2]) + first_layer)
            is_cut = getattr(parameter, "tensor_model_parallel", False)
            dimension = parameter.partition_dim if is_cut else None
            arrays[".".join(parts)] = (dimension, parameter.detach().numpy().copy())
        return arrays


def whole() -> Arrays:
    (arrays,) = run_ranks(1, initial_parameters, {**SMALL, "pp": 1}, timeout_s=60)
    return arrays


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
