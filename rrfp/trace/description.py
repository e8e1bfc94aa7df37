"""Writes `run.json`, the description of a run. Imports no torch: the launcher writes it first."""

import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rrfp.trace.records import RankInfo
from rrfp.trace.run_policy import POLICY
from rrfp.trace.whole_file import open_whole

_PACKAGES = ("rrfp", "torch", "megatron-core", "perfetto")


def describe_run(
    path: Path,
    settings: Mapping[str, object],
    policy: Mapping[str, object],
    world_size: int,
    ranks: Sequence[RankInfo],
    session: Mapping[str, object] | None = None,
) -> None:
    """Write all settings, the effective policy, versions, the world size, the ranks, and what a
    run that was resumed adds (`rrfp.trace.sessions.described`). Concurrent readers never see half a
    file."""
    described = {
        "settings": dict(settings),
        POLICY: dict(policy),
        "versions": versions(),
        "world": world_size,
        "ranks": [
            {
                "rank": info.rank,
                "pp_rank": info.pp_rank,
                "tp_rank": info.tp_rank,
                "dp_rank": info.dp_rank,
                "stages": info.stages,
                "host": info.host,
                "pid": info.pid,
            }
            for info in ranks
        ],
        **(session or {}),
    }
    with open_whole(path) as file:
        file.write(f"{json.dumps(described, indent=2)}\n".encode())


def versions(*more: str) -> dict[str, str]:
    """The versions of Python and of the packages that a run's figures depend on; `more` names
    further ones."""
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in (*_PACKAGES, *more)},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # Megatron is often run from a source tree
        return "unknown"
