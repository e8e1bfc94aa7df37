"""The charts: what they show is what the frames hold, and every kind becomes a file."""

import json
import math
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import vl_convert

from rrfp.analyze.bubbles import CAUSES, bubbles
from rrfp.analyze.charts import ChartKind
from rrfp.analyze.charts.durations import message_times, misalignment_map, task_times
from rrfp.analyze.charts.export import VEGA_LITE, draw, save, spec_of
from rrfp.analyze.charts.gantt import gantt
from rrfp.analyze.charts.per_rank import bubble_causes, hint_order, progress
from rrfp.analyze.colors import CAUSE_COLORS, KIND_COLORS, LINK_COLOR
from rrfp.analyze.frames import Frames, frames_of, run_limit
from rrfp.analyze.misalignment import timed_messages
from rrfp.errors import RrfpError, UsageError
from rrfp.schedule.policy import PAPER_LIMIT
from rrfp.schedule.shape import Placement, Shape
from rrfp.schedule.tasks import Kind
from rrfp.simulate.engine import StepConditions
from rrfp.trace.perfetto.reader import read_trace
from rrfp.trace.records import Recording
from tests.analyze.simulated_runs import (
    MEGATRONS,
    OURS,
    equal_times,
    policy_of,
    simulated,
    simulated_run,
)

OF_A_STEP = [ChartKind.GANTT, ChartKind.HINT, ChartKind.PROGRESS]
# What ranks kept is known of few runs (tests/analyze/test_memory.py).
OF_ANY_RUN = [kind for kind in ChartKind if kind is not ChartKind.MEMORY]


@cache
def plain() -> Frames:
    return frames_of(simulated("bf", Shape(4, 6), num_steps=3, transfer=lambda *_: 7))


@cache
def grouped() -> Frames:
    """Two chunks in a V, two members, split backwards."""
    shape = Shape(3, 4, 2, Placement.V)
    return frames_of(
        simulated(
            "bfw-deep",
            shape,
            num_steps=2,
            transfer=lambda *_: 5,
            num_members=2,
            lateness=lambda member, _: 3 * member,
        )
    )


@cache
def many() -> Frames:
    """More ranks than are shown side by side."""
    return frames_of(simulated("bf", Shape(20, 4), transfer=lambda *_: 1))


@cache
def recorded(trace: Path) -> Frames:
    return frames_of(read_trace(trace))


def rows(spec: dict[str, Any], *columns: str) -> pl.DataFrame:
    """The rows of a chart's data that have all these columns."""
    found = [data for data in spec["datasets"].values() if set(columns) <= set(data[0])]
    return pl.DataFrame(max(found, key=len), infer_schema_length=None)


@pytest.mark.parametrize("kind", OF_ANY_RUN)
@pytest.mark.parametrize("frames", [plain, grouped, many])
def test_every_kind_is_a_valid_chart_of_every_run(kind: ChartKind, frames: Any) -> None:
    spec = spec_of(draw(kind, frames()))
    vega = vl_convert.vegalite_to_vega(spec, VEGA_LITE)
    assert vega["marks"]
    assert len(json.dumps(spec)) < 300_000
    assert "null" not in spec["title"]["text"]


@pytest.mark.parametrize("trace", [OURS, MEGATRONS], ids=lambda path: path.stem)
@pytest.mark.parametrize("kind", OF_ANY_RUN)
def test_runs_that_were_recorded_are_drawn(kind: ChartKind, trace: Path) -> None:
    spec_of(draw(kind, recorded(trace)))


def test_the_bars_of_a_rank_are_its_bubble() -> None:
    frames = plain()
    divided = bubbles(frames)
    bars = rows(spec_of(bubble_causes(frames)), "row", "cause", "share")
    shares = dict(bars.group_by("row").agg(pl.col("share").sum()).iter_rows())
    assert shares == {
        f"stage {rank.pp_rank}": pytest.approx(rank.bubble_fraction) for rank in divided.ranks
    }
    assert set(bars["cause"]) == {cause for cause, ns in divided.causes_ns.items() if ns}


def test_the_structural_part_is_marked_where_it_is_known() -> None:
    policy, shape = policy_of("bf", Shape(3, 4))
    recording = simulated_run(policy, shape, [StepConditions(equal_times(shape, 10, 10, 10))])
    frames = frames_of(recording)
    spec = spec_of(draw(ChartKind.BUBBLES, frames))
    marks = rows(spec, "row", "structural")
    # Without jitter all of it is structural.
    expected = [rank.bubble_fraction for rank in bubbles(frames).ranks]
    assert marks["structural"].to_list() == pytest.approx(expected)
    assert "structural" not in json.dumps(spec_of(draw(ChartKind.BUBBLES, plain())))


