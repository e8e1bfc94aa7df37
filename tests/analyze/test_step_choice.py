"""Evaluations in a run: told apart from the steps that train, and left out unless asked for."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb
from polars.testing import assert_frame_equal

from rrfp.analyze.frame_files import CachedTrace, load_frames
from rrfp.analyze.frames import (
    SCHEMAS,
    Frames,
    choose_steps,
    evaluation_steps,
    frames_of,
    recording_of,
    step_time_ns,
    warm_up_steps,
)
from rrfp.analyze.perfetto_overlay import find_initial_view
from rrfp.analyze.report import report
from rrfp.analyze.whatif import whatif_table
from rrfp.cli import main as cli
from rrfp.errors import RrfpError
from rrfp.replay.cost_sources import costs_of
from rrfp.replay.recorded import read_run
from rrfp.replay.whatif import what_if
from rrfp.schedule.shape import Shape
from rrfp.trace.check import check_contents
from rrfp.trace.initial_view import Preset
from rrfp.trace.merge import encode_run
from rrfp.trace.perfetto.reader import read_contents, read_trace
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import (
    LossRecord,
    PhaseRecord,
    RankInfo,
    RankRecords,
    Recording,
    TaskRecord,
    evaluation_step,
    format_step_counts,
    is_evaluation,
    step_name,
    step_names,
    step_windows,
    steps_in_order,
)
from rrfp.trace.run_dir import RunDir
from rrfp.trace.spill import SpillWriter, row_of
from tests.analyze.simulated_runs import OURS, simulated_loop, without

SHAPE = Shape(2, 4)
LOOP = "TETEET"
NUM_EVALUATIONS = LOOP.count("E")
Said = tuple[int, str, str]
Rrfp = Callable[..., Said]


@pytest.fixture
def rrfp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Rrfp:
    """A command on recordings, which stand in its arguments as the traces that they become."""
    monkeypatch.setenv("COLUMNS", "80")
    traces: dict[int, Path] = {}

    def run(*arguments: object) -> Said:
        words = ["rrfp"]
        for each in arguments:
            if isinstance(each, Recording):
                if id(each) not in traces:
                    traces[id(each)] = tmp_path / f"{len(traces)}.pftrace"
                    write_trace(traces[id(each)], each)
                words.append(str(traces[id(each)]))
            else:
                words.append(str(each))
        monkeypatch.setattr(sys, "argv", words)
        code = cli.main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def report_of(rrfp: Rrfp, *arguments: object) -> dict[str, Any]:
    code, out, err = rrfp("analyze", *arguments, "--format", "json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def renumbered(recording: Recording, number: Callable[[int], int]) -> Recording:
    for rank in recording.ranks:
        for records in rank.by_name().values():
            records[:] = [record._replace(step=number(record.step)) for record in records]
    return recording


def test_steps_have_names() -> None:
    steps = [evaluation_step(number) for number in (0, 1, 10)]
    assert all(map(is_evaluation, steps))
    assert [step_name(step) for step in (0, 7, *steps)] == [
        *("step 0", "step 7", "evaluation 0", "evaluation 1", "evaluation 10")
    ]
    assert step_names([-2, 5, -1, 3]) == "steps 3, 5 and evaluations 0, 1"
    assert (step_names([4]), step_names([-4]), step_names([])) == ("step 4", "evaluation 3", "")
    assert steps_in_order([-3, 1, -1, 0]) == [0, 1, -1, -3]
    assert [format_step_counts(each) for each in ([], [4], [0, 1], [-1], [-2, -1, 0])] == [
        *("0 steps", "1 step", "2 steps", "1 evaluation", "1 step and 2 evaluations")
    ]


VERBS: tuple[tuple[str, ...], ...] = (
    ("bubbles",),
    ("bubbles", "--steps", "1:3"),
    ("bubbles", "--steps", "1:", "--stage", "1"),
    ("deviations",),
    ("misalignment", "--steps", "1:"),
    ("critical-path",),
    ("critical-path", "--step", "1"),
)


@pytest.mark.parametrize("verb", [*VERBS, ("whatif",)], ids=" ".join)
@pytest.mark.parametrize("named", [True, False], ids=["told", "of an earlier version"])
def test_a_report_is_of_the_steps_that_train(
    rrfp: Rrfp, verb: tuple[str, ...], named: bool
) -> None:
    loop = simulated_loop(LOOP, SHAPE, told=named)
    trained = without(loop, lambda step: is_evaluation(step) if named else LOOP[step] == "E")
    name, *choice = verb
    if not named:
        # The numbers of a trace stay, so that they are those that 'rrfp trace view' shows.
        choice = ["2" if each == "1" else each.replace("1:", "2:") for each in choice]
        choice = ["--stage", "1", "--steps", "2:"] if "--stage" in choice else choice
    found, expected = (report_of(rrfp, name, each, *choice) for each in (loop, trained))
    assert found.pop("evaluations_left_out") == NUM_EVALUATIONS
    assert expected.pop("evaluations_left_out") == 0
    assert found == expected
    if name == "bubbles":
        assert all(rank["structural"] is not None for rank in found["ranks"])
    code, out, err = rrfp("analyze", name, loop, *choice)
    assert code == 0
    assert err.startswith(f"left out: {NUM_EVALUATIONS} evaluations; ")
    assert err.count("\n") == 1
    assert out == rrfp("analyze", name, trained, *choice)[1]
    assert "-1" not in out


def test_a_comparison_is_of_the_steps_that_train(rrfp: Rrfp) -> None:
    loop = simulated_loop(LOOP, SHAPE)
    trained = without(loop, is_evaluation)
    assert report_of(rrfp, "compare", loop, trained) == {
        **report_of(rrfp, "compare", trained, trained),
        "evaluations_left_out": [NUM_EVALUATIONS, 0],
    }
    code, out, err = rrfp("analyze", "compare", loop, trained)
    assert (code, err) == (0, "A: left out: 3 evaluations; --evaluations looks at them\n")
    assert "A step takes" in out
    assert "An evaluation takes" in rrfp("analyze", "compare", loop, loop, "--evaluations")[1]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_evaluations_are_looked_at_where_they_are_asked_for(
    rrfp: Rrfp, verb: tuple[str, ...]
) -> None:
    loop = simulated_loop(LOOP, SHAPE)
    # A run that has no backward at all is taken as it is.
    tested = renumbered(without(loop, lambda step: not is_evaluation(step)), lambda step: -1 - step)
    name, *choice = verb
    found, expected = (
        report_of(rrfp, name, each, *choice, *flag)
        for each, flag in ((loop, ["--evaluations"]), (tested, []))
    )
    if name == "critical-path":
        assert found.pop("evaluation") == expected.pop("step") == (1 if choice else 2)
    assert found == expected
    code, out, err = rrfp("analyze", name, loop, *choice, "--evaluations")
    assert (code, err) == (0, "")
    assert "step" not in out.lower().replace("steps that train", "")


def test_evaluations_of_an_earlier_version_are_looked_at_too(rrfp: Rrfp) -> None:
    loop = simulated_loop(LOOP, SHAPE, told=False)
    assert report_of(rrfp, "critical-path", loop, "--evaluations")["step"] == 4
    assert report_of(rrfp, "critical-path", loop, "--evaluations", "--step", "1")["step"] == 1
    whole, last = (
        report_of(rrfp, "bubbles", loop, "--evaluations", *steps)
        for steps in ((), ("--steps", "4:"))
    )
    assert whole["window_s"] > last["window_s"] > 0


def test_what_a_run_does_not_have_is_said(rrfp: Rrfp) -> None:
    loop = simulated_loop(LOOP, SHAPE)
    trained = without(loop, is_evaluation)
    tested = without(loop, lambda step: not is_evaluation(step))
    cases: tuple[tuple[tuple[object, ...], str], ...] = (
        (("bubbles", trained, "--evaluations"), "no evaluations; leave out --evaluations"),
        (("bubbles", tested), "has 3 evaluations and no step that trains; 'rrfp analyze bubbles"),
        (("whatif", tested), "--evaluations' looks at evaluations"),
        (("compare", loop, tested), "--evaluations' looks at evaluations"),
        (("bubbles", loop, "--steps", "3:"), "of the steps asked for; it has those from 0 to 2"),
        (
            ("bubbles", loop, "--evaluations", "--steps", "5:7"),
            "none of the evaluations asked for; it has those from 0 to 2",
        ),
        (
            ("critical-path", loop, "--evaluations", "--step", "9"),
            "evaluation 9 was not finished by every rank; choose another one, such as evaluation 1",
        ),
    )
    for arguments, said in cases:
        code, out, err = rrfp("analyze", *arguments)
        assert (code, out) == (2, "")
        assert said in err
    with pytest.raises(RrfpError, match="has evaluations only"):
        read_run(tested)


def test_evaluations_are_never_replayed(rrfp: Rrfp) -> None:
    loop = simulated_loop(LOOP, SHAPE)
    trained = without(loop, is_evaluation)
    assert read_run(loop).left_out == ()
    documents = [whatif_table(what_if(each), 1.0).document() for each in (loop, trained)]
    assert documents[0] == documents[1]
    assert costs_of(loop).steps == costs_of(trained).steps
    code, out, _ = rrfp("analyze", "bubbles", loop, "--evaluations")
    assert code == 0
    assert "Where the time of 3 evaluations went" in out
    assert "steps that train are replayed" in out


def test_an_evaluation_of_an_earlier_version_may_be_the_largest_step() -> None:
    loop = simulated_loop("TET", SHAPE, told=False)
    larger = simulated_loop("TET", Shape(2, 12), told=False)
    for rank, more in zip(loop.ranks, larger.ranks, strict=True):
        extra = [task for task in more.tasks if task.step == 1]
        rank.tasks[:] = [*(task for task in rank.tasks if task.step != 1), *extra]
    assert read_run(loop).left_out == (1,)


def test_a_step_that_some_rank_did_not_finish_is_no_evaluation() -> None:
    loop = simulated_loop("TTT", SHAPE)
    for rank in loop.ranks:
        rank.tasks[:] = [task for task in rank.tasks if task.step != 1 or task.kind == "F"]
    assert evaluation_steps(frames_of(loop)) == [1]
    del loop.ranks[1].phases[1]
    assert evaluation_steps(frames_of(loop)) == []


def test_nothing_is_lost_on_the_way(tmp_path: Path) -> None:
    loop = simulated_loop(LOOP, SHAPE)
    run = RunDir(tmp_path / "run")
    for rank in loop.ranks:
        writer = SpillWriter(run.rank_records(rank.info.rank), rank.info)
        for records in rank.by_name().values():
            writer.append(map(row_of, records))
        writer.flush()
        writer.close()
    run.run_json.write_text(json.dumps(loop.settings))
    trace = encode_run(run.path)
    assert read_trace(trace) == loop
    assert check_contents(read_contents(trace)) == []
    assert list(step_windows(loop)) == sorted([0, 1, 2, -1, -2, -3])
    for _ in range(2):  # the second time from the tables beside the trace
        everything = CachedTrace(trace).frames()
        assert recording_of(everything) == loop
        assert everything.steps == [0, 1, 2, -1, -2, -3]
        for evaluations in (False, True):
            found = load_frames(trace, evaluations=evaluations)
            expected = choose_steps(frames_of(loop), evaluations=evaluations)
            for name in SCHEMAS:
                assert_frame_equal(found.table(name), expected.table(name))
            assert_frame_equal(found.messages, expected.messages)


def notes_of(trace: Path) -> set[tuple[str, int]]:
    """The annotations of all events that tell a step."""
    found = pb.Trace.FromString(trace.read_bytes())
    return {
        (note.name, note.int_value)
        for packet in found.packet
        for note in packet.track_event.debug_annotations
        if note.name in ("step", "evaluation")
    }


def test_a_trace_names_evaluations(tmp_path: Path) -> None:
    trace = tmp_path / "trace.pftrace"
    loop = simulated_loop(LOOP, SHAPE)
    loop.ranks[0].losses.append(LossRecord(0, evaluation_step(5), 3))
    write_trace(trace, loop)
    assert notes_of(trace) == {
        *(("step", number) for number in range(3)),
        *(("evaluation", number) for number in (0, 1, 2, 5)),
    }
    assert read_trace(trace) == loop


def test_an_export_has_everything_and_names_evaluations(rrfp: Rrfp, tmp_path: Path) -> None:
    loop = simulated_loop(LOOP, SHAPE)
    out = tmp_path / "run.json"
    assert rrfp("trace", "export", loop, "-o", out)[0] == 0
    events = json.loads(out.read_text())["traceEvents"]
    steps = {
        (name, value)
        for event in events
        for name, value in event.get("args", {}).items()
        if name in ("step", "evaluation")
    }
    assert steps == {(sort, number) for sort in ("step", "evaluation") for number in range(3)}
    tables = tmp_path / "tables"
    assert rrfp("trace", "export", loop, "-o", tables)[0] == 0
    tasks = pl.read_parquet(tables / "tasks.parquet")
    assert len(tasks) == sum(len(rank.tasks) for rank in loop.ranks)
    assert tasks.select("step", "evaluation").unique().sort("step").rows() == [
        *((-3, 2), (-2, 1), (-1, 0), (0, None), (1, None), (2, None))
    ]


def test_a_run_that_died_in_an_evaluation(rrfp: Rrfp) -> None:
    loop = simulated_loop("TTETE", SHAPE)
    last = evaluation_step(1)
    cut = loop.ranks[1]
    cut.phases.pop()
    cut.tasks.pop()
    code, out, _ = rrfp("trace", "check", loop)
    assert code == 1
    assert out == "incomplete: the run ended in evaluation 1, which 1 rank (1) did not finish\n"
    assert report_of(rrfp, "bubbles", loop) == {
        **report_of(rrfp, "bubbles", without(loop, is_evaluation)),
        "evaluations_left_out": 2,
    }
    code, out, err = rrfp("analyze", "bubbles", loop, "--evaluations")
    assert code == 0
    assert "Where the time of evaluation 0 went" in out
    assert err == "left out, as not every rank finished them: evaluation 1\n"
    assert last not in step_windows(loop)


def test_check_judges_by_time_and_names_evaluations(rrfp: Rrfp) -> None:
    loop = simulated_loop("TET", SHAPE)
    first, second = loop.ranks
    second.phases[:] = [phase for phase in second.phases if not is_evaluation(phase.step)]
    first.losses.append(LossRecord(0, evaluation_step(0), 7))
    assert rrfp("trace", "check", loop)[1].splitlines() == [
        "lost: 7 records (7 in evaluation 0) that rank 0 had no room for",
        "lost: the end of evaluation 0 on 1 rank (1)",
    ]
    loop = simulated_loop("TE", SHAPE)
    del loop.ranks[1].receives[-1]
    lost = "F3 of evaluation 0"
    assert rrfp("trace", "check", loop)[1].splitlines() == [
        f"lost: 1 message sent and never received ({lost}, rank 0 to 1)",
        f"unmatched: 1 task ran on an input never received ({lost}, stage 1)",
    ]


def test_a_viewer_shows_a_step_that_trains_first(tmp_path: Path) -> None:
    trace = tmp_path / "trace.pftrace"
    loop = simulated_loop("ETETE", SHAPE)
    windows = step_windows(loop)
    write_trace(trace, loop)
    for preset in (None, Preset.BUBBLES, Preset.FLOW):
        assert find_initial_view(trace, preset).step == 1
    shown = find_initial_view(trace, Preset.BUBBLES, evaluations=True)
    # The first one in time warms up, and the last one takes longest.
    assert shown.step == evaluation_step(2)
    assert shown.view.window is not None
    assert shown.view.window[0] <= windows[evaluation_step(2)][0]
    assert find_initial_view(trace, None, evaluations=True).step == evaluation_step(1)
    write_trace(trace, without(loop, lambda step: not is_evaluation(step)))
    assert find_initial_view(trace, Preset.BUBBLES).step == evaluation_step(2)


def test_charts_and_the_report_name_evaluations(rrfp: Rrfp, tmp_path: Path) -> None:
    loop = simulated_loop(LOOP, SHAPE)
    for kind in ("gantt", "progress", "hint"):
        chart = tmp_path / f"{kind}.svg"
        code, _, err = rrfp("analyze", "chart", kind, loop, "-o", chart)
        assert (code, err) == (0, "left out: 3 evaluations; --evaluations looks at them\n")
        assert "step 2, the slowest of 3" in chart.read_text().lower()
        rrfp("analyze", "chart", kind, loop, "--evaluations", "--step", "0", "-o", chart)
        assert "evaluation 0" in chart.read_text().lower()
    trace = tmp_path / "trace.pftrace"
    write_trace(trace, loop)
    contents = read_contents(trace)
    page = report("run", contents)
    assert "3 steps of" in page
    assert "3 evaluations left out" in page
    assert "Critical path of step 2" in page
    assert "saved %" in page
    page = report("run", contents, evaluations=True)
    assert "3 evaluations of" in page
    assert "left out" not in page
    assert "An evaluation takes" in page
    assert "Critical path of evaluation 2" in page
    assert "The run is not replayed: the trace has evaluations only" in page


# The first steps of a run are left out where they were slow for warming up, and that is said.


def run_of(lengths_ns: Sequence[int], host: str = "node") -> Frames:
    """A run of one rank, a step of each length."""
    tasks, phases, start_ns = [], [], 0
    for step, length_ns in enumerate(lengths_ns):
        end_ns = start_ns + length_ns
        phases.append(PhaseRecord(start_ns, end_ns, step, "schedule"))
        tasks += [
            TaskRecord(start_ns, end_ns, step, kind, 0, 0, 0, 0, 1, 0, 1, 1, 1, 0) for kind in "FB"
        ]
        start_ns = end_ns
    info = RankInfo(0, 0, 0, 0, (0,), host, 0)
    return frames_of(Recording({}, [RankRecords(info, tasks=tasks, phases=phases)]))


@pytest.mark.parametrize(
    ("lengths_ns", "slow"),
    [
        ((300, 100, 101, 99), (0,)),
        ((900, 300, 100, 101, 99, 100, 98, 103), (0, 1)),
        # A second step that is as the rest ends the warm-up.
        ((900, 100, 300, 100, 101, 99, 100, 98), (0,)),
        # Never more than three, nor a quarter of a run.
        ((900, 900, 900, 900, *(100 for _ in range(16))), (0, 1, 2)),
        ((900, 900, 100, 100), (0,)),
        # A slow step later does not hide it.
        ((900, 100, 100, 100, 5000, 100, 100, 100), (0,)),
        # Nothing stands out: noise, a slow machine from the start, a run that gets slower.
        ((110, 100, 90, 105), ()),
        ((119, 100, 100, 100), ()),
        ((150, 100, 140, 80, 120, 60), ()),
        ((100, 100, 100, 300), ()),
        # Too few steps to say.
        ((900, 100, 100), ()),
        ((900,), ()),
    ],
)
def test_what_is_far_longer_than_the_later_steps_is_warm_up(
    lengths_ns: Sequence[int], slow: tuple[int, ...]
) -> None:
    frames = run_of(lengths_ns)
    assert warm_up_steps(frames) == slow
    chosen = choose_steps(frames)
    assert chosen.warm_up == slow
    assert chosen.steps == [step for step in frames.steps if step not in slow]
    assert choose_steps(frames, with_warm_up=True).steps == frames.steps
    asked = choose_steps(frames, range(99))
    assert (asked.steps, asked.warm_up) == (frames.steps, ())


@given(st.lists(st.integers(1, 1000), max_size=40))
def test_most_of_a_run_stays(lengths_ns: list[int]) -> None:
    slow = warm_up_steps(run_of(lengths_ns))
    assert len(slow) <= min(3, len(lengths_ns) / 4)
    assert slow == tuple(range(len(slow)))


def test_simulated_ranks_have_nothing_to_warm_up() -> None:
    assert warm_up_steps(run_of((900, 100, 100, 100), host="simulated")) == ()


def test_a_step_takes_the_mean_of_those_chosen() -> None:
    frames = choose_steps(run_of((900, 100, 200, 120)))
    assert step_time_ns(frames) == 140
    assert step_time_ns(frames, [1, 3]) == 110
    with pytest.raises(RrfpError, match="no step that every rank finished"):
        step_time_ns(frames, [0])


def _rrfp(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[str, str]:
    monkeypatch.setattr(sys, "argv", ["rrfp", "analyze", *arguments])
    assert cli.main() == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


SAID = "skipped as warm-up: step 0 (--steps 0: includes it)\n"


@pytest.mark.parametrize(
    "command", ["findings", "bubbles", "deviations", "misalignment", "critical-path", "whatif"]
)
def test_every_report_leaves_it_out_and_says_so(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = _rrfp(capsys, monkeypatch, command, str(OURS), "--format", "json")
    assert err == SAID
    found = json.loads(out)
    assert found.pop("warm_up_left_out") == [0]
    asked, err = _rrfp(capsys, monkeypatch, command, str(OURS), "--steps", "1:", "--format", "json")
    assert err == ""
    same = json.loads(asked)
    # The commands of findings name the steps that were asked for.
    assert str(same).replace(" --steps 1:", "") == str(found)
    every, err = _rrfp(capsys, monkeypatch, command, str(OURS), "--steps", "0:", "--format", "json")
    assert err == ""
    assert json.loads(every) != found


def test_a_step_that_is_asked_for_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["critical-path", str(OURS), "--step", "0", "--format", "json"]
    out, err = _rrfp(capsys, monkeypatch, *command)
    assert (json.loads(out)["step"], err) == (0, "")


def test_the_report_says_it_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("altair", reason="the extra 'report' is not installed")
    page = tmp_path / "report.html"
    _, err = _rrfp(capsys, monkeypatch, "report", str(OURS), "-o", str(page))
    assert err == SAID
    assert "step 0 skipped as warm-up" in page.read_text()


def test_a_run_without_steps_has_none() -> None:
    assert warm_up_steps(frames_of(Recording({}, []))) == ()
