"""A question to a process of its own: answered, or refused with the reason, and nothing is left."""

import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

from rrfp.runtime.isolated_call import NoAnswerError, probe

LIMIT_S = 60.0


def echo(*words: Any) -> Any:
    os.write(1, b"what libraries print {")
    return words


def raise_it() -> NoReturn:
    raise ValueError("no such thing\nand a long story")


def crash() -> NoReturn:
    sys.stderr.write("a last word")
    os.abort()


def leave() -> NoReturn:
    sys.exit(3)


def hang(started: str) -> None:
    child = os.fork()
    if child:
        Path(started).write_text(str(child))
    time.sleep(LIMIT_S)


def test_what_is_printed_is_no_answer() -> None:
    assert probe(echo, "a", [1, None], limit_s=LIMIT_S) == ["a", [1, None]]


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        (raise_it, "ValueError: no such thing"),
        (crash, "it was killed: Aborted"),
        (leave, "no reason given"),
    ],
)
def test_a_failure_is_told_in_a_line(question: Any, reason: str) -> None:
    with pytest.raises(NoAnswerError) as refused:
        probe(question, limit_s=LIMIT_S)
    assert str(refused.value) == reason


def close_nothing() -> None:
    os.close(987)


def test_what_the_system_refused_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        NoAnswerError, match=r"at `os\.close\(987\)` \(test_probe\.py, line "
    ) as raised:
        probe(close_nothing, limit_s=LIMIT_S)
    assert raised.value.raised == "OSError"

    def refuse(*_: object, **__: object) -> NoReturn:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refuse)
    with pytest.raises(
        NoAnswerError, match=r"^no process can be started for it: BlockingIOError: "
    ):
        probe(echo, limit_s=LIMIT_S)


def test_what_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    with pytest.raises(NoAnswerError, match=r"^it did not answer within 5 s$"):
        probe(hang, str(started), limit_s=5)
    child = Path("/proc", started.read_text())
    deadline_s = time.monotonic() + LIMIT_S
    while child.exists() and "Z" not in (child / "stat").read_text().rpartition(")")[2].split()[:1]:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
