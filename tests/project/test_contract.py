"""docs/contract.md is whole: every row has its number and tests that exist, one of which continuous
integration runs, and nothing that is passed or refused is missing."""

import ast
import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from _pytest.mark.structures import ParameterSet

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "contract.md").read_text()
MEGATRON = ROOT / "rrfp" / "megatron"


class Row(NamedTuple):
    """A row of one of the page's tables."""

    number: str
    item: str
    verdict: str
    releases: str
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


def test_rows_say_which_releases_have_them() -> None:
    releases = re.findall(r"0\.\d+\.\d+", PAGE[: PAGE.index("## What is trained")])
    assert releases == ["0.16.1", "0.17.1", "0.18.2", "0.19.2"]
    minors = {release.rpartition(".")[0] for release in releases}
    assert {row.releases for row in ROWS} <= {"all", *(f"from {minor}" for minor in minors)}


class Named(NamedTuple):
    """A test that a row names, or one case of it."""

    module: ModuleType
    function: Any
    case: str | None

    @property
    def cases(self) -> dict[str, list[pytest.Mark]]:
        """By name the cases with marks of their own; a case that has none may lack a name."""
        return {
            str(values.id): [mark_of(each) for each in values.marks]
            for mark in marks_of(self.function)
            if mark.name == "parametrize"
            for values in mark.args[1]
            if isinstance(values, ParameterSet)
        }

    @property
    def is_quick(self) -> bool:
        """Whether `make test` runs it: it, or one of its cases, is not marked slow."""
        if is_slow([*marks_of(self.module), *marks_of(self.function)]):
            return False
        if self.case is not None:
            return not is_slow(self.cases[self.case])
        return all(
            any(
                not isinstance(values, ParameterSet) or not is_slow(values.marks)
                for values in mark.args[1]
            )
            for mark in marks_of(self.function)
            if mark.name == "parametrize"
        )


def mark_of(mark: Any) -> pytest.Mark:
    found: pytest.Mark = getattr(mark, "mark", mark)
    return found


def marks_of(marked: Any) -> list[pytest.Mark]:
    marks = getattr(marked, "pytestmark", [])
    return [mark_of(each) for each in (marks if isinstance(marks, list) else [marks])]


def is_slow(marks: Iterable[Any]) -> bool:
    return any(mark_of(mark).name == "slow" for mark in marks)


def named_by(row: Row) -> list[Named]:
    tests = []
    for test in row.tests.split(", "):
        named = re.fullmatch(r"`(\w+/test_\w+)\.py::(test_\w+)(?:\[(.+)\])?`", test)
        assert named, f"{test} names no test"
        module = import_module(f"tests.{named[1].replace('/', '.')}")
        assert hasattr(module, named[2]), f"there is no {test}"
        tests.append(Named(module, getattr(module, named[2]), named[3]))
    return tests


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.number)
def test_every_row_names_tests_that_exist_and_one_that_make_test_runs(row: Row) -> None:
    tests = named_by(row)
    for test in tests:
        assert test.case is None or test.case in test.cases, f"there is no case {test.case}"
    assert any(test.is_quick for test in tests), "all its tests are slow"


def test_what_is_slow_is_seen() -> None:
    """In every way in which a test or a case is marked."""

    @pytest.mark.parametrize("n", [pytest.param(1, id="one", marks=pytest.mark.slow), 2])
    def some() -> None: ...

    @pytest.mark.parametrize("n", [pytest.param(1, id="one", marks=pytest.mark.slow)])
    def none() -> None: ...

    @pytest.mark.slow
    def marked() -> None: ...

    quick, slow = ModuleType("quick"), ModuleType("slow")
    slow.pytestmark = [pytest.mark.slow]  # type: ignore[attr-defined]
    assert Named(quick, some, None).is_quick
    assert not Named(quick, some, "one").is_quick
    assert not Named(quick, none, None).is_quick
    assert not Named(quick, marked, None).is_quick
    assert not Named(slow, some, None).is_quick


def refused_names() -> set[str]:
    """The settings and attributes by which the code refuses a model."""
    found = set()
    for node in ast.parse((MEGATRON / "refusals.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in (
            "_REFUSED",
            "_STATEFUL",
        ):
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
