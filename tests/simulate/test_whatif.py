"""Tests of the savings of other policies or faster stages, compared with simulated runs."""

import csv
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.analyze.html import table_element
from rrfp.analyze.whatif import whatif_table
from rrfp.cli import main as cli
from rrfp.errors import UsageError
from rrfp.replay.bottlenecks import structural
from rrfp.replay.change import Change
from rrfp.replay.measured import measure
from rrfp.replay.recorded import read_run
from rrfp.replay.whatif import what_if
from rrfp.schedule.hints import Order, format_order
from rrfp.schedule.named_hints import HINTS, hint_named
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind
from rrfp.simulate.engine import StepConditions, TaskTimes
from rrfp.simulate.step import play
from rrfp.trace.perfetto.reader import read_trace
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import Recording
from tests.analyze.simulated_runs import (
    MEGATRONS,
    OURS,
    equal_times,
    policy_of,
    random_times,
    simulated_run,
)
from tests.properties.cases import examples

SHAPE = Shape(4, 8)


def recorded(conditions: StepConditions, hint: str = "bf", num_steps: int = 1) -> Recording:
    """Return the recording of a simulated run of `SHAPE`."""
    policy, shape = policy_of(hint, SHAPE, limit=32)
    return simulated_run(policy, shape, [conditions], num_steps=num_steps)


def makespan_ns(conditions: StepConditions, hint: str, **bounds: int | Dispatch) -> int:
    policy, shape = policy_of(hint, SHAPE, **(bounds or {"limit": 32}))
    return play(shape, policy, conditions).makespan_ns


@pytest.mark.parametrize(
    ("change", "bounds"),
    [
        (Change(HINTS["fb"]), {}),
        (Change(HINTS["bf"], hold=5), {"hold": 5}),
        (Change(HINTS["bf"], limit=2), {"limit": 2}),
        (Change(HINTS["bf"], Dispatch.FIXED), {"dispatch": Dispatch.FIXED}),
        (Change(hint_named("1f1b").for_shape(SHAPE), Dispatch.FIXED), {"dispatch": Dispatch.FIXED}),
        (Change(limit=3), {"limit": 3}),
    ],
)
def test_a_replay_under_another_policy_equals_its_simulation(
    change: Change, bounds: dict[str, int | Dispatch]
) -> None:
    conditions = StepConditions(random_times(Random(7), SHAPE), lambda sender, receiver, task: 20)
    report = what_if(recorded(conditions), lambda run: [change])
    hint = "bf" if change.hint is None else change.hint.name
    assert report.replay_error == 0
    assert report.measured_ns == report.as_it_was.makespan_ns == makespan_ns(conditions, "bf")
    (row,) = report.rows
    assert row.makespan_ns == makespan_ns(conditions, hint, **bounds)
    assert row.saving == pytest.approx(1 - row.makespan_ns / report.measured_ns)


def test_a_split_backward_stays_split_and_a_whole_one_is_divided() -> None:
    times = random_times(Random(3), SHAPE)
    split = what_if(
        recorded(StepConditions(times), "bfw"), lambda run: [Change(HINTS["bfw"], limit=4)]
    )
    assert split.rows[0].makespan_ns == makespan_ns(StepConditions(times), "bfw", limit=4)
    whole = what_if(
        recorded(StepConditions(times)), lambda run: [Change(HINTS["bfw"])], w_share=0.25
    )
    backward = times.by_kind(split=False)[Kind.B]
    parts = [[round(0.25 * time_ns) for time_ns in row] for row in backward]
    rest = [
        [all_ns - part for all_ns, part in zip(*rows, strict=True)]
        for rows in zip(backward, parts, strict=True)
    ]
    divided = StepConditions(TaskTimes(times.forward, rest, parts))
    assert whole.rows[0].makespan_ns == makespan_ns(divided, "bfw")


