"""What a killed launcher leaves, the next one removes, and nothing of anybody who lives."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rrfp.train.launch.processes import own_directory

HOLD = """
from rrfp.train.launch.processes import own_directory
with own_directory() as path:
    (path / "store").touch()
    print(path, flush=True)
    input()
"""


def test_an_abandoned_directory_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        try:
            assert (theirs / "store").exists()
            with own_directory() as ours:
                assert {*tmp_path.iterdir()} == {ours, theirs}
                assert ours.stat().st_mode & 0o777 == 0o700
            assert [*tmp_path.iterdir()] == [theirs]
        finally:
            other.kill()
        other.wait()
        assert (theirs / "store").exists()
        # Neither what has another name, nor what a link leads to, is a launcher's.
        (tmp_path / "rrfp-other").mkdir()
        (tmp_path / "rrfp-run-link").symlink_to(tmp_path / "rrfp-other")
        with own_directory():
            assert not theirs.exists()
            assert (tmp_path / "rrfp-other").exists()
