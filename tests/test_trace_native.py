"""`rrfp.megatron.trace_native()`: Megatron's own schedule recorded, and left as it is."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rrfp.analyze.bubbles import CAUSES, Bubbles, bubbles
from rrfp.analyze.frames import frames_of
from rrfp.analyze.whatif import what_if
from rrfp.errors import UsageError
from rrfp.interchange.files import import_run
from rrfp.schedule.orders import ORDERS
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.trace.check import check_contents
from rrfp.trace.perfetto_reader import read_contents
from rrfp.trace.records import Recording
from rrfp.trace.rundir import resolve_trace
from tests.fixtures.make_profiles import exported
from tests.native_runs import NativeRun, run_steps, train
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(400)


@dataclass(slots=True)
class Compared:
    """One rank's run without and with the recording, in one process."""

    plain: NativeRun
    traced: NativeRun


def train_twice(settings: dict[str, Any], out: Path) -> Compared:
    from rrfp.megatron.host import prepare_host

    prepare_host("cpu")
    from rrfp.megatron import install, trace_native
    from rrfp.megatron.parallel import parallel_groups
    from rrfp.megatron.settings import TrainSettings
    from tests.training import SMALL

    chosen = TrainSettings(**{**SMALL, **settings})
    with parallel_groups(chosen) as layout:
        plain = run_steps(chosen, layout)
        # Megatron is initialised by now.
        trace_native(out)
        with pytest.raises(UsageError, match="replaced Megatron's schedule"):
            trace_native(out)
        traced = run_steps(chosen, layout, exported)
        install()
        with pytest.raises(UsageError, match="replaced Megatron's schedule"):
            trace_native()
    return Compared(plain, traced)


def read_whole(run: Path) -> Recording:
    contents = read_contents(resolve_trace(run))
    assert check_contents(contents) == []
    return contents.recording


def check_run(num_ranks: int, settings: dict[str, Any], order: str, tmp_path: Path) -> None:
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
            assert found == ORDERS[order](shape).rows[rank_records.info.pp_rank]
    assert what_if(recording, lambda _: []).replay_error < 0.05

    for number, rank in enumerate(ranks):
        (tmp_path / f"{number}.json").write_text(json.dumps(rank.traced.profile))
    imported = import_run([tmp_path / f"{number}.json" for number in range(num_ranks)])
    check_same(bubbles(frames_of(recording), range(1, 3)), bubbles(frames_of(imported.recording)))


def check_same(own: Bubbles, imported: Bubbles) -> None:
    """To 1% of the window. What is told of the ranges' own time is overhead here or there."""
    near = 0.01 * own.window_ns
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
from tests.native_runs import train
logging.basicConfig(filename=sys.argv[2])
train({"pp": 2, "steps": 2}, Path(sys.argv[1]))
"""


def launched(tmp_path: Path, out: Path) -> str:
    """Run a script of two ranks under torchrun; what it logged."""
    script, log = tmp_path / "train.py", tmp_path / "log"
    script.write_text(SCRIPT)
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
            *("--local-addr", "127.0.0.1", script, out, log),
        ],
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=200,
    )
    return log.read_text()


@pytest.mark.slow
def test_the_trace_is_made_when_the_script_ends(tmp_path: Path) -> None:
    launched(tmp_path, tmp_path / "run")
    assert (tmp_path / "run" / "trace.pftrace").exists()
    assert not (tmp_path / "run" / "records").exists()
    assert len(read_whole(tmp_path / "run").ranks[1].tasks) == 2 * 8


@pytest.mark.slow
def test_a_run_that_cannot_be_recorded_goes_on(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    log = launched(tmp_path, tmp_path / "run")
    assert "the run is not recorded, the training goes on" in log
    assert "exists; choose another directory" in log
    assert not any((tmp_path / "run").iterdir())


def train_with_a_broken_recording(settings: dict[str, Any], out: Path) -> NativeRun:
    from rrfp.megatron import native

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
