"""The launcher's processes: all ended when one fails or a signal comes, and how each ended."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rrfp.errors import RrfpError
from rrfp.runtime import launchers as variables
from rrfp.train.launch import processes as children
from rrfp.train.launch.launcher import TRAINING
from rrfp.train.launch.processes import Failure, SignalledError, run_to_end
from rrfp.train.launch.stopping import StopRequestedError
from rrfp.train.settings import TrainSettings

PROGRAM = """
import json, os, pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_DFL)  # as every rank does, whatever it inherits
rank, here = os.environ["RANK"], pathlib.Path(sys.argv[1])
how = sys.argv[2].split(",")[int(rank)]
if how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if how == "abort-when-asked":
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGABRT))
(here / f"own-{rank}").write_text(str(os.getpid()))
(here / f"own-{rank}").rename(here / f"pid-{rank}")
while len(list(here.glob("pid-*"))) < len(sys.argv[2].split(",")):
    time.sleep(0.01)
if how == "tell":
    report = dict(sentence="no memory", exit_code=1, is_consequence=False, is_silence=False)
    told = {"message": {"message": "no memory", "report": report}}
    pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(told))
if how == "garbage":
    pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text("{")
if how == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if how in ("wait", "stubborn", "abort-when-asked"):
    time.sleep(60)
if how == "end":
    from rrfp.train.launch.heartbeat import StatusPage
    StatusPage(int(os.environ["RRFP_LIVENESS"].partition(",")[0])).finish()
sys.exit(0 if how in ("end", "end-too-early") else 3)
"""


def run(
    directory: Path, *ways: str, lost: Callable[[], RrfpError | None] = lambda: None
) -> dict[int, Failure]:
    command = (sys.executable, "-c", PROGRAM, str(directory), ",".join(ways))
    environments = {rank: {"RANK": str(rank)} for rank in range(len(ways))}
    return run_to_end(command, environments, directory, lost=lost)


@pytest.fixture(autouse=True)
def no_process_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(children, "_SHUTDOWN_S", 1.0)
    before = {each: signal.getsignal(each) for each in children._SIGNALS}
    yield
    assert before == {each: signal.getsignal(each) for each in children._SIGNALS}
    for path in tmp_path.glob("pid-*"):
        assert not Path("/proc", path.read_text()).exists()


def test_all_that_end_well_are_no_failures(tmp_path: Path) -> None:
    assert run(tmp_path, "end", "end") == {}


def test_exit_code_0_without_the_rank_s_note_is_a_failure(tmp_path: Path) -> None:
    failures = run(tmp_path, "end", "end-too-early")
    # The other one may not have ended yet.
    own = [(rank, each.exit_code) for rank, each in failures.items() if not each.was_ended]
    assert own == [(1, 0)]


def test_one_failure_ends_them_all_and_its_report_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_LOOK_S", 1.0)  # both that fail have as long to do so
    failures = run(tmp_path, "wait", "tell", "stubborn", "garbage")
    assert {rank: failure.exit_code for rank, failure in failures.items()} == {
        0: -signal.SIGTERM,
        1: 3,
        2: -signal.SIGKILL,
        3: 3,
    }
    assert [rank for rank, failure in failures.items() if failure.was_ended] == [0, 2]
    assert failures[1].report is not None
    assert failures[1].report.sentence == "no memory"
    assert failures[3].report is None
    assert failures[1].ended_s <= failures[0].ended_s


def test_a_rank_whose_launcher_died_first_ends(tmp_path: Path) -> None:
    """It waits for a peer that never comes, and its parent is not its launcher."""
    settings = TrainSettings(pp=2)
    command = (sys.executable, "-m", "rrfp.train.launch.rank_process", TRAINING, str(tmp_path))
    launcher = subprocess.Popen(["true"])
    launcher.wait()
    told = {"RANK": "0", "WORLD_SIZE": "2", "RRFP_LAUNCHER": str(launcher.pid)}
    store = {"RRFP_STORE": f"file:{tmp_path / 'store'}", "RRFP_ADDRESS": "127.0.0.1"}
    ended = subprocess.run(
        (*command, settings.to_json()),
        env=os.environ | told | store,
        check=False,
        timeout=60,
        capture_output=True,
    )
    assert (ended.returncode, ended.stderr) == (RrfpError.exit_code, b"")


def test_a_process_that_is_killed_is_told_so(tmp_path: Path) -> None:
    failures = run(tmp_path, "die", "end")
    assert failures[0].exit_code == -signal.SIGKILL


def test_the_first_that_was_killed_stays_the_first(tmp_path: Path) -> None:
    """As C++ aborts where a peer is lost."""
    failures = run(tmp_path, "abort-when-asked", "die")
    assert failures[0].exit_code == -signal.SIGABRT
    assert failures[1].ended_s < failures[0].ended_s


def test_another_host_that_is_lost_ends_them_all(tmp_path: Path) -> None:
    lost = RrfpError("host 1 was silent")
    with pytest.raises(RrfpError, match="host 1 was silent"):
        run(tmp_path, "wait", lost=lambda: lost if [*tmp_path.iterdir()] else None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_them_all(tmp_path: Path, number: signal.Signals) -> None:
    def signal_soon() -> None:
        while len(list(tmp_path.glob("pid-*"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=signal_soon)
    before = signal.signal(number, signal.SIG_DFL)  # nohup ignores SIGHUP, and is obeyed
    try:
        thread.start()
        with pytest.raises(SignalledError) as told:
            run(tmp_path, "wait", "stubborn")
    finally:
        thread.join()
        signal.signal(number, before)
    assert told.value.number == number


REQUESTED = """
import os, pathlib, signal, sys, time
from rrfp.train.launch.heartbeat import StatusPage
rank, here, how = os.environ["RANK"], pathlib.Path(sys.argv[1]), sys.argv[2]
asked = []
signal.signal(signal.SIGINT, signal.SIG_DFL)  # as every rank does, whatever it inherits
page = StatusPage(int(os.environ[sys.argv[3]].partition(",")[0]))
if how not in ("starting", "asked") and (how, rank) != ("half started", "1"):
    page.enter("in step 0")
