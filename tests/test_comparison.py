"""Two runs on one page, with a warning where they differ in more than their schedule."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from rrfp.analyze.compare import differences, warning
from rrfp.analyze.frames import frames_of
from rrfp.cli import main as cli
from rrfp.schedule.shape import Shape
from rrfp.simulate.world import World
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import Recording
from tests.step_times import equal_times, policy_of, simulated


def run_of(shape: Shape, task: int = 10, **settings: Any) -> Recording:
    policy, shape = policy_of("bf", shape)
    world = World(equal_times(shape, task, 8, 7), transfer=lambda *_: 3)
    recording = simulated(policy, shape, [world], num_steps=3)
    recording.settings["settings"].update(settings)  # type: ignore[attr-defined]
    return recording


SHAPE = Shape(2, 4)


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ((SHAPE, {"layers": 8}), {}),
        # How it is scheduled is what is compared.
        ((SHAPE, {"layers": 8, "hint": "bfw", "dispatch": "fixed", "limit": 3, "hold": None}), {}),
        ((SHAPE, {}), {}),
        ((SHAPE, {"layers": 16}), {"model": {"layers": (8, 16)}}),
        ((SHAPE, {"layers": 8, "seed": 5}), {"data": {"seed": (1, 5)}}),
        (
            (Shape(2, 6), {"layers": 8, "microbatches": 6}),
            {"data": {"microbatches": (4, 6)}},
        ),
        # The records tell it where the settings do not.
        ((Shape(2, 6), {"layers": 8}), {"data": {"microbatches": (4, 6)}}),
        ((Shape(3, 4), {"layers": 8}), {"layout": {"stages": (2, 3), "ranks": (2, 3)}}),
        ((Shape(3, 4), {"layers": 8, "pp": 3}), {"layout": {"pp": (2, 3)}}),
        ((SHAPE, {"layers": 8, "costs": "vision"}), {"times": {"costs": ("uniform", "vision")}}),
    ],
)
def test_what_differs_besides_the_schedule_is_found(
    other: tuple[Shape, dict[str, Any]], found: dict[str, Any]
) -> None:
    own = {"layers": 8, "seed": 1, "microbatches": 4, "pp": 2, "costs": "uniform"}
    shape, settings = other
    a, b = (frames_of(run_of(s, **each)) for s, each in ((SHAPE, own), (shape, settings)))
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
        "Not the schedule alone differs between A and B, but their model (layers 8 and 16, dtype "
        f"fp32 and bf16) and data (data null and {'x' * 40}...) too."
    )
    assert warning({}) == ""


@pytest.fixture
def compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    write_trace(tmp_path / "a.pftrace", run_of(SHAPE, layers=8))
    write_trace(tmp_path / "b.pftrace", run_of(SHAPE, task=20, layers=16, dtype="<b>"))
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
    assert told.endswith("but their model (layers 8 and 16) too.")
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
    assert re.search(r'class="warning"[^>]*>Not the schedule alone differs', source)
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
