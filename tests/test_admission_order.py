"""Admission orders by name and from files, without any costs."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp import inputs as text_files
from rrfp.errors import UsageError
from rrfp.inputs import resolve_admission
from rrfp.schedule.admission import Admit, ListedOrders, admission_order, parse_admission, pyramid
from tests.effort import examples


def never() -> list[float]:
    raise AssertionError("nobody needs the weights")


def test_names() -> None:
    assert resolve_admission("given", 3) is Admit.GIVEN
    assert resolve_admission("pyramid", 3) is Admit.PYRAMID
    assert list(admission_order(Admit.GIVEN, 5, 3, never)) == [0, 1, 2]
    assert admission_order(Admit.PYRAMID, 5, 3, lambda: [3.0, 1.0, 2.0]) == [1, 0, 2]


def test_a_pyramid_is_light_heavy_light() -> None:
    assert pyramid([30, 10, 50, 20, 40]) == [1, 0, 2, 4, 3]
    assert pyramid([7]) == [0]
    assert pyramid([2.5, 1.5]) == [1, 0]


def test_of_equal_microbatches_the_earlier_counts_as_the_lighter() -> None:
    assert pyramid([1, 1, 1, 1, 1]) == [0, 2, 4, 3, 1]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30))
@examples(quick=100, thorough=1000)
def test_a_pyramid_rises_and_then_falls(weights: list[int]) -> None:
    order = pyramid(weights)
    assert sorted(order) == list(range(len(weights)))
    admitted = [weights[each] for each in order]
    top = admitted.index(max(admitted))
    assert admitted[: top + 1] == sorted(admitted[: top + 1])
    assert admitted[top:] == sorted(admitted[top:], reverse=True)


def test_a_file_has_a_line_a_step_and_starts_again() -> None:
    listed = parse_admission("2,0,1\n\n 1 2  0 \r\n0, 2, 1,\n", "mine", 3)
    assert listed == ListedOrders("mine", ((2, 0, 1), (1, 2, 0), (0, 2, 1)))
    orders = [admission_order(listed, step, 3, never) for step in range(5)]
    assert orders == [(2, 0, 1), (1, 2, 0), (0, 2, 1), (2, 0, 1), (1, 2, 0)]


def test_without_a_number_the_first_line_says_how_many_there_are() -> None:
    listed = parse_admission("1 0", "mine")
    with pytest.raises(UsageError, match="mine admits 2 microbatches and step 7 has 3"):
        admission_order(listed, 7, 3, never)
    with pytest.raises(UsageError, match="line 2: '2' is not one of the 2 microbatches"):
        parse_admission("1 0\n0 2", "mine")


@given(st.lists(st.permutations(range(6)), min_size=1, max_size=4), st.sampled_from([",", " "]))
@examples(quick=50, thorough=500)
def test_what_is_written_is_read(orders: list[list[int]], separator: str) -> None:
    text = "\n".join(separator.join(map(str, order)) for order in orders)
    assert parse_admission(text, "mine", 6).orders == tuple(map(tuple, orders))


@given(st.text(alphabet="012, \n-x", max_size=20))
@examples(quick=200, thorough=2000)
def test_a_file_is_read_or_refused(text: str) -> None:
    try:
        orders = parse_admission(text, "mine", 3).orders
    except UsageError:
        lines = [line for line in text.splitlines() if line.strip(" ,")]
        words = [sorted(line.replace(",", " ").split()) for line in lines]
        assert not words or any(each != ["0", "1", "2"] for each in words)
    else:
        assert all(sorted(order) == [0, 1, 2] for order in orders)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "mine admits nothing; write a line of microbatches"),
        ("\n , \n", "mine admits nothing"),
        ("0 1 2\n0 1", "mine, line 2 admits 2 of 3 microbatches; 2 is missing, add it"),
        ("0 1 2 3", "mine, line 1: '3' is not one of the 3 microbatches; write their numbers, "),
        ("0 1 1", "mine, line 1: 1 is listed twice; admit each microbatch once"),
        ("0 1 -2", "mine, line 1: '-2' is not one of the 3"),
        ("0 1 two", "'two' is not one of the 3"),
        ("0 1 2.0", "'2.0' is not one of the 3"),
        ("0 1 ²", "'²' is not one of the 3"),
        (f"0 1 {'9' * 5000}", r"'9{20}\.\.\.' is not one of the 3"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        parse_admission(text, "mine", 3)


def test_files_are_found_by_ending_or_because_they_are_there(tmp_path: Path) -> None:
    for name in ("order.csv", "order.txt", "order"):
        path = tmp_path / name
        path.write_text("﻿1 0\n", encoding="utf-8")
        assert resolve_admission(str(path), 2) == ListedOrders(str(path), ((1, 0),))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "'' is not an admission order; choose given, pyramid, plan, or a file with a line of"),
        ("heavy", "'heavy' is not an admission order"),
        ("no\0path", "is not an admission order"),
        ("x" * 5000, "is not an admission order"),
        ("none.csv", "cannot read the admission file none.csv: No such file or directory"),
        ("/", "cannot read the admission file /: Is a directory"),
    ],
)
def test_what_is_neither_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)):
        resolve_admission(text, 2)


def test_other_bytes_than_text_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "order.csv").write_bytes(b"\xff\xfe0 1")
    with pytest.raises(UsageError, match=r"order\.csv: it is not UTF-8 text"):
        resolve_admission(str(tmp_path / "order.csv"), 2)
    monkeypatch.setattr(text_files, "_MOST_BYTES", 2**20)
    (tmp_path / "order.csv").write_bytes(b"0 1\n" * 2**19)
    with pytest.raises(UsageError, match=r"order\.csv is larger than 1 MiB; name another one"):
        resolve_admission(str(tmp_path / "order.csv"), 2)
    with pytest.raises(UsageError, match="/dev/zero is not a regular file"):
        resolve_admission("/dev/zero", 2)
