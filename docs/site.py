"""Puts Markdown that lies outside docs/ into the site, and makes its links lead there.

Links are written as paths in the repository, so that they work on a git host. The site has the
pages of docs/ at its root, the README as its first page, and the other files below at the places
given here. A link that leads to none of them stays as it is, and strict mkdocs refuses it.
"""

import os.path
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

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

    return _LINK.sub(in_site, markdown)
