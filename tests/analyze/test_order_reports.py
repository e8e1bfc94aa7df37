"""Deviations, misalignment and the critical path, on runs whose answers are known beforehand."""

import json
import random
import sys
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given

from rrfp.analyze import deviations, misalignment
from rrfp.analyze.bubbles import bubbles
from rrfp.analyze.critical_path import Owner, critical_path
from rrfp.analyze.frames import MESSAGES, SCHEMAS, frames_of
from rrfp.cli import main as cli
from rrfp.errors import RrfpError, UsageError
from rrfp.schedule.hints import parse_order
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.shape import FORWARD_ONLY, Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.engine import TaskTimes
from rrfp.trace.perfetto.reader import read_trace
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import (
    PhaseRecord,
    RankInfo,
    RankRecords,
    Recording,
    TaskRecord,
    WaitRecord,
    step_windows,
)
from tests.analyze.simulated_runs import random_times, simulated, simulated_case
from tests.properties.cases import Case, cases, examples

TRACES = sorted(Path("traces").glob("*.pftrace"))

TWO_STAGES = Shape(2, 3, kinds=FORWARD_ONLY)
SLOW_STAGE = TaskTimes([[10] * 3, [30] * 3], [[0] * 3] * 2, [[0] * 3] * 2)


def slow_link() -> Recording:
    """Three forwards over a link that takes 25 ns for each."""
    return simulated("bf", TWO_STAGES, transfer=lambda *_: 25)


def owners(recording: Recording, step: int | None = None) -> dict[tuple[int, str], int]:
    path = critical_path(frames_of(recording), step)
    return {(owner.pp_rank, owner.kind): owner.time_ns for owner in path.owners}


def by_hand(
    *ranks: tuple[tuple[int, int], list[tuple[int, int]], list[tuple[int, int, str]]],
) -> Recording:
    """A step whose ranks, a stage each, have a window, forwards and waits."""
    return Recording(
        {},
        [
            RankRecords(
                RankInfo(rank, rank, 0, 0, (rank,), "node", 0),
                [
                    TaskRecord(*span, 0, "F", rank, 0, m, m, 1, 0, 1, 1, 1, 0)
                    for m, span in enumerate(tasks)
                ],
                [WaitRecord(start_ns, end_ns, 0, cause) for start_ns, end_ns, cause in waits],
                phases=[PhaseRecord(*window, 0, "schedule")],
            )
            for rank, (window, tasks, waits) in enumerate(ranks)
        ],
    )


# The tables.


def test_the_tables_have_their_schemas_also_where_they_are_empty() -> None:
    for recording in (Recording({}, []), simulated("bf", Shape(2, 3))):
        frames = frames_of(recording)
        assert dict(frames.tasks.schema) == SCHEMAS["task"]
        assert dict(frames.messages.schema) == MESSAGES


@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.stem)
def test_every_record_of_a_real_run_is_a_row(trace: Path) -> None:
    recording = read_trace(trace)
    frames = frames_of(recording)
    for frame, name in ((frames.tasks, "task"), (frames.waits, "wait"), (frames.phases, "phase")):
        assert frame.height == sum(len(each.by_name()[name]) for each in recording.ranks)
    assert frames.messages.height == sum(len(each.receives) for each in recording.ranks)


# Deviations.


def test_what_ran_out_of_turn_is_counted_by_what_stood_before_it() -> None:
    # Microbatch 0 is in flight until 1 and 2 have arrived: stage 1 runs 1, 2 and then 0.
    late = {Task(1, Kind.F, 0): 100}
    order = parse_order("0F1,0F2,0F0,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n", Shape(2, 3), "mine")
    recording = simulated(order, Shape(2, 3), transfer=lambda _s, _r, task: late.get(task, 0))
    ranks = deviations.deviations(frames_of(recording)).to_dicts()
    ran = [(task.kind, task.microbatch) for task in recording.ranks[1].tasks]
    assert ran[0] == ("F", 1)
    assert ranks[1]["dispatches"] == 6
    assert ranks[1]["max_displacement"] >= 1
    assert ranks[1]["kendall_tau_distance"] == distance(recording, 1)


