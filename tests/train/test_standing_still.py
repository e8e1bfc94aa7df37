"""A rank that a signal stops, at every stage of a run: the run ends soon, and names it."""

import errno
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from rrfp.trace.outcome import Outcome, read_ending
from rrfp.trace.run_dir import RunDir
from rrfp.train.launch.launcher import _first_failure
from rrfp.train.launch.processes import CgroupLimits, Failure
from rrfp.train.launch.rank_status import FailureReport
from tests.train.trained import (
    ENDLESS,
    Training,
    await_no_process,
    pid_of,
    processes_of,
    read_metrics,
)

STOPS = Path(__file__).parents[1] / "stops"
"""A directory on the path of the run with code that stops a rank at a chosen place."""
WITHIN_S = 30.0


@dataclass(frozen=True)
class Stage:
    """A place where rank 1 stops."""

    module: str
    name: str = ""
    """The function, or that the module is imported."""
    nth: int = 1
    flags: str = "--pp 2 --steps 6"
    told: str = "in start-up"
    """The stage in the error sentence."""


SAVING = "--pp 2 --save saved --save-every 2"
STAGES = {
    "before-its-first-beat": Stage("rrfp.train.settings"),
    "import-of-torch": Stage("torch"),
    "import-of-megatron": Stage("megatron.core"),
    "joining-the-world": Stage("torch.distributed.distributed_c10d", "init_process_group"),
    "making-groups": Stage("torch.distributed.distributed_c10d", "new_group", 4),
    "introducing-itself": Stage("rrfp.runtime.rendezvous", "publish_rank_info"),
    "opening-data": Stage("rrfp.train.data.batches", "open_data"),
    "building-the-model": Stage("rrfp.train.models.model", "build_model"),
    "connecting": Stage("rrfp.runtime.net.transport", "SocketTransport.open", told="in step 0"),
    "a-step": Stage("rrfp.train.loop", "Trainer.train_step", 3, told="in step 2"),
    "a-task": Stage("rrfp.runtime.worker", "Worker._run", 20, told="in step 2"),
    "a-task-of-megatrons": Stage(
        *("megatron.core.pipeline_parallel.schedules", "forward_step", 10),
        "--pp 2 --steps 6 --dispatch megatron",
        told="in step 2",
    ),
    "the-optimizer": Stage(
        *("megatron.core.optimizer.clip_grads", "get_grad_norm_fp32", 3),
        "--pp 2 --dp 2 --steps 6",
        told="in the optimizer of step 2",
    ),
    "a-collective-after-it": Stage(
        "rrfp.train.loop", "Trainer._shared", 3, told="in the optimizer of step 2"
    ),
    "an-evaluation": Stage(
        *("rrfp.train.loop", "Evaluation.loss", 2),
        "--pp 2 --model vlm --steps 6 --heldout-every 2",
        told="in the evaluation after step 3",
    ),
    "a-checkpoint": Stage(
        *("rrfp.train.checkpoints.saving", "Saver._request", 2),
        f"{SAVING} --steps 6",
        told="in the checkpoint after step 3",
    ),
    "a-checkpoint-beside-training": Stage(
        *("rrfp.train.checkpoints.saving", "Saver._gather_written", 1),
        f"{SAVING} --save-async --steps 40",
        told="in the checkpoint after step ",
    ),
    "closing-links": Stage(
        "rrfp.megatron.dropin", "ForwardBackward.close", told="after the last step"
    ),
    "leaving-groups": Stage(
        *("torch.distributed.distributed_c10d", "destroy_process_group"),
        told="as it left its groups",
    ),
    "ending": Stage("threading", "_shutdown", told="as it ended"),
}
QUICK = {"a-collective-after-it"}
"""Others would wait there for gloo's 300 s."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in STAGES]
)
def test_a_rank_stopped_at_any_stage_ends_the_run_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    stage = STAGES[name]
    where = f"1:{stage.module}:{stage.name}:{stage.nth}"
    monkeypatch.setenv("RRFP_STOP", where)
    monkeypatch.setenv("PYTHONPATH", f"{STOPS}:{os.environ.get('PYTHONPATH', '')}")
    flags = stage.flags.replace("saved", str(tmp_path / "saved")).split()
    silence = ["--silence", "3"] if name in QUICK else []
    with Training(tmp_path / "run", *flags, *silence) as training:
        training.await_that(lambda: is_stopped(tmp_path / "run"), f"stop at {where}")
        code, _, err = training.ended(timeout_s=WITHIN_S)
        assert code == 1
        sentence = err.splitlines()[-1]
        assert sentence.startswith("rrfp: rank 1 (pid "), err
        assert " stood still " in sentence
        assert "a signal had stopped it" in sentence
        assert stage.told in sentence
        assert "Traceback" not in err
        assert not processes_of(training.run)


def is_stopped(run: Path) -> bool:
    """Whether a signal has stopped a rank."""
    return any(state_of(pid) == "T" for pid in processes_of(run, "rrfp.train.launch.rank_process"))


def state_of(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


@pytest.mark.slow
def test_short_stops_leave_no_mark_in_what_is_learnt(tmp_path: Path) -> None:
    flags = ("--pp", "2", "--steps", "40")
    with Training(tmp_path / "calm", *flags) as training:
        assert training.ended()[0] == 0
    with Training(tmp_path / "run", *flags) as training:
        for num_steps, rank in ((2, 0), (8, 1), (16, 1), (24, 0)):
            training.await_steps(num_steps)
            pid = pid_of(training.run, rank)
            os.kill(pid, signal.SIGSTOP)
            training.await_that(lambda pid=pid: state_of(pid) == "T", "stop")  # type: ignore[misc]
            time.sleep(3.0)  # nothing shows that a stopped process does nothing
            os.kill(pid, signal.SIGCONT)
        code, _, err = training.ended()
        assert code == 0, err
    calm, stopped = (read_metrics(tmp_path / name) for name in ("calm", "run"))
    assert [line["loss"] for line in calm] == [line["loss"] for line in stopped]
    assert [line["grad_norm"] for line in calm] == [line["grad_norm"] for line in stopped]


@pytest.mark.slow
def test_no_rank_outlives_its_launcher_even_if_it_is_stopped(tmp_path: Path) -> None:
    with Training(tmp_path / "run", *ENDLESS, "--pp", "2") as training:
        training.await_steps(2)
        os.kill(pid_of(training.run, 1), signal.SIGSTOP)
        training.process.kill()
        training.process.wait()
        await_no_process(training.run, timeout_s=20)


RANDOM = [
    ("--pp 4", "ready"),
    ("--pp 2 --dp 2", "ready"),
    ("--pp 2 --tp 2", "fixed"),
    ("--pp 4", "megatron"),
    ("--pp 2 --chunks 2", "ready"),
    ("--pp 2 --save saved --save-every 2 --save-async", "ready"),
]
"""Layouts and dispatches, each of which has a rank stopped at a random moment of a short run."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(len(RANDOM)))
def test_a_rank_stopped_at_any_time_ends_the_run_and_is_named(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    layout, dispatch = RANDOM[seed % len(RANDOM)]
    flags = layout.replace("saved", str(tmp_path / "saved")).split()
    with Training(tmp_path / "run", *flags, "--dispatch", dispatch, "--steps", "30") as training:
        rank = draw.randrange(2)
        pid = training.await_start(rank)
        # From its first line of code to its last step, and what follows that.
        at_step = draw.choice([0, 0, 1, 10, 20, 30, 30])
        training.await_steps(at_step)
        time.sleep(draw.uniform(0, 3 if at_step == 0 else 0.3))
        try:
            os.kill(pid, signal.SIGSTOP)
        except ProcessLookupError:
            pytest.skip("the run was over before its rank could be stopped")
        code, _, err = training.ended(timeout_s=WITHIN_S)
        if code == 0:
            pytest.skip("the rank had ended before the signal stopped it")
        assert err.splitlines()[-1].startswith(f"rrfp: rank {rank} (pid {pid}) stood still "), err
        assert not processes_of(training.run)


TOO_EARLY = {
    "os._exit": "os._exit(0)",
    "sys.exit": "sys.exit(0)",
    "sys.exit-without-a-code": "sys.exit()",
    "a-c-library": "import ctypes; ctypes.CDLL(None).exit(0)",
    "a-thread": "import threading; t = threading.Thread(target=os._exit, args=[0]); "
    "t.start(); t.join(60)",
}


@pytest.mark.parametrize(
    ("how", "flags"),
    [
        pytest.param("os._exit", "--pp 2", marks=pytest.mark.slow),
        ("sys.exit", "--pp 1 --save saved"),
        pytest.param("sys.exit", "--pp 2 --dp 2", marks=pytest.mark.slow),
        pytest.param("sys.exit-without-a-code", "--pp 1", marks=pytest.mark.slow),
        pytest.param("a-c-library", "--pp 1", marks=pytest.mark.slow),
        pytest.param("a-thread", "--pp 1", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_end_with_0_before_their_last_step_have_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, flags: str
) -> None:
    monkeypatch.setenv("RRFP_STOP", "*:megatron.core.pipeline_parallel.schedules:forward_step:14")
    monkeypatch.setenv("RRFP_STOP_BY", TOO_EARLY[how])
    monkeypatch.setenv("PYTHONPATH", f"{STOPS}:{os.environ.get('PYTHONPATH', '')}")
    more = flags.replace("saved", str(tmp_path / "saved")).split()
    run = tmp_path / "run"
    with Training(run, "--steps", "8", *more) as training:
        code, _, err = training.ended()
    assert code == 1, err
    last = err.splitlines()[-1]
    assert re.fullmatch(
        rf"rrfp: rank \d exited with code 0 in step 3 of 8; see {run}/logs/rank-\d\.log", last
    )
    ending = read_ending(RunDir(run))
    assert ending is not None
    assert (ending.outcome, ending.error) == (Outcome.FAILED, last.removeprefix("rrfp: "))


def test_a_rank_that_ends_with_0_in_start_up_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RRFP_STOP", "*:rrfp.train.settings::1")
    monkeypatch.setenv("RRFP_STOP_BY", "os._exit(0)")
    monkeypatch.setenv("PYTHONPATH", f"{STOPS}:{os.environ.get('PYTHONPATH', '')}")
    with Training(tmp_path / "run", "--pp", "1", "--steps", "2") as training:
        code, _, err = training.ended()
    assert (code, "rank 0 exited with code 0 in start-up; see " in err) == (1, True), err


BUSY = "import time; end = time.monotonic() + 40\nwhile time.monotonic() < end: pass"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "silence", "warns"),
    [
        (
            "import socket; server = socket.create_server(('127.0.0.1', 0)); "
            "server.settimeout(40)\ntry: server.accept()\nexcept TimeoutError: pass",
            "3",
            True,
        ),
        ("import ctypes; assert ctypes.PyDLL(None).sleep(25) == 0", "15", False),
        (
            f"import subprocess; subprocess.run([sys.executable, '-c', {BUSY!r}], "
            "start_new_session=True)",
            "3",
            False,
        ),
    ],
    ids=["a-debugger", "c-code", "a-compiler"],
)
def test_a_healthy_rank_that_waits_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, silence: str, warns: bool
) -> None:
    monkeypatch.setenv("RRFP_STOP", "1:rrfp.train.loop:Trainer.train_step:2")
    monkeypatch.setenv("RRFP_STOP_BY", code)
    monkeypatch.setenv("PYTHONPATH", f"{STOPS}:{os.environ.get('PYTHONPATH', '')}")
    run = tmp_path / "run"
    with Training(run, "--pp", "2", "--steps", "3", "--silence", silence) as training:
        ended, _, err = training.ended(timeout_s=200)
    assert ended == 0, err
    assert ("Warning: rank 1 (pid " in err) == warns, err
    if warns:
        assert "its stack is in" in err
        assert "in accept" in (run / "logs" / "rank-1.log").read_text()


