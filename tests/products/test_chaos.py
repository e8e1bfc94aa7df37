"""`rrfp chaos`: the plan follows the seed, the judge can say no, and only its own are touched."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from rrfp.chaos.disk import LimitedFiles, PrivateDisk
from rrfp.chaos.injection import Injected, Pace, wait_for_moment
from rrfp.chaos.plan import (
    LINK_FAULTS,
    PER_TRAINING,
    TEMPORARY_FAULTS,
    DisturbedTraining,
    Fault,
    FaultKind,
    Stage,
    plan_faults,
)
from rrfp.chaos.session import MarkedProcesses, Process, flags_of, metric_lines
from rrfp.chaos.verdict import Observation, Verdict, judge, judge_late_end
from rrfp.cli import app
from rrfp.errors import RrfpError, UsageError
from rrfp.trace.outcome import Ending, FaultOrigin, FoundBy, Outcome
from rrfp.trace.run_dir import RunDir
from rrfp.train.settings import TrainSettings
from tests.train.trained import rrfp, rrfp_here

MARK = "RRFP_TEST_OF_CHAOS"

TRAININGS = st.builds(
    DisturbedTraining,
    num_ranks=st.integers(1, 16),
    num_steps=st.integers(1, 100),
    save_every=st.integers(1, 30),
    kinds=st.lists(st.sampled_from(FaultKind), min_size=1, unique=True),
)


@given(seed=st.integers(0, 2**32 - 1), num_faults=st.integers(1, 60), training=TRAININGS)
def test_the_plan_follows_the_seed_alone(
    seed: int, num_faults: int, training: DisturbedTraining
) -> None:
    plan = plan_faults(seed, num_faults, training)
    assert plan == plan_faults(seed, num_faults, training)
    faults = [fault for of_training in plan for fault in of_training]
    assert [fault.number for fault in faults] == [*range(1, num_faults + 1)]
    assert max(map(len, plan)) <= PER_TRAINING
    counts = Counter(fault.kind for fault in faults)
    assert counts.keys() <= {*training.kinds}
    assert max(counts.values()) - min(counts[kind] for kind in training.kinds) <= 1
    for of_training in plan:
        moments = [fault.after_step for fault in of_training]
        assert moments == sorted(moments)
        for before, fault in zip([None, *of_training], of_training, strict=False):
            check_can_be(fault, before, training)


def check_can_be(fault: Fault, before: Fault | None, training: DisturbedTraining) -> None:
    """Whether a fault, after the one before it in its training, has a moment and a victim."""
    of_process = fault.kind in (FaultKind.KILL, FaultKind.STOP, FaultKind.CONT)
    assert 0 <= fault.share < 1
    assert fault.after_step <= training.num_steps
    assert fault.rank is None or (of_process and fault.rank < training.num_ranks)
    # Nobody watches over a launcher that is stopped for good.
    assert fault.kind is not FaultKind.STOP or fault.rank is not None
    assert bool(fault.signal) == (fault.kind is FaultKind.KILL)
    if fault.stage is Stage.START:
        assert before is None or before.kind in (FaultKind.KILL, FaultKind.STOP)
    if fault.stage is Stage.SAVE:
        assert fault.after_step % training.save_every == 0
    if fault.stage in (Stage.START, Stage.CLOSE):
        assert of_process


def test_other_seeds_are_other_faults() -> None:
    training = DisturbedTraining(num_ranks=4, num_steps=40, save_every=8)
    assert len({str(plan_faults(seed, 20, training)) for seed in range(20)}) == 20


KILL = Fault(1, FaultKind.KILL, Stage.STEP, 3, 0.5, rank=1, signal="SIGKILL")
STOP = Fault(2, FaultKind.STOP, Stage.STEP, 3, 0.5, rank=1)
CONT = Fault(3, FaultKind.CONT, Stage.STEP, 3, 0.5, rank=1, hold_s=2.0)
DROP = Fault(4, FaultKind.DROP, Stage.STEP, 3, 0.5)
DISK = Fault(5, FaultKind.DISK, Stage.STEP, 3, 0.5, hold_s=2.0)
OF_RANK = Injected(100.0, 3, rank=1)
OF_LINK = Injected(100.0, 3, link=(0, 1))
OF_DISK = Injected(100.0, 3, path="/tmp/full")
OF_LAUNCHER = Injected(100.0, 3)


@dataclass
class Resumed:
    """A session that goes on after step 16. The one before died as it wrote the next checkpoint."""

    finished: list[int]
    """How many steps are finished, look by look."""
    first_step = 16
    checkpoints = SimpleNamespace(is_saving=lambda step: step == 24)

    @property
    def num_finished(self) -> int:
        return self.finished.pop(0)

    def wait_until(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        while not holds():
            pass
        return True

    def sleep(self, seconds: float) -> bool:
        return True


def test_a_checkpoint_that_a_session_before_left_is_not_being_written() -> None:
    session: Any = Resumed([16, 16, 24, 25])
    fault = Fault(1, FaultKind.DISK, Stage.SAVE, 24, 0.5)
    assert wait_for_moment(session, fault, Pace(1.0, 1.0, 1.0, 1.0), 1.0)
    assert session.finished == [25]


def failed(
    injected: Injected, culprit: FaultOrigin | None, output: str = "rrfp: it failed"
) -> Observation:
    """The observation of a run that failed one second after a fault."""
    ending = Ending(Outcome.FAILED, output, culprit)
    return Observation(injected, 1.0, 35.0, 1, False, ending, output, steps_lost=2)


WENT_ON = Observation(OF_RANK, 3.0, 35.0, None, True, None, "")
KILLED = failed(OF_RANK, FaultOrigin(FoundBy.LAUNCHER, rank=1))


@pytest.mark.parametrize(
    ("fault", "seen", "found_by", "named_right"),
    [
        (KILL, KILLED, "launcher", True),
        (STOP, KILLED, "launcher", True),
        (STOP, failed(OF_RANK, FaultOrigin(FoundBy.LINK, rank=1)), "link", True),
        (CONT, WENT_ON, "", None),
        (DROP, replace(WENT_ON, injected=OF_LINK), "", None),
        (
            DISK,
            failed(OF_DISK, FaultOrigin(FoundBy.RANK, 0), "rrfp: /tmp/full is full"),
            "rank",
            True,
        ),
        (DISK, replace(WENT_ON, injected=OF_DISK), "", None),
        # A run that saves takes SIGTERM as a request.
        (
            replace(KILL, signal="SIGTERM"),
            Observation(
                OF_RANK, 1.0, 35.0, 0, False, Ending(Outcome.STOPPED), "Stopped by SIGTERM"
            ),
            "request",
            None,
        ),
        # A fault that comes as the run ends anyway.
        (
            replace(KILL, signal="SIGTERM", stage=Stage.CLOSE),
            Observation(OF_RANK, 1.0, 35.0, 0, False, Ending(Outcome.FINISHED), ""),
            "",
            None,
        ),
        # A launcher that was killed says nothing.
        (
            replace(KILL, rank=None),
            Observation(OF_LAUNCHER, 1.0, 35.0, -9, False, Ending(Outcome.KILLED), ""),
            "its ranks",
            None,
        ),
    ],
)
def test_what_is_as_it_must_be_passes(
    fault: Fault, seen: Observation, found_by: str, named_right: bool | None
) -> None:
    verdict = judge(fault, seen)
    assert verdict.complaints == ()
    assert (verdict.found_by, verdict.named_right) == (found_by, named_right)
    assert not verdict.has_passed  # until the training is over
    assert verdict.compared("").has_passed


@pytest.mark.parametrize(
    ("fault", "seen", "complaint"),
    [
        (KILL, failed(OF_RANK, FaultOrigin(FoundBy.LINK, rank=0)), "it did not name rank 1"),
        (KILL, failed(OF_RANK, FaultOrigin(FoundBy.COLLECTIVE)), "it did not name rank 1"),
        (STOP, failed(OF_RANK, None), "it did not name rank 1: rrfp: it failed"),
        (DROP, failed(OF_LINK, FaultOrigin(FoundBy.LINK, rank=1)), "it did not name link 0-1"),
        (DROP, failed(OF_LINK, FaultOrigin(FoundBy.LINK, link=(0, 1))), "it should have survived"),
        (CONT, KILLED, "it should have survived"),
        (DISK, failed(OF_DISK, FaultOrigin(FoundBy.RANK, 0), "rrfp: OSError"), "did not name disk"),
        (STOP, replace(KILLED, seconds=53.0), "it took 53 s, above the limit of 35 s"),
        (STOP, replace(KILLED, exit_code=None, seconds=36.0), "it neither ended nor went on"),
        (KILL, replace(KILLED, exit_code=0), "it ended with exit code 0"),
        (KILL, replace(KILLED, output="rrfp: x; this is a bug, please"), "it met a bug"),
        (KILL, replace(KILLED, left=("it left process 7",)), "it left process 7"),
    ],
)
def test_what_is_not_is_said(fault: Fault, seen: Observation, complaint: str) -> None:
    verdict = judge(fault, seen)
    assert any(complaint in each for each in verdict.complaints), verdict.complaints
    assert not verdict.compared("").has_passed


def test_a_full_disk_may_end_a_session_later_and_nothing_else_may() -> None:
    for told, complaint in (
        ("rrfp: the checkpoint of step 40 could not be written to /tmp/full/ck", ()),
        ("rrfp: no memory (see /tmp/full/run/logs/rank-0.log)", ("it ended later: ",)),
    ):
        verdicts = [
            judge(DISK, replace(WENT_ON, injected=OF_DISK)),
            judge(DROP, replace(WENT_ON, injected=OF_LINK)),
        ]
        judge_late_end(verdicts, told)
        assert verdicts[0].complaints == ()
        assert tuple(each[:16] for each in verdicts[1].complaints) == complaint


def test_a_training_that_comes_out_otherwise_fails_its_faults() -> None:
    verdict: Verdict = judge(KILL, KILLED).compared("2 parameters differ")
    assert verdict.is_same is False
    assert verdict.complaints == ("2 parameters differ",)
    assert not verdict.has_passed


@contextmanager
def sleeper(**environment: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it runs its own program by now
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("refuses", [False, True])
def test_only_marked_processes_are_found_and_signalled(
    refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a container refuses descriptors of processes."""
    if refuses:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    ours, others = MarkedProcesses(MARK, "ours"), MarkedProcesses(MARK, "others")
    with sleeper(**{MARK: "ours"}) as process, sleeper() as stranger:
        (found,) = ours
        assert (found.pid, found.rank) == (process.pid, None)
        assert [*others] == []
        # Neither one without the mark, nor a later process of the same number, gets a signal.
        assert not others.send(found, signal.SIGKILL)
        assert not ours.send(replace(found, started=found.started + 1), signal.SIGKILL)
        assert not ours.send(Process(stranger.pid, found.started, None), signal.SIGKILL)
        time.sleep(0.1)
        assert (process.poll(), stranger.poll()) == (None, None)
        ours.kill()
        assert process.wait(10) == -signal.SIGKILL
        assert not ours.send(found, signal.SIGKILL)
        assert stranger.poll() is None


