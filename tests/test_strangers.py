"""Strangers at every port of a run, from its start to its end: it trains on, bitwise the same, as
large as before, and executes nothing."""

import os
import pickle
import shutil
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from rrfp.runtime.transport.doorman import let_in_nobody
from tests.stranger import NOBODY, Stranger
from tests.test_planted import Command
from tests.trained import ENDLESS, Training, read_metrics
from tests.watch import Door, descendants, doors_of
from tests.wire import Wire

pytestmark = pytest.mark.timeout(400)

_PORT = 29400
_VISITS_A_STAGE = 10_000
_AT_ONCE = 1_000
_NUM_STEPS = 10
"""Of a run that is compared with one under siege."""
_MOST_GROWTH_KB = 64 * 1024
_MOST_MORE_FILES = 32


@dataclass(slots=True)
class Siege:
    """Sends a stranger to every port of this process' descendants, until the `with` block ends."""

    run: Path
    stranger: Stranger | None = None
    """None only to measure."""
    planted: bytes = b""
    source: str = ""
    visits: int = _VISITS_A_STAGE
    """How often he comes in each stage of the run: before the first step, and after it."""
    begins: Callable[[], bool] = lambda: True
    """Whether he has come by now."""
    came: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """What came of his visits, by stage: how many were `taken`, `refused` or `dropped`."""
    doors: set[Door] = field(default_factory=set)
    most_kb: int = 0
    """The most memory that a process of the run had."""
    most_files: int = 0
    """The most files that one had open."""
    _is_over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._besiege)
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()
        assert self._thread is not None
        self._thread.join()

    @property
    def total(self) -> Counter[str]:
        return sum(self.came.values(), Counter())

    def _besiege(self) -> None:
        while not self._is_over.wait(0.01):
            for pid in descendants(os.getpid()):
                with suppress(OSError):
                    self._look_at(pid)

    def _look_at(self, pid: int) -> None:
        if b"rrfp" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            return
        self.most_kb = max(self.most_kb, _memory_kb(pid))
        self.most_files = max(self.most_files, len([*Path(f"/proc/{pid}/fd").iterdir()]))
        for door in doors_of(pid):
            self.doors.add(door)
            if self.stranger is None or not self.begins():
                continue
            stage = "training" if read_metrics(self.run) else "start"
            if self.came[stage].total() < self.visits:
                self.came[stage] += self.stranger.knock(
                    *(door.address, door.port, _AT_ONCE),
                    planted=self.planted,
                    source=self.source,
                )


def _memory_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


def as_another_user() -> Stranger:
    """Only root can become another user; a stranger from outside a private network need not."""
    return Stranger(uid=NOBODY if os.getuid() == 0 else None)


def trained(run: Path, *flags: str, **siege: Any) -> Siege:
    """A run under siege to its end, which is a good one."""
    with Siege(run, **siege) as sieged, Training(run, *flags) as training:
        code, _, err = training.ended(timeout_s=300)
    assert code == 0, err
    return sieged


def await_visits(sieged: Siege, training: Training) -> None:
    """Wait until the stranger has come as often as he is to, and the run has gone on."""
    training.await_that(lambda: sieged.came["training"].total() >= sieged.visits, "visits")
    training.await_steps(max(_NUM_STEPS, training.num_steps + 2))


