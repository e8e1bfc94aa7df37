"""The sessions of a run that was resumed: each has its trace, and readers join them."""

import json
from pathlib import Path
from typing import Any

import pytest

from rrfp.analyze.frames import frames_of
from rrfp.errors import RrfpError
from rrfp.trace.check import check_contents
from rrfp.trace.locate import resolve_trace
from rrfp.trace.perfetto.reader import read_contents
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import Recording, num_times
from rrfp.trace.run_dir import RunDir, create_run_dir
from rrfp.trace.run_json import describe_run
from rrfp.trace.sessions import (
    described,
    description_of,
    description_of_steps,
    first_step_after,
    joined,
    next_session,
    read_description,
    steps_gone,
)
from tests.recordings import make_recording


def session(number: int, first_step: int, num_steps: int, hint: str = "bf", **of: Any) -> Recording:
    """A recording of the steps from `first_step` on, as a session has it."""
    made = make_recording(num_steps=num_steps, **of)
    for records in made.ranks:
        for found in records.by_name().values():
            found[:] = [record._replace(step=record.step + first_step) for record in found]
    description = {"session": number, "first_step": first_step, "policy": {"hint": hint}}
    return Recording({**made.settings, **description}, made.ranks)


def write(run: Path, *recordings: Recording) -> None:
    run.mkdir(exist_ok=True)
    for number, recording in enumerate(recordings, start=1):
        write_trace(RunDir(run, number).trace, recording)


def test_a_step_that_ran_twice_is_that_of_the_last_session(tmp_path: Path) -> None:
    first, second = session(1, 0, 5), session(2, 3, 2, forward_ns=400_000)
    write(tmp_path / "run", first, second)
    trace = resolve_trace(tmp_path / "run")
    assert trace.name == "trace-joined.pftrace"
    contents = read_contents(trace)
    assert check_contents(contents) == []
    frames = frames_of(contents.recording)
    assert frames.steps == [0, 1, 2, 3, 4]
    lengths = [
        set((tasks["end_ns"] - tasks["start_ns"]).to_list())
        for tasks in (frames.tasks.filter(kind="F", step=step) for step in frames.steps)
    ]
    assert lengths == [{100_000}, {100_000}, {100_000}, {400_000}, {400_000}]
    # Times go on, and so do the numbers of messages and the count of records.
    starts = [start for start, _ in frames.windows.select("start_ns", "step").iter_rows()]
    assert starts == sorted(starts)
    assert frames.messages.height == sum(
        len(records.receives) for records in joined([first, second]).ranks
    )
    for records in contents.recording.ranks:
        costs = [cost.num_records for cost in records.costs]
        assert costs == sorted(costs)


def test_sessions_that_kept_their_last_steps_only_are_joined(tmp_path: Path) -> None:
    first, second = bounded(session(1, 0, 5), 2), bounded(session(2, 5, 6), 7)
    for each in (first, second):
        each.settings["settings"] = {"steps": 11}
    write(tmp_path / "run", first, second)
    contents = read_contents(resolve_trace(tmp_path / "run"))
    assert check_contents(contents) == []
    assert frames_of(contents.recording).steps == [2, 3, 4, 7, 8, 9, 10]


def bounded(recording: Recording, first_kept: int) -> Recording:
    """The recording without its first steps, which have gone for room."""
    for records in recording.ranks:
        for found in records.by_name().values():
            found[:] = [record for record in found if record.step >= first_kept]
    return Recording({**recording.settings, "first_kept_step": first_kept}, recording.ranks)


def test_a_session_that_went_back_further_supersedes_all_before_it() -> None:
    whole = joined([session(1, 0, 4), session(2, 4, 3), session(3, 2, 1)])
    assert frames_of(whole).steps == [0, 1, 2]
    first, second = session(1, 0, 2), session(2, 2, 2)
    whole = joined([first, second])
    for records, *parts in zip(whole.ranks, first.ranks, second.ranks, strict=True):
        for name, found in records.by_name().items():
            rest = [record for part in parts for record in part.by_name()[name]]
            assert [record.step for record in found] == [record.step for record in rest]
            assert all(num_times(record) in (1, 2) for record in found)


