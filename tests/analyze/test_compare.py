"""Comparison of two runs: differences are reported, and noise is not."""

import json
import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from rrfp.analyze.compare import (
    Comparison,
    comparison_tables,
    differences,
    resampled_medians,
    warning,
)
from rrfp.analyze.compare import compare as compare_frames
from rrfp.analyze.frames import frames_of
from rrfp.cli import main as cli
from rrfp.errors import RrfpError
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import Policy
from rrfp.schedule.shape import FORWARD_ONLY, Shape
from rrfp.simulate.engine import StepConditions
from rrfp.simulate.jitter import uniforms
from rrfp.simulate.step import new_recording, simulate_step
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import Recording
from tests.analyze.simulated_runs import equal_times, policy_of, simulated_run

SHAPE = Shape(2, 3, kinds=FORWARD_ONLY)
STEADY = (100, 101, 99, 100, 102, 100, 98, 100)


def run_of(task_ns: tuple[int, ...], transfer_ns: int = 0) -> Recording:
    """A step for each time of its tasks."""
    recording = new_recording(SHAPE, 1, 1, {"world": 2})
    for step, each in enumerate(task_ns):
        world = StepConditions(equal_times(SHAPE, each, 0, 0), transfer=lambda *_: transfer_ns)
        simulate_step(SHAPE, Policy(HINTS["bf"]), [world], recording=recording, step=step)
    return recording


def compare(first: Recording, second: Recording, stage: int | None = None) -> Comparison:
    return compare_frames(frames_of(first), frames_of(second), stage)


def moved(comparison: Comparison) -> set[str]:
    return {cause for cause, each in comparison.causes_s.items() if each.leaves_out(0)}