# What the kernel counts in cgroups names the cause of a failure: memory, and processes.


NO_MORE = f"[Errno {errno.EAGAIN}] Resource temporarily unavailable"


class Fake:
    """The files of one version of cgroups, as a container or a host has them."""

    def __init__(self, root: Path, version: int, within: str = "/") -> None:
        self.root = root
        at = "sys/fs/cgroup"
        if version == 2:
            lines, mounts = ["0::{}"], [(at, "cgroup2", "rw")]
        else:
            lines = ["4:memory:{}", "3:pids:{}", "0::/"]
            mounts = [(f"{at}/{name}", "cgroup", f"rw,{name}") for name in ("memory", "pids")]
            mounts.append((f"{at}/unified", "cgroup2", "rw"))
        (root / "proc/self").mkdir(parents=True)
        own = f"{within}/job/step".replace("//", "/")
        (root / "proc/self/cgroup").write_text(
            "".join(f"{line}\n" for line in lines).format(*[own] * 3)
        )
        (root / "proc/self/mountinfo").write_text(
            "24 1 0:22 / /proc rw - proc proc rw\n"
            + "".join(f"30 24 0:26 {within} /{m} rw - {k} cgroup {o}\n" for m, k, o in mounts)
        )
        names = ("", "") if version == 2 else ("memory", "pids")
        self.memory, self.pids = (root / at / name / "job/step" for name in names)
        self.kills = self.memory / ("memory.events" if version == 2 else "memory.oom_control")
        limit = self.memory.parent / ("memory.max" if version == 2 else "memory.limit_in_bytes")
        for each in (self.memory, self.pids):
            each.mkdir(parents=True, exist_ok=True)
        limit.write_text(f"{512 << 20}\n")
        (self.pids.parent / "pids.max").write_text("64\n")
        (self.pids / "pids.max").write_text("max\n")
        (self.memory / limit.name).write_text("max\n" if version == 2 else f"{2**63 - 4096}\n")
        self.count(kills=2, refusals=1)

    def count(self, *, kills: int = 2, refusals: int = 1) -> None:
        self.kills.write_text(f"oom_kill_disable 0\noom_kill {kills}\n")
        (self.pids.parent / "pids.events").write_text(f"max {refusals}\n")


