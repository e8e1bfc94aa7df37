"""The pages hold: commands parse, links lead somewhere, tables and examples are true."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from torch.distributed import HashStore

from benchmarks.gpu import figures, lines, training
from benchmarks.gpu.__main__ import HEAD, NOT_RUN, table
from benchmarks.gpu.lines import LINES, Line, Measured
from benchmarks.gpu.messages import one_way_us
from benchmarks.paper import tables
from benchmarks.paper.workload import Method, Simulation, Workload, document, load
from rrfp import analyze
from rrfp.cli import analyze as analyze_commands
from rrfp.cli import app
from rrfp.cli import main as cli
from rrfp.errors import UsageError
from rrfp.interchange.assemble import assemble
from rrfp.megatron.adapters import compatibility
from rrfp.megatron.memory.bound import StepMemory
from rrfp.megatron.pipeline import Pipeline, discard
from rrfp.megatron.settings import DispatchSettings
from rrfp.megatron.step_groups import Place
from rrfp.runtime.device.cuda_runtime import CudaPresence, Gpu, check_cuda
from rrfp.runtime.isolated_call import NoAnswerError, call_isolated
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.rehearsal import step_policy
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.costs.language_models import parse_flops
from rrfp.train.settings import TrainSettings
from rrfp.verify.sameness import RankResult

# The documentation holds: its commands parse, its links lead somewhere, its table is true.


ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "examples").glob("*.md"),
    *(ROOT / "traces").glob("*.md"),
]
README = (ROOT / "README.md").read_text()

PICTURE = ROOT / "docs" / "images" / "step.svg"

_CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(rrfp [a-z][^`]*)`")
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def _commands(page: Path) -> list[str]:
    """The `rrfp` commands that a page has its reader run."""
    lines = [
        line.removeprefix("$ ").strip()
        for language, block in _BLOCK.findall(page.read_text())
        if language in ("sh", "console")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    return [line for line in lines if line.startswith("rrfp ")]


def _mentions(page: Path) -> list[str]:
    """The commands in a page's text; some are only the name of a subcommand."""
    return [" ".join(command.split()) for command in _INLINE.findall(page.read_text())]


COMMANDS = sorted({command for page in PAGES for command in _commands(page)})
MENTIONS = sorted({command for page in PAGES for command in _mentions(page)})


def _parse(command: str, *, may_be_a_name: bool = False) -> None:
    """Parse as the command line does, without running anything."""
    target: Any = typer.main.get_command(app.app)
    _, *arguments = shlex.split(command.partition(" > ")[0], comments=True)
    while hasattr(target, "commands") and arguments:
        # `rrfp analyze [RUN]` names no report.
        has_default = "findings" in target.commands and arguments[0] not in target.commands
        target = target.commands["findings" if has_default else arguments.pop(0)]
    if arguments not in (["--help"], ["--help-all"]) and (arguments or not may_be_a_name):
        target.make_context("rrfp", arguments)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_parses(command: str) -> None:
    _parse(command)


@pytest.mark.parametrize("command", MENTIONS)
def test_every_command_in_the_text_parses(command: str) -> None:
    _parse(command, may_be_a_name=True)


def test_the_readme_names_every_verb() -> None:
    verbs = (
        "train, verify, simulate, hint show, hint check, trace view, trace check, analyze bubbles"
    )
    for verb in verbs.split(", "):
        assert any(command.startswith(f"rrfp {verb}") for command in _commands(ROOT / "README.md"))


