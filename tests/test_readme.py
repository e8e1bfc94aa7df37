"""The documentation holds: its commands parse, its links lead somewhere, its table is true."""

import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from rrfp.cli import app
from rrfp.cli import main as cli

ROOT = Path(__file__).parent.parent
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
    """Those that stand in its text; some are only the name of a verb."""
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
    if arguments != ["--help"] and (arguments or not may_be_a_name):
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
