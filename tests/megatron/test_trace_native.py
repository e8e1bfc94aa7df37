"""`rrfp.megatron.trace_native()`: Megatron's own schedule recorded, and left as it is."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rrfp.analyze.bubbles import CAUSES, Bubbles, bubbles, structural_of
from rrfp.analyze.frames import choose_steps, frames_of
from rrfp.errors import UsageError
from rrfp.interchange.formats import import_run
from rrfp.megatron.job import recording
from rrfp.megatron.job.recording import JobRecording
from rrfp.megatron.job.request import RecordingRequest
from rrfp.megatron.native.patch import NativePatch
from rrfp.megatron.native.schedule import HostTimer, NativeSchedule, _StepRecorder
from rrfp.planning.step_admission import StepFile
from rrfp.replay.recorded import read_run
from rrfp.replay.whatif import what_if
from rrfp.runtime.recorder import Recorder
from rrfp.schedule.named_hints import ORDERS
from rrfp.schedule.shape import FORWARD_ONLY, Shape
from rrfp.schedule.tasks import Cause, Kind, Task
from rrfp.trace import run_json as description
from rrfp.trace.check import check_contents
from rrfp.trace.locate import resolve_trace
from rrfp.trace.perfetto.reader import read_contents
from rrfp.trace.records import (
    BegunRecord,
    Phase,
    RankInfo,
    Record,
    Recording,
    TaskRecord,
    WaitRecord,
    evaluation_step,
    is_evaluation,
)
from rrfp.trace.run_dir import RunDir
from rrfp.trace.run_json import describe_run
from rrfp.trace.spill import is_being_written
from tests.e2e.ranks import run_ranks
from tests.fixtures.make_profiles import exported
from tests.megatron.native_runs import NativeRun, run_steps, train
from tests.train.checkpointed import train_prepared
from tests.train.trained import read_metrics

pytestmark = pytest.mark.timeout(400)


@dataclass(slots=True)
class Compared:
    """One rank's run without and with the recording, in one process."""

    plain: NativeRun
    traced: NativeRun


def train_twice(settings: dict[str, Any], out: Path) -> Compared:
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from rrfp.megatron import install, trace_native
    from rrfp.train.launch.process_groups import parallel_groups
    from rrfp.train.settings import TrainSettings
    from tests.megatron.training import SMALL

    chosen = TrainSettings(**{**SMALL, **settings})
    with parallel_groups(chosen) as layout:
        plain = run_steps(chosen, layout)
        # Megatron is initialised by now.
        trace_native(out)
        with pytest.raises(UsageError, match="replaced Megatron's schedule"):
            trace_native(out)
        with pytest.raises(UsageError, match="replaced Megatron's schedule"):
            install()
        traced = run_steps(chosen, layout, exported)
    return Compared(plain, traced)


def read_whole(run: Path) -> Recording:
    contents = read_contents(resolve_trace(run))
    assert check_contents(contents) == []
    return contents.recording


def evaluate_between(settings: dict[str, Any], out: Path) -> NativeRun:
    return train(settings, out, exported, evaluates=True)


def test_evaluations_are_distinguished(tmp_path: Path) -> None:
    num_steps, num_microbatches = 3, 4
    settings = {"pp": 2, "steps": num_steps, "microbatches": num_microbatches}
    ranks = run_ranks(2, evaluate_between, settings, tmp_path / "run", timeout_s=200)
    recording = read_whole(tmp_path / "run")
    in_turn = [step for number in range(num_steps) for step in (number, evaluation_step(number))]
    for number, rank in enumerate(ranks):
        (tmp_path / f"{number}.json").write_text(json.dumps(rank.profile))
    imported = import_run([tmp_path / f"{number}.json" for number in range(2)]).recording
    # The profiler begins after the first step and its evaluation.
    for found, steps in ((recording, in_turn), (imported, in_turn[2:])):
        for of_rank in found.ranks:
            tasks = Counter((task.step, task.kind) for task in of_rank.tasks)
            kinds = [(step, kind) for step in steps for kind in ("FB" if step >= 0 else "F")]
            assert tasks == dict.fromkeys(kinds, num_microbatches)
            assert [p.step for p in of_rank.phases if p.phase == Phase.SCHEDULE] == steps
        assert read_run(found).left_out == ()
        frames = choose_steps(frames_of(found))
        assert frames.num_left_out == sum(map(is_evaluation, steps))
        assert bubbles(frames).steps == tuple(step for step in steps if step >= 0)
        assert structural_of(frames).whole.structural > 0
    costs = [cost.step for cost in recording.ranks[0].costs]
    assert costs[: len(in_turn)] == in_turn