def test_one_stage_as_fast_as_the_median() -> None:
    fast = equal_times(SHAPE, 100, 100, 50)
    slow = TaskTimes(
        *(
            [[3 * time_ns if stage == 2 else time_ns for time_ns in row] for stage, row in rows]
            for rows in map(enumerate, (fast.forward, fast.input_gradient, fast.weight_gradient))
        )
    )
    report = what_if(recorded(StepConditions(slow)), lambda run: [Change(median_stage=2)])
    assert report.rows[0].makespan_ns == makespan_ns(StepConditions(fast), "bf")
    # Without a given change, the analysis itself finds the slow stage.
    report = what_if(recorded(StepConditions(slow)))
    assert "stage 2 as fast as the median" in [row.what for row in report.rows]
    assert re.fullmatch(
        r"You would save \d+% with \w+; \d+% of what remains is stage 2, slower than the median\.",
        report.conclusion,
    )


def test_a_tiny_loss_is_not_shown_as_negative_zero() -> None:
    report = what_if(recorded(StepConditions(equal_times(SHAPE, 100, 100, 50))))
    lost = replace(report, rows=(replace(report.rows[0], saving=-1e-5),))
    table = whatif_table(lost, 1e6)
    (saved,) = (cells for column, cells in table.shown() if "saved" in str(column.heading))
    assert saved == ["", "0.0"]
    assert "-0.0" not in table_element(table)


def test_without_jitter_and_with_free_links() -> None:
    even = equal_times(SHAPE, 100, 100, 50)
    rng = Random(9)
    shaken = [
        [time for pair in zip(row[::2], row[1::2], strict=True) for time in _shift(rng, *pair)]
        for row in even.forward
    ]
    jittery = StepConditions(TaskTimes(shaken, even.input_gradient, even.weight_gradient))
    report = what_if(recorded(jittery), lambda run: [Change(without_jitter=True)])
    assert report.rows[0].makespan_ns == makespan_ns(StepConditions(even), "bf")
    assert report.bubble.whole.excess == pytest.approx(report.rows[0].saving)
    late = StepConditions(even, lambda sender, receiver, task: 70)
    report = what_if(recorded(late), lambda run: [Change(free_links=True)])
    assert report.rows[0].makespan_ns == makespan_ns(StepConditions(even), "bf")
    assert report.rows[0].saving > 0
    assert report.bubble.whole.excess == 0


def _shift(rng: Random, one: int, other: int) -> tuple[int, int]:
    """Move up to 59 ns from the second time to the first; the sum stays the same."""
    shift = rng.randrange(60)
    return one + shift, other - shift


@given(st.integers(0, 10**6))
@examples(quick=10, thorough=200)
def test_the_parts_of_the_bubble_sum_to_it(seed: int) -> None:
    conditions = StepConditions(random_times(Random(seed), SHAPE))
    run = read_run(recorded(conditions))
    (step,) = steps = measure(run)
    parts = structural(run, steps)
    busy_ns = step.replicas[0].busy_ns(run.shape)
    assert sum(part.fraction for part in parts.ranks) / 4 == pytest.approx(parts.whole.fraction)
    for rank, part in enumerate(parts.ranks):
        assert part.fraction == pytest.approx(1 - busy_ns[rank] / step.window_ns)
    assert parts.whole.fraction == pytest.approx(1 - sum(busy_ns) / 4 / step.window_ns)


