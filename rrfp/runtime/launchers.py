"""The environment variables of launchers: rrfp's own, torchrun's, and srun's.

From them a process finds its place among the processes that were started together.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from rrfp.errors import UsageError

STORE = "RRFP_STORE"
"""The run's store: `file:PATH` on one host, `tcp:HOST:PORT` between hosts."""
ADDRESS = "RRFP_ADDRESS"
"""The only address of this host on which its ranks listen."""
LOOPBACK = "127.0.0.1"
SOURCES = "RRFP_SOURCES"
"""The addresses from which ranks of other hosts connect, separated by commas; connections from
other addresses are refused. Without it any address may connect."""
NETWORK = "RRFP_NETWORK"
"""The network that ranks enter: `private:` and the paths of its namespaces, or `host:` and why."""
LAUNCHER = "RRFP_LAUNCHER"
"""The launcher's pid. A rank cannot use its parent's pid: if the launcher died early, that is
another process."""
WARNINGS = "RRFP_WARNINGS"
"""The pipe to the launcher for warnings of its ranks."""
FAULTS = "RRFP_FAULTS"
"""The directory through which `rrfp chaos` breaks links; without it no link is broken."""
DIRECTORY = "RRFP_DIRECTORY"
"""A directory for files of ranks, which the launcher removes however they end."""
LIVENESS = "RRFP_LIVENESS"
"""The descriptors, `PAGE,STACKS`, of the files by which a rank shows its launcher that it lives."""

_MAX_PORT = 2**16 - 1


def _read_number(environment: Mapping[str, str], name: str, by: str, least: int = 0) -> int:
    """Return the number in a variable that launcher `by` sets. Raises UsageError if it is not set,
    has anything but up to 18 digits, or is below `least`."""
    text = environment.get(name)
    if text is None:
        raise UsageError(
            f"{name} is not set, and {by} started this process; let {by} set it, or unset what "
            "it has left in the environment"
        )
    # int() refuses some of Unicode's digits.
    if not (text.isascii() and text.isdigit() and len(text) <= 18) or int(text) < least:
        raise UsageError(
            f"{name} is '{text[:40]}', and {by} sets it to a whole number of {least} or more; "
            "see who else has set it"
        )
    return int(text)


def _read_port(environment: Mapping[str, str], by: str) -> int:
    """Return MASTER_PORT. Raises UsageError if it is not set, or is no port from 1 to 65535."""
    found = _read_number(environment, "MASTER_PORT", by, 1)
    if found > _MAX_PORT:
        raise UsageError(
            f"MASTER_PORT is {found} and a port is at most {_MAX_PORT}; see who has set it"
        )
    return found


def _read_index_and_count(
    environment: Mapping[str, str], index_name: str, count_name: str, by: str
) -> tuple[int, int]:
    """Return an index and a count from two variables. Raises UsageError if one is not set or
    invalid, or if the index is not below the count."""
    index = _read_number(environment, index_name, by)
    count = _read_number(environment, count_name, by, 1)
    if index >= count:
        raise UsageError(
            f"{index_name} is {index} and {count_name} is {count}, and the first must be below the "
            f"second; see which of them {by} has not set"
        )
    return index, count


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlace:
    """The place of a process among those that a launcher has started together."""

    by: str
    """The launcher's name."""
    index: int
    count: int
    local_index: int
    """Index among those of this host."""
    local_count: int | None
    """Number of them on this host; None if the launcher does not set it."""
    is_one_host: bool
    """True if all of them are on this host."""
    host: str
    """Host of the first of them."""
    port: int
    """Port on that host for their rendezvous."""
    serves_store: bool = False
    """True if the launcher itself listens at that port, with a store of torch's."""

    def torch_environment(self) -> dict[str, str]:
        """Return the variables by which torch's process groups find each other: RANK, WORLD_SIZE,
        LOCAL_RANK, MASTER_ADDR, MASTER_PORT, and LOCAL_WORLD_SIZE if it is known."""
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

MAX_HOSTS = 2**16
"""No cluster has more. A longer list is a mistake, and would fill the memory."""

_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PART = re.compile(r"([^\[\]]*)(?:\[([^\[\]]*)\])?")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


