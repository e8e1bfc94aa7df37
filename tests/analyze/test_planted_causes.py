"""The first finding of a run with one planted cause names it; a clean run has none."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.analyze.findings import Finding, blame, findings, replays
from rrfp.analyze.frames import frames_of
from rrfp.errors import RrfpError
from rrfp.replay.bottlenecks import LEAST_SAVING, BottleneckKind, find_bottlenecks
from rrfp.replay.change import Change
from rrfp.replay.measured import even_split, measure, work_after
from rrfp.replay.recorded import read_run
from rrfp.replay.whatif import what_if
from rrfp.schedule.admission import Admit
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.shape import Shape
from rrfp.simulate.engine import StepConditions, TaskTimes
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import Recording
from tests.analyze.planted import B_NS, F_NS, W_NS, alarms, clean, first, planted, run_of
from tests.analyze.simulated_runs import policy_of, simulated_run
from tests.train.trained import Run, run

# Runs with one planted cause: the first finding names it and its place, by the saving of a fix.


pytestmark = pytest.mark.timeout(1800)


__all__ = ["run"]


@pytest.mark.parametrize("factor", [1.3, 2.0])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_slow_stage(stage: int, factor: float) -> None:
    slow = run_of(Shape(4, 16), lambda _, s, __: factor if s == stage else 1, scatter=0.05)
    found, _ = first(slow)
    assert (found.kind, found.pp_rank) == (BottleneckKind.SLOW_STAGE, stage)
    assert found.change.median_stage == stage
    assert found.excess == pytest.approx(factor - 1, abs=0.05)


@pytest.mark.parametrize("factor", [1.3, 2.0])
def test_a_slow_rank_is_neither_its_stage_nor_its_replica(factor: float) -> None:
    slow = run_of(
        Shape(4, 16),
        lambda replica, stage, _: factor if (replica, stage) == (2, 1) else 1,
        replicas=4,
        scatter=0.02,
    )
    run = read_run(slow)
    found = find_bottlenecks(run, measure(run))
    assert found[0].kind is BottleneckKind.SLOW_RANK
    assert found[0].change.usual_rank is not None
    assert run.place_of(found[0].change.usual_rank) == (2, 1)
    assert {each.kind for each in found} & {
        BottleneckKind.SLOW_STAGE,
        BottleneckKind.REPLICA,
    } == set()


@pytest.mark.parametrize("slow", [1, 2])
def test_a_slow_rank_among_those_that_run_its_tasks(slow: int) -> None:
    """Pipeline rank 1 is run by ranks 1, 4 and 7."""
    rows = ([[ns] * 8, [2 * ns] * 8, [ns] * 8] for ns in (F_NS, B_NS, W_NS))
    members = [StepConditions(TaskTimes(*rows), num_members=3)]
    policy, shape = policy_of("bf", Shape(3, 8))
    recording = simulated_run(policy, shape, members, num_steps=2)
    by_place = [rank for rank in recording.ranks if rank.info.pp_rank == 1]
    for rank in by_place:
        if rank is not by_place[slow]:
            # The others are done sooner, and wait for it.
            rank.tasks[:] = [
                each._replace(end_ns=(each.start_ns + each.end_ns) // 2) for each in rank.tasks
            ]
    found, _ = first(recording)
    assert (found.kind, found.pp_rank) == (BottleneckKind.SLOW_RANK, 1)
    assert found.change.usual_rank == by_place[slow].info.rank
    assert "the ranks that run the same tasks with it" in findings_in(recording)[0].figures


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_late_replica(replicas: int) -> None:
    slow = run_of(Shape(4, 16), lambda replica, *_: 1.3 if replica == 1 else 1, replicas=replicas)
    found, _ = first(slow)
    assert (found.kind, found.change.usual_replica) == (BottleneckKind.REPLICA, 1)


def test_heavy_microbatches() -> None:
    slow = run_of(Shape(4, 16), lambda _, __, m: 3 if m % 4 == 0 else 1)
    found, _ = first(slow)
    assert found.kind is BottleneckKind.UNEVEN_MICROBATCHES
    (row,) = what_if(slow, lambda _: [Change(admit=Admit.PYRAMID)]).rows
    assert row.saving > 0.01
    assert found.remedy_saving == pytest.approx(row.saving)
    assert f"that alone saves {row.saving:.0%}" in findings_in(slow)[0].advice


def test_uneven_layers_come_with_the_split_that_evens_them_out() -> None:
    """Each layer takes one unit of time; the first stage also has the embedding."""
    work = (3, 2, 2, 4)
    slow = run_of(Shape(4, 16), lambda _, stage, __: work[stage])
    settings = slow.settings["settings"]
    assert isinstance(settings, dict)
    settings["layers"] = 8
    finding = findings_in(slow)[0]
    assert (finding.kind, finding.pp_rank) == (BottleneckKind.SLOW_STAGE, 3)
    assert "Split the 8 layers as 2 3 2 1 over the stages: that alone saves" in finding.advice


def test_stages_that_differ_without_one_to_blame() -> None:
    slow = run_of(Shape(4, 16), lambda _, stage, __: (3, 3, 1, 1)[stage])
    found, _ = first(slow)
    assert (found.kind, found.change.flags) == (BottleneckKind.UNEVEN_LAYERS, "--even-stages")


@given(st.integers(2, 5), st.integers(0, 12), st.randoms(use_true_random=False))
def test_no_split_is_more_even(num_stages: int, more: int, rng: random.Random) -> None:
    """Against all splits, one after the other."""
    shape = Shape(num_stages, 4)
    split = [1 + more // num_stages] * num_stages
    work_ns = [rng.randint(100, 1000) for _ in split]
    costs = [max(work_after(work_ns, split, each)) for each in splits(sum(split), num_stages)]
    even = even_split(work_ns, split, shape)
    assert sum(even) == sum(split)
    assert max(work_after(work_ns, split, even)) == pytest.approx(min(costs))


def splits(layers: int, num_stages: int) -> Iterator[list[int]]:
    """All ways to give each stage at least one layer."""
    if num_stages == 1:
        yield [layers]
        return
    for first_stage in range(1, layers - num_stages + 2):
        for rest in splits(layers - first_stage, num_stages - 1):
            yield [first_stage, *rest]


@pytest.mark.parametrize("link", [(1, 2), (3, 2)])
def test_a_slow_link(link: tuple[int, int]) -> None:
    slow = run_of(Shape(4, 16), slow_link=(link, 3.0), message_ns=10_000)
    found, _ = first(slow)
    assert (found.kind, found.change.usual_link) == (BottleneckKind.SLOW_LINK, link)
    assert found.excess == pytest.approx(2, abs=0.01)


def test_a_link_that_costs_nothing_is_never_named() -> None:
    """The messages of the link take three times as long and are hidden behind work."""
    slow = run_of(Shape(4, 16), slow_link=((1, 2), 3.0), message_ns=100)
    run = read_run(slow)
    assert BottleneckKind.SLOW_LINK not in {
        each.kind for each in find_bottlenecks(run, measure(run))
    }


def test_a_small_bound() -> None:
    assert first(run_of(Shape(4, 16), limit=1))[0].kind is BottleneckKind.BOUND


def test_an_order_that_binds_is_withheld_by_no_bound() -> None:
    blocked = run_of(
        Shape(4, 16),
        lambda _, stage, m: 4 if (m + stage) % 3 == 0 else 1,
        hint="1f1b",
        dispatch=Dispatch.FIXED,
        limit=4,
    )
    run = read_run(blocked)
    assert BottleneckKind.BOUND not in {each.kind for each in find_bottlenecks(run, measure(run))}


def test_a_rank_that_enters_late_is_no_slow_link() -> None:
    """The first message to it waits for its entry."""
    recording = run_of(Shape(4, 8), message_ns=300)
    late_ns = 60_000
    for rank in recording.ranks:
        if rank.info.pp_rank == 3:
            rank.phases[:] = [
                each._replace(start_ns=each.start_ns + late_ns) for each in rank.phases
            ]
    run = read_run(recording)
    assert BottleneckKind.SLOW_LINK not in {
        each.kind for each in find_bottlenecks(run, measure(run))
    }


def test_a_step_that_takes_no_time_is_refused() -> None:
    run = read_run(run_of(Shape(2, 4)))
    steps = measure(run)
    with pytest.raises(RrfpError, match="the steps take no time"):
        find_bottlenecks(run, [*steps, replace(steps[0], window_ns=0)])


def test_an_order_that_blocks_ready_work() -> None:
    blocked = run_of(
        Shape(4, 16),
        lambda _, stage, m: 4 if (m + stage) % 3 == 0 else 1,
        hint="1f1b",
        dispatch=Dispatch.FIXED,
    )
    assert first(blocked)[0].kind is BottleneckKind.ORDER


def test_an_even_run_has_only_its_depth() -> None:
    run = read_run(run_of(Shape(4, 8)))
    assert [each.kind for each in find_bottlenecks(run, measure(run))] == [
        BottleneckKind.PIPELINE_DEPTH
    ]
    run = read_run(run_of(Shape(4, 64), hint="bfw", message_ns=0))
    assert find_bottlenecks(run, measure(run)) == []


# In words, and on the command line.


def findings_in(recording: Recording) -> list[Finding]:
    frames = frames_of(recording)
    replayed = replays(frames)
    return findings(frames, blame(frames), replayed.run, replayed.culprits)


def test_a_finding_saves_what_its_command_replays() -> None:
    recording = run_of(Shape(4, 16), lambda _, s, __: 2 if s == 2 else 1)
    finding = findings_in(recording)[0]
    (row,) = what_if(recording, lambda _: [Change(median_stage=2)]).rows
    assert finding.saving == pytest.approx(row.saving, abs=0.001)
    assert finding.command("runs/one") == "rrfp analyze whatif runs/one --median-stage 2"


def test_a_rank_that_becomes_slow_is_reported_since_when() -> None:
    """The first of four steps is that of an even run."""
    even = run_of(Shape(2, 8), replicas=3)
    slow = run_of(Shape(2, 8), lambda r, s, _: 2 if (r, s) == (1, 0) else 1, replicas=3)
    later = [each for each in findings_in(slow) if each.kind == BottleneckKind.SLOW_RANK]
    assert "in all steps" in later[0].figures
    gap_ns = 10**9
    for mixed, before in zip(slow.ranks, even.ranks, strict=True):
        for name, records in mixed.by_name().items():
            num_times = 1 if name in ("stimulus", "cost", "loss") else 2
            records[:] = [
                *(each for each in before.by_name()[name] if each.step == 0),
                *(
                    each._replace(step=each.step + 1)._replace(
                        **{
                            field: getattr(each, field) + gap_ns
                            for field in each._fields[:num_times]
                        }
                    )
                    for each in records
                ),
            ]
    words = [each.figures for each in findings_in(slow) if each.kind == BottleneckKind.SLOW_RANK]
    assert "since step 1" in words[0]


@pytest.fixture
def rrfp(tmp_path: Path, run: Run) -> Run:
    """`rrfp("analyze", ...)` beside a run `slow.pftrace` with a slow rank."""
    recording = run_of(
        Shape(2, 8), lambda r, s, _: 1.5 if (r, s) == (1, 1) else 1, replicas=3, limit=32
    )
    write_trace(tmp_path / "slow.pftrace", recording)
    return run


def test_the_screen_fits_a_terminal(rrfp: Run) -> None:
    code, out, err = rrfp("analyze", "slow.pftrace")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) <= 24
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "1. Rank 4 is slower than its peers: fixing it saves" in out
    assert "rrfp analyze whatif slow.pftrace --usual-rank 4" in out
    assert out.splitlines()[-1].startswith("Next: rrfp analyze report slow.pftrace")


def test_what_was_found_is_noted(rrfp: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes exist for other steps too, and a damaged note is replaced."""
    first = rrfp("analyze", "slow.pftrace")
    later = rrfp("analyze", "slow.pftrace", "--steps", "1:")
    with monkeypatch.context() as patch:
        patch.setattr("rrfp.analyze.findings.diagnose", lambda _: pytest.fail("again"))
        assert rrfp("analyze", "slow.pftrace") == first
        assert rrfp("analyze", "slow.pftrace", "--steps", "1:") == later
    notes = [*Path("slow.pftrace.frames").glob("*/findings-*.json")]
    assert len(notes) == 2
    for note in notes:
        note.write_text('{"findings": [{"kind": 1')
    assert rrfp("analyze", "slow.pftrace") == first


