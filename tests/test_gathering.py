"""Records of other hosts: what host 0 gathers, and what it says of those that do not send."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from torch.distributed import HashStore

from rrfp.errors import RrfpError
from rrfp.trace.run_dir import RunDir
from rrfp.trace.spill import is_being_written
from rrfp.train.launch.hosts import gathering
from rrfp.train.launch.hosts.host_status import Pulse
from rrfp.train.launch.hosts.joining import Met
from rrfp.train.launch.hosts.timeouts import AnsweringStore
from rrfp.train.settings import TrainSettings

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

        with self.beating(host) as pulse:
            met = Met({}, pulse, self.connect)
            with gathering.gathering(met, settings, self.runs[host]):
                work()

    def connect(self, within_s: float = 20.0) -> AnsweringStore:
        return AnsweringStore(self.store, "here", within_s)

    @contextmanager
    def beating(self, host: int) -> Iterator[Pulse]:
        pulse = Pulse(self.connect, host, 2, self.silence_s)
        pulse.start()
        try:
            yield pulse
        finally:
            pulse.close()

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
def test_what_no_host_says_of_its_directory_is_told(hosts: Hosts, key: str, planted: str) -> None:
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
    """Nor does a call that never returns keep the records from whoever opens the run."""
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
    assert "host 1 is not heard any more; the trace lacks the rest" in caplog.text
    assert not is_being_written(spill)


def test_what_host_0_does_not_take_stays(hosts: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    hosts.silence_s = 3.0
    hosts.store.set(f"{PREFIX}/token", '"0123abcd"')
    with hosts.beating(0):
        hosts.be(1, lambda: hosts.put(1, "records/rank-2.jsonl", b"mine"))
    (told,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert told.startswith("host 0 took no records for 3 s; what ranks 2, 3 recorded stays in ")
    assert (hosts.runs[1].path / "records/rank-2.jsonl").read_bytes() == b"mine"
