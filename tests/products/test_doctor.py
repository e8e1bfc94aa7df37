"""`rrfp doctor`: each check says what it finds, and only what a run needs ends it."""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.bare_calls import one_way_us
from rrfp.compiled import Core
from rrfp.doctor import checks as gloo_file
from rrfp.doctor import checks as imports_file
from rrfp.doctor import checks as nixl_file
from rrfp.doctor import cuda_ipc as ipc_file
from rrfp.doctor import diagnosis
from rrfp.doctor import gpus as gpus_file
from rrfp.doctor.checks import (
    CUDA_RUNS,
    EVERY_RUN,
    Check,
    State,
    absent,
    clock,
    compiled_core,
    cores,
    fabric,
    fails,
    gloo,
    imports,
    nixl,
    open_files,
    port_filter,
    quota_cores,
    read_gb_s,
    seconds_to_import,
    shared_memory,
    sum_us,
)
from rrfp.doctor.cuda_ipc import cuda_ipc, pull_s
from rrfp.doctor.gpus import copy_gb_s, gpu_figures, gpus, pid_namespace
from rrfp.runtime.device.cuda_runtime import (
    CudaPresence,
    CudaRuntimeError,
    Gpu,
    check_cuda,
    has_bindings,
)
from rrfp.runtime.isolated_call import NoAnswerError, call_isolated
from rrfp.runtime.launchers import NETWORK
from rrfp.runtime.net import source_filter
from rrfp.runtime.planes.registry import is_installed
from rrfp.train.settings import DeviceKind, Network
from tests.doubles import cuda_in_files
from tests.security.sandbox import refusing
from tests.train.trained import rrfp, rrfp_here

NAMES = [
    *("gpu", "gpu-clock", "peer-access", "cuda-ipc", "pid-namespace", "nixl", "fabric", "clock"),
    *("cores", "open-files", "temp-dir", "shm-room", "shm-speed", "torch", "megatron-core"),
    *("core", "gloo", "private-network", "port-filter"),
]
NO_GPU = CudaPresence((), "there is none")
TWO_GPUS = CudaPresence(tuple(Gpu("NVIDIA H200", 150_000_000_000, uuid) for uuid in "01"), None)

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")

Answers = Callable[..., None]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """`answers(file, told)`: what the checks of a file are answered, or the reason why nothing."""

    def answer(file: Any, told: object) -> None:
        def answer_or_raise(*_: object, **__: object) -> object:
            if isinstance(told, Exception):
                raise told
            return told

        monkeypatch.setattr(file, "call_isolated", answer_or_raise)

    return answer


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Run `rrfp doctor` where these checks are what is found: exit code, stdout, stderr."""

    def run(checks: list[Check], *flags: str) -> tuple[int, str, str]:
        monkeypatch.setattr(diagnosis, "diagnose", lambda: checks)
        done = rrfp_here(tmp_path, "doctor", *flags)
        return done.returncode, done.stdout, done.stderr

    return run


def test_this_machine_can_train_on_its_cpu(tmp_path: Path) -> None:
    done = rrfp(tmp_path, "doctor", "--format", "json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [*told] == ["checks"]
    assert [each["name"] for each in told["checks"]] == NAMES
    for each in told["checks"]:
        assert [*each] == ["name", "state", "figure", "unit", "advice"]
        assert each["state"] in [*State]
        assert (each["figure"] is None) is (each["state"] in ("absent", "fails"))
        assert each["advice"]
    if (problem := check_cuda().problem) is not None:
        assert told["checks"][0]["advice"] == problem


def test_a_run_is_refused_with_what_the_doctor_says(
    found: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("rrfp.train.checks.check_cuda", lambda: NO_GPU)
    code, _, stderr = found([*gpus(NO_GPU)], "--device", "cuda")
    train = rrfp_here(tmp_path, "train", "--device", "cuda")
    assert (code, train.returncode) == (1, 2)
    assert stderr == train.stderr == f"rrfp: {NO_GPU.problem}\n"
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("check", "on_cpu", "on_cuda"),
    [
        (absent("gpu", "no GPU", CUDA_RUNS), 0, 1),
        (fails("gloo", "no gloo", EVERY_RUN), 1, 1),
        (fails("nixl", "no NIXL"), 0, 0),
        (Check("clock", State.SLOW, 2000, "ns", "slow", EVERY_RUN), 0, 0),
    ],
)
def test_only_what_a_run_needs_ends_it(
    found: Callable[..., tuple[int, str, str]], check: Check, on_cpu: int, on_cuda: int
) -> None:
    code, stdout, stderr = found([check], "--format", "json")
    assert (code, json.loads(stdout)) == (on_cpu, {"checks": [check.as_json()]})
    assert stderr == (f"rrfp: {check.advice}\n" if on_cpu else "")
    assert check.prevents_runs_on(DeviceKind.CUDA) is bool(on_cuda)


# Of each check, what it says of a machine that is not this one.


def test_the_quota_of_a_container_counts(tmp_path: Path) -> None:
    assert quota_cores(tmp_path) is None
    first = tmp_path / "cpu"
    first.mkdir()
    (first / "cpu.cfs_period_us").write_text("100000\n")
    (first / "cpu.cfs_quota_us").write_text("-1\n")
    assert quota_cores(tmp_path) is None
    (first / "cpu.cfs_quota_us").write_text("50000\n")
    assert quota_cores(tmp_path) == 0.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert quota_cores(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    check = cores(tmp_path)
    assert check.figure == min(1.5, len(os.sched_getaffinity(0)))
    assert check.state is State.SLOW
    assert "4 ranks share them" in check.advice


@pytest.mark.parametrize(
    ("most", "state", "figure"),
    [
        (63, State.FAILS, None),
        (64, State.SLOW, 64),
        (1023, State.SLOW, 1023),
        (1024, State.OK, 1024),
        (resource.RLIM_INFINITY, State.OK, 2**31 - 1),
    ],
)
def test_few_open_files_are_too_few(
    monkeypatch: pytest.MonkeyPatch, most: int, state: State, figure: int | None
) -> None:
    """A run meets the hard limit alone."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (63, most))
    check = open_files()
    assert (check.state, check.figure) == (state, figure)
    assert check.prevents_runs_on(DeviceKind.CPU) is (state is State.FAILS)