def test_a_session_that_ended_as_it_began_is_left_out() -> None:
    """Killed before its first task, when some ranks had opened their records."""
    begun = session(2, 2, 2, num_ranks=2)
    for records in begun.ranks:
        for found in records.by_name().values():
            found.clear()
    assert frames_of(joined([session(1, 0, 4), begun, session(3, 2, 1)])).steps == [0, 1, 2]
    assert frames_of(joined([session(1, 0, 4), begun])).steps == [0, 1]
    # And one whose steps were all run again, on another layout.
    again = session(3, 2, 2)
    assert frames_of(joined([session(1, 0, 4), session(2, 2, 1, num_ranks=2), again])).steps == [
        0,
        1,
        2,
        3,
    ]


def test_sessions_of_different_layouts_are_not_joined(tmp_path: Path) -> None:
    write(tmp_path / "run", session(1, 0, 2), session(2, 2, 2, num_ranks=2))
    with pytest.raises(RrfpError) as raised:
        resolve_trace(tmp_path / "run")
    assert "4 ranks and 4 stages in recorded session 1, 2 ranks and 2 stages in the last" in str(
        raised.value
    )
    assert "name the trace of one session" in str(raised.value)


def test_the_policy_of_steps_is_that_of_their_session() -> None:
    recordings = [session(1, 0, 4), session(2, 2, 2, "bfw"), session(3, 4, 2, "bfw")]
    told = joined(recordings).settings
    assert description_of_steps(told, [0, 1])["policy"] == {"hint": "bf"}
    assert description_of_steps(told, [2, 3, 4, 5])["policy"] == {"hint": "bfw"}
    with pytest.raises(RrfpError, match="resumed under another one in step 2; choose steps"):
        description_of_steps(told, [1, 2])
    alone = session(1, 0, 4).settings
    assert description_of_steps(alone, [0, 3]) == alone


def test_run_json_keeps_the_descriptions_of_all_sessions(tmp_path: Path) -> None:
    infos = [records.info for records in make_recording().ranks]
    path = tmp_path / "run"
    path.mkdir()
    for number, hint in enumerate(["bf", "bfw", "gpipe"], start=1):
        run = next_session(path)
        assert run.session == number
        for ranks in ([], infos):  # the launcher's, then rank 0's
            describe_run(run.run_json, {}, {"hint": hint}, 4, ranks, described(run, number - 1))
    told = json.loads((path / "run.json").read_text())
    assert (told["session"], told["first_step"]) == (3, 2)
    assert [each["policy"]["hint"] for each in told["sessions"]] == ["bf", "bfw"]
    hints = [description_of(RunDir(path, number))["policy"]["hint"] for number in (1, 2, 3)]
    assert hints == ["bf", "bfw", "gpipe"]


@pytest.mark.parametrize(
    "damage",
    [
        {"sessions": 1.5},
        {"sessions": ["", None, 3]},
        {"session": "3"},
        {"session": None, "first_step": "x"},
        {"sessions": [{"session": [], "first_step": None}]},
    ],
)
def test_what_describes_no_session_is_passed_over(tmp_path: Path, damage: dict[str, Any]) -> None:
    run = RunDir(tmp_path)
    infos = [records.info for records in make_recording().ranks]
    describe_run(run.run_json, {}, {"hint": "bf"}, 4, infos, damage)
    told = read_description(run.run_json)
    assert description_of(run)["policy"] == {"hint": "bf"}
    assert next_session(tmp_path).session == 2
    assert described(next_session(tmp_path), 4)["session"] == 2
    assert first_step_after(told, 9) is None
    assert steps_gone(told) == []
    assert description_of_steps(told, [0, 1])["policy"] == {"hint": "bf"}


def test_a_session_that_never_began_does_not_count(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    describe_run(run.run_json, {}, {}, 4, [], described(run, 0))
    assert next_session(tmp_path) == run


def test_force_removes_all_sessions(tmp_path: Path) -> None:
    path = tmp_path / "run"
    write(path, session(1, 0, 2), session(2, 2, 2))
    resolve_trace(path)
    (path / "records-3").mkdir()
    (path / "notes.txt").touch()
    create_run_dir(path, True, "bf")
    assert [entry.name for entry in path.iterdir()] == ["notes.txt"]
