"""Ranks are found from the environment: that of srun, that of torchrun, and one that is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.errors import UsageError
from rrfp.runtime.launchers import MOST_HOSTS, expanded, started, told_as_torch_reads_it
from rrfp.train.launch.hosts.endpoint import among_started
from rrfp.train.settings import TrainSettings
from tests.slurm import srun, task
from tests.trained import TINY, read_metrics, rrfp_here

pytestmark = pytest.mark.timeout(200)

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
    assert expanded(text) == hosts.split()


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
    assert expanded(",".join(written)) == hosts


@given(st.text(alphabet="ab1-09[],", max_size=12))
def test_what_is_no_list_of_hosts_is_a_value_error(text: str) -> None:
    hosts, reason = [], ""
    try:
        hosts = expanded(text)
    except ValueError as error:
        reason = str(error)
    assert bool(hosts) != reason.startswith(("it ", "its ", "'"))
    assert all(hosts)
    assert not set("[],") & set("".join(hosts))


@pytest.mark.parametrize("text", ["n[0-99999999]", "a[1-300]b[1-300]", "n[1-65536],m"])
def test_a_list_without_end_is_refused_at_once(text: str) -> None:
    with pytest.raises(ValueError, match=f"more than {MOST_HOSTS} hosts"):
        expanded(text)


def test_a_task_of_srun_finds_its_place() -> None:
    told = {
        **task(5, 6, "node[01-03]"),
        "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "2",
    }
    found = started(told)
    assert found is not None
    assert (found.index, found.count, found.local_index, found.local_count) == (5, 6, 1, 2)
    assert (found.host, found.is_one_host, found.serves_store) == ("node01", False, False)
    assert 20_000 <= found.port < 30_000
    assert found.as_of_torch == {
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
    found = started(told)
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
    assert started(batch) is None
    # srun passes the script's environment on.
    assert started({**batch, **task(1, 2)}) is not None


def test_torchrun_under_srun_goes_first() -> None:
    found = started({**TORCHRUN, **task(1, 2)})
    assert found is not None
    assert (found.index, found.count, found.host, found.serves_store) == (3, 4, "node7", True)
    assert told_as_torch_reads_it({**TORCHRUN, **task(1, 2)}) == {}


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
        started({name: value for name, value in told.items() if value is not None})
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
        started({name: value for name, value in told.items() if value is not None})
    assert sentence in str(refused.value)


def test_the_hosts_of_a_run_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in task(1, 2).items():
        monkeypatch.setenv(name, value)
    placed = among_started(TrainSettings(pp=4)).run
    assert (placed.nnodes, placed.node_rank) == (2, 1)
    assert placed.rdzv_endpoint is not None
    assert placed.rdzv_endpoint.startswith("127.0.0.1:2")
    named = TrainSettings(nnodes=4, node_rank=2, rdzv_endpoint="node0:29400")
    assert among_started(named) == named
    with pytest.raises(UsageError, match="srun has started 2 processes, which cannot share 3"):
        among_started(TrainSettings(pp=3, layers=9))


def test_one_task_is_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in task(0, 1).items():
        monkeypatch.setenv(name, value)
    assert among_started(TrainSettings()) == TrainSettings()


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
cuda_presence.cuda_presence = lambda: cuda_presence.CudaPresence(gpus, None)
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
