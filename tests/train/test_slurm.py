"""Ranks are found from the environment: that of srun, that of torchrun, and one that is wrong."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rrfp.errors import UsageError
from rrfp.runtime.device.cuda_runtime import CudaPresence, Gpu
from rrfp.runtime.launchers import (
    MAX_HOSTS,
    expand_host_list,
    find_place,
    missing_torch_environment,
)
from rrfp.train import checks as device_checks
from rrfp.train.checks import check_settings
from rrfp.train.launch.hosts import joining as gpus
from rrfp.train.launch.hosts.endpoint import local_ranks, with_launcher_hosts
from rrfp.train.launch.hosts.joining import LauncherGpus, check_gpus_distinct, joined_hosts
from rrfp.train.settings import TrainSettings
from tests.e2e.ranks import run_ranks
from tests.train.trained import TINY, free_port, read_metrics, rrfp_here

# srun as its tasks see it: processes with the variables that Slurm documents.


pytestmark = pytest.mark.timeout(200)


JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "node[01-03]",
}


def task(index: int, num_tasks: int, nodes: str = "localhost") -> dict[str, str]:
    """The variables of a task of a step on one node."""
    return {
        **JOB,
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_TASKS": str(num_tasks),
        "SLURM_STEP_TASKS_PER_NODE": str(num_tasks),
        "SLURM_NTASKS": str(num_tasks),
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index),
        "SLURM_NODEID": "0",
    }


def srun(
    num_tasks: int, directory: Path, *arguments: str, timeout_s: float = 120
) -> list[tuple[int, str, str]]:
    """Run `rrfp ARGUMENTS` as `num_tasks` tasks; returns exit code, stdout and stderr of each."""
    port = {"MASTER_PORT": str(free_port())}
    environments = [os.environ | task(index, num_tasks) | port for index in range(num_tasks)]
    tasks = [_start(environment, directory, arguments) for environment in environments]
    try:
        told = [each.communicate(timeout=timeout_s) for each in tasks]
    finally:
        for each in tasks:
            each.kill()
    return [(each.returncode, *said) for each, said in zip(tasks, told, strict=True)]


def _start(
    environment: dict[str, str], directory: Path, arguments: Sequence[str]
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rrfp", *arguments],
        cwd=directory,
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "one",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node[01-03,7],gpu1", "node01 node02 node03 node7 gpu1"),
        ("gpu1", "gpu1"),
        ("rack[1-2]n[09-10]", "rack1n09 rack1n10 rack2n09 rack2n10"),
        ("n[1-2]-ib,n[098-101]", "n1-ib n2-ib n098 n099 n100 n101"),
        ("10.0.0.[1,3]", "10.0.0.1 10.0.0.3"),
    ],
)
def test_a_list_of_hosts_is_expanded(text: str, hosts: str) -> None:
    assert expand_host_list(text) == hosts.split()


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z][a-z0-9-]{0,5}[a-z]", fullmatch=True),
            st.integers(1, 4),
            st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=3),
            st.sampled_from(["", "-ib", ".cluster"]),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_list_is_expanded_as_it_was_written(items: list[Any]) -> None:
    written, hosts = [], []
    for name, width, ranges, suffix in items:
        spans = ",".join(f"{low:0{width}}-{low + more:0{width}}" for low, more in ranges)
        written.append(f"{name}[{spans}]{suffix}" if ranges else name + suffix)
        numbers = [f"{n:0{width}}" for low, more in ranges for n in range(low, low + more + 1)]
        hosts += [f"{name}{number}{suffix}" for number in (numbers if ranges else [""])]
    assert expand_host_list(",".join(written)) == hosts


@given(st.text(alphabet="ab1-09[],", max_size=12))
def test_what_is_no_list_of_hosts_is_a_value_error(text: str) -> None:
    hosts, reason = [], ""
    try:
        hosts = expand_host_list(text)
    except ValueError as error:
        reason = str(error)
    assert bool(hosts) != reason.startswith(("it ", "its ", "'"))
    assert all(hosts)
    assert not set("[],") & set("".join(hosts))


@pytest.mark.parametrize("text", ["n[0-99999999]", "a[1-300]b[1-300]", "n[1-65536],m"])
def test_a_list_without_end_is_refused_at_once(text: str) -> None:
    with pytest.raises(ValueError, match=f"more than {MAX_HOSTS} hosts"):
        expand_host_list(text)


def test_a_task_of_srun_finds_its_place() -> None:
    told = {
        **task(5, 6, "node[01-03]"),
        "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "2",
    }
    found = find_place(told)
    assert found is not None
    assert (found.index, found.count, found.local_index, found.local_count) == (5, 6, 1, 2)
    assert (found.host, found.is_one_host, found.serves_store) == ("node01", False, False)
    assert 20_000 <= found.port < 30_000
    assert found.torch_environment() == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node01",
        "MASTER_PORT": str(found.port),
    }


def test_the_jobs_list_serves_where_the_step_has_none() -> None:
    told = {
        "SLURM_PROCID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
        "SLURM_JOB_NODELIST": "node[01-02]",
        "MASTER_ADDR": "head",
        "MASTER_PORT": "1234",
    }
    found = find_place(told)
    assert found is not None
    assert (found.index, found.count, found.host, found.port) == (1, 2, "head", 1234)
    assert found.local_count is None


def test_the_script_of_a_job_is_no_task() -> None:
    batch = {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "8",
        "SLURM_JOB_NODELIST": "node[01-02]",
        "ENVIRONMENT": "BATCH",
    }
    assert find_place(batch) is None
    # srun passes the script's environment on.
    assert find_place({**batch, **task(1, 2)}) is not None


def test_torchrun_under_srun_goes_first() -> None:
    found = find_place({**TORCHRUN, **task(1, 2)})
    assert found is not None
    assert (found.index, found.count, found.host, found.serves_store) == (3, 4, "node7", True)
    assert missing_torch_environment({**TORCHRUN, **task(1, 2)}) == {}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"SLURM_STEP_NUM_TASKS": None, "SLURM_NTASKS": None}, "SLURM_NTASKS is not set"),
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID is 4 and SLURM_STEP_NUM_TASKS is 4"),
        ({"SLURM_PROCID": "-1"}, "SLURM_PROCID is '-1'"),
        ({"SLURM_PROCID": "²"}, "SLURM_PROCID is '²'"),
        ({"SLURM_LOCALID": None}, "SLURM_LOCALID is not set"),
        ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID is 2 on a node with 2 tasks"),
        ({"SLURM_NODEID": None}, "SLURM_NODEID is not set"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID is 2 and SLURM_STEP_NODELIST has 2 nodes"),
        ({"SLURM_PROCID": "0"}, "task 0 runs on node 1 of SLURM_STEP_NODELIST"),
        ({"SLURM_STEP_NODELIST": "n[1"}, "is no list of hosts"),
        ({"SLURM_STEP_NODELIST": "a,b,c"}, "SLURM_STEP_NODELIST has 3 nodes"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, "do not go together"),
        ({"SLURM_STEP_TASKS_PER_NODE": "many"}, "is not a list such as"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x999999999)"}, "is not a list such as"),
        ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK is 1"),
        ({"RANK": "3"}, "WORLD_SIZE is not set"),
    ],
)
def test_variables_that_contradict_each_other_are_one_sentence(
    changes: dict[str, str | None], sentence: str
) -> None:
    told: dict[str, str | None] = {
        **task(3, 4, "node[1-2]"),
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        **changes,
    }
    with pytest.raises(UsageError, match=r"\A[^\n]*; [^\n]*\Z") as refused:
        find_place({name: value for name, value in told.items() if value is not None})
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"RANK": None}, "RANK is not set"),
        ({"RANK": "4"}, "RANK is 4 and WORLD_SIZE is 4"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is 2 and LOCAL_WORLD_SIZE is 2"),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE is 8 and WORLD_SIZE is 4"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000 and a port is at most 65535"),
    ],
)
def test_so_are_those_of_torchrun(changes: dict[str, str | None], sentence: str) -> None:
    told = {**TORCHRUN, **changes}
    with pytest.raises(UsageError) as refused:
        find_place({name: value for name, value in told.items() if value is not None})
    assert sentence in str(refused.value)


def test_the_hosts_of_a_run_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in task(1, 2).items():
        monkeypatch.setenv(name, value)
    placed = with_launcher_hosts(TrainSettings(pp=4)).run
    assert (placed.nnodes, placed.node_rank) == (2, 1)
    assert placed.rdzv_endpoint is not None
    assert placed.rdzv_endpoint.startswith("127.0.0.1:2")
    named = TrainSettings(nnodes=4, node_rank=2, rdzv_endpoint="node0:29400")
    assert with_launcher_hosts(named) == named
    with pytest.raises(UsageError, match="srun has started 2 processes, which cannot share 3"):
        with_launcher_hosts(TrainSettings(pp=3, layers=9))


def test_one_task_is_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in task(0, 1).items():
        monkeypatch.setenv(name, value)
    assert with_launcher_hosts(TrainSettings()) == TrainSettings()


def test_a_script_under_srun_finds_torchs_variables(tmp_path: Path) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    (tmp_path / "script.py").write_text(
        f"import os\nprint(*(os.environ[name] for name in {names}))\n"
    )
    found = srun(2, tmp_path, "run", "--dispatch", "megatron", "--no-trace", "script.py")
    assert [out for _, out, _ in found] == ["0 2 0 2 localhost\n", "1 2 1 2 localhost\n"]
    assert [code for code, _, _ in found] == [0, 0]


def test_srun_trains(tmp_path: Path) -> None:
    """A rank a task, and no task has an --out of its own."""
    found = srun(2, tmp_path, "train", "--pp=2", "--steps=2", "--out=run", *TINY)
    assert [code for code, _, _ in found] == [0, 0], found
    assert found[1][1:] == ("", "")
    assert len(read_metrics(tmp_path / "run")) == 2
    shown = rrfp_here(tmp_path, "analyze", "bubbles", "run", "--format", "json")
    assert [rank["rank"] for rank in json.loads(shown.stdout)["ranks"]] == [0, 1]


SITE = """
from rrfp.runtime.device import cuda_runtime as cuda_presence
gpus = cuda_presence.Gpu("GPU", 2**30, "0"), cuda_presence.Gpu("GPU", 2**30, "1")
cuda_presence.check_cuda = lambda: cuda_presence.CudaPresence(gpus, None)
"""


def test_tasks_that_have_too_few_gpus_among_them_start_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them alone has enough."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    found = srun(3, tmp_path, "train", "--device=cuda", "--pp=3", "--out=run", *TINY, "--layers=3")
    assert [code for code, _, _ in found] == [2, 2, 2], found
    for _, _, said in found:
        assert "3 ranks on this host take a GPU each and it has 2; start fewer, or let" in said
    assert not [*(tmp_path / "run").glob("logs/*")]


@pytest.mark.slow
def test_torchrun_trains(tmp_path: Path) -> None:
    """Two ranks a process, over a store that torchrun does not serve."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("--no-python", sys.executable, "-m", "rrfp", "train", "--pp=4", "--steps=2"),
            *("--out=run", *TINY),
        ],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert len(read_metrics(tmp_path / "run")) == 2
    assert "C++" not in done.stderr
    assert "frame #" not in done.stderr


