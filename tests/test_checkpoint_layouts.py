"""A checkpoint holds the same whichever layout wrote it, and every layout reads all of it."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rrfp.megatron.cpu.patches import prepare_cpu
from rrfp.trace.run_dir import RunDir
from rrfp.train.checkpoints.directory import CheckpointDir
from rrfp.train.checkpoints.reading import differences
from rrfp.train.settings import TrainSettings
from tests.checkpointed import newest, settings_in, tensors_of, train
from tests.ranks import run_ranks
from tests.trained import read_metrics

pytestmark = pytest.mark.timeout(300)

STEPS = 2


def save_again(settings: str, source: str, target: str) -> None:
    """On a rank: load a checkpoint into this layout, and save it as it came."""
    prepare_cpu()
    from rrfp.train.checkpoints.saving import Saver, Session
    from rrfp.train.checkpoints.tensors import TrainedTensors, load
    from rrfp.train.data.open import open_data
    from rrfp.train.launch.collectives import no_objects
    from rrfp.train.launch.process_groups import parallel_groups
    from rrfp.train.models.model import build_model

    told = TrainSettings.from_json(settings)
    with parallel_groups(told) as layout, no_objects():
        model = build_model(told, layout, open_data(told))
        tensors = TrainedTensors(model, told, layout)
        checkpoint = CheckpointDir(Path(source)).newest()
        assert checkpoint is not None
        load(checkpoint, told, layout, tensors)
        run = RunDir(Path(source).parent / "run")
        copy = partial(shutil.copyfile, run.metrics)
        saver = Saver(CheckpointDir(Path(target)), Session(run), told, layout, tensors, copy)
        saver.save(checkpoint.step)


def passed_on(source: Path, target: Path, **flags: Any) -> list[str]:
    """Load the newest checkpoint of a run into another layout and save it again; the names of the
    tensors that are no longer the same."""
    settings = settings_in(target, **flags)
    CheckpointDir(target / "ck").prepare()
    asked = settings.to_json(), str(source / "ck"), str(target / "ck")
    run_ranks(settings.layout.world_size, save_again, *asked, timeout_s=120)
    return differences(tensors_of(newest(source)), tensors_of(newest(target)))


MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "tied": {"tie_embeddings": True},
    "bf16": {"dtype": "bf16"},
    "moe": {"model": "moe", "experts": 4},
    "vlm": {"model": "vlm", "layers": 8},
    "mlp": {"model": "mlp"},
}

DIVIDED = {"dp": 2, "microbatches": 2, "distributed_optimizer": True}

LAYOUTS = [
    ("gpt", {"pp": 1, "chunks": 2}),
    ("gpt", {"chunks": 2, "placement": "v", "tp": 2, "sequence_parallel": True}),
    ("gpt", {"pp": 1, "tp": 2, **DIVIDED}),
    ("moe", {"pp": 1, "ep": 2, **DIVIDED}),
    ("bf16", {"pp": 1, **DIVIDED}),
]
MORE_LAYOUTS = [
    ("gpt", {"pp": 4}),
    ("gpt", {"pp": 4, "dp": 2, "microbatches": 2}),
    ("gpt", {"pp": 1}),
    ("tied", {"pp": 1}),
    ("tied", {"pp": 4, **DIVIDED}),
    ("tied", {"chunks": 2, "tp": 2}),
    ("bf16", {"pp": 4, "tp": 2, "sequence_parallel": True}),
    ("moe", {"tp": 2, "sequence_parallel": True}),
    ("moe", {"pp": 4, "ep": 2, "dp": 2, "microbatches": 2}),
    ("vlm", {"pp": 4}),
    ("vlm", {"chunks": 2, "placement": "v", "tp": 2}),
    ("mlp", {"pp": 4, "tp": 2}),
]


@pytest.mark.parametrize(
    ("model", "layout"),
    [*LAYOUTS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_LAYOUTS)],
)
def test_every_layout_reads_and_writes_the_same(
    tmp_path: Path, model: str, layout: dict[str, Any]
) -> None:
    kind = MODELS[model]
    train(tmp_path / "first", STEPS, **kind)
    assert passed_on(tmp_path / "first", tmp_path / "there", **{**kind, **layout}) == []
    # And back, from what that layout wrote.
    (tmp_path / "there" / "run").mkdir()
    (tmp_path / "there" / "run" / "metrics.jsonl").write_text("")
    assert passed_on(tmp_path / "there", tmp_path / "back", **kind) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "num_exact"),
    [
        ({"pp": 4}, 1),
        ({"chunks": 2}, 1),
        ({"chunks": 2, "placement": "v"}, 1),
        ({"distributed_optimizer": True}, 1),
        ({"tp": 2}, 0),
        ({"dp": 2, "microbatches": 2}, 0),
        ({"pp": 1, **DIVIDED}, 0),
        ({"dispatch": "megatron"}, STEPS),
        ({"recompute": "full"}, STEPS),
    ],
)
def test_training_goes_on_under_another_layout(
    tmp_path: Path, layout: dict[str, Any], num_exact: int
) -> None:
    """To the last bit where the arithmetic is the same. Under another layout the norm of the
    gradient is summed in other parts, and replicas add gradients in another order."""
    for name in ("whole", "parts"):
        train(tmp_path / name, STEPS if name == "parts" else 2 * STEPS)
    train(tmp_path / "parts", 2 * STEPS, resume=True, **layout)
    whole, parts = (tensors_of(newest(tmp_path / name)) for name in ("whole", "parts"))
    if num_exact == STEPS:
        assert differences(whole, parts) == []
    worst = max((whole[name] - parts[name]).abs().max() for name in whole)
    assert worst < 1e-6
    lines = [read_metrics(tmp_path / name / "run") for name in ("whole", "parts")]
    assert [line["step"] for line in lines[1]] == [*range(2 * STEPS)]
    for ours, theirs in zip(*lines, strict=True):
        # The same items are drawn in each step.
        assert ours["tokens"] == theirs["tokens"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    for ours, theirs in zip(*(told[: STEPS + num_exact] for told in lines), strict=True):
        assert ours["loss"] == theirs["loss"]


@pytest.mark.slow
def test_native_to_ours_and_back(tmp_path: Path) -> None:
    for name in ("ours", "native", "mixed"):
        dispatch = {} if name == "ours" else {"dispatch": "megatron"}
        train(tmp_path / name, STEPS if name == "mixed" else 3 * STEPS, **dispatch)
    train(tmp_path / "mixed", 2 * STEPS, resume=True, hint="bfw")
    train(tmp_path / "mixed", 3 * STEPS, resume=True, dispatch="megatron")
    mixed = tensors_of(newest(tmp_path / "mixed"))
    for name in ("ours", "native"):
        assert differences(mixed, tensors_of(newest(tmp_path / name))) == []


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["ready", "megatron"])
def test_dropout_goes_on_with_the_same_masks(tmp_path: Path, dispatch: str) -> None:
    """Also in Megatron's own schedule, whose random states advance by what it draws."""
    flags = {"dropout": 0.1, "dispatch": dispatch, "tp": 2, "sequence_parallel": True}
    train(tmp_path / "whole", 2 * STEPS, **flags)
    train(tmp_path / "parts", STEPS, **flags)
    train(tmp_path / "parts", 2 * STEPS, resume=True, **flags)
    found = (tensors_of(newest(tmp_path / name)) for name in ("whole", "parts"))
    assert differences(*found) == []