def test_the_json_has_the_keys_that_other_tools_read(
    rrfp: Run,
) -> None:
    found = json.loads(rrfp("analyze", "slow.pftrace", "--format", "json")[1])
    assert {"run", "step_time_s", "bubble_fraction", "findings"} <= found.keys()
    assert found["owned"] == []
    assert found["why_not_replayed"] is None
    savings = [each["saving_fraction"] for each in found["findings"]]
    assert savings == sorted(savings, reverse=True)
    assert min(savings) >= LEAST_SAVING
    slow_rank = found["findings"][0]
    assert {name: slow_rank[name] for name in ("kind", "pp_rank", "rank", "link")} == {
        "kind": "slow_rank",
        "pp_rank": 1,
        "rank": 4,
        "link": None,
    }
    code, out, _ = rrfp(*slow_rank["command"].split()[1:], "--format", "json")
    assert code == 0
    assert json.loads(out)["rows"][0]["saving"] == pytest.approx(savings[0], abs=1e-3)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--usual-rank", "9"), "the run has no rank 9"),
        (("--usual-replica", "3"), "the run has no replica 3; choose one from 0 to 2"),
        (("--usual-link", "0-2"), "the run has no link from pipeline rank 0 to 2"),
        (("--usual-link", "01"), "--usual-link takes two pipeline ranks such as 0-1"),
        (("--median-stage", "2"), "the run has no stage 2; choose one from 0 to 1"),
    ],
)
def test_what_the_run_does_not_have_is_refused(
    flags: tuple[str, ...], told: str, rrfp: Run
) -> None:
    code, _, err = rrfp("analyze", "whatif", "slow.pftrace", *flags)
    assert code == 2
    assert told in err


