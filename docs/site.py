"""Puts Markdown that lies outside docs/ into the site, and makes its links lead there.

Links are written as paths in the repository, so that they work on a git host. The site has the
pages of docs/ at its root, the README as its first page, and the other files below at the places
given here. A link that leads to none of them stays as it is, and strict mkdocs refuses it.

Where a page has the line `<!-- options -->`, it gets a table of options for every subcommand, made
from their declarations.
"""

import os.path
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import typer
from mkdocs.structure.files import File

from rrfp.cli.app import app

ROOT = Path(__file__).parent.parent
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "LICENSE",
    "examples/megatron_bridge.md": "examples/megatron_bridge.md",
    "examples/megatron_lm.md": "examples/megatron_lm.md",
    "examples/train_gpt.py": "examples/train_gpt.py",
    "examples/verl.md": "examples/verl.md",
    "traces/README.md": "traces.md",
}
"""Path in the repository to path in the site's sources."""

OPTIONS = "<!-- options -->"

_SOURCES = {place: path for path, place in OUTSIDE.items()}
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


def on_files(files: Any, config: Any) -> Any:
    """Add what lies outside docs/."""
    for path, place in OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn paths in the repository into paths in the site."""
    place = page.file.src_uri
    folder = PurePosixPath(_SOURCES.get(place, f"docs/{place}")).parent

    def in_site(match: re.Match[str]) -> str:
        path = os.path.normpath(folder / match[1])
        if not (ROOT / path).is_file():
            return match[0]
        target = OUTSIDE.get(path, path.removeprefix("docs/"))
        return f"]({os.path.relpath(target, PurePosixPath(place).parent)}"

    if OPTIONS in markdown:
        markdown = markdown.replace(
            OPTIONS, "\n".join(_options(typer.main.get_command(app), "rrfp"))
        )
    return _LINK.sub(in_site, markdown)


def _options(command: Any, name: str) -> Iterator[str]:
    """Yield Markdown with a section per subcommand: the first line of its help, and its options."""
    if subcommands := getattr(command, "commands", None):
        for word, subcommand in subcommands.items():
            yield from _options(subcommand, f"{name} {word}")
        return
    yield f"\n## {name}\n\n{command.help.splitlines()[0]}\n\n| option | value | |\n|---|---|---|"
    context = typer.Context(command)
    for option in command.get_params(context):
        if not option.hidden:
            value = option.display_type_rich(context)
            names = ", ".join(option.opts) if option.opts[0][0] == "-" else option.metavar
            yield f"| `{_cell(names)}` | {_cell(value)} | {_cell(option.help or '')} |"


def _cell(text: str) -> str:
    """Return a help text as a table's cell: on one line, a list's lines separated by semicolons."""
    opening, _, entries = text.partition("\b\n")
    entries = "; ".join(" ".join(line.split()) for line in entries.splitlines())
    text = " ".join(f"{opening} {entries}".split()).replace("\\[", "[")
    return text.replace("|", "\\|").replace("<", "&lt;")
