"""How a session of `rrfp train` ends: what it says, and that SIGTERM may come at any moment."""

import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from signal import SIGTERM
from typing import Any, NoReturn

import pytest

from rrfp.analyze.frame_files import load_frames
from rrfp.cli import train as cli_train
from rrfp.trace.locate import resolve_trace
from rrfp.trace.outcome import Ending, Outcome, read_ending
from rrfp.trace.run_dir import RunDir
from rrfp.train.checkpoints import resuming as beginning
from rrfp.train.launch import processes as children
from rrfp.train.launch.hosts import gathering
from rrfp.train.launch.hosts import joining as meeting
from rrfp.train.launch.hosts.host_status import Pulse
from rrfp.train.launch.hosts.joining import Met
from rrfp.train.launch.processes import started
from rrfp.train.launch.store import file_store
from tests.checkpointed import FLAGS, made_up, newest
from tests.trained import ENDLESS, TINY, Training, processes_of, read_metrics, rrfp_here

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def handlers_are_restored() -> Iterator[None]:
    before = signal.getsignal(SIGTERM)
    yield
    signal.signal(SIGTERM, before)


@pytest.mark.usefixtures("handlers_are_restored")
@pytest.mark.parametrize(
    ("saved", "resume"), [(False, ("--resume",)), (True, ("--resume",)), (True, ())]
)
def test_sigterm_before_the_ranks_run_ends_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool, resume: tuple[str, ...]
) -> None:
    """Without --resume what is saved is another run's."""
    if saved:
        made_up(tmp_path, 2)
    monkeypatch.setattr(beginning, "beginning_of", lambda *_, **__: signal.raise_signal(SIGTERM))
    asked = rrfp_here(tmp_path, "train", *FLAGS, "--save=ck", *resume)
    said = (
        "before training went on; --resume goes on after step 2"
        if saved and resume
        else "before the first step, so there is nothing to save"
    )
    assert (asked.returncode, asked.stderr) == (0, f"Stopped by SIGTERM {said}\n")
    assert signal.getsignal(SIGTERM) is signal.SIG_IGN


