"""A run trains on or ends with a reason on full disks, with few files, and over many steps."""

import ast
import errno
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

import rrfp
from rrfp.cli.train import _merge_partial_records
from rrfp.system import FILES_OF_A_RANK, allow_open_files, describe_too_many_files, is_of_too_many
from rrfp.trace import locate
from rrfp.trace.check import check_contents
from rrfp.trace.perfetto.reader import read_contents, read_trace
from rrfp.trace.run_dir import RunDir
from rrfp.train.checkpoints.directory import CheckpointDir
from tests.train.trained import START_S, TINY, Training, pid_of, read_metrics, rrfp_here
from tests.train.trained import rrfp as run_rrfp

# Disks of a few MiB, which a test can fill.


@contextmanager
def small_disk(path: Path, size_mb: int) -> Iterator[Path]:
    """A disk of its own at this path; skips the test where no disk may be mounted."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "rrfp-test", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path) -> Path:
    """Take all the room of a disk; returns the file that has it."""
    filler = disk / "filler"
    # As others write meanwhile, room may be there again.
    with filler.open("wb", buffering=0) as file:
        for piece in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(piece))
            except OSError:
                continue
    return filler


def free_bytes(disk: Path) -> int:
    status = os.statvfs(disk)
    return status.f_bavail * status.f_frsize


# A run whose disk is full, or whose directory is removed: it trains on where it can, says what it
# could not write, and leaves nothing half-written.


STEPS = 60
LONG = ("--pp", "2", "--steps", str(STEPS))


@pytest.mark.slow
def test_a_full_disk_costs_the_records_and_nothing_else(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 24) as disk, Training(disk / "run", *LONG) as training:
        training.await_steps(2)
        filler = fill(disk)
        training.await_that(
            lambda: (
                training.said().count("recording is switched off") == 2
                and "its lines wait in memory" in training.said()
            ),
            "warning",
        )
        filler.unlink()
        code, _, said = training.ended()
        assert code == 0, said
        # The metrics have every step, and the trace says from where on it lacks the records.
        assert [line["step"] for line in read_metrics(training.run)] == [*range(STEPS)]
        assert f"{training.run}/metrics.jsonl is written again" in said
        off = read_trace(training.run / "trace.pftrace").settings["recording_off"]
        assert isinstance(off, list)
        for each in off:
            assert f"{training.run}/records/rank-{each['rank']}.jsonl: No space left" in said
            assert each["reason"] in said
        assert json.loads((training.run / "run.json").read_text())["recording_off"] == off
        # Once when it happens, and again at the end.
        assert said.count("rank 0: recording is switched off") == 2
        checked = rrfp_here(tmp_path, "trace", "check", str(training.run))
        assert checked.returncode == 1
        assert "is whole" not in checked.stdout
        assert "switched recording off" in checked.stdout


@pytest.mark.slow
def test_a_run_without_its_directory_ends_unless_it_saves(tmp_path: Path) -> None:
    with Training(tmp_path / "run", *LONG) as training:
        training.await_steps(2)
        shutil.rmtree(training.run)
        code, _, said = training.ended()
    assert code == 1
    assert f"the run's directory {training.run} was removed or moved away" in said
    assert "Traceback" not in said
    with Training(tmp_path / "saved", *LONG, "--save", str(tmp_path / "ck")) as training:
        training.await_steps(2)
        shutil.rmtree(training.run)
        code, _, said = training.ended()
    assert code == 1
    assert f"{STEPS} steps are trained and saved in {tmp_path / 'ck'}" in said
    assert "Traceback" not in said
    found = CheckpointDir(tmp_path / "ck").newest()
    assert found is not None
    assert found.step == STEPS
    lines = (found.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(STEPS)]


@pytest.mark.parametrize("error", [OSError(errno.EROFS, "Read-only file system"), ValueError()])
def test_a_trace_that_cannot_be_made_does_not_hide_why_a_run_failed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    """The error comes after the attempt to build a trace of the rest of the run."""

    def refuse(_: Path) -> NoReturn:
        raise error

    run = RunDir(tmp_path)
    run.records.mkdir()
    run.rank_records(0).touch()
    monkeypatch.setattr(locate, "resolve_session", refuse)
    _merge_partial_records(run)
    assert "No trace was made: " in capsys.readouterr().err


# A process that may have few files open: refused at the start, or told as what it is.


WITHIN = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {1}))"


def test_a_run_is_refused_where_no_rank_could_open_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (48, 48))
    refused = rrfp_here(tmp_path, "train", "--pp", "2")
    assert refused.returncode == 2
    assert "a process may have 48 files open here and a rank needs 64" in refused.stderr
    assert [*tmp_path.iterdir()] == []


def test_a_soft_limit_is_raised_as_far_as_the_hard_one_allows() -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (70, 100))
            allow_open_files(64)
            code = 0 if resource.getrlimit(resource.RLIMIT_NOFILE) == (100, 100) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_too_many_open_files_are_named_as_the_cause() -> None:
    assert is_of_too_many(OSError(errno.EMFILE, "Too many open files"))
    assert is_of_too_many(RuntimeError("[enforce fail] Too many open files"))
    assert not is_of_too_many(OSError(errno.ENOENT, "No such file"))
    assert "ulimit -n" in describe_too_many_files()


@pytest.mark.slow
def test_a_rank_that_comes_to_its_limit_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"{WITHIN.format(FILES_OF_A_RANK, FILES_OF_A_RANK)}\n"
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    taken = [os.open('/dev/null', os.O_RDONLY) for _ in range(45)]\n"
    )
    with pytest.MonkeyPatch.context() as context:
        context.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
        ended = run_rrfp(tmp_path, "train", "--pp", "2", "--steps", "3", "--out", "run")
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "it needs more than the 64 files that it may have open" in ended.stderr


# The time of day may jump: nothing but a display may follow it.


JUMPING = """
import time
own, calls = time.time, [0]
def jumping():
    calls[0] += 1
    return own() + (-86400.0, 0.0, 86400.0)[calls[0] % 3]