@pytest.mark.slow
def test_under_another_layout_dropout_draws_as_if_it_had_begun_there(tmp_path: Path) -> None:
    """Masks belong to a step, a stage and a microbatch: with other stages there are others. The
    random states are then those of a run that trained there from the start."""
    flags = {"dropout": 0.1}
    other = {"pp": 4, **flags}
    train(tmp_path / "there", STEPS, **other)
    train(tmp_path / "here", STEPS, **flags)
    states = []
    for name in ("there", "here"):
        settings = settings_in(tmp_path / f"from-{name}", **other)
        CheckpointDir(tmp_path / f"from-{name}" / "ck").prepare()
        asked = settings.to_json(), str(tmp_path / name / "ck"), str(tmp_path / f"from-{name}/ck")
        states.append(run_ranks(4, named_states, *asked, timeout_s=120))
    assert len(states[0][0]) > 1
    assert states[0] == states[1]


def named_states(settings: str, source: str, target: str) -> dict[str, bytes]:
    """On a rank: Megatron's named random states after a checkpoint was loaded."""
    save_again(settings, source, target)
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    states = get_cuda_rng_tracker().get_states()
    return {name: state.numpy().tobytes() for name, state in states.items()}


def states_after(settings: str, steps: tuple[int, ...]) -> list[list[bytes]]:
    """On a rank: its random states as it begins, and after so many steps of another layout."""
    prepare_cpu()
    import torch
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from rrfp.train.checkpoints.tensors import start_again
    from rrfp.train.launch.process_groups import parallel_groups, seed_random_states

    def states() -> list[bytes]:
        named = get_cuda_rng_tracker().get_states().values()
        return [state.numpy().tobytes() for state in (torch.get_rng_state(), *named)]

    told = TrainSettings.from_json(settings)
    with parallel_groups(told) as layout:
        found = [states()]
        for step in steps:
            seed_random_states(told, layout)
            start_again(told, layout, step)
            found.append(states())
        return found


def test_megatrons_own_schedule_repeats_no_masks_on_another_layout(tmp_path: Path) -> None:
    """It draws from these states themselves, so none may be as it was before."""
    settings = settings_in(tmp_path, pp=1, dispatch="megatron", dropout=0.1)
    (found,) = run_ranks(1, states_after, settings.to_json(), (2, 3, 2))
    fresh, after_2, after_3, after_2_again = found
    assert after_2 == after_2_again
    for one, other in ((fresh, after_2), (fresh, after_3), (after_2, after_3)):
        assert all(a != b for a, b in zip(one, other, strict=True))
