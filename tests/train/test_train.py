"""`rrfp train` from end to end: what it writes, what it prints, and how it ends when it must."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
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
from rrfp.cli.progress import TrainDisplay
from rrfp.trace.locate import resolve_trace
from rrfp.trace.outcome import Ending, Outcome, read_ending
from rrfp.trace.run_dir import RunDir
from rrfp.train.checkpoints import run_start as beginning
from rrfp.train.launch import processes as children
from rrfp.train.launch.hosts import gathering, joining
from rrfp.train.launch.hosts.host_status import HostHeartbeat
from rrfp.train.launch.hosts.joining import JoinedHosts
from rrfp.train.launch.processes import start_rank
from rrfp.train.launch.store import file_store
from rrfp.train.settings import TrainSettings
from tests.train.checkpointed import FLAGS, made_up, newest
from tests.train.trained import (
    ENDLESS,
    TINY,
    Training,
    assert_opens,
    await_no_process,
    pid_of,
    processes_of,
    read_metrics,
    rrfp,
    rrfp_here,
)

pytestmark = pytest.mark.timeout(300)


STEPS = 4
LIMIT = 2


class Finished:
    """A run that came to its end, and what it printed."""

    def __init__(self, directory: Path, *flags: str) -> None:
        done = rrfp(directory, "train", *flags)
        assert done.returncode == 0, done.stderr
        (self.run,) = (path for path in (directory / "runs").iterdir() if not path.is_symlink())
        self.out, self.err = done.stdout, done.stderr
        self.metrics = read_metrics(self.run)
        self.description = json.loads((self.run / "run.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A readiness-first run with a limit, set by a file and by flags."""
    directory = tmp_path_factory.mktemp("ready")
    texts = directory / "texts"
    texts.mkdir()
    for length in range(4, 60, 3):
        (texts / f"{length}.txt").write_text("x" * length)
    (directory / "run.toml").write_text(
        f'limit = {LIMIT}\nsteps = 99\nvariable-lengths = true\ndata = "texts"\n'
    )
    return Finished(directory, "--config", "run.toml", "--steps", str(STEPS), *TINY)


def test_run_json_has_settings_versions_and_ranks(finished: Finished) -> None:
    told = finished.description
    settings = told["settings"]
    assert settings.keys() == TrainSettings().described().keys()
    assert (settings["steps"], settings["limit"], settings["variable_lengths"]) == (4, LIMIT, True)
    assert (settings["hint"], settings["dispatch"], settings["pp"]) == ("bf", "ready", 4)
    assert {"python", "rrfp", "torch", "megatron-core", "perfetto"} <= told["versions"].keys()
    assert told["world"] == 4
    links = {(link["from"], link["to"]): link["plane"] for link in told["transport"]["links"]}
    assert links == dict.fromkeys([(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)], "shm")
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1, 2, 3]
    assert {rank["host"] for rank in told["ranks"]} == {socket.gethostname()}
    assert len({rank["pid"] for rank in told["ranks"]}) == 4


def test_every_step_has_its_metrics(finished: Finished) -> None:
    assert [line["step"] for line in finished.metrics] == list(range(STEPS))
    for line in finished.metrics:
        assert line["loss"] > 0
        assert line["grad_norm"] > 0
        assert line["step_time_s"] > 0
        # Variable lengths: at most a whole sequence of 32 each.
        assert 4 <= line["tokens"] <= 4 * 32
        assert 0 < line["bubble_fraction"] < 1
        assert len(line["peak_held"]) == 4
        assert max(line["peak_held"]) <= LIMIT
    assert max(max(line["peak_held"]) for line in finished.metrics) == LIMIT
    assert len({line["tokens"] for line in finished.metrics}) > 1


def test_the_output_is_the_table_and_the_rest_is_for_people(finished: Finished) -> None:
    rows = [line.split()[:2] for line in finished.out.splitlines() if line[1:5].strip().isdigit()]
    assert rows == [[str(rank), str(rank)] for rank in range(4)]
    assert "step" not in finished.out.replace(f"{STEPS} steps", "")
    for step in range(STEPS):
        assert f"step {step + 1}/{STEPS}   loss " in finished.err
    assert "The trace is runs/" in finished.err
    assert re.search(
        r"^Next: (\S.*) trace view\n      \1 analyze$",
        finished.err,
        re.MULTILINE,
    )
    assert finished.run.name.endswith("-bf")
    assert (finished.run.parent / "latest").resolve() == finished.run


