"""The sessions of a run that was resumed: how run.json tells them apart, and their traces joined.

run.json describes the last session. Under `sessions` it keeps the descriptions of the earlier ones,
and every one of a resumed run has its `session`, counted from 1, and its `first_step`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rrfp.errors import RrfpError, reason_of
from rrfp.strict_json import parsed
from rrfp.trace.records import (
    CostRecord,
    RankRecords,
    ReceiveRecord,
    Recording,
    SendRecord,
    num_times,
)
from rrfp.trace.run_dir import RunDir
from rrfp.trace.run_policy import FIRST_STEP, POLICIES, POLICY, stated_policy_of_step
from rrfp.trace.safe_files import read_small

SESSIONS = "sessions"
_SESSION = "session"
_FIRST_STEP = "first_step"
FIRST_KEPT_STEP = "first_kept_step"
"""In the description of a session whose records are bounded: the first training step that its trace
has, if earlier ones have gone for room."""

Link = tuple[int, int]
"""The ranks that a message goes from and to."""


def described(run: RunDir, first_step: int) -> dict[str, object]:
    """What run.json says of a session that begins with this step, besides what it says of any run.
    Empty for the first one."""
    if run.session == 1:
        return {}
    *earlier, last = map(_alone, _sessions_of(read_description(run.run_json)))
    if _has_begun(last) and _number_of(last) < run.session:
        earlier.append(last)
    return {_SESSION: run.session, _FIRST_STEP: first_step, SESSIONS: earlier}


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
    told = description.get(_FIRST_STEP, 0)
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


def joined(recordings: list[Recording]) -> Recording:
    """The recordings of a run's sessions as one: each step from the session that ran it last, one
    session behind the other without the time between them.

    Raises RrfpError if their layouts differ.
    """
    parts = _contributions(recordings)
    recordings = [recording for recording, _ in parts]
    layouts = [_layout(recording) for recording in recordings]
    for number, layout in enumerate(layouts):
        if layout != layouts[-1]:
            raise RrfpError(
                f"the sessions of this run have several layouts ({_told(layout)} in recorded "
                f"session {number + 1}, {_told(layouts[-1])} in the last one), so they do not fit "
                "into one picture; name the trace of one session (trace.pftrace, trace-2.pftrace "
                "and so on)"
            )
    descriptions = [recording.settings for recording in recordings]
    whole = Recording({}, [RankRecords(records.info) for records in _by_rank(recordings[-1])])
    start_ns, sequences = 0, Counter[Link]()
    for recording, before in parts:
        if FIRST_KEPT_STEP in recording.settings:
            # As if the messages of the steps that have gone had never been counted.
            sequences.subtract(_first_sequences(recording))
        for records, into in zip(_by_rank(recording), whole.ranks, strict=True):
            _append(into, records, before, start_ns, sequences)
        start_ns, sequences = _end_ns(whole), _next_sequences(whole)
    whole.settings = {**descriptions[-1], SESSIONS: descriptions[:-1]}
    return whole


def _contributions(recordings: list[Recording]) -> list[tuple[Recording, int | None]]:
    """The sessions with steps that no later one ran again, each with the first step that one did;
    the last session if none has steps. A session that was killed as it began may have the records
    of some ranks only, and is left out."""
    first_steps = [first_step_of(recording.settings) for recording in recordings]
    found: list[tuple[Recording, int | None]] = []
    for number, recording in enumerate(recordings):
        # A later session may have gone back further than one before it.
        before = min(first_steps[number + 1 :], default=None)
        tasks = (task for records in recording.ranks for task in records.tasks)
        if any(before is None or task.step < before for task in tasks):
            found.append((recording, before))
    return found or [(recordings[-1], None)]


def _layout(recording: Recording) -> list[tuple[object, ...]]:
    return [
        (each.info.rank, each.info.pp_rank, each.info.tp_rank, each.info.dp_rank, each.info.stages)
        for each in _by_rank(recording)
    ]


def _told(layout: list[tuple[Any, ...]]) -> str:
    num_stages = len({stage for *_, stages in layout for stage in stages})
    return f"{len(layout)} ranks and {num_stages} stages"


def _by_rank(recording: Recording) -> list[RankRecords]:
    return sorted(recording.ranks, key=lambda records: records.info.rank)


def _append(
    into: RankRecords,
    records: RankRecords,
    before: int | None,
    start_ns: int,
    sequences: Mapping[Link, int],
) -> None:
    """Append the records of steps before a step. Their times count from `start_ns`, the messages of
    a link from its entry in `sequences`."""
    rank = records.info.rank
    costs = into.costs[-1] if into.costs else None
    found = records.by_name()
    if before is not None:
        # A later session went on from there.
        found["begun"] = []
    for name, target in into.by_name().items():
        for record in found[name]:
            if before is not None and record.step >= before:
                continue
            times = [start_ns + record[each] for each in range(num_times(record))]
            moved = type(record)(*times, *record[len(times) :])
            if isinstance(moved, SendRecord):
                sequence = moved.sequence + sequences[rank, moved.peer]
                moved = moved._replace(sequence=sequence)
            elif isinstance(moved, ReceiveRecord):
                sequence = moved.sequence + sequences[moved.peer, rank]
                moved = moved._replace(sequence=sequence)
            elif isinstance(moved, CostRecord) and costs is not None:
                moved = moved._replace(
                    num_records=moved.num_records + costs.num_records,
                    cost_ns=moved.cost_ns + costs.cost_ns,
                )
            target.append(moved)


def _end_ns(recording: Recording) -> int:
    """When the last record ended."""
    return max(
        (
            record[num_times(record) - 1]
            for records in recording.ranks
            for found in records.by_name().values()
            for record in found
        ),
        default=0,
    )


def _next_sequences(recording: Recording) -> Counter[Link]:
    """The number of each link's next message."""
    following = Counter[Link]()
    for link, sequence in _messages(recording):
        following[link] = max(following[link], sequence + 1)
    return following


def _first_sequences(recording: Recording) -> dict[Link, int]:
    """The number of each link's first message."""
    firsts: dict[Link, int] = {}
    for link, sequence in _messages(recording):
        firsts[link] = min(firsts.get(link, sequence), sequence)
    return firsts


def _messages(recording: Recording) -> Iterator[tuple[Link, int]]:
    """The link and the number of each message, as either end recorded it."""
    for records in recording.ranks:
        rank = records.info.rank
        for send in records.sends:
            yield (rank, send.peer), send.sequence
        for receive in records.receives:
            yield (receive.peer, rank), receive.sequence
