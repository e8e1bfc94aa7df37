"""Strangers at every port of a run, from its start to its end: it trains on, bitwise the same, as
large as before, and executes nothing."""

import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from torch.distributed import FileStore, HashStore

from rrfp.errors import RrfpError
from rrfp.megatron.step_groups import Place, coupled_pipelines
from rrfp.runtime.device.interface import CPU
from rrfp.runtime.net.source_filter import accept_nobody, filter_refusal
from rrfp.runtime.net.transport import SocketTransport
from rrfp.runtime.protocols import Inbox
from rrfp.runtime.rendezvous import (
    Rendezvous,
    measure_clock_offset,
    publish_rank_info,
    wait_for_rank_infos,
)
from rrfp.runtime.stall import StallBoard, StallRow
from rrfp.trace.records import RankInfo
from rrfp.train.launch.private_network import NotPermittedError, created_network
from tests.runtime.test_connecting import needs_filter
from tests.security.exposed import Listener, descendants, listeners_of, read_store, store_of
from tests.security.stranger import NOBODY, Stranger
from tests.security.wire import Wire
from tests.train.trained import TINY, Training, read_metrics

# A stranger who can write to a run's store can end the run, and no more: nothing is executed.


pytestmark = pytest.mark.timeout(400)


class Command:
    """Pickled, it leaves a file where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.system, (f"touch {self.marker}",)


class PlantedStore(HashStore):
    """A store whose every reader of one key finds what a stranger left there."""

    def __init__(self, key: str | None = None, planted: bytes = b"") -> None:
        super().__init__()
        self._key = key
        self._planted = planted
        self.keys: set[str] = set()

    def set(self, key: str, value: str) -> None:
        self.keys.add(key)
        super().set(key, value)

    def get(self, key: str) -> bytes:
        return self._planted if key == self._key else super().get(key)

    def add(self, key: str, number: int) -> int:
        self.keys.add(key)
        return super().add(key, number)


def take_part(store: Any, rank: int, timeout_s: float) -> None:
    """All that a rank of two reads from its store."""
    own = RankInfo(rank, rank, 0, 0, (rank,), "host", 1)
    publish_rank_info(store, "rrfp/ranks", own, 2, CPU, timeout_s=timeout_s)
    wait_for_rank_infos(store, "rrfp/ranks", rank, 2, timeout_s=timeout_s)
    measure_clock_offset(store, "rrfp/clock", rank, ("a", "b"), timeout_s=timeout_s)
    coupled_pipelines(Place(rank, (0, 1), (rank,)), Rendezvous(store, "rrfp/p", rank, timeout_s))
    board = StallBoard(store, "rrfp/p", (0, 1))
    call = board.call(3)
    board.publish(3, call, StallRow(rank, rank, 1.0, "a", "b", "c", "d"))
    assert board.num_calls(3) >= 1
    board.rows(3, 1)
    for allow_unix in (True, False):
        transport = SocketTransport(
            rank,
            store,
            [1 - rank],
            [1 - rank],
            Inbox(),
            num_credits=1,
            prefix=f"rrfp/{allow_unix}",
            connect_s=timeout_s,
            allow_unix=allow_unix,
            address="127.0.0.1",
        )
        transport.open()
        transport.close(farewell=False)


def both_take_part(store: Any, timeout_s: float = 2) -> list[RrfpError | None]:
    def one(rank: int) -> RrfpError | None:
        try:
            take_part(store, rank, timeout_s)
        except RrfpError as error:
            return error
        return None

    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(one, (0, 1)))


def used_keys() -> list[str]:
    """One of each kind that ranks use, and that in which a failed one leaves word."""
    store = PlantedStore()
    assert both_take_part(store, timeout_s=60) == [None, None]
    later_rounds = {key for key in store.keys if "/ping/" in key or "/pong/" in key}
    return [*sorted(store.keys - later_rounds), "rrfp/clock/pong/1/7", "rrfp/p/failed"]


def test_what_is_planted_in_any_key_is_not_executed(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    planted = (pickle.dumps(Command(marker)), b'{"rank": "x"}', b"\xff\xfe")
    keys = used_keys()
    assert {"rrfp/ranks/info/1", "rrfp/True/address/0", "rrfp/p/stall/3/row/1"} <= set(keys)

    def plant(key: str, value: bytes) -> tuple[str, list[RrfpError | None]]:
        return key, both_take_part(PlantedStore(key, value))

    with ThreadPoolExecutor(8) as runs:
        found = list(
            runs.map(plant, [key for key in keys for _ in planted], list(planted) * len(keys))
        )
    assert not marker.exists()
    for _key, errors in found:
        for error in errors:
            assert error is None or "\n" not in str(error)
    ended = {key for key, errors in found if any(errors)}
    assert {"rrfp/ranks/info/1", "rrfp/True/address/0", "rrfp/p/place-in-groups/1"} <= ended
    # A row of a stall that cannot be read is passed over.
    for row in planted:
        store = PlantedStore("rrfp/p/stall/3/row/1", row)
        assert both_take_part(store, timeout_s=60) == [None, None]
    said = [str(error) for _, errors in found for error in errors if error is not None]
    assert any(
        "what rank 1 published as 'rrfp/ranks/info/1' cannot be read" in each for each in said
    )


class Planter:
    """Overwrites what ranks tell each other, as fast as they tell it."""

    def __init__(self, is_target: Callable[[str], bool], value: bytes) -> None:
        self._is_target = is_target
        self._value = value
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._plant)
        self.planted: set[str] = set()

    def __enter__(self) -> "Planter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _plant(self) -> None:
        while (path := self._store()) is None or not path.exists():
            if self._is_over.wait(0.01):
                return
        store = FileStore(str(path))
        while not self._is_over.wait(0.002) and path.exists():
            for key, value in read_store(path.read_bytes()).items():
                if self._is_target(key) and value != self._value:
                    store.set(key, self._value)  # type: ignore[arg-type]
                    self.planted.add(key)

    @staticmethod
    def _store() -> Path | None:
        found = (store_of(pid) for pid in descendants(os.getpid()))
        return next((path for path in found if path is not None), None)


@pytest.mark.parametrize(
    "part",
    ["/rrfp/", pytest.param("", marks=pytest.mark.slow)],
    ids=["ours", "torch's and gloo's too"],
)
def test_a_run_whose_store_is_full_of_pickles_executes_nothing(part: str, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    command = [sys.executable, "-m", "rrfp", "train", *TINY, "--pp=2", "--steps=2"]
    with Planter(lambda key: part in key, pickle.dumps(Command(marker))) as planter:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=380)
    assert planter.planted
    assert not marker.exists()
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1)
    if done.returncode == 1:  # else every rank had read what it needs before it was overwritten
        assert done.stderr.splitlines()[-1].startswith("rrfp: rank ")
        assert not part or "cannot be read" in done.stderr


_PORT = 29400
_VISITS = 10_000
_AT_ONCE = 1_000
_STEPS = ("--steps", "42")
_MOST_GROWTH_KB = 64 * 1024
_MOST_MORE_FILES = 32

_GATES = ("in step 0", "in step 40", "after the last step")
"""The stages at which a run waits until the stranger has visited every port."""
_END = "as it ends"
_HELD_UP = """
import os, sys, time
from pathlib import Path