def test_the_trace_is_whole(finished: Finished) -> None:
    checked = rrfp_here(finished.run.parent.parent, "trace", "check")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert not (finished.run / "records").exists()


def test_bubbles_agree_with_the_metrics_and_add_up(finished: Finished) -> None:
    directory = finished.run.parent.parent
    for line in finished.metrics:
        step = line["step"]
        steps = f"{step}:{step + 1}"
        shown = rrfp_here(directory, "analyze", "bubbles", "--steps", steps, "--format", "json")
        report = json.loads(shown.stdout)
        assert report["bubble_fraction"] == pytest.approx(line["bubble_fraction"], abs=1e-9)
        for rank, busy_fraction in zip(report["ranks"], line["busy_fraction"], strict=True):
            parts = rank["busy_s"] + sum(rank["causes"].values())
            assert parts == pytest.approx(report["window_s"], abs=1e-6)
            assert rank["bubble_fraction"] == pytest.approx(1 - busy_fraction, abs=1e-9)
            assert rank["causes"]["overhead"] >= 0


def test_bubbles_fail_above_a_fraction(finished: Finished) -> None:
    directory = finished.run.parent.parent
    assert rrfp_here(directory, "analyze", "bubbles", "--fail-above", "1.0").returncode == 0
    shown = rrfp_here(directory, "analyze", "bubbles", "--fail-above", "0.001")
    assert shown.returncode == 3
    assert "above the 0.001 of --fail-above" in shown.stderr


def test_other_tools_can_read_the_trace(finished: Finished) -> None:
    """Perfetto's own message classes alone: the slices, their annotations, and nothing open."""
    depths: dict[int, int] = {}
    ran: dict[tuple[int, str], list[int]] = {}
    for kind, track, name, notes in track_events(finished.run / "trace.pftrace"):
        depths[track] = depths.get(track, 0) + kind
        assert depths[track] in (0, 1)
        if kind == 1 and name[0] in "FBW" and name[1:].isdigit():
            assert name == f"{notes['kind']}{notes['microbatch']}"
            assert notes["stage"] == notes["rank"]
            assert notes["chunk"] == 0
            assert 1 <= notes["ready"] <= 8
            assert 0 <= notes["skipped"] < 8
            assert 0 <= notes["hint_position"] < 8
            ran.setdefault((notes["rank"], name), []).append(notes["step"])
    assert not any(depths.values())
    expected = {(rank, f"{kind}{i}") for rank in range(4) for kind in "FB" for i in range(4)}
    assert ran == {task: list(range(STEPS)) for task in expected}


def track_events(trace: Path) -> Iterator[tuple[int, int, str, dict[str, Any]]]:
    """Each beginning (1) and end (-1) of a slice: its track, its name, its annotations."""
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

    for packet in pb.Trace.FromString(trace.read_bytes()).packet:
        event = packet.track_event
        if event.type in (pb.TrackEvent.TYPE_SLICE_BEGIN, pb.TrackEvent.TYPE_SLICE_END):
            notes = {
                note.name: getattr(note, note.WhichOneof("value"))
                for note in event.debug_annotations
            }
            kind = 1 if event.type == pb.TrackEvent.TYPE_SLICE_BEGIN else -1
            yield kind, event.track_uuid, event.name, notes