@pytest.fixture(params=[(1, "/"), (2, "/"), (1, "/docker/4711"), (2, "/docker/4711")])
def fake(tmp_path: Path, request: pytest.FixtureRequest) -> Fake:
    return Fake(tmp_path / "root", *request.param)


def sentence(limits: CgroupLimits, failure: Failure) -> str:
    return str(_first_failure({1: failure}, RunDir(Path("run")), lambda: None, 8, limits))


KILLED = Failure(7, -signal.SIGKILL, 0.0, None)


def test_the_oom_killer_is_named(fake: Fake) -> None:
    limits = CgroupLimits(fake.root)
    assert sentence(limits, KILLED).startswith("rank 1 (pid 7) was killed by SIGKILL; ")
    fake.count(kills=3)
    assert sentence(limits, KILLED) == (
        "rank 1 (pid 7) was killed by the kernel's OOM killer at its cgroup's memory limit of 512 "
        "MiB; its last output is in run/logs/rank-1.log"
    )
    segv = Failure(7, -signal.SIGSEGV, 0.0, None)
    assert "was killed by SIGSEGV; " in sentence(limits, segv)


def test_a_full_pids_cgroup_is_named(fake: Fake) -> None:
    limits = CgroupLimits(fake.root)
    report = FailureReport(f"BlockingIOError: {NO_MORE}", 1, False, False)
    ended = Failure(7, 1, 0.0, None, stage="in step 3")
    full = "; the cgroup has reached its limit of 64 processes and threads (pids.max)"
    assert full not in sentence(limits, Failure(7, 1, 0.0, report)) + sentence(limits, ended)
    fake.count(refusals=2)
    assert f"{NO_MORE}{full} (see " in sentence(limits, Failure(7, 1, 0.0, report))
    assert f"exited with code 1 in step 3 of 8{full}; see " in sentence(limits, ended)
    other = FailureReport("ValueError: no", 1, False, False)
    assert full not in sentence(limits, Failure(7, 1, 0.0, other))


