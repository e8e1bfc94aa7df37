"""What an item of a step weighs, and what is said of one that has no weight."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rrfp.errors import UsageError
from rrfp.megatron.item_costs import resolve_cost

TEXT = {"tokens": torch.zeros(2, 7, dtype=torch.int64)}
PICTURES = {"tokens": torch.zeros(1, 10, dtype=torch.int64), "patches": torch.zeros(4, 192)}
NO_PICTURE = {"tokens": torch.zeros(1, 3, dtype=torch.int64), "patches": torch.zeros(0, 192)}


@pytest.mark.parametrize(
    ("name", "weights"),
    [(None, [14, 14, 3]), ("work", [14, 14, 3]), ("tokens", [14, 6, 3])],
)
def test_names(name: str | None, weights: list[float]) -> None:
    assert resolve_cost(name).weigh([TEXT, PICTURES, NO_PICTURE]) == weights


def test_patches_are_those_of_images() -> None:
    assert resolve_cost("patches").weigh([PICTURES, NO_PICTURE]) == [4, 0]
    with pytest.raises(UsageError, match="a dict, has no 'patches' to count; choose another"):
        resolve_cost("patches").weigh([TEXT])


@pytest.mark.parametrize("key", ["tokens", "input_ids", "text"])
def test_items_of_other_loops(key: str) -> None:
    assert resolve_cost("work").weigh([{key: np.zeros((3, 4)), "other": None}]) == [12]


@pytest.mark.parametrize("item", [torch.zeros(3), (TEXT,), {}, {"labels": torch.zeros(3)}, None, 7])
def test_other_items_ask_for_a_function(item: Any) -> None:
    with pytest.raises(UsageError, match="set admit_cost to a function that takes an item and"):
        resolve_cost("work").weigh([item])


@pytest.mark.parametrize(
    "number", [3, 3.0, True, np.float32(3), np.int64(3), torch.tensor(3), torch.tensor([3.0])]
)
def test_a_function_gives_any_number(number: Any) -> None:
    (weight,) = resolve_cost(lambda _: number).weigh([None])
    assert weight == float(number)
    assert type(weight) is float


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (float("nan"), "is nan; give a finite number"),
        (float("-inf"), "is -inf"),
        (torch.tensor(float("inf")), "is inf"),
        (10**400, "is 1000"),
        ("3", "is a str; give a finite number"),
        (None, "is a NoneType"),
        (3j, "is a complex"),
        ([3], "is a list"),
        (torch.zeros(2), "raised RuntimeError: "),
    ],
)
def test_what_is_no_number_is_refused(found: Any, told: str) -> None:
    def weigh(item: Any) -> Any:
        return found if item else 1

    with pytest.raises(UsageError, match=f"the cost weigh of microbatch 2 {told}") as error:
        resolve_cost(weigh).weigh([False, False, True])
    assert len(str(error.value)) < 200


def test_a_function_that_fails_is_told() -> None:
    class Heavy:
        def __call__(self, item: Any) -> float:
            raise ValueError("no\nsuch luck")

    with pytest.raises(
        UsageError,
        match="the cost Heavy of microbatch 0 raised ValueError: no; correct the function",
    ):
        resolve_cost(Heavy()).weigh([TEXT])


def test_a_function_of_a_module_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scales.py").write_text("def weigh(item):\n    return 7\n\nweight = 3\n")
    assert resolve_cost("scales:weigh").weigh([TEXT]) == [7]
    assert resolve_cost("operator:length_hint").weigh([[1, 2]]) == [2]
    Path("ends.py").write_text("import sys\n\nsys.exit('usage: ends FILE')\n")
    Path("fails.py").write_text("def weigh(item:\n")
    for cost, told in (
        ("weigh", "'weigh' is not a microbatch's cost; choose work, tokens, patches, or MODULE:"),
        ("scales:weigh:item", "is not a microbatch's cost"),
        ("scales.py", "'scales.py' is not a microbatch's cost"),
        ("scales:height", "scales has no function 'height'; name one that takes an item"),
        ("scales:weight", "scales has no function 'weight'"),
        ("none:weigh", "cannot be imported: ModuleNotFoundError: No module named 'none'"),
        (".:weigh", "cannot be imported: "),
        ("ends:weigh", "cannot be imported: SystemExit: usage: ends FILE"),
        ("fails:weigh", "cannot be imported: SyntaxError: "),
    ):
        with pytest.raises(UsageError, match=re.escape(told)) as error:
            resolve_cost(cost)
        assert "\n" not in str(error.value)
