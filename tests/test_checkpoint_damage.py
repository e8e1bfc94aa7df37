"""Damaged checkpoints: none is trained on, and nothing that their files say is executed."""

import logging
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rrfp.errors import RrfpError, UsageError
from rrfp.train.checkpoints.directory import CheckpointDir, Manifest, digest_of
from rrfp.train.checkpoints.reading import differences, read_tensors
from rrfp.train.checkpoints.resuming import beginning_of
from tests.checkpointed import (
    FLAGS,
    describe,
    forget_digests,
    made_up,
    newest,
    settings_in,
    tensors_of,
    train,
    train_prepared,
    work,
)
from tests.ranks import RankFailedError, run_ranks
from tests.trained import read_metrics, rrfp

pytestmark = pytest.mark.timeout(300)

STEPS = 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints of steps 2 and 4."""
    directory = tmp_path_factory.mktemp("saved")
    train(directory, STEPS)
    return directory


@contextmanager
def flipped(file: Path, bit: int) -> Iterator[None]:
    """Invert a bit of a file for a block."""

    def flip() -> None:
        with file.open("r+b") as opened:
            opened.seek(bit // 8)
            (byte,) = opened.read(1)
            opened.seek(bit // 8)
            opened.write(bytes([byte ^ 1 << bit % 8]))

    flip()
    try:
        yield
    finally:
        flip()


def flips_of(checkpoint: Path, num_flips: int) -> Iterator[tuple[Path, int]]:
    """So many bits of a checkpoint, as many of each file, its first and its last one included."""
    draw, files = random.Random(0), sorted(checkpoint.iterdir())
    for number in range(num_flips):
        file = files[number % len(files)]
        last = file.stat().st_size * 8 - 1
        yield file, {0: 0, 1: last}.get(number // len(files), draw.randint(0, last))


@pytest.mark.parametrize("num_flips", [54, pytest.param(500, marks=pytest.mark.slow)])
def test_no_flipped_bit_is_loaded(saved: Path, num_flips: int) -> None:
    ck = saved / "ck"
    before, after = ck / "step-00000002", ck / "step-00000004"
    for file, bit in flips_of(after, num_flips):
        with flipped(file, bit):
            with pytest.raises(RrfpError) as raised:
                read_tensors(after)
            said: list[str] = []
            found = CheckpointDir(ck).newest(said.append)
        assert file.name in str(raised.value)
        assert str(raised.value).endswith(f"choose {before}, the newest one that is whole")
        assert found is not None
        assert found.path == before
        assert [file.name in sentence for sentence in said] == [True]
    assert CheckpointDir(ck).newest() is not None
    assert read_tensors(after).keys() == read_tensors(before).keys()


@pytest.mark.parametrize(
    "name",
    [
        "__1_0.distcp",
        pytest.param("checkpoint.json", marks=pytest.mark.slow),
        pytest.param(".metadata", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_from_the_newest_that_is_whole(
    saved: Path, tmp_path: Path, name: str
) -> None:
    shutil.copytree(saved / "ck", tmp_path / "ck")
    damaged = tmp_path / "ck" / "step-00000004" / name
    again = ("--save=ck", "--resume", "--steps=4", "--no-trace", "--out=again", *FLAGS)
    with flipped(damaged, damaged.stat().st_size * 4):
        done = rrfp(tmp_path, "train", *again)
        assert done.returncode == 0, done.stderr
        assert f"step-00000004 is not whole ({name} does not have the SHA-256" in done.stderr
        assert f"Going on after step 2, from {tmp_path / 'ck' / 'step-00000002'}" in done.stderr
        assert [line["step"] for line in read_metrics(tmp_path / "again")] == [0, 1, 2, 3]
        # It has been replaced by then.
        assert differences(tensors_of(newest(tmp_path)), tensors_of(newest(saved))) == []
        damaged.write_bytes((saved / "ck" / "step-00000004" / name).read_bytes())


def test_ranks_go_on_from_the_newest_that_is_whole(saved: Path, tmp_path: Path) -> None:
    """It may be damaged after the launcher looked."""
    shutil.copytree(saved / "ck", tmp_path / "ck")
    settings = settings_in(tmp_path, steps=STEPS + 2, resume=True)
    beginning = beginning_of(settings, lambda _: None)
    assert beginning.first_step == STEPS
    file = tmp_path / "ck" / "step-00000004" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-9] + bytes(9))
    run_ranks(2, work, beginning.run, settings.to_json(), None, timeout_s=120)
    whole = train_whole(tmp_path / "whole")
    assert differences(tensors_of(newest(tmp_path)), whole) == []


def train_whole(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors after two steps more."""
    train(directory, STEPS + 2)
    return tensors_of(newest(directory))


def shortened(path: Path) -> None:
    (path / "tensors").write_bytes(b"x" * 99)


def with_another(path: Path) -> None:
    (path / "extra").touch()


def swapped(path: Path) -> None:
    (path / "tensors").rename(path / "between")
    (path / "others").rename(path / "tensors")
    (path / "between").rename(path / "others")


def linked(path: Path) -> None:
    (path / "tensors").rename(path.parent / "moved")
    (path / "tensors").symlink_to(path.parent / "moved")


def piped(path: Path) -> None:
    (path / "checkpoint.json").unlink()
    os.mkfifo(path / "checkpoint.json")


def without_digests(path: Path) -> None:
    told = (path / "checkpoint.json").read_text()
    (path / "checkpoint.json").write_text(told.partition(',\n  "digests"')[0] + "\n}\n")


