"""The run directory: made once, found again, and merged by the first command that opens it."""

import json
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rrfp.analyze.frames import frames_of
from rrfp.errors import RrfpError, UsageError
from rrfp.trace.check import check_contents
from rrfp.trace.locate import find_run, resolve_trace
from rrfp.trace.merge import encode_run, joined
from rrfp.trace.outcome import noting_outcome
from rrfp.trace.perfetto.reader import read_contents, read_trace
from rrfp.trace.perfetto.writer import write_run_files, write_trace
from rrfp.trace.records import RankInfo, Recording, SendRecord, WaitRecord, num_times
from rrfp.trace.run_dir import RunDir, create_run_dir, own_files, runs_in
from rrfp.trace.run_json import (
    describe_run,
    describe_session,
    description_of,
    description_of_steps,
    first_step_after,
    next_session,
    read_description,
    removed_steps,
)
from rrfp.trace.spill import SpillWriter, row_of
from tests.analyze.recordings import make_recording


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _spill(run: RunDir, recording: Recording) -> None:
    run.run_json.write_text(json.dumps(recording.settings))
    for records in recording.ranks:
        writer = SpillWriter(run.rank_records(records.info.rank), records.info)
        for found in records.by_name().values():
            writer.append(map(row_of, found))
            writer.flush()
        writer.close()


def test_runs_are_named_by_time_and_hint() -> None:
    first = create_run_dir(None, False, "bf")
    second = create_run_dir(None, False, "bf")
    assert first.path != second.path
    assert first.path.parent == Path("runs")
    assert first.path.name.endswith("-bf")
    ordered = create_run_dir(None, False, "orders/my order.csv")
    assert ordered.path.name.endswith("-my-order")


def test_a_path_that_leaves_no_room_for_the_runs_files_is_refused(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["d" * 200] * 19)
    with pytest.raises(UsageError, match=r"bytes, and its files need 128 of the 4095"):
        create_run_dir(deep / ("e" * 150), False, "bf")
    assert not deep.exists()
    assert create_run_dir(tmp_path.joinpath(*["d" * 200] * 3), False, "bf").path.is_dir()


def test_the_latest_is_the_newest_run_that_has_a_trace() -> None:
    first = create_run_dir(None, False, "bf")
    _spill(first, make_recording(2, 1, 1))
    assert not Path("runs/latest").exists()
    resolve_trace(first.path)
    assert Path("runs/latest").resolve() == first.path.resolve()
    # Neither a run without a trace nor an older one whose trace comes later.
    older = create_run_dir(Path("runs/older"), False, "bf")
    _spill(older, make_recording(2, 1, 1))
    _begin(older, -10)
    without = create_run_dir(None, False, "bf")
    without.run_json.write_text("{}")
    resolve_trace(older.path)
    assert Path("runs/latest").resolve() == first.path.resolve()
    _begin(older, 10)
    write_run_files(create_run_dir(Path("runs/new"), False, ""), make_recording(2, 1, 1))
    _begin(RunDir(Path("runs/new")), 5)
    create_run_dir(older.path, True, "bf")
    assert Path("runs/latest").readlink() == Path("new")
    for path in (Path("runs/new"), first.path):
        create_run_dir(path, True, "bf")
    assert not Path("runs/latest").is_symlink()


def test_a_file_in_place_of_the_link_is_not_replaced() -> None:
    run = create_run_dir(None, False, "bf")
    Path("runs/latest").mkdir()
    write_run_files(run, make_recording(1, 1, 1))
    assert Path("runs/latest").is_dir()
    assert not Path("runs/latest").is_symlink()
    with pytest.raises(UsageError, match="is not a link"):
        create_run_dir(None, False, "bf")


def _begin(run: RunDir, after_s: float) -> None:
    """Set the time at which a run began, relative to now."""
    moment_s = time.time() + after_s
    os.utime(run.run_json, (moment_s, moment_s))


