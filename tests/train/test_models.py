"""The GPT and the multimodal model start and learn the same in every layout."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rrfp.errors import UsageError
from rrfp.trace.run_dir import RunDir
from rrfp.train.checks import check_settings
from rrfp.train.data.batches import open_data
from rrfp.train.settings import TrainSettings
from rrfp.verify.sameness import LAYOUTS, variants_of, verify
from tests.e2e.ranks import run_ranks
from tests.megatron.multimodal import SMALL_SCENES, Gradients, Rig, batch_of
from tests.megatron.training import SMALL, ours

# The GPT: every layout starts from the same function.


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
            build_model(chosen, layout, SimpleNamespace(vocab_size=VOCABULARY)).chunks  # pyright: ignore[reportArgumentType]
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


def on_rigs(work: Callable[[Rig], Any], settings: dict[str, Any]) -> Any:
    """What `work` gives on this rank, in Megatron's groups; in a process of its own."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from rrfp.train.launch.process_groups import parallel_groups

    with parallel_groups(TrainSettings(**settings), timeout_s=120.0) as layout:
        return work(Rig(settings, layout))


def step_by(rig: Rig, **settings: Any) -> tuple[list[float], Gradients]:
    """A step of our schedule with these settings."""
    schedule = ours(**settings)
    found = rig.step(schedule)
    schedule.close()
    return found


ONE_RANK = {**SMALL_SCENES, "pp": 1, "chunks": 4}


def work_on_one_rank(rig: Rig) -> dict[str, Any]:
    from rrfp.train.settings import num_vision_stages

    return {
        "by hand": rig.by_hand(),
        "hints": [step_by(rig, hint=hint) for hint in ("bf", "bfw", "f-first")],
        "names": set(rig.parameters()),
        "vision stages": {num: num_vision_stages(num) for num in (2, 3, 4, 6, 8, 16)},
        "layers": [
            [layer.layer_number for layer in chunk.module.modules() if hasattr(layer, "mlp")]
            for chunk in rig.model.chunks
        ],
        "apart": _apart_and_packed(rig),
        "image": _influence_of_an_image(rig),
    }


def _apart_and_packed(rig: Rig) -> tuple[list[float], list[float]]:
    """Losses of documents in batches of their own, and packed into one."""
    documents: list[Any] = [((2, 3), 5), (None, 4), ((3, 1), 2)]
    packed: Any = batch_of(documents, multiple=8)
    apart = []
    for number in range(len(documents)):
        places = packed["document_ids"][0] == number
        patches = torch.isin(packed["image_slots"], places.nonzero()[:, 0])
        own: Any = {name: value[:, places] for name, value in packed.items() if value.shape[0] == 1}
        own |= {name: packed[name][patches] for name in ("patches", "patch_places")}
        own["image_slots"] = packed["image_slots"][patches] - int(places.nonzero()[0])
        own["patch_counts"] = torch.tensor([int(patches.sum())] if patches.any() else []).long()
        apart += rig.losses(own)[0].tolist()
    return apart, rig.losses(packed)[0].tolist()


def _influence_of_an_image(rig: Rig) -> list[float]:
    """By place, how much the losses change when the second of three images does."""
    documents: list[Any] = [((2, 2), 3), ((1, 3), 3), ((2, 1), 3)]
    batch, changed = batch_of(documents), batch_of(documents)
    changed["patches"][4:7] *= -1
    difference: list[float] = (rig.losses(batch) - rig.losses(changed)).abs()[0].tolist()
    return difference


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    (results,) = run_ranks(1, on_rigs, work_on_one_rank, ONE_RANK, timeout_s=120)
    assert isinstance(results, dict)
    return results


def test_hints_learn_what_the_stages_learn_by_hand(found: dict[str, Any]) -> None:
    losses, gradients = found["by hand"]
    assert len(set(losses)) == len(losses) == SMALL_SCENES["microbatches"]
    for hint_losses, hint_gradients in found["hints"]:
        assert hint_losses == losses
        assert hint_gradients == gradients


def test_every_parameter_has_its_name_in_the_whole_model(found: dict[str, Any]) -> None:
    assert found["layers"] == [[1], [2], [3], [4]]
    names = found["names"]
    assert {
        "embedding.weight",
        "encoder.layers.0.mlp.linear_fc1.weight",
        "encoder.layers.1.self_attention.linear_qkv.weight",
        "encoder.final_layernorm.weight",
        "projection.weight",
        "gpt.embedding.word_embeddings.weight",
        "gpt.decoder.layers.2.mlp.linear_fc1.weight",
        "gpt.decoder.layers.3.self_attention.linear_qkv.weight",
        "gpt.decoder.final_layernorm.weight",
        "gpt.output_layer.weight",
    } < names