# Launchers that compare which GPUs their ranks are to take, before any starts a rank.


ONE_GPU_EACH = "{} ranks on {} take a GPU each and it has {}; start fewer, or let them share"


def launchers(*told: str) -> list[LauncherGpus]:
    """Launchers given as `host visible used`, with a letter per GPU."""
    parts = (each.split() for each in told)
    return [LauncherGpus(f"{host}/boot", tuple(seen), tuple(taken)) for host, seen, taken in parts]


@pytest.mark.parametrize(
    "told",
    [
        ("n0 ab a", "n0 ab b"),  # torchrun
        ("n0 a a", "n0 b b"),  # srun --gpus-per-task=1
        ("n0 ab ab", "n1 cd cd"),  # a launcher a host
    ],
)
def test_ranks_that_have_a_gpu_each(told: tuple[str, ...]) -> None:
    for own in range(len(told)):
        check_gpus_distinct(launchers(*told), own)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (("n0 ab a", "n0 ab b", "n0 ab a", "n0 ab b"), ONE_GPU_EACH.format(4, "this host", 2)),
        (("n1 c c", "n0 a a", "n0 a a"), ONE_GPU_EACH.format(2, "n0", 1)),
        # Nobody has said which of a host's processes each is; or two containers have one GPU.
        (("n0 ab a", "n0 ab a"), "ranks 0 and 1 take the same GPU, a, and NCCL takes no two"),
        (("n1 cd cd", "n0 a a", "n2 a a"), "ranks 2 and 3 take the same GPU, a, and NCCL takes"),
    ],
)
def test_ranks_that_have_not(told: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_gpus_distinct(launchers(*told), 0)


def test_the_gpus_of_a_launcher_are_decoded() -> None:
    (own_gpus,) = launchers("n0 ab a")
    assert LauncherGpus.decode([own_gpus.host, [*own_gpus.visible], [*own_gpus.used]]) == own_gpus
    for other in (None, [], ["n0", "ab", ["a"]], ["n0", ["a"], [1]]):
        with pytest.raises(ValueError, match="is not"):
            LauncherGpus.decode(other)


def test_the_ranks_of_a_task_among_those_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_ranks(TrainSettings(pp=4)) == range(4)
    for name, value in task(1, 2).items():
        monkeypatch.setenv(name, value)
    placed: dict[str, Any] = {"nnodes": 2, "rdzv_endpoint": "localhost:29500"}
    assert local_ranks(TrainSettings(pp=4, node_rank=1, **placed)) == range(2, 4)
    # Hosts that the command line names are hosts of their own.
    assert local_ranks(TrainSettings(pp=4, node_rank=0, **placed)) == range(2)


@pytest.mark.parametrize(
    ("pp", "words"),
    [(4, ONE_GPU_EACH.format(4, "this host", 2)), (2, "ranks 0 and 1 take the same GPU")],
)
def test_launchers_on_one_host_that_take_the_same_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, pp: int, words: str
) -> None:
    two = tuple(Gpu("GPU", 2**30, uuid) for uuid in "01")
    monkeypatch.setattr(gpus, "visible_gpus", lambda: two)
    endpoint = f"127.0.0.1:{free_port()}"

    def meet(node_rank: int, *, share_gpu: bool = False) -> None:
        chosen: dict[str, Any] = {"device": "cuda", "pp": pp, "share_gpu": share_gpu}
        settings = TrainSettings(nnodes=2, node_rank=node_rank, rdzv_endpoint=endpoint, **chosen)
        with joined_hosts(settings, 20.0):
            pass

    with ThreadPoolExecutor() as hosts:
        for met in [hosts.submit(meet, node_rank) for node_rank in (0, 1)]:
            with pytest.raises(UsageError, match=words):
                met.result(timeout=20)
        for met in [hosts.submit(meet, node_rank, share_gpu=True) for node_rank in (0, 1)]:
            met.result(timeout=20)


