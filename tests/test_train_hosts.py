"""Runs of two hosts: they make one run, with or without a shared directory, or end as one."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from rrfp.runtime.net import tls
from rrfp.trace.outcome import Culprit, FoundBy, read_ending
from rrfp.trace.run_dir import RunDir
from tests.link_pairs import needs_tls
from tests.sandbox import refusing
from tests.trained import (
    ENDLESS,
    Training,
    assert_opens,
    await_no_process,
    free_port,
    is_listening,
    pid_of,
    read_metrics,
    rrfp_here,
)

pytestmark = pytest.mark.timeout(200)


def hosts_flags(host: int, port: int) -> list[str]:
    endpoint = f"127.0.0.1:{port}"
    return ["--nnodes", "2", "--node-rank", str(host), "--rdzv-endpoint", endpoint]


@contextmanager
def on_two_hosts(
    run: Path, *flags: str, other: Path | None = None, within: Sequence[str] = ()
) -> Iterator[tuple[Training, Training]]:
    """A training on two hosts, of which the second runs `within` a command and writes to `other`,
    if it has a directory of its own."""
    port = free_port()
    with (
        Training(run, *flags, *hosts_flags(0, port)) as first,
        Training(other or run, *flags, *hosts_flags(1, port), within=within) as second,
    ):
        yield first, second


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of two hosts, which share it."""
    run = tmp_path_factory.mktemp("two-hosts") / "run"
    with on_two_hosts(run, "--steps", "3") as (first, second):
        code, out, err = first.ended()
        assert code == 0, err
        assert "all " in out
        assert second.ended()[:2] == (0, "")
    return run


@pytest.mark.slow
def test_a_host_whose_kernel_permits_no_filter_takes_part(tmp_path: Path) -> None:
    with on_two_hosts(tmp_path / "run", "--steps=2", within=refusing("setsockopt")) as hosts:
        ended = [host.ended() for host in hosts]
    assert [code for code, *_ in ended] == [0, 0], ended
    told = "gloo's ports and those of the run's store accept any connection"
    assert ended[1][2].count(told) == 1


@pytest.mark.slow  # as those without a shared directory do
def test_two_hosts_make_one_run(two_hosts: Path, tmp_path: Path) -> None:
    assert len(read_metrics(two_hosts)) == 3
    assert rrfp_here(tmp_path, "trace", "check", str(two_hosts)).returncode == 0
    shown = rrfp_here(tmp_path, "analyze", "bubbles", str(two_hosts), "--format", "json")
    assert [rank["rank"] for rank in json.loads(shown.stdout)["ranks"]] == [0, 1, 2, 3]


OWN_MOUNTS = ("unshare", "--mount")
"""What makes a host of its own of a launcher on this machine: its ranks meet no others at files."""


@cache
def may_have_own_mounts() -> bool:
    return (
        shutil.which("unshare") is not None
        and subprocess.run([*OWN_MOUNTS, "true"], capture_output=True).returncode == 0
    )


