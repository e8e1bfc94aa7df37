"""The floors: imports go down only. This table is the one place that says what may import what."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ANYWHERE = {"rrfp", "rrfp.errors"}
"""What every floor may use: the version and the errors."""


@dataclass(frozen=True, slots=True)
class Floor:
    """What the modules of one package may import besides their own package and the stdlib."""

    below: frozenset[str]
    third_parties: frozenset[str]


def floor(below: str = "", third_parties: str = "") -> Floor:
    return Floor(
        frozenset(f"rrfp.{name}" for name in below.split()), frozenset(third_parties.split())
    )


FLOORS = {
    "rrfp": floor(),
    "rrfp.errors": floor(),
    "rrfp.__main__": floor("cli"),
    "rrfp.schedule": floor(),
    "rrfp.text_files": floor(),
    "rrfp.hint_files": floor("schedule text_files"),
    "rrfp.admission_files": floor("schedule text_files"),
    "rrfp.trace": floor("schedule", "perfetto google numpy viztracer"),
    "rrfp.interchange": floor("schedule trace", "polars"),
    "rrfp.runtime": floor("schedule trace", "torch"),
    "rrfp.simulate": floor("schedule trace", "numpy"),
    "rrfp.megatron": floor(
        "schedule text_files hint_files admission_files trace interchange runtime simulate",
        "torch numpy megatron PIL",
    ),
    "rrfp.analyze": floor("schedule trace simulate", "polars numpy altair vl_convert"),
    "rrfp.bench": floor(
        "schedule text_files hint_files trace simulate megatron analyze", "numpy polars altair"
    ),
    "rrfp.cli": floor(
        "schedule hint_files admission_files trace interchange runtime simulate megatron analyze "
        "bench",
        "typer rich polars torch",
    ),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((ROOT / "rrfp").rglob("*.py"))}


def floor_of(module: str) -> str:
    """The floor that a module stands on: its package, or itself where it is in none."""
    return ".".join(module.split(".")[:2])


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield "." * node.level + (node.module or "")
            elif node.module == "rrfp":
                yield from (f"rrfp.{alias.name}" for alias in node.names)
            elif node.module:
                yield node.module


def forbidden_imports(module: str, source: str) -> list[str]:
    here = floor_of(module)
    allowed = FLOORS[here]
    return [
        name
        for name in imports(ast.parse(source))
        if not (
            floor_of(name) == here
            or floor_of(name) in ANYWHERE | allowed.below
            or name == "rrfp.__version__"
            or name.partition(".")[0] in sys.stdlib_module_names | allowed.third_parties
        )
    ]


def prints(source: str) -> list[int]:
    """The lines that write to the terminal."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Name) and node.id == "print")
        or (isinstance(node, ast.Attribute) and ast.unparse(node) in {"sys.stdout", "sys.stderr"})
    ]


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module: str) -> None:
    assert forbidden_imports(module, MODULES[module].read_text()) == []


@pytest.mark.parametrize("module", [name for name in MODULES if floor_of(name) != "rrfp.cli"])
def test_only_the_command_line_prints(module: str) -> None:
    assert prints(MODULES[module].read_text()) == []


@pytest.mark.parametrize(
    ("module", "source", "forbidden"),
    [
        ("rrfp.schedule.hints", "import torch", ["torch"]),
        (
            "rrfp.schedule.hints",
            "from rrfp.trace.records import TaskRecord",
            ["rrfp.trace.records"],
        ),
        ("rrfp.schedule.hints", "from rrfp import trace", ["rrfp.trace"]),
        ("rrfp.schedule.hints", "from . import order", ["."]),
        ("rrfp.trace.check", "def f():\n    import torch.nn", ["torch.nn"]),
        (
            "rrfp.trace.check",
            "from rrfp.runtime.protocols import Inbox",
            ["rrfp.runtime.protocols"],
        ),
        ("rrfp.analyze.bubbles", "import torch", ["torch"]),
        ("rrfp.analyze.bubbles", "import perfetto.protos", ["perfetto.protos"]),
        ("rrfp.runtime.worker", "from megatron import core", ["megatron"]),
        ("rrfp.runtime.worker", "import rrfp.cli.main", ["rrfp.cli.main"]),
        ("rrfp.megatron.host", "from rich.console import Console", ["rich.console"]),
        ("rrfp.cli.train", "import megatron.core", ["megatron.core"]),
        ("rrfp.megatron.host", "import megatron.core, os\nfrom rrfp.errors import UsageError", []),
        ("rrfp.cli.main", "from rrfp import __version__\nfrom rrfp.cli import errors", []),
    ],
)
def test_the_walk_finds_what_is_forbidden(module: str, source: str, forbidden: list[str]) -> None:
    assert forbidden_imports(module, source) == forbidden


def test_the_walk_finds_what_prints() -> None:
    source = "import sys\nprint(1)\nsys.stderr.write('x')\nprinter = 2\n"
    assert prints(source) == [2, 3]


def test_every_package_has_a_floor() -> None:
    assert {floor_of(module) for module in MODULES} <= FLOORS.keys()
