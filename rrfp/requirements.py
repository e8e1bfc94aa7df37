"""The packages that rrfp needs according to its metadata, and hints for installing missing ones.

Imports only the standard library, because code inside a job runs without the other packages.
"""

import re
import tomllib
from collections.abc import Collection, Iterator
from importlib import metadata
from pathlib import Path

OF_COMMANDS = ("perfetto", "pillow", "polars", "protobuf", "rich", "typer")
"""Packages that all subcommands except `rrfp run` need, besides NumPy, torch and Megatron-Core."""
OF_TRACES = ("perfetto", "protobuf")
"""Packages that writing a trace needs."""

_REQUIREMENT = re.compile(r"([\w.-]+)\s*([^;]*)")
_NUMBERS = re.compile(r"\d+(?:\.\d+)*")


def install_hint(extra: str) -> str:
    """Return the command that installs an extra of rrfp. It needs a checkout: rrfp is in no
    registry."""
    return f"pip install '.[{extra}]' in a checkout of rrfp"


def lacking(names: Collection[str]) -> str:
    """List the packages of `names` that are missing or older than rrfp requires, with the wanted
    versions, as text for messages; empty if none is.

    Versions above the declared range are accepted, because they may work. Names that rrfp does not
    require are ignored.
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
    """Yield the lower-case name and the version range, such as `>=15,<16`, of each requirement that
    belongs to no extra. Without installed metadata it reads pyproject.toml, if there is one."""
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
            # Metadata list the bounds in any order.
            yield match[1].lower(), ",".join(sorted(match[2].strip().split(","), reverse=True))


def _numbers(text: str) -> tuple[int, ...]:
    """Return the first version number in a text, such as (2, 9, 1); empty for a text without
    one."""
    match = _NUMBERS.search(text)
    return tuple(map(int, match[0].split("."))) if match is not None else ()