def test_the_first_three_eighths_of_the_stages_see_images(found: dict[str, Any]) -> None:
    assert found["vision stages"] == {2: 1, 3: 1, 4: 2, 6: 2, 8: 3, 16: 6}


def test_packing_does_not_change_what_a_document_sees(found: dict[str, Any]) -> None:
    apart, packed = found["apart"]
    assert len(packed) == 24
    assert packed[: len(apart)] == pytest.approx(apart, abs=1e-5)


def test_an_image_is_seen_from_its_own_document_only(found: dict[str, Any]) -> None:
    changes = found["image"]
    own = range(7, 13)
    assert all(change == 0 for place, change in enumerate(changes) if place not in own)
    assert all(changes[place] > 1e-6 for place in own)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"pp": 1}, "needs a vision stage and a language stage, and there is 1 stage; add --pp 2"),
        ({"experts": 4}, "--model vlm has dense layers; leave --experts and --ep out"),
        ({"ep": 2}, "--model vlm has dense layers; leave --experts and --ep out"),
        ({"tp": 2, "sequence_parallel": True}, "which --sequence-parallel cannot divide"),
        ({"tie_embeddings": True}, "leave --tie-embeddings out"),
        ({"micro_batch_size": 2}, "leave --micro-batch-size 2 out"),
        ({"model": "vit"}, "--model is 'vit'; it must be one of gpt, vlm, moe"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        check_settings(TrainSettings(**{"model": "vlm", **settings}))


def test_experts_are_four_where_the_model_asks_for_them() -> None:
    asked: list[dict[str, Any]] = [
        {},
        {"experts": 8},
        {"model": "moe"},
        {"model": "moe", "experts": 8},
    ]
    assert [TrainSettings(**each).model.num_experts for each in asked] == [None, 8, 4, 8]


class Launched(Exception):  # noqa: N818
    """Carries the settings that would be launched."""


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name.startswith("vlm")])
def test_verify_trains_on_microbatches_with_and_without_images(layout: str, tmp_path: Path) -> None:
    def launch(settings: TrainSettings, _: RunDir) -> None:
        raise Launched(settings)

    with pytest.raises(Launched) as launched:
        verify(layout, variants_of(layout, ("bf",)), tmp_path, steps=1, launch=launch, device={})
    (settings,) = launched.value.args
    batches: Any = open_data(settings).batches(0)
    counts = [
        len(batches.batch(0, index)["patch_counts"]) for index in range(settings.data.microbatches)
    ]
    assert 0 in counts
    assert max(counts) > 1


def work_by_ours(rig: Rig) -> list[tuple[list[float], Gradients]]:
    placement = rig.layout.placement
    hints = ("bf", "bfw", "b-first", "zb-v")
    return [step_by(rig, hint=hint, placement=placement) for hint in hints]


@pytest.mark.timeout(250)
def test_a_v_learns_what_one_rank_learns() -> None:
    layout = {**SMALL_SCENES, "pp": 2, "chunks": 2, "placement": "v"}
    ranks = run_ranks(2, on_rigs, work_by_ours, layout, timeout_s=200)
    (first, second) = (results[0] for results in ranks)
    for results in ranks:
        assert all(result == results[0] for result in results)
    (whole,) = run_ranks(1, on_rigs, work_by_bf, ONE_RANK, timeout_s=100)
    assert whole == (first[0], first[1] | second[1])


def work_by_bf(rig: Rig) -> tuple[list[float], Gradients]:
    return step_by(rig, hint="bf")


@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    "settings",
    [{"dtype": "bf16"}, {"recompute": "full"}, {"recompute": "selective", "dtype": "bf16"}],
    ids=str,
)
def test_one_rank_learns_by_hand_what_hints_learn(settings: dict[str, Any]) -> None:
    (results,) = run_ranks(1, on_rigs, work_by_hand, {**ONE_RANK, **settings}, timeout_s=100)
    by_hand, *hints = results
    assert all(result == by_hand for result in hints)


def work_by_hand(rig: Rig) -> list[tuple[list[float], Gradients]]:
    return [rig.by_hand(), *(step_by(rig, hint=hint) for hint in ("bf", "bfw"))]