def test_the_commands_are_of_the_steps_asked_for(
    rrfp: Run,
) -> None:
    out = rrfp("analyze", "slow.pftrace", "--steps", "1:")[1]
    assert "rrfp analyze whatif slow.pftrace --usual-rank 4 --steps 1:" in out
    assert "rrfp analyze report slow.pftrace --steps 1: -o report.html" in out


def test_options_may_come_before_the_run(rrfp: Run) -> None:
    assert "the trace has no evaluations" in rrfp("analyze", "--evaluations", "slow.pftrace")[2]
    assert "there is no run or trace at reports/one" in rrfp("analyze", "reports/one")[2]


def test_a_misspelt_report_is_no_run(rrfp: Run) -> None:
    assert "did you mean 'bubbles'?" in rrfp("analyze", "bubles")[2]
    assert "there is no run or trace at elsewhere" in rrfp("analyze", "elsewhere")[2]


@pytest.mark.parametrize(
    "number", [15, pytest.param(500, marks=pytest.mark.slow)], ids=lambda number: f"{number}"
)
def test_a_planted_cause_comes_first(number: int) -> None:
    missed = [seed for seed in range(number) if not planted(seed).is_found()]
    assert len(missed) <= 0.05 * number, missed


@pytest.mark.parametrize(
    "number", [10, pytest.param(100, marks=pytest.mark.slow)], ids=lambda number: f"{number}"
)
def test_nothing_is_wrong_with_a_clean_run(number: int) -> None:
    assert [seed for seed in range(number) if alarms(clean(seed))] == []
