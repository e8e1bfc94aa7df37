"""A directory of checkpoints: a whole one counts, under its own name, and no other does."""

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
from typing import Any

import pytest
import torch

from rrfp.megatron.cpu.checkpoints import _staged, _write
from rrfp.trace.run_dir import RunDir
from rrfp.train.checkpoints import saving as session
from rrfp.train.checkpoints import tensors as loading
from rrfp.train.checkpoints.directory import CheckpointDir
from rrfp.train.checkpoints.resuming import beginning_of
from tests.checkpointed import describe, made_up, newest, settings_in, train, train_prepared, work
from tests.ranks import RankFailedError, run_ranks

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


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    found = made_up(tmp_path, 2, 4, 6, 8)
    found.remove_older(3)
    assert [path.name[-1] for path in sorted((tmp_path / "ck").glob("step-*"))] == ["4", "6", "8"]


def test_ranks_look_again_whether_the_directory_is_unused(tmp_path: Path) -> None:
    """Another run may have saved there after the launcher looked."""
    settings = settings_in(tmp_path)
    run = beginning_of(settings, lambda _: None).run
    made_up(tmp_path, 2)
    with pytest.raises(RankFailedError, match="has the checkpoint of step 2 of another run"):
        run_ranks(2, work, run, settings.to_json(), None, timeout_s=120)


def test_copied_checkpoints_leave_the_run_of_the_first_ones_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = settings_in(tmp_path)
    beginning_of(settings, lambda _: None)
    made_up(tmp_path, 2)
    shutil.copytree(tmp_path / "ck", tmp_path / "copied")
    told: list[str] = []
    copied = settings.changed(save=tmp_path / "copied", out=None, resume=True)
    beginning = beginning_of(copied, told.append)
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

    join, write = parallel._join_the_world, checkpoints._write

    def late(*args: Any) -> None:
        if os.environ["RANK"] == "1":
            time.sleep(seconds)
        write(*args)

    patched: Any = (parallel, checkpoints, saving)
    patched[0]._join_the_world = lambda backend, _: join(backend, seconds / 2)
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
        to_load=lambda _: [], pp=1, tp=1, dp=1, device=torch.device("cpu")
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


def test_what_is_staged_and_written_is_let_go_of() -> None:
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
