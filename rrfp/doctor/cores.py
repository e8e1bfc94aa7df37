"""How many cores this process may use."""

import os
from pathlib import Path

from rrfp.cores import num_cores
from rrfp.doctor.check import Check, State
from rrfp.train.setting_groups import LayoutSettings

_CGROUPS = Path("/sys/fs/cgroup")


def cores(cgroups: Path = _CGROUPS) -> Check:
    """The cores of its affinity, less where the quota of its control group allows less."""
    num_allowed = num_cores()
    quota = quota_cores(cgroups)
    usable = num_allowed if quota is None else min(num_allowed, quota)
    num_ranks = LayoutSettings().pp
    advice = f"of {os.cpu_count()} in this machine"
    if quota is not None and quota < num_allowed:
        advice += ", by the quota of the control group"
    if usable < num_ranks:
        advice += f"; {num_ranks} ranks share them by default, so pace runs or take fewer, --pp 2"
    return Check(
        "cores",
        State.SLOW if usable < num_ranks else State.OK,
        round(usable, 1),
        "cores",
        advice,
    )


def quota_cores(cgroups: Path) -> float | None:
    """The quota of a control group, of either version, as a container sees its own."""
    try:
        limit, period = (cgroups / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            limit = (cgroups / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroups / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    try:
        quota = int(limit) / int(period)
    except (ValueError, ZeroDivisionError):
        return None  # "max": there is none
    return quota if quota > 0 else None  # -1: the same
