"""The reports of a run: whole lines, none left out, whatever the disk does."""

import errno
import logging
import shutil
from pathlib import Path

import pytest

from rrfp.errors import RrfpError
from rrfp.trace import safe_files as report_file
from rrfp.trace.safe_files import ReportFile, WholeLines


class FullDisk:
    """A disk that takes half of what is written, and then nothing, while it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        own = WholeLines.write

        def write(file: WholeLines, octets: bytes) -> None:
            if self.is_full:
                own(file, octets[: len(octets) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
            own(file, octets)

        monkeypatch.setattr(WholeLines, "write", write)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(monkeypatch)


def test_what_a_full_disk_does_not_take_is_written_when_it_has_room(
    tmp_path: Path, disk: FullDisk, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    file = ReportFile(path)
    file.write("0\n")
    disk.is_full = True
    for step in range(1, 4):
        file.write(f"{step}\n")
        assert path.read_text() == "0\n"
    copy = tmp_path / "copy"
    file.copy_to(copy)
    assert copy.read_text() == "0\n1\n2\n3\n"
    disk.is_full = False
    file.write("4\n")
    file.close()
    assert path.read_text() == "0\n1\n2\n3\n4\n"
    assert [record.message for record in caplog.records] == [
        f"{path} cannot be written (No space left on device); its lines wait in memory until there "
        "is room, and the training goes on",
        f"{path} is written again; none of its lines is missing",
    ]


def test_a_disk_that_stays_full_is_tried_once_more_at_the_end(
    tmp_path: Path, disk: FullDisk, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    for is_full in (False, True):
        disk.is_full = False
        file = ReportFile(path)
        disk.is_full = True
        file.write("1\n")
        file.write("2\n")
        disk.is_full = is_full
        caplog.clear()
        file.close()
        file.close()
        assert path.read_text() == "1\n2\n"
    assert [record.message for record in caplog.records] == [
        f"{path} cannot be written (No space left on device): it ends here, its last 2 lines are "
        "lost, and the training goes on"
    ]


def test_what_waits_is_bounded_and_leaves_no_gap(
    tmp_path: Path,
    disk: FullDisk,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(report_file, "MOST_WAITING_BYTES", 5)
    path = tmp_path / "metrics.jsonl"
    file = ReportFile(path)
    file.write("0\n")
    disk.is_full = True
    for step in range(1, 4):
        file.write(f"{step}\n")
    disk.is_full = False
    file.write("4\n")
    file.close()
    assert path.read_text() == "0\n"
    assert "its last 3 lines are lost" in caplog.text


def test_a_directory_that_is_removed_is_told_and_its_lines_are_kept_for_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    file = ReportFile(directory / "metrics.jsonl")
    with caplog.at_level(logging.WARNING):
        file.write("0\n")
        shutil.rmtree(directory)
        file.write("1\n")
        file.write("2\n")
    file.copy_to(tmp_path / "copy")
    file.close()
    assert (tmp_path / "copy").read_text() == "0\n1\n2\n"
    assert not directory.exists()
    (warning,) = caplog.records
    assert warning.message == (
        f"{directory / 'metrics.jsonl'} is gone (it was removed or moved away): its lines will not "
        "be found, and the training goes on"
    )


def test_a_run_of_which_nothing_is_left_ends(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    file = ReportFile(directory / "metrics.jsonl", is_needed=True)
    file.write("0\n")
    shutil.rmtree(directory)
    with pytest.raises(RrfpError, match=rf"the run's directory {directory} was removed"):
        file.write("1\n")