# A run on GPUs, as far as it can be seen without one: what it is refused, the GPU that a rank
# takes, its groups, and what changes in its model.


NO_DRIVER = CudaPresence((), "there is no driver")
ONE_GPU = CudaPresence((Gpu("GPU", 2**30, "0"),), None)
SMALL = {"layers": 4, "hidden": 32, "heads": 2, "seq_length": 16, "microbatches": 4, "steps": 2}


@pytest.mark.parametrize(
    ("presence", "flags", "words"),
    [
        (NO_DRIVER, {}, "there is no driver"),
        (ONE_GPU, {}, "4 ranks on this host take a GPU each and it has 1; start fewer, or let"),
        (ONE_GPU, {"pp": 1}, None),
        (ONE_GPU, {"share_gpu": True}, None),
        (ONE_GPU, {"share_gpu": True, "dp": 2, "distributed_optimizer": True}, None),
        (ONE_GPU, {"share_gpu": True, "tp": 2}, "--share-gpu leaves no NCCL, by which ranks of"),
        (ONE_GPU, {"share_gpu": True, "model": "moe", "ep": 2}, "--share-gpu leaves no NCCL"),
        (
            ONE_GPU,
            {"share_gpu": True, "dispatch": "megatron"},
            "by which Megatron-Core's own schedule transfers",
        ),
        (
            ONE_GPU,
            {"pp": 1, "dispatch": "megatron", "pace": "uniform"},
            "--pace holds Megatron-Core's own schedule back on the host only",
        ),
        (ONE_GPU, {"share_gpu": True, "device": "cpu"}, "add --device cuda or leave it out"),
        (ONE_GPU, {"share_gpu": True, "transport": "shm"}, "choose cuda-ipc or bounce"),
    ],
)
def test_what_a_run_on_gpus_asks_of_a_host(
    monkeypatch: pytest.MonkeyPatch,
    presence: CudaPresence,
    flags: dict[str, Any],
    words: str | None,
) -> None:
    device_checks.visible_gpus.cache_clear()
    monkeypatch.setattr(device_checks, "check_cuda", lambda: presence)
    settings = TrainSettings(**{"device": "cuda", **flags})
    try:
        if words is None:
            check_settings(settings)
        else:
            with pytest.raises(UsageError, match=words):
                check_settings(settings)
    finally:
        device_checks.visible_gpus.cache_clear()


