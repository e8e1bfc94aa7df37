import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.schedule.tasks import Kind, Task, format_task, parse_task

tasks = st.builds(
    Task,
    st.integers(min_value=0, max_value=10**6),
    st.sampled_from(Kind),
    st.integers(min_value=0, max_value=10**6),
)


@pytest.mark.parametrize(
    ("text", "task", "split"),
    [
        ("2F0", Task(2, Kind.F, 0), False),
        ("0B31", Task(0, Kind.B, 31), False),
        ("12I3", Task(12, Kind.B, 3), True),
        ("7W10", Task(7, Kind.W, 10), True),
    ],
)
def test_letters_are_those_of_torch(text: str, task: Task, split: bool) -> None:
    assert parse_task(text) == (task, split)
    assert format_task(task, split=split) == text


@given(tasks, st.booleans())
def test_what_is_written_is_read_back(task: Task, split: bool) -> None:
    read, is_split = parse_task(format_task(task, split=split))
    assert read == task
    assert is_split == (task.kind is Kind.W or (split and task.kind is Kind.B))


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "2f0", "-1F0", "2F0 ", "2F0.1", "2FF0", "2F-1", "2F0\n", "two"]
)
def test_anything_else_is_no_task(text: str) -> None:
    with pytest.raises(ValueError, match="is not a task such as 2F0"):
        parse_task(text)


def test_a_task_prints_as_its_whole_backward() -> None:
    assert str(Task(1, Kind.B, 4)) == "1B4"


def test_a_number_too_long_to_read_is_no_task() -> None:
    with pytest.raises(ValueError, match=r"^'9{30}\.\.\.' is not a task such as 2F0"):
        parse_task("9" * 5000 + "F0")