def distance(recording: Recording, rank: int) -> float:
    """Kendall's, pair by pair."""
    places = [task.hint_position for task in recording.ranks[rank].tasks]
    pairs = list(combinations(places, 2))
    return sum(first > second for first, second in pairs) / len(pairs) if pairs else 0.0


@examples(quick=60, thorough=1000)
@given(cases())
def test_the_distance_is_kendall_s(case: Case) -> None:
    recording = simulated_case(case, random_times(random.Random(case.seed), case.shape))
    report = deviations.deviations(frames_of(recording))
    leads = [each.info.rank for each in recording.ranks if each.info.tp_rank == 0]
    assert report["kendall_tau_distance"].to_list() == pytest.approx(
        [distance(recording, rank) for rank in leads]
    )


def test_a_fixed_order_deviates_from_nothing() -> None:
    report = deviations.deviations(
        frames_of(simulated("1f1b", Shape(3, 6), dispatch=Dispatch.FIXED, num_steps=2))
    )
    assert report["dispatches"].to_list() == [24, 24, 24]
    for column in ("deviating_fraction", "mean_displacement", "kendall_tau_distance"):
        assert report[column].to_list() == [0, 0, 0]


def test_steps_that_some_rank_did_not_finish_are_not_counted() -> None:
    recording = simulated("bf", Shape(2, 3), num_steps=2)
    whole = deviations.deviations(frames_of(recording).of_steps([0]))
    # Rank 0 finished step 1, and rank 1 ran one task of it.
    last = recording.ranks[1]
    last.phases[:] = [phase for phase in last.phases if phase.step == 0]
    last.tasks[:] = [*last.tasks[:6], last.tasks[6]._replace(skipped=5)]
    frames = frames_of(recording)
    assert deviations.deviations(frames).equals(whole)
    assert deviations.deviations(frames, 0).equals(whole[:1])
    with pytest.raises(RrfpError, match="no step that every rank finished"):
        deviations.deviations(frames.of_steps([1]), 0)


def test_what_lone_tasks_are_said_to_have_skipped_is_no_distance() -> None:
    recording = by_hand(((0, 10), [(0, 10)], []))
    recording.ranks[0].tasks[:] = [recording.ranks[0].tasks[0]._replace(skipped=5)]
    report = deviations.deviations(frames_of(recording))
    assert report["kendall_tau_distance"].to_list() == [0]


# Misalignment.


def test_a_slow_link_starves_the_stage_behind_it() -> None:
    (link,) = misalignment.misalignment(frames_of(slow_link())).to_dicts()
    # Messages come at 35, 60 and 85; the stage was free from 0, 45 and 70 on.
    assert link["starved_s_median"] == pytest.approx(15e-9)
    assert (link["queued_s_median"], link["queued_s_p95"]) == (0, 0)


def test_messages_queue_before_a_slow_stage() -> None:
    frames = frames_of(simulated("bf", TWO_STAGES, SLOW_STAGE))
    # They come at 10, 20 and 30, and their tasks begin at 10, 40 and 70.
    timed = misalignment.timed_messages(frames)
    assert timed["queued_ns"].to_list() == [0, 20, 40]
    assert timed["starved_ns"].to_list() == [10, 0, 0]


def test_a_message_that_is_withheld_starves_nobody() -> None:
    """Stage 0 may run one forward ahead: it idles for gradients, and stage 1 for activations."""
    frames = frames_of(simulated("bf", Shape(2, 3), limit=1))
    timed = misalignment.timed_messages(frames)
    backward = timed.filter(pl.col("direction") == "backward")
    assert backward["starved_ns"].to_list() == [30] * 3


def test_what_comes_before_its_stage_entered_the_step_starves_nobody() -> None:
    """Stage 1 enters each step when its first message is long there."""
    recording = simulated("bf", TWO_STAGES, num_steps=2)
    late = recording.ranks[1]
    late.phases[:] = [phase._replace(start_ns=phase.start_ns + 10) for phase in late.phases]
    frames = frames_of(recording)
    starved = [
        misalignment.timed_messages(each)["starved_ns"].to_list()
        for each in (frames, *(frames.of_steps([step]) for step in (0, 1)))
    ]
    assert starved == [[0] * 6, [0] * 3, [0] * 3]