def test_members_and_replicas_have_bars_of_their_own() -> None:
    bars = rows(spec_of(bubble_causes(grouped())), "row", "cause", "share")
    assert set(bars["row"]) == {f"stages {r} {5 - r} tp{tp}" for r in range(3) for tp in (0, 1)}


def test_a_gantt_has_a_bar_for_each_task_and_wait_of_one_replica() -> None:
    frames = grouped()
    spec = spec_of(gantt(frames, 1))
    tasks = rows(spec, "row", "start", "end", "what", "microbatch")
    ran = frames.tasks.filter((pl.col("step") == 1) & (pl.col("tp_rank") == 0))
    assert len(tasks) == len(ran)
    assert set(tasks["what"]) == {f"{kind}{odd}" for kind in "FBW" for odd in ("", " odd chunk")}
    assert (tasks["end"] - tasks["start"]).sum() == (ran["end_ns"] - ran["start_ns"]).sum()
    assert tasks["start"].min() == 0
    assert spec["title"]["text"].startswith("Step 1: ")


def test_without_a_step_the_slowest_one_is_shown() -> None:
    recording = simulated("bf", Shape(2, 3), num_steps=3)
    for records in recording.ranks:
        last = records.phases[-1]
        records.phases[-1] = last._replace(end_ns=last.end_ns + 100)
    frames = frames_of(recording)
    for kind in OF_A_STEP:
        title = spec_of(draw(kind, frames))["title"]["text"]
        assert "tep 2, the slowest of 3" in title


@pytest.mark.parametrize("most", [40, 100, 400])
def test_a_gantt_of_too_many_bars_joins_them_and_says_so(most: int) -> None:
    frames = frames_of(simulated("bfw", Shape(4, 64)))
    spec = spec_of(gantt(frames, most_bars=most))
    drawn = [data for data in spec["datasets"].values() if data and "start" in data[0]]
    assert sum(map(len, drawn)) <= most
    joined, path = spec["title"]["subtitle"]
    assert "bars are joined into" in joined
    assert "critical path" in path
    # What is joined covers the same time as what it stands for, to the width of a bin.
    bars = pl.concat(pl.DataFrame(data).select("row", "start", "end") for data in drawn)
    assert (bars["end"] >= bars["start"]).all()
    sums = bars.group_by("row").agg((pl.col("end") - pl.col("start")).sum().alias("sum"))["sum"]
    (length,) = (frames.windows["end_ns"] - frames.windows["start_ns"]).to_list()
    assert sums.max() <= length * 1.0001
    assert not bars.sort("row", "start").select(
        (pl.col("start").shift(-1).over("row") < pl.col("end") - 1e-6).any()
    ).item()  # fmt: skip


def test_points_have_their_places_in_the_hint_and_in_time() -> None:
    frames = plain()
    points = rows(spec_of(hint_order(frames, 0)), "row", "dispatched", "hint_position")
    for (_,), of_rank in points.group_by("row"):
        assert sorted(of_rank["dispatched"]) == sorted(of_rank["hint_position"]) == list(range(12))
    early = points.filter(pl.col("skipped") > 0)
    # Who skips better tasks stands behind where the hint has it.
    assert (early["dispatched"] < early["hint_position"]).all()


def test_the_map_of_misalignment_weighs_every_message_once() -> None:
    frames = plain()
    spec = spec_of(misalignment_map(frames))
    cells = rows(spec, "link", "misaligned", "messages")
    messages = timed_messages(frames)
    assert cells["messages"].sum() == len(messages)
    assert (cells["messages"] * cells["misaligned"]).sum() == pytest.approx(
        (messages["queued_ns"] - messages["starved_ns"]).sum(), rel=1e-3, abs=1
    )
    assert set(cells["link"]) == {
        *(f"{r} → {r + 1} forward" for r in range(3)),
        *(f"{r + 1} → {r} backward" for r in range(3)),
    }


def test_curves_end_with_all_tasks_and_never_cross() -> None:
    curves = rows(spec_of(progress(plain(), 0)), "row", "time", "n_f", "n_b")
    for (_,), of_rank in curves.group_by("row"):
        last = of_rank.sort("time").row(-1, named=True)
        assert (last["n_f"], last["n_b"]) == (6, 6)
        assert (of_rank["n_f"] >= of_rank["n_b"]).all()


