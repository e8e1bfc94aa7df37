"""Whether a rank lives: what its page shows, how its launcher judges it, and what is left of it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rrfp
from rrfp.train.launch import watchdog as watchdog_module
from rrfp.train.launch.processes import Failure, supervise_ranks
from rrfp.train.launch.rank_status import (
    Frame,
    StatusPage,
    Waits,
    format_position,
    frames_in_dump,
    infer_waits,
    page_file,
    stack_frames,
)
from rrfp.train.launch.watchdog import (
    Hang,
    ProcessSnapshot,
    Watchdog,
    Why,
    descendants_of,
    take_snapshot,
)

STD = threading.__file__
TORCHS = f"{Path(pytest.__file__).parent.parent}/torch/distributed/distributed_c10d.py"
MEGATRONS = f"{Path(pytest.__file__).parent.parent}/megatron/core/optimizer.py"
TRAINING = f"{Path(rrfp.__file__).parent}/train/loop.py"
WORKER = f"{Path(rrfp.__file__).parent}/runtime/worker.py"
RECORDER = f"{Path(rrfp.__file__).parent}/runtime/recorder.py"


@pytest.mark.parametrize(
    ("frames", "waits"),
    [
        ([Frame(TORCHS, 1, "all_reduce"), Frame(TRAINING, 2, "_shared")], Waits.OTHERS),
        ([Frame(STD, 1, "wait"), Frame(WORKER, 2, "_wait")], Waits.OTHERS),
        ([Frame(TRAINING, 2, "train_step"), Frame(WORKER, 2, "_run")], Waits.NOTHING),
        ([Frame("/home/me/data.py", 2, "__getitem__")], Waits.NOTHING),
        ([Frame(RECORDER, 2, "flush"), Frame(TRAINING, 2, "train_step")], Waits.NOTHING),
        # What a collective returns is waited for in a call that has no frame of its own.
        ([Frame(MEGATRONS, 1, "finish_grad_sync", True), Frame(TRAINING, 2, "_")], Waits.PERHAPS),
        ([Frame(STD, 1, "wait"), Frame("/home/me/data.py", 2, "__next__")], Waits.PERHAPS),
        ([], Waits.NOTHING),
    ],
)
def test_a_stack_shows_the_target_of_its_wait(frames: list[Frame], waits: Waits) -> None:
    assert infer_waits(frames) == waits


def test_the_place_is_the_innermost_line_of_no_library() -> None:
    frames = [Frame(STD, 1, "wait"), Frame(MEGATRONS, 5, "step"), Frame(TRAINING, 7, "train_step")]
    assert format_position(frames) == "rrfp/train/loop.py:7 in train_step"
    assert format_position(frames[:2]) == f"{STD}:1 in wait"
    assert format_position([]) == ""


def test_frames_that_run_and_frames_in_a_dump_are_read() -> None:
    here = next(stack_frames(sys._getframe()))
    assert (here.file, here.function) == (
        __file__,
        "test_frames_that_run_and_frames_in_a_dump_are_read",
    )
    dump = (
        "Thread 0x1 (most recent call first):\n"
        '  File "/a.py", line 1 in beat\n\n'
        "Current thread 0x2 (most recent call first):\n"
        '  File "/b c.py", line 22 in <module>\n'
        "  ...\n"
    )
    assert frames_in_dump(dump) == [Frame("/b c.py", 22, "<module>")]
    assert frames_in_dump("") == []


def test_a_page_shows_the_other_side_what_was_written() -> None:
    with page_file() as file:
        ranks, launchers = StatusPage(file.fileno()), StatusPage(file.fileno())
    assert (launchers.beats, launchers.stage, launchers.place) == (0, "in start-up", "")
    ranks.enter("in step 7")
    ranks.beat(Waits.OTHERS, "a.py:1 in f")
    assert (launchers.beats, launchers.waits) == (1, Waits.OTHERS)
    assert (launchers.stage, launchers.place) == ("in step 7", "a.py:1 in f")
    ranks.beat(Waits.NOTHING, "\u00e4" * 5000)
    assert launchers.place.startswith("\u00e4" * 400)


class Watched:
    """Ranks whose process snapshots are simulated for a watchdog."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_ranks: int, sees_all: bool) -> None:
        monkeypatch.setattr(watchdog_module, "take_snapshot", self._sight)
        monkeypatch.setattr(
            watchdog_module, "waits_for_own_lock", lambda rank: rank in self._locked
        )
        monkeypatch.setattr(watchdog_module, "descendants_of", lambda *_: [])
        self.watchdog = Watchdog(5.0, sees_all=sees_all)
        self._now_s = 0.0
        self._sights: dict[int, ProcessSnapshot] = {}
        self._pages: list[StatusPage] = []
        self._locked: set[int] = set()
        for rank in range(num_ranks):
            with page_file() as file:
                self._pages.append(StatusPage(file.fileno()))
            self._sights[rank] = ProcessSnapshot("S", False, 0, {rank: (0, 0)})
            self.watchdog.add(rank, rank, self._pages[rank])

    def _sight(self, pid: int) -> ProcessSnapshot | None:
        return self._sights.get(pid)

    def pass_s(
        self, *ways: str, for_s: float, look_s: float = 1.0
    ) -> tuple[float, int, Hang] | None:
        """Check ranks that behave in these ways every `look_s`; returns what is found, and when."""
        start_s = self._now_s
        while self._now_s - start_s < for_s:
            self._now_s += look_s
            for rank, way in enumerate(ways):
                self._behave(rank, way, look_s)
            if (found := self.watchdog.check(self._now_s)) is not None:
                return self._now_s - start_s, *found
        return None

    def _behave(self, rank: int, way: str, look_s: float) -> None:
        state, ran, runnable, traced, faults = "S", 0.0, 0.0, False, 0
        page, last = self._pages[rank], self._sights[rank]
        waits = Waits.NOTHING
        self._locked.discard(rank)
        match way:
            case "stopped":
                state = "T"
            case "traced":
                state, traced = "t", True
            case "hangs-in-kernel":
                state = "D"
            case "computes-and-holds-the-gil":
                state, ran = "R", 0.9
            case "has-no-processor":
                state, runnable = "R", 1.0
            case "swaps":
                state, faults = "D", 3
            case "imports":
                ran = 0.01
            case "waits":
                waits = Waits.OTHERS
            case "polls":
                waits, ran = Waits.OTHERS, 0.001
            case "waits-perhaps":
                waits = Waits.PERHAPS
            case "computes":
                ran = 1.0
            case "inert":
                self._locked.add(rank)
            case "silent" | "sleeps":
                pass
        if way in ("waits", "polls", "waits-perhaps", "computes", "inert", "disk", "sleeps"):
            page.beat(waits, f"{way}.py:1 in f")
        if way == "disk":
            state = "D"
        ran_ns, waited_ns = last.threads_ns[rank]
        threads = {
            rank: (
                ran_ns + round(ran * look_s * 1e9),
                waited_ns + round(runnable * look_s * 1e9),
            )
        }
        self._sights[rank] = ProcessSnapshot(state, traced, last.major_faults + faults, threads)


