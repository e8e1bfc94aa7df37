"""`rrfp train` from end to end: what it writes, what it prints, and how it ends when it must."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rrfp.cli.progress import TrainDisplay
from rrfp.train.settings import TrainSettings
from tests.trained import (
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

STEPS = 4
LIMIT = 2

pytestmark = pytest.mark.timeout(200)


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


def test_run_json_tells_settings_versions_and_ranks(finished: Finished) -> None:
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
def test_a_training_goes_on_unheard(flags: tuple[str, ...], code: int, tmp_path: Path) -> None:
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
        # Whoever waits for the end asks again.
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
        # Whoever waits for it in a collective would do so for gloo's 300 s.
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
    """Where there is no terminal; a line that is not whole yet is left for later."""
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
