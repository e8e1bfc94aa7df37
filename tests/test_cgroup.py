"""What the kernel counts in cgroups names the cause of a failure: memory, and processes."""

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rrfp.trace.run_dir import RunDir
from rrfp.train.launch.failure import FailureReport
from rrfp.train.launch.launcher import _first_failure
from rrfp.train.launch.processes import CgroupLimits, Failure
from tests.test_standing_still import STOPS
from tests.trained import Training

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


def told(limits: CgroupLimits, failure: Failure) -> str:
    return str(_first_failure({1: failure}, RunDir(Path("run")), lambda: None, 8, limits))


KILLED = Failure(7, -signal.SIGKILL, 0.0, None)


def test_the_oom_killer_is_named(fake: Fake) -> None:
    limits = CgroupLimits(fake.root)
    assert told(limits, KILLED).startswith("rank 1 (pid 7) was killed by SIGKILL; ")
    fake.count(kills=3)
    assert told(limits, KILLED) == (
        "rank 1 (pid 7) was killed by the kernel's OOM killer at its cgroup's memory limit of 512 "
        "MiB; its last output is in run/logs/rank-1.log"
    )
    segv = Failure(7, -signal.SIGSEGV, 0.0, None)
    assert "was killed by SIGSEGV; " in told(limits, segv)


def test_a_full_pids_cgroup_is_named(fake: Fake) -> None:
    limits = CgroupLimits(fake.root)
    report = FailureReport(f"BlockingIOError: {NO_MORE}", 1, False, False)
    ended = Failure(7, 1, 0.0, None, stage="in step 3")
    full = "; the cgroup has reached its limit of 64 processes and threads (pids.max)"
    assert full not in told(limits, Failure(7, 1, 0.0, report)) + told(limits, ended)
    fake.count(refusals=2)
    assert f"{NO_MORE}{full} (see " in told(limits, Failure(7, 1, 0.0, report))
    assert f"exited with code 1 in step 3 of 8{full}; see " in told(limits, ended)
    other = FailureReport("ValueError: no", 1, False, False)
    assert full not in told(limits, Failure(7, 1, 0.0, other))


@pytest.mark.parametrize("text", ["", "0::/gone\n", "not a line\n", "4:memory\n"])
def test_where_nothing_can_be_read_nothing_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(text)
    for _ in range(2):
        limits = CgroupLimits(tmp_path)
        assert told(limits, KILLED).startswith("rank 1 (pid 7) was killed by SIGKILL; ")
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
