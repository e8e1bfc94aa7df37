"""Runs of two hosts: they make one run, with or without a shared directory, or end as one."""

import json
import logging
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path

import pytest
from torch.distributed import HashStore

from rrfp.errors import RrfpError
from rrfp.runtime.net import tls
from rrfp.trace.outcome import FaultOrigin, FoundBy, read_ending
from rrfp.trace.perfetto.reader import read_trace
from rrfp.trace.run_dir import RunDir
from rrfp.trace.spill import is_being_written
from rrfp.train.launch.hosts import gathering
from rrfp.train.launch.hosts.host_status import HostHeartbeat
from rrfp.train.launch.hosts.joining import JoinedHosts
from rrfp.train.launch.store import StoreClient
from rrfp.train.settings import TrainSettings
from tests.runtime.link_pairs import needs_nixl, needs_tls
from tests.security.sandbox import refusing
from tests.security.wire import Wire
from tests.train.trained import (
    ENDLESS,
    TINY,
    Training,
    assert_opens,
    await_no_process,
    free_port,
    is_listening,
    pid_of,
    read_metrics,
    rrfp,
    rrfp_here,
)

pytestmark = pytest.mark.timeout(400)


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
"""A prefix that makes a launcher a separate host: its ranks share no files with others."""


@cache
def may_have_own_mounts() -> bool:
    return (
        shutil.which("unshare") is not None
        and subprocess.run([*OWN_MOUNTS, "true"], capture_output=True).returncode == 0
    )


@pytest.fixture(scope="module")
def hosts_apart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The directories of a run of two hosts that have one each, and encrypt their links where that
    can be tried here. Host 1's exists, with an unrelated file in it."""
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
        assert "host 1 is silent; the trace lacks the rest of ranks 2, 3" in err
        assert re.match(r"rrfp: host 1 \(.*\) was silent for \d+ s towards", err.splitlines()[-1])
        assert "c10d" not in err
        await_no_process(other, timeout_s=10)
    shown = rrfp_here(tmp_path, "analyze", "bubbles", str(run), "--format", "json")
    assert [rank["rank"] for rank in json.loads(shown.stdout)["ranks"]] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_whose_launcher_is_stopped_is_named(lost: int, tmp_path: Path) -> None:
    """The ranks of that host would continue."""
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
        own = rf"rrfp: host {lost} \(.*\) stood still itself for \d+ s, and has received "
        assert re.match(own, err.splitlines()[-1]), err
        await_no_process(run, timeout_s=10)
        assert_opens(run)


@pytest.mark.slow
def test_ctrl_c_on_one_host_is_reported_on_the_other(tmp_path: Path) -> None:
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
        assert ending.culprit == FaultOrigin(FoundBy.LAUNCHER, 3)
        await_no_process(run, timeout_s=10)
        assert_opens(run)


def test_a_port_in_use_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Training(tmp_path / "run", *hosts_flags(0, port)) as training:
            code, _, err = training.ended()
    assert code == 2
    assert f"the hosts cannot connect at 127.0.0.1:{port} (" in err.splitlines()[-1]


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
    assert (code, err.splitlines()[-1]) == (130, "rrfp: interrupted")


# Records of other hosts: what host 0 gathers, and what it says of those that do not send.


PREFIX = "rrfp/gathered"