def test_a_given_directory_is_made_and_not_linked() -> None:
    run = create_run_dir(Path("a/b"), False, "bf")
    assert run.path == Path("a/b")
    assert run.path.is_dir()
    assert not Path("runs").exists()


def test_an_existing_directory_is_refused_unless_forced() -> None:
    run = create_run_dir(Path("out"), False, "bf")
    for file in (run.run_json, run.metrics, run.trace, run.path / "notes.txt"):
        file.write_text("old")
    run.records.mkdir()
    run.rank_records(0).write_text("old")
    run.logs.mkdir()
    run.rank_log(7).write_text("old")
    with pytest.raises(UsageError, match=r"out exists; .*--force"):
        create_run_dir(Path("out"), False, "bf")
    create_run_dir(Path("out"), True, "bf")
    assert [path.name for path in run.path.iterdir()] == ["notes.txt"]


def test_an_existing_directory_becomes_its_users_alone_where_a_new_one_would_be() -> None:
    Path("out").mkdir(mode=0o755)
    create_run_dir(Path("out"), True, "bf")
    assert Path("out").stat().st_mode & 0o777 == 0o755
    with own_files():
        create_run_dir(Path("out"), True, "bf")
    assert Path("out").stat().st_mode & 0o777 == 0o700


def test_a_file_in_the_way_is_refused() -> None:
    Path("out").write_text("")
    Path("runs").write_text("")
    for out in (Path("out"), Path("out/deeper"), None):
        with pytest.raises(UsageError):
            create_run_dir(out, True, "bf")


def test_a_trace_is_found_by_file_by_directory_and_as_the_latest() -> None:
    run = create_run_dir(None, False, "bf")
    run.trace.write_bytes(b"x")
    assert resolve_trace(run.trace) == run.trace
    assert resolve_trace(run.path) == run.trace
    assert resolve_trace(None) == run.trace


@pytest.fixture
def _three_runs() -> None:
    for age, name in enumerate(("third", "second", "first")):
        run = create_run_dir(Path("runs", name), False, "")
        run.run_json.write_text("{}")
        run.trace.write_bytes(b"x")
        _begin(run, -100 * age)
    create_run_dir(Path("runs/newest"), False, "").run_json.write_text("{}")
    Path("runs/no run").mkdir()
    Path("runs/latest").symlink_to("third")


@pytest.mark.usefixtures("_three_runs")
@pytest.mark.parametrize(
    ("named", "found"),
    [
        (None, "third"),
        ("@-1", "newest"),
        ("@-2", "third"),
        ("@-4", "first"),
        ("second", "second"),
        ("second/", "second"),
        ("second/trace.pftrace", "second/trace.pftrace"),
        ("latest", "latest"),
        ("runs/latest", "latest"),
    ],
)
def test_a_run_has_short_names(named: str | None, found: str) -> None:
    assert [path.name for path in runs_in()] == ["newest", "third", "second", "first"]
    assert find_run(None if named is None else Path(named)) == Path("runs", found)


@pytest.mark.usefixtures("_three_runs")
def test_a_path_that_exists_goes_before_a_short_name() -> None:
    for name in ("second", "@-1"):
        Path(name).mkdir()
        assert find_run(Path(name)) == Path(name)


@pytest.mark.usefixtures("_three_runs")
@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ("secnod", "there is no run or trace at secnod; did you mean 'second'?"),
        ("runs/frist", "there is no run or trace at runs/frist; did you mean 'runs/first'?"),
        ("quite else", "there is no run or trace at quite else; 'rrfp runs' lists the runs"),
        ("../elsewhere", "there is no run or trace at ../elsewhere; 'rrfp runs' lists the runs"),
        ("@-5", "there is no @-5 among the 4 runs in runs; 'rrfp runs' lists them"),
        ("mine.pftrac", "there is no run or trace at mine.pftrac; did you mean 'mine.pftrace'?"),
        ("@1", "'@1' counts no runs; write @-1 for the newest one in runs, @-2 for the one before"),
        ("@-0", "'@-0' counts no runs; "),
    ],
)
def test_a_name_of_no_run_is_a_sentence(named: str, sentence: str) -> None:
    Path("mine.pftrace").touch()
    with pytest.raises(RrfpError) as raised:
        find_run(Path(named))
    assert str(raised.value).startswith(sentence)


