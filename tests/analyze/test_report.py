"""The report page: complete, of one file, escaped, and quiet in a browser."""

import json
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.analyze.html import element, page, paragraph, table_element, text
from rrfp.analyze.report import report, report_of
from rrfp.analyze.table import TEXT, Column, Table
from rrfp.cli import main as cli
from rrfp.replay.measured import StepSample
from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.policy import Bytes
from rrfp.schedule.shape import Placement, Shape
from rrfp.simulate.engine import StepConditions
from rrfp.trace.perfetto.reader import TraceContents, read_contents
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import CostRecord, Recording, TaskRecord
from tests.analyze.simulated_runs import (
    MEGATRONS,
    OURS,
    equal_times,
    policy_of,
    random_times,
    simulated,
    simulated_run,
)
from tests.e2e import browser
from tests.properties.cases import examples
from tests.train.trained import rrfp_here

HOSTILE = "</script><script>parent.hacked=1</script><!--<img src=x onerror=hacked=1>\u2028\x00'\"&"


class Reader(HTMLParser):
    """The elements and text of a page, and the data of its charts."""

    VOID = ("meta", "link", "br", "img", "input", "hr")

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        if inside == "script":
            self.scripts.append(data)
        elif inside != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    def count(self, tag: str) -> int:
        return sum(each == tag for each, _ in self.elements)

    @property
    def charts(self) -> dict[str, Any]:
        charts: dict[str, Any] = json.loads(self.scripts[0])
        return charts


def read(recording: Recording, **kwargs: Any) -> Reader:
    return Reader(report("run", whole(recording), **kwargs))


def whole(recording: Recording) -> TraceContents:
    num_records = sum(
        len(found) for records in recording.ranks for found in records.by_name().values()
    )
    return TraceContents(recording, num_records_written=num_records)


Harm = Callable[[Recording], object]


def reshaped(change: Callable[[TaskRecord], TaskRecord]) -> Harm:
    """Every other task of a rank is not what it was."""

    def harm(recording: Recording) -> None:
        tasks = recording.ranks[1].tasks
        tasks[::2] = map(change, tasks[::2])

    return harm


def cleared(name: str) -> Harm:
    """No rank has records of that type."""

    def harm(recording: Recording) -> None:
        for records in recording.ranks:
            records.by_name()[name].clear()

    return harm


def replayable(hint: str = "bf", sizes: ActivationSizes | None = None, **bounds: Any) -> Recording:
    policy, shape = policy_of(hint, Shape(3, 6), **bounds)
    world = StepConditions(equal_times(shape, 10, 8, 7), transfer=lambda *_: 4, sizes=sizes)
    return simulated_run(policy, shape, [world], num_steps=3)


def test_a_report_has_every_part() -> None:
    page = read(replayable(limit=1))
    headings = [attrs.get("id") for tag, attrs in page.elements if tag == "section"]
    assert headings == [
        *("findings", "bubbles", "step", "order", "memory", "links", "times", "whatif"),
        *("settings", "health"),
    ]
    assert (page.count("h1"), page.count("h2")) == (1, 10)
    assert page.count("table") == page.count("caption") == 6
    plots = [attrs for _, attrs in page.elements if "data-chart" in attrs]
    assert {attrs["data-chart"] for attrs in plots} == set(page.charts)
    assert len(page.charts) == 7
    # Every chart says in words what it shows.
    assert all(attrs["role"] == "img" and len(attrs["aria-label"] or "") > 20 for attrs in plots)
    assert "The memory bound withholds forwards (bf ready, limit 1)" in page.text
    assert "Try --limit 2, if memory allows." in page.text
    saved = re.search(r"In a replay with this fixed, a step takes ([\d.]+)% less", page.text)
    assert saved is not None
    assert float(saved[1]) > 5
    assert (
        "hint bf, ready dispatch; limit 1; 3 pipeline ranks; 6 microbatches; 3 steps" in page.text
    )
    assert "the replay is 0.0% off the measured time" in page.text
    assert page.text.count("The trace has no activation bytes") == 1


def test_what_cannot_be_replayed_is_said_and_saves_nothing() -> None:
    page = read(simulated("bf", Shape(3, 4), transfer=lambda *_: 2))
    assert "The run is not replayed: the trace does not tell the settings" in page.text
    assert "Replayed with" not in page.text
    assert "structural" not in page.text