class Hosts:
    """Hosts 0 and 1 of four ranks, each with a directory."""

    def __init__(self, directory: Path) -> None:
        self.store = HashStore()
        self.silence_s = 20.0
        self.runs = RunDir(directory / "0"), RunDir(directory / "1")
        for run in self.runs:
            run.path.mkdir()

    def be(self, host: int, work: Callable[[], object]) -> None:
        settings = TrainSettings(
            pp=4, nnodes=2, node_rank=host, rdzv_endpoint="127.0.0.1:1", out=self.runs[host].path
        )

        with self.beating(host) as heartbeat:
            joined = JoinedHosts({}, heartbeat, self.connect)
            with gathering.gathering_records(joined, settings, self.runs[host]):
                work()

    def connect(self, within_s: float = 20.0) -> StoreClient:
        return StoreClient(self.store, "here", within_s)

    @contextmanager
    def beating(self, host: int) -> Iterator[HostHeartbeat]:
        heartbeat = HostHeartbeat(self.connect, host, 2, self.silence_s)
        heartbeat.start()
        try:
            yield heartbeat
        finally:
            heartbeat.close()

    def both(self, work_of_1: Callable[[], object], work_of_0: Callable[[], object]) -> None:
        with ThreadPoolExecutor() as pool:
            for part in (pool.submit(self.be, 0, work_of_0), pool.submit(self.be, 1, work_of_1)):
                part.result(timeout=30)

    def put(self, host: int, name: str, data: bytes) -> None:
        path = self.runs[host].path / name
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as file:
            file.write(data)


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


def nothing() -> None:
    pass


def test_files_grow_on_host_0_while_they_are_written(hosts: Hosts) -> None:
    records, ring, log = "records/rank-2.jsonl", "records/rank-2.ring", "logs/rank-3.log"
    big = bytes(range(256)) * 8000
    was_seen, is_written = threading.Event(), threading.Event()

    def write() -> None:
        hosts.put(1, records, b"head\n")
        hosts.put(1, ring, b"what it did first, ")
        is_written.set()
        assert was_seen.wait(20)
        hosts.put(1, records, big)
        (hosts.runs[1].path / ring).write_bytes(b"what it did last")
        hosts.put(1, log, b"last words")
        hosts.put(1, "logs/rank-2.log", b"")

    def watch() -> None:
        assert is_written.wait(20)
        path = hosts.runs[0].path / records
        while not (path.exists() and path.read_bytes() == b"head\n"):
            threading.Event().wait(0.01)
        # As if its rank wrote here.
        assert is_being_written(path)
        was_seen.set()

    hosts.both(write, watch)
    path = hosts.runs[0].path
    assert (path / records).read_bytes() == b"head\n" + big
    assert not is_being_written(path / records)
    assert (path / ring).read_bytes() == b"what it did last"
    assert (path / log).read_bytes() == b"last words"
    assert (path / "logs/rank-2.log").read_bytes() == b""
    # Records are on host 0 now; logs stay where users look for them.
    assert not (hosts.runs[1].path / "records").exists()
    assert (hosts.runs[1].path / log).exists()


def test_of_earlier_sessions_nothing_comes_again(hosts: Hosts) -> None:
    for host in (0, 1):
        hosts.put(host, "logs/rank-2.log", b"first ")
    hosts.put(1, "records/rank-2.jsonl", b"left by a host that was lost")

    def write() -> None:
        hosts.put(1, "logs/rank-2.log", b"second")
        hosts.put(1, "records-2/rank-2.jsonl", b"new")
        hosts.put(1, "records-2/rank-0.jsonl", b"of a rank of another host")

    hosts.both(write, nothing)
    path = hosts.runs[0].path
    assert (path / "logs/rank-2.log").read_bytes() == b"first second"
    assert (path / "records-2/rank-2.jsonl").read_bytes() == b"new"
    assert {each.name for each in path.iterdir()} == {"logs", "records-2"}
    assert (hosts.runs[1].path / "records/rank-2.jsonl").exists()


def test_hosts_that_share_the_directory_send_nothing(hosts: Hosts) -> None:
    hosts.runs = hosts.runs[0], hosts.runs[0]
    hosts.both(lambda: hosts.put(1, "records/rank-2.jsonl", b"mine"), nothing)
    assert (hosts.runs[0].path / "records/rank-2.jsonl").read_bytes() == b"mine"
    assert not hosts.store.check([f"{PREFIX}/1/0"])