if "rrfp.train.launch.rank_process" in sys.orig_argv:
    from rrfp.train.launch import rank_status

    enter = rank_status.enter

    def held_up(stage):
        enter(stage)
        gate = Path(os.environ["GATES"], stage)
        if stage in {gates} and not gate.exists():
            gate.with_name(stage + ", rank " + os.environ["RANK"]).touch()
        while stage in {gates} and not gate.exists():
            time.sleep(0.1)

    rank_status.enter = held_up
"""


@dataclass(slots=True)
class Siege:
    """Sends a stranger to every port of this process' descendants, until the `with` block ends. The
    run waits at each gate to give it time."""

    run: Path
    num_ranks: int
    stranger: Stranger | None = None
    """None only to measure, without gates."""
    planted: bytes = b""
    source: str = ""
    visits: int = _VISITS
    """How often he comes to each port before each gate is opened."""
    begins: Callable[[Self], bool] = lambda _: True
    """Whether he has come by now."""
    came: dict[tuple[str, Listener], Counter[str]] = field(
        default_factory=lambda: defaultdict(Counter)
    )
    """Outcomes of its visits by gate and port: numbers of `taken`, `refused` and `dropped` ones."""
    standing: dict[str, set[Listener]] = field(default_factory=dict)
    """By gate: the ports that were open when it was opened."""
    most_kb: int = 0
    """The most memory that a process of the run had."""
    most_files: int = 0
    """The most files that one had open."""
    _environment: pytest.MonkeyPatch = field(default_factory=pytest.MonkeyPatch)
    """That of runs that start in the `with` block."""
    _is_over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self.stranger is not None:
            self.directory.mkdir()
            held_up = _HELD_UP.replace("{gates}", repr(_GATES))
            (self.directory / "sitecustomize.py").write_text(held_up)
            self._environment.setenv("PYTHONPATH", str(self.directory), prepend=os.pathsep)
            self._environment.setenv("GATES", str(self.directory))
        self._thread = threading.Thread(target=self._besiege)
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._environment.undo()
        self._is_over.set()
        assert self._thread is not None
        self._thread.join()

    @property
    def directory(self) -> Path:
        """The directory with the gates at which its ranks wait."""
        return self.run.with_name(f"{self.run.name}-gates")

    @property
    def listeners(self) -> set[Listener]:
        return {listener for _, listener in self.came}

    @property
    def total(self) -> Counter[str]:
        return sum(self.came.values(), Counter())

    @property
    def gate(self) -> str:
        """The next one, or the end."""
        return next((gate for gate in _GATES if not (self.directory / gate).exists()), _END)

    @property
    def is_held_up(self) -> bool:
        """Whether all ranks stand at the next gate."""
        return len([*self.directory.glob(f"{self.gate}, rank *")]) == self.num_ranks

    def _besiege(self) -> None:
        try:
            while not self._is_over.wait(0.01):
                self._go_round()
        finally:
            if self.stranger is not None:
                for gate in _GATES:
                    (self.directory / gate).touch()

    def _go_round(self) -> None:
        """Send him once to each port that he has not been at often enough."""
        gate, was_held_up = self.gate, self.stranger is not None and self.is_held_up
        listeners: set[Listener] = set()
        for pid in descendants(os.getpid()):
            with suppress(OSError):
                listeners.update(self._look_at(pid))
        if self.stranger is None or not self.begins(self):
            return
        for listener in listeners:
            if self.came[gate, listener].total() < self.visits:
                self.came[gate, listener] += self.stranger.probe(
                    *(listener.address, listener.port, _AT_ONCE),
                    planted=self.planted,
                    source=self.source,
                )
        if was_held_up and all(
            self.came[gate, listener].total() >= self.visits for listener in listeners
        ):
            self.standing[gate] = listeners
            (self.directory / gate).touch()

    def _look_at(self, pid: int) -> Iterator[Listener]:
        """Measure a process of the run, and give its listeners."""
        if b"rrfp" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            return
        self.most_kb = max(self.most_kb, _memory_kb(pid))
        self.most_files = max(self.most_files, len([*Path(f"/proc/{pid}/fd").iterdir()]))
        yield from listeners_of(pid)


def _memory_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0


def check_private_network() -> None:
    """Skip the test where no other user is kept away."""
    try:
        with created_network():
            pass
    except NotPermittedError as error:
        pytest.skip(f"this process may not make a network: {error}")


def as_another_user() -> Stranger:
    """Only root can become another user; a stranger from outside a private network need not."""
    return Stranger(uid=NOBODY if os.getuid() == 0 else None)


def trained(run: Path, num_ranks: int, *flags: str, **siege: Any) -> Siege:
    """A run under siege to its end, which is a good one."""
    with Siege(run, num_ranks, **siege) as sieged, Training(run, *_STEPS, *flags) as training:
        code, _, err = training.ended(timeout_s=300)
    assert code == 0, err
    return sieged


def check_unmoved(sieged: Siege, alone: Siege) -> None:
    """The stranger came to every port at every stage, and did not make himself felt."""
    losses, expected = (
        [line["loss"] for line in read_metrics(each.run)] for each in (sieged, alone)
    )
    assert losses == expected
    assert sieged.standing.keys() == {*_GATES}
    assert all(sieged.standing.values())
    assert sieged.most_kb < alone.most_kb + _MOST_GROWTH_KB
    assert sieged.most_files < alone.most_files + _MOST_MORE_FILES


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """A file that a planted pickle creates when it is unpickled."""
    yield tmp_path / "executed"
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("num_ranks", "flags", "visits"),
    [
        (2, "--pp=2", 1_000),
        *(
            pytest.param(num_ranks, f"{flags} --pp=2", _VISITS, marks=pytest.mark.slow)
            for num_ranks, flags in (
                (4, "--tp=2 --dispatch=megatron"),
                (4, "--dp=2 --distributed-optimizer --save=ck --save-every=1"),
                (2, "--model=vlm --heldout-every=1 --admit=pyramid"),
                (4, "--dp=2 --ep=2 --model=moe --save=ck --save-every=5 --save-async"),
            )
        ),
    ],
)
def test_another_user_reaches_no_port_of_a_run(
    num_ranks: int, flags: str, visits: int, tmp_path: Path, marker: Path
) -> None:
    """From its first moment to its last."""
    check_private_network()
    own = [flags.replace("=ck", f"={tmp_path / each}").split() for each in ("ck-alone", "ck")]
    alone = trained(tmp_path / "alone", num_ranks, *own[0])
    with as_another_user() as stranger:
        sieged = trained(
            tmp_path / "sieged",
            num_ranks,
            *own[1],
            stranger=stranger,
            planted=pickle.dumps(Command(marker)),
            visits=visits,
        )
    assert len(sieged.listeners) >= 2
    assert sieged.total.keys() == {"refused"}
    check_unmoved(sieged, alone)


@needs_filter
@pytest.mark.slow
def test_in_the_hosts_network_gloo_lets_in_nobody_once_the_groups_are_made(
    tmp_path: Path, marker: Path
) -> None:
    flags = ("--pp=2", "--network=host")
    alone = trained(tmp_path / "alone", 2, *flags)
    with as_another_user() as stranger:
        sieged = trained(
            tmp_path / "sieged",
            2,
            *flags,
            stranger=stranger,
            planted=pickle.dumps(Command(marker)),
            begins=lambda siege: siege.is_held_up or siege.gate != _GATES[0],
        )
    # Refused are those who come once a port is closed.
    assert {"dropped"} <= sieged.total.keys() <= {"dropped", "refused"}
    check_unmoved(sieged, alone)


@needs_filter
@pytest.mark.slow
def test_another_host_reaches_no_port_of_two_joined_hosts(tmp_path: Path, marker: Path) -> None:
    """It has an address of its own on their network."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command to make a network with")
    try:
        wire = Wire(f"rrfp-{os.getpid()}", delay_s=0, loss=0)
    except OSError as error:
        pytest.skip(f"this process may not make a network: {error}")
    run, alone = tmp_path / "sieged", tmp_path / "alone"
    with wire:
        source = wire.add_address(1, 66)
        unmoved = trained_on_two_hosts(Siege(alone, 2), wire)
        with Stranger(within=wire.within(1)) as stranger:
            planted = pickle.dumps(Command(marker))
            siege = Siege(run, 2, stranger, planted, source, begins=have_hosts_joined)
            sieged = trained_on_two_hosts(siege, wire)
    # The store's, and gloo's on both hosts.
    assert _PORT in {listener.port for listener in sieged.listeners}
    assert {listener.address for listener in sieged.listeners} == {"10.213.78.1", "10.213.78.2"}
    # Refused are those who come once a port is closed.
    assert {"dropped"} <= sieged.total.keys() <= {"dropped", "refused"}
    check_unmoved(sieged, unmoved)


def have_hosts_joined(siege: Siege) -> bool:
    return (siege.run / "logs").exists()


def trained_on_two_hosts(siege: Siege, wire: Wire) -> Siege:
    """A run under siege on both ends of a wire, to its good end."""
    flags = ["--nnodes=2", f"--rdzv-endpoint={Wire.ADDRESS}:{_PORT}", "--pp=2", *_STEPS]
    with (
        siege,
        Training(siege.run, *flags, "--node-rank=0", within=wire.within(0)) as first,
        Training(siege.run, *flags, "--node-rank=1", within=wire.within(1)) as second,
    ):
        for host in (first, second):
            code, _, err = host.ended(timeout_s=300)
            assert code == 0, err
    return siege


# The stranger himself.


def test_the_stranger_is_accepted_by_an_open_listener() -> None:
    with Stranger() as stranger:
        with socket.create_server(("127.0.0.1", 0), backlog=1000) as listening:
            address, port = listening.getsockname()
            assert stranger.probe(address, port, 100) == {"taken": 100}
            if not filter_refusal():
                accept_nobody(listening)
                assert stranger.probe(address, port, 100) == {"dropped": 100}
        assert stranger.probe(address, port, 100) == {"refused": 100}