def test_nothing_is_counted_where_there_is_no_run() -> None:
    with pytest.raises(RrfpError, match="there is no @-1, as runs holds no run; make one with"):
        find_run(Path("@-1"))


@pytest.mark.parametrize("path", [None, Path("none")])
def test_no_run_is_a_sentence(path: Path | None) -> None:
    with pytest.raises(RrfpError, match="there is no run"):
        resolve_trace(path)


def test_a_run_without_a_trace_is_a_sentence() -> None:
    run = create_run_dir(Path("out"), False, "bf")
    with pytest.raises(RrfpError, match=r"has no trace\.pftrace"):
        resolve_trace(run.path)


def test_a_run_that_died_before_its_first_step_says_so() -> None:
    run = create_run_dir(Path("out"), False, "bf")
    run.run_json.write_text(json.dumps({"settings": {"no_trace": False}}))
    with suppress(RrfpError), noting_outcome(run):
        with pytest.raises(RrfpError, match="the run in out has recorded nothing yet; wait"):
            resolve_trace(run.path)
        raise RrfpError("rank 1 failed: no memory\nand its stack")
    words = (
        "no rank of the run in out has recorded anything: it ended before its first step (rank 1 "
        "failed: no memory); see out/logs"
    )
    with pytest.raises(RrfpError, match=re.escape(words)):
        resolve_trace(run.path)
    run.records.mkdir()
    with pytest.raises(RrfpError, match=re.escape(words)):
        resolve_trace(run.path)


def test_a_run_without_recording_says_so() -> None:
    run = create_run_dir(Path("out"), False, "bf")
    run.run_json.write_text(json.dumps({"settings": {"no_trace": True}}))
    with pytest.raises(RrfpError, match="the run in out was trained with --no-trace; train it"):
        resolve_trace(run.path)


def test_the_directory_of_another_host_than_0_says_so() -> None:
    run = create_run_dir(Path("out"), False, "bf")
    run.logs.mkdir()
    with pytest.raises(RrfpError, match="out has the logs of one host's ranks alone; the trace is"):
        resolve_trace(run.path)


def test_records_that_were_never_merged_are_merged_when_opened() -> None:
    run = create_run_dir(Path("out"), False, "bf")
    recording = make_recording(2, 3, 2)
    _spill(run, recording)
    assert resolve_trace(run.path) == run.trace
    assert not run.records.exists()
    merged = read_trace(run.trace)
    assert merged.settings == recording.settings
    first_ns = min(phase.start_ns for phase in recording.ranks[0].phases)
    for rank, expected in zip(merged.ranks, recording.ranks, strict=True):
        assert [task[2:] for task in rank.tasks] == [task[2:] for task in expected.tasks]
        for task, original in zip(rank.tasks, expected.tasks, strict=True):
            assert task.start_ns == original.start_ns - first_ns
            assert task.end_ns == original.end_ns - first_ns


def test_clocks_are_aligned() -> None:
    run = create_run_dir(Path("out"), False, "bf")
    wait, send = WaitRecord(1000, 1100, 0, "drain"), SendRecord(50, 60, 0, "F", 1, 0, 1, 0, 8)
    for info, record in (
        (RankInfo(0, 0, 0, 0, (0,), "near", 1), wait),
        (RankInfo(1, 1, 0, 0, (1,), "far", 2, clock_offset_ns=1_030, clock_error_ns=3), send),
    ):
        writer = SpillWriter(run.rank_records(info.rank), info)
        writer.append(map(row_of, [record]))
        writer.flush()
        writer.close()
    ranks = read_trace(encode_run(run.path)).ranks
    assert ranks[0].waits == [wait._replace(start_ns=0, end_ns=100)]
    assert ranks[1].sends == [send._replace(start_ns=80, end_ns=90)]
    assert ranks[1].info.clock_error_ns == 3