def test_a_run_with_too_few_open_files_is_refused_with_what_the_doctor_says(
    found: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (48, 48))
    _, _, stderr = found([open_files()])
    assert stderr == rrfp_here(tmp_path, "train").stderr
    assert "may have 48 files open" in stderr


def test_shared_memory_that_is_not_there(tmp_path: Path) -> None:
    room, speed = shared_memory(tmp_path / "shm")
    assert room.state is State.ABSENT
    assert "(No such file or directory); mount a tmpfs there" in room.advice
    assert speed.figure


def test_shared_memory_without_room_is_an_error_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    room, speed = shared_memory(tmp_path)
    assert speed.state in (State.OK, State.SLOW)
    assert speed.figure
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    _, speed = shared_memory(tmp_path)
    assert speed.state is State.FAILS
    assert "No space left on device" in speed.advice
    assert speed.advice.endswith("; see how much memory is free")
    monkeypatch.setattr(os, "access", lambda *_: False)
    room, _ = shared_memory(tmp_path)
    assert (room.state, room.advice) == (
        State.FAILS,
        f"this user may not write to {tmp_path}; mount it with mode 1777",
    )
    monkeypatch.undo()
    few = os.statvfs_result((4096, 4096, 9, 9, 9, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: few)
    room, _ = shared_memory(tmp_path)
    assert room.state is State.SLOW
    assert "--shm-size 8g" in room.advice


def test_the_clock_is_named(tmp_path: Path) -> None:
    (tmp_path / "source").write_text("hpet\n")
    assert "clock source is hpet" in clock(tmp_path / "source").advice
    assert "clock source is unknown" in clock(tmp_path / "none").advice


def test_a_containers_pid_namespace_differs_from_the_hosts(tmp_path: Path) -> None:
    for name, number in (("host", 4026531836), ("container", 4026532999)):
        (tmp_path / name).symlink_to(f"pid:[{number}]")
    assert pid_namespace(tmp_path / "host").advice == "that of the host"
    check = pid_namespace(tmp_path / "container")
    assert (check.state, check.figure) == (State.OK, 4026532999)
    assert "--pid=host" in check.advice
    assert pid_namespace(tmp_path / "none").state is State.ABSENT


def test_what_cannot_be_imported_ends_every_run(answers: Answers) -> None:
    told = seconds_to_import(["json", "rrfp.no_such_module"])
    assert isinstance(told["json"], float)
    answers(imports_file, {"torch": 25.0, "rrfp.train.loop": told["rrfp.no_such_module"]})
    torch_check, megatron = imports()
    assert (torch_check.state, torch_check.figure) == (State.SLOW, 25.0)
    assert megatron.advice == (
        "rrfp.train.loop cannot be imported (ModuleNotFoundError: No module named "
        "'rrfp.no_such_module'); install rrfp again, or raise the limit (ulimit -a) that keeps it "
        "from loading"
    )
    denied = "cannot be imported (PermissionError: [Errno 13] Permission denied: 'core.py')"
    answers(imports_file, {"torch": 1.0, "rrfp.train.loop": denied})
    _, megatron = imports()
    assert megatron.advice.endswith("; let this user read that file and the directories above it")
    answers(imports_file, NoAnswerError("it was killed: Illegal instruction"))
    for check in imports():
        assert check.prevents_runs_on(DeviceKind.CPU)
        assert "cannot be imported (it was killed: Illegal instruction)" in check.advice


def test_torch_is_not_blamed_for_what_crashes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash_after_torch(_: object, modules: list[str], **__: object) -> dict[str, float]:
        if len(modules) > 1:
            raise NoAnswerError("it was killed: Aborted")
        return {"torch": 1.0}

    monkeypatch.setattr(imports_file, "call_isolated", crash_after_torch)
    torch_check, megatron = imports()
    assert torch_check.state is State.OK
    assert "rrfp.train.loop cannot be imported (it was killed: Aborted)" in megatron.advice


def test_gloo_that_hangs_ends_every_run(answers: Answers) -> None:
    assert sum_us({}) > 0
    answers(gloo_file, 30_000.0)
    assert gloo().state is State.SLOW
    answers(gloo_file, NoAnswerError("it did not answer within 120 s"))
    check = gloo()
    assert check.prevents_runs_on(DeviceKind.CPU)
    assert check.advice == (
        "gloo does not work on 127.0.0.1 (it did not answer within 120 s); see whether torch can be"
        " imported, and no firewall fences loopback"
    )


def test_gloo_names_what_was_refused(answers: Answers) -> None:
    refused = "PermissionError: [Errno 1] Operation not permitted, at `x.listen()` (x.py, line 3)"
    answers(gloo_file, NoAnswerError(refused, "PermissionError"))
    check = gloo()
    assert f"({refused})" in check.advice
    assert "torch" not in check.advice


def test_the_doctor_names_what_a_container_refuses(tmp_path: Path) -> None:
    refused = refusing("unshare", "memfd_create", "setsockopt")
    done = subprocess.run(
        [*refused, sys.executable, "-m", "rrfp", "doctor", "--format", "json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    told = {each["name"]: each for each in json.loads(done.stdout)["checks"]}
    assert told["gloo"]["state"] in ("ok", "slow")
    for name, call in (
        ("private-network", "(unshare: Operation not permitted)"),
        ("port-filter", "(setsockopt(SO_ATTACH_FILTER): Operation not permitted)"),
        ("shm-speed", "os.memfd_create"),
    ):
        assert told[name]["state"] in ("absent", "fails")
        assert call in told[name]["advice"]


def test_a_filter_is_timed_also_if_it_was_tried_before(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(source_filter, "_attach", lambda *_: time.sleep(0.01))
        for _ in range(2):
            figure = port_filter().figure
            assert figure is not None
            assert figure >= 10_000
    source_filter.filter_refusal.cache_clear()


def test_gloo_is_tried_in_the_network_that_ranks_enter() -> None:
    network = {NETWORK: f"{Network.PRIVATE}:/proc/self/ns/no-such"}
    with pytest.raises(NoAnswerError, match="this rank cannot enter the network"):
        call_isolated(sum_us, network, limit_s=60.0)


def test_without_a_place_for_temporary_files_nothing_else_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    done = rrfp_here(tmp_path, "doctor", "--format", "json")
    assert done.returncode == 1
    (check,) = json.loads(done.stdout)["checks"]
    assert (check["name"], check["state"]) == ("temp-dir", "fails")
    assert "set TMPDIR to one that can" in check["advice"]
    refused = rrfp_here(tmp_path, "train", "--out", "run")
    assert (refused.returncode, refused.stderr) == (2, done.stderr)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("columns", [40, 59, 60, 200])
def test_the_advice_is_shown_however_narrow_the_terminal(
    found: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    check = Check("megatron-core", State.SLOW, 1234.5, "Gbit/s", "words of advice that wrap")
    _, stdout, _ = found([check])
    assert "words of advice that wrap" in " ".join(stdout.split())
    assert "1234.5 Gbit/s" in stdout


@pytest.fixture
def ports(tmp_path: Path) -> Callable[..., Path]:
    """Ports of devices as the kernel shows them."""

    def port(device: str, state: str, rate: str) -> Path:
        directory = tmp_path / device / "ports" / "1"
        directory.mkdir(parents=True)
        (directory / "state").write_text(f"{state}\n")
        (directory / "rate").write_text(f"{rate}\n")
        return tmp_path

    return port


def test_a_fabric_is_as_fast_as_its_fastest_active_port(ports: Callable[..., Path]) -> None:
    root = ports("mlx5_0", "1: DOWN", "400 Gb/sec (4X NDR)")
    assert fabric(root).state is State.FAILS
    ports("mlx5_1", "4: ACTIVE", "200 Gb/sec (4X HDR)")
    ports("mlx5_2", "4: ACTIVE", "unknown")
    check = fabric(root, resource.RLIM_INFINITY)
    assert (check.state, check.figure, check.unit) == (State.OK, 200, "Gbit/s")
    assert check.advice == "mlx5_1, mlx5_2"
    locked = fabric(root, 8 << 20)
    assert locked.state is State.SLOW
    assert "ulimit -l unlimited" in locked.advice
    assert fabric(root / "none").state is State.ABSENT


def test_nixl(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_file, "is_installed", lambda: False)
    assert nixl().state is State.ABSENT
    assert nixl().advice.endswith("; pip install '.[nixl]' in a checkout of rrfp")
    monkeypatch.setattr(nixl_file, "is_installed", lambda: True)
    answers(nixl_file, NoAnswerError("it was killed: Segmentation fault"))
    assert nixl().advice == (
        "a READ on this host fails (it was killed: Segmentation fault); reinstall it: "
        "pip install '.[nixl]' in a checkout of rrfp"
    )
    answers(nixl_file, 0.2)
    assert nixl().state is State.SLOW


def test_nixl_reads_what_was_there() -> None:
    if not is_installed():
        pytest.skip("NIXL is not installed")
    assert call_isolated(read_gb_s, limit_s=60) > 0


# What GPUs are said to reach is made up; benchmarks/gpu has the real ones.
FIGURES = {
    "copy_gb_s": [1900.0, 1880.0],
    "clock_mhz": [1950.0, 1960.0],
    "highest_mhz": [1980.0, 1980.0],
    "peer_gb_s": [[0, 1, True, 380.0], [1, 0, True, 370.0]],
}


def test_gpus_that_are_well(answers: Answers) -> None:
    answers(gpus_file, FIGURES)
    gpu, gpu_clock, peers = gpus(TWO_GPUS)
    assert {gpu.state, gpu_clock.state, peers.state} == {State.OK}
    assert (gpu.figure, gpu.advice) == (1880, "2 x NVIDIA H200, 140 GiB")
    assert (gpu_clock.figure, gpu_clock.unit) == (1950, "MHz")
    assert (peers.figure, peers.advice) == (370, "from GPU 1 to 0, the slowest pair")


@pytest.mark.parametrize(
    ("found", "state"),
    [(Core.COMPILED, State.OK), (Core.INTERPRETED, State.SLOW), (Core.STALE, State.SLOW)],
)
def test_a_core_that_is_not_compiled_is_slow(found: Core, state: State) -> None:
    check = compiled_core(found)
    assert check.state is state
    assert check.figure is not None
    assert check.figure > 0
    assert str(found) in check.advice
    assert ("make setup" in check.advice) is (found is not Core.COMPILED)


@pytest.mark.parametrize(
    ("changed", "name", "words"),
    [
        ({"copy_gb_s": [1900.0, 900.0]}, "gpu", "GPU 1 is far slower than the best"),
        ({"clock_mhz": [1200.0, 1960.0]}, "gpu-clock", "GPU 0 under a light load, of 1980 at most"),
        ({"peer_gb_s": [[0, 1, False, 9.0], [1, 0, True, 37.0]]}, "peer-access", "1 of 2 pairs"),
    ],
)
def test_a_gpu_that_lags_is_named(
    answers: Answers, changed: dict[str, Any], name: str, words: str
) -> None:
    answers(gpus_file, FIGURES | changed)
    (check,) = (each for each in gpus(TWO_GPUS) if each.state is not State.OK)
    assert (check.name, check.state) == (name, State.SLOW)
    assert words in check.advice


def test_one_gpu_has_no_peer_and_a_failing_one_ends_runs_on_it(answers: Answers) -> None:
    answers(gpus_file, FIGURES | {"peer_gb_s": []})
    assert [*gpus(TWO_GPUS)][2].state is State.ABSENT
    answers(gpus_file, NoAnswerError("RuntimeError: CUDA error: unspecified launch failure"))
    check, *_ = gpus(TWO_GPUS)
    assert check.state is State.FAILS
    assert check.prevents_runs_on(DeviceKind.CUDA)
    assert "unspecified launch failure" in check.advice


@without_gpu
@pytest.mark.parametrize("measure", [gpu_figures, lambda: copy_gb_s(0, 0)])
def test_measuring_a_gpu_refuses_without_a_driver(measure: Callable[[], object]) -> None:
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        measure()


@pytest.fixture
def in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have files in the place of CUDA, here and in the importing process; plant a fault in it."""
    bindings = tmp_path / "path" / "cuda" / "bindings"
    bindings.mkdir(parents=True)
    (bindings / "__init__.py").touch()
    (bindings / "runtime.py").write_text("from tests.doubles.cuda_in_files import *\n")
    (tmp_path / "memory").mkdir()
    path = os.pathsep.join([str(tmp_path / "path"), str(Path(__file__).parents[2])])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv(cuda_in_files.DIRECTORY, str(tmp_path / "memory"))
    return lambda fault: monkeypatch.setenv(cuda_in_files.FAULT, fault)


@pytest.mark.usefixtures("in_files")
def test_two_processes_exchange_memory_and_free_it_in_order(tmp_path: Path) -> None:
    assert call_isolated(pull_s, 3 << 20, 5, limit_s=60) > 0
    assert [*(tmp_path / "memory").glob("*.open")] == []


@pytest.mark.usefixtures("in_files")
def test_bare_calls_carry_messages(tmp_path: Path) -> None:
    assert call_isolated(one_way_us, 1 << 16, 5, limit_s=60) > 0
    assert [*(tmp_path / "memory").glob("*.open")] == []


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (cuda_in_files.CORRUPT, "the importing process: RuntimeError: what came over CUDA IPC is"),
        (
            cuda_in_files.REFUSED,
            "cudaIpcOpenMemHandle: cudaErrorMapBufferObjectFailed, mapping",
        ),
        (cuda_in_files.GONE, "RuntimeError: the importing process is gone"),
    ],
)
def test_errors_of_the_importing_process_are_reported(
    in_files: Callable[[str], None], fault: str, reason: str
) -> None:
    in_files(fault)
    with pytest.raises(NoAnswerError) as refused:
        call_isolated(pull_s, 1 << 20, 1, limit_s=60)
    assert reason in str(refused.value)


def test_cuda_ipc_check(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_ipc(NO_GPU).state is State.ABSENT
    monkeypatch.setattr(ipc_file, "has_bindings", lambda: False)
    assert "pip install '.[cuda]' in a checkout of rrfp" in cuda_ipc(TWO_GPUS).advice
    monkeypatch.setattr(ipc_file, "has_bindings", lambda: True)
    answers(ipc_file, (1 << 26) / 300e9)
    check = cuda_ipc(TWO_GPUS)
    assert (check.state, check.figure) == (State.OK, 300)
    assert check.advice == "from GPU 0 to GPU 1, 64 MiB"
    answers(ipc_file, NoAnswerError("RuntimeError: cudaIpcOpenMemHandle: invalid argument"))
    assert cuda_ipc(TWO_GPUS).state is State.FAILS


@without_gpu
def test_cuda_ipc_refuses_without_a_driver() -> None:
    if not has_bindings():
        with pytest.raises(CudaRuntimeError, match="pip install 'rrfp\\[cuda\\]'"):
            pull_s(1 << 16, 1)
        pytest.skip("cuda-bindings is not installed")
    with pytest.raises(RuntimeError, match="cudaSetDevice: cudaErrorInsufficientDriver"):
        pull_s(1 << 16, 1)
