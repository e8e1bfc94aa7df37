"""Reads and writes `run.json`, the description of a run: its settings, policies and sessions.

Earlier runs stored parts of the policy among the settings; only this module reads those. run.json
describes the last session of a run. A resumed run keeps the descriptions of its earlier sessions
under `sessions`, and each of its sessions has a number, `session`, counted from 1, and a
`first_step`. This module imports no torch, because the launcher writes the file first.
"""

import json
import logging
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rrfp.errors import RrfpError, reason_of
from rrfp.schedule.policy import KNOBS, PAPER_LIMIT, Dispatch
from rrfp.strict_json import parsed
from rrfp.trace.records import RankInfo
from rrfp.trace.run_dir import RunDir
from rrfp.trace.safe_files import open_whole, read_small

POLICY = "policy"
"""The key of the effective policy: a value by flag; a bound of null means no bound."""

POLICIES = "policies"
"""The key of the policies chosen during the run: a list of entries with a `first_step` and the
`policy` from that step on."""
FIRST_STEP = "first_step"
"""The first step of a session, or of an entry of `policies`."""


def policy_without_dispatcher(hint: str, dispatch: Dispatch) -> dict[str, object]:
    """The policy of a run without rrfp's dispatcher, as in run.json: the default of each flag, with
    this hint and dispatch."""
    usual = {name: each.describe(each.default) for name, each in KNOBS.items()}
    return usual | {"hint": hint, "dispatch": str(dispatch)}


def stated_policy(description: Mapping[str, Any]) -> dict[str, Any]:
    """The effective policy of a run, unvalidated; empty if the description states none.

    For earlier versions these are the run's settings. They omitted the default limit, which is
    added unless the run was simulated, had a bound, or did not dispatch by readiness.
    """
    policy = description.get(POLICY)
    if isinstance(policy, dict):
        return policy
    settings = description.get("settings")
    if not isinstance(settings, dict):
        return {}
    is_bound = settings.get("limit") is not None or settings.get("hold") is not None
    is_ready = settings.get("dispatch", Dispatch.READY) == Dispatch.READY
    if is_bound or not is_ready or description.get("simulated") is True:
        return settings
    return {**settings, "limit": PAPER_LIMIT}


