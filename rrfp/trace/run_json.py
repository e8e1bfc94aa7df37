"""Writes `run.json`, the description of a run. Imports no torch: the launcher writes it first."""

import json
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rrfp.errors import RrfpError, reason_of
from rrfp.trace.records import RankInfo
from rrfp.trace.run_dir import RunDir
from rrfp.trace.run_policy import FIRST_STEP, POLICIES, POLICY
from rrfp.trace.safe_files import open_whole
from rrfp.trace.sessions import read_description, session_in

_OF_RECORDING = ("recording_off", "dropped_steps", "first_kept_step")
_log = logging.getLogger(__name__)
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
    _write(path, described)


def describe_transport(run_json: Path, transport: Mapping[str, object]) -> None:
    """Add what carries the tensors of each link, which the ranks know once they are connected.
    Raises RrfpError or OSError if the file cannot be read or written."""
    description = read_description(run_json)
    description["transport"] = dict(transport)
    _write(run_json, description)


def describe_recording(run: RunDir, told: Mapping[str, object]) -> None:
    """Add to `run.json` what the trace of a session says of its records: what is missing, and why.
    A run that nobody describes, or whose description cannot be written, is left as it is."""
    with suppress(RrfpError, OSError):
        description = read_description(run.run_json)
        session = session_in(description, run.session)
        missing = {key: told[key] for key in _OF_RECORDING if key in told}
        if session is None or missing.items() <= session.items():
            return
        session |= missing
        status = run.run_json.stat()
        _write(run.run_json, description)
        # The run did not begin now.
        os.utime(run.run_json, ns=(status.st_atime_ns, status.st_mtime_ns))


def _write(path: Path, description: Mapping[str, object]) -> None:
    with open_whole(path) as file:
        file.write(f"{json.dumps(description, indent=2)}\n".encode())


class PolicyLog:
    """Tells in `run.json` which policy steered from which step on, where it was chosen during the
    run. Of one session; one rank writes it. What a disk refuses is told with the next step."""

    def __init__(self, run_json: Path) -> None:
        """`run_json` describes the session."""
        self._path = run_json
        self._last: Mapping[str, object] | None = None
        self._untold: list[dict[str, object]] = []
        self._has_warned = False

    def steered(self, step: int, policy: Mapping[str, object]) -> None:
        """A step was steered by this policy."""
        if policy != self._last:
            self._untold.append({FIRST_STEP: step, POLICY: dict(policy)})
            self._last = policy
        if not self._untold:
            return
        try:
            self._tell()
        except (RrfpError, OSError) as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "%s does not say which policy steers from step %d on (%s); the training goes "
                    "on",
                    self._path,
                    step,
                    reason_of(error),
                )

    def _tell(self) -> None:
        description = read_description(self._path)
        told = description.get(POLICIES, [])
        if not told and description.get(POLICY) == self._untold[0][POLICY]:
            # It says so already.
            del self._untold[0]
        if self._untold:
            description[POLICIES] = [*told, *self._untold]
            _write(self._path, description)
        self._untold = []


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