def test_a_crash_leaves_what_was_flushed() -> None:
    run = create_run_dir(Path("out"), False, "bf")
    _spill(run, make_recording(3, 3, 2))
    run.rank_records(0).unlink()
    run.rank_records(1).write_text('{"format": "rr')
    torn = run.rank_records(2).read_bytes()
    run.rank_records(2).write_bytes(torn[:-5])
    run.run_json.unlink()
    merged = read_trace(encode_run(run.path))
    assert merged.settings == {}
    assert [records.info.rank for records in merged.ranks] == [2]
    assert len(merged.ranks[0].tasks) == 12
    assert merged.ranks[0].costs == []


def test_a_run_that_goes_on_is_left_alone() -> None:
    run = create_run_dir(Path("out"), False, "bf")
    writer = SpillWriter(run.rank_records(0), RankInfo(0, 0, 0, 0, (0,), "node", 1))
    with pytest.raises(RrfpError, match="is still going"):
        resolve_trace(run.path)
    writer.close()
    assert resolve_trace(run.path) == run.trace


@pytest.mark.parametrize("content", ["{", "[]"])
def test_corrupt_settings_are_a_sentence(content: str) -> None:
    run = create_run_dir(Path("out"), False, "bf")
    _spill(run, make_recording(1, 1, 1))
    run.run_json.write_text(content)
    with pytest.raises(RrfpError, match=r"run\.json"):
        encode_run(run.path)
    assert run.records.exists()


# The sessions of a run that was resumed: each has its trace, and readers join them.


def session(number: int, first_step: int, num_steps: int, hint: str = "bf", **of: Any) -> Recording:
    """A session's recording of the steps from `first_step` on."""
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


def test_sessions_with_only_their_last_steps_are_joined(tmp_path: Path) -> None:
    first, second = bounded(session(1, 0, 5), 2), bounded(session(2, 5, 6), 7)
    for each in (first, second):
        each.settings["settings"] = {"steps": 11}
    write(tmp_path / "run", first, second)
    contents = read_contents(resolve_trace(tmp_path / "run"))
    assert check_contents(contents) == []
    assert frames_of(contents.recording).steps == [2, 3, 4, 7, 8, 9, 10]


def bounded(recording: Recording, first_kept: int) -> Recording:
    """The recording without its first steps, as if they had been removed for the disk budget."""
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
            describe_run(
                run.run_json, {}, {"hint": hint}, 4, ranks, describe_session(run, number - 1)
            )
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
def test_an_invalid_description_of_a_session_is_skipped(
    tmp_path: Path, damage: dict[str, Any]
) -> None:
    run = RunDir(tmp_path)
    infos = [records.info for records in make_recording().ranks]
    describe_run(run.run_json, {}, {"hint": "bf"}, 4, infos, damage)
    told = read_description(run.run_json)
    assert description_of(run)["policy"] == {"hint": "bf"}
    assert next_session(tmp_path).session == 2
    assert describe_session(next_session(tmp_path), 4)["session"] == 2
    assert first_step_after(told, 9) is None
    assert removed_steps(told) == []
    assert description_of_steps(told, [0, 1])["policy"] == {"hint": "bf"}


def test_a_session_that_never_began_does_not_count(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    describe_run(run.run_json, {}, {}, 4, [], describe_session(run, 0))
    assert next_session(tmp_path) == run


def test_force_removes_all_sessions(tmp_path: Path) -> None:
    path = tmp_path / "run"
    write(path, session(1, 0, 2), session(2, 2, 2))
    resolve_trace(path)
    (path / "records-3").mkdir()
    (path / "notes.txt").touch()
    create_run_dir(path, True, "bf")
    assert [entry.name for entry in path.iterdir()] == ["notes.txt"]
