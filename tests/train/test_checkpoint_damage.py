"""Damaged checkpoints: none is trained on, and nothing that their files say is executed."""

import fcntl
import json
import logging
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from rrfp.errors import RrfpError, UsageError
from rrfp.train.checkpoints import directory as directory_module
from rrfp.train.checkpoints.directory import LOCK, CheckpointDir, Manifest, digest_of
from rrfp.train.checkpoints.plans import decode_plan, encode_plan, reason_of
from rrfp.train.checkpoints.reading import differences, read_tensors
from rrfp.train.checkpoints.run_start import start_or_resume
from tests.e2e.ranks import RankFailedError, run_ranks
from tests.train.checkpointed import (
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
from tests.train.trained import read_metrics, rrfp, rrfp_here

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
    """Choose `num_flips` bits, equally many in each file, with its first and its last bit."""
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
    beginning = start_or_resume(settings, lambda _: None)
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
            start_or_resume(settings_in(tmp_path, save=path, resume=resume), lambda _: None)
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
    from rrfp.train.checkpoints import saving, tensors

    own = tensors.captured_random_states
    patched: Any = saving
    patched.captured_random_states = lambda layout: _with_command(own(layout), made)


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


# Checkpoints belong to one user: another one can neither replace what is loaded nor have a run
# write elsewhere, and cannot keep it from saving.


NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def given(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def opened(mode: int, path: Path) -> None:
    path.chmod(mode)


def linked_and_given(path: Path) -> None:
    """Another user's link to a directory of this one's."""
    path.rename(path.parent / "target")
    path.symlink_to(path.parent / "target")
    given(path)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        pytest.param(given, f"ck belongs to user {NOBODY}, who could replace", marks=as_root),
        pytest.param(
            linked_and_given, f"ck is a link of user {NOBODY}, who could replace", marks=as_root
        ),
        (partial(opened, 0o777), "ck can be written by others (mode 777), who could replace"),
        (partial(opened, 0o1777), "ck can be written by others (mode 1777), who could replace"),
    ],
)
@pytest.mark.parametrize("resume", [("--resume",), ()])
def test_a_directory_that_others_can_change_is_refused(
    tmp_path: Path, harm: Callable[[Path], None], said: str, resume: tuple[str, ...]
) -> None:
    private = tmp_path / "private"
    private.write_text("secret")
    ck = tmp_path / "ck"
    ck.mkdir()
    (ck / LOCK).symlink_to(private)
    harm(ck)
    refused = rrfp_here(tmp_path, "train", *FLAGS, "--save=ck", "--steps=2", *resume)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert said in refused.stderr
    assert private.read_text() == "secret"
    assert [path.name for path in ck.iterdir()] == [LOCK]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        pytest.param(given, f"belongs to user {NOBODY}", marks=as_root),
        (partial(opened, 0o777), "can be written by others (mode 777)"),
    ],
)
@pytest.mark.parametrize("name", ["", "tensors", "checkpoint.json"])
def test_what_others_can_change_in_it_is_passed_over(
    tmp_path: Path, harm: Callable[[Path], None], said: str, name: str
) -> None:
    found = made_up(tmp_path, 2, 4)
    harm(tmp_path / "ck" / "step-00000004" / name)
    told: list[str] = []
    beginning = start_or_resume(settings_in(tmp_path, resume=True), told.append)
    assert beginning.first_step == 2
    assert f"is not whole ({name or 'it'} {said})" in told[0]
    assert found.newest() == beginning.checkpoint


def grouped(path: Path) -> None:
    """Writable by a group that has others, or that nobody knows."""
    path.chmod(0o775)
    os.chown(path, -1, NOBODY)


@as_root
def test_a_group_of_others_may_not_write(tmp_path: Path) -> None:
    made_up(tmp_path, 2)
    grouped(tmp_path / "ck")
    with pytest.raises(UsageError, match=r"can be written by others \(mode 775\)"):
        start_or_resume(settings_in(tmp_path, resume=True), lambda _: None)


@as_root
def test_a_directory_of_root_or_of_the_user_is_accepted(tmp_path: Path) -> None:
    """Root may do everything anyway; and a user goes on with what root has copied back."""
    tmp_path.chmod(0o755)
    made_up(tmp_path, 2, 4)
    for each in ((tmp_path / "ck"), *(tmp_path / "ck" / "step-00000004").iterdir()):
        given(each)
    (tmp_path / "ck" / "step-00000004").chmod(0o755)
    program = f"""
import os
from pathlib import Path
from rrfp.train.checkpoints.directory import CheckpointDir
os.setgid({NOBODY}), os.setuid({NOBODY})
found = CheckpointDir(Path("ck"))
found.prepare()
print(found.newest(print).step)
"""
    asked = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (asked.stdout, asked.stderr) == ("4\n", "")


def masked(mask: int) -> None:
    os.umask(mask)