def expand_host_list(text: str) -> list[str]:
    """Return the hosts of one of Slurm's lists, such as `node[01-03,7],gpu1`, in its order. Raises
    ValueError for anything else, and for more than 65,536 hosts."""
    hosts: list[str] = []
    position = 0
    while True:
        item = _ITEM.match(text, position)
        if item is None:
            raise ValueError(f"it has no host at its character {position + 1}")
        hosts += _expand_item(item[0])
        _check_number(len(hosts))
        if item.end() == len(text):
            return hosts
        if text[item.end()] != ",":
            raise ValueError(f"it has a '{text[item.end()]}' without its counterpart")
        position = item.end() + 1


def _expand_item(item: str) -> list[str]:
    """Return the hosts of one item of a list, such as `rack[1-2]n[01-02]`; the last brackets count
    fastest. Raises ValueError for invalid brackets or too many hosts."""
    names = [""]
    for part in _PART.finditer(item):
        literal, brackets = part.groups()
        numbers = [""] if brackets is None else [*_expand_brackets(brackets)]
        _check_number(len(names) * len(numbers))
        names = [f"{name}{literal}{number}" for name in names for number in numbers]
    return names


def _expand_brackets(brackets: str) -> Iterator[str]:
    """Yield the numbers of `01-03,7` as text, padded with zeros to the width of the first one of
    their range. Raises ValueError for another text, or a range that ends before it begins or has
    more than 65,536 numbers."""
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
    """Raise ValueError for more than 65,536 hosts (`MAX_HOSTS`)."""
    if num_hosts > MAX_HOSTS:
        raise ValueError(f"it has more than {MAX_HOSTS} hosts")


# srun.

_SRUN = "srun"
_TASK = "SLURM_PROCID"
_STEP_VARIABLES = ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")
_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
"""Below the ports that systems assign by themselves. The port follows from the step's number, so
that two steps on one node rarely use the same."""


def _is_srun_task(environment: Mapping[str, str]) -> bool:
    """Return whether srun has started this process: SLURM_PROCID is set, and either a variable of a
    step is, too, or ENVIRONMENT is not BATCH, as it is in the job's script, which sbatch runs
    itself."""
    in_step = any(name in environment for name in _STEP_VARIABLES)
    return _TASK in environment and (in_step or environment.get("ENVIRONMENT") != "BATCH")


def _place_by_srun(environment: Mapping[str, str]) -> LaunchPlace:
    """Return this task's place by srun's variables; MASTER_ADDR and MASTER_PORT, where set, replace
    the first node and the derived port. Raises UsageError for variables that are missing or
    contradict each other, and on a task 0 that is not on the first node, without MASTER_ADDR."""
    count_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    index, count = _read_index_and_count(environment, _TASK, count_name, _SRUN)
    list_name = next((name for name in _NODE_LISTS if name in environment), _NODE_LISTS[0])
    nodes = _read_nodes(environment, list_name)
    num_nodes = len(nodes)
    tasks = _read_tasks_per_node(environment, num_nodes, list_name, count, count_name)
    node = 0
    if num_nodes > 1 or "SLURM_NODEID" in environment:
        node = _read_number(environment, "SLURM_NODEID", _SRUN)
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
    local_index = _read_number(environment, "SLURM_LOCALID", _SRUN)
    local_count = count if num_nodes == 1 else None if tasks is None else tasks[node]
    if local_count is not None and local_index >= local_count:
        raise UsageError(
            f"SLURM_LOCALID is {local_index} on a node with {local_count} tasks; see which of the "
            "variables srun has not set"
        )
    return LaunchPlace(
        by=_SRUN,
        index=index,
        count=count,
        local_index=local_index,
        local_count=local_count,
        is_one_host=num_nodes == 1,
        host=environment.get("MASTER_ADDR") or nodes[0],
        port=_srun_port(environment),
    )


def _read_nodes(environment: Mapping[str, str], name: str) -> list[str]:
    """Return the hosts in a variable of srun. Raises UsageError if it is not set or is no list of
    hosts."""
    text = environment.get(name)
    if text is None:
        raise UsageError(
            f"{' and '.join(_NODE_LISTS[:2])} are not set, and srun started this process; let "
            f"srun set them, or unset {_TASK}"
        )
    try:
        return expand_host_list(text)
    except ValueError as error:
        raise UsageError(
            f"{name} is '{text[:60]}', which is no list of hosts ({error}); see who has set it"
        ) from None