def test_the_ceiling_of_a_limit_is_drawn_where_the_run_had_one() -> None:
    policy, shape = policy_of("bf", Shape(2, 6), limit=2)
    frames = frames_of(simulated_run(policy, shape, [StepConditions(equal_times(shape, 9, 5, 5))]))
    assert "the limit of 2" in json.dumps(spec_of(progress(frames)))
    assert "dashed" not in json.dumps(spec_of(progress(plain())))


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"settings": {"dispatch": "ready", "limit": 4}}, 4),
        ({"settings": {"dispatch": "ready", "limit": None}}, PAPER_LIMIT),
        ({"settings": {"dispatch": "ready", "limit": None, "hold": 8}}, None),
        ({"settings": {"dispatch": "fixed", "limit": None}}, None),
        ({"simulated": True, "settings": {"dispatch": "ready", "limit": None}}, None),
        ({"settings": {"dispatch": "ready", "limit": "many", "hold": 1}}, None),
        ({"settings": [1, 2]}, None),
        ({}, None),
    ],
)
def test_the_limit_of_a_run(settings: dict[str, object], limit: int | None) -> None:
    recording = simulated("bf", Shape(2, 2))
    assert run_limit(frames_of(Recording(settings, recording.ranks))) == limit


@pytest.mark.parametrize("draw_times", [task_times, message_times])
def test_bins_hold_every_time_once(draw_times: Any) -> None:
    frames = recorded(OURS)
    bins = rows(spec_of(draw_times(frames)), "row", "what", "low", "high", "count")
    num = len(frames.tasks) if draw_times is task_times else len(frames.messages)
    assert bins["count"].sum() == num
    assert (bins["low"] < bins["high"]).all()
    shares = bins.group_by("row", "what").agg(pl.col("share").sum())["share"]
    assert shares.to_list() == pytest.approx([1] * len(shares), abs=0.01)


def test_colors_of_tasks_differ_in_lightness_and_causes_in_color() -> None:
    def lightness(color: str) -> float:
        """CIE L*."""
        channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
        red, green, blue = (
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
        )
        luminance: float = 0.2126 * red + 0.7152 * green + 0.0722 * blue
        return float(116 * luminance ** (1 / 3) - 16)

    shades = sorted(map(lightness, KIND_COLORS.values()))
    assert min(b - a for a, b in pairwise(shades)) > 12
    assert list(CAUSE_COLORS) == list(CAUSES)
    assert len(set(CAUSE_COLORS.values())) == len(CAUSES)


@pytest.mark.parametrize(
    ("name", "start"), [("c.png", b"\x89PNG"), ("c.svg", b"<svg"), ("c.HTML", b"<!DOCTYPE html>")]
)
def test_a_chart_becomes_the_file_that_its_name_says(
    tmp_path: Path, name: str, start: bytes
) -> None:
    path = tmp_path / name
    save(gantt(plain()), path)
    content = path.read_bytes()
    assert content.startswith(start)
    if name.endswith("svg"):
        assert content.decode().count(">5</text>") >= 8


@pytest.mark.parametrize("name", ["c.pdf", "c", "missing/c.png", "directory.svg"])
def test_a_file_that_cannot_be_is_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "directory.svg").mkdir()
    with pytest.raises(UsageError):
        save(gantt(plain()), tmp_path / name)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("kind", OF_A_STEP)
def test_a_step_that_is_not_there_is_refused(kind: ChartKind) -> None:
    with pytest.raises(UsageError, match="step 9 was not finished by every rank"):
        draw(kind, plain(), 9)


def test_a_chart_of_a_run_has_no_use_for_a_step() -> None:
    with pytest.raises(UsageError, match="shows all steps"):
        draw(ChartKind.BUBBLES, plain(), 1)


@pytest.mark.parametrize("kind", OF_ANY_RUN)
def test_a_run_without_a_finished_step_is_refused(kind: ChartKind) -> None:
    recording = simulated("bf", Shape(2, 3), transfer=lambda *_: 1)
    for records in recording.ranks:
        records.phases.clear()
        records.tasks.clear()
    with pytest.raises(RrfpError, match="the trace has no"):
        draw(kind, frames_of(recording))


def test_messages_that_take_no_time_are_not_drawn() -> None:
    with pytest.raises(RrfpError, match="took no time"):
        message_times(frames_of(simulated("bf", Shape(2, 3))))


# One color a kind and a cause, and every reader can tell any two apart.


