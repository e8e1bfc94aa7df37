"""What a terminal shows of work under way, and that nothing else is shown it."""

import io
import sys
import time

import pytest

from rrfp.cli import progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stderr", "patience_s", "is_told"),
    [(_Terminal(), 0.0, True), (_Terminal(), 60.0, False), (io.StringIO(), 0.0, False)],
)
def test_a_terminal_is_told_of_work_that_takes_long(
    stderr: io.StringIO, patience_s: float, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(progress, "_PATIENCE_S", patience_s)
    monkeypatch.setenv("TERM", "xterm")
    begin_s = time.monotonic()
    with progress.working("Reading the trace"):
        while is_told and "Reading the trace" not in stderr.getvalue():
            assert time.monotonic() < begin_s + 20
            time.sleep(0.01)
    assert ("Reading the trace" in stderr.getvalue()) is is_told
    assert time.monotonic() < begin_s + 30  # it does not wait for its patience to end
