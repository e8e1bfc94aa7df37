"""Which launcher has started this process as one of several: torchrun, or one that speaks like it,
before srun, which may have started that."""

import os
from collections.abc import Mapping
from contextlib import suppress

from rrfp.errors import UsageError
from rrfp.runtime.launchers.numbers import below, natural, port
from rrfp.runtime.launchers.slurm import is_task, started_by_srun
from rrfp.runtime.launchers.started import Started

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