@pytest.mark.parametrize("text", ["", "0::/gone\n", "not a line\n", "4:memory\n"])
def test_where_nothing_can_be_read_nothing_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(text)
    for _ in range(2):
        limits = CgroupLimits(tmp_path)
        assert sentence(limits, KILLED).startswith("rank 1 (pid 7) was killed by SIGKILL; ")
        (tmp_path / "proc/self/mountinfo").write_text("30 24 0:26 / /x rw - cgroup2\nrubbish\n")


@pytest.fixture(params=["memory", "pids"])
def limited(request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    """A controller, and the file of a cgroup with a limit, to join it."""
    name = request.param
    at = next(
        (each for each in (Path("/sys/fs/cgroup") / name, Path("/sys/fs/cgroup")) if each.is_dir()),
        Path("/sys/fs/cgroup"),
    )
    group = at / f"rrfp-test-{os.getpid()}"
    limits = {"memory": ("memory.limit_in_bytes", "memory.max"), "pids": ("pids.max",)}
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        limit = next((group / each for each in limits[name] if (group / each).exists()), None)
        if limit is None:
            pytest.skip(f"cgroups made here have no {name} controller")
        limit.write_text(str(1 << 30 if name == "memory" else 6))
        yield name, group / "cgroup.procs"
    finally:
        with suppress(OSError):
            group.rmdir()


def test_limits_of_a_real_cgroup(
    limited: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, procs = limited
    if name == "memory":
        monkeypatch.setenv("RRFP_STOP", "0:rrfp.train.models.model:build_model:1")
        monkeypatch.setenv("RRFP_STOP_BY", "b'x' * (2 << 30)")
        monkeypatch.setenv("PYTHONPATH", f"{STOPS}:{os.environ.get('PYTHONPATH', '')}")
    within = ("sh", "-c", f'echo $$ > {procs} && exec "$@"', "-")
    with Training(tmp_path / "run", "--pp", "1", "--steps", "2", within=within) as training:
        code, _, err = training.ended()
    assert code == 1
    last = err.splitlines()[-1]
    if name == "memory":
        assert "killed by the kernel's OOM killer at its cgroup's memory limit of 1,024 MiB" in last
    else:
        assert "the cgroup has reached its limit of 6 processes and threads (pids.max)" in last