@pytest.mark.parametrize(
    ("ways", "why"),
    [
        (["waits", "stopped", "polls"], Why.STOPPED),
        (["waits", "inert", "polls"], Why.INERT),
        # A rank that waits for a stopped one may be unable to beat meanwhile.
        (["silent", "stopped", "silent"], Why.STOPPED),
        (["waits-perhaps", "inert", "waits"], Why.INERT),
    ],
)
@pytest.mark.parametrize("sees_all", [True, False])
def test_a_hung_rank_is_found_after_the_silence(
    monkeypatch: pytest.MonkeyPatch, ways: list[str], why: Why, sees_all: bool
) -> None:
    watched = Watched(monkeypatch, 3, sees_all)
    assert watched.pass_s("computes", "computes", "computes", for_s=3) is None
    found = watched.pass_s(*ways, for_s=60)
    assert found is not None
    after_s, rank, hang = found
    assert (rank, hang.why) == (1, why)
    assert 5 <= after_s <= 7
    assert [*hang.waiting] == [each for each, way in enumerate(ways) if way in ("waits", "polls")]


@pytest.mark.parametrize(
    "ways",
    [
        ["computes", "inert", "waits"],  # it may wait for rank 0, unseen
        ["computes-and-holds-the-gil", "waits", "waits"],
        ["has-no-processor", "waits", "waits"],
        ["swaps", "waits", "waits"],
        ["traced", "waits", "waits"],
        ["waits", "polls", "waits"],
    ],
)
def test_a_rank_that_works_or_waits_for_others_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, ways: list[str]
) -> None:
    assert Watched(monkeypatch, 3, sees_all=True).pass_s(*ways, for_s=600) is None


