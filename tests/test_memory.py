"""What `rrfp analyze memory`, the charts, the findings and the comparison say of bytes held."""

import csv
import io
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import polars as pl
import pytest
import vl_convert
from hypothesis import given

from rrfp.analyze.charts.export import VEGA_LITE, draw, spec_of
from rrfp.analyze.charts.names import ChartKind
from rrfp.analyze.compare import compare
from rrfp.analyze.findings import blame, findings, replays
from rrfp.analyze.frames import frames_of
from rrfp.analyze.memory import kept_changes, memory, peak_bytes
from rrfp.analyze.report import report
from rrfp.cli import main as cli
from rrfp.cli.analyze.memory import memory_sheet
from rrfp.errors import RrfpError, UsageError
from rrfp.replay.bottlenecks import CulpritKind
from rrfp.schedule.bounds import Sizes
from rrfp.schedule.knobs import Auto, Bytes, Hold
from rrfp.schedule.shape import Shape
from rrfp.simulate.costs.toml_files import preset
from rrfp.simulate.world import World
from rrfp.trace.perfetto.reader import TraceContents
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import Recording, TaskRecord
from tests.cases import SEEDS
from tests.effort import examples
from tests.step_times import OURS, equal_times, policy_of, simulated
from tests.test_recorded_memory import random_run

GIB = 2**30