def test_a_faster_run_is_reported_with_what_made_it_so() -> None:
    comparison = compare(run_of(STEADY), run_of(tuple(each // 2 for each in STEADY)))
    # Three tasks on each of two stages, the second one a task later.
    assert comparison.step_s == (400e-9, 200e-9)
    assert comparison.step_time_ratio.median == pytest.approx(0.5)
    assert comparison.step_time_ratio.leaves_out(1)
    assert comparison.causes_s["work"].median == pytest.approx(-150e-9)
    assert moved(comparison) == {"work", "warmup", "drain"}


def test_a_slower_link_moves_the_waits_and_not_the_work() -> None:
    comparison = compare(run_of(STEADY), run_of(STEADY, transfer_ns=150))
    assert comparison.step_time_ratio.low > 1
    assert comparison.causes_s["work"].median == 0
    assert "work" not in moved(comparison)
    assert "forward_input" in moved(comparison)


def test_on_a_busier_machine_it_is_the_work_that_differs() -> None:
    comparison = compare(run_of(STEADY), run_of(tuple(each * 14 // 10 for each in STEADY)))
    assert comparison.step_time_ratio.leaves_out(1)
    assert comparison.same_work_ratio is not None
    assert comparison.work_ratio is not None
    assert comparison.work_ratio.median == pytest.approx(1.4, abs=0.01)
    assert comparison.same_work_ratio.median == pytest.approx(1, abs=0.01)
    assert not comparison.same_work_ratio.leaves_out(1)
    slower_link = compare(run_of(STEADY), run_of(STEADY, transfer_ns=150))
    assert slower_link.same_work_ratio is not None
    assert slower_link.same_work_ratio.median == pytest.approx(
        slower_link.step_time_ratio.median, rel=0.01
    )
    assert slower_link.same_work_ratio.leaves_out(1)


def test_of_a_stage_its_own_ranks_are_compared() -> None:
    slower = run_of(STEADY, transfer_ns=150)
    waits = [compare(run_of(STEADY), slower, stage).causes_s for stage in (0, 1)]
    assert "forward_input" not in waits[0]
    assert waits[1]["forward_input"].median > 0


def test_noise_is_not_called_a_gain() -> None:
    noisy = (100, 140, 90, 120, 80, 130, 95, 110)
    comparison = compare(run_of(noisy), run_of(noisy[::-1]))
    assert comparison.step_time_ratio.median == 1
    assert not comparison.step_time_ratio.leaves_out(1)
    assert comparison.step_time_ratio.low < 1 < comparison.step_time_ratio.high
    assert moved(comparison) == set()


def test_the_same_runs_have_the_same_intervals() -> None:
    a, b = run_of(STEADY), run_of((100, 120, 80, 110))
    assert compare(a, b) == compare(a, b)


def test_one_step_is_too_few_for_a_difference() -> None:
    with pytest.raises(RrfpError, match="have 8 and 1 whole steps, and it takes 2 of each"):
        compare(run_of(STEADY), run_of((100,)))


def test_a_step_that_takes_no_time_is_reported() -> None:
    broken = run_of(STEADY)
    for records in broken.ranks:
        records.phases[3] = records.phases[3]._replace(start_ns=0, end_ns=0)
    for runs in ((run_of(STEADY), broken), (broken, run_of(STEADY))):
        with pytest.raises(RrfpError, match="step 3 takes no time in one of the traces; leave it"):
            compare(*runs)


@pytest.mark.parametrize("num_steps", [7, 3000])
def test_the_resamples_of_a_long_run_need_little_memory_and_are_the_same(num_steps: int) -> None:
    random = np.random.default_rng(0)
    times = {"length": random.random(num_steps), "work": random.random(num_steps)}
    tracemalloc.start()
    medians = resampled_medians(times, 1)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 16 << 20
    draws = uniforms(2000 * num_steps, "bootstrap", 1).reshape(2000, num_steps)
    steps = (draws * num_steps).astype(np.int64)
    for name, each in times.items():
        assert medians[name].tolist() == [np.median(each), *np.median(each[steps], axis=1)]


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    write_trace(Path("a.pftrace"), run_of(STEADY))
    write_trace(Path("b.pftrace"), run_of(STEADY, transfer_ns=150))

    def rrfp(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rrfp", "analyze", "compare", *arguments])
        code = cli.main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    code, out, _ = rrfp("a.pftrace", "b.pftrace", "--format", "json")
    found = json.loads(out)
    assert code == 0
    assert set(found["step_time_ratio"]) == {"median", "low", "high"}
    assert set(found["causes"]["forward_input"]) == {"median", "low", "high"}
    table = rrfp("a.pftrace", "b.pftrace")[1]
    assert "B is slower" in table
    assert max(map(len, table.splitlines())) <= 80
    write_trace(Path("busy.pftrace"), run_of(tuple(each * 14 // 10 for each in STEADY)))
    told = " ".join(rrfp("a.pftrace", "busy.pftrace")[1].split())
    assert (
        "For the same work there is no significant difference. The tasks of B take 40.0% longer. A "
        "step takes 400 ns in A and 560 ns in B (median): B is slower, by 40.0%." in told
    )
    assert rrfp("a.pftrace", "a.pftrace", "--fail-above", "1")[0] == 0
    code, _, told = rrfp("a.pftrace", "b.pftrace", "--fail-above", "1.1")
    assert code == 3
    assert "above the 1.1 of --fail-above" in told
    assert rrfp("a.pftrace", "missing.pftrace")[0] == 1


def test_the_frame_has_a_row_for_each_figure() -> None:
    comparison = compare(run_of(STEADY), run_of(STEADY, transfer_ns=150))
    frame = pl.concat([table.frame() for table in comparison_tables(comparison, ())])
    ratios = ["same_work_ratio", "step_time_ratio", "work_ratio"]
    assert frame["what"].to_list() == [*ratios, *comparison.causes_s]
    assert frame.filter(pl.col("low") > pl.col("high")).is_empty()


# Two runs on one page, with a warning where they differ in more than their schedule.


def run_at(shape: Shape, task: int = 10, **settings: Any) -> Recording:
    policy, shape = policy_of("bf", shape)
    world = StepConditions(equal_times(shape, task, 8, 7), transfer=lambda *_: 3)
    recording = simulated_run(policy, shape, [world], num_steps=3)
    recording.settings["settings"].update(settings)  # type: ignore[attr-defined]
    return recording


COMPARED = Shape(2, 4)


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ((COMPARED, {"layers": 8}), {}),
        # How it is scheduled is what is compared.
        (
            (COMPARED, {"layers": 8, "hint": "bfw", "dispatch": "fixed", "limit": 3, "hold": None}),
            {},
        ),
        ((COMPARED, {}), {}),
        ((COMPARED, {"layers": 16}), {"model": {"layers": (8, 16)}}),
        ((COMPARED, {"layers": 8, "seed": 5}), {"data": {"seed": (1, 5)}}),
        (
            (Shape(2, 6), {"layers": 8, "microbatches": 6}),
            {"data": {"microbatches": (4, 6)}},
        ),
        # The records tell it where the settings do not.
        ((Shape(2, 6), {"layers": 8}), {"data": {"microbatches": (4, 6)}}),
        ((Shape(3, 4), {"layers": 8}), {"layout": {"stages": (2, 3), "ranks": (2, 3)}}),
        ((Shape(3, 4), {"layers": 8, "pp": 3}), {"layout": {"pp": (2, 3)}}),
        ((COMPARED, {"layers": 8, "costs": "vision"}), {"times": {"costs": ("uniform", "vision")}}),
    ],
)
def test_what_differs_besides_the_schedule_is_found(
    other: tuple[Shape, dict[str, Any]], found: dict[str, Any]
) -> None:
    own = {"layers": 8, "seed": 1, "microbatches": 4, "pp": 2, "costs": "uniform"}
    shape, settings = other
    a, b = (frames_of(run_at(s, **each)) for s, each in ((COMPARED, own), (shape, settings)))
    if "microbatches" not in settings:
        own_settings = a.settings["settings"]
        own_settings.pop("microbatches")
    assert differences(a, b) == found
    told = warning(differences(a, b))
    assert bool(told) is bool(found)
    assert all(name in told for each in found.values() for name in each)


def test_the_warning_is_a_sentence() -> None:
    found: Any = {
        "model": {"layers": (8, 16), "dtype": ("fp32", "bf16")},
        "data": {"data": (None, "x" * 99)},
    }
    assert warning(found) == (
        "A and B also differ in model (layers 8 and 16, dtype fp32 and bf16) and in data (data "
        f"null and {'x' * 40}...), so the schedule is not the only cause."
    )
    assert warning({}) == ""


@pytest.fixture
def compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    write_trace(tmp_path / "a.pftrace", run_at(COMPARED, layers=8))
    write_trace(tmp_path / "b.pftrace", run_at(COMPARED, task=20, layers=16, dtype="<b>"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def rrfp(*arguments: str) -> tuple[str, str]:
        command = ["rrfp", "analyze", "compare", "a.pftrace", "b.pftrace", *arguments]
        monkeypatch.setattr(sys, "argv", command)
        assert cli.main() == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    return rrfp


def test_the_command_warns_of_it(compared: Any) -> None:
    out, _ = compared()
    told = " ".join(out.split())
    assert told.endswith(
        "differ in model (layers 8 and 16), so the schedule is not the only cause."
    )
    assert told.index("for the same work") < told.index(" step time ", told.index("work"))
    out, _ = compared("--format", "json")
    assert json.loads(out)["differences"] == {"model": {"layers": [8, 16]}}


def test_a_page_is_not_written_to_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["rrfp", "analyze", "compare", "a.pftrace", "b.pftrace", "-o", "c.png"]
    monkeypatch.setattr(sys, "argv", command)
    assert cli.main() == 2
    assert capsys.readouterr().err == (
        "rrfp: 'c.png' is no file for a page; give it a name that ends in .html or .htm\n"
    )
    assert not Path("c.png").exists()


def test_the_page_has_both_steps_on_one_axis(compared: Any) -> None:
    pytest.importorskip("altair", reason="the extra 'report' is not installed")
    out, err = compared("-o", "c.html")
    assert err == "The page is c.html\n"
    source = Path("c.html").read_text()
    assert source.index("For the same work") < source.index("B over A")
    assert re.search(r'class="warning"[^>]*>A and B also differ in', source)
    assert ">layers</td>" in source
    charts = json.loads(re.findall(r'id="charts">(.*?)</script>', source)[0])
    (chart,) = charts.values()
    rows = {row["row"] for data in chart["datasets"].values() for row in data if "start" in row}
    assert rows == {f"{run}: stage {stage}" for run in "AB" for stage in range(2)}
    ends = [row["end"] for data in chart["datasets"].values() for row in data if "end" in row]
    domains = re.findall(r'"domain": \[0, ([\d.]+)\]', json.dumps(chart))
    assert {float(each) for each in domains} == {max(ends)}
    # One step time a page: the medians that the verdict compares.
    assert "(mean)" not in source.partition('id="charts"')[0]
    assert "B over A" in out
