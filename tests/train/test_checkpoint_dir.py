"""A directory of checkpoints: a whole one counts, under its own name, and no other does."""

import errno
import os
import queue
import re
import shutil
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from rrfp.megatron.cpu.checkpoints import _staged, _write
from rrfp.megatron.cpu.patches import prepare_cpu
from rrfp.trace.run_dir import RunDir
from rrfp.train.checkpoints import saving as session
from rrfp.train.checkpoints import tensors as loading
from rrfp.train.checkpoints.directory import CheckpointDir
from rrfp.train.checkpoints.reading import differences
from rrfp.train.checkpoints.run_start import start_or_resume
from rrfp.train.settings import TrainSettings
from tests.e2e.ranks import RankFailedError, run_ranks
from tests.train.checkpointed import (
    describe,
    made_up,
    newest,
    settings_in,
    tensors_of,
    train,
    train_prepared,
    work,
)
from tests.train.trained import read_metrics

pytestmark = pytest.mark.timeout(300)


STEPS = 6


def cut_off(path: Path) -> None:
    (path / "tensors").write_bytes(b"x" * 99)


def without(name: str, path: Path) -> None:
    (path / name).unlink()


def torn_description(path: Path) -> None:
    (path / "checkpoint.json").write_text('{"format": ')


def of_another_step(path: Path) -> None:
    describe(path, step=5)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_off, "tensors has 99 bytes and not 100"),
        (partial(without, "tensors"), "tensors is missing"),
        (partial(without, "checkpoint.json"), "checkpoint.json is missing"),
        (torn_description, "checkpoint.json is not JSON"),
        (of_another_step, "checkpoint.json is that of step 5"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    found = made_up(tmp_path, 2, 4, 6)
    damage(tmp_path / "ck" / "step-00000006")
    told: list[str] = []
    checkpoint = found.newest(told.append)
    assert checkpoint is not None
    assert checkpoint.step == 4
    assert len(told) == 1
    assert said in told[0]
    # It is replaced when the run comes there again, and counts for nothing until then.
    found.remove_older(1)
    assert {path.name for path in (tmp_path / "ck").iterdir() if path.is_dir()} == {
        "step-00000004",
        "step-00000006",
    }
    made_up(tmp_path, 6)
    again = found.newest()
    assert again is not None
    assert again.step == 6


def test_the_newest_checkpoints_remain(tmp_path: Path) -> None:
    found = made_up(tmp_path, 2, 4, 6, 8)
    found.remove_older(3)
    assert [path.name[-1] for path in sorted((tmp_path / "ck").glob("step-*"))] == ["4", "6", "8"]


def test_a_directory_that_cannot_be_listed_keeps_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new checkpoint is complete by then, so that the run continues."""
    found = made_up(tmp_path, 2, 4)

    def refuse(_: Path) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", refuse)
        found.remove_older(1)
    assert len([*(tmp_path / "ck").glob("step-*")]) == 2


def test_ranks_look_again_whether_the_directory_is_unused(tmp_path: Path) -> None:
    """Another run may have saved there after the launcher looked."""
    settings = settings_in(tmp_path)
    run = start_or_resume(settings, lambda _: None).run
    made_up(tmp_path, 2)
    with pytest.raises(RankFailedError, match="has the checkpoint of step 2 of another run"):
        run_ranks(2, work, run, settings.to_json(), None, timeout_s=120)


def test_copied_checkpoints_leave_the_run_of_the_first_ones_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = settings_in(tmp_path)
    start_or_resume(settings, lambda _: None)
    made_up(tmp_path, 2)
    shutil.copytree(tmp_path / "ck", tmp_path / "copied")
    told: list[str] = []
    copied = settings.changed(save=tmp_path / "copied", out=None, resume=True)
    beginning = start_or_resume(copied, told.append)
    assert beginning.run.path.parent == Path("runs")
    assert told[0].startswith("The run in run saves to another directory")
    assert beginning.first_step == 2


@pytest.mark.parametrize(
    "name", ["/etc", "..", "", ".", "step-1/../..", "step-00000001/x", ".saving-probe", "step-1"]
)
def test_what_is_no_checkpoints_name_leads_nowhere(tmp_path: Path, name: str) -> None:
    found = CheckpointDir(tmp_path)
    with pytest.raises(ValueError, match="is not the name of a checkpoint"):
        found.path_of(name)
    begun = found.begin(12)
    assert found.path_of(begun.name) == begun
    assert found.path_of("step-00000012") == tmp_path / "step-00000012"


def test_a_checkpoint_that_rank_0_names_elsewhere_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"session": 1, "name": str(tmp_path)}
    monkeypatch.setattr(session, "broadcast_json", lambda _, decode: decode(told))
    rank_1: Any = SimpleNamespace(rank=1)
    with (
        pytest.raises(ValueError, match="is not the name of a checkpoint"),
        session.session_of(RunDir(tmp_path / "run"), settings_in(tmp_path), rank_1),
    ):
        pass


def elsewhere_on_rank_1(directory: Path) -> None:
    """Another host has another directory of the same name."""
    from rrfp.train.checkpoints import saving

    own = saving.Saver._begin

    def begin(saver: Any, step: int) -> Path:
        path = own(saver, step)
        assert path is not None
        return path if os.environ["RANK"] == "0" else directory / path.name

    setattr(saving.Saver, "_begin", begin)  # noqa: B010


def test_hosts_that_do_not_share_the_directory_make_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as raised:
        train_prepared(tmp_path, STEPS, partial(elsewhere_on_rank_1, tmp_path / "there"))
    assert "although all ranks have written (__1_0.distcp is missing); choose a" in str(
        raised.value
    )
    # A rank that is ended while it removes its files leaves some to the launcher, which does this.
    CheckpointDir(tmp_path / "ck").remove_abandoned()
    assert [path.name for path in (tmp_path / "ck").iterdir()] == [".lock"]


def slow_rank_1(seconds: float) -> None:
    """Rank 1 writes for longer than collectives wait."""
    from rrfp.megatron.cpu import checkpoints
    from rrfp.train.checkpoints import saving
    from rrfp.train.launch import process_groups as parallel

    join, write = parallel._init_world, checkpoints._write

    def late(*args: Any) -> None:
        if os.environ["RANK"] == "1":
            time.sleep(seconds)
        write(*args)

    patched: Any = (parallel, checkpoints, saving)
    patched[0]._init_world = lambda backend, _: join(backend, seconds / 2)
    patched[1]._write = late
    patched[2]._AGREE_S = seconds / 8


@pytest.mark.slow
def test_ranks_wait_for_a_slow_writer(tmp_path: Path) -> None:
    train_prepared(tmp_path, 2, partial(slow_rank_1, 16.0))
    assert newest(tmp_path).step == 2


@pytest.mark.parametrize("said", ["Connection closed by peer [127.0.0.1]", "Timed out waiting"])
def test_a_peer_lost_while_loading_is_no_fault_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    from megatron.core import dist_checkpointing

    def lost(*_: Any, **__: Any) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(loading, "prepare_checkpoints", lambda: None)
    monkeypatch.setattr(dist_checkpointing, "load", lost)
    checkpoint = made_up(tmp_path, 2).newest()
    assert checkpoint is not None
    nothing: Any = SimpleNamespace(
        load_targets=lambda _: [], pp=1, tp=1, dp=1, device=torch.device("cpu")
    )
    with pytest.raises(RuntimeError, match="^" + re.escape(said)):
        loading.load(checkpoint, settings_in(tmp_path), nothing, nothing)


def garbled(directory: Path) -> Path:
    """Damage a checkpoint in a way that neither sizes nor digests show."""
    file = newest(directory).path / "__1_0.distcp"
    file.write_bytes(b"x" * file.stat().st_size)
    describe(file.parent)
    return file


def test_a_garbled_checkpoint_is_named(tmp_path: Path) -> None:
    train(tmp_path, 2)
    garbled(tmp_path)
    with pytest.raises(RankFailedError, match=r"step-00000002 cannot be loaded \(on rank \d: "):
        train(tmp_path, 4, resume=True)


def test_staged_and_written_tensors_are_freed() -> None:
    """A tensor that was gathered for a checkpoint is in memory once, and no longer than needed."""
    gathered = torch.ones(3)
    gone = weakref.ref(gathered)
    buckets: list[Any] = [("path", "name", ([], [("item", gathered)]))]
    del gathered
    staged = _staged(buckets)
    assert gone() is None
    assert torch.equal(staged[0][2][1][0][1], torch.ones(3))
    results: queue.Queue[Any] = queue.Queue()
    writer = SimpleNamespace(write_preloaded_data=lambda *args: args[3].put((0, ["written"])))
    _write(writer, [], 0, staged, results)
    assert (results.get_nowait(), staged[0][2][1]) == ({0: ["written"]}, [])


# A checkpoint holds the same whichever layout wrote it, and every layout reads all of it.


STEPS_OF_LAYOUTS = 2


def save_again(settings: str, source: str, target: str) -> None:
    """On a rank: load a checkpoint into this layout, and save it as it came."""
    prepare_cpu()
    from rrfp.train.checkpoints.saving import Saver, Session
    from rrfp.train.checkpoints.tensors import TrainedTensors, load
    from rrfp.train.data.batches import open_data
    from rrfp.train.launch.collectives import no_object_collectives
    from rrfp.train.launch.process_groups import parallel_groups
    from rrfp.train.models.model import build_model

    told = TrainSettings.from_json(settings)
    with parallel_groups(told) as layout, no_object_collectives():
        model = build_model(told, layout, open_data(told))
        tensors = TrainedTensors(model, told, layout)
        checkpoint = CheckpointDir(Path(source)).newest()
        assert checkpoint is not None
        load(checkpoint, told, layout, tensors)
        run = RunDir(Path(source).parent / "run")
        copy = partial(shutil.copyfile, run.metrics)
        saver = Saver(CheckpointDir(Path(target)), Session(run), told, layout, tensors, copy)  # pyright: ignore[reportArgumentType]
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
    train(tmp_path / "first", STEPS_OF_LAYOUTS, **kind)
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
        ({"dispatch": "megatron"}, STEPS_OF_LAYOUTS),
        ({"recompute": "full"}, STEPS_OF_LAYOUTS),
    ],
)
def test_training_goes_on_under_another_layout(
    tmp_path: Path, layout: dict[str, Any], num_exact: int
) -> None:
    """To the last bit where the arithmetic is the same. Under another layout the norm of the
    gradient is summed in other parts, and replicas add gradients in another order."""
    for name in ("whole", "parts"):
        train(tmp_path / name, STEPS_OF_LAYOUTS if name == "parts" else 2 * STEPS_OF_LAYOUTS)
    train(tmp_path / "parts", 2 * STEPS_OF_LAYOUTS, resume=True, **layout)
    whole, parts = (tensors_of(newest(tmp_path / name)) for name in ("whole", "parts"))
    if num_exact == STEPS_OF_LAYOUTS:
        assert differences(whole, parts) == []
    worst = max((whole[name] - parts[name]).abs().max() for name in whole)
    assert worst < 1e-6
    lines = [read_metrics(tmp_path / name / "run") for name in ("whole", "parts")]
    assert [line["step"] for line in lines[1]] == [*range(2 * STEPS_OF_LAYOUTS)]
    for ours, theirs in zip(*lines, strict=True):
        # The same items are drawn in each step.
        assert ours["tokens"] == theirs["tokens"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    for ours, theirs in zip(*(told[: STEPS_OF_LAYOUTS + num_exact] for told in lines), strict=True):
        assert ours["loss"] == theirs["loss"]


@pytest.mark.slow
def test_native_to_ours_and_back(tmp_path: Path) -> None:
    for name in ("ours", "native", "mixed"):
        dispatch = {} if name == "ours" else {"dispatch": "megatron"}
        train(
            tmp_path / name,
            STEPS_OF_LAYOUTS if name == "mixed" else 3 * STEPS_OF_LAYOUTS,
            **dispatch,
        )
    train(tmp_path / "mixed", 2 * STEPS_OF_LAYOUTS, resume=True, hint="bfw")
    train(tmp_path / "mixed", 3 * STEPS_OF_LAYOUTS, resume=True, dispatch="megatron")
    mixed = tensors_of(newest(tmp_path / "mixed"))
    for name in ("ours", "native"):
        assert differences(mixed, tensors_of(newest(tmp_path / name))) == []


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["ready", "megatron"])
def test_dropout_goes_on_with_the_same_masks(tmp_path: Path, dispatch: str) -> None:
    """Also in Megatron's own schedule, whose random states advance by what it draws."""
    flags = {"dropout": 0.1, "dispatch": dispatch, "tp": 2, "sequence_parallel": True}
    train(tmp_path / "whole", 2 * STEPS_OF_LAYOUTS, **flags)
    train(tmp_path / "parts", STEPS_OF_LAYOUTS, **flags)
    train(tmp_path / "parts", 2 * STEPS_OF_LAYOUTS, resume=True, **flags)
    found = (tensors_of(newest(tmp_path / name)) for name in ("whole", "parts"))
    assert differences(*found) == []


@pytest.mark.slow
def test_under_another_layout_dropout_draws_as_if_it_had_begun_there(tmp_path: Path) -> None:
    """Masks belong to a step, a stage and a microbatch: with other stages there are others. The
    random states are then those of a run that trained there from the start."""
    flags = {"dropout": 0.1}
    other = {"pp": 4, **flags}
    train(tmp_path / "there", STEPS_OF_LAYOUTS, **other)
    train(tmp_path / "here", STEPS_OF_LAYOUTS, **flags)
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
    """On a rank: its initial random states, and those after each of `steps` of another layout."""
    prepare_cpu()
    import torch
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from rrfp.train.checkpoints.tensors import reseed_random_states
    from rrfp.train.launch.process_groups import parallel_groups, seed_random_states

    def states() -> list[bytes]:
        named = get_cuda_rng_tracker().get_states().values()
        return [state.numpy().tobytes() for state in (torch.get_rng_state(), *named)]

    told = TrainSettings.from_json(settings)
    with parallel_groups(told) as layout:
        found = [states()]
        for step in steps:
            seed_random_states(told, layout)
            reseed_random_states(told, layout, step)
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
