"""A file that is written whole or not at all."""

from pathlib import Path

import pytest

from rrfp.trace.safe_files import open_whole


def test_a_reader_finds_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    with open_whole(path) as file:
        file.write(b"ne")
        file.flush()
        assert path.read_text() == "old"
        file.write(b"w")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")

    def fail() -> None:
        with open_whole(path) as file:
            file.write(b"new")
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