@pytest.mark.parametrize(
    ("way", "why", "limit_s"),
    [
        ("hangs-in-kernel", Why.IN_KERNEL, 300),
        ("disk", Why.IN_KERNEL, 300),
        ("waits-perhaps", Why.INERT, 300),
        ("sleeps", Why.INERT, 300),
        ("silent", Why.SILENT, 100),
    ],
)
def test_a_wait_that_may_only_be_slow_gets_longer_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, way: str, why: Why, limit_s: float
) -> None:
    watched = Watched(monkeypatch, 2, sees_all=True)
    assert watched.pass_s("waits", way, for_s=8) is None
    assert watched.watchdog.new_warnings() == []
    assert watched.pass_s("waits", way, for_s=4) is None
    ((rank, still),) = watched.watchdog.new_warnings()
    assert (rank, still.why, still.limit_s) == (1, why, limit_s)
    assert watched.watchdog.new_warnings() == []
    found = watched.pass_s("waits", way, for_s=1000)
    assert found is not None
    after_s, rank, hang = found
    assert (rank, hang.why) == (1, why)
    assert limit_s <= 12 + after_s <= limit_s + 3


def test_one_that_goes_on_and_stands_still_again_is_warned_of_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, 2, sees_all=True)
    for _ in range(2):
        assert watched.pass_s("waits", "sleeps", for_s=12) is None
        assert [rank for rank, _ in watched.watchdog.new_warnings()] == [1]
        assert watched.pass_s("waits", "computes", for_s=1) is None
        assert watched.watchdog.new_warnings() == []


def test_another_host_may_be_what_one_perhaps_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, 2, sees_all=False)
    assert watched.pass_s("waits", "waits-perhaps", for_s=600) is None
    assert watched.pass_s("waits", "sleeps", for_s=600) is None


def test_ranks_that_all_wait_for_another_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, 2, sees_all=True)
    assert watched.pass_s("waits", "polls", for_s=600) is None
    found = watched.pass_s("waits", "waits", for_s=600)
    assert found is not None
    after_s, rank, hang = found
    assert (rank, hang.why) == (0, Why.DEADLOCK)
    assert 49 <= after_s <= 53


def test_another_host_may_be_what_all_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Watched(monkeypatch, 2, sees_all=False).pass_s("waits", "waits", for_s=600) is None


def test_a_rank_that_imports_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, 2, sees_all=True)
    assert watched.pass_s("imports", "imports", for_s=100) is None
    assert watched.pass_s("imports", "silent", for_s=110) is not None


def test_an_ended_rank_is_watched_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, 2, sees_all=True)
    watched.watchdog.remove(1)
    assert watched.pass_s("computes", "silent", for_s=100) is None


def test_a_short_stop_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, 2, sees_all=True)
    for _ in range(10):
        assert watched.pass_s("waits", "stopped", for_s=4) is None
        assert watched.pass_s("waits", "computes", for_s=1) is None


def test_time_in_which_the_launcher_was_stopped_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, 2, sees_all=True)
    assert watched.pass_s("waits", "stopped", for_s=1) is None
    assert watched.pass_s("waits", "stopped", for_s=3000, look_s=3000) is None


def test_a_stopped_rank_is_found_at_once_when_others_gave_it_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, 2, sees_all=True)
    assert watched.watchdog.stopped() is None
    watched.pass_s("waits", "stopped", for_s=2)
    found = watched.watchdog.stopped()
    assert found is not None
    assert (found[0], found[1].why) == (1, Why.STOPPED)


def test_snapshots_show_computing_and_stopped_processes() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    idle = subprocess.Popen(["sleep", "60"])
    try:
        before = [take_snapshot(busy.pid), take_snapshot(idle.pid)]
        time.sleep(1.0)
        idle.send_signal(signal.SIGSTOP)
        deadline_s = time.monotonic() + 10
        while not ((now := take_snapshot(idle.pid)) and now.is_stopped):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        after = [take_snapshot(busy.pid), now]
        told = [
            now.is_busy_since(last, 1.0)
            for last, now in zip(before, after, strict=True)
            if last is not None and now is not None
        ]
        assert told == [True, False]
    finally:
        for process in (busy, idle):
            process.kill()
            process.wait()
    assert take_snapshot(idle.pid) is None


