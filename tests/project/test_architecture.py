"""The packages, and what each may import: imports go down only."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BASE = {
    *("rrfp", "rrfp.compiled", "rrfp.errors", "rrfp.requirements", "rrfp.strict_json"),
    "rrfp.system",
}
"""Modules that every package may import."""

IMPORTS = {
    "schedule": "",
    "inputs": "schedule",
    "trace": "schedule",
    "simulate": "trace",
    "replay": "simulate",
    "interchange": "trace",
    "runtime": "trace",
    "planning": "inputs simulate runtime",
    "megatron": "planning interchange",
    "train": "megatron replay",
    "tune": "inputs planning replay",
    "watch": "trace",
    "analyze": "replay",
    "verify": "train",
    "chaos": "train",
    "doctor": "train",
    "race": "train analyze",
    "cli": "verify chaos doctor tune watch race",
    "__main__": "cli",
}
"""The direct imports of each package; it may also import what those packages may import
(docs/decisions/0037-packages.md)."""

THIRD_PARTIES = {
    "trace": "perfetto google numpy viztracer",
    "interchange": "polars",
    "runtime": "cryptography torch cuda",
    "simulate": "numpy",
    "planning": "numpy torch",
    "tune": "numpy",
    "megatron": "torch numpy megatron",
    "train": "torch numpy megatron PIL polars tokenizers",
    "verify": "torch",
    "chaos": "torch",
    "doctor": "torch cuda nixl",
    "watch": "numpy torch opentelemetry prometheus_client wandb",
    "analyze": "polars numpy altair vl_convert",
    "race": "torch numpy megatron polars altair deepspeed",
    "cli": "typer rich polars torch",
}
"""The third-party packages that each may import."""

IN_A_JOB = re.compile(r"rrfp\.(__main__|cli\.main|cli\.run|megatron|planning|runtime|schedule)\b")
"""Modules that run in the processes of a user's job, with all that they import. The job's
environment has the packages that Megatron needs and none of rrfp's other dependencies."""

OF_A_JOB = {"torch", "megatron", "numpy"}

MOST_FILES = 20
"""Most files in a package, so that its directory stays easy to survey."""

MOST_LINES = 1000
"""Most lines in a file."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((ROOT / "rrfp").rglob("*.py"))}


def package_of(module: str) -> str:
    """The package that a module is in, or the module itself if it is in none."""
    return ".".join(module.split(".")[:2])


def importable(package: str) -> set[str]:
    """The packages that a package may import, directly or through others."""
    found: set[str] = set()
    for name in IMPORTS[package].split():
        found |= {f"rrfp.{name}"} | importable(name)
    return found


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
    here = package_of(module)
    package = here.removeprefix("rrfp.")
    allowed = {here, *BASE, *(() if here in BASE else importable(package))}
    libraries = sys.stdlib_module_names | set(THIRD_PARTIES.get(package, "").split())
    return [
        name
        for name in imports(ast.parse(source))
        if not (
            package_of(name) in allowed
            or name == "rrfp.__version__"
            or name.partition(".")[0] in libraries
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


@pytest.mark.parametrize("module", [name for name in MODULES if package_of(name) != "rrfp.cli"])
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
        ("rrfp.megatron.cpu.patches", "from rich.console import Console", ["rich.console"]),
        ("rrfp.cli.train", "import megatron.core", ["megatron.core"]),
        (
            "rrfp.megatron.cpu.patches",
            "import megatron.core, os\nfrom rrfp.errors import UsageError",
            [],
        ),
        ("rrfp.cli.main", "from rrfp import __version__\nfrom rrfp.cli import errors", []),
    ],
)
def test_the_check_finds_what_is_forbidden(module: str, source: str, forbidden: list[str]) -> None:
    assert forbidden_imports(module, source) == forbidden


def test_the_check_finds_what_prints() -> None:
    source = "import sys\nprint(1)\nsys.stderr.write('x')\nprinter = 2\n"
    assert prints(source) == [2, 3]


def test_every_package_is_in_the_table() -> None:
    packages = {package_of(module) for module in MODULES} - BASE
    assert packages == {f"rrfp.{name}" for name in IMPORTS}


def graph() -> dict[str, set[str]]:
    """The modules of rrfp that each module of rrfp imports, anywhere in its file."""
    edges: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        edges[module] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                # What is imported from a package may be a module of it.
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in MODULES else str(node.module) for name in names]
            else:
                continue
            edges[module] |= MODULES.keys() & set(names)
    return edges


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Some modules that import each other in a circle; none where there is no such circle."""
    left = dict(edges)
    while left:
        leaves = {module for module, needed in left.items() if not needed & left.keys()}
        if not leaves:
            return sorted(left)
        left = {module: needed for module, needed in left.items() if module not in leaves}
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(graph()) == []


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


def test_the_drop_in_needs_neither_the_recorder_of_native_schedules_nor_the_cpu() -> None:
    inner = ("rrfp.megatron.native", "rrfp.megatron.cpu")
    # `rrfp.megatron` itself offers both doors: `install` and `trace_native`.
    drop_in = {
        module: needed
        for module, needed in graph().items()
        if module.startswith("rrfp.megatron.") and not module.startswith(inner)
    }
    assert len(drop_in) > 15
    assert [name for needed in drop_in.values() for name in needed if name.startswith(inner)] == []


MEETS_MEGATRON = re.compile(r"rrfp\.(megatron\.(adapters|cpu)|train\.(models|checkpoints))\b")
"""The packages that may import Megatron-Core; all others use their interfaces."""


@pytest.mark.parametrize("module", MODULES)
def test_few_packages_import_megatron(module: str) -> None:
    if not MEETS_MEGATRON.match(module):
        found = imports(ast.parse(MODULES[module].read_text()))
        assert [name for name in found if name.partition(".")[0] == "megatron"] == []


def at_start(module: str) -> set[str]:
    """The imports that run when a module is imported; not those in functions or for types only."""
    found: set[str] = set()
    left: list[ast.AST] = [ast.parse(MODULES[module].read_text())]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & MODULES.keys() or {str(node.module)}
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            left += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            left += ast.iter_child_nodes(node)
    return found


def test_a_job_needs_what_megatron_needs_and_no_more() -> None:
    left = [module for module in MODULES if IN_A_JOB.match(module)]
    assert len(left) > 80
    needed: dict[str, set[str]] = {}
    while left:
        module = left.pop()
        if module in MODULES and module not in needed:
            needed[module] = at_start(module)
            left += needed[module]
    others = {
        (module, name)
        for module, names in needed.items()
        for name in names - MODULES.keys()
        if name.partition(".")[0] not in sys.stdlib_module_names | OF_A_JOB
    }
    assert others == set()


def test_no_package_has_too_many_files() -> None:
    counts = Counter(path.parent for path in MODULES.values())
    assert {path: count for path, count in counts.items() if count > MOST_FILES} == {}


def test_no_file_is_too_long() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}