def _read_tasks_per_node(
    environment: Mapping[str, str], num_nodes: int, list_name: str, count: int, count_name: str
) -> list[int] | None:
    """Return the number of tasks of each node; None if srun does not set it. `2(x3),1` is 2, 2, 2
    and 1. Raises UsageError for another text, or numbers that do not fit the nodes and the
    count."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = environment.get(name)
    if text is None:
        return None
    tasks: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", item)
        times = int(match[2] or 1) if match else 0
        if match is None or times > MAX_HOSTS:
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


def _srun_port(environment: Mapping[str, str]) -> int:
    """Return MASTER_PORT if it is set, or else a port from 20000 to 29999 that follows from the
    job's and the step's number; a number that is not set or invalid counts as 0. Raises UsageError
    for a MASTER_PORT that is no port."""
    if "MASTER_PORT" in environment:
        return _read_port(environment, _SRUN)
    # Other code does not need these two, so that replacements of srun may lack them.
    numbers = [environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    job, step = (int(text) if text.isdecimal() else 0 for text in numbers)
    return _FIRST_PORT + (31 * job + step) % _NUM_PORTS


# Any launcher: torchrun, or one that sets the same variables, has priority over srun, which may
# have started it.

_ELASTIC = "TORCHELASTIC_RUN_ID"
_TORCH_INDEX_AND_COUNT = ("RANK", "WORLD_SIZE")


def find_place(environment: Mapping[str, str] = os.environ) -> LaunchPlace | None:
    """Return this process' place by RANK and WORLD_SIZE if one of them is set, or else by srun's
    variables; None if no launcher has set its own. Raises UsageError for variables of either that
    are missing, invalid or contradict each other."""
    by_srun = _place_by_srun(environment) if _is_srun_task(environment) else None
    if not any(name in environment for name in _TORCH_INDEX_AND_COUNT):
        return by_srun
    by_torch = _place_by_torch(environment)
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


def missing_torch_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that torch's process groups need and that srun does not set. Empty if
    RANK or WORLD_SIZE is set, without srun, and if srun's variables are invalid: a script may find
    its place in its own way."""
    if any(name in environment for name in _TORCH_INDEX_AND_COUNT):
        return {}
    if _is_srun_task(environment):
        with suppress(UsageError):
            return _place_by_srun(environment).torch_environment()
    return {}


def _place_by_torch(environment: Mapping[str, str]) -> LaunchPlace:
    """Return the place by torchrun's variables; a single process needs no MASTER_ADDR and no
    MASTER_PORT. Raises UsageError for needed variables that are missing, and for variables that are
    invalid or contradict each other."""
    by = "torchrun" if _ELASTIC in environment else "whoever has set RANK"
    index, count = _read_index_and_count(environment, *_TORCH_INDEX_AND_COUNT, by)
    local_index, local_count = 0, None
    if "LOCAL_WORLD_SIZE" in environment:
        local_index, local_count = _read_index_and_count(
            environment, "LOCAL_RANK", "LOCAL_WORLD_SIZE", by
        )
        if local_count > count:
            raise UsageError(
                f"LOCAL_WORLD_SIZE is {local_count} and WORLD_SIZE is {count}, and a host has no "
                f"more processes than all hosts; see which of them {by} has not set"
            )
    elif "LOCAL_RANK" in environment:
        local_index = _read_number(environment, "LOCAL_RANK", by)
    if not environment.get("MASTER_ADDR") and count > 1:
        raise UsageError(
            f"MASTER_ADDR is not set, and RANK is {index} of {count}; set it to the host of rank 0"
        )
    return LaunchPlace(
        by=by,
        index=index,
        count=count,
        local_index=local_index,
        local_count=local_count,
        is_one_host=local_count == count,
        host=environment.get("MASTER_ADDR") or LOOPBACK,
        port=_read_port(environment, by) if count > 1 else 0,
        serves_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
