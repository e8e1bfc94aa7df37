"""Two hosts as two network namespaces with mounts of their own. The wire between them takes 5 ms,
loses a packet in a hundred, is cut for a while, and is cut for good."""

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rrfp.trace.perfetto.reader import read_trace
from tests.link_pairs import needs_nixl, needs_tls
from tests.trained import (
    ENDLESS,
    TINY,
    Training,
    await_no_process,
    pid_of,
    read_metrics,
    rrfp,
    rrfp_here,
)
from tests.wire import Wire

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

_PORT = 29400
LOST_S = 45.0
"""How long hosts may take to end that lost each other: 30 s, and more on a busy machine."""
LARGE = ("--micro-batch-size=1024",)
"""Activations then have 4 MiB, enough for a plane of the CPU's."""


@contextmanager
def two_hosts(disk: Path, *flags: str) -> Iterator[tuple[Wire, Training, Training]]:
    """A run on both, at one path, which is another directory on each."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command to make a network with")
    try:
        wire = Wire(f"rrfp-{os.getpid()}", delay_s=0.005, loss=0.01)
    except OSError as error:
        pytest.skip(f"this process may not make a network: {error}")
    disk.mkdir()
    run = disk / "run"
    hosts = ["--nnodes", "2", "--rdzv-endpoint", f"{Wire.ADDRESS}:{_PORT}", "--node-rank"]
    with (
        wire,
        Training(run, *flags, *hosts, "0", within=wire.within(0)) as first,
        Training(run, *flags, *hosts, "1", within=wire.within(1, own=disk)) as second,
    ):
        yield wire, first, second


def check_run(run: Path, num_steps: int) -> None:
    """All steps are there, and the trace has the records of all ranks whole."""
    assert len(read_metrics(run)) == num_steps
    checked = rrfp_here(run.parent, "trace", "check", str(run))
    assert checked.returncode == 0, checked.stdout
    ranks = read_trace(run / "trace.pftrace").ranks
    assert [{task.step for task in rank.tasks} for rank in ranks] == [{*range(num_steps)}] * 4


flags = pytest.mark.parametrize(
    "flag",
    [
        "--transport=auto",
        pytest.param("--transport=nixl", marks=needs_nixl),
        pytest.param("--tls", marks=needs_tls),
    ],
)


@flags
def test_they_make_one_run_that_learns_the_same(tmp_path: Path, flag: str) -> None:
    with two_hosts(tmp_path / "disk", "--steps=3", *LARGE, flag) as hosts:
        _, first, second = hosts
        code, _, err = first.ended()
        assert code == 0, err
        assert second.ended()[:2] == (0, "")
        check_run(first.run, 3)
        between = {
            send.plane
            for rank in read_trace(first.run / "trace.pftrace").ranks
            for send in rank.sends
            if {rank.info.rank, send.peer} == {1, 2}
        }
        assert between == {"nixl" if flag.endswith("nixl") else "inline"}
        there = rrfp(tmp_path, "train", "--steps=3", "--out=one", *TINY, *LARGE)
    assert there.returncode == 0
    losses = [[line["loss"] for line in read_metrics(run)] for run in (first.run, tmp_path / "one")]
    assert losses[0] == losses[1]


@flags
def test_a_wire_that_comes_back_is_waited_for(tmp_path: Path, flag: str) -> None:
    with two_hosts(tmp_path / "disk", "--steps=8", *LARGE, flag) as (wire, first, second):
        first.await_steps(2)
        wire.cut()
        # TCP alone would try again after some 15 s, and hosts then need seconds to hear each other.
        time.sleep(10)
        assert first.num_steps < 8
        wire.mend()
        code, _, err = first.ended()
        assert code == 0, err
        assert second.ended()[:2] == (0, "")
        check_run(first.run, 8)


@flags
def test_a_wire_that_stays_cut_ends_both(tmp_path: Path, flag: str) -> None:
    with two_hosts(tmp_path / "disk", *ENDLESS, *LARGE, flag) as hosts:
        wire, first, second = hosts
        first.await_steps(3)
        wire.cut()
        check_both_tell_the_wire(first, second)
        tasks = [rank.tasks for rank in read_trace(first.run / "trace.pftrace").ranks]
    assert [len(each) > 0 for each in tasks] == [True] * 4


@flags
@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_is_killed_is_named_on_both_hosts(tmp_path: Path, flag: str, rank: int) -> None:
    """Ranks 1 and 2 are the ends of the wire."""
    with two_hosts(tmp_path / "disk", *ENDLESS, *LARGE, flag) as (_, first, second):
        first.await_steps(2)
        time.sleep(random.Random(f"{flag} {rank}").uniform(0, 1))
        os.kill(pid_of(first.run, rank), signal.SIGKILL)
        own, other = (first, second) if rank == 1 else (second, first)
        ends = [each.ended(timeout_s=30) for each in (own, other)]
        await_no_process(first.run, timeout_s=10)
    for code, _, err in ends:
        assert code == 1
        assert re.search(rf"rank {rank} \(pid \d+\) was killed", err.splitlines()[-1]), err


def test_a_wire_that_is_cut_while_ranks_start_ends_both(tmp_path: Path) -> None:
    with two_hosts(tmp_path / "disk", *ENDLESS) as (wire, first, second):
        for rank in range(4):
            first.await_start(rank)
        wire.cut()
        check_both_tell_the_wire(first, second)


def check_both_tell_the_wire(first: Training, second: Training) -> None:
    """Soon, and nobody waits again for what cannot come."""
    ends = [each.ended(timeout_s=LOST_S) for each in (first, second)]
    await_no_process(first.run, timeout_s=10)
    assert "host 1 is not heard any more; the trace lacks the rest of ranks 2, 3" in ends[0][2]
    assert "host 0 is not heard any more; what ranks 2, 3 recorded stays in" in ends[1][2]
    for host, (code, _, err) in enumerate(ends):
        assert code == 1
        words = rf"rrfp: host {1 - host} \(.*\) was silent for \d+ s towards host {host} \(.*\)"
        assert re.match(words, err.splitlines()[-1]), err