RANK = """
import ctypes, os, pathlib, signal, socket, subprocess, sys, threading, time
from rrfp.train.launch.rank_status import end_with_launcher, enter, finish, start_heartbeat
end_with_launcher()
how, here = sys.argv[1].split(",")[int(os.environ["RANK"])], pathlib.Path(sys.argv[2])
child = subprocess.Popen(["sleep", "300"])
(here / f"pids-{os.environ['RANK']}").write_text(f"{os.getpid()} {child.pid}")
if how == "stop-before-it-beats":
    os.kill(os.getpid(), signal.SIGSTOP)
start_heartbeat(waits_on_device=False)
enter("in step 7")
def hang():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
def wait_in_accept():
    server = socket.create_server(("127.0.0.1", 0))
    client = f"import socket, time; time.sleep({WAIT_S}); "
    client += f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))"
    subprocess.Popen([sys.executable, "-c", client])
    server.accept()
def compute(until_s):
    while time.monotonic() < until_s:
        sum(range(10**5))
now_s = time.monotonic()
if how == "hang":
    hang()
elif how == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
elif how == "stop-its-child-too":
    child.send_signal(signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
elif how == "compute":
    compute(now_s + 6)
elif how == "hold-the-gil":
    sys.setswitchinterval(100)
    compute(now_s + 6)
elif how == "leave-it-to-a-process":
    busy = f"import time\\nwhile time.monotonic() < {now_s + 6}: pass"
    subprocess.run([sys.executable, "-c", busy])
elif how == "stop-shortly":
    threading.Timer(0.5, lambda: None).start()
    subprocess.Popen(["sh", "-c", f"sleep 1.5; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
elif how == "stop-as-it-ends":
    import atexit
    atexit.register(os.kill, os.getpid(), signal.SIGSTOP)
elif how == "wait-in-accept":
    wait_in_accept()
elif how == "wait-for-input":
    read, write = os.pipe()
    subprocess.Popen(["sh", "-c", f"sleep {WAIT_S}; echo >&{write}"], pass_fds=[write])
    os.read(read, 1)
elif how == "wait-for-a-process-that-sleeps":
    subprocess.run(["sleep", str(WAIT_S)])
elif how == "sleep":
    time.sleep(WAIT_S)
elif how == "sleep-and-hold-the-gil" and ctypes.PyDLL(None).sleep(WAIT_S):
    sys.exit("a signal has interrupted the sleep")
elif how == "leave-it-to-another-session":
    busy = f"import time\\nwhile time.monotonic() < {now_s + WAIT_S}: pass"
    subprocess.run([sys.executable, "-c", busy], start_new_session=True)
elif how == "leave-it-to-an-orphan":
    busy = f"import time\\nwhile time.monotonic() < {now_s + WAIT_S}: pass"
    (here / "busy.py").write_text(busy)
    read, write = os.pipe()
    orphan = f"setsid {sys.executable} {here}/busy.py &"
    subprocess.run(["sh", "-c", orphan], pass_fds=[write])
    os.close(write)
    os.read(read, 1)
finish()
"""
WAIT_S = 18
"""How long ranks wait that are no longer to be killed: more than ten times the silence below."""

SILENCE_S = 3.0


def run(
    directory: Path,
    *ways: str,
    silence_s: float = SILENCE_S,
    warn: Callable[[int, int, Hang, str], None] = lambda *_: None,
    wait_s: int = WAIT_S,
) -> dict[int, Failure]:
    program = f"WAIT_S = {wait_s}\n{RANK}"
    command = (sys.executable, "-c", program, ",".join(ways), str(directory))
    environments = {rank: {"RANK": str(rank)} for rank in range(len(ways))}
    return supervise_ranks(command, environments, directory, silence_s=silence_s, warn=warn)


def pids_of(directory: Path) -> list[int]:
    """The processes of all ranks, and those that they have started."""
    return [int(pid) for path in directory.glob("pids-*") for pid in path.read_text().split()]


def await_end(pids: list[int]) -> None:
    deadline_s = time.monotonic() + 10
    while left := [pid for pid in pids if (now := take_snapshot(pid)) and now.state not in "ZX"]:
        assert time.monotonic() < deadline_s, f"processes {left} are left"
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def no_process_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    await_end(pids_of(tmp_path))


def test_ranks_that_work_or_stop_shortly_end_by_themselves(tmp_path: Path) -> None:
    ways = ("compute", "hold-the-gil", "leave-it-to-a-process", "stop-shortly")
    assert run(tmp_path, *ways) == {}


