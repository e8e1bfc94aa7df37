"""srun as its tasks see it: so many processes, each with the variables that Slurm documents."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.trained import free_port

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
    """Run `rrfp ARGUMENTS` as so many tasks: the exit code, stdout and stderr of each."""
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