def test_savings_are_paired_by_step() -> None:
    """The saving is the same share of each step, although the steps differ much in length."""
    conditions = StepConditions(random_times(Random(2), SHAPE))
    recording = recorded(conditions, num_steps=1)
    policy, shape = policy_of("bf", SHAPE, limit=32)
    for factor in (5, 9):
        times = TaskTimes(
            *(
                [[factor * time_ns for time_ns in row] for row in rows]
                for rows in (
                    conditions.times.forward,
                    conditions.times.input_gradient,
                    conditions.times.weight_gradient,
                )
            )
        )
        longer = simulated_run(policy, shape, [StepConditions(times)])
        origin_ns = max(phase.end_ns for rank in recording.ranks for phase in rank.phases)
        for mine, theirs in zip(recording.ranks, longer.ranks, strict=True):
            step = len(mine.phases)
            for name, records in theirs.by_name().items():
                mine.by_name()[name].extend(
                    record._replace(
                        step=step,
                        **{
                            field: getattr(record, field) + origin_ns
                            for field in ("start_ns", "end_ns", "time_ns")
                            if hasattr(record, field)
                        },
                    )
                    for record in records
                )
    report = what_if(recording, lambda run: [Change(HINTS["f-first"])])
    own_ns, other_ns = makespan_ns(conditions, "bf"), makespan_ns(conditions, "f-first")
    assert own_ns != other_ns
    assert report.measured_ns == median([own_ns, 5 * own_ns, 9 * own_ns])
    assert report.rows[0].saving == pytest.approx(1 - other_ns / own_ns)
    assert report.rows[0].makespan_ns == pytest.approx(5 * other_ns, abs=1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (Change(limit=3, hold=4), "a limit of 3 and a hold of 4 exclude each other"),
        (Change(median_stage=4), "the run has no stage 4; choose one from 0 to 3"),
        (Change(dispatch=Dispatch.FIXED, limit=1), "above the limit of 1"),
        (Change(limit=3, unbound=True, dispatch=Dispatch.FIXED), "above the limit of 3"),
    ],
)
def test_an_impossible_change_is_refused(change: Change, said: str) -> None:
    recording = recorded(StepConditions(equal_times(SHAPE, 1, 1, 1)))
    with pytest.raises(UsageError, match=said):
        what_if(recording, lambda run: [change])


def test_a_run_of_megatron_is_compared_with_rrfp_policies() -> None:
    report = what_if(read_trace(MEGATRONS))
    assert [row.what for row in report.rows[:3]] == ["bf ready", "bfw ready", "1f1b fixed"]
    assert report.run.policy_description == "1f1b fixed, blocking transfers"
    assert report.replay_error <= 0.05


def rows_of(hint: str, **bounds: int | Dispatch) -> list[str]:
    """Return the names of the default changes for a run whose stages all have the same work."""
    policy, shape = policy_of(hint, SHAPE, **bounds)
    conditions = StepConditions(equal_times(SHAPE, 100, 100, 50))
    return [row.what for row in what_if(simulated_run(policy, shape, [conditions])).rows]


def test_the_default_changes_leave_out_the_run_itself_and_impossible_ones() -> None:
    others = ["without jitter", "free links"]
    fixed = Dispatch.FIXED
    assert rows_of("bf", limit=32) == ["bfw", "1f1b fixed", *others]
    assert rows_of("bf", dispatch=fixed) == ["bf ready", "bfw ready", "1f1b fixed", *others]
    assert rows_of("1f1b", dispatch=fixed) == ["bf ready", "bfw ready", *others]
    assert rows_of("1f1b", limit=32) == ["bf", "bfw", "1f1b fixed", *others]
    # 1F1B needs a hold of 4.
    assert rows_of("bf", hold=4) == ["bfw", "1f1b fixed", *others]
    assert rows_of("bf", hold=3) == rows_of("bf", limit=3) == ["bfw", *others]


def test_a_binding_order_respects_the_bound_of_the_run() -> None:
    policy, shape = policy_of("bf", SHAPE, hold=2)
    recording = simulated_run(policy, shape, [StepConditions(equal_times(SHAPE, 100, 100, 50))])
    one_f_one_b = hint_named("1f1b").for_shape(SHAPE)
    with pytest.raises(UsageError, match="above the hold of 2"):
        what_if(recording, lambda run: [Change(one_f_one_b, Dispatch.FIXED)])
    free = Change(one_f_one_b, Dispatch.FIXED, unbound=True)
    wide = Change(one_f_one_b, Dispatch.FIXED, hold=4)
    rows = what_if(recording, lambda run: [free, wide]).rows
    assert [row.what for row in rows] == ["1f1b fixed, no bound", "1f1b fixed, hold 4"]
    assert [row.policy.hold for row in rows] == [None, 4]
    assert rows[0].makespan_ns == rows[1].makespan_ns