def without_version(path: Path) -> None:
    """A version before digests that has them was made of one that has them."""
    told = (path / "checkpoint.json").read_text()
    (path / "checkpoint.json").write_text(told.replace('"version": 2', '"version": 1'))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (shortened, "tensors has 99 bytes and not 100"),
        (with_another, "extra is not one of its files"),
        (swapped, "does not have the SHA-256 that checkpoint.json gives it"),
        (linked, "tensors is neither a file nor a directory"),
        (piped, "checkpoint.json is not a regular file"),
        (without_digests, "checkpoint.json does not have the SHA-256 that it ends with"),
        (without_version, "checkpoint.json has version 1 and not 2"),
    ],
)
def test_what_is_not_as_it_was_saved_is_passed_over(
    tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    found = made_up(tmp_path, 2)
    saving = found.begin(4)
    for name, content in (("tensors", b"x"), ("others", b"y")):
        (saving / name).write_bytes(content * 100)
    found.finish(saving, Manifest(4, {}, "run", {}, {}, {}))
    damage(tmp_path / "ck" / "step-00000004")
    told: list[str] = []
    checkpoint = found.newest(told.append)
    assert checkpoint is not None
    assert checkpoint.step == 2
    assert len(told) == 1
    assert said in told[0]


def test_no_checkpoint_is_saved_into_another(tmp_path: Path) -> None:
    path = made_up(tmp_path, 2).path / "step-00000002"
    for resume in (True, False):
        with pytest.raises(UsageError, match=r"give --save .*ck, in which step-00000002 is the"):
            beginning_of(settings_in(tmp_path, save=path, resume=resume), lambda _: None)
    assert newest(tmp_path).path == path


def test_a_checkpoint_without_digests_is_loaded_with_one_warning(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(saved / "ck", tmp_path / "ck")
    for each in (tmp_path / "ck").glob("step-*"):
        forget_digests(each)
    done = rrfp(tmp_path, "train", *FLAGS, "--save=ck", "--resume", "--steps=6", "--no-trace")
    assert done.returncode == 0, done.stderr
    warning = "has no digests, as an older rrfp saved it: damage to its files would not be noticed"
    assert done.stderr.count("digests") == done.stderr.count(warning) == 1
    assert newest(tmp_path).manifest.digests
    with caplog.at_level(logging.WARNING):
        read_tensors(tmp_path / "ck" / "step-00000004")
    assert [warning in record.message for record in caplog.records] == [True]


def noting_what_is_read(directory: Path) -> None:
    from rrfp.train.checkpoints import directory as module

    def noted(path: Path) -> str:
        with (directory / "read").open("a") as file:
            file.write(f"{path.name}\n")
        return digest_of(path)

    patched: Any = module
    patched.digest_of = noted


@pytest.mark.parametrize("flags", [{}, {"save_async": True, "tp": 2, "pp": 1}])
def test_what_ranks_write_is_not_read_again(tmp_path: Path, flags: dict[str, Any]) -> None:
    train_prepared(tmp_path, 2, partial(noting_what_is_read, tmp_path), **flags)
    read = {*(tmp_path / "read").read_text().split()}
    found = newest(tmp_path)
    assert not any(name.endswith(".distcp") for name in read)
    assert {".metadata", "metadata.json", "metrics.jsonl"} <= read
    assert found.manifest.digests.keys() == found.manifest.files.keys() > read


class Command:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def commanded_metadata(checkpoint: Path, made: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Command(made)))


def commanded_common(checkpoint: Path, made: Path) -> None:
    torch.save({"command": Command(made)}, checkpoint / "common.pt")


@pytest.mark.parametrize("plant", [commanded_metadata, commanded_common])
def test_nothing_in_a_checkpoint_is_executed(
    saved: Path, tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    shutil.copytree(saved / "ck", tmp_path / "ck")
    checkpoint, made = newest(tmp_path).path, tmp_path / "made"
    is_read = plant is commanded_metadata or (checkpoint / "common.pt").exists()
    plant(checkpoint, made)
    files = {file.name: file.stat().st_size for file in checkpoint.iterdir()}
    del files["checkpoint.json"]
    describe(checkpoint, files=files)
    refused = pytest.raises(RankFailedError, match="step-00000004 cannot be loaded")
    # Megatron-Core 0.19 has no such file.
    with refused if is_read else nullcontext():
        train(tmp_path, STEPS + 2, resume=True)
    if plant is commanded_metadata:
        with pytest.raises(pickle.UnpicklingError, match=r"names posix.mkdir, which no metadata"):
            read_tensors(checkpoint)
    assert not made.exists()


def commanded_states(made: Path) -> None:
    """A rank's random states hold a command, as in a checkpoint that was made to harm."""
    from rrfp.train.checkpoints import tensors as random_states

    patched, own = random_states, random_states.captured
    setattr(patched, "captured", lambda layout: _with_command(own(layout), made))  # noqa: B010


def _with_command(states: Any, made: Path) -> Any:
    states.data["torch"] = Command(made)
    return states


def test_no_random_states_are_executed(tmp_path: Path) -> None:
    train_prepared(tmp_path, 2, partial(commanded_states, tmp_path / "made"))
    with pytest.raises(RankFailedError, match="step-00000002 cannot be loaded"):
        train(tmp_path, 4, resume=True)
    assert not (tmp_path / "made").exists()


def test_metadata_name_no_files_elsewhere(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "ck", tmp_path / "ck")
    checkpoint = newest(tmp_path).path
    metadata = (checkpoint / ".metadata").read_bytes().replace(b"__0_0.distcp", b"../0_0.distc")
    (checkpoint / ".metadata").write_bytes(metadata)
    describe(checkpoint)
    with pytest.raises(pickle.UnpicklingError, match=r"names '../0_0.distc', which is no file"):
        read_tensors(checkpoint)