def test_steps_that_take_long_to_replay_are_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrfp.analyze.findings._SAMPLE", StepSample(6_000, 35))
    page = read(replayable())
    assert "a step has 36 tasks, more than the 35 that are replayed here" in page.text
    assert "'rrfp analyze whatif' replays them all" in page.text
    assert "Replayed with" not in page.text


@pytest.mark.parametrize("trace", [OURS, MEGATRONS])
def test_runs_that_were_recorded_are_reported(trace: Path) -> None:
    contents = read_contents(trace)
    page = Reader(report(report_of(trace), contents))
    assert f"Why {trace.stem} waited" in page.text
    assert "The trace is whole" in page.text
    assert "Recording took" in page.text


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("trace.pftrace", "mine"),
        ("trace-joined.pftrace", "mine"),
        ("trace-2.pftrace", "mine, session 2"),
        ("other.pftrace", "other"),
    ],
)
def test_a_run_is_called_by_its_directory(tmp_path: Path, file: str, name: str) -> None:
    run = tmp_path / "mine"
    run.mkdir()
    for each in ("trace.pftrace", "trace-2.pftrace", "trace-joined.pftrace", "other.pftrace"):
        (run / each).touch()
    assert report_of(run / file) == name


def test_groups_replicas_and_chunks_are_reported() -> None:
    policy, shape = policy_of("bfw-deep", Shape(2, 4, 2, Placement.V))
    world = StepConditions(
        equal_times(shape, 10, 8, 7), num_members=2, lateness=lambda member, _: 9 * member
    )
    page = read(simulated_run(policy, shape, [world, world], num_steps=2))
    assert "2 pipeline ranks x 2 tensor-parallel x 2 replicas" in page.text
    assert "odd chunk" in json.dumps(page.charts["gantt"])


def test_the_steps_that_are_asked_for_are_those_reported() -> None:
    page = read(replayable(), steps=range(1, 2))
    assert "1 steps of" not in page.text
    assert "1 step of" in page.text
    assert "Step 1: " in page.text


HARMS: list[Harm] = [
    lambda recording: recording.ranks.pop(),
    cleared("phase"),
    lambda recording: recording.ranks[1].tasks.clear(),
    lambda recording: recording.ranks.clear(),
    lambda recording: recording.ranks[1].stimuli.clear(),
    reshaped(lambda task: task._replace(end_ns=task.start_ns - 9)),
    reshaped(lambda task: task._replace(end_ns=2**62)),
    reshaped(lambda task: task._replace(kind=HOSTILE)),
    lambda recording: recording.settings.clear(),
]
MORE_HARMS: list[Harm] = [
    cleared("task"),
    cleared("send"),
    cleared("wait"),
    lambda recording: recording.ranks[0].phases.pop(),
    reshaped(lambda task: task._replace(end_ns=task.start_ns)),
    reshaped(lambda task: task._replace(start_ns=-(2**62))),
    reshaped(lambda task: task._replace(stage=-5)),
    reshaped(lambda task: task._replace(microbatch=10**9)),
    reshaped(lambda task: task._replace(hint_position=-1)),
    reshaped(lambda task: task._replace(step=10**9)),
    lambda recording: recording.ranks.append(recording.ranks[0]),
]


@pytest.mark.parametrize(
    "harm", [*HARMS, *(pytest.param(harm, marks=pytest.mark.slow) for harm in MORE_HARMS)]
)
def test_a_damaged_run_is_reported_with_what_is_missing(
    harm: Harm,
) -> None:
    recording = replayable()
    harm(recording)
    page = Reader(report("run", TraceContents(recording, ["F1"], 2)))
    assert "truncated: the closing mark is missing" in page.text
    assert page.count("h2") == 10


def test_steps_that_were_left_out_are_named() -> None:
    recording = replayable()
    recording.ranks[1].phases.pop()
    assert "not every rank finished them: step 2." in read(recording).text