def take_gpu() -> tuple[str, list[str], bool, str, str | None, bool]:
    """The device of the fourth rank of a host where torch sees two GPUs."""
    from rrfp.megatron.cpu import patches
    from rrfp.train.launch import process_groups as devices

    taken: list[str] = []
    os.environ.update(LOCAL_RANK="3", CUBLAS_WORKSPACE_CONFIG=":16:8")
    with (
        patch.object(torch.cuda, "device_count", lambda: 2),
        patch.object(torch.cuda, "set_device", lambda device: taken.append(str(device))),
    ):
        device = devices.prepare_device(TrainSettings(device="cuda").run)
    return (
        str(device),
        taken,
        torch.are_deterministic_algorithms_enabled(),
        os.environ["CUBLAS_WORKSPACE_CONFIG"],
        os.environ.get("NCCL_ALGO"),
        patches._prepared,
    )


def test_ranks_take_the_gpus_in_turn() -> None:
    (told,) = run_ranks(1, take_gpu, fresh=True)
    assert told == ("cuda:1", ["cuda:1"], True, ":16:8", "^NVLS", False)


def learn(is_on_gpu: bool) -> list[Any]:
    """The losses of this rank on the CPU: with the settings of a CPU run, or with those of a GPU
    run, which has groups of two backends and collectives one by one."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - its import makes it

    from rrfp.megatron.cpu.patches import reduce_one_by_one
    from rrfp.megatron.step_groups import device_for
    from rrfp.runtime.pace import Delays
    from rrfp.train.launch import process_groups as parallel
    from rrfp.verify.rank import _train

    settings = TrainSettings(**SMALL, pp=2, dp=2, device="cuda" if is_on_gpu else "cpu")
    if is_on_gpu:
        reduce_one_by_one()
    with (
        patch.object(
            parallel, "backend_of", lambda _: "cpu:gloo,cuda:fake" if is_on_gpu else "gloo"
        ),
        parallel.parallel_groups(settings) as layout,
    ):
        assert ("fake" in dist.get_backend_config()) is is_on_gpu
        assert device_for(dist.group.WORLD) == torch.device("cpu")
        return [
            asdict(
                _train(
                    settings.changed(distributed_optimizer=is_divided),
                    layout,
                    Delays(0, layout.rank, 1e-4),
                )
            )
            for is_divided in (False, True)
        ]


def test_what_the_settings_of_a_gpu_change_does_not_change_what_is_learnt() -> None:
    assert run_ranks(4, learn, True) == run_ranks(4, learn, False)


def test_the_backend_of_groups() -> None:
    from rrfp.train.launch.process_groups import backend_of

    assert backend_of(TrainSettings().run) == "gloo"
    assert backend_of(TrainSettings(device="cuda").run) == "cpu:gloo,cuda:nccl"
    assert backend_of(TrainSettings(device="cuda", share_gpu=True).run) == "gloo"


def test_what_tensors_take_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from rrfp.train.loop import _bytes_on_gpu

    gpu = torch.device("cuda", 1)
    reset: list[torch.device] = []
    for name, told in (
        ("memory_allocated", 300),
        ("max_memory_allocated", 500),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, told=told: told)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    assert _bytes_on_gpu(torch.device("cpu")) == (0, 0)
    assert _bytes_on_gpu(gpu) == (300, 500)
    assert reset == [gpu]


def room_on(gpus: str, sees_own: bool) -> int:
    """The memory for activations of this rank. The ranks' GPUs are named by rank, and each sees
    only its own, or all."""
    from rrfp.megatron.memory.bound import MemoryBound, activation_headroom
    from rrfp.schedule.policy import Auto

    own = gpus[int(os.environ["RANK"])]
    seen = own if sees_own else "".join(sorted({*gpus}))
    gpu = torch.device("cuda", seen.index(own))
    with (
        patch.object(torch.cuda, "device_count", lambda: len(seen)),
        patch.object(torch.cuda, "memory_allocated", lambda _: 300),
        patch.object(torch.cuda, "memory_reserved", lambda _: 700),
        patch.object(torch.cuda, "mem_get_info", lambda _: (2000, 10_000)),
        patch.object(
            torch.cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(uuid=seen[device.index]),
        ),
    ):
        dist.init_process_group("gloo")
        # An actor and a critic in one process are one rank.
        for _ in range(2):
            MemoryBound(Auto.AUTO, 1, gpu)
        dist.barrier()
        room = activation_headroom(gpu)
        dist.barrier()
        dist.destroy_process_group()
    return room


@pytest.mark.parametrize(
    ("gpus", "sees_own"),
    [
        ("abc", False),  # torchrun
        ("abc", True),  # srun --gpus-per-task=1
        ("aba", False),  # --share-gpu
        ("aab", True),  # the same, in tasks that have a GPU each
    ],
)
def test_what_tensors_may_take_on_a_gpu(gpus: str, sees_own: bool) -> None:
    # A tenth of the GPU stays free, and those that are on it share the rest.
    rooms = [1000 // gpus.count(own) + 400 for own in gpus]
    assert run_ranks(len(gpus), room_on, gpus, sees_own) == rooms