def test_a_row_shows_a_changed_dispatch() -> None:
    policy, shape = policy_of("1f1b", SHAPE, dispatch=Dispatch.FIXED, limit=6)
    recording = simulated_run(policy, shape, [StepConditions(equal_times(SHAPE, 100, 100, 50))])
    changes = [Change(hold=4), Change(HINTS["bf"]), Change(without_jitter=True)]
    rows = what_if(recording, lambda run: changes).rows
    assert [row.what for row in rows] == ["1f1b ready, hold 4", "bf ready", "without jitter"]
    assert rows[1].policy.limit == 6


def test_a_small_saving_is_reported_as_small() -> None:
    near = StepConditions(equal_times(SHAPE, 100, 100, 50), lambda sender, receiver, task: 1)
    change = Change(HINTS["bf"], free_links=True)
    report = what_if(recorded(near), lambda run: [change])
    assert 0 < report.rows[0].saving < 0.005
    assert report.conclusion.startswith("bf, free links would save less than 0.5%, and no policy")
    same = what_if(recorded(near), lambda run: [Change(HINTS["bf"])])
    assert same.conclusion.startswith("bf would save nothing")
    far = StepConditions(near.times, lambda sender, receiver, task: 90)
    report = what_if(recorded(far), lambda run: [change])
    assert report.conclusion.endswith("; no stage has much more work than the median.")


def test_the_busiest_stage_is_not_blamed_without_reason() -> None:
    even = equal_times(SHAPE, 100, 100, 50)
    forward = [
        [time_ns + 8 * (stage == 1) for time_ns in row] for stage, row in enumerate(even.forward)
    ]
    conditions = StepConditions(replace(even, forward=forward), lambda sender, receiver, task: 90)
    report = what_if(recorded(conditions), lambda run: [Change(HINTS["bf"], free_links=True)])
    said = "; the busiest stage, 1, as fast as the median would then save less than 0.5%."
    assert report.conclusion.endswith(said)


def test_a_changed_policy_has_a_caution_if_ranks_may_share_cores() -> None:
    recording = read_trace(OURS)
    settings = recording.settings["settings"]
    assert isinstance(settings, dict)
    on_gpus = replace(recording, settings={"settings": settings | {"device": "cuda"}})
    apart = replace(
        recording,
        ranks=[
            replace(rank, info=replace(rank.info, host=f"host{rank.info.rank}"))
            for rank in recording.ranks
        ],
    )
    simulated_one = recorded(StepConditions(equal_times(SHAPE, 1, 1, 1)))

    def caution(recording: Recording, change: Change) -> str:
        return what_if(recording, lambda run: [change], range(1)).caution

    changed = Change(HINTS["fb"])
    assert "shared cores" in caution(recording, changed)
    assert caution(recording, Change(free_links=True)) == ""
    for other in (on_gpus, apart, simulated_one):
        assert caution(other, changed) == ""


# The command line.


def rrfp(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["rrfp", "analyze", "whatif", *arguments])
    code = cli.main()
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_has_the_keys_that_other_tools_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("--hint", "bfw", "--hint", "1f1b", "--hold", "4", "--format", "json")
    code, out, err = rrfp(capsys, monkeypatch, str(OURS), *asked, "--steps", "1:")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert 0 <= report["replay_error"] <= 0.05
    assert report["measured_s"] > 0
    parts = report["bubble"]
    assert len(parts["ranks"]) == 4
    for part in (parts, *parts["ranks"]):
        assert part["structural"] + part["excess"] == pytest.approx(part["fraction"])
    mean = sum(part["structural"] for part in parts["ranks"]) / 4
    assert parts["structural"] == pytest.approx(mean)
    assert [(row["hint"], row["dispatch"], row["hold"]) for row in report["rows"]] == [
        ("bfw", "ready", 4),
        ("1f1b", "ready", 4),
    ]
    for row in report["rows"]:
        assert row["makespan_s"] == pytest.approx(report["replayed_s"] * (1 - row["saving"]))
        assert max(row["peak_held"]) <= 4
    code, out, _ = rrfp(capsys, monkeypatch, str(OURS), *asked[:-1], "csv", "--steps", "1:")
    rows = list(csv.DictReader(out.splitlines()))
    assert [float(row["saving"]) for row in rows] == [row["saving"] for row in report["rows"]]