@pytest.mark.slow
def test_a_fixed_order_holds_what_it_says_and_nothing_need_be_recorded(tmp_path: Path) -> None:
    flags = ("--dispatch", "fixed", "--hint", "1f1b", "--no-trace", "--steps", "2")
    finished = Finished(tmp_path, *flags, *TINY)
    assert [line["peak_held"] for line in finished.metrics] == [[4.0, 3.0, 2.0, 1.0]] * 2
    assert [line["bubble_fraction"] for line in finished.metrics] == [None, None]
    assert [line["tokens"] for line in finished.metrics] == [128, 128]
    left = {"run.json", "metrics.jsonl", "outcome.json", "logs"}
    assert {path.name for path in finished.run.iterdir()} == left
    assert not (tmp_path / "runs" / "latest").is_symlink()
    assert finished.out == ""


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "code"), [((), 0), (("--dtype", "bf16", "--device", "tpu"), 2)])
def test_training_goes_on_without_a_reader_of_its_output(
    flags: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    """As under `| head -1`: it is trained to its end, and its exit code is its own."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        command = [sys.executable, "-m", "rrfp", "train", "--steps", "2", "--out", "run"]
        done = subprocess.run(
            [*command, *TINY, *flags], cwd=tmp_path, stdout=closed, stderr=closed, timeout=150
        )
    assert done.returncode == code
    if code == 0:
        assert len(read_metrics(tmp_path / "run")) == 2
        told = json.loads((tmp_path / "run" / "outcome.json").read_text())
        assert told == {"outcome": "finished", "error": None, "culprit": None}
        assert_opens(tmp_path / "run")


KILLS = [
    (1, ["--pp", "4"]),
    (3, ["--pp", "2", "--tp", "2"]),
    (0, ["--pp", "4", "--dispatch", "megatron"]),
    (2, ["--pp", "2", "--dp", "2"]),
    (1, ["--pp", "2", "--tp", "2", "--dispatch", "megatron"]),
]


@pytest.mark.parametrize(
    ("rank", "flags"), [KILLS[0], *(pytest.param(*k, marks=pytest.mark.slow) for k in KILLS[1:])]
)
def test_a_killed_rank_ends_the_run_and_is_named(
    tmp_path: Path, rank: int, flags: list[str]
) -> None:
    with Training(tmp_path / "run", *ENDLESS, *flags) as training:
        training.await_steps(3)
        pid = pid_of(training.run, rank)
        os.kill(pid, signal.SIGKILL)
        code, out, err = training.ended(timeout_s=30)
        assert (code, out) == (1, "")
        sentence = err.splitlines()[-1]
        assert sentence.startswith(f"rrfp: rank {rank} (pid {pid}) was killed by SIGKILL; ")
        assert "The trace of the finished steps is " in err
        assert "Traceback" not in err
        assert not processes_of(training.run)
        assert_opens(training.run)


@pytest.mark.slow
def test_a_rank_killed_while_it_starts_is_named(tmp_path: Path) -> None:
    with Training(tmp_path / "run", *ENDLESS) as training:
        pid = training.await_start(2)
        os.kill(pid, signal.SIGKILL)
        code, _, err = training.ended(timeout_s=30)
        assert code == 1
        assert err.splitlines()[-1].startswith(f"rrfp: rank 2 (pid {pid}) was killed by SIGKILL; ")
        assert training.num_steps == 0
        assert not processes_of(training.run)


def test_ctrl_c_ends_the_run_at_once(tmp_path: Path) -> None:
    with Training(tmp_path / "run", *ENDLESS) as training:
        training.await_steps(3)
        # A user who waits for the end presses it again.
        while training.process.poll() is None:
            os.killpg(training.process.pid, signal.SIGINT)
            time.sleep(0.02)
        code, out, err = training.ended(timeout_s=20)
        assert (code, out) == (130, "")
        assert err.splitlines()[-1] == "rrfp: interrupted"
        assert "death signal" not in err
        assert "Traceback" not in err
        assert not processes_of(training.run)
        assert_opens(training.run)


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGHUP])
def test_another_signal_ends_the_run(tmp_path: Path, signal_number: signal.Signals) -> None:
    with Training(tmp_path / "run", *ENDLESS) as training:
        training.await_steps(3)
        training.process.send_signal(signal_number)
        code, _, err = training.ended(timeout_s=20)
        assert code == 1
        assert err.splitlines()[-1] == f"rrfp: the run was stopped by {signal_number.name}"
        assert not processes_of(training.run)
        assert_opens(training.run)


@pytest.mark.slow
def test_ranks_end_without_their_launcher_and_the_trace_is_made_later(tmp_path: Path) -> None:
    with Training(tmp_path / "run", *ENDLESS) as training:
        training.await_steps(3)
        training.process.kill()
        training.process.wait()
        await_no_process(training.run, timeout_s=20)
        assert not (training.run / "trace.pftrace").exists()
        assert_opens(training.run)
        assert (training.run / "trace.pftrace").exists()


@pytest.mark.slow
def test_a_stopped_rank_is_named_if_its_peers_give_it_up_first(tmp_path: Path) -> None:
    """As they do where the launcher was stopped, too."""
    flags = ("--microbatches", "64", "--silence", "5")
    with Training(tmp_path / "run", *ENDLESS, *flags) as training:
        # A rank that waits for it in a collective would wait for gloo's 300 s.
        pid = training.stop_amid_tasks(2)
        training.process.send_signal(signal.SIGSTOP)
        log = training.run / "logs" / "rank-1.log"
        while "rank 2 was silent for 10 s" not in log.read_text():
            time.sleep(0.1)
        training.process.send_signal(signal.SIGCONT)
        code, _, err = training.ended(timeout_s=30)
        assert code == 1
        sentence = err.splitlines()[-1]
        assert sentence.startswith(f"rrfp: rank 2 (pid {pid}) stood still in ")
        assert "a signal had stopped it" in sentence
        assert not processes_of(training.run)


@pytest.mark.slow
def test_a_training_that_breaks_down_stops(tmp_path: Path) -> None:
    with Training(tmp_path / "run", *ENDLESS, "--lr", "1e30") as training:
        code, _, err = training.ended()
        assert code == 1
        assert "failed: step 1 has a loss of nan" in err.splitlines()[-1]
        assert "try a smaller --lr (see " in err.splitlines()[-1]
        assert [line["step"] for line in read_metrics(training.run)] == [0]
        assert not processes_of(training.run)


def test_the_display_says_a_line_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal; an incomplete line is left for later."""
    metrics = tmp_path / "metrics.jsonl"
    told = {"loss": 5.0, "tokens": 64, "step_time_s": 0.5, "busy_fraction": [0.5]}
    lines = [
        json.dumps({"step": step, "heldout_loss": heldout, **told}) + "\n"
        for step, heldout in enumerate((None, 0.25, None, 0.0))
    ]
    with TrainDisplay(metrics, TrainSettings(steps=9)):
        metrics.write_text("".join(lines) + lines[0][:20])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[2:] == [
        f"step {step + 1}/9   loss 5.0000   {heldout}128 tokens/s   0.50 s/step"
        for step, heldout in enumerate(
            (
                "",
                "(held-out 0.2500)   ",
                "(held-out 0.2500)   ",
                "(held-out 0.0000)   ",
            )
        )
    ]


# How a session of `rrfp train` ends: what it says, and that SIGTERM may come at any moment.


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
    monkeypatch.setattr(beginning, "start_or_resume", lambda *_, **__: signal.raise_signal(SIGTERM))
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
    monkeypatch.setattr(children, "start_rank", lambda _, *rest: start_rank(command, *rest))


DONE = """
from rrfp.train.launch.rank_status import finish, start_heartbeat
start_heartbeat(waits_on_device=False)
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
    monkeypatch.setattr(cli_train, "_print_summary", report)
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
    def parting(*_: Any) -> Iterator[JoinedHosts]:
        try:
            heartbeat = HostHeartbeat(connect, node_rank, 2, 15.0)
            yield JoinedHosts(file_store(tmp_path), heartbeat, connect)
        finally:
            signal.raise_signal(SIGTERM)

    reported: list[RunDir] = []
    ranks_are(monkeypatch, program)
    monkeypatch.setattr(joining, "joined_hosts", parting)
    monkeypatch.setattr(gathering, "gathering_records", lambda *_: nullcontext())
    monkeypatch.setattr(cli_train, "_print_summary", lambda run, *_: reported.append(run))
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
    cli_train.print_pace(run, 1)
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
    """SIGINT ends ranks at once, in the middle of the save that SIGTERM asked for."""
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