@pytest.fixture(scope="module")
def hosts_apart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The directories of a run of two hosts that have one each, and encrypt their links where that
    can be tried here. Host 1's exists, with a file of somebody's own in it."""
    directory = tmp_path_factory.mktemp("hosts-apart")
    run, other = directory / "run", directory / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    flags = ["--steps", "3", *(["--tls"] if tls.is_installed() else [])]
    within = OWN_MOUNTS if may_have_own_mounts() else ()
    with on_two_hosts(run, *flags, other=other, within=within) as (first, second):
        code, _, err = first.ended()
        assert code == 0, err
        assert second.ended()[:2] == (0, "")
    return run, other


def test_hosts_without_a_shared_directory_make_one_run(
    hosts_apart: tuple[Path, Path], tmp_path: Path
) -> None:
    run, other = hosts_apart
    assert rrfp_here(tmp_path, "trace", "check", str(run)).returncode == 0
    shown = rrfp_here(tmp_path, "analyze", "bubbles", str(run), "--format", "json")
    assert [rank["rank"] for rank in json.loads(shown.stdout)["ranks"]] == [0, 1, 2, 3]
    assert not list(run.glob(".host-0-*"))
    logs = [f"logs/rank-{rank}.log" for rank in (2, 3)]
    for name in logs:
        assert (run / name).read_bytes() == (other / name).read_bytes()
    files = {str(path.relative_to(other)) for path in other.rglob("*") if path.is_file()}
    assert files == {"notes.txt", *logs}


@needs_tls
def test_links_between_hosts_are_encrypted(hosts_apart: tuple[Path, Path]) -> None:
    if not may_have_own_mounts():
        pytest.skip("this process may not make mounts of its own, as another host has")
    run, _ = hosts_apart
    links = json.loads((run / "run.json").read_text())["transport"]["links"]
    encrypted = {(link["from"], link["to"]) for link in links if link["encrypted"]}
    # Ranks 0 and 1 are on one host, 2 and 3 on the other.
    far = [(each["from"], each["to"]) for each in links if each["from"] // 2 != each["to"] // 2]
    assert encrypted == set(far) > {(1, 2)}


@pytest.mark.slow
@needs_tls
def test_encrypted_hosts_learn_the_same(two_hosts: Path, hosts_apart: tuple[Path, Path]) -> None:
    run, _ = hosts_apart
    assert [step["loss"] for step in read_metrics(run)] == [
        step["loss"] for step in read_metrics(two_hosts)
    ]
    plain = json.loads((two_hosts / "run.json").read_text())["transport"]["links"]
    assert not [link for link in plain if link["encrypted"]]


def test_another_run_in_the_directory_of_a_host_is_left_alone(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    other.mkdir()
    (other / "run.json").write_text("{}")
    with on_two_hosts(run, other=other) as (first, second):
        for host in (first, second):
            code, _, err = host.ended()
            assert code == 2
            assert "on host 1 holds another run" in err.splitlines()[-1]
    assert [*other.iterdir()] == [other / "run.json"]


@pytest.mark.slow
def test_what_a_host_sent_before_it_was_lost_is_in_the_trace(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    with on_two_hosts(run, *ENDLESS, other=other) as (first, second):
        first.await_steps(6)
        os.killpg(second.process.pid, signal.SIGKILL)
        code, _, err = first.ended(timeout_s=60)
        assert code == 1
        assert "host 1 is not heard any more; the trace lacks the rest of ranks 2, 3" in err
        assert re.match(r"rrfp: host 1 \(.*\) was silent for \d+ s towards", err.splitlines()[-1])
        assert "c10d" not in err
        await_no_process(other, timeout_s=10)
    shown = rrfp_here(tmp_path, "analyze", "bubbles", str(run), "--format", "json")
    assert [rank["rank"] for rank in json.loads(shown.stdout)["ranks"]] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_whose_launcher_is_stopped_is_named(lost: int, tmp_path: Path) -> None:
    """Its ranks would go on."""
    run = tmp_path / "run"
    with on_two_hosts(run, *ENDLESS) as (first, second):
        first.await_steps(2)
        stopped, other = (first, second) if lost == 0 else (second, first)
        os.kill(stopped.process.pid, signal.SIGSTOP)
        code, _, err = other.ended(timeout_s=60)
        assert code == 1
        words = rf"rrfp: host {lost} \(.*\) was silent for \d+ s towards host {1 - lost} \(.*\)"
        assert re.match(words, err.splitlines()[-1]), err
        os.kill(stopped.process.pid, signal.SIGCONT)
        code, _, err = stopped.ended(timeout_s=60)
        assert code == 1
        own = rf"rrfp: host {lost} \(.*\) stood still itself for \d+ s, and has not heard host "
        assert re.match(own, err.splitlines()[-1]), err
        await_no_process(run, timeout_s=10)
        assert_opens(run)


@pytest.mark.slow
def test_ctrl_c_on_one_host_is_told_on_the_other(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with on_two_hosts(run, *ENDLESS) as (first, second):
        first.await_steps(2)
        second.process.send_signal(signal.SIGINT)
        assert second.ended(timeout_s=30)[0] == 130
        code, _, err = first.ended(timeout_s=30)
        assert code == 1
        assert re.match(r"rrfp: host 1 \(.*\): it was stopped by a signal$", err.splitlines()[-1])
        await_no_process(run, timeout_s=10)
        assert_opens(run)


@pytest.mark.slow
def test_a_rank_killed_on_one_host_ends_both(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with on_two_hosts(run, *ENDLESS) as (first, second):
        first.await_steps(2)
        os.kill(pid_of(run, 3), signal.SIGKILL)
        code, _, err = second.ended(timeout_s=30)
        assert code == 1
        assert "rrfp: rank 3 (pid " in err
        code, _, err = first.ended(timeout_s=30)
        assert code == 1
        assert re.match(r"rrfp: host 1 \(.*\): rank 3 \(pid \d+\) was ki", err.splitlines()[-1])
        ending = read_ending(RunDir(run))
        assert ending is not None
        assert ending.culprit == Culprit(FoundBy.LAUNCHER, 3)
        await_no_process(run, timeout_s=10)
        assert_opens(run)


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Training(tmp_path / "run", *hosts_flags(0, port)) as training:
            code, _, err = training.ended()
    assert code == 2
    assert f"the hosts cannot meet at 127.0.0.1:{port} (" in err.splitlines()[-1]


@pytest.mark.parametrize("host", [0, 1])
def test_ctrl_c_ends_the_wait_for_another_host(tmp_path: Path, host: int) -> None:
    port = free_port()
    with Training(tmp_path / "run", *hosts_flags(host, port)) as training:
        if host == 0:
            training.await_that(lambda: is_listening(port), "port for the others")
        else:
            training.await_that(lambda: "joins host 0" in training.said(), "word of the wait")
        os.killpg(training.process.pid, signal.SIGINT)
        code, _, err = training.ended(timeout_s=10)
    assert code == 130
    assert err.splitlines()[-1] == "rrfp: interrupted"