def ranks_are(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let the launcher start this program for every rank."""
    command = (sys.executable, "-c", program)
    monkeypatch.setattr(children, "started", lambda _, *rest: started(command, *rest))


DONE = """
from rrfp.train.launch.heartbeat import finish, show_life
show_life(waits_on_device=False)
finish()
"""
"""A rank that has done all its work."""


@pytest.mark.usefixtures("handlers_are_restored")
def test_sigterm_after_the_ranks_ran_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[RunDir] = []

    def report(run: RunDir, *_: Any) -> None:
        signal.raise_signal(SIGTERM)
        reported.append(run)

    ranks_are(monkeypatch, DONE)
    monkeypatch.setattr(cli_train, "_report", report)
    asked = rrfp_here(tmp_path, "train", *FLAGS, "--save=ck", "--out=run")
    assert (asked.returncode, reported) == (0, [RunDir(Path("run"))]), asked.stderr
    assert signal.getsignal(SIGTERM) is signal.SIG_IGN


@pytest.mark.usefixtures("handlers_are_restored")
@pytest.mark.parametrize("node_rank", [0, 1])
@pytest.mark.parametrize(("program", "code"), [(DONE, 0), ("exit(1)", 1)])
def test_sigterm_while_hosts_part_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node_rank: int, program: str, code: int
) -> None:
    def connect(*_: Any) -> NoReturn:
        raise AssertionError("there is no other host")

    @contextmanager
    def parting(*_: Any) -> Iterator[Met]:
        try:
            yield Met(file_store(tmp_path), Pulse(connect, node_rank, 2, 15.0), connect)
        finally:
            signal.raise_signal(SIGTERM)

    reported: list[RunDir] = []
    ranks_are(monkeypatch, program)
    monkeypatch.setattr(meeting, "meeting", parting)
    monkeypatch.setattr(gathering, "gathering", lambda *_: nullcontext())
    monkeypatch.setattr(cli_train, "_report", lambda run, *_: reported.append(run))
    hosts = ("--nnodes=2", f"--node-rank={node_rank}", "--rdzv-endpoint=127.0.0.1:1")
    asked = rrfp_here(tmp_path, "train", *FLAGS, "--save=ck", "--out=run", *hosts)
    assert asked.returncode == code, asked.stderr
    assert "Stopped by SIGTERM" not in asked.stderr
    assert ("exited with code 1 in start-up" in asked.stderr) == (code == 1)
    assert len(reported) == (code == 0 and node_rank == 0)


def test_the_pace_is_that_of_this_session(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path)
    overs = [{"tasks": 9, "of": 10, "worst_s": 1.0}, {"tasks": 0, "of": 10, "worst_s": 0.0}, None]
    lines = [{"step": step, "over_pace": over} for step, over in enumerate(overs)]
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    cli_train.tell_pace(run, 1)
    assert capsys.readouterr().err == (
        "the work of 0 of 10 tasks (0.00%) took longer than its model\n"
    )


def test_sigterm_while_ranks_start_ends_with_0(tmp_path: Path) -> None:
    run, flags = tmp_path / "run", ("--pp=2", f"--save={tmp_path / 'ck'}", "--steps=2")
    with Training(run, *flags) as training:
        # They have none of their handlers yet.
        ranks = ("rrfp.train.launch.rank_process",)
        training.await_that(lambda: bool(processes_of(run, *ranks)), "ranks")
        training.process.send_signal(SIGTERM)
        code, _, said = training.ended()
    assert (code, "nothing to save" in said, "Traceback" in said) == (0, True, False), said
    run = tmp_path / "again"
    with Training(run, *flags) as training:
        rank = training.await_start(1)
        os.kill(rank, SIGTERM)
        code, _, said = training.ended()
    assert (code, "nothing to save" in said) == (0, True), said
    assert read_ending(RunDir(run)) == Ending(Outcome.STOPPED)
    with Training(run, *flags, "--resume") as training:
        code, _, said = training.ended()
    assert code == 0, said
    assert newest(tmp_path).step == 2


def test_sigterm_saves_and_the_run_goes_on(tmp_path: Path) -> None:
    run, flags = tmp_path / "run", ("--pp=2", "--dropout=0.1", f"--save={tmp_path / 'ck'}")
    with Training(run, *flags, *ENDLESS) as training:
        training.await_steps(2)
        training.process.send_signal(signal.SIGTERM)
        code, _, said = training.ended()
    assert code == 0, said
    num_steps = len(read_metrics(run))
    assert f"Stopped by SIGTERM after {num_steps} of 1000000 steps" in said
    assert newest(tmp_path).step == num_steps
    steps = f"--steps={num_steps + 2}"
    again = ("--hint=bfw", "--resume", steps)
    with Training(run, *flags, *again) as training:
        code, _, said = training.ended()
    assert code == 0, said
    assert f"Going on after step {num_steps}" in said
    assert [line["step"] for line in read_metrics(run)] == [*range(num_steps + 2)]
    assert newest(tmp_path).step == num_steps + 2
    # Both sessions in one picture, and each by itself.
    checked = rrfp_here(tmp_path, "trace", "check", str(run))
    assert (checked.returncode, checked.stderr) == (0, "")
    assert {path.name for path in run.glob("*.pftrace")} == {
        "trace.pftrace",
        "trace-2.pftrace",
        "trace-joined.pftrace",
    }
    frames = load_frames(resolve_trace(run), with_warm_up=True)
    assert frames.steps == [*range(num_steps + 2)]
    assert load_frames(run / "trace-2.pftrace").steps == [num_steps, num_steps + 1]
    # Nothing is left to train.
    done = rrfp_here(tmp_path, "train", f"--out={run}", *TINY, *flags, *again)
    assert (done.returncode, "steps are trained" in done.stderr) == (0, True), done.stderr


def test_what_was_being_saved_goes_with_the_run(tmp_path: Path) -> None:
    """SIGINT ends ranks at once, amid the save that SIGTERM asked for."""
    run, ck = tmp_path / "run", tmp_path / "ck"
    large = ("--hidden=256", "--save-every=1", "--no-trace")
    with Training(run, "--pp=2", f"--save={ck}", *ENDLESS, *large) as training:
        training.await_that(lambda: any(ck.glob(".saving-*/*.distcp")), "files of a save")
        training.process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        training.process.send_signal(signal.SIGINT)
        training.ended()
    assert [*ck.glob(".saving-*")] == []


def test_what_a_dead_run_was_saving_goes_with_the_next_start(tmp_path: Path) -> None:
    """Also if that has nothing to train; but not while another run saves."""
    made_up(tmp_path, 2)
    saving = tmp_path / "ck" / f".saving-5-{'a' * 32}"
    saving.mkdir()
    again = ("train", *FLAGS, "--save=ck", "--resume", "--steps=2")
    with (tmp_path / "ck" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert rrfp_here(tmp_path, *again).returncode == 0
        assert saving.exists()
    done = rrfp_here(tmp_path, *again)
    assert (done.returncode, "All 2 steps are trained" in done.stderr) == (0, True)
    assert not saving.exists()


@pytest.mark.parametrize("is_ignored", [True, False], ids=["sighup-ignored", "sighup"])
def test_a_terminal_that_goes_away(tmp_path: Path, is_ignored: bool) -> None:
    """As when a window is closed, with `disown` or `nohup` before or without."""
    run = RunDir(tmp_path / "run")
    terminal, other_end = pty.openpty()

    def be_in_terminal() -> None:
        fcntl.ioctl(other_end, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)

    flags = ("--pp=1", f"--steps={6 if is_ignored else 10**6}", "--save", str(tmp_path / "ck"))
    command = [sys.executable, "-m", "rrfp", "train", "--out", str(run.path), *TINY, *flags]
    process = subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm"},
        start_new_session=True,
        preexec_fn=be_in_terminal,
        stdin=other_end,
        stdout=other_end,
        stderr=other_end,
    )
    os.close(other_end)
    try:
        shown = b""
        while len(read_metrics(run.path)) < 2:
            assert process.poll() is None, shown.decode()
            if select.select([terminal], [], [], 0.1)[0]:
                shown += os.read(terminal, 1 << 16)
        os.close(terminal)
        code = process.wait(timeout=120)
    finally:
        process.kill()
        process.wait()
    ending = read_ending(run)
    assert ending is not None
    if is_ignored:
        assert (code, ending.outcome, newest(tmp_path).step) == (0, Outcome.FINISHED, 6)
    else:
        assert (code, ending.outcome) == (1, Outcome.STOPPED)
        assert ending.error == "the run was stopped by SIGHUP"
    assert run.trace.exists()
    assert not processes_of(run.path)