time.time = jumping
time.time_ns = lambda: round(jumping() * 1e9)
"""

ALLOWED = {
    "cli/runs.py": "tells when runs began",
    "cli/trace.py": "tells when a job hung",
    "megatron/job": "names a run's directory",
    "runtime/net/tls.py": "certificates have dates",
    "train/launch/rank_status.py": "torchrun reads the second of an error file",
    "trace/run_dir.py": "names a run's directory",
    "watch/follow.py": "tells the hour, and compares with a file of another user's",
}


def test_only_displays_ask_for_the_time_of_day() -> None:
    root = Path(rrfp.__file__).parent
    asking = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and (
            (node.attr in ("time", "time_ns") and _is(node.value, "time"))
            or (node.attr in ("now", "utcnow", "today") and _is(node.value, "datetime"))
        )
    }
    strange = {path for path in asking if not path.startswith(tuple(ALLOWED))}
    assert strange == set()


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


@pytest.mark.slow
def test_a_run_goes_on_while_the_clock_jumps_by_days(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(JUMPING)
    with pytest.MonkeyPatch.context() as context:
        context.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
        flags = ("--pp", "2", "--steps", "4", "--out", "run", "--save", "ck", "--save-async")
        done = run_rrfp(tmp_path, "train", *TINY, *flags)
        checked = run_rrfp(tmp_path, "trace", "check", "run")
    assert done.returncode == 0, done.stderr
    assert (checked.returncode, checked.stderr) == (0, ""), checked.stdout


SOAK_STEPS = 20_000
TRACE_MB = 16
SMALLEST = (
    *("--model", "mlp", "--layers", "2", "--hidden", "8", "--heads", "1", "--seq-length", "8"),
    *("--microbatches", "2", "--pp", "2", "--trace-mb", str(TRACE_MB)),
)
_NUM_SAMPLES = 40
_STEP_S = 2.0
"""The most that such a step takes on a machine that does other things too."""
_MOST_GROWTH_KB = 4096
"""Growth that is due to allocators that still adapt."""


class Sample(NamedTuple):
    """The resources of a process at one moment."""

    rss_kb: int
    num_files: int
    num_threads: int


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_long_run_takes_no_more_than_a_short_one(tmp_path: Path) -> None:
    save_every = SOAK_STEPS // 10
    flags = (*SMALLEST, "--save", str(tmp_path / "ck"), "--save-every", str(save_every))
    samples: dict[int, list[Sample]] = {}
    most_bytes = 0
    with Training(tmp_path / "run", *flags, "--steps", str(SOAK_STEPS)) as training:
        training.await_steps(1)
        pids = [training.process.pid, *(pid_of(training.run, rank) for rank in range(2))]
        for step in range(SOAK_STEPS // _NUM_SAMPLES, SOAK_STEPS, SOAK_STEPS // _NUM_SAMPLES):
            _await_step(training, step)
            for pid in pids:
                samples.setdefault(pid, []).append(_sample(pid))
            most_bytes = max(most_bytes, sum(_sizes(training.run)))
        code, _, said = training.ended(START_S + SOAK_STEPS // _NUM_SAMPLES * _STEP_S)
    assert code == 0, said
    for taken in samples.values():
        # A third of the run, with three checkpoints, is to warm up.
        warm = taken[len(taken) // 3 :]
        early, late = warm[: len(warm) // 2], warm[len(warm) // 2 :]
        # A checkpoint that is being written has a thread and files of its own.
        for each in ("num_files", "num_threads"):
            assert min(getattr(s, each) for s in late) <= min(getattr(s, each) for s in early)
        growth_kb = min(s.rss_kb for s in late) - min(s.rss_kb for s in early)
        assert growth_kb < _MOST_GROWTH_KB, taken
    metrics = training.run / "metrics.jsonl"
    with metrics.open() as lines:
        assert [json.loads(line)["step"] for line in lines] == [*range(SOAK_STEPS)]
    trace = training.run / "trace.pftrace"
    kept = sum(size for size in _sizes(training.run)) - metrics.stat().st_size
    assert most_bytes - metrics.stat().st_size < TRACE_MB << 20
    assert kept < TRACE_MB << 20
    contents = read_contents(trace)
    assert check_contents(contents) == []
    first = contents.recording.settings["first_kept_step"]
    assert isinstance(first, int)
    assert 0 < first < SOAK_STEPS - 100
    found = CheckpointDir(tmp_path / "ck").newest()
    assert found is not None
    assert found.step == SOAK_STEPS


def _await_step(training: Training, step: int) -> None:
    """Wait for a step by the metrics' last line: reading all of them each time takes long."""
    metrics = training.run / "metrics.jsonl"
    training.await_that(lambda: _last_step(metrics) >= step, f"step {step}")


def _last_step(metrics: Path) -> int:
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 4096))
        *_, last, _ = [b"", *file.read().split(b"\n")]
    return int(json.loads(last)["step"])


def _sample(pid: int) -> Sample:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    told = dict(line.split(":", 1) for line in status)
    files = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 # as many as there are
    return Sample(int(told["VmRSS"].split()[0]), files, int(told["Threads"]))


def _sizes(run: Path) -> Iterator[int]:
    for path in run.rglob("*"):
        if path.is_file():
            yield path.stat().st_size
