"""Whether this process' cgroups have reached a limit, by the kernel's own counters.

Processes that it starts are in the same cgroups. Where the counters cannot be read, nothing is
said.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_REFUSED = re.compile(r"Resource temporarily unavailable|can't start new thread")
_UNLIMITED_BYTES = 1 << 62
"""Version 1 writes the largest number of pages where there is no limit."""
_MIB = 1 << 20


class CgroupLimits:
    """What the cgroups of this process have counted since this object was made."""

    def __init__(self, root: Path = Path("/")) -> None:
        """`root` has `/proc` and the mounted cgroups in it."""
        self._memory = [*_cgroups(root, "memory")]
        self._pids = [*_cgroups(root, "pids")]
        self._kills, self._refusals = self._num_kills(), self._num_refusals()

    def killer(self) -> str | None:
        """What has killed a process of them for its memory; None if nothing has."""
        if self._num_kills() <= self._kills:
            return None
        limits = (
            _number(path / name)
            for path in self._memory
            for name in ("memory.max", "memory.limit_in_bytes")
        )
        limit = next(
            (each for each in limits if each is not None and each < _UNLIMITED_BYTES), None
        )
        where = "" if limit is None else f" at its cgroup's memory limit of {limit / _MIB:,.0f} MiB"
        return f"the kernel's OOM killer{where}"

    def note(self, reason: str | None) -> str:
        """A clause with the limit behind a failure; empty if there is none. `reason` is what the
        failed process said; None if it said nothing."""
        if killer := self.killer():
            return f"; {killer} has killed a process of this run, or one beside it"
        is_other = reason is not None and not _REFUSED.search(reason)
        if is_other or self._num_refusals() <= self._refusals:
            return ""
        limits = (_number(path / "pids.max") for path in self._pids)
        limit = next((each for each in limits if each is not None), None)
        of = "" if limit is None else f" of {limit:,}"
        return f"; the cgroup has reached its limit{of} processes and threads (pids.max)"

    def _num_kills(self) -> int:
        return sum(
            _counted(path / name, "oom_kill")
            for path in self._memory[:1]
            for name in ("memory.events", "memory.oom_control")
        )

    def _num_refusals(self) -> int:
        # Counted where the limit is, or where the process is, by the kernel's version.
        return sum(_counted(path / "pids.events", "max") for path in self._pids)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The directories of this process' cgroup and of those above it that can be seen here."""
    with suppress(OSError, ValueError):
        own: dict[str, str] = {}
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own.update(dict.fromkeys(controllers.split(","), path))
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            mount, _, system = line.partition(" - ")
            kind, _, options = system.split(" ", 2)
            is_first = kind == "cgroup" and controller in options.split(",") and controller in own
            if not is_first and not (kind == "cgroup2" and controller not in own and "" in own):
                continue
            within, at = (each.replace("\\040", " ") for each in mount.split(" ")[3:5])
            path = own[controller if is_first else ""]
            # A container may see its own cgroup as the root.
            below = path[len(within) :] if path.startswith(within) else ""
            top = root / at.lstrip("/")
            directory = top / below.strip("/")
            yield directory
            yield from (each for each in directory.parents if each.is_relative_to(top))
            return


def _counted(path: Path, name: str) -> int:
    """The number behind a name in a file of them; 0 if it is not there."""
    with suppress(OSError, ValueError, KeyError):
        return int(dict(line.split(" ", 1) for line in path.read_text().splitlines())[name])
    return 0


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None