def policies_by_step(policies: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """The description's entry for the policies of steps 0, 1, ...: each that differs from the step
    before, with its first step. Empty if all are equal."""
    begun = [
        {FIRST_STEP: step, POLICY: dict(policy)}
        for step, policy in enumerate(policies)
        if step == 0 or policy != policies[step - 1]
    ]
    return {POLICIES: begun} if len(begun) > 1 else {}


def stated_policy_of_step(description: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The policy in effect in a step of a session, unvalidated: the last one chosen up to the step,
    or else the session's own. Empty if the description states none; invalid entries are skipped."""
    chosen = description.get(POLICIES)
    found = [
        each[POLICY]
        for each in (chosen if isinstance(chosen, list) else ())
        if isinstance(each, dict)
        and isinstance(each.get(POLICY), dict)
        and isinstance(each.get(FIRST_STEP), int)
        and each[FIRST_STEP] <= step
    ]
    return found[-1] if found else stated_policy(description)


# The sessions of a run.


RECORDING_OFF = "recording_off"
"""In a trace's description: the ranks that switched recording off, each with the `step` whose
records it could not write, and the `reason`."""
UNREAD_FLIGHTS = "unread_flights"
"""In a trace's description: the ranks whose flight record is damaged."""
OUTCOME = "outcome"
"""In a trace's description: how the run ended, and the `error` that ended it, as in
outcome.json."""
SESSIONS = "sessions"
_SESSION = "session"
FIRST_KEPT_STEP = "first_kept_step"
"""In a session's description: the first training step in its trace, if the records of earlier ones
were removed to stay within the disk budget."""


def describe_session(run: RunDir, first_step: int) -> dict[str, object]:
    """The entries of run.json for a resumed session that begins with this step: its number, its
    first step, and the earlier sessions as run.json states them now, without a last one whose ranks
    never connected. Empty for the first session. Raises RrfpError if run.json cannot be read."""
    if run.session == 1:
        return {}
    *earlier, last = map(_alone, _sessions_of(read_description(run.run_json)))
    if _has_begun(last) and _number_of(last) < run.session:
        earlier.append(last)
    return {_SESSION: run.session, FIRST_STEP: first_step, SESSIONS: earlier}


def next_session(path: Path) -> RunDir:
    """The next session of a run's directory, numbered after all sessions that recorded or began.
    Creates nothing. Raises RrfpError if run.json cannot be read, and OSError if the directory
    cannot."""
    run = RunDir(path)
    description = read_description(run.run_json)
    numbers = [each.session for each in run.sessions()]
    if _has_begun(description):
        numbers.append(_number_of(description))
    return RunDir(path, max(numbers, default=0) + 1)


def _has_begun(description: Mapping[str, Any]) -> bool:
    """True if the description lists ranks, so that the ranks of the session had connected to each
    other."""
    return bool(description.get("ranks"))


def read_description(path: Path) -> dict[str, Any]:
    """Read run.json; empty if the file is missing, as its launcher may have died before writing it.
    Raises RrfpError if it cannot be read or is not a JSON object."""
    try:
        description = parsed(read_small(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RrfpError(f"{path} cannot be read: {reason_of(error)}") from error
    if not isinstance(description, dict):
        raise RrfpError(f"{path} is not a JSON object")
    return description


def description_of(run: RunDir) -> dict[str, Any]:
    """Read the description of one session from run.json, without the other sessions. If that
    session is not there, the last session's is returned."""
    description = read_description(run.run_json)
    return _alone(session_in(description, run.session) or description)


def session_in(description: dict[str, Any], number: int) -> dict[str, Any] | None:
    """The part of run.json that describes session `number`, the last such part of several; None
    without such a part."""
    every = reversed(_sessions_of(description))
    return next((each for each in every if _number_of(each) == number), None)


def _sessions_of(description: dict[str, Any]) -> list[dict[str, Any]]:
    """The description of each session, the last one last; invalid entries are skipped. The last one
    is `description` itself."""
    listed = description.get(SESSIONS)
    earlier = (
        [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    )
    return [*earlier, description]


def _alone(description: Mapping[str, Any]) -> dict[str, Any]:
    """A description without those of earlier sessions."""
    return {key: value for key, value in description.items() if key != SESSIONS}


def _number_of(description: Mapping[str, Any]) -> int:
    """The number of the described session; 1 if it is missing or not an integer."""
    number = description.get(_SESSION, 1)
    return number if isinstance(number, int) else 1


def is_last(run: RunDir) -> bool:
    """True if this session is the run's last one in run.json; outcome.json is about that one."""
    return _number_of(read_description(run.run_json)) == run.session


def first_step_of(description: Mapping[str, Any]) -> int:
    """The first step of the session with this description; 0 if it is missing or not an integer."""
    step = description.get(FIRST_STEP, 0)
    return step if isinstance(step, int) else 0


def removed_steps(description: dict[str, Any]) -> list[range]:
    """The training steps of each session whose records were removed to stay within the disk
    budget."""
    return [
        range(first_step_of(each), first)
        for each in _sessions_of(description)
        if isinstance(first := each.get(FIRST_KEPT_STEP), int)
    ]


def first_step_after(description: dict[str, Any], session: int) -> int | None:
    """The earliest step at which any later session than this one began, according to run.json; None
    for the last session."""
    later = [each for each in _sessions_of(description) if _number_of(each) > session]
    return min(map(first_step_of, later), default=None)


def description_of_steps(description: dict[str, Any], steps: Iterable[int]) -> dict[str, Any]:
    """The description of the session that ran the first of these steps, with the policy in effect
    in them; without steps, the last session's. `description` is a whole trace's. Raises RrfpError
    if the steps ran under several policies."""
    sessions = [*map(_alone, _sessions_of(description))]
    steps = sorted(steps)
    found = [sessions[_session_of(sessions, step)] for step in steps]
    if not found:
        return sessions[-1]
    policies = [
        stated_policy_of_step(session, step) for session, step in zip(found, steps, strict=True)
    ]
    for place in range(1, len(steps)):
        if policies[place] == policies[place - 1]:
            continue
        why, step = "another one was chosen", steps[place]
        if found[place] is not found[place - 1]:
            why, step = "the run was resumed under another one", first_step_of(found[place])
        raise RrfpError(
            f"the steps asked for ran under several policies, as {why} in step {step}; choose "
            "steps on one side of it with --steps"
        )
    if POLICIES not in found[0]:
        return found[0]
    return {**found[0], POLICY: policies[0]}


def last_policy_begins(description: Mapping[str, Any]) -> int:
    """The first step of the policy that was chosen last during the run; 0 if none was chosen.
    Invalid entries are skipped."""
    chosen = description.get(POLICIES)
    begun = [each.get(FIRST_STEP) for each in chosen] if isinstance(chosen, list) else []
    return max((step for step in begun if isinstance(step, int)), default=0)


def _session_of(sessions: list[dict[str, Any]], step: int) -> int:
    """The index of the last session that began at or before a step; 0 if none did."""
    begun = [index for index, each in enumerate(sessions) if first_step_of(each) <= step]
    return max(begun, default=0)


# Writing run.json.


_ABOUT_RECORDS = (RECORDING_OFF, "dropped_steps", FIRST_KEPT_STEP)
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
    """Write run.json atomically: all settings, the effective policy, versions, the world size, the
    ranks, and the entries of a resumed `session` (`describe_session`). Replaces an existing
    file."""
    description = {
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
    _write(path, description)


def describe_transport(run_json: Path, transport: Mapping[str, object]) -> None:
    """Add the data plane of each link, which the ranks know once they are connected, to run.json.
    Raises RrfpError or OSError if the file cannot be read or written."""
    description = read_description(run_json)
    description["transport"] = dict(transport)
    _write(run_json, description)


def describe_recording(run: RunDir, of_trace: Mapping[str, object]) -> None:
    """Copy the entries about missing records from the description of a session's trace to run.json,
    whose mtime stays. Does nothing if run.json does not describe the session, or cannot be read or
    written."""
    with suppress(RrfpError, OSError):
        description = read_description(run.run_json)
        session = session_in(description, run.session)
        missing = {key: of_trace[key] for key in _ABOUT_RECORDS if key in of_trace}
        if session is None or missing.items() <= session.items():
            return
        session |= missing
        status = run.run_json.stat()
        _write(run.run_json, description)
        # Restore the mtime, which states when the run began.
        os.utime(run.run_json, ns=(status.st_atime_ns, status.st_mtime_ns))


def _write(path: Path, description: Mapping[str, object]) -> None:
    """Write run.json atomically."""
    with open_whole(path) as file:
        file.write(f"{json.dumps(description, indent=2)}\n".encode())


class PolicyLog:
    """Adds the policies chosen during one session to `run.json`, each with its first step. One rank
    writes them. An entry that the disk refuses is written again in the next step."""

    def __init__(self, run_json: Path) -> None:
        """`run_json` describes the session."""
        self._path = run_json
        self._last: Mapping[str, object] | None = None
        self._unwritten: list[dict[str, object]] = []
        self._has_warned = False

    def record(self, step: int, policy: Mapping[str, object]) -> None:
        """Write the policy of this step to run.json, if it differs from the step before. A failure
        to read or write the file is tried again in the next step; only the first one is logged."""
        if policy != self._last:
            self._unwritten.append({FIRST_STEP: step, POLICY: dict(policy)})
            self._last = policy
        if not self._unwritten:
            return
        try:
            self._write_all()
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

    def _write_all(self) -> None:
        """Append the unwritten policies to run.json. A first one that run.json states already is
        left out. Raises RrfpError or OSError if the file cannot be read or written."""
        description = read_description(self._path)
        written = description.get(POLICIES, [])
        if not written and description.get(POLICY) == self._unwritten[0][POLICY]:
            # The session began with this policy, and run.json states it already.
            del self._unwritten[0]
        if self._unwritten:
            description[POLICIES] = [*written, *self._unwritten]
            _write(self._path, description)
        self._unwritten = []


def versions(*more: str) -> dict[str, str]:
    """The versions of Python and of the packages that a run's figures depend on, and of the
    packages `more`; `unknown` for a package that is not installed."""
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in (*_PACKAGES, *more)},
    }


def _version(package: str) -> str:
    """The version of an installed package; `unknown` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:  # Megatron is often run from a source tree
        return "unknown"
