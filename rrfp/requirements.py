"""The packages that rrfp needs, by its own metadata, and which of them are not there.

What runs inside a job does without them. Imports the standard library alone.
"""

import re
import tomllib
from collections.abc import Collection, Iterator
from importlib import metadata
from pathlib import Path

OF_COMMANDS = ("perfetto", "pillow", "polars", "protobuf", "rich", "typer")
"""Every subcommand but `rrfp run` needs these, beside NumPy, torch and Megatron-Core."""
OF_TRACES = ("perfetto", "protobuf")
"""Writing a trace needs these."""

_REQUIREMENT = re.compile(r"([\w.-]+)\s*([^;]*)")
_NUMBERS = re.compile(r"\d+(?:\.\d+)*")


def lacking(names: Collection[str]) -> str:
    """Those of these packages that are missing or too old, in words; empty if there are none.

    A version above the range is not looked for: it has not been tried, and may well do.
    """
    found = []
    for name, wanted in _declared():
        if name in names:
            try:
                version = metadata.version(name)
            except metadata.PackageNotFoundError:
                found.append(f"{name}{wanted} (not installed)")
            else:
                if _numbers(version) < _numbers(wanted):
                    found.append(f"{name}{wanted} ({version} is installed)")
    return " and ".join(filter(None, (", ".join(found[:-1]), *found[-1:])))


def _declared() -> Iterator[tuple[str, str]]:
    """Each requirement's name and range, such as `>=15,<16`, without those of extras."""
    try:
        lines = metadata.requires("rrfp") or []
    except metadata.PackageNotFoundError:  # a checkout that is on the path
        pyproject = Path(__file__).parent.parent / "pyproject.toml"
        if not pyproject.is_file():
            return
        lines = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["dependencies"]
    for line in lines:
        match = _REQUIREMENT.match(line)
        if match is not None and "extra ==" not in line:
            # The metadata have the bounds in an order of their own.
            yield match[1].lower(), ",".join(sorted(match[2].strip().split(","), reverse=True))


def _numbers(text: str) -> tuple[int, ...]:
    """The first version number of a text."""
    match = _NUMBERS.search(text)
    return tuple(map(int, match[0].split("."))) if match is not None else ()