@pytest.mark.timeout(400)
def test_waits_that_can_end_are_warned_of_and_not_disturbed(tmp_path: Path) -> None:
    """A debugger, a slow server, a child, a sleep; and C code that holds the interpreter."""
    warned: dict[int, tuple[Hang, str]] = {}

    def warn(rank: int, _: int, still: Hang, stacks: str) -> None:
        warned[rank] = still, stacks

    ways = (
        "wait-in-accept",
        "wait-for-input",
        "wait-for-a-process-that-sleeps",
        "sleep",
        "sleep-and-hold-the-gil",
    )
    # Whose threads wait long for a processor may be at work: on a busy machine one warns later.
    for wait_s in (WAIT_S, 60, 120):
        assert run(tmp_path, *ways, silence_s=1.5, warn=warn, wait_s=wait_s) == {}
        if len(warned) == len(ways):
            break
    assert set(warned) == set(range(len(ways)))
    functions = [frames_in_dump(stacks) for _, stacks in warned.values()]
    assert any(frame.function == "wait_in_accept" for frames in functions for frame in frames)
    still, stacks = warned[4]
    assert (still.why, stacks) == (Why.SILENT, "")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["leave-it-to-another-session", "leave-it-to-an-orphan"])
def test_a_rank_whose_descendants_compute_is_at_work(tmp_path: Path, way: str) -> None:
    assert run(tmp_path, way, silence_s=1.5, warn=pytest.fail) == {}  # type: ignore[arg-type]


def _sleeps(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep")
    except OSError:
        return False


def test_descendants_are_found_by_their_parents_and_orphans_by_their_environment() -> None:
    code = "import subprocess as s; s.Popen(['sleep', '60'], start_new_session=True).wait()"
    mark = f"RRFP_TEST={os.getpid()}"
    # Its parent ends at once.
    parent = subprocess.Popen(
        ["sh", "-c", f'(setsid sleep 61 & echo $!); exec {sys.executable} -c "{code}"'],
        env=os.environ | {"RRFP_TEST": str(os.getpid())},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    orphaned = int(parent.stdout.readline())
    found: list[int] = []
    try:
        deadline_s = time.monotonic() + 60
        while not all(map(_sleeps, found)) or len(found) < 2:
            assert time.monotonic() < deadline_s, found
            found = descendants_of(parent.pid, [mark.encode()])
        assert orphaned in found
        assert set(descendants_of(parent.pid, [mark.encode(), b"RRFP_OTHER=1"])) == {*found} - {
            orphaned
        }
    finally:
        for pid in {*found, orphaned}:
            os.kill(pid, signal.SIGKILL)
        parent.kill()
        parent.communicate()


@pytest.mark.parametrize(
    ("way", "why", "stage", "function"),
    [
        ("stop-its-child-too", Why.STOPPED, "in step 7", "<module>"),
        ("hang", Why.INERT, "in step 7", "hang"),
        ("stop-before-it-beats", Why.STOPPED, "in start-up", None),
        pytest.param("stop-as-it-ends", Why.STOPPED, "in step 7", None, marks=pytest.mark.slow),
    ],
)
def test_a_hung_rank_is_killed_and_its_stack_read(
    tmp_path: Path, way: str, why: Why, stage: str, function: str | None
) -> None:
    failures = run(tmp_path, way)
    (failure,) = failures.values()
    assert failure.hang is not None
    assert (failure.hang.why, failure.hang.stage) == (why, stage)
    # A signal had stopped the others: they go on to tell their stacks, and may end by themselves.
    assert failure.was_ended or way != "hang"
    if function is not None:
        assert frames_in_dump(failure.stacks)[0].function == function


def test_a_stopped_rank_ends_with_its_launcher(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys\n"
        "from rrfp.train.launch.processes import supervise_ranks\n"
        "supervise_ranks(sys.argv[2:], {0: {'RANK': '0'}}, pathlib.Path(sys.argv[1]))"
    )
    rank = (sys.executable, "-c", RANK, "stop", str(tmp_path))
    launcher = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), *rank])
    try:
        deadline_s = time.monotonic() + 60
        while not (pids := pids_of(tmp_path)) or not (
            (now := take_snapshot(pids[0])) and now.is_stopped
        ):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
    finally:
        launcher.kill()
        launcher.wait()
        await_end(pids[:1])
        for pid in pids[1:]:
            os.kill(pid, signal.SIGKILL)
