"""What srun tells each task of a job's step about itself.

In the script of a job itself, which sbatch runs once, `SLURM_PROCID` is 0 as well; nobody has
started several processes there.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from rrfp.errors import UsageError

# The environment variables by which a launcher tells ranks where to meet, and who it is.


STORE = "RRFP_STORE"
"""Where the run's store is: `file:PATH` on one host, `tcp:HOST:PORT` between hosts."""
ADDRESS = "RRFP_ADDRESS"
"""The only address of this host on which its ranks listen."""
LOOPBACK = "127.0.0.1"
SOURCES = "RRFP_SOURCES"
"""The addresses from which ranks of other hosts connect, separated by commas: whoever comes from
elsewhere is not let in. Anybody is, where it is not set."""
NETWORK = "RRFP_NETWORK"
"""The network that ranks enter: `private:` and the paths of its namespaces, or `host:` and why."""
LAUNCHER = "RRFP_LAUNCHER"
"""The launcher's pid. A rank that asked for its parent would take another process for its launcher
if that had died before it asked."""
WARNINGS = "RRFP_WARNINGS"
"""The pipe to the launcher for what its ranks warn of."""
FAULTS = "RRFP_FAULTS"
"""The directory through which `rrfp chaos` breaks links; nothing is broken without it."""
DIRECTORY = "RRFP_DIRECTORY"
"""A directory of the launcher's, for files of ranks: it is removed whatever becomes of them."""
LIVENESS = "RRFP_LIVENESS"
"""The descriptors, `PAGE,STACKS`, of the files by which a rank shows its launcher that it lives."""


# Reads numbers from a launcher's environment variables.


_MOST_PORT = 2**16 - 1


def natural(environment: Mapping[str, str], name: str, by: str, least: int = 0) -> int:
    """The number in a variable that must be there. Raises UsageError."""
    text = environment.get(name)
    if text is None:
        raise UsageError(
            f"{name} is not set, and {by} started this process; let {by} set it, or unset what "
            "it has left in the environment"
        )
    # Not every digit of Unicode is one that int() reads, nor one that anybody means.
    if not (text.isascii() and text.isdigit() and len(text) <= 18) or int(text) < least:
        raise UsageError(
            f"{name} is '{text[:40]}', and {by} sets it to a whole number of {least} or more; "
            "see who else has set it"
        )
    return int(text)


def port(environment: Mapping[str, str], by: str) -> int:
    """MASTER_PORT, which must be there. Raises UsageError."""
    found = natural(environment, "MASTER_PORT", by, 1)
    if found > _MOST_PORT:
        raise UsageError(
            f"MASTER_PORT is {found} and a port is at most {_MOST_PORT}; see who has set it"
        )
    return found


def below(environment: Mapping[str, str], name: str, bound: str, by: str) -> tuple[int, int]:
    """A number, and the one of another variable that it must be below."""
    value, most = natural(environment, name, by), natural(environment, bound, by, 1)
    if value >= most:
        raise UsageError(
            f"{name} is {value} and {bound} is {most}, and the first must be below the second; "
            f"see which of them {by} has not set"
        )
    return value, most


# The place of a process among those that a launcher has started together.


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What a launcher tells a process about itself."""

    by: str
    """The launcher's name."""
    index: int
    count: int
    local_index: int
    """Among those of this host."""
    local_count: int | None
    """How many there are on this host; None if the launcher does not say."""
    is_one_host: bool
    """Whether all of them are on this host."""
    host: str
    """Where the first of them is."""
    port: int
    """Where they may meet on that host."""
    serves_store: bool = False
    """Whether the launcher itself listens at that port, with a store of torch's."""

    @property
    def as_of_torch(self) -> dict[str, str]:
        """The same in the variables by which torch's process groups find each other."""
        local = {} if self.local_count is None else {"LOCAL_WORLD_SIZE": str(self.local_count)}
        return {
            "RANK": str(self.index),
            "WORLD_SIZE": str(self.count),
            "LOCAL_RANK": str(self.local_index),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            **local,
        }


# Slurm's lists of hosts: `node[01-03,7],gpu1` is node01, node02, node03, node7 and gpu1.


MOST_HOSTS = 2**16
"""More than any cluster has; a list of more is a mistake, and would fill the memory."""

