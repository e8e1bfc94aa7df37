"""Every kind of damage to a trace is reported, and a complete trace has no problems."""

import gzip
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from rrfp.cli import main as cli
from rrfp.schedule.shape import Shape
from rrfp.simulate.engine import StepConditions
from rrfp.trace.check import check_contents, recording_fraction
from rrfp.trace.perfetto.format import VERSION
from rrfp.trace.perfetto.reader import read_contents
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.perfetto_server import TraceServer
from rrfp.trace.records import (
    CostRecord,
    LossRecord,
    PhaseRecord,
    RankInfo,
    RankRecords,
    ReceiveRecord,
    Recording,
    SendRecord,
    TaskRecord,
)
from tests.analyze.recordings import make_recording
from tests.analyze.simulated_runs import equal_times, policy_of, simulated_run

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
def test_damage_to_a_run_is_reported(
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


def test_records_that_did_not_fit_are_reported_once(tmp_path: Path) -> None:
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
def test_damage_to_the_file_is_reported(
    tmp_path: Path, damage: Callable[[list[Any]], None], problem: str
) -> None:
    path = tmp_path / "trace.pftrace"
    write_trace(path, make_recording(NUM_RANKS, 2, 1))
    packets = list(pb.Trace.FromString(path.read_bytes()).packet)
    damage(packets)
    path.write_bytes(pb.Trace(packet=packets).SerializeToString())
    told = check_contents(read_contents(path))
    assert any(line.startswith(problem) for line in told), told


# The cost of recording: the last record of the rank with the largest cost.


def _rank(rank: int, steps_ns: list[int], costs_ns: list[int]) -> RankRecords:
    return RankRecords(
        RankInfo(rank, rank, 0, 0, (rank,), "node", 1),
        phases=[
            phase
            for step, length_ns in enumerate(steps_ns)
            for phase in (
                PhaseRecord(5, 5 + length_ns, step, "schedule"),
                PhaseRecord(0, 10_000, step, "optimizer"),
            )
        ],
        costs=[CostRecord(0, step, 1, cost_ns) for step, cost_ns in enumerate(costs_ns)],
    )


def test_the_worst_rank_counts_with_all_of_its_steps() -> None:
    ranks = [_rank(0, [100, 300], [1, 4]), _rank(1, [200, 200], [5, 8])]
    assert recording_fraction(Recording({}, ranks)) == 8 / 400


def test_a_rank_that_finished_no_step_or_stated_no_cost_does_not_count() -> None:
    ranks = [_rank(0, [], [7]), _rank(1, [50], [1]), _rank(2, [50], [])]
    assert recording_fraction(Recording({}, ranks)) == 1 / 50
    assert recording_fraction(Recording({}, [ranks[0], ranks[2]])) is None
    assert recording_fraction(Recording({}, [])) is None


# Twelve kinds of damage to a trace, through every command that reads one: no traceback, no hang.
#
# A trace that cannot be read, or would make figures wrong, is refused with one sentence and exit
# code 1. For an incomplete trace there are figures, and a line that states what they lack.


TRACE = Path("trace.pftrace")


def simulated_recording(num_ranks: int = NUM_RANKS) -> Recording:
    policy, shape = policy_of("bf", Shape(num_ranks, 4), limit=32)
    world = StepConditions(equal_times(shape, 1000, 2000, 0), lambda sender, receiver, task: 300)
    recording = simulated_run(policy, shape, [world], num_steps=3)
    recording.settings["world"] = num_ranks
    return recording


# The kinds of damage: each writes a damaged file, or replaces it.

Damage = Callable[[Path], None]


def edit_packets(edit: Callable[[list[Any]], None]) -> Damage:
    def damage(path: Path) -> None:
        write_trace(path, simulated_recording())
        packets = list(pb.Trace.FromString(path.read_bytes()).packet)
        edit(packets)
        path.write_bytes(pb.Trace(packet=packets).SerializeToString())

    return damage


def edit_recording(edit: Callable[[Recording], None]) -> Damage:
    def damage(path: Path) -> None:
        recording = simulated_recording()
        edit(recording)
        write_trace(path, recording)

    return damage


def edit_bytes(edit: Callable[[bytes], bytes]) -> Damage:
    def damage(path: Path) -> None:
        write_trace(path, simulated_recording())
        path.write_bytes(edit(path.read_bytes()))

    return damage


def another_program_s(path: Path) -> None:
    packet = pb.TracePacket(timestamp=5, trusted_packet_sequence_id=1)
    packet.track_event.type = pb.TrackEvent.TYPE_INSTANT
    packet.track_event.name = "frame"
    path.write_bytes(pb.Trace(packet=[packet]).SerializeToString())


def zip_bomb(path: Path) -> None:
    """16 gigabytes of zeros."""
    path.write_bytes(gzip.compress(bytes(1 << 24)) * 1024)


def lose_the_end(packets: list[Any]) -> None:
    del packets[-len(packets) // 3 :]


def lose_from_the_middle(packets: list[Any]) -> None:
    """A task, both of its packets."""
    begin = next(
        place
        for place, packet in enumerate(packets)
        if packet.track_event.categories[:] == ["task"]
    )
    del packets[begin : begin + 2]


def lose_a_rank(recording: Recording) -> None:
    del recording.ranks[1]


def lose_the_last_rank(recording: Recording) -> None:
    recording.ranks.pop()


def lose_records(recording: Recording) -> None:
    """Remove the last records of step 2 on rank 1, as if they had not fit into its buffer."""
    records = recording.ranks[1]
    del records.tasks[-4:], records.waits[-2:], records.stimuli[-2:], records.phases[-1:]
    records.losses.append(LossRecord(1, 2, 9))


def double_a_rank(recording: Recording) -> None:
    recording.ranks.append(simulated_recording().ranks[1])


def end_before_the_start(recording: Recording) -> None:
    tasks = recording.ranks[1].tasks
    tasks[2] = tasks[2]._replace(end_ns=tasks[2].start_ns - 5)


def unmatch_an_arrow(recording: Recording) -> None:
    del recording.ranks[1].sends[1]


def set_note(name: str, value: int | str) -> Callable[[list[Any]], None]:
    """Give the first annotation of that name another value."""

    def edit(packets: list[Any]) -> None:
        notes = (note for packet in packets for note in packet.track_event.debug_annotations)
        note = next(note for note in notes if note.name == name)
        setattr(note, "int_value" if isinstance(value, int) else "string_value", value)

    return edit


def name_in_latin_1(data: bytes) -> bytes:
    return data.replace(b"warmup", b"w\xe4rmup")


# The commands that read a trace. Files go to the working directory.

COMMANDS: dict[str, list[str]] = {
    "bubbles": ["analyze", "bubbles", "TRACE"],
    "deviations": ["analyze", "deviations", "TRACE"],
    "misalignment": ["analyze", "misalignment", "TRACE"],
    "critical-path": ["analyze", "critical-path", "TRACE"],
    "compare": ["analyze", "compare", "TRACE", "TRACE"],
    "whatif": ["analyze", "whatif", "TRACE"],
    "chart": ["analyze", "chart", "gantt", "TRACE", "-o", "gantt.svg"],
    "report": ["analyze", "report", "TRACE", "-o", "report.html"],
    "view": ["trace", "view", "TRACE", "--no-browser"],
    "check": ["trace", "check", "TRACE"],
    "export to Chrome": ["trace", "export", "TRACE", "-o", "trace.json"],
    "export to Parquet": ["trace", "export", "TRACE", "-o", "tables"],
    "simulate": [
        *("simulate", "--pp", str(NUM_RANKS), "--microbatches", "4"),
        *("--costs", "TRACE", "--sweep", "hint=bf,fb"),
    ],
}
ANALYSES = ("bubbles", "deviations", "misalignment", "critical-path", "compare", "whatif", "chart")

Rrfp = Callable[..., tuple[int, str, str]]


@pytest.fixture
def rrfp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Rrfp:
    """`rrfp("bubbles")`: that command on trace.pftrace of an empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TraceServer, "serve_forever", lambda self: None)

    def run(command: str) -> tuple[int, str, str]:
        arguments = [str(TRACE) if word == "TRACE" else word for word in COMMANDS[command]]
        monkeypatch.setattr(sys, "argv", ["rrfp", *arguments])
        code = cli.main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        pytest.param(damage, words, id=name)
        for name, damage, words in (
            ("truncated", edit_bytes(lambda data: data[: len(data) // 2]), "is truncated"),
            ("empty", lambda path: path.write_bytes(b""), "is empty"),
            (
                "wrong magic",
                lambda path: path.write_bytes(b"\x89PNG\r\n" + bytes(9000)),
                "is not an uncompressed Perfetto trace",
            ),
            ("another program's", another_program_s, "but not one of an rrfp run"),
            (
                "future version",
                edit_packets(set_note("version", VERSION + 1)),
                "update rrfp to read it",
            ),
            (
                "huge number",
                edit_packets(set_note("microbatch", 1 << 62)),
                "'microbatch' is 4611686018427387904",
            ),
            (
                "huge rank",
                edit_packets(set_note("pp_rank", 1 << 40)),
                "has a damaged 'rank 0': 'pp_rank' is 1099511627776",
            ),
            ("deep settings", edit_packets(set_note("settings", "[" * 9999)), "a damaged 'run'"),
            ("not UTF-8", edit_bytes(name_in_latin_1), "has a text that is not UTF-8"),
            ("zip bomb", zip_bomb, "unpack it first, with gunzip"),
            ("directory", Path.mkdir, "has no trace.pftrace"),
        )
    ],
)
def test_an_unreadable_trace_is_refused(rrfp: Rrfp, damage: Damage, words: str) -> None:
    damage(TRACE)
    for command in COMMANDS:
        code, out, err = rrfp(command)
        assert (command, code, out, err.count("\n")) == (command, 1, "", 1)
        assert words in err


@pytest.mark.parametrize(
    ("damage", "words", "told"),
    [
        pytest.param(damage, words, told, id=name)
        for name, damage, words, told in (
            ("truncated between packets", edit_packets(lose_the_end), "is truncated", "truncated:"),
            (
                "doubled rank",
                edit_recording(double_a_rank),
                "has the records of rank 1 twice",
                "unmatched: 1 rank in the trace more than once (1)",
            ),
            (
                "lost from the middle",
                edit_packets(lose_from_the_middle),
                "lacks 1 of the",
                "lost: 1 of 366 events",
            ),
            (
                "negative duration",
                edit_recording(end_before_the_start),
                "1 of its events end before they begin",
                "negative duration: 1 event",
            ),
        )
    ],
)
def test_damage_that_would_make_figures_wrong_is_refused_in_detail(
    rrfp: Rrfp, damage: Damage, words: str, told: str
) -> None:
    damage(TRACE)
    for command in COMMANDS.keys() - {"check", "report"}:
        code, out, err = rrfp(command)
        assert (command, code, out, err.count("\n")) == (command, 1, "", 1)
        assert words in err
    code, out, err = rrfp("check")
    assert (code, told in out) == (1, True)
    assert (rrfp("report")[0], told in Path("report.html").read_text()) == (0, True)


@pytest.mark.parametrize(
    ("damage", "words", "told"),
    [
        pytest.param(damage, words, told, id=name)
        for name, damage, words, told in (
            (
                "missing rank",
                edit_recording(lose_a_rank),
                "note: rank 1 left no records; figures are of the other 2; see 'rrfp trace check'",
                "missing: 1 rank of the run left no records (1)",
            ),
            (
                "missing last rank",
                edit_recording(lose_the_last_rank),
                "note: rank 2 left no records; figures are of the other 2; see 'rrfp trace check'",
                "missing: 1 rank of the run left no records (2)",
            ),
            (
                "unmatched arrow",
                edit_recording(unmatch_an_arrow),
                "note: 47 messages were sent and 48 received; those that lack an end are left out; "
                "see 'rrfp trace check'",
                "lost: 1 message received and never sent (F1 of step 0, rank 1 to 2)",
            ),
            (
                "lost records",
                edit_recording(lose_records),
                "note: rank 1 lost 9 records, and its steps that lack them are left out; see "
                "'rrfp trace check'",
                "lost: 9 records (9 in step 2) that rank 1 had no room for",
            ),
        )
    ],
)
def test_an_incomplete_trace_is_reported_with_what_it_lacks(
    rrfp: Rrfp, damage: Damage, words: str, told: str
) -> None:
    damage(TRACE)
    for command in ANALYSES:
        code, out, err = rrfp(command)
        # Of two traces it is said which one.
        assert words in err.replace("note: A: ", "note: "), command
        # The remaining records may not form a pipeline, which is reported in a sentence.
        assert code == 0 or (code, out, err.count("rrfp: ")) == (1, "", 1)
        assert "this is a bug" not in err
    assert rrfp("bubbles")[0] == rrfp("deviations")[0] == rrfp("critical-path")[0] == 0
    code, out, err = rrfp("check")
    assert (code, told in out) == (1, True)
    assert (rrfp("report")[0], told in Path("report.html").read_text()) == (0, True)
    for command in ("view", "export to Chrome", "export to Parquet", "simulate"):
        assert "this is a bug" not in rrfp(command)[2]


def test_a_whole_trace_lacks_nothing(rrfp: Rrfp) -> None:
    write_trace(TRACE, simulated_recording())
    for command in COMMANDS:
        code, out, err = rrfp(command)
        assert (command, code, bool(out)) == (command, 0, True)
        assert "note" not in err


def test_tasks_that_wait_for_each_other_in_a_circle_are_reported(rrfp: Rrfp) -> None:
    """Rank 1 receives the output of 0F1 before it ran, and 0F1 ran after a task that depends on
    it."""
    first, second = (
        RankRecords(RankInfo(rank, rank, 0, 0, (rank,), "node", 1)) for rank in range(2)
    )

    def run(records: RankRecords, kind: str, microbatch: int, start_ns: int, end_ns: int) -> None:
        place = kind, records.info.rank, 0, microbatch
        records.tasks.append(TaskRecord(start_ns, end_ns, 0, *place, 0, 1, 0, 1, 1, 1, 0))

    def send(source: RankRecords, kind: str, microbatch: int, came_ns: int) -> None:
        destination = first if source is second else second
        what = came_ns - 1, came_ns, 0, kind, destination.info.rank, microbatch
        sequence = len(source.sends)
        source.sends.append(SendRecord(*what, destination.info.rank, sequence, 8))
        destination.receives.append(ReceiveRecord(*what, source.info.rank, sequence, 8))

    run(first, "F", 0, 0, 1)
    run(first, "B", 0, 10, 20)
    run(first, "F", 1, 20, 30)
    run(second, "F", 0, 2, 3)
    run(second, "F", 1, 5, 8)
    run(second, "B", 0, 8, 9)
    send(first, "F", 0, 2)
    send(first, "F", 1, 5)
    send(second, "B", 0, 10)
    for records in (first, second):
        records.phases.append(PhaseRecord(0, 40, 0, "schedule"))
    write_trace(TRACE, Recording({}, [first, second]))
    assert rrfp("critical-path") == (
        *(1, ""),
        "rrfp: in step 0 of the trace tasks wait for each other in a ring, so that its times "
        "cannot be right; choose another step with --step\n",
    )