(here / f"goes-{rank}").touch()
time.sleep(0.3)  # a request that comes now counts, too
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
(here / f"own-{rank}").write_text(str(os.getpid()))
(here / f"own-{rank}").rename(here / f"pid-{rank}")
if how == "fail" and rank == "0":
    sys.exit(3)
if how == "asked" and rank == "0":
    page.ask_to_end()
while not asked or how == "deaf":
    time.sleep(0.01)
if how == "slowly":
    time.sleep(3)
page.finish()
sys.exit(0)
"""


def run_requested(
    directory: Path, how: str, *signals: signal.Signals, is_whole: bool = True
) -> dict[int, Failure]:
    """Two ranks that take SIGTERM as a request; the launcher gets these signals at once."""
    command = (sys.executable, "-c", REQUESTED, str(directory), how, variables.LIVENESS)

    def signal_soon() -> None:
        while len([*directory.glob("goes-*")]) < 2:
            time.sleep(0.01)
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(0.6)

    thread = threading.Thread(target=signal_soon)
    before = signal.getsignal(signal.SIGTERM)
    thread.start()
    environments = {rank: {"RANK": str(rank)} for rank in range(2)}
    try:
        return run_to_end(command, environments, directory, end_on_request=True, is_whole=is_whole)
    finally:
        thread.join()
        # How the ranks ended is settled, so a later request must not change it.
        assert signal.signal(signal.SIGTERM, before) is signal.SIG_IGN


def test_sigterm_can_be_a_request(tmp_path: Path) -> None:
    assert run_requested(tmp_path, "end", signal.SIGTERM) == {}


def test_a_request_before_the_first_step_ends_all_at_once(tmp_path: Path) -> None:
    with pytest.raises(StopRequestedError):
        run_requested(tmp_path, "starting", signal.SIGTERM)
    with pytest.raises(StopRequestedError):
        run_requested(tmp_path, "asked")


def test_of_several_hosts_none_knows_that_no_step_has_begun(tmp_path: Path) -> None:
    assert run_requested(tmp_path, "starting", signal.SIGTERM, is_whole=False) == {}


def test_a_step_that_one_rank_has_begun_is_trained(tmp_path: Path) -> None:
    assert run_requested(tmp_path, "half started", signal.SIGTERM) == {}


def test_a_request_may_be_repeated(tmp_path: Path) -> None:
    """The ranks may be saving by then."""
    assert run_requested(tmp_path, "slowly", signal.SIGTERM, signal.SIGTERM) == {}


def test_a_second_signal_ends_ranks_that_do_not_follow_a_request(tmp_path: Path) -> None:
    with pytest.raises(SignalledError) as told:
        run_requested(tmp_path, "deaf", signal.SIGTERM, signal.SIGINT)
    assert told.value.number == signal.SIGINT


def test_a_request_is_not_waited_for_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_REQUEST_S", 1.0)
    with pytest.raises(RrfpError, match="rank 0, 1 did not save and end within 1 s of SIGTERM"):
        run_requested(tmp_path, "deaf", signal.SIGTERM)


def test_a_failure_ends_ranks_that_take_requests(tmp_path: Path) -> None:
    failures = run_requested(tmp_path, "fail")
    assert {rank: failure.exit_code for rank, failure in failures.items()} == {
        0: 3,
        1: -signal.SIGINT,
    }


def test_a_process_that_cannot_be_started_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    own = subprocess.Popen

    def start_one(*args: object, **options: object) -> subprocess.Popen[bytes]:
        if started:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(own(*args, **options))  # type: ignore[call-overload]
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start_one)
    with pytest.raises(RrfpError, match="a rank's process cannot be started"):
        run(tmp_path, "wait", "wait")
    assert started[0].wait(10) == -signal.SIGKILL
