"""What ranks warn of reaches their launcher, whole and in order, and holds up nobody."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rrfp.train.launch.failure import hearing

RANK = """
import logging, sys
from rrfp.train.launch.failure import warn_launcher
logging.basicConfig(format="%(message)s")
warn_launcher(int(sys.argv[1]))
log = logging.getLogger("rrfp.somewhere")
for number in range(200):
    log.warning("warning %d\\nof several lines", number)
log.error("an error, which is reported otherwise")
logging.getLogger("torch").warning("not ours")
"""


def test_each_warning_of_a_rank_is_heard_once(tmp_path: Path) -> None:
    heard: list[str] = []
    with hearing(tmp_path, heard.append) as environment:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(rank)],
                env={**os.environ, **environment},
                stderr=subprocess.DEVNULL,
            )
            for rank in range(2)
        ]
        for rank in ranks:
            assert rank.wait(timeout=60) == 0
    for number in range(2):
        own = [each for each in heard if each.startswith(f"rank {number}: ")]
        assert own == [f"rank {number}: warning {each} of several lines" for each in range(200)]
    assert len(heard) == 400


def test_a_launcher_that_is_gone_holds_up_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rrfp.train.launch import failure as warnings

    with hearing(tmp_path, lambda _: None) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        log = logging.getLogger("rrfp")
        before = [*log.handlers]
        warnings.warn_launcher(0)
        (handler,) = [each for each in log.handlers if each not in before]
    try:
        for _ in range(10_000):
            log.warning("x" * 100)
    finally:
        log.removeHandler(handler)