def refuse(*_: object) -> NoReturn:
    raise PermissionError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("kind", ["limited", "private"])
def test_a_disk_is_full_for_a_while(kind: str, tmp_path: Path) -> None:
    """In a process of its own, which may come to be alone with what it mounts."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.products.test_chaos", kind, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    if done.stdout == "may not mount\n":
        pytest.skip("this user may not mount")
    full = {"limited": "File too large", "private": "No space left on device"}[kind]
    assert done.stdout.splitlines() == ["written", full, full, "written"], done.stderr
    # What was mounted nobody else has seen.
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"] * (kind == "limited")


def test_the_limits_of_processes_that_ended_are_forgotten(tmp_path: Path) -> None:
    disk, ours = LimitedFiles(tmp_path), MarkedProcesses(MARK, "ours")
    with sleeper(**{MARK: "ours"}):
        disk.fill(ours)
        assert len(disk._before) == 1
    disk.empty(ours)
    assert not disk._before


def test_metrics_are_read_up_to_the_line_that_is_being_written(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert metric_lines(run) == []
    run.metrics.write_text('{"step": 0}\n{"st')
    assert metric_lines(run) == [{"step": 0}]
    run.metrics.write_text('{"step": 0}\n{"st\n')
    with pytest.raises(RrfpError, match=r"metrics\.jsonl is damaged in line 2"):
        metric_lines(run)


def test_a_session_gets_the_flags_of_its_settings() -> None:
    settings = TrainSettings(
        pp=2,
        hint="bfw",
        no_trace=True,
        save=Path("a b"),
        hold=3,
        layout="3,5",
        lr=1e-3,
        jitter="J1",
    )
    flags = flags_of(settings)
    assert "--no-trace" in flags
    assert "--save=a b" in flags
    assert not any(flag.startswith("--resume") for flag in flags)
    group: Any = typer.main.get_command(app.app)
    read = group.commands["train"].make_context("train", flags).params
    told = {name: value for name, value in read.items() if value is not None}
    assert TrainSettings(**told).described() == settings.described()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--nnodes=2",), "No such option: --nnodes"),
        (("--fault=drop", "--dispatch=megatron"), "Megatron's own schedule has no links of rrfp"),
        (("--fault=delay", "--pp=1"), "a pipeline of one rank has no links"),
        (("--fault=flood",), "'flood' is not one of"),
        (("--faults=0",), "--faults"),
        (("--pp=0",), "--pp is 0"),
    ],
)
def test_what_makes_no_sense_is_refused(
    flags: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    done = rrfp_here(tmp_path, "chaos", *flags)
    assert done.returncode == UsageError.exit_code
    assert sentence in done.stderr


def test_one_of_several_under_a_scheduler_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    done = rrfp_here(tmp_path, "chaos")
    assert done.returncode == UsageError.exit_code
    assert "this command is one of 2 that were started together" in done.stderr


def test_a_file_of_settings_may_not_say_where_to_save(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[run]\nnnodes = 2\n")
    done = rrfp_here(tmp_path, "chaos", "--config=run.toml")
    assert done.returncode == UsageError.exit_code
    assert done.stderr == (
        "rrfp: run.toml sets nnodes, but faults are injected on one host; leave it out\n"
    )


def borne(directory: Path, *flags: str) -> list[dict[str, Any]]:
    """Run a short campaign whose faults all pass; returns its verdicts."""
    short = ("--steps=12", "--save-every=4", "--no-trace", "--format=json")
    done = rrfp(directory, "chaos", *short, *flags, timeout_s=800)
    assert done.returncode == 0, done.stderr
    assert [*directory.iterdir()] == []
    faults: list[dict[str, Any]] = json.loads(done.stdout)["faults"]
    assert all(fault["is_same"] and fault["complaints"] == [] for fault in faults)
    return faults


@pytest.mark.timeout(850)
def test_a_killed_process_and_one_that_pauses(tmp_path: Path) -> None:
    # One rank, for each start of one takes seconds.
    flags = ("--pp=1", "--faults=2", "--fault=kill", "--fault=cont", "--seed=5")
    faults = borne(tmp_path, *flags)
    assert {fault["kind"] for fault in faults} == {"kill", "cont"}
    for fault in faults:
        assert fault["has_survived"] == (fault["kind"] == "cont")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dispatch", ["ready", "megatron"])
def test_every_kind_of_fault(dispatch: str, tmp_path: Path) -> None:
    kinds = {*FaultKind} - (LINK_FAULTS if dispatch == "megatron" else set())
    faults = borne(tmp_path, f"--faults={len(kinds)}", f"--dispatch={dispatch}", "--seed=6")
    assert {fault["kind"] for fault in faults} == kinds
    for fault in faults:
        assert fault["has_survived"] or fault["kind"] not in TEMPORARY_FAULTS


MARK = "RRFP_TEST_OF_DISKS"
_WRITER = """
import sys
for line in sys.stdin:
    try:
        with open(sys.argv[1], "a") as file:
            file.write("x" * 10000)
        print("written", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""


def fill_and_empty() -> None:
    """Write a file while its disk becomes full, and empty again. Arguments: `limited` or `private`,
    and a directory. Run as a process of its own, which may mount the disk."""
    kind, path = sys.argv[1], Path(sys.argv[2])
    disk: LimitedFiles | PrivateDisk = LimitedFiles(path)
    if kind == "private":
        try:
            disk = PrivateDisk(path)
        except OSError:
            sys.stdout.write("may not mount\n")
            return
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, path / "file"],
        env=os.environ | {MARK: str(path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    marked = MarkedProcesses(MARK, str(path))

    def write() -> None:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
        sys.stdout.write(writer.stdout.readline())

    write()
    disk.fill(marked)
    write()
    write()
    disk.empty(marked)
    write()
    writer.communicate()
    disk.close()


if __name__ == "__main__":
    fill_and_empty()
