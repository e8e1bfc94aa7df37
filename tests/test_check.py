"""Every kind of damage to a trace is reported, and a whole trace has no problem."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from rrfp.trace.check import check_contents
from rrfp.trace.perfetto.reader import read_contents
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import LossRecord, Recording
from tests.recordings import make_recording

NUM_RANKS = 3


def _check(folder: Path, recording: Recording) -> list[str]:
    path = folder / "trace.pftrace"
    write_trace(path, recording)
    return check_contents(read_contents(path))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_whole_run_has_no_problem(tmp_path: Path, num_ranks: int) -> None:
    assert _check(tmp_path, make_recording(num_ranks, 4, 3)) == []


def test_a_run_without_recorded_messages_has_no_problem(tmp_path: Path) -> None:
    recording = make_recording(3, 4, 2)
    for records in recording.ranks:
        records.sends.clear()
        records.receives.clear()
    assert _check(tmp_path, recording) == []


def _lose_a_receive(run: Recording) -> None:
    del run.ranks[1].receives[2]


def _lose_a_send(run: Recording) -> None:
    del run.ranks[0].sends[2]


def _lose_a_message(run: Recording) -> None:
    del run.ranks[0].sends[2], run.ranks[1].receives[2]


def _lose_a_task(run: Recording) -> None:
    del run.ranks[1].tasks[3]


def _lose_a_rank(run: Recording) -> None:
    del run.ranks[1]


def _lose_a_rank_that_nobody_listed(run: Recording) -> None:
    del run.ranks[1], run.settings["ranks"]


def _run_a_task_twice(run: Recording) -> None:
    task = run.ranks[1].tasks[-1]
    run.ranks[1].tasks.append(task._replace(start_ns=task.end_ns, end_ns=task.end_ns + 5))


def _overlap(run: Recording) -> None:
    tasks = run.ranks[2].tasks
    tasks[1] = tasks[1]._replace(start_ns=tasks[0].end_ns - 1)


def _receive_too_early(run: Recording) -> None:
    receives = run.ranks[1].receives
    receives[0] = receives[0]._replace(start_ns=run.ranks[0].sends[0].start_ns - 7)


def _run_too_early(run: Recording) -> None:
    receives, tasks = run.ranks[1].receives, run.ranks[1].tasks
    receives[0] = receives[0]._replace(start_ns=tasks[0].start_ns + 3, end_ns=tasks[0].end_ns)


def _run_on_half_a_message(run: Recording) -> None:
    receives, tasks = run.ranks[1].receives, run.ranks[1].tasks
    receives[0] = receives[0]._replace(end_ns=tasks[0].start_ns + 3)


def _end_before_the_start(run: Recording) -> None:
    waits = run.ranks[0].waits
    waits[0] = waits[0]._replace(end_ns=waits[0].start_ns - 1)


def _lose_the_end_of_a_step(run: Recording) -> None:
    phases = run.ranks[1].phases
    phases[:] = [phase for phase in phases if phase.step != 0]


@pytest.mark.parametrize(
    ("damage", "problems"),
    [
        (_lose_a_receive, ["lost: 1 message sent and never received", "unmatched: 1 task ran"]),
        (_lose_a_send, ["lost: 1 message received and never sent", "lost: 1 message (number 2)"]),
        (_lose_a_message, ["lost: 1 message (number 2)", "unmatched: 1 task ran on an input"]),
        (_lose_a_task, ["lost: 1 task (", "unmatched: 1 message received and taken by no task"]),
        (_lose_a_rank, ["missing: 1 rank of the run left no records (1)"]),
        (_lose_a_rank_that_nobody_listed, ["missing: 1 rank of the run left no records (1)"]),
        (_run_a_task_twice, ["unmatched: 1 task ran more than once"]),
        (_overlap, ["overlapping: 1 pair of tasks (F0 of step 0, stage 2 and B0 of step 0"]),
        (_receive_too_early, ["negative latency: 1 message received before they were sent"]),
        (_run_too_early, ["negative latency: 1 message taken by a task before they arrived"]),
        (
            _run_on_half_a_message,
            [
                "negative latency: 1 message taken by a task before they arrived "
                "(F0 of step 0, rank 0 to 1: -3 ns)"
            ],
        ),
        (_end_before_the_start, ["negative duration: 1 event (wait at "]),
        (_lose_the_end_of_a_step, ["lost: the end of step 0 on 1 rank (1)"]),
    ],
)
def test_damage_to_a_run_is_told(
    tmp_path: Path, damage: Callable[[Recording], None], problems: list[str]
) -> None:
    recording = make_recording(NUM_RANKS, 4, 2)
    damage(recording)
    told = _check(tmp_path, recording)
    for problem in problems:
        assert any(line.startswith(problem) for line in told), told


def test_clocks_may_differ_by_their_error(tmp_path: Path) -> None:
    recording = make_recording(2, 2, 1)
    _receive_too_early(recording)
    info = recording.ranks[1].info
    recording.ranks[1].info = type(info)(1, 1, 0, 0, (1,), "far", 9, 0, 10)
    assert _check(tmp_path, recording) == []


def test_a_torn_last_step_is_reported_as_what_it_is(tmp_path: Path) -> None:
    recording = make_recording(NUM_RANKS, 4, 3)
    dead = recording.ranks[1]
    for found in dead.by_name().values():
        found[:] = [record for record in found if record.step < 2]
    for records in recording.ranks:
        records.phases[:] = [phase for phase in records.phases if phase.step < 2]
    for alive in (recording.ranks[0], recording.ranks[2]):
        del alive.tasks[-2:], alive.sends[-1:]
    assert _check(tmp_path, recording) == [
        "incomplete: the run ended in step 2, which 3 ranks (0; 1; 2) did not finish"
    ]


def test_what_a_rank_had_no_room_for_is_told_and_no_more(tmp_path: Path) -> None:
    recording = make_recording(NUM_RANKS, 4, 4)
    full = recording.ranks[1]
    num_before = sum(map(len, full.by_name().values()))
    for name, found in full.by_name().items():
        for step in (1, 3):
            of_step = [place for place, record in enumerate(found) if record.step == step]
            # Phases come last in a step.
            num_kept = 0 if name == "phase" else len(of_step) // 2
            found[:] = [r for place, r in enumerate(found) if place not in of_step[num_kept:]]
    num_lost = num_before - sum(map(len, full.by_name().values()))
    full.losses += [LossRecord(1, 1, num_lost - 5), LossRecord(3, 3, 5)]
    assert _check(tmp_path, recording) == [
        f"lost: {num_lost} records ({num_lost - 5} in step 1; 5 in step 3) that rank 1 had no "
        "room for"
    ]


def _drop(predicate: Callable[[Any], bool]) -> Callable[[list[Any]], None]:
    def drop(packets: list[Any]) -> None:
        del packets[next(i for i, packet in enumerate(packets) if predicate(packet))]

    return drop


def _strip_an_arrow(packets: list[Any]) -> None:
    task = next(p for p in packets if p.track_event.terminating_flow_ids)
    del task.track_event.terminating_flow_ids[:]


def _is_end(packet: Any) -> bool:
    return bool(
        packet.HasField("track_event") and packet.track_event.type == pb.TrackEvent.TYPE_SLICE_END
    )


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_drop(_is_end), "open: 1 slice without an end"),
        (_drop(lambda p: p.track_event.name == "F0"), "unmatched: 1 ends of slices"),
        (_drop(lambda p: p.track_event.name == "F0"), "lost: 1 of "),
        (_drop(lambda p: p.track_event.name == "end of trace"), "truncated: "),
        (_strip_an_arrow, "unmatched: 1 message without an arrow"),
    ],
)
def test_damage_to_the_file_is_told(
    tmp_path: Path, damage: Callable[[list[Any]], None], problem: str
) -> None:
    path = tmp_path / "trace.pftrace"
    write_trace(path, make_recording(NUM_RANKS, 2, 1))
    packets = list(pb.Trace.FromString(path.read_bytes()).packet)
    damage(packets)
    path.write_bytes(pb.Trace(packet=packets).SerializeToString())
    told = check_contents(read_contents(path))
    assert any(line.startswith(problem) for line in told), told