TIME_SLICE_NS = 10_000_000


def check_run(num_ranks: int, settings: dict[str, Any], order: str, tmp_path: Path) -> None:
    """Check a recorded and profiled run. The times of a third run count, whatever they are: a busy
    core may preempt a process between reading the clock for a record and for its range."""
    for attempt in range(3):
        out = tmp_path / str(attempt)
        out.mkdir()
        own, imported = recorded_and_profiled(num_ranks, settings, order, out)
        try:
            check_same(own, imported)
        except AssertionError:
            if attempt == 2:
                raise
        else:
            return


def recorded_and_profiled(
    num_ranks: int, settings: dict[str, Any], order: str, tmp_path: Path
) -> tuple[Bubbles, Bubbles]:
    """The bubbles in our records of a run, and in torch's profiles of it. The run is natively
    ordered, and learns the same with and without them."""
    out = tmp_path / "run"
    ranks = run_ranks(num_ranks, train_twice, settings, out, timeout_s=200)
    for rank in ranks:
        assert rank.traced.losses == rank.plain.losses
        assert rank.traced.grad_norms == rank.plain.grad_norms
        assert rank.traced.parameters_sha256 == rank.plain.parameters_sha256

    # The processes of a test end without atexit: the first command that opens the run merges.
    recording = read_whole(out)
    shape = Shape(num_ranks, 4, settings.get("chunks", 1))
    assert recording.settings["settings"]["hint"] == order  # type: ignore[index]
    assert len(recording.ranks) == num_ranks
    for rank_records in recording.ranks:
        for step in range(3):
            tasks = [task for task in rank_records.tasks if task.step == step]
            found = tuple(Task(t.stage, Kind(t.kind), t.microbatch) for t in tasks)
            assert found == ORDERS[order].for_shape(shape).rows[rank_records.info.pp_rank]
    assert what_if(recording, lambda _: []).replay_error < 0.05

    for number, rank in enumerate(ranks):
        (tmp_path / f"{number}.json").write_text(json.dumps(rank.traced.profile))
    imported = import_run([tmp_path / f"{number}.json" for number in range(num_ranks)])
    return bubbles(frames_of(recording), range(1, 3)), bubbles(frames_of(imported.recording))


def check_same(own: Bubbles, imported: Bubbles) -> None:
    """The times agree to 1% of the window and three time slices. The ranges' own time is overhead
    in one or the other."""
    near = 0.01 * own.window_ns + 3 * TIME_SLICE_NS
    assert imported.window_ns == pytest.approx(own.window_ns, abs=near)
    for left, right in zip(imported.ranks, own.ranks, strict=True):
        assert left.busy_ns == pytest.approx(right.busy_ns, abs=near)
        for cause in CAUSES:
            assert left.causes_ns[cause] == pytest.approx(right.causes_ns[cause], abs=near), cause


# Long tasks: what a range itself takes on two busy cores is then well below 1% of them.
LONG = {"hidden": 256, "seq_length": 128}
LONGER = {"hidden": 512, "seq_length": 256}


def test_a_pipeline_is_recorded_and_learns_the_same(tmp_path: Path) -> None:
    check_run(2, {"pp": 2, **LONG}, "1f1b", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "settings", "order"),
    [
        (4, {"pp": 4, **LONGER}, "1f1b"),
        (2, {"pp": 2, "chunks": 2, **LONGER}, "interleaved"),
        (1, {"pp": 1, **LONGER}, "1f1b"),
    ],
    ids=["pp4", "pp2-c2", "pp1"],
)
def test_other_layouts_are_recorded_and_learn_the_same(
    num_ranks: int, settings: dict[str, Any], order: str, tmp_path: Path
) -> None:
    check_run(num_ranks, settings, order, tmp_path)


SCRIPT = """
import logging, sys
from pathlib import Path
from tests.megatron.native_runs import train
logging.basicConfig(filename=sys.argv[2])
train({"pp": 2, "steps": 2}, Path(sys.argv[1]))
"""


