"""Checkpoints belong to one user: another one can neither replace what is loaded nor have a run
write elsewhere, and cannot keep it from saving."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from rrfp.errors import UsageError
from rrfp.train.checkpoints import directory as directory_module
from rrfp.train.checkpoints.directory import LOCK, CheckpointDir
from rrfp.train.checkpoints.resuming import beginning_of
from tests.checkpointed import FLAGS, made_up, newest, settings_in, train_prepared
from tests.trained import rrfp_here

pytestmark = pytest.mark.timeout(300)

NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def given(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def opened(mode: int, path: Path) -> None:
    path.chmod(mode)


def linked(path: Path) -> None:
    """Another user's link to a directory of this one's."""
    path.rename(path.parent / "target")
    path.symlink_to(path.parent / "target")
    given(path)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        pytest.param(given, f"ck belongs to user {NOBODY}, who could replace", marks=as_root),
        pytest.param(linked, f"ck is a link of user {NOBODY}, who could replace", marks=as_root),
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
    beginning = beginning_of(settings_in(tmp_path, resume=True), told.append)
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
        beginning_of(settings_in(tmp_path, resume=True), lambda _: None)


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
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
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