def test_the_table_fits_and_ends_with_the_conclusion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace.pftrace"
    write_trace(trace, recorded(StepConditions(random_times(Random(6), SHAPE)), num_steps=2))
    code, out, _ = rrfp(capsys, monkeypatch, str(trace))
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "2 steps, measured" in out
    for what in ("as it was: bf ready, limit 32", "bfw", "1f1b fixed", "without jitter"):
        assert what in out
    assert "You would save" in out
    assert "of the ranks' time was bubble" in out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--hint", "fastest"), 2, "'fastest' is neither a hint"),
        (("--hint", "zb-v"), 2, "order zb-v needs 2 chunks per rank in placement v"),
        (("--w-share", "nan"), 2, "share is nan; it must be from 0 to 1"),
        (("--w-share", "1.5"), 2, "share is 1.5; it must be from 0 to 1"),
        (("--median-stage", "7"), 2, "the run has no stage 7"),
        (("--steps", "9:"), 2, "it has those from 0 to 3"),
        (("--limit", "0"), 2, "--limit is '0'"),
        (("--limit", "many"), 2, "--limit is 'many'"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(
    arguments: tuple[str, ...],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exit_code, out, err = rrfp(capsys, monkeypatch, str(OURS), *arguments)
    assert (exit_code, out) == (code, "")
    assert said in err
    assert err.count("\n") == 1


def test_an_incomplete_step_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = recorded(StepConditions(random_times(Random(6), SHAPE)), num_steps=3)
    ranks = [replace(rank) for rank in recording.ranks]
    ranks[3].tasks.pop()
    write_trace(tmp_path / "trace.pftrace", recording)
    code, _, err = rrfp(capsys, monkeypatch, str(tmp_path), "--free-links")
    assert code == 0
    said = "left out, as they are not whole training steps: step 2\n"
    assert err == said
    setting = ["simulate", "--pp=4", "--microbatches=8", f"--costs={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["rrfp", *setting, "--sweep", "hint=bf,fb"])
    assert cli.main() == 0
    assert capsys.readouterr().err == said


def test_an_unbounded_run_and_a_change_to_no_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, shape = policy_of("f-first", Shape(2, 64))
    recording = simulated_run(policy, shape, [StepConditions(equal_times(shape, 10, 10, 5))])
    write_trace(tmp_path / "trace.pftrace", recording)
    as_json = ("--format", "json")
    code, out, _ = rrfp(capsys, monkeypatch, str(tmp_path), *as_json)
    assert (code, json.loads(out)["replay_error"]) == (0, 0)
    assert json.loads(out)["rows"][0]["limit"] is None
    code, out, _ = rrfp(capsys, monkeypatch, str(tmp_path), "--limit", "32", *as_json)
    assert max(json.loads(out)["rows"][0]["peak_held"]) == 32
    for_bf = (str(OURS), "--hint", "f-first", *as_json)
    code, out, _ = rrfp(capsys, monkeypatch, *for_bf, "--limit", "none")
    row = json.loads(out)["rows"][0]
    assert (row["what"], row["limit"], row["hold"]) == ("f-first, no bound", None, None)


def test_names_that_look_like_markup_are_printed_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "a[/b].csv"
    Path("a[").mkdir()
    gpipe = hint_named("gpipe").for_shape(SHAPE)
    assert isinstance(gpipe, Order)
    Path(name).write_text(format_order(gpipe), encoding="utf-8")
    policy, shape = policy_of("zb-h1", SHAPE, limit=32)
    own = "[red]:smile:.csv"
    times = random_times(Random(1), SHAPE)
    write_trace(
        Path("trace.pftrace"), simulated_run(policy, shape, [StepConditions(times)], hint=own)
    )
    code, out, _ = rrfp(capsys, monkeypatch, ".", "--hint", name)
    assert code == 0
    assert out.count(name) == 2
    assert own in out