@pytest.mark.parametrize("planted", ["not JSON", "[true]", '[1, ""]', '"../x"', "\xff"])
@pytest.mark.parametrize("key", ["token", "answer/1"])
def test_an_invalid_answer_about_a_directory_is_an_error(
    hosts: Hosts, key: str, planted: str
) -> None:
    hosts.store.set(f"{PREFIX}/{key}", planted)
    with (
        hosts.beating(0) if key == "token" else nullcontext(),
        pytest.raises(RrfpError, match=f"the value of '{PREFIX}/{key}' at here is not what host"),
    ):
        hosts.be(1 if key == "token" else 0, nothing)


def test_a_flight_record_may_come_before_its_ranks_records(hosts: Hosts) -> None:
    hosts.store.set(f"{PREFIX}/answer/1", '[false, ""]')
    for number, piece in enumerate(
        ("records/rank-2.ring\nring", "records/rank-2.jsonl\nlines", "")
    ):
        hosts.store.set(f"{PREFIX}/1/{number}", piece)
    hosts.be(0, nothing)
    for name, data in (("ring", b"ring"), ("jsonl", b"lines")):
        assert (hosts.runs[0].path / f"records/rank-2.{name}").read_bytes() == data


@pytest.mark.parametrize(
    "name", ["../stolen", "records/rank-1.jsonl", "/etc/passwd", "records/rank-2.jsonl/x", "\xff"]
)
def test_a_file_that_is_none_of_a_hosts_own_is_not_written(
    hosts: Hosts, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    hosts.store.set(f"{PREFIX}/answer/1", '[false, ""]')
    hosts.store.set(f"{PREFIX}/1/0", f"{name}\ndata")
    hosts.be(0, nothing)
    assert [*hosts.runs[0].path.iterdir()] == []
    assert [*hosts.runs[0].path.parent.iterdir()] == [run.path for run in hosts.runs]
    assert "host 1 sent a file" in caplog.text
    assert "the trace lacks the rest of ranks 2, 3" in caplog.text


def test_a_host_that_sends_nothing_is_named(hosts: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    hosts.silence_s = 0.5
    hosts.store.set(f"{PREFIX}/answer/1", '[false, ""]')
    hosts.store.set(f"{PREFIX}/1/0", "records/rank-2.jsonl\nwhat came")
    hosts.be(0, nothing)
    assert "host 1 sent no records for 0.5 s; the trace lacks the rest of ranks 2, 3" in caplog.text
    assert (hosts.runs[0].path / "records/rank-2.jsonl").read_bytes() == b"what came"


def test_a_silent_host_is_not_waited_for_again(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    """A call that never returns does not keep others from opening the records either."""
    hosts.silence_s = 1.0
    hosts.store.set(f"{PREFIX}/answer/1", '[false, ""]')
    hosts.store.set(f"{PREFIX}/1/0", "records/rank-2.jsonl\nwhat came")
    hosts.store.set("rrfp/pulse/1", '[1, "here", "node1", "", null]')
    spill = hosts.runs[0].path / "records/rank-2.jsonl"

    def work() -> None:
        while not spill.exists():
            time.sleep(0.01)
        assert is_being_written(spill)
        time.sleep(1.5)  # as long as ranks take to notice

    hosts.be(0, work)
    assert "host 1 is silent; the trace lacks the rest" in caplog.text
    assert not is_being_written(spill)


def test_what_host_0_does_not_take_stays(
    hosts: Hosts, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "_PIECE_BYTES", 1)
    monkeypatch.setattr(gathering, "_MAX_IN_FLIGHT", 3)
    hosts.silence_s = 3.0
    hosts.store.set(f"{PREFIX}/token", '"0123abcd"')
    with hosts.beating(0):
        hosts.be(1, lambda: hosts.put(1, "records/rank-2.jsonl", b"mine"))
    (told,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert told.startswith("host 0 took no records for 3 s; what ranks 2, 3 recorded stays in ")
    assert (hosts.runs[1].path / "records/rank-2.jsonl").read_bytes() == b"mine"
    keys = [f"{PREFIX}/1/{number}" for number in range(4)]
    assert [hosts.store.check([key]) for key in keys] == [True, True, True, False]


# Two hosts as two network namespaces with mounts of their own. The wire between them takes 5 ms,
# loses a packet in a hundred, is cut for a while, and is cut for good.


_PORT = 29400
LOST_S = 45.0
"""How long hosts may take to end that lost each other: 30 s, and more on a busy machine."""
LARGE = ("--micro-batch-size=1024",)
"""Activations then have 4 MiB, enough for a plane of the CPU's."""


@contextmanager
def on_two_networks(disk: Path, *flags: str) -> Iterator[tuple[Wire, Training, Training]]:
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
@pytest.mark.slow
def test_they_make_one_run_that_learns_the_same(tmp_path: Path, flag: str) -> None:
    with on_two_networks(tmp_path / "disk", "--steps=3", *LARGE, flag) as hosts:
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
@pytest.mark.slow
def test_a_wire_that_comes_back_is_waited_for(tmp_path: Path, flag: str) -> None:
    with on_two_networks(tmp_path / "disk", "--steps=8", *LARGE, flag) as (wire, first, second):
        first.await_steps(2)
        wire.cut()
        # TCP alone would try again after some 15 s, and hosts then need seconds to hear each other.
        time.sleep(10)
        assert first.num_steps < 8
        wire.restore()
        code, _, err = first.ended()
        assert code == 0, err
        assert second.ended()[:2] == (0, "")
        check_run(first.run, 8)


@flags
@pytest.mark.slow
def test_a_wire_that_stays_cut_ends_both(tmp_path: Path, flag: str) -> None:
    with on_two_networks(tmp_path / "disk", *ENDLESS, *LARGE, flag) as hosts:
        wire, first, second = hosts
        first.await_steps(3)
        wire.cut()
        check_both_name_the_wire(first, second)
        tasks = [rank.tasks for rank in read_trace(first.run / "trace.pftrace").ranks]
    assert [len(each) > 0 for each in tasks] == [True] * 4


@flags
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_on_both_hosts(tmp_path: Path, flag: str, rank: int) -> None:
    """Ranks 1 and 2 are the ends of the wire."""
    with on_two_networks(tmp_path / "disk", *ENDLESS, *LARGE, flag) as (_, first, second):
        first.await_steps(2)
        time.sleep(random.Random(f"{flag} {rank}").uniform(0, 1))
        os.kill(pid_of(first.run, rank), signal.SIGKILL)
        own, other = (first, second) if rank == 1 else (second, first)
        ends = [each.ended(timeout_s=30) for each in (own, other)]
        await_no_process(first.run, timeout_s=10)
    for code, _, err in ends:
        assert code == 1
        assert re.search(rf"rank {rank} \(pid \d+\) was killed", err.splitlines()[-1]), err


@pytest.mark.slow
def test_a_wire_that_is_cut_while_ranks_start_ends_both(tmp_path: Path) -> None:
    with on_two_networks(tmp_path / "disk", *ENDLESS) as (wire, first, second):
        for rank in range(4):
            first.await_start(rank)
        wire.cut()
        check_both_name_the_wire(first, second)


def check_both_name_the_wire(first: Training, second: Training) -> None:
    """Soon, and nobody waits again for what cannot come."""
    ends = [each.ended(timeout_s=LOST_S) for each in (first, second)]
    await_no_process(first.run, timeout_s=10)
    assert "host 1 is silent; the trace lacks the rest of ranks 2, 3" in ends[0][2]
    assert "host 0 is silent; what ranks 2, 3 recorded stays in" in ends[1][2]
    for host, (code, _, err) in enumerate(ends):
        assert code == 1
        words = rf"rrfp: host {1 - host} \(.*\) was silent for \d+ s towards host {host} \(.*\)"
        assert re.match(words, err.splitlines()[-1]), err
