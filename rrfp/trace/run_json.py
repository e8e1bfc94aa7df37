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
"""The description's key for the effective policy, keyed by flag; a null bound withholds nothing."""

POLICIES = "policies"
"""Its key for the policies that were chosen during the run: a list, each with the `first_step` that
it steered, and the `policy` from then on."""
FIRST_STEP = "first_step"
"""The first step of a session, or of an entry of `policies`."""


def unbound_policy(hint: str, dispatch: Dispatch) -> dict[str, object]:
    """The policy of a run that our dispatcher did not steer."""
    usual = {name: each.describe(each.default) for name, each in KNOBS.items()}
    return usual | {"hint": hint, "dispatch": str(dispatch)}


def stated_policy(description: Mapping[str, Any]) -> dict[str, Any]:
    """The effective policy of a run, unvalidated; empty if the description states none.

    Earlier versions kept its parts among the settings and left out the usual limit, which only
    simulated runs could lack.
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
    """What a description says of the policies of steps 0, 1, ..; nothing if they are the same."""
    begun = [
        {FIRST_STEP: step, POLICY: dict(policy)}
        for step, policy in enumerate(policies)
        if step == 0 or policy != policies[step - 1]
    ]
    return {POLICIES: begun} if len(begun) > 1 else {}


def stated_policy_of_step(description: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The policy that steered a step of a session, likewise."""
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
"""In a trace's description: the ranks that switched their recording off, each with the `step` whose
records it could not write, and the `reason`."""
UNREAD_FLIGHTS = "unread_flights"
"""Likewise: the ranks whose flight record is damaged."""
OUTCOME = "outcome"
"""Likewise: how the run ended, and the `error` that ended it, as in outcome.json."""
SESSIONS = "sessions"
_SESSION = "session"
FIRST_KEPT_STEP = "first_kept_step"
"""In the description of a session whose records are bounded: the first training step that its trace
has, if earlier ones have gone for room."""


def described(run: RunDir, first_step: int) -> dict[str, object]:
    """What run.json says of a session that begins with this step, besides what it says of any run.
    Empty for the first one."""
    if run.session == 1:
        return {}
    *earlier, last = map(_alone, _sessions_of(read_description(run.run_json)))
    if _has_begun(last) and _number_of(last) < run.session:
        earlier.append(last)
    return {_SESSION: run.session, FIRST_STEP: first_step, SESSIONS: earlier}


def next_session(path: Path) -> RunDir:
    """The session that a run's directory will have next."""
    run = RunDir(path)
    told = read_description(run.run_json)
    numbers = [each.session for each in run.sessions()]
    if _has_begun(told):
        numbers.append(_number_of(told))
    return RunDir(path, max(numbers, default=0) + 1)


def _has_begun(description: Mapping[str, Any]) -> bool:
    """Whether a session came so far that its ranks knew each other."""
    return bool(description.get("ranks"))


def read_description(path: Path) -> dict[str, Any]:
    """The content of run.json; empty if its launcher died before it wrote it."""
    try:
        settings = parsed(read_small(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RrfpError(f"{path} cannot be read: {reason_of(error)}") from error
    if not isinstance(settings, dict):
        raise RrfpError(f"{path} is not a JSON object")
    return settings


def description_of(run: RunDir) -> dict[str, Any]:
    """What run.json says of one session."""
    told = read_description(run.run_json)
    return _alone(session_in(told, run.session) or told)


def session_in(description: dict[str, Any], number: int) -> dict[str, Any] | None:
    """The part of run.json that describes this session; None if there is no such part."""
    every = reversed(_sessions_of(description))
    return next((each for each in every if _number_of(each) == number), None)


def _sessions_of(description: dict[str, Any]) -> list[dict[str, Any]]:
    """What describes each session, the last one last. What is no description is passed over."""
    told = description.get(SESSIONS)
    earlier = [each for each in told if isinstance(each, dict)] if isinstance(told, list) else []
    return [*earlier, description]


def _alone(description: Mapping[str, Any]) -> dict[str, Any]:
    """What a description says of its own session."""
    return {key: value for key, value in description.items() if key != SESSIONS}


def _number_of(description: Mapping[str, Any]) -> int:
    told = description.get(_SESSION, 1)
    return told if isinstance(told, int) else 1


def is_last(run: RunDir) -> bool:
    """Whether run.json describes this session as the last one, whose end outcome.json tells."""
    return _number_of(read_description(run.run_json)) == run.session


def first_step_of(description: Mapping[str, Any]) -> int:
    """The step that the session so described began with."""
    told = description.get(FIRST_STEP, 0)
    return told if isinstance(told, int) else 0


def steps_gone(description: dict[str, Any]) -> list[range]:
    """The training steps that have gone for room, of each session so described."""
    return [
        range(first_step_of(each), first)
        for each in _sessions_of(description)
        if isinstance(first := each.get(FIRST_KEPT_STEP), int)
    ]


def first_step_after(description: dict[str, Any], session: int) -> int | None:
    """The first step that a later session than this one ran, by run.json; None for the last."""
    later = [each for each in _sessions_of(description) if _number_of(each) > session]
    return min(map(first_step_of, later), default=None)


def description_of_steps(description: dict[str, Any], steps: Iterable[int]) -> dict[str, Any]:
    """What a trace says of the sessions that ran these steps, and of the policy that steered them;
    the description itself for a run of one session and policy. Raises RrfpError if they ran under
    several policies."""
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
    """The first step of the policy that was chosen last during the run; 0 where none was."""
    chosen = description.get(POLICIES)
    begun = [each.get(FIRST_STEP) for each in chosen] if isinstance(chosen, list) else []
    return max((step for step in begun if isinstance(step, int)), default=0)


def _session_of(sessions: list[dict[str, Any]], step: int) -> int:
    """The index of the session that ran a step last."""
    begun = [index for index, each in enumerate(sessions) if first_step_of(each) <= step]
    return max(begun, default=0)


# Writing run.json.


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
    run that was resumed adds (`rrfp.trace.run_json.described`). Concurrent readers never see half a
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