# The critical path.


def test_a_slow_link_owns_the_step() -> None:
    assert owners(slow_link()) == {
        (0, "F"): 30,
        (1, "link"): 55,
        (1, "F"): 10,
    }


def test_a_slow_stage_owns_the_step() -> None:
    assert owners(simulated("bf", TWO_STAGES, SLOW_STAGE)) == {(0, "F"): 10, (1, "F"): 90}


def test_a_round_of_agreement_owns_what_it_takes() -> None:
    recording = simulated("bf", TWO_STAGES, num_members=2, agreement_ns=7, transfer=lambda *_: 50)
    found = owners(recording)
    assert found[1, "coordination"] == 7
    assert sum(found.values()) == step_windows(recording)[0][1]


def test_the_slowest_step_is_looked_at_unless_another_is_asked_for() -> None:
    recording = simulated("bf", TWO_STAGES, num_steps=2)
    path = critical_path(frames_of(recording))
    assert path.step == 0
    assert critical_path(frames_of(recording), 1).step == 1
    # One that lies between others may be missing too.
    frames = frames_of(simulated("bf", TWO_STAGES, num_steps=5)).of_steps([0, 1, 4])
    with pytest.raises(UsageError, match=r"step 3 was not finished .* such as step 1 or step 4"):
        critical_path(frames, 3)


def test_the_end_of_a_step_is_of_the_rank_that_synchronises_longest() -> None:
    first = ((0, 12), [(0, 10)], [(10, 12, "gradient_sync")])
    second = ((0, 20), [(0, 9)], [(9, 18, "gradient_sync"), (18, 20, "order")])
    assert owners(by_hand(first, second)) == {
        (0, "F"): 10,
        (1, "gradient_sync"): 8,
        (1, "drain"): 2,
    }
    # Those that do so equally long waited for the one that worked last.
    equal = ((0, 12), [(0, 9)], [(9, 12, "gradient_sync")])
    assert owners(by_hand(equal, first)) == {(1, "F"): 10, (1, "gradient_sync"): 2}


def test_where_waits_overlap_the_earlier_one_counts_as_in_bubbles() -> None:
    waits = [(10, 20, "limit"), (14, 17, "order"), (18, 24, "hold")]
    recording = by_hand(((0, 30), [(0, 10), (25, 30)], waits))
    found = {"limit": 10, "hold": 4, "overhead": 1}
    assert owners(recording) == {(0, "F"): 15} | {(0, why): ns for why, ns in found.items()}
    assert {why: ns for why, ns in bubbles(frames_of(recording)).causes_ns.items() if ns} == found


def test_a_step_that_takes_no_time_has_no_path() -> None:
    frames = frames_of(by_hand(((5, 5), [(5, 5)], [])))
    with pytest.raises(RrfpError, match="step 0 takes no time in this trace"):
        critical_path(frames)


@examples(quick=60, thorough=1000)
@given(cases())
def test_the_path_has_no_gap_and_ends_where_the_step_does(case: Case) -> None:
    recording = simulated_case(
        case,
        random_times(random.Random(case.seed), case.shape),
        transfer=lambda *_: case.seed % 200,
        lateness=lambda member, _: case.seed % 30 * member,
        agreement_ns=case.seed % 11,
    )
    path = critical_path(frames_of(recording))
    start_ns, end_ns = step_windows(recording)[0]
    assert (path.segments[0].start_ns, path.segments[-1].end_ns) == (start_ns, end_ns)
    assert all(before.end_ns == after.start_ns for before, after in pairwise(path.segments))
    assert sum(owner.time_ns for owner in path.owners) == path.length_ns == end_ns - start_ns


@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.stem)
def test_so_it_is_on_real_runs(trace: Path) -> None:
    recording = read_trace(trace)
    for step, (start_ns, end_ns) in step_windows(recording).items():
        path = critical_path(frames_of(recording), step)
        assert path.length_ns == end_ns - start_ns == sum(each.time_ns for each in path.owners)
        assert isinstance(path.owners[0], Owner)