def check_unmoved(sieged: Siege, alone: Siege) -> None:
    """The stranger came to every stage, and did not make himself felt."""
    losses, expected = (
        [line["loss"] for line in read_metrics(each.run)] for each in (sieged, alone)
    )
    assert losses[: len(expected)] == expected
    for stage, came in sieged.came.items():
        assert came.total() >= sieged.visits, stage
    assert sieged.most_kb < alone.most_kb + _MOST_GROWTH_KB
    assert sieged.most_files < alone.most_files + _MOST_MORE_FILES


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """What a planted pickle leaves where it is unpickled."""
    yield tmp_path / "executed"
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("flags", "visits"),
    [
        ("--pp=2 --steps=10", 1_000),
        *(
            pytest.param(f"{flags} --pp=2 --steps=30", _VISITS_A_STAGE, marks=pytest.mark.slow)
            for flags in (
                "--tp=2 --dispatch=megatron",
                "--dp=2 --distributed-optimizer --save=ck --save-every=1",
                "--model=vlm --heldout-every=1 --admit=pyramid",
                "--dp=2 --ep=2 --model=moe --save=ck --save-every=5 --save-async",
            )
        ),
    ],
)
def test_another_user_reaches_no_port_of_a_run(
    flags: str, visits: int, tmp_path: Path, marker: Path
) -> None:
    """From its first moment to its last."""
    own = [flags.replace("=ck", f"={tmp_path / each}").split() for each in ("ck-alone", "ck")]
    alone = trained(tmp_path / "alone", *own[0])
    with as_another_user() as stranger:
        sieged = trained(
            tmp_path / "sieged",
            *own[1],
            stranger=stranger,
            planted=pickle.dumps(Command(marker)),
            visits=visits,
        )
    assert len(sieged.doors) >= 2
    assert sieged.came.keys() == {"start", "training"}
    assert sieged.total.keys() == {"refused"}
    check_unmoved(sieged, alone)


@pytest.mark.slow
def test_in_the_hosts_network_gloo_lets_in_nobody_once_the_groups_are_made(
    tmp_path: Path, marker: Path
) -> None:
    flags = ("--pp=2", "--network=host")
    alone = trained(tmp_path / "alone", *flags, f"--steps={_NUM_STEPS}")
    run = tmp_path / "sieged"
    with (
        as_another_user() as stranger,
        Siege(
            run, stranger, pickle.dumps(Command(marker)), begins=lambda: bool(read_metrics(run))
        ) as sieged,
        Training(run, *flags, *ENDLESS) as training,
    ):
        await_visits(sieged, training)
    assert sieged.came.keys() == {"training"}
    assert sieged.total.keys() == {"dropped"}
    check_unmoved(sieged, alone)


@pytest.mark.slow
def test_another_host_reaches_no_port_of_two_hosts_that_have_met(
    tmp_path: Path, marker: Path
) -> None:
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
        with Siege(alone) as unmoved, two_hosts(alone, wire) as first:
            first.await_steps(_NUM_STEPS)
        with (
            Stranger(within=wire.within(1)) as stranger,
            Siege(
                *(run, stranger, pickle.dumps(Command(marker)), source),
                begins=lambda: (run / "logs").exists(),
            ) as sieged,
            two_hosts(run, wire) as first,
        ):
            await_visits(sieged, first)
    # The store's, and gloo's on both hosts.
    assert _PORT in {door.port for door in sieged.doors}
    assert {door.address for door in sieged.doors} == {"10.213.78.1", "10.213.78.2"}
    assert sieged.total.keys() == {"dropped"}
    check_unmoved(sieged, unmoved)


@contextmanager
def two_hosts(run: Path, wire: Wire) -> Iterator[Training]:
    """A run that goes on by itself on both ends of a wire; gives the first host's part."""
    flags = ["--nnodes=2", f"--rdzv-endpoint={Wire.ADDRESS}:{_PORT}", "--pp=2", *ENDLESS]
    with (
        Training(run, *flags, "--node-rank=0", within=wire.within(0)) as first,
        Training(run, *flags, "--node-rank=1", within=wire.within(1)),
    ):
        yield first


# The stranger himself.


def test_the_stranger_is_taken_where_somebody_listens() -> None:
    with Stranger() as stranger:
        with socket.create_server(("127.0.0.1", 0), backlog=1000) as listening:
            address, port = listening.getsockname()
            assert stranger.knock(address, port, 100) == {"taken": 100}
            let_in_nobody(listening)
            assert stranger.knock(address, port, 100) == {"dropped": 100}
        assert stranger.knock(address, port, 100) == {"refused": 100}
