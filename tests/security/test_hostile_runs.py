"""Runs that others have made: with anything in the place of a file, and with planted links."""

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from types import FrameType

import pytest

from rrfp.trace.perfetto.writer import write_run_files
from rrfp.trace.run_dir import RunDir
from tests.analyze.recordings import make_recording
from tests.security.exposed import USER, as_other_user, needs_root
from tests.trace.test_dead_runs import DeadRun
from tests.train.trained import rrfp_here

_PATIENCE_S = 60
_COMMANDS = [
    ("runs", "."),
    ("trace", "check", "X"),
    ("watch", "X", "--once"),
    ("analyze", "X"),
]


class _HangError(BaseException):
    """A command waited for what never comes. No command handles it."""


@pytest.fixture(autouse=True)
def _never_hang() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise _HangError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_PATIENCE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _socket(path: Path) -> None:
    with chdir(path.parent), socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(8 << 30)


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "directory": Path.mkdir,
    "sparse": _sparse,
    "waits": lambda path: path.symlink_to("/proc/kmsg"),
    "memory": lambda path: path.symlink_to("/proc/kcore"),
    "deep": lambda path: path.write_text('{"a":' * 200_000),
    "huge number": lambda path: path.write_text('{"settings": {"steps": 1%s}}' % ("0" * 4000)),
}


def _finished(path: Path) -> None:
    path.mkdir(parents=True)
    run = RunDir(path)
    write_run_files(run, make_recording(2, 3, 2))
    run.metrics.write_text('{"step": 0}\n{"step": 1}\n')
    run.outcome.write_text('{"outcome": "finished", "error": null}\n')


def _dead(path: Path) -> None:
    dead = DeadRun(path)
    for rank in range(4):
        dead.record(rank)


def _replace(path: Path, kind: str) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    KINDS[kind](path)


_QUICK = {
    *((_finished, "run.json", kind) for kind in ("pipe", "loop", "sparse", "deep", "huge number")),
    *((_finished, "trace.pftrace", kind) for kind in ("endless", "sparse", "memory")),
    (_finished, "metrics.jsonl", "waits"),
    (_finished, "outcome.json", "socket"),
    *((_dead, "records/rank-0.jsonl", kind) for kind in ("pipe", "sparse", "directory")),
}
_FILES = {
    _finished: ("run.json", "metrics.jsonl", "outcome.json", "trace.pftrace", "trace-2.pftrace"),
    _dead: (
        *("run.json", "metrics.jsonl", "outcome.json"),
        *("records", "records/rank-0.jsonl", "records/rank-0.ring"),
    ),
}


@pytest.mark.parametrize(
    ("make", "file", "kind"),
    [
        pytest.param(*case, marks=() if case in _QUICK else pytest.mark.slow)
        for case in [
            (make, f, kind) for make, files in _FILES.items() for f in files for kind in KINDS
        ]
    ],
)
def test_anything_in_the_place_of_a_file_costs_a_sentence(
    tmp_path: Path, make: Callable[[Path], None], file: str, kind: str
) -> None:
    _finished(tmp_path / "intact")
    for command in _COMMANDS:
        shutil.rmtree(tmp_path / "X", ignore_errors=True)
        make(tmp_path / "X")
        _replace(tmp_path / "X" / file, kind)
        done = rrfp_here(tmp_path, *command)
        assert done.returncode in (0, 1, 2)
        assert "bug" not in done.stderr
        if command[0] == "runs":
            assert (done.returncode, done.stderr) == (0, "")
            assert "intact" in done.stdout
        if done.returncode:
            assert done.stderr.count("\n") == 1


def test_the_list_of_runs_survives_what_lies_beside_them(tmp_path: Path) -> None:
    _finished(tmp_path / "intact")
    (tmp_path / "itself").symlink_to("itself")
    _finished(tmp_path / "a\nb\x1b[31mc")
    _finished(tmp_path / os.fsdecode(b"\xff\xfe"))
    _finished(tmp_path / "late")
    for file in (tmp_path / "late").iterdir():
        os.utime(file, (2**40, 2**40))
    with chdir(tmp_path / "intact"):
        for _ in range(1500):
            Path("in").mkdir()
            os.chdir("in")
    try:
        for output_format in ("table", "json", "csv", "md"):
            done = rrfp_here(tmp_path, "runs", ".", "--format", output_format)
            assert (done.returncode, done.stderr) == (0, "")
            assert "intact" in done.stdout
            assert "late" in done.stdout
            assert "\x1b[31mc" not in done.stdout
    finally:
        _remove_nested(tmp_path / "intact")


