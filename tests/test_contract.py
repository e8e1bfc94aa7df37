"""docs/contract.md is whole: every row has its number and tests that exist, and nothing that is
passed or refused is missing."""

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "contract.md").read_text()
MEGATRON = ROOT / "rrfp" / "megatron"


class Row(NamedTuple):
    """A row of one of the page's tables."""

    number: str
    item: str
    verdict: str
    tests: str


ROWS = [
    Row(*(cell.strip() for cell in line.strip("|").split("|")))
    for line in PAGE.splitlines()
    if re.match(r"\| \d", line)
]


def test_rows_are_numbered_and_judged() -> None:
    assert [row.number for row in ROWS] == [str(number) for number in range(1, len(ROWS) + 1)]
    assert {row.verdict for row in ROWS} == set(re.findall(r"^- \*\*(\w+)\*\*:", PAGE, re.M))
    # What is in a table is a row: none is left out for the way it is written.
    assert len(ROWS) == len(re.findall(r"^\|(?! \| item|---)", PAGE, re.M)) > 50


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.number)
def test_every_row_names_tests_that_exist(row: Row) -> None:
    tests = row.tests.split(", ")
    for test in tests:
        named = re.fullmatch(r"`(test_\w+\.py)::(test_\w+)`", test)
        assert named, f"{test} names no test"
        path = ROOT / "tests" / named[1]
        assert path.exists(), f"there is no {path.name}"
        assert named[2] in functions(path), f"there is no {test}"


def refused_names() -> set[str]:
    """The settings and attributes by which the code refuses a model."""
    found = set()
    for file, table in (("refusals.py", "_REFUSED"), ("tracked_state.py", "_STATEFUL")):
        for node in ast.parse((MEGATRON / file).read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == table:
                found |= set(ast.literal_eval(node.value))
    return found


def test_everything_that_is_refused_has_a_row() -> None:
    names = refused_names()
    assert {"hybrid_context_parallel", "running_mean"} <= names
    refused = " ".join(row.item for row in ROWS if row.verdict == "refused")
    assert {name for name in names if f"`{name}`" not in refused} == set()


def test_every_argument_has_a_row() -> None:
    (function,) = (
        node
        for node in ast.walk(ast.parse((MEGATRON / "dropin.py").read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "__call__"
    )
    arguments = [argument.arg for argument in function.args.kwonlyargs]
    assert "forward_only" in arguments
    items = " ".join(row.item for row in ROWS)
    assert [name for name in arguments if f"`{name}`" not in items] == []