def test_text_of_a_trace_is_only_text() -> None:
    recording = replayable()
    recording.settings["settings"]["hint"] = HOSTILE  # type: ignore[index]
    recording.settings[HOSTILE] = {HOSTILE: [HOSTILE]}
    for records in recording.ranks:
        records.info = replace(records.info, host=HOSTILE, clock_error_ns=5)
        records.waits[:] = [wait._replace(cause=HOSTILE) for wait in records.waits]
    contents = whole(recording)
    source = report(HOSTILE, contents)
    assert "<script>parent" not in source
    assert "<img src=x" not in source
    assert "\x00" not in source
    assert "\u2028" not in source.partition('id="charts">')[2]
    page = Reader(source)
    assert page.count("script") == 3
    # What cannot be shown is said, and that is only text, too.
    assert "</script><script>parent.hacked=1</script>" in page.text


def hostile_trace(path: Path, cause: str | None = None) -> None:
    recording = replayable()
    recording.settings[HOSTILE] = HOSTILE
    recording.settings["settings"] = {"hint": HOSTILE, HOSTILE: HOSTILE}
    for records in recording.ranks:
        records.info = replace(records.info, host=HOSTILE)
        records.sends[:] = [send._replace(plane=HOSTILE) for send in records.sends]
        if cause is not None:
            records.waits[:] = [wait._replace(cause=cause) for wait in records.waits]
    write_trace(path, recording)


@pytest.mark.parametrize("kind", ["gantt", "progress", "hint"])
def test_text_of_a_trace_is_only_text_in_a_picture(
    tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    hostile_trace(tmp_path / "a.pftrace", HOSTILE)
    done = rrfp_here(tmp_path, "analyze", "chart", kind, "a.pftrace", "-o", "chart.svg")
    assert done.returncode == 0, done.stderr
    assert capfd.readouterr().err == ""
    drawn = list(ElementTree.parse(tmp_path / "chart.svg").iter())
    assert len(drawn) > 50
    for each in drawn:
        assert each.tag.rpartition("}")[2] not in ("script", "image", "foreignObject", "a")
        assert not any(name.startswith("on") for name in each.attrib)


def test_text_of_two_traces_is_only_text_in_a_comparison(tmp_path: Path) -> None:
    for name in "ab":
        hostile_trace(tmp_path / f"{name}.pftrace")
    done = rrfp_here(tmp_path, "analyze", "compare", "a.pftrace", "b.pftrace", "-o", "c.html")
    assert done.returncode == 0, done.stderr
    source = (tmp_path / "c.html").read_text()
    assert "<script>parent" not in source
    assert "<img src=x" not in source
    assert Reader(source).count("script") == 3


@given(words=st.text(), value=st.recursive(st.text(), st.lists))
@examples(quick=8, thorough=200)
def test_any_text_stays_text(words: str, value: object) -> None:
    chart = {"title": "", "data": {words: value}}
    body = element(
        "div",
        paragraph(words),
        table_element(Table(words, [Column(words, [words], TEXT)])),
        aria_label=words,
    )
    read = Reader(page(words, body, {"chart": chart}, "6.1"))
    assert read.charts == {"chart": chart}
    assert read.count("script") == 3
    assert read.count("p") == 2


def test_what_html_cannot_hold_is_replaced() -> None:
    assert text("a\x08b\x00<") == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}&lt;"
    assert text("\ud800") == "?"