def a_run(
    *, hint: str = "bfw", num_steps: int = 2, budgets: tuple[int, ...] = (), **bounds: Any
) -> Recording:
    """Four ranks whose microbatches differ tenfold; the last stage keeps a third of the others."""
    policy, shape = policy_of(hint, Shape(4, 12), **bounds)
    rng = Random(5)
    of_microbatch = [rng.choice([GIB, 2 * GIB, 10 * GIB]) for _ in range(12)]
    kept = [[size // (3 if stage == 3 else 1) for size in of_microbatch] for stage in range(4)]
    sizes = Sizes(kept, [[size // 4 for size in row] for row in kept])
    times = equal_times(shape, 100, 100, 50)
    times = replace(
        times,
        **{
            name: [
                [ns * size // (2 * GIB) for ns, size in zip(row, of_microbatch, strict=True)]
                for row in getattr(times, name)
            ]
            for name in ("forward", "input_gradient", "weight_gradient")
        },
    )
    world = World(times, lambda *_: 9, sizes=sizes, budgets=budgets)
    return simulated(policy, shape, [world], num_steps=num_steps)


def naive_peaks(recording: Recording) -> dict[int, int]:
    """By rank, from the records alone."""
    peaks: defaultdict[int, int] = defaultdict(int)
    for rank in recording.ranks:
        for task in rank.tasks:
            peaks[rank.info.rank] = max(peaks[rank.info.rank], task.held_bytes)
    return peaks


# The figures.


@given(SEEDS)
@examples(quick=25, thorough=500)
def test_peaks_sizes_and_room_are_those_of_the_tasks(seed: int) -> None:
    recording, worlds, policy, shape = random_run(seed)
    found = memory(frames_of(recording))
    peaks = naive_peaks(recording)
    assert {each.rank: each.peak_held_bytes for each in found.ranks} == peaks
    assert peak_bytes(frames_of(recording)) == max(peaks.values())
    for each, records in zip(found.ranks, recording.ranks, strict=True):
        sizes = worlds[records.info.dp_rank].sizes
        assert sizes is not None
        rows = sizes.of(each.stages).kept
        whole = [sum(column) for column in zip(*rows, strict=True)]
        assert each.largest_microbatch_bytes == max(whole)
        assert each.mean_microbatch_bytes == pytest.approx(sum(whole) / len(whole))
        assert each.peak_held == max(task.held for task in records.tasks) / shape.num_chunks
        at_peak = [task for task in records.tasks if task.held_bytes == each.peak_held_bytes]
        first = at_peak[0]
        (start_ns,) = {p.start_ns for p in records.phases if p.step == first.step}
        assert each.peak_step == first.step
        assert each.peak_after_s == pytest.approx((first.start_ns - start_ns) / 1e9)
        if isinstance(policy.hold, Bytes):
            assert each.budget_bytes == policy.hold.num
        elif policy.hold is Auto.AUTO:
            assert each.budget_bytes == worlds[0].budgets[records.info.pp_rank]
        else:
            assert each.budget_bytes is None
        ceiling = each.budget_bytes or max(peaks.values())
        assert each.room_bytes == ceiling - each.peak_held_bytes


def naive_for_w(tasks: list[TaskRecord], sizes: Sizes) -> list[int]:
    waiting: dict[tuple[int, int, int], int] = {}
    found = []
    for task in tasks:
        key = task.step, task.stage, task.microbatch
        if task.kind == "B":
            assert sizes.owed is not None
            waiting[key] = sizes.owed[task.stage][task.microbatch]
        elif task.kind == "W":
            del waiting[key]
        found.append(sum(waiting.values()))
    return found


def test_what_waits_for_w_is_what_the_sizes_owe() -> None:
    seeds = (seed for seed in range(100) if random_run(seed)[3].splits_backward)
    for _, seed in zip(range(8), seeds, strict=False):
        recording, worlds, *_ = random_run(seed)
        tasks = kept_changes(frames_of(recording))
        for records in recording.ranks:
            sizes = worlds[records.info.dp_rank].sizes
            assert sizes is not None
            own = tasks.filter(pl.col("rank") == records.info.rank)
            assert own["for_w"].to_list() == naive_for_w(records.tasks, sizes)


def test_an_unfinished_step_does_not_count() -> None:
    recording = a_run(hold=4)
    first = recording.ranks[0]
    recording.ranks[0] = replace(first, phases=first.phases[:1])
    assert {each.peak_step for each in memory(frames_of(recording)).ranks} == {0}
    recording.ranks[0] = replace(first, phases=[])
    with pytest.raises(RrfpError, match="no step that every rank finished"):
        memory(frames_of(recording))


def test_the_sentence_names_the_worst_and_the_roomiest_rank() -> None:
    said = memory(frames_of(a_run(hold=4))).told
    assert said == (
        "Rank 0 held most, 40 GiB in step 0; rank 3 could have held 35 GiB more before it held "
        "as much."
    )
    said = memory(frames_of(a_run(hold=Bytes(30 * GIB)))).told
    assert said.startswith("Rank 0 held most, 30 GiB in step 0, of 30 GiB; rank 3 could have ")


# Findings.


def found_in(recording: Recording) -> dict[str, Any]:
    frames = frames_of(recording)
    replayed = replays(frames)
    return {
        each.kind: each for each in findings(frames, blame(frames), replayed.run, replayed.culprits)
    }


def multimodal(hold: Hold) -> Recording:
    """Steps of the preset whose microbatches differ most."""
    policy, shape = policy_of("bfw", Shape(4, 24))
    costs = preset("multimodal").step(shape, 1235, 0)
    world = World(costs.times, costs.links, sizes=costs.sizes)
    return simulated(replace(policy, hold=hold), shape, [world])


def test_a_bound_that_counts_microbatches_is_held_against_the_same_memory_in_bytes() -> None:
    found = found_in(multimodal(4))[CulpritKind.MEMORY]
    frames = frames_of(multimodal(4))
    most = memory(frames).worst.peak_held_bytes
    assert found.saving > 0.02
    assert "could have held" in found.told
    assert f"at that bound a step takes {found.saving:.0%} less" in found.advice
    assert found.flags.startswith("--hold ")
    assert found.flags.endswith("MiB")
    assert 0.999 * most <= int(found.flags[7:-3]) * 2**20 <= most


def test_a_bound_in_bytes_is_doubled_in_bytes() -> None:
    most = memory(frames_of(multimodal(4))).worst.peak_held_bytes
    found = found_in(multimodal(Bytes(most)))
    assert CulpritKind.MEMORY not in found
    bound = found[CulpritKind.BOUND]
    assert "GiB)" in bound.title
    assert bound.advice == f"Try {bound.flags}, if memory allows."
    assert 2 * most * 0.999 <= int(bound.flags[7:-3]) * 2**20 <= 2 * most


def test_where_the_device_sets_the_bound_more_is_no_advice() -> None:
    recording = multimodal(4)
    most = memory(frames_of(recording)).worst.peak_held_bytes
    policy, shape = policy_of("bfw", Shape(4, 24))
    costs = preset("multimodal").step(shape, 1235, 0)
    world = World(costs.times, costs.links, sizes=costs.sizes, budgets=[most] * 4)
    automatic = simulated(replace(policy, hold=Auto.AUTO), shape, [world])
    bound = found_in(automatic)[CulpritKind.BOUND]
    assert "hold auto" in bound.title
    assert "recompute activations, or make microbatches smaller" in bound.advice


# Charts and pages.


def rows(spec: dict[str, Any], column: str) -> list[dict[str, Any]]:
    (data,) = spec["datasets"].values()
    return [row for row in data if row.get(column) is not None]


@pytest.mark.parametrize("hint", ["bf", "bfw"])
@pytest.mark.parametrize("hold", [4, Bytes(30 * GIB)])
def test_the_chart_has_the_peaks_and_the_bound(hint: str, hold: Hold) -> None:
    recording = a_run(hint=hint, hold=hold)
    spec = spec_of(draw(ChartKind.MEMORY, frames_of(recording)))
    assert vl_convert.vegalite_to_vega(spec, VEGA_LITE)["marks"]
    held: defaultdict[str, float] = defaultdict(float)
    for row in rows(spec, "held"):
        held[row["row"]] = max(held[row["row"]], row["held"])
        assert 0 <= row["for_w"] <= row["held"]
    expected = {f"stage {rank}": peak / GIB for rank, peak in naive_peaks(recording).items()}
    assert held == {name: pytest.approx(peak, abs=1e-6) for name, peak in expected.items()}
    bounds = [row["bound"] for row in rows(spec, "bound")]
    assert bounds == ([30] * 4 if isinstance(hold, Bytes) else [])
    assert ("weight gradients" in str(spec["title"]["subtitle"])) is (hint == "bfw")


def test_a_long_curve_keeps_its_peak() -> None:
    policy, shape = policy_of("bfw", Shape(2, 400), limit=300)
    rng = Random(1)
    sizes = Sizes([[rng.randint(1, 10**6) for _ in range(400)] for _ in range(2)])
    world = World(equal_times(shape, 7, 9, 5), sizes=sizes)
    recording = simulated(policy, shape, [world])
    spec = spec_of(draw(ChartKind.MEMORY, frames_of(recording)))
    points = rows(spec, "held")
    assert len(points) < 600
    most = max(naive_peaks(recording).values())
    unit = 2**20 if most >= 2**20 else 2**10
    assert max(row["held"] for row in points) == pytest.approx(most / unit, abs=1e-5)


def test_a_step_is_chosen_and_one_that_was_not_finished_is_refused() -> None:
    frames = frames_of(a_run(hold=4))
    assert "step 1" in spec_of(draw(ChartKind.MEMORY, frames, 1))["title"]["text"]
    with pytest.raises(UsageError, match="step 7 was not finished"):
        draw(ChartKind.MEMORY, frames, 7)


def test_a_report_shows_memory_and_what_another_bound_would_save() -> None:
    recording = multimodal(4)
    num = sum(len(found) for rank in recording.ranks for found in rank.by_name().values())
    page = report("a run", TraceContents(recording, num_records_written=num))
    assert "Bytes of activations that each rank held at most" in page
    assert "could have held" in page
    assert "a step takes" in page
    assert 'data-chart="memory"' in page


def test_a_comparison_has_the_memory_of_both() -> None:
    recordings = a_run(hold=4), a_run(hold=Bytes(20 * GIB))
    a, b = map(frames_of, recordings)
    found = compare(a, b)
    peaks = [max(naive_peaks(each).values()) for each in recordings]
    assert found.as_json()["peak_held_bytes"] == peaks
    assert found.told_memory == "The most that a rank held is 40 GiB in A and 20 GiB in B."
    of_last = compare(a, b, 3)
    assert of_last.as_json()["peak_held_bytes"] == [naive_peaks(each)[3] for each in recordings]
    without = [
        replace(rank, tasks=[task._replace(held_bytes=0) for task in rank.tasks])
        for rank in recordings[0].ranks
    ]
    bare = frames_of(Recording(recordings[0].settings, without))
    assert compare(bare, bare).told_memory == ""
    assert compare(bare, a).as_json()["peak_held_bytes"] == [None, peaks[0]]


@pytest.mark.parametrize(
    ("transport", "expected"),
    [
        ({"outbox_bytes": {"0": 2**28, "2": 5}}, [2**28, 0, 5, 0]),
        ({"outbox_bytes": {"0": "much", "x": 1, "3": 7}}, [0, 0, 0, 7]),
        ({"outbox_bytes": [1]}, [0] * 4),
        ("shm", [0] * 4),
    ],
)
def test_outboxes_are_those_that_the_run_tells(transport: object, expected: list[int]) -> None:
    recording = a_run(hold=4)
    told = frames_of(replace(recording, settings={**recording.settings, "transport": transport}))
    assert [each.outbox_bytes for each in memory(told).ranks] == expected
    headings = [column.heading for column in memory_sheet(memory(told)).columns]
    assert ("outbox" in headings) == any(expected)


# The command.


@pytest.fixture
def rrfp(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Runs `rrfp analyze` in a directory with one trace, and gives its exit code and output."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    write_trace(Path("run.pftrace"), a_run(hold=4))

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rrfp", "analyze", *arguments])
        code = cli.main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_the_command_tells_each_rank_and_one_sentence(
    rrfp: Callable[..., tuple[int, str, str]],
) -> None:
    code, out, _ = rrfp("memory", "run.pftrace")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "rank 3 could have held 35 GiB more before it" in out
    code, out, _ = rrfp("memory", "run.pftrace", "--format", "json", "--steps", "1:")
    found = json.loads(out)
    assert [each["rank"] for each in found["ranks"]] == [0, 1, 2, 3]
    assert found["peak_held_bytes"] == found["ranks"][0]["peak_held_bytes"] == 40 * GIB
    assert found["ranks"][0]["peak_step"] == 1
    assert found["ranks"][0]["budget_bytes"] is None
    _, out, _ = rrfp("memory", "run.pftrace", "--format", "csv", "--stage", "2", "--by", "rank")
    (row,) = csv.DictReader(io.StringIO(out))
    assert (row["rank"], row["stages"], row["budget_bytes"]) == ("2", "2", "")
    assert rrfp("memory", "run.pftrace", "--format", "md")[1].count("| 3 | 3 |") == 1
    code, _, told = rrfp("memory", "run.pftrace", "--fail-above", "20")
    assert code == 3
    assert "what a rank held, in GiB, is 40" in told


def test_a_trace_without_sizes_says_so_and_what_to_do(
    rrfp: Callable[..., tuple[int, str, str]],
) -> None:
    for command in (("memory",), ("chart", "memory", "-o", "memory.svg")):
        code, out, told = rrfp(*command[:2], *command[2:], str(OURS))
        assert (code, out) == (1, "")
        assert told.count("\n") == 1
        assert "does not tell how many bytes its microbatches kept; record the run anew" in told


@pytest.mark.parametrize(
    ("hold", "code", "said"),
    [
        ("24GiB", 0, "hold 24 GiB"),
        ("1.0x", 0, "hold 1.0x"),
        ("8", 0, "hold 8"),
        ("1KiB", 2, "the hold of 1 KiB (1024 bytes) is below"),
        ("auto", 2, "--hold is 'auto'; write 12 (microbatches)"),
        ("1.5", 2, "--hold is '1.5'; write 12 (microbatches)"),
    ],
)
def test_whatif_takes_any_hold(
    rrfp: Callable[..., tuple[int, str, str]], hold: str, code: int, said: str
) -> None:
    found = rrfp("whatif", "run.pftrace", "--hold", hold)
    assert found[0] == code
    assert said in found[1] + found[2]
    if not code:
        assert "memory" in found[1]
        rows = json.loads(rrfp("whatif", "run.pftrace", "--hold", hold, "--format", "json")[1])
        assert len(rows["rows"][0]["peak_held_bytes"]) == 4
        assert rrfp("whatif", "run.pftrace", "--hold", hold, "--format", "csv")[0] == 0
