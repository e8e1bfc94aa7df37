"""The documentation holds: its commands parse, its links lead somewhere, its table is true."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from rrfp.cli import main as cli

ROOT = Path(__file__).parent.parent
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "examples").glob("*.md"),
    *(ROOT / "traces").glob("*.md"),
]
README = (ROOT / "README.md").read_text()

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(rrfp [a-z][^`]*)`")
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def _commands(page: Path) -> list[str]:
    """The `rrfp` commands that a page tells its reader to run."""
    text = page.read_text()
    shell = [
        line.removeprefix("$ ").strip()
        for language, block in _BLOCK.findall(text)
        if language in ("sh", "console")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    inline = [" ".join(command.split()) for command in _INLINE.findall(text)]
    return [command for command in (*shell, *inline) if command.startswith("rrfp ")]


COMMANDS = sorted({command for page in PAGES for command in _commands(page)})


def _parse(command: str) -> None:
    """Parse as the command line does, without running anything."""
    target: Any = typer.main.get_command(cli.app)
    _, *arguments = shlex.split(command.partition(" > ")[0], comments=True)
    while hasattr(target, "commands") and arguments:
        target = target.commands[arguments.pop(0)]
    if arguments != ["--help"]:
        target.make_context("rrfp", arguments)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_parses(command: str) -> None:
    _parse(command)


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


def test_the_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^(?:\S+=\S+ )?make ([a-z-]+)", README, re.MULTILINE)
    assert {"train", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_the_bubble_table_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = (text for language, text in _BLOCK.findall(README) if language == "console")
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