@pytest.mark.parametrize("mask", [0o002, 0o000])
def test_shared_files_go_on_under_any_umask(tmp_path: Path, mask: int) -> None:
    """Others may read them then, and nobody but the user may write them."""
    before = os.umask(mask)
    try:
        for steps in (2, 3):
            prepare = partial(masked, mask)
            train_prepared(tmp_path, steps, prepare, shared_files=True, resume=True)
    finally:
        os.umask(before)
    assert newest(tmp_path).step == 3
    assert len([*(tmp_path / "ck").glob("step-*")]) == 2
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "ck").rglob("*")}
    assert modes == {0o600, 0o644, 0o755}
    assert (tmp_path / "ck" / LOCK).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_lock_of_an_earlier_version_is_closed_to_others(tmp_path: Path) -> None:
    found = made_up(tmp_path, 2)
    (tmp_path / "ck" / LOCK).touch(0o644)
    (tmp_path / "ck" / LOCK).chmod(0o644)
    with found.locked():
        assert (tmp_path / "ck" / LOCK).stat().st_mode & 0o777 == 0o600


def as_link(lock: Path, private: Path) -> None:
    lock.symlink_to(private)


def as_second_name(lock: Path, private: Path) -> None:
    lock.hardlink_to(private)


def as_pipe(lock: Path, private: Path) -> None:
    assert private.exists()
    os.mkfifo(lock)


@pytest.mark.parametrize("plant", [as_link, as_second_name, as_pipe])
def test_a_lock_leads_to_no_other_file(tmp_path: Path, plant: Callable[[Path, Path], None]) -> None:
    private = tmp_path / "private"
    private.write_text("secret")
    found = made_up(tmp_path, 2)
    plant(tmp_path / "ck" / LOCK, private)
    with pytest.raises(UsageError, match="cannot be locked"), found.locked():
        pass
    assert private.read_text() == "secret"


def test_a_held_lock_is_not_blamed_on_a_process_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_module, "_LOCK_S", 0.3)
    found = made_up(tmp_path, 2)
    lock = tmp_path / "ck" / LOCK
    gone = subprocess.Popen(["true"])
    gone.wait()
    host = os.uname().nodename
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for told, said in (
            (f"process {gone.pid} of {host}\n", f"than the last run, {gone.pid}, which has ended"),
            (f"process {os.getpid()} of {host}\n", rf"another run \(process {os.getpid()} of "),
            ("", "in use by a process that does not say which it is"),
        ):
            lock.write_text(told)
            with pytest.raises(UsageError, match=said), found.locked():
                pass
    # A run that has ended names itself no longer.
    with found.locked():
        assert lock.read_text() == f"process {os.getpid()} of {host}\n"
    assert lock.read_text() == ""
    assert CheckpointDir(tmp_path / "ck").newest() is not None


# Plans of checkpoints travel between ranks as JSON, which holds plans and nothing else.


PLAN = SavePlan(
    [
        WriteItem(
            MetadataIndex("weight", torch.Size([0, 4]), 1),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size([0, 4]), torch.Size([8, 4])),
                TensorProperties(torch.bfloat16),
                torch.Size([8, 8]),
            ),
        )
    ],
    planner_data={"weight": ("a", 1), 2: [None, 0.5, True]},
)


def test_plans_travel_as_json() -> None:
    again = decode_plan(json.loads(json.dumps(encode_plan(PLAN))))
    assert again == PLAN
    assert isinstance(again.items[0].type, WriteItemType)
    error, stack = decode_plan(
        json.loads(json.dumps(encode_plan((OSError(28, "No space"), StackSummary()))))
    )
    assert (type(error), str(error), type(stack)) == (
        RuntimeError,
        "OSError: [Errno 28] No space",
        StackSummary,
    )


def test_failures_of_ranks_travel_as_such() -> None:
    failed = CheckpointException("", {1: (OSError(28, "No space"), StackSummary())})
    again = decode_plan(json.loads(json.dumps(encode_plan(failed))))
    assert isinstance(again, CheckpointException)
    assert reason_of(again) == reason_of(failed) == "on rank 1: OSError: [Errno 28] No space"


@pytest.mark.parametrize("planted", [os.system, subprocess.Popen, torch.load, Path("x"), b"x"])
def test_a_plan_holds_nothing_else(planted: Any) -> None:
    with pytest.raises(RrfpError, match="which ranks do not exchange"):
        encode_plan([planted])


@pytest.mark.parametrize(
    "planted",
    [
        {"Popen": [["args", "true"]]},
        {"torch": "load"},
        {"torch": ["float32"]},
        {"WriteItemType": "SYSTEM"},
        {"SavePlan": [["unknown", 1]]},
        {"SavePlan": "items"},
        {"Size": ["1"]},
        {"tuple": 1, "list": 2},
        {"failures": []},
        [1],
        {},
    ],
)
def test_nothing_else_is_made_of_what_a_rank_sent(planted: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - which one depends on what is wrong
        decode_plan(planted)
