"""What srun tells each task of a job's step about itself.

In the script of a job itself, which sbatch runs once, `SLURM_PROCID` is 0 as well; nobody has
started several processes there.
"""

import re
from collections.abc import Mapping

from rrfp.errors import UsageError
from rrfp.runtime.launchers.hostlist import MOST_HOSTS, expanded
from rrfp.runtime.launchers.numbers import below, natural, port
from rrfp.runtime.launchers.started import Started

_BY = "srun"
_TASK = "SLURM_PROCID"
_OF_STEP = ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")
_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
"""Below the ports that systems give out by themselves. A step takes one by its number, so that two
steps that share a node rarely meet."""


def is_task(environment: Mapping[str, str]) -> bool:
    """Whether srun has started this process."""
    in_step = any(name in environment for name in _OF_STEP)
    return _TASK in environment and (in_step or environment.get("ENVIRONMENT") != "BATCH")


def started_by_srun(environment: Mapping[str, str]) -> Started:
    """This task's place. Raises UsageError for variables that are missing or contradict each
    other."""
    count_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    index, count = below(environment, _TASK, count_name, _BY)
    list_name = next((name for name in _NODE_LISTS if name in environment), _NODE_LISTS[0])
    nodes = _nodes(environment, list_name)
    num_nodes = len(nodes)
    tasks = _tasks_of_nodes(environment, num_nodes, list_name, count, count_name)
    node = 0
    if num_nodes > 1 or "SLURM_NODEID" in environment:
        node = natural(environment, "SLURM_NODEID", _BY)
    if node >= num_nodes:
        raise UsageError(
            f"SLURM_NODEID is {node} and {list_name} has {num_nodes} nodes; see which of them "
            "srun has not set"
        )
    if index == 0 and node > 0 and not environment.get("MASTER_ADDR"):
        raise UsageError(
            f"task 0 runs on node {node} of {list_name}, and ranks meet on its first one; start "
            "with --distribution=block, or set MASTER_ADDR to task 0's host"
        )
    local_index = natural(environment, "SLURM_LOCALID", _BY)
    local_count = count if num_nodes == 1 else None if tasks is None else tasks[node]
    if local_count is not None and local_index >= local_count:
        raise UsageError(
            f"SLURM_LOCALID is {local_index} on a node with {local_count} tasks; see which of the "
            "variables srun has not set"
        )
    return Started(
        by=_BY,
        index=index,
        count=count,
        local_index=local_index,
        local_count=local_count,
        is_one_host=num_nodes == 1,
        host=environment.get("MASTER_ADDR") or nodes[0],
        port=_port(environment),
    )


def _nodes(environment: Mapping[str, str], name: str) -> list[str]:
    text = environment.get(name)
    if text is None:
        raise UsageError(
            f"{' and '.join(_NODE_LISTS[:2])} are not set, and srun started this process; let "
            f"srun set them, or unset {_TASK}"
        )
    try:
        return expanded(text)
    except ValueError as error:
        raise UsageError(
            f"{name} is '{text[:60]}', which is no list of hosts ({error}); see who has set it"
        ) from None


def _tasks_of_nodes(
    environment: Mapping[str, str], num_nodes: int, list_name: str, count: int, count_name: str
) -> list[int] | None:
    """How many tasks each node has, where srun says so: `2(x3),1` is 2, 2, 2 and 1."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = environment.get(name)
    if text is None:
        return None
    tasks: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", item)
        times = int(match[2] or 1) if match else 0
        if match is None or times > MOST_HOSTS:
            raise UsageError(
                f"{name} is '{text[:60]}', which is not a list such as 4(x2),3; see who has set it"
            )
        tasks += [int(match[1])] * times
    if len(tasks) != num_nodes or sum(tasks) != count:
        raise UsageError(
            f"{name} is {text[:60]}, {list_name} has {num_nodes} nodes and {count_name} is "
            f"{count}, which do not go together; see which of them srun has not set"
        )
    return tasks


def _port(environment: Mapping[str, str]) -> int:
    if "MASTER_PORT" in environment:
        return port(environment, _BY)
    # Neither is needed elsewhere: a launcher that stands in for srun may lack them.
    numbers = [environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    job, step = (int(text) if text.isdecimal() else 0 for text in numbers)
    return _FIRST_PORT + (31 * job + step) % _NUM_PORTS