# The commands.

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("deviations", ...)` on a simulated run, 80 columns wide."""
    trace = tmp_path / "trace.pftrace"
    write_trace(trace, simulated("bf", Shape(2, 3), num_steps=2, transfer=lambda *_: 25))
    monkeypatch.setenv("COLUMNS", "80")

    def rrfp(command: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rrfp", "analyze", command, str(trace), *arguments])
        code = cli.main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return rrfp


def test_the_json_has_the_keys_that_other_tools_read(run: Run) -> None:
    (rank, _) = json.loads(run("deviations", "--format", "json")[1])["ranks"]
    assert set(rank) == {
        *("pp_rank", "dispatches", "deviating_fraction", "mean_displacement", "max_displacement"),
        "kendall_tau_distance",
    }
    links = json.loads(run("misalignment", "--format", "json")[1])["links"]
    assert [(link["from"], link["to"], link["direction"]) for link in links] == [
        (0, 1, "forward"),
        (1, 0, "backward"),
    ]
    assert set(links[0]) == {"from", "to", "direction", "messages", "queued_s", "starved_s"}
    assert set(links[0]["queued_s"]) == set(links[0]["starved_s"]) == {"median", "p95"}
    path = json.loads(run("critical-path", "--format", "json")[1])
    assert set(path) == {"step", "length_s", "owners", "evaluations_left_out"}
    assert sum(owner["seconds"] for owner in path["owners"]) == pytest.approx(path["length_s"])
    assert set(path["owners"][0]) == {"pp_rank", "kind", "seconds"}


@pytest.mark.parametrize("command", ["deviations", "misalignment", "critical-path"])
def test_tables_keep_to_80_columns_and_csv_has_a_heading(run: Run, command: str) -> None:
    code, table, _ = run(command)
    assert code == 0
    assert max(map(len, table.splitlines())) <= 80
    heading, *rows = run(command, "--format", "csv")[1].splitlines()
    assert rows
    assert all(len(row.split(",")) == len(heading.split(",")) for row in rows)


@pytest.mark.parametrize(
    ("command", "arguments", "code", "words"),
    [
        ("misalignment", ("--fail-above", "0"), 3, "above the 0 of --fail-above"),
        ("deviations", ("--fail-above", "1"), 0, ""),
        ("critical-path", ("--fail-above", "0.1"), 3, "the share of links and waits in the step"),
        ("deviations", ("--stage", "7"), 2, "no tasks of stage 7; its stages are 0, 1"),
        ("misalignment", ("--steps", "5:"), 2, "none of the steps asked for; it has those from 0"),
        ("critical-path", ("--step", "9"), 2, "step 9 was not finished by every rank"),
    ],
)
def test_thresholds_and_bad_choices(
    run: Run, command: str, arguments: tuple[str, ...], code: int, words: str
) -> None:
    found, _, told = run(command, *arguments)
    assert (found, words in told, told.count("\n") <= 1) == (code, True, True)


def test_notes_are_reported_once_and_steps_left_out_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = simulated("bf", Shape(3, 3), num_steps=3)
    recording.settings["world"] = 4
    recording.ranks[1].phases.pop()
    trace = tmp_path / "trace.pftrace"
    write_trace(trace, recording)
    told = {}
    for command in ("critical-path", "deviations"):
        monkeypatch.setattr(sys, "argv", ["rrfp", "analyze", command, str(trace), "--stage", "0"])
        assert cli.main() == 0
        told[command] = capsys.readouterr().err.splitlines()
    assert [note.partition(";")[0] for note in told["critical-path"]] == [
        "note: rank 3 left no records"
    ]
    assert told["deviations"][1:] == ["left out, as not every rank finished them: step 2"]


def test_what_a_trace_says_is_no_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace.pftrace"
    waits = [(10, 15, "[/x]"), (15, 20, "[red]hot")]
    write_trace(trace, by_hand(((0, 30), [(0, 10), (20, 30)], waits)))
    monkeypatch.setattr(sys, "argv", ["rrfp", "analyze", "critical-path", str(trace)])
    assert cli.main() == 0
    table = capsys.readouterr().out
    assert "[/x]" in table
    assert "[red]hot" in table


def test_a_run_without_messages_is_refused() -> None:
    with pytest.raises(RrfpError, match="no messages between stages"):
        misalignment.misalignment(frames_of(simulated("bf", Shape(1, 3))))