@pytest.mark.parametrize("command", ["rrfp train --hnt bf", "rrfp trace look", "rrfp train extra"])
def test_a_wrong_command_would_be_found(command: str) -> None:
    with pytest.raises((KeyError, typer.TyperException)):
        _parse(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    missing = [
        link for link in _LINK.findall(page.read_text()) if not (page.parent / link).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_list_stands_apart(page: Path) -> None:
    """The site takes a list that follows a line of text for text; a git host does not."""
    lines = _CODE.sub("", page.read_text()).splitlines()
    item = re.compile(r"(- |\d+\. )")
    begun = [
        line
        for before, line in pairwise(lines)
        if item.match(line) and before.strip() and not re.match(r"#|- |\d+\. |  ", before)
    ]
    assert begun == []


def test_the_picture_is_of_the_command_beside_it() -> None:
    pytest.importorskip("altair", reason="the picture needs the extra `report`")
    pytest.importorskip("vl_convert", reason="the picture needs the extra `report`")
    from docs.pictures import RUN, SCHEDULES

    text = " ".join(README.split())
    assert f"`{RUN}`" in text
    assert all(f"`{flag}`" in README for flag in SCHEDULES)
    assert f"({PICTURE.relative_to(ROOT)})" in README
    drawn = PICTURE.read_text()
    assert all(name in drawn for name in SCHEDULES.values())
    (ratio,) = re.findall(r"([\d.]+) times as fast", drawn)
    assert f"`bfw` is {ratio} times as fast" in text


def test_every_package_has_a_page_in_the_api_reference() -> None:
    packages = {path.parent.name for path in (ROOT / "rrfp").glob("*/__init__.py")} - {"cli"}
    pages = {path.stem: path.read_text() for path in (ROOT / "docs" / "api").glob("[a-z]*.md")}
    assert pages.keys() == packages | {"errors", "inputs"}
    assert all(f"\n::: rrfp.{package}\n" in page for package, page in pages.items())


def test_the_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^(?:\S+=\S+ )?make ([a-z-]+)", README, re.MULTILINE)
    assert {"train", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


PRINTED = [
    text
    for language, text in _BLOCK.findall((ROOT / "docs" / "guide" / "analyze.md").read_text())
    if language == "console"
]


@pytest.mark.parametrize("block", PRINTED, ids=lambda block: block.partition("\n")[0])
def test_what_the_guide_shows_is_what_the_command_prints(
    block: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, _, table = block.partition("\n")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", shlex.split(command.removeprefix("$ ")))
    assert cli.main() == 0
    printed = capsys.readouterr().out
    assert [line.rstrip() for line in printed.strip().splitlines()] == table.strip().splitlines()


@pytest.mark.parametrize("trace", sorted((ROOT / "traces").glob("*.pftrace")), ids=lambda p: p.name)
def test_a_sample_trace_is_small_whole_and_explained(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trace.stat().st_size < 300_000
    assert f"`{trace.name}` | `rrfp train " in (ROOT / "traces" / "README.md").read_text()
    monkeypatch.setattr(sys, "argv", ["rrfp", "trace", "check", str(trace)])
    assert cli.main() == 0
    assert "is whole" in capsys.readouterr().out


def test_the_guide_shows_the_screen_of_memory() -> None:
    guide = (ROOT / "docs" / "guide" / "analyze.md").read_text()
    screen = (ROOT / "tests" / "golden" / "screens" / "memory.txt").read_text()
    assert f"```\n{screen}```\n" in guide


# The page with the paper's tables says what its command makes.


PAPER = Path("docs/paper.md").read_text(encoding="utf-8")


def test_the_page_has_a_row_as_it_is_simulated() -> None:
    row = load("published")["rows"][0]
    comparison = tables.compare(row, Simulation(load("parameters")))
    line = "| " + " | ".join(tables.speedup_cells(comparison)) + " |"
    assert line in PAPER.splitlines()
    assert comparison.is_fitted


def test_every_published_row_is_on_the_page() -> None:
    rows = load("published")["rows"]
    assert len(rows) == 20
    for row in rows:
        workload = Workload(**row["workload"])
        line = next(
            line
            for line in PAPER.splitlines()
            if line.startswith(f"| {workload.models} | {workload.ranks} |")
        )
        for method in tables.COMPARED[1:]:
            published = row["seconds"][Method.BLOCKING_1F1B] / row["seconds"][method]
            assert f" ({published:.2f}, " in line


def test_every_workload_is_a_model_that_the_simulator_reads() -> None:
    parameters = load("parameters")
    for row in load("published")["rows"]:
        workload = Workload(**row["workload"])
        asynchronous, blocking = (
            parse_flops(document(workload, parameters, is_blocking=each), workload.models)
            for each in (False, True)
        )
        assert asynchronous.tensor_parallel.size == workload.tp
        assert blocking.links.latency_s - asynchronous.links.latency_s == pytest.approx(
            parameters["fitted"]["meeting_s"]
        )


def test_every_parameter_says_where_it_comes_from() -> None:
    """Models say it once, in the line of their name; all else in its own line or the one above."""
    text = (Path("benchmarks/paper") / "parameters.toml").read_text(encoding="utf-8")
    before, is_model = "", False
    for line in text.splitlines():
        if line.startswith("["):
            is_model = line.startswith(("[language.", "[vision."))
            assert not is_model or "#" in line, line
        elif line and not line.startswith("#") and not is_model:
            assert "#" in line or before.startswith("#"), line
        before = line


def test_signs_and_errors() -> None:
    workload = Workload("GPT3-Large", 1, 8, 1, 64, "ViT-H")
    published: dict[Method, float] = dict(zip(tables.COMPARED, (4.0, 3.0, 2.0, 1.0), strict=True))
    simulated: dict[Method, float] = dict(zip(tables.COMPARED, (4.0, 1.0, 2.0, 2.5), strict=True))
    comparison = tables.Comparison(workload, published, simulated)
    assert comparison.wrong_signs == [
        (Method.ZB, Method.BF),
        (Method.ZB, Method.BFW),
        (Method.BF, Method.BFW),
    ]
    assert comparison.error(Method.BF) == 0
    assert comparison.error(Method.BFW) == pytest.approx(-0.6)
    assert tables.mean_error([comparison]) == pytest.approx(0.3)


def test_the_page_has_the_prose_it_is_made_from() -> None:
    prose = Path("benchmarks/paper/page.template").read_text(encoding="utf-8")
    fixed = [line for line in prose.splitlines() if "$" not in line]
    assert len(fixed) > 40
    lines = set(PAPER.splitlines())
    assert [line for line in fixed if line not in lines] == []


def test_the_page_has_the_commands_it_quotes() -> None:
    for case in load("equal_memory").values():
        assert f"```\n{case['command'].strip()}\n```" in PAPER
        assert len(case["labels"]) == case["command"].count("--row")


def test_the_picture_is_of_the_tables_on_the_page(tmp_path: Path) -> None:
    pytest.importorskip("altair", reason="the picture needs the extra `report`")
    pytest.importorskip("vl_convert", reason="the picture needs the extra `report`")
    from benchmarks.paper import charts

    for heading, num_rows in {"Table 6": 3, "Table 7": 3, "Table 8": 5, "Figure 5": 2}.items():
        assert len(charts.table(PAPER, heading)) == 1 + num_rows
    drawn = tmp_path / "paper.svg"
    drawn.write_text(charts.draw(PAPER), encoding="utf-8")
    assert drawn.read_bytes() == charts.PICTURE.read_bytes()
    assert f"]({charts.PICTURE.relative_to('docs')})" in PAPER


def test_every_figure_of_the_tables_is_drawn() -> None:
    pytest.importorskip("altair", reason="the picture needs the extra `report`")
    from benchmarks.paper import charts

    published = load("published")
    jitter, hints = charts.slowdowns(PAPER)
    *scaling, limits = charts.speedups(PAPER)
    drawn = (jitter, hints, *scaling, limits)
    for chart in drawn:
        assert {len(curve.values) for curve in chart.curves} == {len(chart.places)}
    assert {curve.name for chart in drawn for curve in chart.curves} == set(charts.COLOURS)
    slows = {c.name: c.values for c in jitter.curves if c.source == "published"}
    assert slows["BF"] == tuple(
        pytest.approx(100 * published["jitter"][level]["bf"], abs=0.06) for level in jitter.places
    )
    assert len(hints.curves) == 4
    for chart, row in zip(scaling, published["scaling"], strict=True):
        assert chart.places == tuple(map(str, row["values"]))
        assert chart.curves[1].values == tuple(row["speedups"])
    assert limits.places == tuple(map(str, published["limits"]["values"]))
    assert [curve.name for curve in limits.curves] == ["BF", "BFW"]


def test_a_page_without_a_table_is_refused() -> None:
    pytest.importorskip("altair", reason="the picture needs the extra `report`")
    from benchmarks.paper import charts

    page = PAPER.replace("## Table 7: hints", "## Hints")
    with pytest.raises(ValueError, match=r"no table `Table 7`"):
        charts.slowdowns(page)


# The examples of docs/extending.md work as they stand there.


EXTENDING = (ROOT / "docs" / "extending.md").read_text()
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def example(of: str) -> dict[str, Any]:
    """Run the Python code under this heading; returns the names that it defines."""
    section = EXTENDING.partition(f"\n## {of}\n")[2].partition("\n## ")[0]
    names: dict[str, Any] = {"__name__": "example"}
    for block in _PYTHON.findall(section):
        exec(compile(block, "docs/extending.md", "exec", dont_inherit=True), names)
    return names


def test_a_hint_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(HINTS, "oldest", example("A hint")["Oldest"]())
    for command in (
        "rrfp hint show oldest --pp 2 --microbatches 3",
        "rrfp simulate --pp 4 --microbatches 8 --hint oldest --chunks 2",
    ):
        monkeypatch.setattr(sys, "argv", command.split())
        assert cli.main() == 0
    order = capsys.readouterr().out
    assert order.startswith("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"), order


class Halves:
    """A stage whose tasks return half of their input."""

    held_bytes = waiting_gradient_bytes = 0

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.seen: dict[Task, float] = {}

    def run(self, task: Task, inputs: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
        tensor = inputs[0] if inputs else torch.full((2,), 2.0**task.microbatch)
        assert tensor is not None
        self.seen[task] = float(tensor[0])
        return (tensor / 2,) if self.shape.receiver(task) is not None else ()


def test_a_transport_carries_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pipeline, "transport", example("A transport")["ThreadTransport"])
    shape, store = Shape(2, 3), HashStore()
    settings = DispatchSettings()
    steering = step_policy(settings.policy, shape, forward_only=False)

    def run(rank: int) -> dict[Task, float]:
        pipeline = Pipeline(
            settings,
            Place(rank, (0, 1), (rank,)),
            shape,
            discard,
            store,
            "example",
            torch.device("cpu"),
            num_credits=3,
            timeout_s=20.0,
        )
        compute = Halves(shape)
        pipeline.run_step(0, steering, StepMemory(), compute, None)
        pipeline.close(farewell=True)
        return compute.seen

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, (0, 1))
    for microbatch in range(3):
        assert second[Task(1, Kind.F, microbatch)] == 2.0**microbatch / 2
        assert first[Task(0, Kind.B, microbatch)] == 2.0**microbatch / 2


def patched(of: str, directory: Path) -> set[str]:
    """Copy the package there, and change it as the example under this heading says. Gives the files
    that it touches. The lines that a hunk keeps and removes stand in the file once."""
    shutil.copytree(ROOT / "rrfp", directory / "rrfp", ignore=shutil.ignore_patterns("__pycache__"))
    section = EXTENDING.partition(f"\n## {of}\n")[2].partition("\n## ")[0]
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    touched = set()
    for change in re.split(r"^--- .*\n\+\+\+ b/", diff, flags=re.MULTILINE)[1:]:
        name, *hunks = change.split("\n@@\n")
        file = directory / name
        text = file.read_text() if file.exists() else ""
        for hunk in map(str.splitlines, hunks):
            before = "".join(f"{line[1:]}\n" for line in hunk if not line.startswith("+"))
            after = "".join(f"{line[1:]}\n" for line in hunk if not line.startswith("-"))
            assert text.count(before) == 1, f"{name} does not have this once:\n{before}"
            text = text.replace(before, after)
        file.write_text(text)
        touched.add(name)
    return touched


def output_of(directory: Path, script: str) -> str:
    """Run a script with the package in this directory; returns its output."""
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


EXCHANGE = """
import logging, sys, torch
from concurrent.futures import ThreadPoolExecutor
from torch.distributed import HashStore
from rrfp.runtime.net.transport import SocketTransport, make_planes
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.protocols import Inbox, Message, MessageArrived
from rrfp.schedule.tasks import Kind, Task

store, inboxes, records = HashStore(), (Inbox(), Inbox()), []
transports = [
    SocketTransport(
        rank, store, [1 - rank], [1 - rank], inboxes[rank], num_credits=8, record=records.append,
        planes=make_planes(torch.device("cpu"), TransportName(sys.argv[1]), 16),
    )
    for rank in (0, 1)
]
with ThreadPoolExecutor(2) as pool:
    list(pool.map(SocketTransport.open, transports))
    for microbatch in range(3):
        message = Message(0, Task(1, Kind.F, microbatch), (torch.full((5,), float(microbatch)),))
        transports[0].send(1, message)
    events = []
    while len(events) < 3:
        events += inboxes[1].take(10.0)
    for event in events:
        assert isinstance(event, MessageArrived), event
        transports[1].consumed(0, 0)
        print(event.message.task, event.message.tensors[0].tolist()[0])
    receiver = transports[1]._incoming[0].receiver
    print(getattr(receiver, "num_behind", "no field"))
    list(pool.map(SocketTransport.close, transports))
print(*sorted({record.plane for record in records}))
"""
ARRIVED = "1F0 0.0\n1F1 1.0\n1F2 2.0\n"


def test_a_data_plane_takes_two_files(tmp_path: Path) -> None:
    touched = patched("A data plane", tmp_path)
    assert touched == {"rrfp/runtime/planes/files.py", "rrfp/runtime/planes/registry.py"}
    script = EXCHANGE.replace("sys.argv[1]", "'files'")
    assert output_of(tmp_path, script) == f"{ARRIVED}no field\nfiles\n"


def test_a_field_of_the_header_takes_three_files(tmp_path: Path) -> None:
    touched = patched("A field of the header", tmp_path)
    assert touched == {f"rrfp/runtime/link/{name}.py" for name in ("wire", "sender", "receiver")}
    script = EXCHANGE.replace("sys.argv[1]", "'inline'")
    assert output_of(tmp_path, script) == f"{ARRIVED}0\ninline\n"


@pytest.mark.parametrize("newer", [False, True])
def test_an_adapter_meets_two_releases(monkeypatch: pytest.MonkeyPatch, *, newer: bool) -> None:
    (entry,) = re.findall(r'^`"(release_output.+ \| .+)"`', EXTENDING, re.MULTILINE)
    module = "pipeline_parallel.schedules"
    if newer:
        schedules = compatibility.schedules()
        monkeypatch.setattr(
            schedules, "release_output", schedules.deallocate_output_tensor, raising=False
        )
        monkeypatch.delattr(schedules, "deallocate_output_tensor")
    assert compatibility._difference(module, entry, is_replaced=False) is None
    output = torch.ones(8)
    example("The next Megatron-Core")["free_output"](
        [output], SimpleNamespace(deallocate_pipeline_outputs=True)
    )
    assert output.numel() == 1


def with_field(tmp_path: Path, section: str, file: str, before: str) -> Path:
    """A copy of the package, whose one file has the field that this section of the page shows."""
    block = re.search(
        r"^```python\n(.*?)^```$",
        EXTENDING.partition(f"\n## {section}\n")[2],
        re.MULTILINE | re.DOTALL,
    )
    assert block is not None
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "rrfp", tmp_path / "rrfp", ignore=ignored)
    changed = tmp_path / file
    source = changed.read_text()
    assert source.count(before) == 1
    changed.write_text(source.replace(before, block[1] + before))
    return tmp_path


def run_in(directory: Path, program: str, *arguments: str) -> str:
    """Run a program with the package in this directory; returns its output."""
    environment = os.environ | {"PYTHONPATH": str(directory), "RRFP_COMPILED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=directory,
        env=environment | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


RRFP = "import sys; from rrfp.cli.main import main; sys.argv[0] = 'rrfp'; sys.exit(main())"


@pytest.mark.timeout(300)
def test_a_knob_is_one_file(tmp_path: Path) -> None:
    before = "    limits_by_shape: bool = False\n"
    there = with_field(tmp_path, "A knob of the policy", "rrfp/schedule/policy.py", before)
    for command in ("train --help-all", "run --help-all", "simulate --help", "analyze whatif -h"):
        assert re.search(r"--eagerness +INT ", run_in(there, RRFP, *command.split())), command
    sweep = ("--pp", "2", "--microbatches", "4", "--sweep", "eagerness=0,3", "--format", "json")
    rows = json.loads(run_in(there, RRFP, "simulate", *sweep))["rows"]
    assert [row["eagerness"] for row in rows] == [0, 3]
    program = """
import json
from pathlib import Path
from rrfp.errors import UsageError
from rrfp.megatron.job.description import describe_dispatch
from rrfp.megatron.settings import DispatchSettings
from rrfp.train.settings import TrainSettings
Path("run.toml").write_text("[policy]\\neagerness = 3\\n")
settings = TrainSettings.from_toml(Path("run.toml"))
ranks = TrainSettings.from_json(settings.to_json())
found = [settings.policy, ranks.policy, DispatchSettings(eagerness=3).policy]
stated = describe_dispatch(DispatchSettings(eagerness=3)).settings([], 1)
print(json.dumps([each.eagerness for each in found] + [stated["eagerness"]]))
try:
    TrainSettings(eagerness="few")
except UsageError as error:
    print(error)
"""
    values, refusal = run_in(there, program).splitlines()
    assert json.loads(values) == [3, 3, 3, 3]
    assert refusal.startswith("--eagerness is 'few'")


@pytest.mark.timeout(300)
def test_a_flag_of_train_is_one_file(tmp_path: Path) -> None:
    before = "    seed: int = setting(\n"
    there = with_field(tmp_path, "A flag of rrfp train", "rrfp/train/settings.py", before)
    assert re.search(r"--clip +NORM ", run_in(there, RRFP, "train", "--help-all"))
    program = """
import json
from pathlib import Path
from rrfp.errors import UsageError
from rrfp.train.checks import check_settings
from rrfp.train.settings import TrainSettings
Path("run.toml").write_text("clip = 0.5\\n")
settings = TrainSettings.from_toml(Path("run.toml"))
print(json.dumps([settings.run.clip, settings.described()["clip"]]))
try:
    check_settings(TrainSettings(clip=0))
except UsageError as error:
    print(error)
"""
    values, refusal = run_in(there, program).splitlines()
    assert json.loads(values) == [0.5, 0.5]
    assert refusal.startswith("--clip is 0; it must be a finite number above 0")


def test_an_importer_reads_a_run(tmp_path: Path) -> None:
    file = tmp_path / "tasks.csv"
    file.write_text(
        "pp_rank,kind,microbatch,start_us,end_us\n0,F,0,0,10\n1,F,0,10,20\n1,B,0,20,40\n0,B,0,40,60\n"
    )
    run = assemble(*example("An importer")["read_tasks"](file))
    assert [len(rank.tasks) for rank in run.recording.ranks] == [2, 2]
    (wait,) = (wait for wait in run.recording.ranks[0].waits if wait.cause == "backward_input")
    assert (wait.start_ns, wait.end_ns) == (10_000, 40_000)


def test_an_analysis_subcommand_takes_two_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section = EXTENDING.partition("\n## An analysis subcommand\n")[2].partition("\n## ")[0]
    packages = (analyze, analyze_commands)
    for package, code in zip(packages, _PYTHON.findall(section), strict=True):
        directory = tmp_path / package.__name__
        directory.mkdir()
        (directory / "task_times.py").write_text(code)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(directory)])
        name = f"{package.__name__}.task_times"
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    rrfp: Any = typer.main.get_command(analyze_commands.make_app())
    trace = str(ROOT / "traces" / "gpt-pp4-bf.pftrace")
    assert "task-times" in rrfp.commands
    for output_format, words in (
        ("table", "B of stage 3 takes longest, 21.1 ms."),
        ("md", "| stage | kind | mean | longest |"),
        ("json", '{"tasks": [{"stage": 0, "kind": "B", "mean_s": '),
        ("csv", "stage,kind,mean_s,longest_s"),
    ):
        rrfp(["task-times", trace, "--format", output_format], standalone_mode=False)
        assert words in capsys.readouterr().out


def test_the_files_to_touch_are_there() -> None:
    named = set(re.findall(r"`((?:rrfp|tests|docs|benchmarks)/[\w/.]+)`", EXTENDING))
    new = {
        "rrfp/interchange/tasks_table.py",
        "rrfp/runtime/planes/files.py",
        "rrfp/analyze/task_times.py",
        "rrfp/cli/analyze/task_times.py",
    }
    assert {path for path in named - new if not (ROOT / path).exists()} == set()


GPU = CudaPresence((Gpu("NVIDIA H200", 150_000_000_000, "0"),), None)


def rows(text: str) -> list[list[str]]:
    """The cells of a Markdown table."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


ROWS = rows((ROOT / "docs" / "gpu.md").read_text())


def test_the_page_and_the_kit_have_the_same_lines() -> None:
    head, *lines = ROWS
    assert tuple(head) == HEAD
    assert [line[:2] for line in lines] == [[line.name, line.goal] for line in LINES]


@pytest.mark.parametrize("row", ROWS[1:], ids=lambda row: row[0])
def test_a_figure_says_when_where_and_on_what_commit(row: list[str]) -> None:
    figure, when, where, commit = row[2:]
    if figure == "not run yet":
        assert {when, where, commit} == {""}
    else:
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", when)
        assert where
        assert re.fullmatch(r"[0-9a-f]{7,40}\+?", commit)


def test_without_a_gpu_the_kit_says_so() -> None:
    problem = check_cuda().problem
    if problem is None:
        pytest.skip("this machine has a GPU")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        f"Nothing is measured: {problem}\n",
        "",
    )


@pytest.mark.parametrize(
    ("name", "told", "figure", "holds"),
    [
        ("Copies within", 1900.2, "1900 GB/s", True),
        ("Launch of", {"spinning": 8.26, "blocking": 31.0}, "8.3 us spinning, 31.0 us", True),
        ("device, 64 MB", {"ipc": 1600.0, "own": 2000.0}, "1600 GB/s, 80%", True),
        ("device, 64 MB", {"ipc": 1500.0, "own": 2000.0}, "1500 GB/s, 75%", False),
        ("64 KB by CUDA's", 31.26, "31.3 us", True),
        ("64 KB over CUDA IPC", 59.9, "59.9 us", True),
        ("64 KB over CUDA IPC", 60.0, "60.0 us", False),
        ("64 MB over CUDA IPC", 100.0, "100 us, 671 GB/s", True),
        ("64 MB through", 20_000.0, "20000 us, 3 GB/s", True),
        ("of a vlm", [], "the same", True),
        ("of a vlm", ["bf on rank 1: loss"], "1 differences, the first bf on rank 1", False),
        ("bf16", [], "the same", True),
        ("bf16", ["bf on rank 1: loss"], "4 differences, the first 4 stages, gpt: bf on", False),
        ("One process", [], "the same", True),
        ("One process", ["gradient of x"], "2 differences, the first gradient of x", False),
        ("own time", {"share": 0.0123, "gap_us": 9.0}, "1.23%", True),
        ("own time", {"share": 0.02, "gap_us": 9.0}, "2.00%", False),
        ("idle between", {"share": 0.0, "gap_us": 19.94}, "19.9 us", True),
        ("idle between", {"share": 0.0, "gap_us": 20.0}, "20.0 us", False),
        ("1,000 steps", {"first": [1.0, 2.0], "last": [1.0, 1.5]}, "1.0 and 2.0 MB at", True),
        ("1,000 steps", {"first": [1.0, 2.0], "last": [1.0, 2.1]}, "1.0 and 2.0 MB at", False),
        ("Most", {"megatron": [100.0], "fixed": [101.9]}, "1.019 of its own", True),
        ("Most", {"megatron": [100.0], "fixed": [103.0]}, "1.030 of its own", False),
        ("sanitizer", 0, "clean", True),
        ("sanitizer", 99, "memcheck exits with 99; racecheck exits with 99", False),
    ],
)
def test_a_line_holds_up_to_its_goal(
    monkeypatch: pytest.MonkeyPatch, name: str, told: object, figure: str, holds: bool
) -> None:
    monkeypatch.setattr(lines, "call_isolated", lambda *_, **__: told)
    monkeypatch.setattr(lines, "check_cuda", lambda: GPU)
    lines._own_time.cache_clear()
    *_, line = (line for line in LINES if name in line.name)
    measured = line.measure()
    assert measured.figure.startswith(figure)
    assert measured.holds is holds


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    "measure", [figures.copies, figures.large_ipc, figures.wake_ups, figures.bare_message]
)
def test_measuring_refuses_without_a_driver(measure: Callable[[], object]) -> None:
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        measure()


@pytest.mark.parametrize("transport", ["shm", "bounce"])
def test_messages_are_sent_over_the_transport_of_a_run(transport: str) -> None:
    assert call_isolated(one_way_us, "cpu", transport, 1 << 20, 3, limit_s=60) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    "measure", [figures.small_message, figures.large_message, figures.bounced_message]
)
def test_sending_messages_refuses_without_a_driver(measure: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match="the model is on cuda"):
        measure()


def fails() -> Measured:
    raise NoAnswerError("it was killed: Bus error")


def test_the_table_has_the_form_of_the_page() -> None:
    lines = (
        Line("one", "fast", lambda: Measured("9 us"), is_timed=True),
        Line("two", "fast", lambda: Measured("90 us", holds=False), is_timed=True),
        Line("three", "fast", fails),
        Line("four", "", fails, lacks=lambda: "there is no sanitizer"),
    )
    printed = [*table(lines, GPU)]
    head, *told = rows("\n".join(row for row, _ in printed))
    assert tuple(head) == HEAD
    assert [holds for _, holds in printed] == [True, True, True, False, False, True]
    figures = ["9 us", "90 us: missed", "failed: it was killed: Bus error"]
    assert [line[2] for line in told] == [*figures, f"{NOT_RUN}: there is no sanitizer"]
    assert told[0][4].startswith("NVIDIA H200, torch ")
    assert told[3][3:] == ["", "", ""]


# What is measured of training, on the CPU.


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["gpt", "moe", "vlm"])
def test_layouts_learn_the_same_to_the_bit(model: str) -> None:
    assert call_isolated(training.differences, {}, 4, model, limit_s=250.0) == []
    assert call_isolated(training.one_process, {}, 4, model, limit_s=250.0) == []


def test_a_difference_between_layouts_is_seen() -> None:
    def rank(loss: float, **gradients: str) -> RankResult:
        return RankResult([loss], [1.0], "", gradients)

    chain = [rank(2.0, first="a"), rank(2.0, last="b")]
    assert training._across(chain, [rank(2.0, first="a", last="b")], "one") == []
    assert training._across(chain, [rank(1.5, first="a", last="c")], "one") == [
        "one: gradient of last",
        "one: first loss 1.5, not 2.0",
    ]
    assert training._across(chain, [rank(2.0, first="a")], "one") == ["one: gradient of last"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_ranks_own_time_is_what_no_task_takes() -> None:
    told = call_isolated(training.own_time, {}, limit_s=100.0)
    assert 0 < told["share"] < 1
    # Where tasks take 5 ms the two are the same figure.
    assert told["gap_us"] == pytest.approx(5e3 * told["share"] / (1 - told["share"]), rel=0.5)


def test_memory_in_a_runs_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(directory: str, flags: dict[str, Any]) -> Path:
        asked.append(flags)
        return Path(directory)

    def metrics(_: Path) -> Iterator[dict[str, Any]]:
        for step in range(asked[-1]["steps"]):
            grown = 10 * (step >= 90)
            ended = [1_000_000 * (7 if step == 0 else 100 + step % 3 + grown)]
            yield {"allocated_bytes": ended, "peak_allocated_bytes": [2_000_000]}

    monkeypatch.setattr(training, "_train", run)
    monkeypatch.setattr(training, "_metrics", metrics)
    assert training.growth({"device": "cuda"}, 100) == {"first": [100.0], "last": [110.0]}
    assert asked[-1]["device"] == "cuda"
    assert training.most_memory({}, 2) == {"megatron": [2.0], "fixed": [2.0]}
    assert [each["dispatch"] for each in asked[1:]] == ["megatron", "fixed"]


@pytest.mark.parametrize("where", [training.SHARED, training.OWN])
def test_where_it_trains_is_what_rrfp_train_takes(where: dict[str, Any]) -> None:
    command = training._command("somewhere", {"pp": 2, **where})
    assert command[1:] == [
        *("-m", "rrfp", "train", "--out", "somewhere/run", "--pp", "2", "--device", "cuda"),
        *(["--share-gpu"] if where is training.SHARED else []),
    ]
    TrainSettings(**where)