def test_the_page_asks_nobody_for_anything() -> None:
    source = report("run", whole(replayable()))
    page = Reader(source)
    for _, attrs in page.elements:
        for name in ("src", "href", "action", "data"):
            assert (attrs.get(name) or "#").startswith(("#", "data:"))
    (policy,) = (
        attrs["content"]
        for _, attrs in page.elements
        if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert "http" not in policy
    assert len(source) < 1_500_000


@pytest.mark.slow
def test_a_hundred_steps_of_eight_stages_stay_below_three_megabytes() -> None:
    policy, shape = policy_of("bfw", Shape(8, 32))
    world = StepConditions(random_times(random.Random(5), shape), transfer=lambda *_: 4)
    recording = simulated_run(policy, shape, [world], num_steps=100)
    assert len(report("run", whole(recording)).encode()) < 3_000_000


def test_recording_cost_and_clocks_are_reported() -> None:
    recording = replayable()
    first, last = recording.ranks[0], recording.ranks[-1]
    total_ns = sum(phase.end_ns - phase.start_ns for phase in first.phases)
    first.costs.append(CostRecord(first.phases[-1].end_ns, 2, 9, total_ns // 2))
    last.info = replace(last.info, host="other", clock_error_ns=7_000)
    told = read(recording).text
    assert re.search(r"Recording took at most (49\.\d\d|50\.00)% of a rank's time", told)
    assert "The clocks of 2 hosts were compared; times may be off by 7.00 µs" in told


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("report", ...)` on a simulated run, in a directory of its own."""
    write_trace(tmp_path / "trace.pftrace", replayable())
    monkeypatch.chdir(tmp_path)

    def rrfp(command: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rrfp", "analyze", command, *arguments])
        code = cli.main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return rrfp


def test_the_command_writes_the_page(run: Run, tmp_path: Path) -> None:
    assert run("report", "trace.pftrace", "-o", "r.html") == (0, "The report is r.html\n", "")
    assert f"Why {tmp_path.name} waited" in Reader((tmp_path / "r.html").read_text()).text
    assert run("chart", "gantt", "trace.pftrace", "--step", "1", "-o", "g.svg")[0] == 0
    assert (tmp_path / "g.svg").read_bytes().startswith(b"<svg")
    assert run("chart", "bubbles", "trace.pftrace") == (0, "The chart is bubbles.png\n", "")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("report", "nowhere"), 1, "no run or trace at nowhere"),
        (("report", "trace.pftrace", "-o", "."), 2, ". is a directory; name a file"),
        (("report", "trace.pftrace", "-o", "no/r.html"), 2, "cannot be written"),
        (("report", "trace.pftrace", "--steps", "7:"), 2, "none of the steps asked for"),
        (("chart", "pie", "trace.pftrace"), 2, "'pie' is not one of"),
        (("chart", "gantt", "trace.pftrace", "-o", "g.pdf"), 2, "is no file for a chart"),
        (("chart", "gantt", "trace.pftrace", "--step", "8"), 2, "step 8 was not finished"),
    ],
)
def test_mistakes_are_reported_in_a_sentence(
    run: Run, arguments: tuple[str, ...], code: int, words: str
) -> None:
    found, _, told = run(*arguments)
    assert (found, words in told, told.count("\n")) == (code, True, 1)


@pytest.mark.parametrize("command", [("report",), ("chart", "gantt")])
def test_without_the_extra_it_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr("rrfp.cli.output.find_spec", lambda name: None)
    code, _, told = run(*command, "trace.pftrace")
    assert code == 1
    assert "altair and vl_convert" in told
    assert "pip install '.[report]'" in told


@pytest.mark.slow
@pytest.mark.skipif(browser.MISSING is not None, reason=str(browser.MISSING))
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_every_chart_without_a_complaint(tmp_path: Path, scheme: str) -> None:
    sizes = ActivationSizes([[10, 20, 30, 40, 50, 60]] * 3, [[3] * 6] * 3)
    recording = replayable("bfw", sizes, hold=Bytes(140))
    recording.settings[HOSTILE] = HOSTILE
    source = report(HOSTILE, whole(recording))
    path = tmp_path / "report.html"
    path.write_text(source)
    with browser.browser() as running:
        page = running.open("about:blank")
        page.command(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        page.command("Page.navigate", url=path.as_uri())
        page.wait_for("document.documentElement?.dataset.drawn === 'yes'")
        assert page.errors == []
        assert page.requests <= {path.as_uri()}
        assert page.evaluate("document.querySelectorAll('.plot svg').length") == 8
        assert page.evaluate("typeof hacked") == "undefined"
        # Text has the color of the page around it.
        color = "getComputedStyle(document.querySelector({})).{}"
        ink = page.evaluate(color.format("'body'", "color"))
        assert page.evaluate(color.format("'.plot svg text'", "fill")) == ink
        assert (ink == "rgb(27, 31, 36)") is (scheme == "light")
        # On a phone nothing but the boxes of tables scrolls sideways.
        page.command(
            "Emulation.setDeviceMetricsOverride",
            width=390,
            height=800,
            deviceScaleFactor=1,
            mobile=True,
        )
        page.wait_for("document.querySelector('.plot svg').clientWidth <= 390")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