def _remove_nested(path: Path) -> None:
    """pytest would fail to."""
    with chdir(path):
        while Path("in").exists():
            Path("in").rename(Path("out"))
            for inner in Path("out").iterdir():
                inner.rename(Path("in"))
            Path("out").rmdir()


def _listing(path: Path) -> dict[str, tuple[int, int]]:
    return {
        str(each.relative_to(path)): (each.lstat().st_size, each.lstat().st_mtime_ns)
        for each in path.rglob("*")
    }


def _give_away(path: Path) -> None:
    for each in (path, *path.rglob("*")):
        os.chown(each, USER, USER, follow_symlinks=False)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """Files that the user wants to keep."""
    folder = tmp_path / "private"
    folder.mkdir()
    (folder / "keep").write_text("mine")
    return folder


@pytest.mark.parametrize(
    "trust",
    [pytest.param("another's", marks=needs_root), "anybody writes", "records anybody writes"],
)
def test_nothing_is_written_into_a_run_that_others_may_change(
    tmp_path: Path, private: Path, trust: str
) -> None:
    run = tmp_path / "runs" / "X"
    run.parent.mkdir()
    _dead(run)
    pid = os.getpid()
    for name in ("trace.pftrace", "run.json", "trace-joined.pftrace"):
        (run / f".{name}.{pid}").symlink_to(private / "keep")
    (run / "trace.pftrace.frames").symlink_to(private)
    match trust:
        case "another's":
            _give_away(run)
        case "anybody writes":
            run.chmod(0o777)
        case _:
            (run / "records").chmod(0o777)
    before = _listing(run), _listing(private)
    first = [rrfp_here(tmp_path, *each, str(run)) for each in (("trace", "check"), ("analyze",))]
    assert (_listing(run), _listing(private)) == before
    assert [done.returncode for done in first] == [1, 0]
    own = tmp_path / "own"
    _dead(own)
    then = [rrfp_here(tmp_path, *each, str(own)) for each in (("trace", "check"), ("analyze",))]
    assert [done.stdout.replace(str(own), "X") for done in then] == [
        done.stdout.replace(str(run), "X") for done in first
    ]


def test_a_planted_link_is_replaced_and_not_followed(tmp_path: Path, private: Path) -> None:
    _dead(tmp_path / "X")
    pid = os.getpid()
    for name in ("trace.pftrace", "run.json"):
        (tmp_path / "X" / f".{name}.{pid}").symlink_to(private / "keep")
    (tmp_path / "X.json").symlink_to(private / "keep")
    (tmp_path / f".X.json.{pid}").symlink_to(private / "keep")
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "tasks.parquet").symlink_to(private / "keep")
    for command in (
        ("trace", "check", "X"),
        ("trace", "export", "X", "-o", "X.json"),
        ("trace", "export", "X", "-o", "tables", "--format", "parquet"),
    ):
        assert "bug" not in rrfp_here(tmp_path, *command).stderr
    assert (private / "keep").read_text() == "mine"
    assert (tmp_path / "X.json").is_file()
    assert not (tmp_path / "X.json").is_symlink()
    assert (tmp_path / "tables" / "tasks.parquet").read_bytes().startswith(b"PAR1")


@needs_root
def test_a_killed_run_is_read_by_another_user(tmp_path: Path) -> None:
    for folder in tmp_path.parents[:3]:
        if folder.stat().st_uid == os.geteuid() and folder != Path("/tmp"):
            folder.chmod(0o755)
    tmp_path.chmod(0o755)
    _dead(tmp_path / "X")
    for each in (tmp_path / "X").rglob("*"):
        each.chmod(0o755 if each.is_dir() else 0o644)
    (tmp_path / "X").chmod(0o755)
    _dead(tmp_path / "closed")
    (tmp_path / "closed").chmod(0o700)
    before = _listing(tmp_path / "X")
    # What it imports is imported here.
    shutil.copytree(tmp_path / "X", tmp_path / "mine")
    expected = [rrfp_here(tmp_path / "mine", *each) for each in _OF_ANOTHER]
    found = as_other_user(lambda: [rrfp_here(tmp_path / "X", *each) for each in _OF_ANOTHER])
    assert [(done.returncode, done.stdout) for done in found] == [
        (done.returncode, done.stdout) for done in expected
    ]
    listed = as_other_user(lambda: rrfp_here(tmp_path, "runs", ".", "--format", "csv"))
    assert (listed.returncode, listed.stderr) == (0, "")
    assert {line.split(",")[0] for line in listed.stdout.splitlines()} >= {"X", "mine"}
    assert _listing(tmp_path / "X") == before


_OF_ANOTHER = [("trace", "check", "."), ("watch", ".", "--once")]