_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PART = re.compile(r"([^\[\]]*)(?:\[([^\[\]]*)\])?")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


def expanded(text: str) -> list[str]:
    """The hosts of a list, in its order. Raises ValueError, with the fact, for anything else."""
    hosts: list[str] = []
    position = 0
    while True:
        item = _ITEM.match(text, position)
        if item is None:
            raise ValueError(f"it has no host at its character {position + 1}")
        hosts += _of_item(item[0])
        _check_number(len(hosts))
        if item.end() == len(text):
            return hosts
        if text[item.end()] != ",":
            raise ValueError(f"it has a '{text[item.end()]}' without its counterpart")
        position = item.end() + 1


def _of_item(item: str) -> list[str]:
    """The hosts of `rack[1-2]n[01-02]`: the last brackets count fastest."""
    names = [""]
    for part in _PART.finditer(item):
        literal, brackets = part.groups()
        numbers = [""] if brackets is None else [*_numbers(brackets)]
        _check_number(len(names) * len(numbers))
        names = [f"{name}{literal}{number}" for name in names for number in numbers]
    return names


def _numbers(brackets: str) -> Iterator[str]:
    """The numbers of `01-03,7`, as wide as the first of their range."""
    for item in brackets.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise ValueError(f"'{item}' in its brackets is not a number or a range")
        first, last = match[1], match[2] or match[1]
        num = int(last) - int(first) + 1
        if num < 1:
            raise ValueError(f"its range {item} ends before it begins")
        _check_number(num)
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _check_number(num_hosts: int) -> None:
    if num_hosts > MOST_HOSTS:
        raise ValueError(f"it has more than {MOST_HOSTS} hosts")


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


# Which launcher has started this process as one of several: torchrun, or one that speaks like it,
# before srun, which may have started that.


_ELASTIC = "TORCHELASTIC_RUN_ID"
_TORCHS = ("RANK", "WORLD_SIZE")


def started(environment: Mapping[str, str] = os.environ) -> Started | None:
    """This process' place by its environment; None if nobody has started it as one of several.
    Raises UsageError for variables that are missing or contradict each other."""
    by_srun = started_by_srun(environment) if is_task(environment) else None
    if not any(name in environment for name in _TORCHS):
        return by_srun
    by_torch = _started_by_torch(environment)
    # A launcher that srun has started itself, once a node, may count otherwise.
    if (
        by_srun is not None
        and _ELASTIC not in environment
        and (by_torch.count == by_srun.count and by_torch.index != by_srun.index)
    ):
        raise UsageError(
            f"RANK is {by_torch.index} and SLURM_PROCID is {by_srun.index}, of {by_srun.count} "
            "processes both; unset RANK and WORLD_SIZE, or set RANK to SLURM_PROCID"
        )
    return by_torch


def told_as_torch_reads_it(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that torch's process groups need and that srun does not set. None where any of
    them is set, or srun's own do not go together: a script may find its place in its own way."""
    if any(name in environment for name in _TORCHS) or not is_task(environment):
        return {}
    with suppress(UsageError):
        return started_by_srun(environment).as_of_torch
    return {}


def _started_by_torch(environment: Mapping[str, str]) -> Started:
    by = "torchrun" if _ELASTIC in environment else "whoever has set RANK"
    index, count = below(environment, *_TORCHS, by)
    local_index, local_count = 0, None
    if "LOCAL_WORLD_SIZE" in environment:
        local_index, local_count = below(environment, "LOCAL_RANK", "LOCAL_WORLD_SIZE", by)
        if local_count > count:
            raise UsageError(
                f"LOCAL_WORLD_SIZE is {local_count} and WORLD_SIZE is {count}, and a host has no "
                f"more processes than all hosts; see which of them {by} has not set"
            )
    elif "LOCAL_RANK" in environment:
        local_index = natural(environment, "LOCAL_RANK", by)
    if not environment.get("MASTER_ADDR") and count > 1:
        raise UsageError(
            f"MASTER_ADDR is not set, and RANK is {index} of {count}; set it to the host of rank 0"
        )
    return Started(
        by=by,
        index=index,
        count=count,
        local_index=local_index,
        local_count=local_count,
        is_one_host=local_count == count,
        host=environment.get("MASTER_ADDR") or "127.0.0.1",
        port=port(environment, by) if count > 1 else 0,
        serves_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