Triple = tuple[float, float, float]

EYES: dict[str, tuple[Triple, Triple, Triple]] = {
    "all colors": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "no green": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
}
"""Matrices of color vision deficiency on linear RGB (Machado, Oliveira and Fernandes 2009)."""

LEAST = 10.0
"""CIEDE2000; 2.3 is just noticeable."""


def lab(color: str, eye: tuple[Triple, Triple, Triple]) -> Triple:
    """CIE L*a*b* of `#RRGGBB`, as an eye sees it."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    seen = [min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear, strict=True)))) for row in eye]
    to_xyz = (
        (0.4124564, 0.3575761, 0.1804375),
        (0.2126729, 0.7151522, 0.0721750),
        (0.0193339, 0.1191920, 0.9503041),
    )
    white = (0.95047, 1.0, 1.08883)
    ratios = [
        sum(a * b for a, b in zip(row, seen, strict=True)) / most
        for row, most in zip(to_xyz, white, strict=True)
    ]
    x, y, z = (r ** (1 / 3) if r > 216 / 24389 else (24389 / 27 * r + 16) / 116 for r in ratios)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(first: Triple, second: Triple) -> float:
    """CIEDE2000 (Sharma, Wu and Dalal 2005)."""
    (l1, a1, b1), (l2, a2, b2) = first, second
    chroma = ((math.hypot(a1, b1) + math.hypot(a2, b2)) / 2) ** 7
    g = 0.5 * (1 - math.sqrt(chroma / (chroma + 25**7)))
    a1, a2 = a1 * (1 + g), a2 * (1 + g)
    c1, c2 = math.hypot(a1, b1), math.hypot(a2, b2)
    h1, h2 = (math.degrees(math.atan2(b, a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn, mean_h = h2 - h1, (h1 + h2) / 2
    if abs(turn) > 180:
        turn -= math.copysign(360, turn)
        mean_h += 180 if mean_h < 180 else -180
    if not c1 * c2:
        turn, mean_h = 0.0, h1 + h2
    mean_l, mean_c = (l1 + l2) / 2, (c1 + c2) / 2
    t = (
        1
        - 0.17 * math.cos(math.radians(mean_h - 30))
        + 0.24 * math.cos(math.radians(2 * mean_h))
        + 0.32 * math.cos(math.radians(3 * mean_h + 6))
        - 0.20 * math.cos(math.radians(4 * mean_h - 63))
    )
    light = (l2 - l1) / (1 + 0.015 * (mean_l - 50) ** 2 / math.sqrt(20 + (mean_l - 50) ** 2))
    chromatic = (c2 - c1) / (1 + 0.045 * mean_c)
    hue = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn / 2)) / (1 + 0.015 * mean_c * t)
    rotation = (
        -2
        * math.sqrt(mean_c**7 / (mean_c**7 + 25**7))
        * math.sin(math.radians(60 * math.exp(-(((mean_h - 275) / 25) ** 2))))
    )
    return math.sqrt(light**2 + chromatic**2 + hue**2 + rotation * chromatic * hue)


@pytest.mark.parametrize(
    ("first", "second", "known"),
    [
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
        ((50.0, 2.5, 0.0), (73.0, 25.0, -18.0), 27.1492),
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
    ],
)
def test_distances_are_those_that_are_published(
    first: Triple, second: Triple, known: float
) -> None:
    assert distance(first, second) == pytest.approx(known, abs=1e-4)


@pytest.mark.parametrize("eye", EYES)
def test_no_two_colors_look_alike(eye: str) -> None:
    colors = KIND_COLORS | CAUSE_COLORS
    seen = {name: lab(color, EYES[eye]) for name, color in colors.items()}
    near = {
        f"{a} and {b}": round(distance(seen[a], seen[b]), 1)
        for a, b in combinations(seen, 2)
        if distance(seen[a], seen[b]) < LEAST
    }
    assert near == {}


def test_every_kind_and_cause_has_a_color() -> None:
    assert list(KIND_COLORS) == list(Kind)
    assert list(CAUSE_COLORS) == list(CAUSES)
    assert LINK_COLOR in CAUSE_COLORS.values()


@pytest.mark.parametrize("ground", ["#ffffff", "#14181d"])
def test_all_are_seen_on_light_and_on_dark_ground(ground: str) -> None:
    eye = EYES["all colors"]
    for color in (KIND_COLORS | CAUSE_COLORS).values():
        assert distance(lab(color, eye), lab(ground, eye)) > LEAST