def launched(tmp_path: Path, out: Path) -> str:
    """Run a script of two ranks under torchrun. Returns its messages without its log."""
    script, log = tmp_path / "train.py", tmp_path / "log"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
            *("--local-addr", "127.0.0.1", script, out, log),
        ],
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.stderr


@pytest.mark.slow
def test_the_trace_is_made_when_the_script_ends(tmp_path: Path) -> None:
    launched(tmp_path, tmp_path / "run")
    assert (tmp_path / "run" / "trace.pftrace").exists()
    assert not (tmp_path / "run" / "records").exists()
    assert len(read_whole(tmp_path / "run").ranks[1].tasks) == 2 * 8


@pytest.mark.slow
def test_a_run_that_cannot_be_recorded_goes_on(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    told = launched(tmp_path, tmp_path / "run")
    assert "the run is not recorded, the training goes on" in told
    assert "exists; choose another directory" in told
    assert not any((tmp_path / "run").iterdir())


def train_with_a_broken_recording(settings: dict[str, Any], out: Path) -> NativeRun:
    from rrfp.megatron.native import schedule as native

    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    native.NativeSchedule.settle = fails  # type: ignore[method-assign]
    return train(settings, out)


@pytest.mark.slow
def test_whatever_fails_while_recording_the_training_goes_on(tmp_path: Path) -> None:
    (plain,) = run_ranks(1, train, {"pp": 1}, timeout_s=100)
    (broken,) = run_ranks(
        1, train_with_a_broken_recording, {"pp": 1}, tmp_path / "run", timeout_s=100
    )
    assert broken == plain


class Handle:
    """A transfer under way, as torch gives it."""

    is_over = False

    def wait(self) -> None:
        self.is_over = True

    def is_completed(self) -> bool:
        return self.is_over


def test_waits_for_overlapping_transfers_are_recorded() -> None:
    times = iter(range(100))
    told: list[Record] = []
    tally = _StepRecorder(
        0,
        [],
        Shape(2, 9, kinds=FORWARD_ONLY),
        1,
        HostTimer(lambda: next(times)),
        nullcontext,
        None,
        told.append,
    )
    handle = Handle()
    received, gradient, handles = tally.communicate(
        lambda *_, **__: ("received", None, {"recv_prev": handle})
    )(SimpleNamespace(prev_rank=7), recv_prev=True)
    assert (received, gradient) == ("received", None)
    (taken,) = handles.values()
    taken.wait()
    assert taken.is_completed()
    records = tally.records(wait=True)
    assert records == [WaitRecord(0, 1, 0, Cause.WARMUP), WaitRecord(2, 3, 0, Cause.WARMUP)]
    # The host's tasks are recorded at once, and their begins before that.
    assert told[1::2] == records
    begun = [each for each in told if isinstance(each, BegunRecord)]
    assert told[::2] == begun
    assert [(each.doing, each.peer) for each in begun] == [(Cause.WARMUP, 7), (Cause.WARMUP, 7)]
    blocking = tally.communicate(lambda: ("received", None, None))
    assert blocking() == ("received", None, None)


class LateTimer(HostTimer):
    """For work on a GPU that has not caught up: times are known to those who wait."""

    knows_at_once = False

    def times_ns(self, marks: Sequence[int], *, wait: bool) -> Any:
        return super().times_ns(marks, wait=wait) if wait else None


def run_late() -> None:
    from rrfp.train import loop as rank

    class LateSchedule(NativeSchedule):
        def __init__(self, pp_rank: int, record: Any, *_: Any, **options: Any) -> None:
            super().__init__(pp_rank, record, LateTimer(), **options)

    rank.NativeSchedule = LateSchedule  # type: ignore[attr-defined]


def test_a_step_is_recorded_once_the_gpu_has_caught_up(tmp_path: Path) -> None:
    train_prepared(tmp_path, 3, run_late, dispatch="megatron", no_trace=False)
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(0 < line["bubble_fraction"] < 1 for line in lines)
    assert [line["peak_held"] for line in lines] == [[2.0, 1.0]] * 3


def train_with_overlap(settings: dict[str, Any]) -> tuple[NativeRun, NativeRun, list[Record]]:
    """This rank's run by Megatron alone, the same recorded, and the records of its last step."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from megatron.core.pipeline_parallel import schedules

    from rrfp.train.launch.process_groups import parallel_groups
    from rrfp.train.models import model
    from rrfp.train.settings import TrainSettings
    from tests.megatron.training import SMALL

    build = model.build_model

    def overlapping(*args: Any) -> Any:
        gpt = build(*args)
        gpt.config.overlap_p2p_comm, gpt.config.batch_p2p_comm = True, False
        # On the CPU nothing keeps what is still being sent.
        gpt.config.deallocate_pipeline_outputs = False
        return gpt

    model.build_model = overlapping  # type: ignore[assignment]
    chosen = TrainSettings(**{**SMALL, **settings})
    records: list[Record] = []
    with parallel_groups(chosen) as layout:
        plain = run_steps(chosen, layout)
        native = NativeSchedule(layout.pp_rank, records.append)
        schedules.get_forward_backward_func = lambda: native
        traced = run_steps(chosen, layout)
    return plain, traced, records


@pytest.mark.slow
def test_overlapping_transfers_are_recorded_and_learn_the_same() -> None:
    settings = {"pp": 3, "chunks": 2, "layers": 6, "microbatches": 6}
    for plain, traced, records in run_ranks(3, train_with_overlap, settings, timeout_s=200):
        assert traced == plain
        for step in range(3):
            of_step = [record for record in records if record.step == step]
            spans = [record for record in of_step if isinstance(record, TaskRecord | WaitRecord)]
            assert all(a.end_ns <= b.start_ns for a, b in pairwise(spans))
            num_waits = sum(isinstance(span, WaitRecord) for span in spans)
            # There is about one beginning of a transfer a task; the rest are waits for its end.
            assert num_waits > 1.5 * (len(spans) - num_waits)


def own(script: str, *arguments: str) -> str:
    """The output and log of a script of one process without torch.distributed."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_name_imported_before_is_replaced_and_a_missing_step_is_reported() -> None:
    told = own(
        """
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining as early
import rrfp.megatron
rrfp.megatron.trace_native()
print(early.__globals__["__name__"])
"""
    )
    assert told.startswith("rrfp.megatron.job.schedule_patches\n")
    assert "trace_native() saw no step and recorded nothing" in told


class Configured(torch.nn.Linear):
    """A model chunk."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.config = SimpleNamespace()


def test_without_torch_distributed_the_training_goes_on_with_one_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace = NativePatch(RecordingRequest("trace_native()"))
    for _ in range(3):
        arguments = {"model": [Configured()], "num_microbatches": 7}
        assert trace.run(lambda **of: [of["num_microbatches"]], arguments) == [7]
    told = capsys.readouterr().err
    assert told.startswith("rrfp: the run is not recorded, the training goes on: ")
    assert told.count("rrfp:") == 1


def test_repeated_failures_are_reported_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    own = RankInfo(1, 1, 0, 0, (1,), "h", 1)
    place = SimpleNamespace(pipeline=(0, 1), pp_rank=1)
    monkeypatch.setattr(recording, "place_in", lambda *_, **__: place)
    monkeypatch.setattr(recording, "step_groups", lambda *_: SimpleNamespace())
    path = RunDir(tmp_path).rank_records(1)

    def join(joining: JobRecording, *_: object, **__: object) -> None:
        joining.info = own
        joining._recorder = Recorder(path, own)
        for name in ("_order_file", "_assignments"):
            setattr(joining, name, StepFile(tmp_path / name, ()))

    monkeypatch.setattr(JobRecording, "_join", join)
    monkeypatch.setattr(NativeSchedule, "settle", fails)
    monkeypatch.setattr(NativeSchedule, "run", lambda _, schedule, *__: schedule())
    trace = NativePatch(RecordingRequest("trace_native()"))
    arguments = {"model": [Configured()], "num_microbatches": 7}
    for _ in range(3):
        assert trace.run(lambda **_: [3], arguments) == [3]
    assert trace._recording is not None
    assert trace._recording._order_file is trace._recording._assignments is None
    trace._recording.close()
    trace._recording.close()
    told = "rrfp: recording is switched off, the training goes on: \n"
    assert capsys.readouterr().err == told
    assert not is_being_written(path)


def test_a_megatron_that_is_not_installed_is_described(tmp_path: Path) -> None:
    def from_sources(package: str) -> str:
        raise PackageNotFoundError(package)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(description, "version", from_sources)
        describe_run(tmp_path / "run.json", {}, {}, 1, [])
    assert json.loads((tmp_path / "run.json").read_text())["versions"]["torch"] == "unknown"
